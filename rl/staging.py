"""One rank's part of a checkpoint: copied to the host's memory while training stands still, written while it
goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from models.config import ModelConfig
from models.replica import own_part
from models.weights import expected_shapes

ALIGN = 64  # bytes: every tensor begins where a cache line does
TRAINER = "trainer"  # folder of the shards within a checkpoint


class Staging:
    """`stage`, then `write`, which may run in another thread beside training; then `stage` may come again.

    All ranks make one, and write, together. The memory is kept, on CUDA pinned: to pin it takes far longer
    than to copy into it. (torch's own stager pins anew each time in 2.11.)
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        """seconds: how long ranks wait for each other while they write."""
        self.device = device
        # What ranks say to each other while they write must not come between the messages of training, and
        # NCCL has no messages for hosts.
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self.mesh = DeviceMesh.from_group(self.group, "cpu")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.memory: Tensor | None = None
        self.staged: Any = None

    @torch.no_grad()
    def stage(self, state: Any) -> None:
        """Copy every tensor of a nest of dicts and lists, of DTensors this rank's shard. The nest has the
        same tensors each time. Ends when they are copied."""
        own = [own_part(x) for x in tree_leaves(state) if isinstance(x, Tensor)]
        sizes = [-(-x.nbytes // ALIGN) * ALIGN for x in own]
        if self.memory is None:
            self.memory = _host_memory(sum(sizes), pinned=self.stream is not None)
        places = iter(self.memory.split(sizes))
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.staged = tree_map_only(Tensor, lambda x: self._copy(x, places), state)
        if self.stream is not None:
            self.stream.synchronize()  # and not the device: weights may be under way to samplers

    def write(self, checkpoint: Path) -> None:
        """What was staged into checkpoint/trainer. Raises OSError naming the ranks that could not."""
        with _faults(f"cannot write {checkpoint / TRAINER}"):
            dcp.save(self.staged, checkpoint_id=checkpoint / TRAINER, process_group=self.group)

    def close(self) -> None:
        if self.memory is not None and self.stream is not None:
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostUnregister(self.memory.data_ptr()))
        self.memory = self.staged = None

    def _copy(self, x: Tensor, places: Iterator[Tensor]) -> Tensor:
        own = own_part(x)
        place = next(places)[: own.nbytes].view(own.dtype).view(own.shape)
        place.copy_(own, non_blocking=True)
        if not isinstance(x, DTensor):
            return place
        how = {"run_check": False, "shape": x.shape, "stride": x.stride()}
        return DTensor.from_local(place, self.mesh, x.placements, **how)


def read(checkpoint: Path, state: Any) -> None:
    """What was written, also by another number of ranks, into the tensors of `state`. All ranks together.
    Raises OSError where it cannot be read."""
    with _faults(f"cannot read {checkpoint / TRAINER}"):
        dcp.load(state, checkpoint_id=checkpoint / TRAINER)


def read_weights(checkpoint: Path, cfg: ModelConfig) -> dict[str, Tensor]:
    """The whole master weights, from what all ranks have written. Of one rank alone; raises as `read`."""
    weights = {name: torch.empty(shape) for name, shape in expected_shapes(cfg).items()}
    with _faults(f"cannot read {checkpoint / TRAINER}"):
        dcp.load({"model": weights}, checkpoint_id=checkpoint / TRAINER, no_dist=True)
    return weights


@contextmanager
def _faults(what: str) -> Iterator[None]:
    """torch's CheckpointException is no Exception: it would pass by whoever hands errors on."""
    try:
        yield
    except CheckpointException as error:
        told = "; ".join(f"rank {rank}: {fault!r}" for rank, (fault, _) in error.failures.items())
        raise OSError(f"{what}: {told}") from None


def _host_memory(size: int, *, pinned: bool) -> Tensor:
    """Bytes. Registered, as torch's allocator of pinned memory rounds up to a power of two."""
    memory = torch.empty(size, dtype=torch.uint8)
    if pinned:
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), size, 0))
    return memory
