"""What sets each policy loss apart: its defaults, its bounds, and its relations to the others."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

import losses
from tests.losses.invariance import example


def test_weights_at_a_bound_are_flagged() -> None:
    rho, mask = torch.tensor([[0.5, 0.9, 1.1, 3.0]]), torch.ones(1, 4, dtype=torch.bool)
    args = rho.log(), torch.zeros(1, 4), torch.tensor([[-1.0]]), mask
    _, cispo = losses.cispo_loss(*args, cap=2.0, floor=0.8)
    assert (cispo["clipped_low"].tolist(), cispo["clipped_high"].tolist()) == ([[1, 0, 0, 0]], [[0, 0, 0, 1]])
    assert losses.aipo_loss(*args, cap=2.0)[1]["clipped_high"].tolist() == [[0, 0, 0, 1]]
    _, dual = losses.grpo_loss(*args, dual_clip=2.0)
    assert dual["clipped_dual"].tolist() == [[0, 0, 0, 1]]
    torch.testing.assert_close(dual["rho"], rho)
    for cap, flagged in ((1.0, 1), (2.0, 0)):  # the product is 1.485
        _, topr = losses.topr_loss(*args, cap=cap)
        assert topr["clipped_high"].tolist() == [[flagged] * 4]
        torch.testing.assert_close(topr["weight"], torch.full((1, 4), min(1.485, cap)))
    good = torch.tensor([[0.3]])
    assert not losses.grpo_loss(*args[:2], good, mask, dual_clip=2.0)[1]["clipped_dual"].any()
    for shift in (0.0, 1.0):  # of the sampler: a product of 1.485, or 0.027
        value, aux = losses.topr_loss(rho.log(), torch.full((1, 4), shift), good, mask)
        assert not aux["clipped_high"].any() and (aux["weight"] == 1).all()
        torch.testing.assert_close(value, -0.3 * rho.log())


def test_defaults_are_those_of_the_papers() -> None:
    def defaults(fn: Callable[..., Any]) -> dict[str, Any]:
        given = inspect.signature(fn).parameters.values()
        return {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY and "row" not in p.name}

    assert defaults(losses.grpo_loss) == {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": None}
    assert (
        defaults(losses.gspo_loss) == defaults(losses.gspo_token_loss) == {"eps_low": 3e-4, "eps_high": 4e-4}
    )
    assert defaults(losses.gmpo_loss) == {"eps_low": 0.4, "eps_high": 0.4}
    assert defaults(losses.cispo_loss) == {"cap": 5.0, "floor": 0.0}
    assert defaults(losses.sapo_loss) == {"tau_pos": 1.0, "tau_neg": 1.05}
    assert defaults(losses.topr_loss) == {"cap": 1.0}
    assert defaults(losses.vespo_loss) == {"k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0}
    assert defaults(losses.select_kl_cov) == {"ratio": 2e-4} and defaults(losses.kl_cov_loss) == {"coef": 1.0}
    cov = {"ratio": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "eps_low": 0.2, "eps_high": 0.2}
    assert defaults(losses.select_clip_cov) == cov
    assert defaults(losses.tis_weight) == {"cap": 2.0, "floor": 0.0, "level": "token"}
    assert defaults(losses.icepop_weight) == {"low": 0.5, "high": 5.0}


def test_sapo_on_policy_gradient_is_reinforce_and_its_value_is_not() -> None:
    x, mask = example()
    logp = x["logp"].clone().requires_grad_()
    value, _ = losses.sapo_loss(logp, x["logp"], x["adv"], mask)
    (grad,) = torch.autograd.grad(value.sum(), logp)
    torch.testing.assert_close(grad, torch.where(mask, -x["adv"], 0.0))
    tau = torch.where(x["adv"] > 0, 1.0, 1.05).double()
    torch.testing.assert_close(value, torch.where(mask, -2 * x["adv"] / tau, 0.0))


def test_a_ratio_exactly_on_the_clip_still_has_its_whole_gradient() -> None:
    logp = torch.tensor([1.5, 0.5], dtype=torch.float64).log().requires_grad_()
    adv, mask = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    rho = logp.detach().exp()  # 1.5 and 0.5, up to rounding; the bounds are set to it
    value, aux = losses.grpo_loss(logp, logp.detach() * 0, adv, mask, eps_low=0.5, eps_high=0.5)
    (grad,) = torch.autograd.grad(value.sum(), logp)
    inside = torch.where(adv > 0, rho <= 1.5, rho >= 0.5)
    torch.testing.assert_close(grad, torch.where(inside, -rho * adv, 0.0))
    torch.testing.assert_close(aux["clipped_high"] + aux["clipped_low"], (~inside).double())


def test_cispo_without_a_floor_is_aipo_and_aipo_without_a_cap_is_importance_weighted_reinforce() -> None:
    x, mask = example()
    args = x["logp"], x["logp_mu"], x["adv"], mask
    assert torch.equal(losses.cispo_loss(*args, cap=2.0)[0], losses.aipo_loss(*args, cap=2.0)[0])
    weight, _ = losses.importance_weight(x["logp"] - x["logp_mu"], mask)
    plain = weight * losses.reinforce_loss(*args)[0]
    torch.testing.assert_close(losses.aipo_loss(*args, cap=1e9)[0], plain)


def test_gspo_token_has_the_value_of_gspo_and_for_one_advantage_a_row_its_gradient() -> None:
    x, mask = example()
    weight = losses.token_weight(mask, agg="seq_mean_token_mean", total_tokens=1, total_rows=5)
    found = []
    for fn in (losses.gspo_loss, losses.gspo_token_loss):
        logp = x["logp"].clone().requires_grad_()
        value, _ = fn(logp, x["logp_mu"], x["adv"], mask, eps_low=0.1, eps_high=0.1)
        found.append((value.detach(), *torch.autograd.grad((weight * value).sum(), logp)))
    torch.testing.assert_close(found[0], found[1])


def test_gspo_token_keeps_the_gradient_of_a_token_advantage_on_its_token() -> None:
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    adv, mask = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    for fn, want in ((losses.gspo_token_loss, [-1.0, 0.0]), (losses.gspo_loss, [-0.5, -0.5])):
        (grad,) = torch.autograd.grad(fn(logp, logp.detach(), adv, mask)[0].sum(), logp)
        assert grad.tolist() == [want]


def test_vespo_weight_is_one_on_policy_and_peaks_at_k_over_lambda() -> None:
    adv, mask = torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1, dtype=torch.bool)
    weights = []
    for w in torch.linspace(0.1, 4, 400).tolist():
        _, aux = losses.vespo_loss(torch.full((2, 1), math.log(w)), torch.zeros(2, 1), adv, mask)
        weights.append(aux["weight"].flatten())
    best = torch.stack(weights).argmax(0)
    torch.testing.assert_close(
        torch.linspace(0.1, 4, 400)[best], torch.tensor([2 / 3, 3 / 2]), atol=0.01, rtol=0
    )
    _, on = losses.vespo_loss(adv * 0, adv * 0, adv, mask)
    assert on["weight"].tolist() == [[1.0], [1.0]]


def test_dro_is_at_rest_where_the_policy_has_moved_by_advantage_over_beta() -> None:
    adv, mask = torch.tensor([0.6, -0.9]), torch.ones(2, dtype=torch.bool)
    logp = (torch.tensor([-1.0, -2.0]) + adv / 0.3).requires_grad_()
    value, _ = losses.dro_loss(logp, torch.tensor([-1.0, -2.0]), adv, mask, beta=0.3)
    assert torch.autograd.grad(value.sum(), logp)[0].abs().max() < 1e-6


def test_dppo_keeps_a_rare_token_that_a_ratio_clip_cuts_and_drops_a_common_one_that_it_keeps() -> None:
    mask, adv = torch.ones(2, dtype=torch.bool), torch.ones(2)
    logp, logp_mu = torch.tensor([0.002, 0.95]).log(), torch.tensor([0.001, 0.7]).log()
    assert losses.grpo_loss(logp, logp_mu, adv, mask, eps_high=0.4)[1]["clipped_high"].tolist() == [1, 0]
    assert losses.dppo_loss(logp, logp_mu, adv, mask)[1]["clipped_high"].tolist() == [0, 1]


def test_dppo_binary_kl_is_finite_for_certain_tokens() -> None:
    logp = torch.tensor([0.0, -1e-9, -50.0], requires_grad=True)
    mask, logp_mu = torch.ones(3, dtype=torch.bool), torch.tensor([-2.0, 0.0, 0.0])
    value, aux = losses.dppo_loss(logp, logp_mu, torch.ones(3), mask, divergence="kl")
    assert value.isfinite().all() and aux["divergence"].isfinite().all()
    assert torch.autograd.grad(value.sum(), logp)[0].isfinite().all()
