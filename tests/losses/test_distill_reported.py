"""Mistakes of distillation that others have reported, each with the numbers that would show it here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from losses.distill import distill_advantage, full_divergence, sampled_divergence, topk_divergence
from tests.losses.divergences import ON, every_kind, expected_gradient, gradient, logs, rows


@pytest.mark.parametrize(("beta", "want"), [(0.0, 0.5108), (0.1, 0.04307), (0.5, 0.10175), (1.0, 0.3681)])
def test_O029_the_mixture_of_the_jsd_has_beta_on_the_teacher(beta: float, want: float) -> None:
    loss, _ = full_divergence(logs(0.9, 0.1), logs(0.5, 0.5), ON, kind="jsd_gkd", beta=beta)
    assert loss.item() == pytest.approx(want, abs=1e-4)


def test_O030_masked_positions_are_not_distilled_and_not_counted() -> None:
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 0.0]], dtype=torch.float64)
    t = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 5.0]], dtype=torch.float64)
    loss, _ = full_divergence(z, t, torch.ones(3, dtype=torch.bool), kind="forward")
    assert loss.tolist() == pytest.approx([0.4621, 0.0, 4.9331], abs=1e-4)
    mask = torch.tensor([True, True, False])
    loss, _ = full_divergence(z, t, mask, kind="forward")
    assert (loss.sum() / mask.sum()).item() == pytest.approx(0.2311, abs=1e-4)
    z[2] = math.nan
    assert torch.equal(full_divergence(z, t, mask, kind="forward")[0], loss)
    assert not full_divergence(z, t, torch.zeros(3, dtype=torch.bool), kind="forward")[0].any()


def test_O031_padding_columns_are_dropped_before_the_softmax_and_dtypes_may_differ() -> None:
    z, t = torch.zeros(1, 3).bfloat16(), torch.tensor([[0.0, 0.0, 0.0, -1e9, -1e9]])
    with pytest.raises(ValueError, match="vocab"):
        full_divergence(z, t, ON)
    loss, _ = full_divergence(z, t, ON, vocab=3)
    assert loss.dtype == torch.float32 and loss.item() == 0.0
    padded = torch.cat([z, torch.zeros(1, 2).bfloat16()], dim=-1).requires_grad_()
    loss, _ = full_divergence(padded, t, ON, vocab=3)
    assert loss.item() == 0.0 and not gradient(loss, padded)[:, 3:].any()


@every_kind
def test_O032_infinite_teacher_values_at_pads_reach_no_gradient(kind: Any) -> None:
    z, t = rows(10, 4)
    mask = torch.arange(5) < torch.tensor([[3], [5]])
    z, t = z.view(2, 5, 4).clone().requires_grad_(), t.view(2, 5, 4).clone()
    t[~mask] = -math.inf
    loss, _ = full_divergence(z, t, mask, kind=kind)
    grad = gradient(loss, z)
    assert loss.isfinite().all() and grad.isfinite().all() and not grad[~mask].any()
    alone, _ = full_divergence(z[:1, :3], t[:1, :3], mask[:1, :3], kind=kind)
    torch.testing.assert_close(loss[:1, :3], alone)


def test_O033_pad_values_are_masked_before_the_exponential() -> None:
    z, t, mask = torch.tensor([-1e9, -1.0]), torch.tensor([0.0, -1.0]), torch.tensor([False, True])
    z.requires_grad_()
    loss, aux = sampled_divergence(z, t, mask, kind="forward")
    assert loss.tolist() == [0.0, 0.0] and aux["kl"].tolist() == [0.0, 0.0]
    assert gradient(loss, z).tolist() == [0.0, 0.0]


def test_O034_top_k_is_never_negative_and_never_clamped() -> None:
    s, t = logs(0.7, 0.25, 0.03, 0.02).requires_grad_(), logs(0.6, 0.3, 0.05, 0.05)
    args = (s, torch.tensor([[0, 1]]), t[:, :2], ON)
    tail, _ = topk_divergence(*args, kind="forward")
    assert tail.item() == pytest.approx(0.0315, abs=1e-4) and gradient(tail, s).abs().max() > 1e-2
    renormalised, _ = topk_divergence(*args, kind="forward", tail=False)
    assert renormalised.item() == pytest.approx(0.0121, abs=1e-4)
    assert full_divergence(s, t, ON, kind="forward")[0].item() == pytest.approx(0.0336, abs=1e-4)


def test_O035_distillation_is_not_a_no_op_and_a_missing_teacher_is_an_error() -> None:
    z, t = rows(2, 4)
    z.requires_grad_()
    mask = torch.ones(2, dtype=torch.bool)
    loss, aux = full_divergence(z, t, mask)
    assert (loss > 0).all() and gradient(loss, z).abs().max() > 0 and aux["teacher_entropy"].all()
    with pytest.raises(ValueError, match="teacher"):
        full_divergence(z, t[:, :0], mask)


def test_O036_a_teacher_row_cut_differently_is_an_error() -> None:
    for fn in (distill_advantage, sampled_divergence):
        with pytest.raises(ValueError, match="one shape"):
            fn(torch.zeros(4), torch.zeros(7), torch.ones(4, dtype=torch.bool))


def test_O038_the_expected_policy_gradient_of_the_advantage_is_that_of_the_reverse_kl() -> None:
    z = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64).log_softmax(-1)
    logp = z.log_softmax(-1)
    adv, _ = distill_advantage(logp, t, torch.ones(1, 3, dtype=torch.bool))
    got = expected_gradient(z, -adv * logp)
    torch.testing.assert_close(got, gradient(full_divergence(z, t, ON, kind="reverse")[0], z))
    assert got[0].tolist() == pytest.approx([-0.302, -0.058, 0.360], abs=1e-3)


def test_O041_the_mean_does_not_depend_on_how_often_a_row_is_there() -> None:
    z = logs(1.0, 0.0).repeat(4, 1)
    t = logs(math.exp(-0.5), 1 - math.exp(-0.5)).repeat(4, 1)
    for repeat in (1, 3):
        loss, _ = full_divergence(
            z.repeat(repeat, 1), t.repeat(repeat, 1), torch.ones(4 * repeat, dtype=torch.bool)
        )
        assert loss.mean().item() == pytest.approx(0.5, abs=1e-6)
