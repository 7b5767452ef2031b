"""Divergences from one teacher, and the sampled reverse KL: definitions and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from losses.distill import (
    KINDS,
    distill_advantage,
    full_divergence,
    partition_divergence,
    sampled_divergence,
    topk_divergence,
)
from tests.losses.divergences import ON, every_kind, expected_gradient, gradient, logs, naive, rows

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
