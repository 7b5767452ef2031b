"""Gradients found in the forward pass are those of plain float64 logits, for every kind of per-token loss."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from losses.distill import partition_divergence, topk_divergence
from losses.grpo import grpo_loss
from losses.linear_logp import linear_logp
from losses.linear_loss import linear_loss, rows_torch, separable
from tests.losses.full_logits import D, T, V, naive, ours, problem
from tests.losses.watch import Watch

HEADS = [
    {},
    {"temperature": 0.7, "logit_scale": 0.5},
    {"softcap": 2.0, "temperature": 1.2},
    {"bias": True, "softcap": 3.0},
]
forms = pytest.mark.parametrize(("entropy", "topk"), list(itertools.product([False, True], repeat=2)))


@forms
@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("chunk", [4, 100])
def test_loss_and_gradients_are_those_of_full_logits(
    entropy: bool, topk: bool, head: dict[str, Any], chunk: int
) -> None:
    x = problem()
    head = {**head, "bias": x["bias"] if head.get("bias") else None}
    wrt = [x["h"], x["w"], *([x["bias"]] if head["bias"] is not None else [])]
    loss, aux = ours(x, entropy=entropy, topk=topk, head=head, chunk=chunk)
    want, logp, h = naive(x, entropy=entropy, topk=topk, head=head)
    torch.testing.assert_close(loss, want)
    on = x["token_weight"] > 0
    torch.testing.assert_close(aux["logp"][on], logp[on])
    torch.testing.assert_close(aux["entropy"][on], h[on])
    assert {"loss", "rho"} <= set(aux) and not any(v.requires_grad or v[~on].any() for v in aux.values())
    got, true = torch.autograd.grad(loss, wrt), torch.autograd.grad(want, wrt)
    torch.testing.assert_close(got[:2], true[:2])
    torch.testing.assert_close(got[2:], true[2:], rtol=1e-5, atol=1e-7)  # a bias gradient adds up in float32
    assert not got[0][5].any()


def test_gradients_agree_with_finite_differences() -> None:
    x = problem(n=5)
    smooth = separable(lambda logp, h, log_k, rest: ((logp - 0.1 * h).exp() + log_k.sin().sum(-1) * rest, {}))

    def f(h: Tensor, w: Tensor) -> Tensor:
        return linear_loss(
            h, w, x["y"], x["token_weight"], smooth, entropy=True, topk_ids=x["ids"], softcap=2.0, chunk=2
        )[0]

    g = torch.Generator().manual_seed(1)
    dh, dw = torch.autograd.grad(f(x["h"], x["w"]), (x["h"], x["w"]))
    for _ in range(5):
        a, b = (torch.randn(v.shape, generator=g, dtype=torch.float64) for v in (x["h"], x["w"]))
        ahead, behind = (f(x["h"].detach() + e * a, x["w"].detach() + e * b) for e in (1e-5, -1e-5))
        assert ((a * dh).sum() + (b * dw).sum()).item() == pytest.approx(
            ((ahead - behind) / 2e-5).item(), rel=1e-6
        )


def test_it_composes_with_the_distillation_on_plain_logits() -> None:
    x = problem(n=5)
    distil = separable(
        lambda logp, log_k, rest, t: partition_divergence(
            log_k, rest, t, torch.ones_like(logp, dtype=torch.bool)
        )
    )
    ids, on = x["ids"], torch.ones(5, dtype=torch.bool)
    loss, aux = linear_loss(
        x["h"], x["w"], x["y"], x["token_weight"], distil, x["teacher"], topk_ids=ids, chunk=2
    )
    want, _ = topk_divergence(x["h"] @ x["w"].T, ids, x["teacher"], on)
    torch.testing.assert_close(aux["loss"], want.detach())
    wrt = (x["h"], x["w"])
    torch.testing.assert_close(
        torch.autograd.grad(loss, wrt), torch.autograd.grad((x["token_weight"] * want).sum(), wrt)
    )


def test_three_matmuls_a_chunk_none_of_them_for_what_needs_no_gradient_and_no_tensor_beyond_a_chunk() -> None:
    x = problem()
    with Watch() as seen:
        ours(x, head={}, chunk=4)[0].backward()
    assert seen.matmuls == 3 * 3 and seen.numel == V * D < T * V  # the largest is the head
    x["w"].requires_grad_(False)
    with Watch() as seen:
        ours(x, head={}, chunk=4)[0].backward()
    assert seen.matmuls == 2 * 3 and seen.numel == V * D
    with torch.no_grad(), Watch() as seen:
        loss, _ = ours(x, head={}, chunk=4)
    assert seen.matmuls == 3 and not loss.requires_grad


def test_the_inner_sum_may_be_split_and_the_chunk_be_left_to_the_default() -> None:
    x = problem()
    x["w"] = x["w"][:36].detach().requires_grad_()  # 36 = 4 · 9
    x["y"], x["ids"] = x["y"].clamp(max=35), x["ids"].clamp(max=35)
    ways: list[dict[str, Any]] = [{"chunk": 4}, {"chunk": 4, "splits": 4}, {}]
    got = [torch.autograd.grad(ours(x, entropy=True, head={}, **kw)[0], (x["h"], x["w"])) for kw in ways]
    torch.testing.assert_close(got[1], got[0])
    torch.testing.assert_close(got[2], got[0])
    with pytest.raises(ValueError, match="divide V"):
        ours(x, head={}, splits=5)


def test_micro_batches_of_any_size_add_up_to_the_step() -> None:
    x = problem()
    wrt = (x["h"], x["w"])
    whole = torch.autograd.grad(ours(x, entropy=True, topk=True, head={}, chunk=4)[0], wrt)
    parts = [torch.zeros_like(g) for g in wrt]
    for at in (slice(0, 2), slice(2, 6), slice(6, 6), slice(6, T)):
        rows = {k: v if k in ("w", "bias") else v[at] for k, v in x.items()}
        for part, g in zip(
            parts,
            torch.autograd.grad(ours(rows, entropy=True, topk=True, head={}, chunk=3)[0], wrt),
            strict=True,
        ):
            part += g
    torch.testing.assert_close(tuple(parts), whole)


def test_no_tokens_give_zero_with_a_graph_and_the_same_keys() -> None:
    x = problem()
    none = {k: v if k in ("w", "bias") else v[:0] for k, v in x.items()}
    loss, aux = ours(none, entropy=True, topk=True, head={})
    assert loss.item() == 0 and set(aux) == set(ours(x, entropy=True, topk=True, head={})[1])
    dw, dh = torch.autograd.grad(loss, (x["w"], none["h"]))
    assert not dw.any() and dh.shape == (0, D)


def test_all_weights_zero_give_zero_gradients_whatever_stands_there() -> None:
    x = problem()
    x["token_weight"] = torch.zeros(T, dtype=torch.float64)
    with torch.no_grad():
        x["h"].fill_(math.nan)
        x["teacher"] = x["teacher"] * math.nan
    loss, aux = ours(x, entropy=True, topk=True, head={}, chunk=4)
    grads = torch.autograd.grad(loss, (x["h"], x["w"]))
    assert loss.item() == 0 and not any(g.any() for g in grads) and not aux["loss"].any()


def test_backward_scales_and_a_second_one_is_refused() -> None:
    x = problem()
    loss, _ = ours(x, head={}, chunk=4)
    (tripled,) = torch.autograd.grad(3 * loss, x["w"], retain_graph=True)
    torch.testing.assert_close(tripled, 3 * torch.autograd.grad(naive(x, head={})[0], x["w"])[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x["w"])


@pytest.mark.parametrize(("entropy", "topk"), [(False, False), (True, True)])
def test_eager_functional_and_compiled_gradients_are_one_O079(entropy: bool, topk: bool) -> None:
    x = problem(torch.float32)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return ours({**x, "h": h, "w": w}, entropy=entropy, topk=topk, head={"temperature": 0.8}, chunk=6)[0]

    want = torch.autograd.grad(loss(x["h"], x["w"]), (x["h"], x["w"]))
    functional = torch.func.grad(loss, argnums=(0, 1))(x["h"].detach(), x["w"].detach())
    torch.testing.assert_close(functional, want, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x["h"], x["w"]), (x["h"], x["w"])), want, rtol=1e-5, atol=1e-6
    )


def test_the_token_loss_and_the_work_on_rows_may_be_compiled_by_the_caller() -> None:
    x = problem(torch.float32)
    fn = separable(
        lambda logp, adv, logp_mu: grpo_loss(logp, logp_mu, adv, torch.ones_like(adv, dtype=torch.bool))
    )
    args = (x["h"], x["w"], x["y"], x["token_weight"])
    fast = {
        "token_loss": torch.compile(fn, backend="aot_eager"),
        "rows": torch.compile(rows_torch, backend="aot_eager"),
    }
    grads = []
    for token_loss, rows in ((fn, None), (fast["token_loss"], fast["rows"])):
        loss, _ = linear_loss(*args, token_loss, x["adv"], x["logp_mu"], rows=rows, chunk=6)
        grads.append(torch.autograd.grad(loss, (x["h"], x["w"])))
    torch.testing.assert_close(*grads)


def test_bfloat16_gradients_are_within_two_percent_and_float32_logits_within_half_a_percent() -> None:
    """Relative to the norm. Logits of size 8 round by 2^-6 in bfloat16; the gradients themselves by 2^-9."""
    x = problem(torch.bfloat16)
    f32 = torch.float32
    want = torch.autograd.grad(naive(x, entropy=True, topk=True, head={})[0], (x["h"], x["w"]))
    for limit, kw in ((0.02, {}), (0.005, {"logit_dtype": f32, "grad_dtype": f32})):
        loss, aux = ours(x, entropy=True, topk=True, head={}, chunk=4, **kw)
        got = torch.autograd.grad(loss, (x["h"], x["w"]))
        assert loss.dtype == aux["logp"].dtype == aux["entropy"].dtype == f32
        for a, b in zip(got, want, strict=True):
            assert a.dtype == torch.bfloat16 and (a.double() - b.double()).norm() < limit * b.double().norm()


def test_arguments_and_random_state_are_untouched_and_two_calls_agree_in_every_bit() -> None:
    x = problem()
    before, rng = {k: v.detach().clone() for k, v in x.items()}, torch.get_rng_state()
    runs = []
    for _ in range(2):
        loss, aux = ours(x, entropy=True, topk=True, head={"softcap": 3.0}, chunk=4)
        runs.append([loss, aux["entropy"], *torch.autograd.grad(loss, (x["h"], x["w"]))])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for k, v in before.items():
        torch.testing.assert_close(x[k].detach(), v, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rng, torch.get_rng_state())


def test_O027_both_heads_score_alike() -> None:
    x = problem(torch.bfloat16, n=8)
    _, aux = ours(x, head={}, chunk=4)
    logp, entropy = linear_logp(x["h"], x["w"], x["y"], chunk=4)
    torch.testing.assert_close(aux["logp"], logp, rtol=0, atol=1e-6)
    torch.testing.assert_close(aux["entropy"], entropy, rtol=0, atol=1e-5)


def test_shapes_and_scales_that_do_not_fit_are_refused() -> None:
    x = problem()
    for bad in ({"y": x["y"][:-1]}, {"adv": x["adv"][:-1]}, {"w": x["w"].float()}, {"ids": x["ids"][:, 0]}):
        with pytest.raises(ValueError, match="linear_loss: want hidden"):
            ours({**x, **bad}, topk=True, head={})
    for head in ({"temperature": 0.0}, {"softcap": -1.0}, {"logit_scale": -2.0}, {"chunk": 0}):
        with pytest.raises(ValueError, match="> 0"):
            ours(x, head=head)
