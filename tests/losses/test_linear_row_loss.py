"""Losses of whole rows of logits, chunk by chunk: values and gradients are those of all rows at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from losses.distill import full_divergence
from losses.linear_row_loss import linear_row_loss
from tests.losses.full_logits import Aux, D, T, V
from tests.losses.watch import Watch


def row_problem() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, token_weight, and a teacher's hidden states and head, of another width."""
    g = torch.Generator().manual_seed(0)
    h, w, th, tw = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((T, D), (V, D), (T, 9), (V, 9))
    )
    token_weight = torch.rand(T, generator=g, dtype=torch.float64)
    token_weight[4], h[4], th[4] = 0.0, math.nan, math.nan
    return h.requires_grad_(), w.requires_grad_(), token_weight, th, tw


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_a_teachers_whole_distribution_is_distilled_chunk_by_chunk(kind: Any) -> None:
    h, w, token_weight, th, tw = row_problem()

    def row_loss(z: Tensor, th: Tensor, on: Tensor) -> Aux:
        return full_divergence(z, th @ tw.T, on, kind=kind)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return linear_row_loss(h, w, token_weight, row_loss, th, token_weight != 0, chunk=4)[0]

    per_token, _ = row_loss(h @ w.T, th, token_weight != 0)
    want = (token_weight * per_token).sum()
    with Watch() as seen:
        got = loss(h, w)
    torch.testing.assert_close(got, want)
    assert seen.matmuls == (3 + 1) * 3 and seen.numel < T * V
    grads = torch.autograd.grad(got, (h, w))
    keep = token_weight != 0
    true = torch.autograd.grad(
        (token_weight[keep] * row_loss(h[keep] @ w.T, th[keep], keep[keep])[0]).sum(), (h, w)
    )
    torch.testing.assert_close(grads, true)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1))(h.detach(), w.detach()), true)
    if kind == "reverse":
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(h, w), (h, w)), true)


def test_row_losses_of_no_tokens_are_zero_and_misfits_are_refused() -> None:
    h, w, token_weight, th, _ = row_problem()

    def row_loss(z: Tensor) -> Aux:
        return z.logsumexp(-1), {}

    loss, aux = linear_row_loss(h[:0], w, token_weight[:0], row_loss)
    assert loss.item() == 0 and not torch.autograd.grad(loss, w)[0].any() and aux["loss"].shape == (0,)
    for bad in ((h, w[:, 1:], token_weight), (h, w, token_weight[1:])):
        with pytest.raises(ValueError, match="linear_row_loss"):
            linear_row_loss(*bad, row_loss)
