"""The Triton kernel does what rows_torch does: on CUDA, or with TRITON_INTERPRET=1 on a CPU."""

from __future__ import annotations

import itertools
import math
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from losses.grpo import grpo_loss
from losses.linear_loss import linear_loss, rows_torch, separable
from losses.linear_rows import has_triton, rows_triton, scale_triton, triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUDA = DEVICE.type == "cuda"
runs = pytest.mark.skipif(
    not has_triton(DEVICE) and not (triton and os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs triton, and CUDA or TRITON_INTERPRET=1",
)
small = partial(rows_triton, lanes=16, warps=1, stages=2)  # steps of 128 columns
SCALES = [(1.0, None, 1.0), (0.5, None, 0.7), (1.0, 3.0, 1.2)]


def problem(v: int, dtype: torch.dtype, biased: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits with -inf among them, one row of nothing else; targets, one unknown, one at -inf; a bias."""
    g = torch.Generator().manual_seed(0)
    a = (4 * torch.randn(6, v, generator=g)).to(dtype)
    y = torch.randint(v, (6,), generator=g)
    a[:, 3], a[4], y[1], y[2] = -math.inf, -math.inf, -1, 3
    return a.to(DEVICE), y.to(DEVICE), torch.randn(v, generator=g).to(DEVICE) if biased else None


def ids_of(v: int) -> Tensor:
    """Distinct, with unused slots, a row of them, one at -inf, and the target of row 0."""
    ids = torch.rand(6, v, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :5]
    ids[0, 1], ids[1, 2], ids[3], ids[5, 4] = problem(v, torch.float32, False)[1][0], -1, -1, 3
    return ids.to(DEVICE)


@runs
@pytest.mark.parametrize("v", [100, 128, 300])
@pytest.mark.parametrize(("scales", "biased"), list(itertools.product(SCALES, [False, True])), ids=str)
@pytest.mark.parametrize("topk", [False, True])
def test_statistics_and_gradients_are_those_of_torch(v: int, scales: Any, biased: bool, topk: bool) -> None:
    a, y, bias = problem(v, torch.float32, biased)
    ids = ids_of(v) if topk else None
    some = torch.arange(6, device=DEVICE) != 4
    g, g_h, g_rest = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    g_k = torch.randn(6, 5, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    seen = rows_torch(a, None, y, ids, bias, scales)
    before = a.clone()
    got_seen = small(before, None, y, ids, bias, scales)
    for got, want in zip(got_seen, seen, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            torch.testing.assert_close(got[some], want[some], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_seen[0], seen[0], rtol=1e-5, atol=1e-5)
    for tilt in (None, g_h):
        want, got = torch.empty_like(a), before.clone()
        grads = (g, tilt, g_k, g_rest) if topk else (g, tilt, None, None)
        rows_torch(a, want, y, ids, bias, scales, seen, grads)
        small(got, got, y, ids, bias, scales, got_seen, grads)
        torch.testing.assert_close(got[some], want[some], rtol=1e-4, atol=1e-5)
    if not topk:
        assert torch.equal(before, a)
        want, got = torch.empty_like(a), a.clone()
        rows_torch(a, want, y, None, bias, scales)
        torch.testing.assert_close(small(got, got, y, None, bias, scales)[0], seen[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[some], want[some], rtol=1e-4, atol=1e-5)


@runs
def test_nan_in_a_row_shows_in_its_statistics_and_nowhere_else() -> None:
    a, y, _ = problem(300, torch.float32, False)
    a[0, 200] = math.nan
    lse, *_ = small(a, None, y, None, None, (1.0, None, 1.0))
    assert lse[0].isnan() and not lse[1:].isnan().any()


@runs
@pytest.mark.parametrize(("entropy", "topk"), list(itertools.product([False, True], repeat=2)))
def test_the_loss_and_its_gradients_are_those_of_torch_in_bfloat16(entropy: bool, topk: bool) -> None:
    g = torch.Generator().manual_seed(0)
    h, w = ((torch.randn(*s, generator=g)).bfloat16().to(DEVICE).requires_grad_() for s in ((9, 8), (300, 8)))
    y, adv = torch.randint(300, (9,), generator=g).to(DEVICE), torch.randn(9, generator=g).to(DEVICE)
    ids = torch.rand(9, 300, generator=g).argsort(-1)[:, :3].to(DEVICE)
    ids[0, 0], ids[1, 1], ids[2] = y[0], -1, -1

    def loss_of(logp: Tensor, *rest: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        *leaves, adv = rest
        loss, aux = grpo_loss(logp, logp.detach() - 0.1, adv, torch.ones_like(adv, dtype=torch.bool))
        loss = loss - 0.3 * leaves.pop(0) if entropy else loss
        return (loss + leaves[0].exp().sum(-1) - 0.2 * leaves[1] if topk else loss), aux

    grads = []
    for rows, scale in ((None, None), (small, scale_triton)):
        loss, aux = linear_loss(
            h, w, y, torch.full((9,), 1 / 9, device=DEVICE), separable(loss_of), adv, entropy=entropy,
            topk_ids=ids if topk else None, rows=rows, scale=scale, chunk=4,
        )  # fmt: skip
        grads.append((*torch.autograd.grad(3 * loss, (h, w)), aux["logp"], aux["entropy"]))
    for a, b in zip(*grads, strict=True):
        assert (a.double() - b.double()).norm() < 0.01 * b.double().norm()


@runs
@pytest.mark.parametrize("factor", [1.0, 3.0, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaling_is_that_of_torch_and_counts_as_a_change_in_place(factor: float, dtype: Any) -> None:
    x = torch.randn(20001, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    want, version = x * factor, x._version
    scale_triton(x, torch.tensor(factor, device=DEVICE))
    last_bit = 2**-7 if dtype == torch.bfloat16 and factor != 1 else 0.0
    torch.testing.assert_close(x, want, rtol=last_bit, atol=0, equal_nan=True)
    assert x._version > version


def test_strided_logits_and_a_missing_triton_are_refused() -> None:
    a, y, _ = problem(100, torch.float32, False)
    with pytest.raises(ValueError, match="contiguous logits and triton"):
        rows_triton(a[:, ::2], None, y, None, None, (1.0, None, 1.0))
    assert not has_triton(torch.device("cpu"))
