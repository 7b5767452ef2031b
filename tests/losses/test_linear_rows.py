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
from losses.linear_rows import has_triton, rows_triton, triton

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


@runs
@pytest.mark.parametrize("v", [100, 128, 300])
@pytest.mark.parametrize(("scales", "biased"), list(itertools.product(SCALES, [False, True])), ids=str)
def test_statistics_and_gradients_are_those_of_torch(v: int, scales: Any, biased: bool) -> None:
    a, y, bias = problem(v, torch.float32, biased)
    some = torch.arange(6, device=DEVICE) != 4
    coef: Any = tuple(torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE))
    lse, entropy = rows_torch(a, None, y, bias, scales)
    for known, given in ((None, None), (None, coef), (lse, coef)):
        want, got = torch.empty_like(a), a.clone()
        rows_torch(a, want, y, bias, scales, known, given)
        got_lse, got_entropy = small(got, got, y, bias, scales, known, given)
        torch.testing.assert_close(got_lse, lse, rtol=1e-5, atol=1e-5)
        if known is None:
            torch.testing.assert_close(got_entropy[some], entropy[some], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[some], want[some], rtol=1e-4, atol=1e-5)
    before = a.clone()
    small(a, None, y, bias, scales)
    assert torch.equal(a, before)


@runs
def test_nan_in_a_row_shows_in_its_statistics_and_nowhere_else() -> None:
    a, y, _ = problem(300, torch.float32, False)
    a[0, 200] = math.nan
    lse, _ = small(a, None, y, None, (1.0, None, 1.0))
    assert lse[0].isnan() and not lse[1:].isnan().any()


@runs
def test_the_loss_and_its_gradients_are_those_of_torch_in_bfloat16() -> None:
    g = torch.Generator().manual_seed(0)
    h, w = ((torch.randn(*s, generator=g)).bfloat16().to(DEVICE).requires_grad_() for s in ((9, 8), (300, 8)))
    y, adv = torch.randint(300, (9,), generator=g).to(DEVICE), torch.randn(9, generator=g).to(DEVICE)

    def policy(logp: Tensor, adv: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return grpo_loss(logp, logp.detach() - 0.1, adv, torch.ones_like(adv, dtype=torch.bool))

    grads = []
    for rows in (None, small):
        loss, _ = linear_loss(
            h, w, y, torch.full((9,), 1 / 9, device=DEVICE), separable(policy), adv, rows=rows, chunk=4
        )
        grads.append(torch.autograd.grad(loss, (h, w)))
    for a, b in zip(*grads, strict=True):
        assert (a.double() - b.double()).norm() < 0.01 * b.double().norm()


def test_strided_logits_and_a_missing_triton_are_refused() -> None:
    a, y, _ = problem(100, torch.float32, False)
    with pytest.raises(ValueError, match="contiguous logits and triton"):
        rows_triton(a[:, ::2], None, y, None, (1.0, None, 1.0))
    assert not has_triton(torch.device("cpu"))
