"""An engine's end: from a parcel to tensors on its device."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from models.config import ModelConfig
from rl.wire.flat import buckets, dtype_of, views
from rl.wire.group import Group, GroupError
from rl.wire.parcel import Broadcast, Mapped

DEVICE_ARGUMENT = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")


class Inbox:
    """Of one process. Groups and mappings are opened by the first parcel that needs them, and kept.

    rank: of this process among those of its engine.
    """

    def __init__(self, cfg: ModelConfig, device: torch.device, rank: int = 0) -> None:
        self.cfg, self.device, self.rank = cfg, device, rank
        self.group: Group | None = None
        self.mapped: tuple[bytes, dict[str, Tensor]] | None = None
        self.parts: list[tuple[Tensor, dict[str, Tensor]]] = []  # of one buffer: a bucket, its tensors

    def receive(self, parcel: Broadcast | Mapped) -> Iterator[dict[str, Tensor]]:
        """Every tensor whole, bucket by bucket, each good until the next is asked for. On CUDA they come in
        the order of the current stream. Raises GroupError, ValueError.

        Few calls for many tensors: each has to wait for Python's lock, which an engine beside it holds.
        """
        if isinstance(parcel, Mapped):
            yield self._open(parcel)
        else:
            yield from self._broadcast(parcel)

    def _broadcast(self, address: Broadcast) -> Iterator[dict[str, Tensor]]:
        if self.group is None or self.group.address != address:
            self.drop()
            self.group = Group(address, 1 + self.rank, self.device)
        if not self.parts:
            spans = buckets(self.cfg)
            buffer = torch.empty(max(b - a for a, b in spans), dtype=dtype_of(self.cfg), device=self.device)
            self.parts = [(buffer[: b - a], views(buffer[: b - a], self.cfg, a)) for a, b in spans]
        try:
            for part, tensors in self.parts:
                self.group.broadcast(part)
                yield tensors
            self.group.finish()
        except GroupError:
            self.group = None
            raise

    def _open(self, parcel: Mapped) -> dict[str, Tensor]:
        if self.mapped is None or self.mapped[0] != parcel.handle:
            own = gpu_of(self.device)
            if parcel.gpu != own:
                raise ValueError(f"Inbox: the weights lie on {parcel.gpu}, this engine on {own or 'the CPU'}")
            rebuild, arguments = pickle.loads(parcel.handle)
            arguments = list(arguments)
            arguments[DEVICE_ARGUMENT] = self.device.index or 0  # as this process counts its devices
            self.mapped = parcel.handle, views(rebuild(*arguments), self.cfg)
        return self.mapped[1]

    def drop(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None


def gpu_of(device: torch.device) -> str:
    """UUID of the device, "" of a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
