"""How ranks hand each other rows of gradients and of weights: in messages, or into each other's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.shared import Shared, Unreachable

Way = Literal["auto", "messages", "memory"]
ALIGNED = 256  # bytes
MESSAGE = 2**28  # bytes: what NCCL needs between two H200s to come near their link's rate


def make_exchange(
    working: Sequence[nn.Parameter], group: dist.ProcessGroup, way: Way, message: int = MESSAGE
) -> Exchange:
    """auto: GPUs write into each other's memory where they can. Raises Unreachable for `memory` where they
    cannot. message: bytes, at least, of a message."""
    reason = ""
    if way == "memory" or (way == "auto" and working[0].is_cuda):
        try:
            return Writes(working, group, Shared(group, working[0].device))
        except Unreachable as error:
            if way == "memory":
                raise
            reason = f", as {error}"
    return Messages(working, group, message, reason)


class Exchange(ABC):
    """Of parameters that all ranks have whole, and whose rows are dealt to them: `rows[i][r]`, views.

    All ranks call it alike. What `gradients` and `weights` bring is there after `wait`.
    """

    said: str  # how, for a person
    least: int  # bytes for a rank that are worth a call of their own

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

    def __init__(
        self, working: Sequence[nn.Parameter], group: dist.ProcessGroup, message: int, reason: str = ""
    ) -> None:
        super().__init__(working, group)
        self.said, self.least = f"in messages{reason}", message
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

    said, least = "into each other's memory", 0

    def __init__(self, working: Sequence[nn.Parameter], group: dist.ProcessGroup, shared: Shared) -> None:
        self.shared = shared
        sizes = [w.shape for w in working]
        memory = self.shared.empty(_span(sizes, working[0].dtype))
        copies = [_laid(part, sizes, working[0].dtype) for part in memory]  # of all weights, by rank
        for w, place in zip(working, copies[dist.get_rank(group)], strict=True):
            w.data = place.copy_(w.detach())
        super().__init__(working, group)
        whole = [[copies[r][i] for r in self.peers] for i in range(len(working))]
        self.theirs = [[rows_of(w, self.ranks)[self.rank] for w in of] for of in whole]  # this rank's rows
        self.landing: dict[torch.dtype, list[list[list[Tensor]]]] = {}
        self.pending = False  # whether anything was written that has not been waited for

    def gradients(self, unit: Sequence[int], whole: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, ...]]:
        dtype = whole[unit[0]].dtype
        if dtype not in self.landing:
            self.landing[dtype] = self._land(dtype)
        landing, self.pending = self.landing[dtype], True
        rows = {i: rows_of(whole[i], self.ranks) for i in unit}
        with self.shared.beside():
            for i in unit:
                for r in self.peers:
                    landing[r][self.rank][i].copy_(rows[i][r], non_blocking=True)
        here = landing[self.rank]
        return {
            i: tuple(rows[i][r] if r == self.rank else here[r][i] for r in range(self.ranks)) for i in unit
        }

    def weights(self, unit: Sequence[int]) -> None:
        self.pending = True
        with self.shared.beside():
            for i in unit:
                for there in self.theirs[i]:
                    there.copy_(self.rows[i][self.rank], non_blocking=True)

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


def rows_of(whole: Tensor, ranks: int) -> list[Tensor]:
    """Views of the rows of each rank, maybe none."""
    n = whole.shape[0]
    parts = list(whole.split(max(1, -(-n // ranks))))
    return [*parts, *(whole[n:] for _ in range(ranks - len(parts)))]


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
