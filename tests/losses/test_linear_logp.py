"""The fused head against plain float64 logits: values, gradients, memory, work."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from losses.linear_logp import linear_logp
from tests.losses.watch import Watch

T, D, V = 11, 6, 37
HEADS = [
    {}, {"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.3}, {"logit_scale": 0.25},
    {"bias": True, "softcap": 3.0, "logit_scale": 0.5, "temperature": 0.8},
]  # fmt: skip


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, target."""
    g = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in ((T, D), (V, D), (V,)))
    return h.requires_grad_(), w.requires_grad_(), b.requires_grad_(), torch.randint(V, (T,), generator=g)


def naive(h: Tensor, w: Tensor, y: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
          logit_scale: float = 1.0, softcap: float | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    a = (h.double() @ w.double().T + (0 if bias is None else bias.double())) * logit_scale
    z = (a if softcap is None else softcap * torch.tanh(a / softcap)) / temperature
    log_p = z.log_softmax(-1)
    return log_p[torch.arange(len(y)), y], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_values_and_gradients_are_those_of_full_logits(head: dict[str, Any], chunk: int) -> None:
    h, w, b, y = problem()
    head = {**head, "bias": b if head.get("bias") else None}
    g = torch.Generator().manual_seed(1)
    u, v = torch.randn(2, T, generator=g, dtype=torch.float64)
    got, want = linear_logp(h, w, y, chunk=chunk, **head), naive(h, w, y, **head)
    torch.testing.assert_close(got, want)
    wrt = (h, w, b) if head["bias"] is not None else (h, w)
    grads = [torch.autograd.grad((u * logp + v * entropy).sum(), wrt) for logp, entropy in (got, want)]
    torch.testing.assert_close(*grads)


def test_gradients_agree_with_finite_differences() -> None:
    h, w, b, y = problem()
    f = lambda h, w, b: linear_logp(h, w, y, bias=b, softcap=2.0, temperature=0.9, chunk=4)  # noqa: E731
    assert torch.autograd.gradcheck(f, (h, w, b))


def test_the_gradient_of_the_logits_has_its_closed_form() -> None:
    _, w, _, y = problem()
    z = torch.randn(T, V, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    logp, entropy = linear_logp(z, torch.eye(V, dtype=torch.float64), y, chunk=4)
    p = z.softmax(-1).detach()
    (got,) = torch.autograd.grad(logp.sum(), z, retain_graph=True)
    torch.testing.assert_close(got, torch.eye(V, dtype=torch.float64)[y] - p)
    (got,) = torch.autograd.grad(entropy.sum(), z)
    torch.testing.assert_close(got, -p * (p.log() + entropy.detach()[:, None]))


def test_unknown_targets_give_zero_without_gradient_and_keep_their_entropy() -> None:
    h, w, _, y = problem()
    y[2], y[5] = -100, V
    logp, entropy = linear_logp(h, w, y, chunk=4)
    assert logp[2] == logp[5] == 0 and (entropy > 0).all()
    (grad,) = torch.autograd.grad(logp.sum(), h)
    assert not grad[[2, 5]].any() and grad[[0, 1, 3, 4]].all()


def test_nan_in_rows_that_the_loss_leaves_out_reaches_no_gradient() -> None:
    h, w, _, y = problem()
    mask = torch.arange(T) != 3
    spoilt = torch.where(mask[:, None], h.detach(), math.nan).requires_grad_()
    grads = []
    for x in (h, spoilt):
        logp, entropy = linear_logp(x, w, y, chunk=4)
        grads.append(torch.autograd.grad((torch.where(mask, logp + entropy, 0.0)).sum(), (x, w)))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def test_tokens_that_the_head_excludes_have_no_probability() -> None:
    h, w, _, y = problem()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[30:] = -math.inf
    y = y % 30
    for softcap in (None, 3.0):
        got = linear_logp(h, w, y, bias=bias, softcap=softcap, chunk=4)
        want = linear_logp(h, w[:30], y, softcap=softcap, chunk=4)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad((a + b).sum(), (h, w)) for a, b in (got, want)]
        torch.testing.assert_close(*grads)


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    _, w, _, y = problem()
    h = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    logp, entropy = linear_logp(h, w, y[:0])
    dh, dw = torch.autograd.grad((logp + entropy).sum(), (h, w))
    assert logp.shape == entropy.shape == (0,) and dh.shape == (0, D) and not dw.any()


def test_eager_functional_and_compiled_gradients_are_one_O079() -> None:
    h, w, _, y = problem(torch.float32)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        logp, entropy = linear_logp(h, w, y, chunk=4, temperature=0.8)
        return (logp.exp() * entropy).sum()

    want = torch.autograd.grad(loss(h, w), (h, w))
    torch.testing.assert_close(
        torch.func.grad(loss, argnums=(0, 1))(h.detach(), w.detach()), want, rtol=1e-5, atol=1e-6
    )
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(h, w), (h, w)), want, rtol=1e-5, atol=1e-6)


def test_bfloat16_comes_back_as_float32_within_the_rounding_of_its_logits() -> None:
    """Logits of size 8 round by 2^-6 in bfloat16: log-probs and entropies are within 2^-5 nats of float64."""
    h, w, _, y = problem(torch.bfloat16)
    got, want = linear_logp(h, w, y, chunk=4), naive(h, w, y)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2**-5)
    grads = [torch.autograd.grad(logp.mean(), (h, w)) for logp in (got[0], want[0])]
    for a, b in zip(*grads, strict=True):
        assert a.dtype == torch.bfloat16 and (a.double() - b.double()).norm() < 0.02 * b.double().norm()


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    h, w = torch.randn(64, 3, requires_grad=True), torch.randn(50, 3, requires_grad=True)
    with Watch() as seen:
        logp, entropy = linear_logp(h, w, torch.zeros(64, dtype=torch.int64), chunk=8)
        (logp + entropy).sum().backward()
    assert seen.numel == 8 * 50


def test_each_chunk_takes_four_matmuls() -> None:
    h, w, _, y = problem()
    with Watch() as seen:
        linear_logp(h, w, y, chunk=4)[0].sum().backward()
    assert seen.matmuls == 4 * 3


def test_arguments_and_random_state_are_untouched_and_two_calls_agree_in_every_bit() -> None:
    h, w, b, y = problem(torch.float32)
    before, rng = [x.detach().clone() for x in (h, w, b, y)], torch.get_rng_state()
    runs = []
    for _ in range(2):
        logp, entropy = linear_logp(h, w, y, bias=b, chunk=4)
        runs.append([logp, entropy, *torch.autograd.grad((logp * entropy).sum(), (h, w, b))])
    assert all(torch.equal(x, z) for x, z in zip(*runs, strict=True))
    assert all(torch.equal(x, z) for x, z in zip(before, (h, w, b, y), strict=True))
    assert torch.equal(rng, torch.get_rng_state())


def test_O026_temperature_applies_to_the_log_prob() -> None:
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    logp, _ = linear_logp(logits, torch.eye(2, dtype=torch.float64), torch.tensor([0]), temperature=0.5)
    assert logp.item() == pytest.approx(-0.01815, abs=1e-5)


def test_O027_scoring_twice_gives_a_ratio_of_exactly_one() -> None:
    h, w, _, y = problem(torch.bfloat16)
    with torch.no_grad():
        old, _ = linear_logp(h, w, y, chunk=4)
    new, _ = linear_logp(h, w, y, chunk=4)
    assert torch.equal(new, old) and ((new - old).exp() == 1).all()


def test_O077_a_float32_accumulator_keeps_what_bfloat16_loses() -> None:
    """64 chunks that add the same small gradient to one row."""
    h, w = torch.full((64, 1), 1.0).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    y = torch.zeros(64, dtype=torch.int64)
    scale = torch.full((64,), 1e-2)
    scale[0] = 8.0
    want = (0.5 * scale).sum()
    grads = {}
    for dtype in (torch.bfloat16, torch.float32):
        logp, _ = linear_logp(h, w, y, chunk=1, grad_dtype=dtype)
        grads[dtype] = torch.autograd.grad((scale * logp).sum(), w)[0][0].float().item()
    assert abs(grads[torch.float32] - want) < 0.01 < 0.2 < abs(grads[torch.bfloat16] - want)


def test_O078_a_tied_head_gets_the_gradient_of_both_its_uses() -> None:
    w = torch.randn(V, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    ids, y = torch.arange(5), torch.arange(5) + 1
    (got,) = torch.autograd.grad(linear_logp(w[ids].tanh(), w, y, chunk=2)[0].sum(), w)
    (want,) = torch.autograd.grad(naive(w[ids].tanh(), w, y)[0].sum(), w)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "bad", [{"temperature": 0.0}, {"chunk": 0}, {"softcap": -1.0}, {"logit_scale": 0.0}], ids=str
)
def test_scales_and_chunks_that_are_not_positive_are_refused(bad: dict[str, Any]) -> None:
    h, w, _, y = problem()
    with pytest.raises(ValueError, match="> 0"):
        linear_logp(h, w, y, **bad)


def test_shapes_that_do_not_fit_are_refused() -> None:
    h, w, _, y = problem()
    with pytest.raises(ValueError, match="hidden"):
        linear_logp(h, w[:, :-1], y)
    with pytest.raises(ValueError, match="target"):
        linear_logp(h, w, y[:-1])
