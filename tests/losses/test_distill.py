"""Divergences from one teacher, and the sampled reverse KL: definitions, gradients, and known mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from losses.distill import (
    KINDS,
    distill_advantage,
    full_divergence,
    partition_divergence,
    sampled_divergence,
    topk_divergence,
)
from tests.losses.invariance import Totals, example, failures, from_token_loss

ON = torch.tensor([True])
every_kind = pytest.mark.parametrize("kind", KINDS)


def logs(*p: float) -> Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


def rows(n: int, v: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z, t = 1.5 * torch.randn(2, n, v, generator=g, dtype=torch.float64)
    return z, t.log_softmax(-1)


def naive(s: list[float], t: list[float], kind: str, beta: float = 0.5, alpha: float = 0.1) -> float:
    """By the definition, over plain probabilities."""

    def kl(p: list[float], q: list[float]) -> float:
        return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)

    def mix(w: float, p: list[float], q: list[float]) -> list[float]:
        return [w * a + (1 - w) * b for a, b in zip(p, q, strict=True)]

    m = mix(beta, t, s)
    return {
        "forward": lambda: kl(t, s),
        "reverse": lambda: kl(s, t),
        "skew_forward": lambda: kl(t, mix(alpha, t, s)),
        "skew_reverse": lambda: kl(s, mix(alpha, s, t)),
        "jsd": lambda: (1 - beta) * kl(t, m) + beta * kl(s, m),
        "jsd_gkd": lambda: beta * kl(t, m) + (1 - beta) * kl(s, m),
    }[kind]()


def gradient(loss: Tensor, z: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), z)[0]


# ── Definitions ───────────────────────────────────────────────────────────────────────────────────────────


@every_kind
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_full_and_top_k_are_the_definition_on_their_partitions(kind: Any, beta: float) -> None:
    z, t = rows(4, 6)
    mask = torch.ones(4, dtype=torch.bool)
    loss, _ = full_divergence(z, t, mask, kind=kind, beta=beta, alpha=0.3)
    top, ids = t.topk(2)
    cut, aux = topk_divergence(z, ids, top, mask, kind=kind, beta=beta, alpha=0.3)
    for i in range(4):
        s, full = z[i].softmax(-1), t[i].exp()
        assert loss[i].item() == pytest.approx(naive(s.tolist(), full.tolist(), kind, beta, 0.3), rel=1e-12)
        s_k, t_k = ([*p[ids[i]].tolist(), 1 - p[ids[i]].sum().item()] for p in (s, full))
        assert cut[i].item() == pytest.approx(naive(s_k, t_k, kind, beta, 0.3), rel=1e-9)
        assert [aux["tail"][i].item(), aux["teacher_tail"][i].item()] == pytest.approx([s_k[-1], t_k[-1]])
    assert (cut >= 0).all() and (cut <= loss + 1e-12).all()


@every_kind
def test_gradients_agree_with_finite_differences(kind: Any) -> None:
    z, t = rows(3, 7)
    mask = torch.tensor([True, False, True])
    top, ids = t.topk(3)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: full_divergence(z, t, mask, kind=kind, temperature=0.7)[0], z)
    for tail in (True, False):
        assert torch.autograd.gradcheck(
            lambda z, tail=tail: topk_divergence(z, ids, top, mask, kind=kind, tail=tail)[0], z
        )


def test_gradients_of_forward_and_reverse_have_their_closed_forms() -> None:
    z, t = rows(3, 5)
    z.requires_grad_()
    mask, tau = torch.ones(3, dtype=torch.bool), 2.0
    s, soft = (z / tau).softmax(-1).detach(), (t / tau).softmax(-1)
    kw: dict[str, Any] = {"temperature": tau, "teacher_temperature": tau}
    forward, _ = full_divergence(z, t, mask, kind="forward", **kw)
    torch.testing.assert_close(gradient(forward, z), (s - soft) / tau)
    reverse, _ = full_divergence(z, t, mask, kind="reverse", **kw)
    want = s * ((s / soft).log() - reverse.detach()[:, None]) / tau
    torch.testing.assert_close(gradient(reverse, z), want)


def test_forward_on_top_k_pulls_on_k_to_the_teacher_and_off_k_by_the_tail() -> None:
    z, t = rows(1, 6)
    z.requires_grad_()
    top, ids = t.topk(2)
    loss, aux = topk_divergence(z, ids, top, ON, kind="forward")
    s, p, q = z.softmax(-1).detach(), 1 - aux["teacher_tail"], 1 - aux["tail"]
    want = s * (1 - (1 - p) / (1 - q))
    want.scatter_(-1, ids, s.gather(-1, ids) - top.exp())
    torch.testing.assert_close(gradient(loss, z), want)


def test_jsd_joins_forward_and_reverse_and_the_published_form_tends_to_zero() -> None:
    z, t = rows(2, 5)
    mask = torch.ones(2, dtype=torch.bool)
    forward, _ = full_divergence(z, t, mask, kind="forward")
    reverse, _ = full_divergence(z, t, mask, kind="reverse")
    for near, at, end in ((1e-6, 0.0, forward), (1 - 1e-6, 1.0, reverse)):
        torch.testing.assert_close(full_divergence(z, t, mask, kind="jsd", beta=at)[0], end)
        torch.testing.assert_close(
            full_divergence(z, t, mask, kind="jsd", beta=near)[0], end, rtol=1e-4, atol=0
        )
        torch.testing.assert_close(full_divergence(z, t, mask, kind="jsd_gkd", beta=at)[0], end)
        assert (full_divergence(z, t, mask, kind="jsd_gkd", beta=near)[0] < 1e-4).all()


@pytest.mark.parametrize("kind", ["skew_forward", "skew_reverse"])
def test_skewed_divergences_stay_below_minus_log_alpha_without_common_support(kind: Any) -> None:
    s, t = logs(1.0, 0.0).requires_grad_(), logs(0.0, 1.0)
    loss, _ = full_divergence(s, t, ON, kind=kind, alpha=0.1)
    assert loss.item() == pytest.approx(-math.log(0.1))
    assert gradient(loss, s).isfinite().all()


@every_kind
def test_tokens_that_neither_can_say_are_absent(kind: Any) -> None:
    s, t = logs(0.7, 0.0, 0.3).requires_grad_(), logs(0.4, 0.0, 0.6)
    loss, _ = full_divergence(s, t, ON, kind=kind)
    assert loss.item() == pytest.approx(naive([0.7, 0.3], [0.4, 0.6], kind))
    assert gradient(loss, s).isfinite().all()


def test_reverse_is_infinite_where_the_teacher_excludes_what_the_student_says() -> None:
    assert full_divergence(logs(0.5, 0.5), logs(1.0, 0.0), ON, kind="reverse")[0].item() == math.inf


def test_a_teacher_may_come_as_logits_and_its_own_temperature_softens_it() -> None:
    z, t = rows(3, 5)
    mask = torch.ones(3, dtype=torch.bool)
    loss, _ = full_divergence(z, 3.0 * t + 2.0, mask, temperature=2.0, teacher_temperature=3.0)
    want, _ = full_divergence(z / 2.0, t, mask)
    torch.testing.assert_close(loss, want)


def test_several_teachers_are_an_axis_in_front_and_each_has_its_mask() -> None:
    z, t = rows(3, 5)
    teachers = torch.stack([t, t.roll(1, 0)])
    mask = torch.tensor([[True, True, False], [False, True, True]])
    top, ids = teachers.topk(2)
    for loss, aux in (full_divergence(z, teachers, mask), topk_divergence(z, ids, top, mask)):
        assert loss.shape == mask.shape and all(x.shape == mask.shape for x in aux.values())
        assert not loss[~mask].any() and (loss[mask] > 0).all()
    for k in range(2):
        torch.testing.assert_close(
            full_divergence(z, teachers, mask)[0][k], full_divergence(z, teachers[k], mask[k])[0]
        )


# ── Top k ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_top_k_of_the_whole_vocabulary_is_the_full_divergence() -> None:
    z, t = rows(4, 5)
    mask = torch.ones(4, dtype=torch.bool)
    top, ids = t.float().topk(5)
    for kind in KINDS:
        cut, aux = topk_divergence(z, ids, top, mask, kind=kind)
        torch.testing.assert_close(cut, full_divergence(z, t, mask, kind=kind)[0], rtol=1e-5, atol=1e-7)
        assert not aux["tail"].any() and not aux["teacher_tail"].any()


def test_a_tail_below_the_resolution_of_float32_is_exact() -> None:
    z = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)
    loss, aux = topk_divergence(z, torch.tensor([[0]]), logs(0.5).float(), ON, kind="forward")
    tail = 2 * math.exp(-30) / (1 + 2 * math.exp(-30))
    assert aux["tail"].item() == pytest.approx(tail, rel=1e-5)
    assert loss.item() == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(0.5 / tail), rel=1e-5)
    torch.testing.assert_close(gradient(loss, z), torch.tensor([[0.5, -0.25, -0.25]]))


def test_a_teacher_mass_rounded_above_one_leaves_the_smallest_tail_not_nan() -> None:
    top = torch.tensor([[-0.105, -2.30]]).bfloat16()  # mass 1.0002 or so in bfloat16
    assert top.double().exp().sum() > 1
    loss, aux = topk_divergence(torch.zeros(1, 9), torch.tensor([[3, 1]]), top, ON)
    assert loss.isfinite().all() and aux["teacher_tail"].item() == pytest.approx(1e-7, rel=0.2)


def test_unused_slots_are_no_tokens_whatever_their_ids_say() -> None:
    z, t = rows(2, 6)
    mask = torch.ones(2, dtype=torch.bool)
    top, ids = t.topk(2)
    slots = torch.cat([ids, torch.tensor([[0, -7], [5, 99]])], dim=-1)
    values = torch.cat([top, torch.full((2, 2), -math.inf, dtype=top.dtype)], dim=-1)
    for tail in (True, False):
        loss, _ = topk_divergence(z, slots, values, mask, tail=tail)
        torch.testing.assert_close(loss, topk_divergence(z, ids, top, mask, tail=tail)[0])


def test_the_partition_form_takes_log_probs_and_gives_the_same() -> None:
    z, t = rows(3, 6)
    mask = torch.tensor([True, False, True])
    top, ids = t.topk(2)
    z.requires_grad_()
    log_p = z.log_softmax(-1)
    rest = log_p.scatter(-1, ids, -math.inf).logsumexp(-1)
    for kind in KINDS:
        loss, aux = partition_divergence(log_p.gather(-1, ids), rest, top, mask, kind=kind)
        want, want_aux = topk_divergence(z, ids, top, mask, kind=kind)
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(aux, want_aux)


# ── Sampled ───────────────────────────────────────────────────────────────────────────────────────────────


def expected_gradient(z: Tensor, per_token: Tensor) -> Tensor:
    """E over a from S of the gradient of per_token[a], sampling not differentiated."""
    p = z.softmax(-1).detach()
    return torch.autograd.grad((p * per_token).sum(), z)[0]


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_the_sampled_divergence_has_the_gradient_of_its_kl_in_expectation(kind: Any) -> None:
    z, t = rows(1, 6)
    z.requires_grad_()
    every = torch.ones(1, 6, dtype=torch.bool)
    loss, aux = sampled_divergence(z.log_softmax(-1), t, every, kind=kind)
    exact, _ = full_divergence(z, t, ON, kind=kind)
    torch.testing.assert_close(expected_gradient(z, loss), gradient(exact, z))
    kl = naive(z.softmax(-1)[0].tolist(), t.exp()[0].tolist(), "reverse")
    assert (z.softmax(-1) * aux["kl"]).sum().item() == pytest.approx(kl)
    if kind == "forward":
        assert (z.softmax(-1) * loss).sum().item() == pytest.approx(kl)


def test_the_advantage_is_clipped_only_on_request_and_carries_no_gradient() -> None:
    logp = torch.tensor([-1.0, -9.0, -2.0], requires_grad=True)
    teacher, mask = torch.tensor([-2.0, -1.0, math.nan]), torch.tensor([True, True, False])
    adv, aux = distill_advantage(logp, teacher, mask)
    assert adv.tolist() == [-1.0, 8.0, 0.0] and aux["kl"].tolist() == [1.0, -8.0, 0.0]
    assert distill_advantage(logp, teacher, mask, clip=5.0)[0].tolist() == [-1.0, 5.0, 0.0]
    assert not adv.requires_grad


# ── The contract ──────────────────────────────────────────────────────────────────────────────────────────


def call(name: str, kind: Any) -> Any:
    def topk(x: dict[str, Tensor], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ids, wide = (
            torch.tensor([3, 0]).expand(*mask.shape, 2),
            torch.promote_types(x["logits_ref"].dtype, torch.float32),
        )
        teacher = x["logits_ref"].to(wide).log_softmax(-1)[..., [3, 0]]
        return topk_divergence(x["logits"], ids, teacher, mask, kind=kind)

    return {
        "full": lambda x, mask: full_divergence(x["logits"], x["logits_ref"], mask, kind=kind),
        "topk": topk,
        "sampled": lambda x, mask: sampled_divergence(x["logp"], x["logp_ref"], mask, kind=kind),
    }[name]


CALLS = [(n, k) for n in ("full", "topk") for k in KINDS] + [("sampled", "forward"), ("sampled", "reverse")]
every_call = pytest.mark.parametrize(("name", "kind"), CALLS)


@every_call
def test_no_property_of_the_invariance_kit_is_broken(name: str, kind: str) -> None:
    inputs, mask = example()
    fn, wrt = call(name, kind), "logp" if name == "sampled" else "logits"

    def weight(mask: Tensor, totals: Totals) -> Tensor:
        return mask / max(totals.tokens, 1)

    assert failures(from_token_loss(lambda x, m: fn(x, m)[0], weight), inputs, mask, wrt=wrt) == {}


@every_call
def test_one_graph_and_the_same_numbers_compiled(name: str, kind: str) -> None:
    inputs, mask = example()
    fn, wrt = call(name, kind), "logp" if name == "sampled" else "logits"
    x = {**inputs, wrt: inputs[wrt].clone().requires_grad_()}
    torch._dynamo.reset()
    loss, aux = torch.compile(fn, fullgraph=True, backend="aot_eager")(x, mask)
    want, want_aux = fn(x, mask)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(aux, want_aux)
    torch.testing.assert_close(gradient(loss, x[wrt]), gradient(want, x[wrt]))
    assert not any(v.requires_grad for v in aux.values()) and all(not v[~mask].any() for v in aux.values())


@every_call
def test_bfloat16_inputs_lose_nothing_but_their_own_rounding(name: str, kind: str) -> None:
    """Within 1e-5 nats, and 1e-5 of the loss, of float64 on the same rounded inputs."""
    inputs, mask = example()
    low = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    exact = {k: v.double() if v.is_floating_point() else v for k, v in low.items()}
    loss, _ = call(name, kind)(low, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), call(name, kind)(exact, mask)[0], rtol=1e-5, atol=1e-5)


# ── Reported elsewhere ────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"kind": "backward"}, "kind"), ({"temperature": 0.0}, "temperature"), ({"beta": 1.5}, "beta"),
        ({"alpha": 0.0}, "alpha"), ({"vocab": 9}, "vocab"), ({"teacher_temperature": -1.0}, "temperature"),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(bad: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        full_divergence(logs(0.5, 0.5), logs(0.5, 0.5), ON, **bad)


def test_top_k_of_one_renormalised_and_ids_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="always 0"):
        topk_divergence(logs(0.5, 0.5), torch.tensor([[0]]), logs(0.5), ON, tail=False)
    with pytest.raises(ValueError, match="teacher_ids"):
        topk_divergence(logs(0.5, 0.5), torch.tensor([[0, 1]]), logs(0.5), ON)
    with pytest.raises(ValueError, match="clip"):
        distill_advantage(torch.zeros(1), torch.zeros(1), ON, clip=0.0)
