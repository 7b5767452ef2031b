"""A head sharded over ranks that have their own tokens learns what one head with all tokens learns."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from losses.linear_logp import linear_logp
from losses.linear_loss import linear_loss, separable
from losses.linear_row_loss import linear_row_loss

RANKS, T, D, V = 2, 4, 3, 7


def problem() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((RANKS * T, D), (V, D)))
    return h, w, torch.randint(V, (RANKS * T,), generator=g)


def losses(h: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
    ones = torch.ones(len(h), dtype=torch.float64)

    def row_loss(z: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return z.log_softmax(-1).gather(1, y[:, None])[:, 0], {}

    return [
        linear_logp(h, w, y, chunk=2)[0].sum(),
        linear_loss(h, w, y, ones, separable(lambda logp: (logp, {})), chunk=2)[0],
        linear_row_loss(h, w, ones, row_loss, y, chunk=2)[0],
    ]


def one_rank(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store, patience = f"file://{folder}/store", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=patience)
    h, w, y = problem()
    own = slice(rank * T, (rank + 1) * T)
    head: Any = distribute_tensor(w, init_device_mesh("cpu", (RANKS,)), [Shard(0)]).requires_grad_()
    got: list[Any] = [torch.autograd.grad(loss, head)[0] for loss in losses(h[own], head, y[own])]
    assert all(g.placements == head.placements for g in got)
    torch.save([g.full_tensor() for g in got], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_gradients_of_a_sharded_head_are_the_sum_over_ranks_in_its_own_shards(tmp_path: Path) -> None:
    other = torch.multiprocessing.get_context("spawn").Process(target=one_rank, args=(1, str(tmp_path)))
    other.start()
    one_rank(0, str(tmp_path))
    other.join(120)
    assert other.exitcode == 0
    h, w, y = problem()
    w.requires_grad_()
    want = [torch.autograd.grad(loss, w)[0] for loss in losses(h, w, y)]
    for rank in range(RANKS):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), want)
