"""Memory of each rank of one machine that all of its ranks can write."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

FIRST = 256  # bytes
FOLDER = "/dev/shm"  # in memory


class Unreachable(RuntimeError):
    """These ranks cannot write into each other's memory. All of them are told so."""


class Shared:
    """Memory of each rank of one machine that all of them can write: torch's symmetric memory on GPUs, files
    in memory on CPUs. Raises Unreachable, on all ranks, where they have none."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.handles: list[Any] = []  # the memory lives as long as they do
        self.outside = 0  # bytes of a GPU that torch's allocator does not see
        self._agree("" if len(set(self._told(_home()))) == 1 else "they are not on one machine")
        try:
            self.empty(FIRST)  # where they meet
            failed = ""
        except RuntimeError as error:  # of the driver: these GPUs have no way to each other
            failed = str(error).splitlines()[0]
        self._agree(failed)

    def empty(self, size: int) -> list[Tensor]:
        """So many bytes on each rank. All ranks must ask alike."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.stream is not None:
            # Each process may see its own GPU alone, as Ray has it, and then all call theirs the first.
            # Without a pool each call takes a block of its own.
            os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
            os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
            own = symmetric.empty(size, dtype=torch.uint8, device=self.device)
            handle = symmetric.rendezvous(own, self.group)
            self.handles.append((own, handle))
            self.outside += size
            _take_off(size, self.device)
            return [
                own if r == rank else handle.get_remote_tensor(r, (size,), torch.uint8) for r in range(ranks)
            ]
        named = [""]
        if rank == 0:
            named = [tempfile.mkdtemp(prefix="viva-ranks-", dir=FOLDER if os.path.isdir(FOLDER) else None)]
        dist.broadcast_object_list(named, group=self.group, group_src=0)
        paths = [f"{named[0]}/{r}" for r in range(ranks)]
        with open(paths[rank], "wb") as file:
            file.truncate(size)
        dist.barrier(self.group)
        memory = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
        dist.barrier(self.group)
        if rank == 0:
            shutil.rmtree(named[0])
        return memory

    def _told(self, mine: Any) -> list[Any]:
        """What each rank says."""
        all_of_them: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(all_of_them, mine, group=self.group)
        return all_of_them

    def _agree(self, objection: str) -> None:
        if found := next(filter(None, self._told(objection)), ""):
            raise Unreachable(found)

    def beside(self) -> AbstractContextManager[object]:
        """What is queued in here runs after the current stream's work so far, and beside what follows."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def meet(self) -> None:
        """The current stream goes on when all ranks have come to here, with all that they wrote."""
        if self.stream is None:
            dist.barrier(self.group)
            return
        with self.beside():
            self.handles[0][1].barrier()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


def _home() -> tuple[Any, ...]:
    """Equal of processes that can hand each other memory: of one kernel, to which their numbers mean the same
    and who see the same folder of temporary files, where their sockets are."""
    boot, numbers = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    folder = os.stat(tempfile.gettempdir())
    return (
        boot.read_text() if boot.exists() else platform.node(),  # not all have Linux's files
        os.readlink(numbers) if os.path.islink(numbers) else "",
        folder.st_dev,
        folder.st_ino,
    )


def _take_off(size: int, device: torch.device) -> None:
    """Of a process that is bound to a share of its GPU: torch's allocator does not see these bytes."""
    share = torch.cuda.get_per_process_memory_fraction(device)
    if share < 1:
        less = size / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0.0, share - less), device)
