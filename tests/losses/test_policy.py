"""Policy losses against naive float64 loops over a row's kept tokens: values, gradients in closed form."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import losses
from tests.losses.invariance import example

Row = list[float]
# (logp, logp_mu, adv) of a row's kept tokens -> (L_t, n * d mean(L) / d logp_t)
Naive = Callable[[Row, Row, Row], tuple[Row, Row]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ratios(lp: Row, mu: Row) -> Row:
    return [math.exp(a - b) for a, b in zip(lp, mu, strict=True)]


def surrogate(r: float, a: float, low: float, high: float) -> tuple[float, float]:
    """-min(r a, clip(r) a) and its derivative with respect to r."""
    if r * a <= clip(r, low, high) * a:
        return -r * a, -a
    return -clip(r, low, high) * a, 0.0


def grpo(low: float, high: float, dual: float = math.inf) -> Naive:
    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        value, grad = [], []
        for r, a in zip(ratios(lp, mu), adv, strict=True):
            v, dr = surrogate(r, a, 1 - low, 1 + high)
            if a < 0 and v > -dual * a:
                v, dr = -dual * a, 0.0
            value.append(v)
            grad.append(dr * r)
        return value, grad

    return naive


def gspo(low: float, high: float) -> Naive:
    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        s = math.exp(sum(a - b for a, b in zip(lp, mu, strict=True)) / len(lp))
        both = [surrogate(s, a, 1 - low, 1 + high) for a in adv]
        return [v for v, _ in both], [ds * s for _, ds in both]

    return naive


def gmpo(low: float, high: float) -> Naive:
    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        d = [a - b for a, b in zip(lp, mu, strict=True)]
        held = [min(x, high) if a > 0 else max(x, -low) for x, a in zip(d, adv, strict=True)]
        s = math.exp(sum(held) / len(d))
        return [-a * s for a in adv], [-a * s * (h == x) for a, h, x in zip(adv, held, d, strict=True)]

    return naive


def weighted(weight: Callable[[Row, Row], Row]) -> Naive:
    """L = -w A logp with a constant w."""

    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        w = weight(ratios(lp, mu), adv)
        return [-x * a * p for x, a, p in zip(w, adv, lp, strict=True)], [
            -x * a for x, a in zip(w, adv, strict=True)
        ]

    return naive


def sapo(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
    value, grad = [], []
    for r, a in zip(ratios(lp, mu), adv, strict=True):
        tau = 1.0 if a > 0 else 1.05
        p = 1 / (1 + math.exp(-tau * (r - 1)))
        value.append(-4 / tau * p * a)
        grad.append(-4 * p * (1 - p) * r * a)
    return value, grad


def dppo(kind: str, limit: float) -> Naive:
    def naive(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
        value = []
        for x, y, a in zip(lp, mu, adv, strict=True):
            p, q = math.exp(x), math.exp(y)
            d = abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            away = (a > 0 and p > q) or (a < 0 and p < q)
            value.append(0.0 if away and d > limit else -p / q * a)
        return value, value  # d rho / d logp = rho

    return naive


def dro(lp: Row, mu: Row, adv: Row) -> tuple[Row, Row]:
    both = list(zip(lp, mu, adv, strict=True))
    return [-(a * x - 0.25 * (x - y) ** 2) for x, y, a in both], [-(a - 0.5 * (x - y)) for x, y, a in both]


def vespo(r: Row, adv: Row) -> Row:
    w = math.prod(r)
    return [w**k * math.exp(lam * (1 - w)) for k, lam in ((2, 3) if a >= 0 else (3, 2) for a in adv)]


CASES: list[tuple[Callable[..., Any], dict[str, Any], Naive]] = [
    (losses.reinforce_loss, {}, weighted(lambda r, adv: [1.0] * len(r))),
    (losses.grpo_loss, {}, grpo(0.2, 0.28)),
    (losses.grpo_loss, {"eps_low": 0.1, "eps_high": 0.1, "dual_clip": 1.3}, grpo(0.1, 0.1, 1.3)),
    (losses.gspo_loss, {"eps_low": 0.02, "eps_high": 0.03}, gspo(0.02, 0.03)),
    (losses.gspo_token_loss, {"eps_low": 0.02, "eps_high": 0.03}, gspo(0.02, 0.03)),
    (losses.gmpo_loss, {"eps_low": 0.2, "eps_high": 0.3}, gmpo(0.2, 0.3)),
    (losses.cispo_loss, {"cap": 1.3, "floor": 0.7}, weighted(lambda r, adv: [clip(x, 0.7, 1.3) for x in r])),
    (losses.aipo_loss, {"cap": 1.3}, weighted(lambda r, adv: [min(x, 1.3) for x in r])),
    (losses.sapo_loss, {}, sapo),
    (losses.dppo_loss, {"limit_low": 0.05, "limit_high": 0.05}, dppo("tv", 0.05)),
    (losses.dppo_loss, {"divergence": "kl", "limit_low": 0.01, "limit_high": 0.01}, dppo("kl", 0.01)),
    (losses.topr_loss, {}, weighted(lambda r, adv: [1.0 if a > 0 else min(math.prod(r), 1.0) for a in adv])),
    (losses.dro_loss, {"beta": 0.5}, dro),
    (losses.vespo_loss, {}, weighted(vespo)),
]


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


@pytest.mark.parametrize("fn", [losses.grpo_loss, losses.gspo_loss, losses.gmpo_loss, losses.dppo_loss])
def test_ratios_are_held_to_twenty_nats_where_the_gradient_ends(fn: Any) -> None:
    mask, adv = torch.ones(1, 1, dtype=torch.bool), torch.full((1, 1), -1.0, dtype=torch.float64)
    for log_rho, value, alive in ((19.0, 19.0, True), (21.0, 20.0, False)):
        logp = torch.full((1, 1), log_rho, dtype=torch.float64, requires_grad=True)
        loss, _ = fn(logp, torch.zeros_like(adv), adv, mask)
        assert float(loss.detach().log()) == pytest.approx(value)
        assert bool(torch.autograd.grad(loss.sum(), logp)[0].any()) == alive


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
