"""Policy losses against naive float64 loops, on policy, where they clip, and far away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import losses
from tests.losses.invariance import example
from tests.losses.policy_loops import CASES, Naive


@pytest.mark.parametrize(("fn", "kw", "naive"), CASES, ids=lambda x: getattr(x, "__name__", None))
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_are_those_of_a_naive_loop(
    fn: Any, kw: dict[str, Any], naive: Naive, seed: int
) -> None:
    x, mask = example(seed)
    logp = x["logp"].clone().requires_grad_()
    value, _ = fn(logp, x["logp_mu"], x["adv"], mask, **kw)
    totals = {"total_tokens": int(mask.sum()), "total_rows": int(mask.any(1).sum())}
    weight = mask / mask.sum(1, keepdim=True).clamp(min=1) / totals["total_rows"]
    (grad,) = torch.autograd.grad((weight * value).sum(), logp)
    acted = 0
    for i in range(mask.shape[0]):
        t = mask[i].nonzero().flatten().tolist()
        if not t:
            continue
        want, want_grad = naive(*(x[k][i, t].tolist() for k in ("logp", "logp_mu", "adv")))
        torch.testing.assert_close(value[i, t].tolist(), want)
        torch.testing.assert_close((grad[i, t] * len(t) * totals["total_rows"]).tolist(), want_grad)
        acted += sum(g == 0 for g, a in zip(want_grad, x["adv"][i, t].tolist(), strict=True) if a)
    clips = fn in (
        losses.grpo_loss,
        losses.gspo_loss,
        losses.gspo_token_loss,
        losses.gmpo_loss,
        losses.dppo_loss,
    )
    assert acted > 0 if clips else acted == 0  # the example reaches what it should test


@pytest.mark.parametrize(
    ("fn", "kw"),
    [(fn, kw) for fn, kw, _ in CASES if fn not in (losses.sapo_loss, losses.dro_loss)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_on_policy_gradient_is_reinforce(fn: Any, kw: dict[str, Any]) -> None:
    x, mask = example()
    logp = x["logp"].clone().requires_grad_()
    weight = losses.token_weight(mask, agg="seq_mean_token_mean", total_tokens=1, total_rows=5).double()
    value, aux = fn(logp, x["logp"], x["adv"], mask, **kw)
    (grad,) = torch.autograd.grad((weight * value).sum(), logp)
    torch.testing.assert_close(grad, torch.where(mask, -weight * x["adv"], 0.0))
    assert not any(aux[k].any() for k in aux if k.startswith("clipped"))


CLIPPED = [
    (losses.grpo_loss, {}),
    (losses.gspo_loss, {"eps_low": 0.02, "eps_high": 0.03}),
    (losses.gspo_token_loss, {"eps_low": 0.02, "eps_high": 0.03}),
    (losses.gmpo_loss, {"eps_low": 0.2, "eps_high": 0.3}),
    (losses.dppo_loss, {"limit_low": 0.05, "limit_high": 0.05}),
    (losses.clip_cov_loss, {"selected": torch.zeros(6, 9, dtype=torch.bool)}),
]


@pytest.mark.parametrize(("fn", "kw"), CLIPPED, ids=lambda x: getattr(x, "__name__", None))
def test_a_token_is_flagged_as_clipped_exactly_where_its_gradient_is_zero(
    fn: Any, kw: dict[str, Any]
) -> None:
    seen = {"clipped_low": 0, "clipped_high": 0}
    for seed in range(4):
        x, mask = example(seed)
        logp = x["logp"].clone().requires_grad_()
        value, aux = fn(logp, x["logp_mu"], x["adv"], mask, **kw)
        (grad,) = torch.autograd.grad(value.sum(), logp)
        for flag, sign in (("clipped_low", -1), ("clipped_high", 1)):
            want = mask & (sign * x["adv"] > 0) & (grad == 0)
            assert torch.equal(aux[flag].bool(), want) and set(aux[flag].unique().tolist()) <= {0.0, 1.0}
            seen[flag] += int(want.sum())
    assert min(seen.values()) > 0


@pytest.mark.parametrize("fn", [losses.grpo_loss, losses.gspo_loss, losses.gmpo_loss, losses.dppo_loss])
def test_ratios_are_held_to_twenty_nats_where_the_gradient_ends(fn: Any) -> None:
    mask, adv = torch.ones(1, 1, dtype=torch.bool), torch.full((1, 1), -1.0, dtype=torch.float64)
    for log_rho, value, alive in ((19.0, 19.0, True), (21.0, 20.0, False)):
        logp = torch.full((1, 1), log_rho, dtype=torch.float64, requires_grad=True)
        loss, _ = fn(logp, torch.zeros_like(adv), adv, mask)
        assert float(loss.detach().log()) == pytest.approx(value)
        assert bool(torch.autograd.grad(loss.sum(), logp)[0].any()) == alive


@pytest.mark.parametrize(
    ("fn", "kw"), [(fn, kw) for fn, kw, _ in CASES], ids=lambda x: getattr(x, "__name__", None)
)
def test_log_ratios_of_a_thousand_nats_give_finite_losses_and_gradients(fn: Any, kw: dict[str, Any]) -> None:
    logp = torch.tensor([[-1e3, -1.0, -1e-6], [-0.5, -1e3, -2.0]], requires_grad=True)
    logp_mu = torch.tensor([[-1.0, -1e3, -1.0], [-1e3, -0.5, -1e3]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    for sign in (1.0, -1.0):
        value, aux = fn(logp, logp_mu, torch.full((2, 1), sign), mask, **kw)
        (grad,) = torch.autograd.grad(value.sum(), logp)
        assert value.isfinite().all() and grad.isfinite().all()
        assert all(a.isfinite().all() for a in aux.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda *a: losses.grpo_loss(*a, dual_clip=1.0),
        lambda *a: losses.cispo_loss(*a, cap=0.5, floor=0.9),
        lambda *a: losses.aipo_loss(*a, cap=0.0),
        lambda *a: losses.sapo_loss(*a, tau_neg=0.0),
        lambda *a: losses.dppo_loss(*a, divergence="js"),  # pyright: ignore[reportArgumentType]
        lambda *a: losses.topr_loss(*a, cap=-1.0),
        lambda *a: losses.dro_loss(*a, beta=0.0),
        lambda *a: losses.gspo_loss(*a, row=torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_arguments_that_cannot_mean_anything_are_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError):
        call(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.ones(2, dtype=torch.bool))


def test_the_clipped_loss_compiles_with_inductor() -> None:
    x, mask = example()
    logp, logp_mu, adv = (x[k].float() for k in ("logp", "logp_mu", "adv"))
    torch._dynamo.reset()
    value, _ = torch.compile(losses.grpo_loss, fullgraph=True)(logp, logp_mu, adv, mask)
    torch.testing.assert_close(value, losses.grpo_loss(logp, logp_mu, adv, mask)[0])
