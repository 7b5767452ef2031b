"""How ranks hand each other rows of gradients and of weights: in messages, or into each other's memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor, nn

Way = Literal["auto", "messages", "memory"]
ALIGNED = 256  # bytes
SHARED = "/dev/shm"  # a folder in memory


class Unreachable(RuntimeError):
    """These ranks cannot write into each other's memory. All of them are told so."""


def make_exchange(working: Sequence[nn.Parameter], group: dist.ProcessGroup, way: Way) -> Exchange:
    """auto: GPUs write into each other's memory where they can. Raises Unreachable for `memory` where they
    cannot."""
    reason = ""
    if way == "memory" or (way == "auto" and working[0].is_cuda):
        try:
            return Writes(working, group, Shared(group, working[0].device))
        except Unreachable as error:
            if way == "memory":
                raise
            reason = f", as {error}"
    return Messages(working, group, reason)


class Exchange(ABC):
    """Of parameters that all ranks have whole, and whose rows are dealt to them: `rows[i][r]`, views.

    All ranks call it alike. What `gradients` and `weights` bring is there after `wait`.
    """

    said: str  # how, for a person

    def __init__(self, working: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.peers = [r for r in range(self.ranks) if r != self.rank]
        self.rows = [rows_of(w.detach(), self.ranks) for w in working]

    @property
    def outside(self) -> int:
        """Bytes on this rank's GPU that torch's allocator does not see."""
        return 0

    @abstractmethod
    def gradients(self, unit: Sequence[int], whole: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, ...]]:
        """Of the parameters of a unit: this rank's `whole` ones to all, and every rank's of this rank's rows,
        by rank. `whole` must live until they are there, and they are good until the next `wait`."""

    @abstractmethod
    def weights(self, unit: Sequence[int]) -> None:
        """This rank's rows to all, and theirs into `rows`."""

    @abstractmethod
    def wait(self) -> None:
        """The current stream waits; the host too where there is none."""

    @abstractmethod
    def meet(self) -> None:
        """What follows is sent when all ranks have done what they were told before."""


class Messages(Exchange):
    """All that a unit has for a rank is one message: to lay it side by side takes less than many short
    messages cost. Between any machines; on GPUs it takes multiprocessors from the matmuls."""

    def __init__(self, working: Sequence[nn.Parameter], group: dist.ProcessGroup, reason: str = "") -> None:
        super().__init__(working, group)
        self.said = f"in messages{reason}"
        self.works: list[dist.Work] = []
        self.messages: list[Tensor] = []  # must live until they have come
        self.landing: list[tuple[Tensor, Tensor]] = []  # rows of others, and where they come

    def gradients(self, unit: Sequence[int], whole: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, ...]]:
        by_rank = list(zip(*(rows_of(whole[i], self.ranks) for i in unit), strict=True))
        mine = by_rank[self.rank]
        came = self._swap({r: _flat(by_rank[r]) for r in self.peers}, dict.fromkeys(self.peers, mine))
        came[self.rank] = mine
        pieces = zip(*(came[r] for r in range(self.ranks)), strict=True)
        return dict(zip(unit, pieces, strict=True))

    def weights(self, unit: Sequence[int]) -> None:
        rows = {r: [self.rows[i][r] for i in unit] for r in range(self.ranks)}
        came = self._swap(dict.fromkeys(self.peers, _flat(rows[self.rank])), rows)
        self.landing += [pair for r in self.peers for pair in zip(rows[r], came[r], strict=True)]

    def _swap(
        self, sends: Mapping[int, Tensor], like: Mapping[int, Sequence[Tensor]]
    ) -> dict[int, Sequence[Tensor]]:
        """A message to each other rank, and from each the tensors that its message brings, shaped as those of
        `like`, which are there after `wait`. NCCL makes one kernel of all. Nothing empty travels."""
        comes = {r: like[r][0].new_empty(sum(x.numel() for x in like[r])) for r in self.peers}
        ops = []
        for r in self.peers:
            for op, message in ((dist.isend, sends[r]), (dist.irecv, comes[r])):
                if message.numel():
                    ops.append(dist.P2POp(op, message, group=self.group, group_peer=r))
        if ops:
            self.works += dist.batch_isend_irecv(ops)
            self.messages += [op.tensor for op in ops]
        return {r: _parted(comes[r], like[r]) for r in self.peers}

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.landing:
            torch._foreach_copy_([to for to, _ in self.landing], [came for _, came in self.landing])
        self.works, self.messages, self.landing = [], [], []

    def meet(self) -> None:
        """A message lands in memory of its own: nobody is waited for."""


class Writes(Exchange):
    """Ranks of one machine write into each other's memory: copy engines do it, beside the matmuls.

    The working weights move into memory that all ranks can write. Gradients land in memory that is taken when
    the first come, in their dtype: of a rank's rows from each other rank.
    """

    said = "into each other's memory"

    def __init__(self, working: Sequence[nn.Parameter], group: dist.ProcessGroup, shared: Shared) -> None:
        self.shared = shared
        sizes = [w.shape for w in working]
        memory = self.shared.empty(_span(sizes, working[0].dtype))
        self.copies = [_laid(part, sizes, working[0].dtype) for part in memory]  # of all weights, by rank
        for w, place in zip(working, self.copies[dist.get_rank(group)], strict=True):
            w.data = place.copy_(w.detach())
        super().__init__(working, group)
        self.landing: dict[torch.dtype, list[list[list[Tensor]]]] = {}
        self.pending = False  # whether anything was written that has not been waited for

    def gradients(self, unit: Sequence[int], whole: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, ...]]:
        dtype = whole[unit[0]].dtype
        if dtype not in self.landing:
            self.landing[dtype] = self._land(dtype)
        landing, self.pending = self.landing[dtype], True
        with self.shared.beside():
            for i in unit:
                for r in self.peers:
                    landing[r][self.rank][i].copy_(rows_of(whole[i], self.ranks)[r], non_blocking=True)
        here, mine = landing[self.rank], {i: rows_of(whole[i], self.ranks)[self.rank] for i in unit}
        return {i: tuple(mine[i] if r == self.rank else here[r][i] for r in range(self.ranks)) for i in unit}

    def weights(self, unit: Sequence[int]) -> None:
        self.pending = True
        with self.shared.beside():
            for i in unit:
                mine = self.rows[i][self.rank]
                for r in self.peers:
                    rows_of(self.copies[r][i], self.ranks)[self.rank].copy_(mine, non_blocking=True)

    @property
    def outside(self) -> int:
        return self.shared.outside

    def wait(self) -> None:
        if self.pending:
            self.meet()

    def meet(self) -> None:
        self.shared.meet()
        self.pending = False

    def _land(self, dtype: torch.dtype) -> list[list[list[Tensor]]]:
        """[at rank][from rank][parameter]: the former's rows."""
        sizes = [[rows[r].shape for rows in self.rows] for r in range(self.ranks)]
        each = max(_span(of, dtype) for of in sizes)
        memory = [iter(at.split(each)) for at in self.shared.empty(each * len(self.peers))]
        return [
            [[] if r == at else _laid(next(memory[at]), sizes[at], dtype) for r in range(self.ranks)]
            for at in range(self.ranks)
        ]


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
            self.empty(ALIGNED)  # where they meet
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
            named = [tempfile.mkdtemp(prefix="viva-ranks-", dir=SHARED if os.path.isdir(SHARED) else None)]
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
    folder = os.stat(tempfile.gettempdir())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return boot, os.readlink("/proc/self/ns/pid"), folder.st_dev, folder.st_ino


def _take_off(size: int, device: torch.device) -> None:
    """Of a process that is bound to a share of its GPU: torch's allocator does not see these bytes."""
    share = torch.cuda.get_per_process_memory_fraction(device)
    if share < 1:
        less = size / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0.0, share - less), device)


def rows_of(whole: Tensor, ranks: int) -> list[Tensor]:
    """Views of the rows of each rank, maybe none."""
    n = len(whole)
    each = -(-n // ranks)
    return [whole[min(n, r * each) : min(n, (r + 1) * each)] for r in range(ranks)]


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in parts])


def _parted(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a message of such tensors side by side."""
    parts = message.split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def _span(shapes: Sequence[torch.Size], dtype: torch.dtype) -> int:
    """Bytes of tensors of these shapes, each aligned."""
    return sum(-(-shape.numel() * dtype.itemsize // ALIGNED) * ALIGNED for shape in shapes)


def _laid(memory: Tensor, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
    """Views of bytes as tensors of these shapes, each aligned."""
    parts = memory.split([*(_span([s], dtype) for s in shapes), len(memory) - _span(shapes, dtype)])
    return [
        part[: s.numel() * dtype.itemsize].view(dtype).view(s) for part, s in zip(parts, shapes, strict=False)
    ]
