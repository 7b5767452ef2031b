"""Mixed precision on several ranks: all hold all working weights, each a share of masters and moments.

"ZeRO: memory optimizations toward training trillion parameter models", Rajbhandari et al. 2020, stage 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from models.exchange import MESSAGE, Way, make_exchange, rows_of
from models.replica import Held, Replica, summed


class Zero(Replica):
    """A replica whose masters are DTensors, rows dealt as FSDP2 deals them: ceil(n / ranks) to each.

    In the backward of a micro-batch that exchanges, every rank sends the others their rows of its gradient as
    soon as a unit's is complete, units from the last to the first, in the gradient's own dtype; without
    `overlap` only when all are, as what sends takes multiprocessors from the matmuls. Who steps a row
    adds what came in float32, the same sum as a float32 reduction of the same gradients makes. After its
    step a row goes, rounded, to all ranks, while the rows of the next unit are stepped. Nothing else travels:
    with bfloat16 2 + 2 bytes a parameter and rank, each (1 - 1 / ranks) of them. A unit is one message to
    each rank, so neighbours are joined until what they have for a rank fills `message` bytes. GPUs of one
    machine write into each other's memory instead, unless `exchange` says otherwise: no messages then.

    All ranks must call `micro` alike, and a forward after each write to the masters: the first one gathers
    them. A rank without a gradient of a parameter counts as zero there, and the parameter is stepped.

    Bytes a parameter, in bfloat16, on each of W ranks: 2 + (4 + 8) / W; its gradient 2, or 4 where
    micro-batches add up before they are exchanged; what goes and what comes 1 - 1 / W of that each.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, *, mesh: DeviceMesh, units: Sequence[nn.Module],
        overlap: bool = True, message: int = MESSAGE, exchange: Way = "auto",
    ) -> None:  # fmt: skip
        super().__init__(model, dtype)
        self.overlap = overlap
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        with torch.no_grad():
            self.masters = [_share(p, mesh) for p in self.masters]
            self.exchange = make_exchange(self.working, self.group, exchange, message)
        self.rest()
        self.outdated()  # ranks may have begun with different weights
        unit_of = {module: i for i, unit in enumerate(units) for module in unit.modules()}
        backwards = groupby(reversed(range(len(self.slots))), lambda i: unit_of.get(self.slots[i][0]))
        self.units = self._joined([list(unit) for _, unit in backwards], self.exchange.least)
        for i, w in enumerate(self.working):
            w.register_post_accumulate_grad_hook(partial(self._accumulated, i))
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
        rows = self.exchange.rows
        return [[Held(self.masters[i], rows[i][self.rank], grads[i]) for i in unit] for unit in self.units]

    def over_ranks(self, total: Tensor) -> Tensor:
        dist.all_reduce(total, group=self.group)
        return total

    def written(self, i: int) -> None:
        self.exchange.weights(self.units[i])
        self.sent += 1

    def stepped(self) -> None:
        assert self.sent == len(self.units), "some rows have been stepped and not sent"
        self.exchange.wait()
        super().stepped()

    def forget(self) -> None:
        super().forget()
        self.exchange.wait()
        if self.pieces:
            self.exchange.meet()  # they may lie where the next ones come
        self.totals = {}
        self._begin()

    def _fold(self) -> None:
        """Nothing: gradients are taken as soon as they are complete."""

    def _joined(self, units: Sequence[list[int]], least: int) -> list[list[int]]:
        joined: list[list[int]] = []
        room = 0
        for unit in units:
            if room <= 0:
                joined.append([])
                room = least
            joined[-1] += unit
            room -= sum(self.working[i].nbytes for i in unit) // self.ranks
        return joined

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
        unit = self.units[self.exchanged]
        for i in unit:
            if i not in self.whole:
                dtype = torch.float32 if self.adding else self.working[i].dtype
                self.whole[i] = torch.zeros_like(self.working[i], dtype=dtype, requires_grad=False)
        self.pieces |= self.exchange.gradients(unit, self.whole)
        self.exchanged += 1

    def _exchange_rest(self) -> None:
        while self.exchanged < len(self.units):
            self._exchange()
        self.exchange.wait()

    def _settle(self) -> None:
        """Add what was exchanged to what was before."""
        self._exchange_rest()
        for i, pieces in self.pieces.items():
            total = self.totals.get(i)
            self.totals[i] = summed(pieces if total is None else (total, *pieces))
        self.exchange.meet()
        self._begin()

    @torch.no_grad()
    def _round(self) -> None:
        local = [m.to_local() for m in self.masters if isinstance(m, DTensor)]
        torch._foreach_copy_([rows[self.rank] for rows in self.exchange.rows], local)
        self.exchange.meet()  # others may still compute with what they have
        for unit in self.units:
            self.exchange.weights(unit)
        self.exchange.wait()


def leaves_room(n: int, dtype: torch.dtype, ranks: int, memory: float) -> bool:
    """Whether n parameters leave two fifths of each rank's memory (bytes) to activations: weights, gradients,
    those of other ranks for its rows, masters and moments."""
    return n * (dtype.itemsize * (3 - 1 / ranks) + 12 / ranks) <= 0.6 * memory


def _share(p: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    mine = rows_of(p.detach(), mesh.size())[mesh.get_local_rank()].clone()
    shards = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
    return nn.Parameter(shards)
