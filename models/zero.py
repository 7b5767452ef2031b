"""Mixed precision on several ranks: all hold all working weights, each a share of masters and moments.

"ZeRO: memory optimizations toward training trillion parameter models", Rajbhandari et al. 2020, stage 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from models.replica import Held, Replica, summed


class Zero(Replica):
    """A replica whose masters are DTensors, rows dealt as FSDP2 deals them: ceil(n / ranks) to each.

    In the backward of a micro-batch that exchanges, every rank sends the others their rows of its gradient as
    soon as a unit's is complete, units from the last to the first, in the gradient's own dtype; without
    `overlap` only when all are, as what sends takes multiprocessors from the matmuls. Who steps a row
    adds what came in float32, the same sum as a float32 reduction of the same gradients makes. After its
    step a row goes, rounded, to all ranks, while the rows of the next unit are stepped. Nothing else travels:
    with bfloat16 2 + 2 bytes a parameter and rank, each (1 - 1 / ranks) of them, in place and in no buffer.

    All ranks must call `micro` alike, and a forward after each write to the masters: the first one gathers
    them. A rank without a gradient of a parameter counts as zero there, and the parameter is stepped.

    Bytes a parameter, in bfloat16, on each of W ranks: 2 + (4 + 8) / W; its gradient 2, or 4 where
    micro-batches add up before they are exchanged; what came that of 1 - 1 / W of a gradient.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, *, mesh: DeviceMesh, units: Sequence[nn.Module],
        overlap: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model, dtype)
        self.overlap = overlap
        self.group, self.rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        with torch.no_grad():
            self.masters = [_share(p, mesh) for p in self.masters]
            self.rows = [rows_of(w.detach(), ranks) for w in self.working]  # of all working weights, by rank
        self.rest()
        self.rounded = []  # ranks may have begun with different weights
        unit_of = {module: i for i, unit in enumerate(units) for module in unit.modules()}
        backwards = groupby(reversed(range(len(self.slots))), lambda i: unit_of.get(self.slots[i][0]))
        self.units = [list(unit) for _, unit in backwards]
        for i, w in enumerate(self.working):
            w.register_post_accumulate_grad_hook(partial(self._accumulated, i))
        self.works: list[dist.Work] = []
        self.totals: dict[int, Tensor] = {}
        self._begin()

    def micro(self, exchange: bool) -> None:
        if self.exchanging:
            self._settle()
        self.exchanging = exchange
        self.adding |= not exchange

    def gradients(self) -> list[list[Held]]:
        """Of this rank's rows. Ranks must have exchanged them."""
        if not self.exchanging:
            raise ValueError("gradients: the last micro-batch of a step must be one that exchanges")
        self._exchange_rest()
        if self.totals:
            self._settle()
        grads = {i: (g,) for i, g in self.totals.items()} or self.pieces
        return [
            [Held(self.masters[i], self.rows[i][self.rank], grads[i]) for i in unit] for unit in self.units
        ]

    def over_ranks(self, total: Tensor) -> Tensor:
        dist.all_reduce(total, group=self.group)
        return total

    def written(self, i: int) -> None:
        self._spread(self.units[i])
        self.sent += 1

    def stepped(self) -> None:
        assert self.sent == len(self.units), "some rows have been stepped and not sent"
        self._wait()
        super().stepped()

    def forget(self) -> None:
        super().forget()
        self._wait()
        self.totals = {}
        self._begin()

    def _begin(self) -> None:
        """No gradient since the last exchange."""
        self.exchanging = self.adding = False  # whether this micro-batch does; whether there are several
        self.whole: dict[int, Tensor] = {}  # this rank's gradients of whole parameters
        self.pieces: dict[int, tuple[Tensor, ...]] = {}  # all ranks' gradients of this rank's rows
        self.complete: set[int] = set()  # parameters, in the backward that exchanges
        self.exchanged = 0  # units
        self.sent = 0  # units

    def _accumulated(self, i: int, working: Tensor) -> None:
        """The gradient of a parameter is complete in this backward."""
        grad, working.grad = working.grad, None
        assert grad is not None
        if not (self.exchanging or self.adding):
            raise ValueError("backward: call sync_gradients before the forward of each micro-batch")
        if not self.adding:
            assert i not in self.whole, "a second backward in one micro-batch"
            self.whole[i] = grad
        elif i in self.whole:
            self.whole[i].add_(grad)
        else:
            self.whole[i] = grad.float()
        if self.exchanging:
            self.complete.add(i)
            ready = self.complete if self.overlap else ()
            while self.exchanged < len(self.units) and set(self.units[self.exchanged]).issubset(ready):
                self._exchange()

    def _exchange(self) -> None:
        """Send and receive the next unit's gradient: in one order on all ranks, whatever theirs."""
        sends, receives = [], []
        for i in self.units[self.exchanged]:
            if i not in self.whole:
                dtype = torch.float32 if self.adding else self.working[i].dtype
                self.whole[i] = torch.zeros_like(self.working[i], dtype=dtype, requires_grad=False)
            parts = rows_of(self.whole[i], len(self.rows[i]))
            mine = parts[self.rank]
            pieces = [mine if r == self.rank else torch.empty_like(mine) for r in range(len(parts))]
            self.pieces[i] = tuple(pieces)
            sends.append(parts)
            receives.append(pieces)
        self._swap(sends, receives)
        self.exchanged += 1

    def _exchange_rest(self) -> None:
        while self.exchanged < len(self.units):
            self._exchange()
        self._wait()

    def _settle(self) -> None:
        """Add what was exchanged to what was before."""
        self._exchange_rest()
        for i, pieces in self.pieces.items():
            total = self.totals.get(i)
            self.totals[i] = summed(pieces if total is None else (total, *pieces))
        self._begin()

    @torch.no_grad()
    def _round(self) -> None:
        local = [m.to_local() for m in self.masters if isinstance(m, DTensor)]
        torch._foreach_copy_([rows[self.rank] for rows in self.rows], local)
        for unit in self.units:
            self._spread(unit)
        self._wait()

    def _spread(self, unit: Sequence[int]) -> None:
        """This rank's rows of working weights to all, and theirs into their places."""
        rows = [self.rows[i] for i in unit]
        self._swap([[r[self.rank]] * len(r) for r in rows], rows)

    def _swap(self, sends: Iterable[Sequence[Tensor]], receives: Iterable[Sequence[Tensor]]) -> None:
        """For each parameter, to each rank its tensor and from each rank its; NCCL makes one kernel of all.

        Tensors must live until `_wait`. Rows that are none do not travel.
        """
        ops = []
        for to, by in zip(sends, receives, strict=True):
            for peer in range(len(to)):
                if peer != self.rank and to[peer].numel():
                    ops.append(dist.P2POp(dist.isend, to[peer], group=self.group, group_peer=peer))
                if peer != self.rank and by[peer].numel():
                    ops.append(dist.P2POp(dist.irecv, by[peer], group=self.group, group_peer=peer))
        if ops:
            self.works += dist.batch_isend_irecv(ops)

    def _wait(self) -> None:
        """The current stream waits; the host too where there is none."""
        for work in self.works:
            work.wait()
        self.works = []


def rows_of(whole: Tensor, ranks: int) -> list[Tensor]:
    """Views of the rows of each rank, maybe none."""
    n = len(whole)
    each = -(-n // ranks)
    return [whole[min(n, r * each) : min(n, (r + 1) * each)] for r in range(ranks)]


def _share(p: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    mine = rows_of(p.detach(), mesh.size())[mesh.get_local_rank()].clone()
    shards = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
    return nn.Parameter(shards)
