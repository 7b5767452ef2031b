"""One sender and one engine's processes, joined for broadcasts: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl.wire.parcel import Broadcast

FOREVER = timedelta(days=365)  # NCCL's own watchdog would end the whole process; `finish` has the deadline
NAP = 2e-4  # seconds between looks


class GroupError(RuntimeError):
    """The others did not come or went away. The group is of no more use."""


class Group:
    """A process group apart from torch's default one, so that its end is nobody else's.

    Raises GroupError where the others are not there in time.
    """

    def __init__(self, address: Broadcast, rank: int, device: torch.device) -> None:
        self.address, self.device, wait = address, device, timedelta(seconds=address.seconds)
        try:
            store = dist.TCPStore(address.host, address.port, is_master=False, timeout=wait)
            self.store = dist.PrefixStore(address.key, store)
            self.store.set(f"here/{rank}", "")
            self.store.wait([f"here/{i}" for i in range(address.size)], wait)
            self.pg = self._join(rank, wait)
        except RuntimeError as error:  # torch's DistError is one
            raise GroupError(f"{address.key}: the {address.size} ranks did not meet: {error}") from error

    def _join(self, rank: int, wait: timedelta) -> Any:  # what torch's type hints do not call a ProcessGroup
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = FOREVER
            return dist.ProcessGroupNCCL(self.store, rank, self.address.size, options)
        return dist.ProcessGroupGloo(self.store, rank, self.address.size, wait)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's bytes into everybody's contiguous tensor, in the order of the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            self.pg.broadcast([tensor.view(torch.uint8)], options).wait()
        except RuntimeError as error:
            raise GroupError(f"{self.address.key}: {error}") from error

    def finish(self) -> None:
        """Wait until all broadcasts have arrived. Raises GroupError after the address's seconds."""
        if self.device.type != "cuda":
            return
        arrived = torch.cuda.Event()
        arrived.record()
        until = time.monotonic() + self.address.seconds
        while not arrived.query():
            if time.monotonic() > until:
                self.close()
                raise GroupError(f"{self.address.key}: no end within {self.address.seconds:g} s")
            time.sleep(NAP)

    def close(self) -> None:
        """End what is under way here; the others notice at their own deadline."""
        if self.device.type == "cuda":
            self.pg.abort()
