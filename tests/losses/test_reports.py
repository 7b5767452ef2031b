"""Public bug reports as tests, with the right values; a name starts with the number of its report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import losses
from tests.losses.invariance import example
from tests.losses.registry import LOSSES, Entry

every_loss = pytest.mark.parametrize("entry", LOSSES, ids=lambda e: e.name)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def token_mean(loss: Tensor, mask: Tensor, total: int | None = None) -> Tensor:
    n = int(mask.sum()) if total is None else total
    return (losses.token_weight(mask, agg="token_mean", total_tokens=n, total_rows=1) * loss).sum()


def test_o001_on_policy_loss_is_zero_and_its_gradient_is_not() -> None:
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    logp_mu = logp.detach().clone().requires_grad_()
    mask = ones(2, 3)
    loss, _ = losses.grpo_loss(logp, logp_mu, torch.tensor([[1.0], [-1.0]]), mask)
    value = token_mean(loss, mask)
    grad, grad_mu = torch.autograd.grad(value, (logp, logp_mu), allow_unused=True)
    assert value == 0 and grad_mu is None
    torch.testing.assert_close(grad, torch.tensor([[-1 / 6] * 3, [1 / 6] * 3]))


def test_o002_token_mean_of_micro_batches_is_not_the_mean_of_their_means() -> None:
    parts = [(torch.full((1, 10), 2.0), ones(1, 10)), (torch.full((1, 30), 1.0), ones(1, 30))]
    assert sum(float(token_mean(v, m, total=40)) for v, m in parts) == pytest.approx(1.25)


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_o003_masked_rows_add_zero_and_a_masked_batch_has_zero_loss_and_zero_gradients(agg: str) -> None:
    x, _ = example()
    for keep_first in (True, False):
        mask = torch.zeros(2, 9, dtype=torch.bool)
        mask[0] = keep_first
        logp = x["logp"][:2].clone().requires_grad_()
        loss, _ = losses.grpo_loss(logp, x["logp_mu"][:2], x["adv"][1:3], mask)
        n = int(keep_first)
        weight = losses.token_weight(mask, agg=agg, total_tokens=9 * n, total_rows=n)  # pyright: ignore[reportArgumentType]
        value = (weight * loss).sum()
        (grad,) = torch.autograd.grad(value, logp)
        assert value.isfinite() and grad.isfinite().all() and not grad[1].any()
        assert keep_first or (value == 0 and not grad.any())


def test_o004_dropping_truncated_rows_divides_by_what_is_left_or_by_the_original_count_as_asked() -> None:
    mask = torch.arange(6) < torch.tensor([[4], [6]])
    kept = losses.drop_truncated(mask, torch.tensor([False, True]))
    loss, _ = losses.grpo_loss(torch.zeros(2, 6), torch.zeros(2, 6), torch.tensor([[1.0], [-1.0]]), kept)
    assert float(token_mean(loss, kept)) == pytest.approx(-1.0)
    assert float(token_mean(loss, kept, total=10)) == pytest.approx(-0.4)


def test_o005_dual_clip_bounds_negative_advantages_alone() -> None:
    logp = torch.tensor([10.0, 10.0, 2.0, 0.1, 5.0]).log()
    adv = torch.tensor([-1.0, 1.0, -1.0, -1.0, -0.5])
    loss, _ = losses.grpo_loss(logp, torch.zeros(5), adv, ones(5), eps_low=0.2, eps_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, -1.2, 2.0, 0.8, 1.5]))


@pytest.mark.parametrize("loss_fn", [losses.gspo_loss, losses.gspo_token_loss, losses.gmpo_loss])
@pytest.mark.parametrize("adv", [1.0, -1.0])
def test_o006_a_wild_sequence_does_not_touch_the_gradient_of_a_normal_one(
    loss_fn: Callable[..., tuple[Tensor, Any]], adv: float
) -> None:
    logp = torch.tensor([[-1.0, -2.0, -1.5], [-1.0, -1.0, -1.0]])
    mu = torch.tensor([[-1.0, -2.0, -1.5], [-101.0, -101.0, -101.0]])
    advs = torch.tensor([[0.5], [adv]])

    def gradient(rows: slice) -> Tensor:
        leaf = logp[rows].clone().requires_grad_()
        loss, _ = loss_fn(leaf, mu[rows], advs[rows], ones(*leaf.shape))
        assert loss.isfinite().all()
        return torch.autograd.grad(loss.sum(), leaf)[0]

    both = gradient(slice(0, 2))
    assert both.isfinite().all() and both[0].any()
    assert torch.equal(both[:1], gradient(slice(0, 1)))


@every_loss
def test_o007_values_at_masked_positions_change_no_bit(entry: Entry) -> None:
    inputs, mask = example()

    def run(fill: float) -> tuple[Tensor, Tensor]:
        x = {}
        for k, v in inputs.items():
            kept = mask.reshape(*mask.shape, *[1] * (v.ndim - 2))
            x[k] = torch.where(kept, v, fill) if v.is_floating_point() else v
        leaf = x[entry.wrt].requires_grad_()
        value, _ = entry.call({**x, entry.wrt: leaf}, mask)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    value, grad = run(-1.0)
    assert not grad[~mask].any()
    for fill in (-9.0, math.nan):
        other, other_grad = run(fill)
        assert torch.equal(value, other) and torch.equal(grad, other_grad)


def test_o008_temperature_is_not_divided_into_the_callers_logits() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = logits.detach().clone()
    first, _ = losses.token_logp(logits, torch.arange(4), temperature=0.5)
    second, _ = losses.token_logp(logits, torch.arange(4), temperature=0.5)
    assert torch.equal(logits, before) and torch.equal(first, second)


def test_o009_groups_without_signal_dilute_or_not_by_the_total_that_is_passed() -> None:
    adv, aux = losses.group_advantages(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), scale="none")
    logp = torch.zeros(4, 3, requires_grad=True)
    mask = ones(4, 3)
    loss, _ = losses.grpo_loss(logp, logp.detach(), adv.reshape(4, 1), mask)
    live = mask & aux["signal"].repeat_interleave(2)[:, None]
    with_dead, without = (
        torch.autograd.grad(token_mean(loss, mask, total=int(m.sum())), logp, retain_graph=True)[0]
        for m in (mask, live)
    )
    torch.testing.assert_close(with_dead, 0.5 * without)


def test_o010_an_unscored_sample_leaves_its_group_and_a_lone_score_gets_zero() -> None:
    reward = torch.tensor([[1.0, math.nan, 0.0, 0.0], [math.nan, math.nan, math.nan, 1.0]])
    valid = ~reward.isnan()
    centred, _ = losses.group_advantages(reward, valid, scale="none")
    scaled, aux = losses.group_advantages(reward, valid)
    torch.testing.assert_close(centred[0], torch.tensor([2 / 3, 0, -1 / 3, -1 / 3]))
    torch.testing.assert_close(scaled[0], torch.tensor([1.1547, 0, -0.57735, -0.57735]), atol=1e-5, rtol=1e-5)
    assert not scaled[1].any() and not centred[1].any()
    assert aux["n_valid"].tolist() == [3, 1] and aux["signal"].tolist() == [True, False]


@pytest.mark.parametrize(("most", "odd"), [(0.7, 1.0), (0.3, 0.9)])
def test_o011_leave_one_out_deviation_of_equal_others_does_not_divide(most: float, odd: float) -> None:
    adv, _ = losses.rloo_advantages(torch.tensor([[most] * 7 + [odd]]), scale="std")
    assert float(adv[0, 7]) == pytest.approx(odd - most, rel=1e-5)
    assert adv.abs().max() < 10


@pytest.mark.parametrize(
    "ids", [(-4, -4, 9, 9), (70, 20, 70, 20), ("b", "a", "b", "a"), (2.0, 2.0000001, 2.0, 2.0000001)]
)
def test_o012_groups_are_told_apart_by_equality_of_ids_alone(ids: tuple) -> None:
    reward = torch.tensor([1.0, 0.0, 0.5, 0.25])

    def by_id(ids: list, reward: Tensor) -> Tensor:
        index, valid = losses.group_index(ids)
        adv, _ = losses.group_advantages(reward[index], valid, scale="none")
        return torch.zeros_like(reward).scatter(0, index[valid], adv[valid])

    adv = by_id(list(ids), reward)
    for i in range(4):
        same = [float(reward[j]) for j in range(4) if ids[j] == ids[i]]
        assert float(adv[i]) == pytest.approx(float(reward[i]) - sum(same) / len(same))
    order = [2, 0, 3, 1]
    assert torch.equal(by_id([ids[i] for i in order], reward[order]), adv[order])


def test_o013_with_batch_scaling_signal_is_still_asked_of_the_group() -> None:
    reward = torch.tensor([[1.0, 1.0], [1.0, 0.0], [math.nan, 1.0]])
    adv, aux = losses.batch_std_advantages(reward, ~reward.isnan())
    assert aux["signal"].tolist() == [False, True, False] and aux["n_valid"].tolist() == [2, 2, 1]
    std = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]).std()
    torch.testing.assert_close(adv, torch.tensor([[0.0, 0.0], [0.5, -0.5], [0.0, 0.0]]) / (std + 1e-6))


def test_o014_a_row_dropped_after_the_advantages_shifts_no_group() -> None:
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    adv, _ = losses.group_advantages(reward, scale="none")
    kept = torch.arange(8) != 2
    torch.testing.assert_close(adv.flatten()[kept], torch.tensor([0.75, -0.25, -0.25, -0.5, -0.5, 0.5, 0.5]))


def test_o015_one_reward_missing_for_one_sample_leaves_the_others_normalised_over_three() -> None:
    first, second = torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.tensor([[0.2, math.nan, 0.9, 0.4]])
    reward = torch.stack([first, second])
    adv, aux = losses.gdpo_advantages(reward, ~reward.isnan())
    assert adv.isfinite().all()
    three, _ = losses.group_advantages(torch.tensor([[0.2, 0.9, 0.4]]))
    torch.testing.assert_close(aux["per_reward"][1, 0, [0, 2, 3]], three[0])
    assert aux["per_reward"][1, 0, 1] == 0


def test_o016_padding_after_an_answer_without_eos_is_not_trained() -> None:
    mask, aux = losses.completion_mask(torch.tensor([[11, 12, 13, 0, 0]]), torch.tensor([3]), eos_ids={2})
    assert mask.int().tolist() == [[1, 1, 1, 0, 0]] and aux["truncated"].tolist() == [True]


@pytest.mark.parametrize("tail", [0, 2])
def test_o017_kept_tokens_end_with_the_first_eos_whatever_fills_the_tail(tail: int) -> None:
    tokens = torch.full((2, 8), 5)
    tokens[0, 2], tokens[1, 5] = 2, 2
    tokens[0, 3:], tokens[1, 6:] = tail, tail
    mask, aux = losses.completion_mask(tokens, torch.tensor([8, 8]), eos_ids={2})
    assert mask.sum(1).tolist() == aux["n_tokens"].tolist() == [3, 6]


def test_o018_every_eos_id_finishes_an_answer() -> None:
    mask, aux = losses.completion_mask(
        torch.tensor([[5, 7, 0], [5, 5, 2]]), torch.tensor([3, 3]), eos_ids=[2, 7]
    )
    assert mask.int().tolist() == [[1, 1, 0], [1, 1, 1]] and not aux["truncated"].any()


def test_o019_lengths_are_counted_before_truncated_rows_are_dropped() -> None:
    tokens = torch.full((2, 8), 5)
    tokens[0, 2] = 2
    mask, aux = losses.completion_mask(tokens, torch.tensor([3, 8]), eos_ids={2})
    kept = losses.drop_truncated(mask, aux["truncated"])
    n = aux["n_tokens"].float()
    assert (n.min(), n.max(), n.mean(), n[~aux["truncated"]].mean()) == (3, 8, 5.5, 3)
    assert kept.sum(1).tolist() == [3, 0]


def test_o020_an_answer_cut_by_the_limit_keeps_its_tokens_and_learns_no_eos() -> None:
    tokens = torch.tensor([[5, 6, 7, 8]])
    mask, aux = losses.completion_mask(tokens, torch.tensor([4]), eos_ids={2})
    assert tokens.tolist() == [[5, 6, 7, 8]] and mask.all() and aux["truncated"].all()


def test_o021_a_rejected_sequence_is_rejected_whole_whatever_the_sign_of_its_tokens() -> None:
    logp, mu = torch.full((1, 3), -1.8), torch.full((1, 3), -1.0)  # 0.8 nats per token
    adv = torch.tensor([[-0.6, 0.2, -0.1]])
    keep, _ = losses.off_policy_sequence_mask(logp, mu, adv, ones(1, 3), limit=0.2)
    assert keep.tolist() == [[False, False, False]]


def test_o025_the_ratio_makes_the_gradient_of_k3_right_and_that_of_k2_wrong() -> None:
    """Two actions, p = 0.7, reference 0.4; the exact gradient of KL with respect to the logit is 0.2631."""
    z = torch.tensor(math.log(0.7 / 0.3), dtype=torch.float64, requires_grad=True)
    logp = torch.nn.functional.logsigmoid(torch.stack([z, -z]))
    ref, p = torch.tensor([0.4, 0.6], dtype=torch.float64).log(), logp.detach().exp()
    ratio = (logp - logp.detach()).exp()
    weighted = {
        "k3": losses.k3_weighted(logp, ref, logp.detach(), ones(2))[0],
        "k2": ratio * losses.k2(logp, ref, ones(2))[0],
        "k2 without": losses.k2(logp, ref, ones(2))[0],
    }
    grad = {
        k: float(torch.autograd.grad((p * v).sum(), z, retain_graph=True)[0]) for k, v in weighted.items()
    }
    assert grad == {
        k: pytest.approx(v, abs=1e-4) for k, v in (("k3", 0.2631), ("k2", 0.2455), ("k2 without", 0.2631))
    }


def test_o026_policy_sampler_and_reference_share_the_temperature() -> None:
    logits, target = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    logp, _ = losses.token_logp(logits, target, temperature=0.5)
    assert float(logp) == pytest.approx(-0.01815, abs=1e-5)
    assert float(losses.token_logp(logits, target)[0]) == pytest.approx(-0.12693, abs=1e-5)
    _, aux = losses.grpo_loss(logp, logp.clone(), torch.ones(1), ones(1))
    assert aux["rho"].tolist() == [1.0]


def test_o027_the_same_bfloat16_logits_scored_twice_give_ratio_one_and_kl_zero() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.arange(50)
    (old, _), (new, _) = (losses.token_logp(logits, target) for _ in range(2))
    assert old.dtype == torch.float32 and torch.equal(old, new)
    assert (losses.grpo_loss(new, old, torch.ones(50), ones(50))[1]["rho"] == 1).all()
    for estimator in (losses.k1, losses.k2, losses.k3):
        assert not estimator(new, old, ones(50))[0].any()


def test_o066_a_token_from_the_future_is_an_error() -> None:
    versions = torch.tensor([4, 5, 6, 7, 8])
    zeros = torch.zeros(5)
    with pytest.raises(ValueError, match="version"):
        losses.loglinear_prox(zeros, zeros, versions, ones(5), current=7)
    _, aux = losses.loglinear_prox(zeros, zeros, versions, versions <= 7, current=7)
    assert (aux["age"] <= 2).tolist()[:4] == [False, True, True, True]


def test_o067_the_sequence_product_and_the_length_normalised_ratio_are_two_named_levels() -> None:
    log_rho = torch.full((1, 100), 0.01, dtype=torch.float64)
    product, _ = losses.importance_weight(log_rho, ones(1, 100), level="sequence")
    mean, _ = losses.importance_weight(log_rho, ones(1, 100), level="geometric")
    assert float(product[0, 0]) == pytest.approx(2.71828, abs=1e-4)
    assert float(mean[0, 0]) == pytest.approx(1.01005, abs=1e-5)
    for level in ("token", "sequence", "geometric"):
        assert (losses.importance_weight(log_rho * 0, ones(1, 100), level=level)[0] == 1).all()


def test_o068_truncation_caps_the_weight_and_masking_drops_the_sequence_and_counts_it() -> None:
    log_rho = torch.full((1, 50), 0.03, dtype=torch.float64)
    truncated, aux = losses.tis_weight(log_rho, ones(1, 50), cap=4.0, level="sequence")
    assert (truncated == 4.0).all() and float(aux["rho"][0, 0]) == pytest.approx(4.482, abs=1e-3)
    masked, aux = losses.mis_weight(log_rho, ones(1, 50), high=4.0, level="sequence")
    assert not masked.any() and int(aux["rejected"].sum()) == 50


def test_o069_the_ratio_under_top_p_is_one_when_both_sides_renormalise() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    target = torch.tensor([0])
    allowed = losses.nucleus(logits, top_p=0.9)
    sampler = torch.tensor([0.5 / 0.95]).log()
    naive = (losses.token_logp(logits, target)[0] - sampler).exp()
    right = (losses.token_logp(logits, target, allowed=allowed)[0] - sampler).exp()
    assert float(naive) == pytest.approx(0.95) and float(right) == pytest.approx(1.0)


def test_o097_a_step_with_fewer_informative_groups_divides_by_the_groups_it_is_told() -> None:
    metric = torch.tensor([[1.0, 0.0]] * 5 + [[1.0, 1.0]] * 3)
    keep = losses.keep_groups(metric)
    assert int(keep.sum()) == 5
    mask = ones(16, 1) & keep.repeat_interleave(2)[:, None]
    for groups in (5, 8):
        weight = losses.token_weight(
            mask,
            agg="prompt_mean",
            total_tokens=10,
            total_rows=10,
            group_tokens=torch.full((16,), 2),
            total_groups=groups,
        )
        assert float(weight.sum()) == pytest.approx(5 / groups)


def test_o098_a_prompt_of_weight_zero_has_no_gradient_and_stays_counted() -> None:
    logp = torch.zeros(2, 3, requires_grad=True)
    loss, _ = losses.grpo_loss(logp, torch.zeros(2, 3), torch.ones(2, 1), ones(2, 3))
    weight = losses.token_weight(ones(2, 3), agg="token_mean", total_tokens=6, total_rows=2)
    (grad,) = torch.autograd.grad((weight * torch.tensor([[1.0], [0.0]]) * loss).sum(), logp)
    torch.testing.assert_close(grad, torch.tensor([[-1 / 6] * 3, [0.0] * 3]))
