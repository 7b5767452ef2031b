"""Weights, masks, proximal policy and effective sample size against naive loops over the rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import losses
from tests.losses.invariance import example

X, MASK = example(seed=3)
LOG_RHO = X["logp"] - X["logp_mu"]
Rows = list[tuple[int, list[int], list[float]]]


def rows() -> Rows:
    """(row, kept positions, their log_rho), for rows that keep anything."""
    found = []
    for i in range(MASK.shape[0]):
        t = MASK[i].nonzero().flatten().tolist()
        if t:
            found.append((i, t, LOG_RHO[i, t].tolist()))
    return found


RATIO: dict[str, Callable[[list[float]], list[float]]] = {
    "token": lambda x: [math.exp(v) for v in x],
    "sequence": lambda x: [math.exp(sum(x))] * len(x),
    "geometric": lambda x: [math.exp(statistics.fmean(x))] * len(x),
}
levels = pytest.mark.parametrize("level", RATIO)


@levels
def test_weights_are_the_ratio_of_the_level_raw_truncated_or_masked(level: Any) -> None:
    raw, _ = losses.importance_weight(LOG_RHO, MASK, level=level)
    tis, tis_aux = losses.tis_weight(LOG_RHO, MASK, level=level, cap=1.1, floor=0.9)
    mis, mis_aux = losses.mis_weight(LOG_RHO, MASK, level=level, low=0.9, high=1.1)
    hit = 0
    for i, t, x in rows():
        rho = RATIO[level](x)
        torch.testing.assert_close(raw[i, t].tolist(), rho)
        torch.testing.assert_close(tis[i, t].tolist(), [min(max(r, 0.9), 1.1) for r in rho])
        torch.testing.assert_close(mis[i, t].tolist(), [r if 0.9 <= r <= 1.1 else 0.0 for r in rho])
        out = [float(not 0.9 <= r <= 1.1) for r in rho]
        assert tis_aux["truncated"][i, t].tolist() == mis_aux["rejected"][i, t].tolist() == out
        hit += sum(out)
    assert hit and not raw[~MASK].any() and not tis[~MASK].any() and not mis[~MASK].any()


def test_icepop_zeroes_both_tails_and_keeps_the_weight_between() -> None:
    rho = torch.tensor([0.49, 0.5001, 1.0, 4.999, 5.1])
    weight, aux = losses.icepop_weight(rho.log(), torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(weight, torch.tensor([0.0, 0.5001, 1.0, 4.999, 0.0]))
    assert aux["rejected"].tolist() == [1, 0, 0, 0, 1]


@levels
def test_ratio_mask_keeps_the_band_in_the_ratio_itself_not_in_its_inverse(level: Any) -> None:
    keep, aux = losses.ratio_mask(LOG_RHO, MASK, level=level, low=0.8, high=1.1)
    for i, t, x in rows():
        assert keep[i, t].tolist() == [0.8 <= r <= 1.1 for r in RATIO[level](x)]
    assert torch.equal(aux["rejected"].bool(), MASK & ~keep)
    band = losses.ratio_mask(
        torch.tensor([1.5, 0.65]).log(), torch.ones(2).bool(), level="token", low=0.6, high=1.4
    )
    assert band[0].tolist() == [False, True]
    open_below, _ = losses.ratio_mask(
        torch.tensor([-1e9, 1.0]), torch.ones(2).bool(), level="token", low=0, high=2
    )
    assert open_below.tolist() == [True, False]


def test_log_ratios_of_any_size_are_held_to_twenty_nats() -> None:
    log_rho, on = torch.tensor([50.0, -50.0], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    weight, _ = losses.importance_weight(log_rho, on)
    assert weight.log().tolist() == pytest.approx([20.0, -20.0])
    _, aux = losses.divergence_mask(log_rho, on, limit=1.0, estimator="k2", level="token")
    assert aux["divergence"].tolist() == [200.0, 200.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
def test_divergence_mask_bounds_the_estimate_at_its_level(estimator: Any, level: Any) -> None:
    kind = {"k1": lambda v: -v, "k2": lambda v: v * v / 2, "k3": lambda v: math.exp(v) - 1 - v}[estimator]
    fold: Callable[[list[float]], list[float]] = {
        "token": lambda k: k,
        "sequence_sum": lambda k: [sum(k)] * len(k),
        "sequence_mean": lambda k: [statistics.fmean(k)] * len(k),
        "sequence_max": lambda k: [max(k)] * len(k),
    }[level]
    want = {i: fold([kind(v) for v in x]) for i, _, x in rows()}
    limit = statistics.median(v for k in want.values() for v in k)
    keep, aux = losses.divergence_mask(LOG_RHO, MASK, estimator=estimator, level=level, limit=limit + 1e-9)
    for i, t, _ in rows():
        torch.testing.assert_close(aux["divergence"][i, t].tolist(), want[i])
        assert keep[i, t].tolist() == [v <= limit + 1e-9 for v in want[i]]
    assert keep.any() and (MASK & ~keep).any()


def test_one_vetoed_token_takes_its_whole_sequence_and_no_other() -> None:
    log_rho = torch.zeros(3, 4)
    log_rho[1, 2] = math.log(1e-5)
    log_rho[2, 3] = -torch.inf  # off-mask
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2, 3] = False
    keep, aux = losses.veto_mask(log_rho, mask)
    assert keep.any(1).tolist() == [True, False, True] and int(aux["rejected"].sum()) == 4
    packed, _ = losses.veto_mask(
        log_rho.flatten(), mask.flatten(), row=torch.arange(3).repeat_interleave(4), n_rows=3
    )
    assert torch.equal(packed, keep.flatten())


def test_off_policy_sequence_mask_drops_bad_sequences_that_were_left_behind() -> None:
    logp_mu = torch.full((6, 2), -1.0)
    gap = torch.tensor([[0.6], [0.6], [0.4], [-0.6], [0.6], [0.6]])  # logp_mu - logp
    adv = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0], [0.01], [0.0]])
    mask = torch.ones(6, 2, dtype=torch.bool)
    keep, _ = losses.off_policy_sequence_mask((logp_mu - gap).requires_grad_(), logp_mu, adv, mask, limit=0.5)
    assert keep.all(1).tolist() == [False, True, True, True, True, True]
    assert not keep[0].any()


@pytest.mark.parametrize("limit", [1e-9, 0.02, 0.05, 1e9])
def test_m2po_keeps_the_largest_set_of_smallest_squares_below_the_limit(limit: float) -> None:
    keep, _ = losses.m2po_mask(LOG_RHO, MASK, limit=limit)
    squares = sorted(v * v for _, _, x in rows() for v in x)
    n = max(k for k in range(1, len(squares) + 1) if k == 1 or statistics.fmean(squares[:k]) < limit)
    assert sorted(LOG_RHO[keep].square().tolist()) == pytest.approx(squares[:n])
    assert not losses.m2po_mask(LOG_RHO, MASK & False)[0].any()
    assert losses.m2po_mask(LOG_RHO[:0], MASK[:0])[0].shape == (0, 9)


def test_rejection_leaves_the_denominator_alone() -> None:
    logp, mask = torch.zeros(2, 4, requires_grad=True), torch.ones(2, 4, dtype=torch.bool)
    keep, _ = losses.ratio_mask(
        torch.tensor([[0.0], [9.0]]).expand(2, 4), mask, level="geometric", low=0.5, high=2.0
    )
    weight = losses.token_weight(mask, agg="token_mean", total_tokens=8, total_rows=2)
    loss, _ = losses.grpo_loss(logp, torch.zeros(2, 4), torch.ones(2, 1), mask)
    (grad,) = torch.autograd.grad((weight * torch.where(keep, loss, 0.0)).sum(), logp)
    assert grad.tolist() == [[-0.125] * 4, [0.0] * 4]


def test_normalised_weights_average_to_one_over_tokens_or_sequences_and_over_ranks() -> None:
    weight, _ = losses.tis_weight(LOG_RHO, MASK)
    token, aux = losses.normalise_weight(weight, MASK)
    torch.testing.assert_close(token[MASK].mean(), torch.ones((), dtype=torch.float64))
    sequence, _ = losses.normalise_weight(weight, MASK, level="sequence")
    means = [sequence[i, t].mean() for i, t, _ in rows()]
    torch.testing.assert_close(torch.stack(means).mean(), torch.ones((), dtype=torch.float64))

    ranks = [slice(0, 2), slice(2, 6)]
    parts = [losses.normalise_weight(weight[r], MASK[r])[1] for r in ranks]
    mean = sum(float(p["total"]) for p in parts) / sum(float(p["count"]) for p in parts)
    split = [losses.normalise_weight(weight[r], MASK[r], mean=mean)[0] for r in ranks]
    torch.testing.assert_close(torch.cat(split), token)
    assert int(aux["count"]) == int(MASK.sum())


def test_normalising_weights_that_are_all_zero_leaves_them_zero() -> None:
    for mask in (MASK, MASK & False):
        out, _ = losses.normalise_weight(torch.zeros_like(LOG_RHO), mask)
        assert not out.any()


@levels
def test_effective_sample_size_is_one_on_policy_and_the_textbook_ratio_off_it(level: Any) -> None:
    assert losses.effective_sample_size(LOG_RHO * 0, MASK, level=level)[0] == 1
    w = [r for _, _, x in rows() for r in (RATIO[level](x) if level == "token" else RATIO[level](x)[:1])]
    want = sum(w) ** 2 / (len(w) * sum(v * v for v in w))
    ess, aux = losses.effective_sample_size(LOG_RHO, MASK, level=level)
    assert float(ess) == pytest.approx(want) and 0 < want < 1 and float(aux["n"]) == pytest.approx(len(w))

    parts = [
        losses.effective_sample_size(LOG_RHO[r], MASK[r], level=level)[1] for r in (slice(0, 2), slice(2, 6))
    ]
    added = {k: sum(float(p[k]) for p in parts) for k in aux}
    assert added["sum_w"] ** 2 / (added["n"] * added["sum_w2"]) == pytest.approx(want)


def test_effective_sample_size_of_one_dominant_sample_is_one_over_n_and_of_nothing_is_zero() -> None:
    log_rho = torch.zeros(10)
    log_rho[3] = 30.0
    ess, _ = losses.effective_sample_size(log_rho, torch.ones(10, dtype=torch.bool))
    assert float(ess) == pytest.approx(0.1, rel=1e-4)
    assert losses.effective_sample_size(log_rho, torch.zeros(10, dtype=torch.bool))[0] == 0


def test_the_proximal_policy_lies_between_sampler_and_policy_by_age() -> None:
    version = torch.tensor([5, 4, 3, 1, 99])
    mask = torch.tensor([True] * 4 + [False])
    logp = torch.zeros(5, requires_grad=True)
    prox, aux = losses.loglinear_prox(logp, torch.full((5,), -1.0), version, mask, current=5)
    torch.testing.assert_close(prox, torch.tensor([-1.0, -1.0, -0.5, -0.25, 0.0]))
    assert aux["age"].tolist() == [0, 1, 2, 4, 0] and not prox.requires_grad
    torch.testing.assert_close(aux["alpha"], torch.tensor([0.0, 0.0, 0.5, 0.75, 0.0]))


def decoupled(logp: Tensor, logp_mu: Tensor, version: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    prox, _ = losses.loglinear_prox(logp, logp_mu, version, mask, current=4)
    weight, _ = losses.tis_weight(prox - logp_mu, mask)
    return weight * losses.grpo_loss(logp, prox, adv, mask)[0]


def test_decoupled_ppo_with_the_prox_on_the_policy_is_importance_weighted_reinforce() -> None:
    """Where prox = pi the clip cannot act: gradient -rho A with rho = pi / mu."""
    logp = X["logp"].clone().requires_grad_()
    weight, _ = losses.importance_weight(LOG_RHO, MASK)
    loss = weight * losses.grpo_loss(logp, X["logp"], X["adv"], MASK)[0]
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(grad, torch.where(MASK, -LOG_RHO.exp() * X["adv"], 0.0))


def everything(log_rho: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return (
        losses.normalise_weight(losses.tis_weight(log_rho, mask)[0], mask, level="sequence")[0],
        losses.effective_sample_size(log_rho, mask, level="geometric")[0],
        losses.m2po_mask(log_rho, mask)[0],
        losses.veto_mask(log_rho, mask)[0],
    )


def test_corrections_are_one_graph() -> None:
    torch._dynamo.reset()
    got = torch.compile(everything, fullgraph=True, backend="eager")(LOG_RHO, MASK)
    torch.testing.assert_close(got, everything(LOG_RHO, MASK))
    args = X["logp"], X["logp_mu"], X["version"], X["adv"], MASK
    compiled = torch.compile(decoupled, fullgraph=True, backend="eager")(*args)
    torch.testing.assert_close(compiled, decoupled(*args))


@pytest.mark.parametrize(
    "call",
    [
        lambda: losses.tis_weight(LOG_RHO, MASK, level="row"),  # pyright: ignore[reportArgumentType]
        lambda: losses.ratio_mask(LOG_RHO, MASK, level="row", low=0, high=1),  # pyright: ignore[reportArgumentType]
        lambda: losses.divergence_mask(LOG_RHO, MASK, limit=1, estimator="k4"),  # pyright: ignore[reportArgumentType]
        lambda: losses.divergence_mask(LOG_RHO, MASK, limit=1, level="row"),  # pyright: ignore[reportArgumentType]
        lambda: losses.veto_mask(LOG_RHO, MASK, n_rows=3),
        lambda: losses.effective_sample_size(LOG_RHO[:, 1:], MASK),
        lambda: losses.normalise_weight(LOG_RHO, MASK, level="geometric"),  # pyright: ignore[reportArgumentType]
        lambda: losses.loglinear_prox(LOG_RHO, LOG_RHO, MASK[:, 1:].long(), MASK, current=1),
    ],
)
def test_shapes_and_names_that_do_not_fit_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError):
        call()
