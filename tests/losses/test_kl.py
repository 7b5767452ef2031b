"""KL estimators: exact expectations over small vocabularies, and gradients in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import losses
from tests.losses.invariance import example

F64 = torch.float64
ON = torch.ones((), dtype=torch.bool)
Estimator = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def setting(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy (with gradient), log-probs of a reference and of a sampler, over four tokens."""
    g = torch.Generator().manual_seed(seed)
    z, ref, mu = torch.randn(3, 4, generator=g, dtype=F64)
    return z.requires_grad_(), ref.log_softmax(-1), mu.log_softmax(-1)


def gradient(value: Tensor, z: Tensor) -> Tensor:
    return torch.autograd.grad(value, z, retain_graph=True)[0]


@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_in_exact_expectation_are_those_the_table_promises(seed: int) -> None:
    """E over tokens of the policy, the sampling not differentiated."""
    z, ref, _ = setting(seed)
    logp = z.log_softmax(-1)
    p, on = logp.exp(), torch.ones(4, dtype=torch.bool)
    reverse, forward = kl(p, ref.exp()), kl(ref.exp(), p)
    exact = {
        losses.k1: (reverse, torch.zeros(4, dtype=F64)),
        losses.k2: ((p * (logp - ref) ** 2).sum() / 2, gradient(reverse, z)),
        losses.k3: (reverse, gradient(forward, z)),
        losses.k1_st: (reverse, gradient(reverse, z)),
        losses.k3_st: (reverse, gradient(reverse, z)),
    }
    for estimator, (value, grad) in exact.items():
        sample, _ = estimator(logp, ref, on)
        expected = (p.detach() * sample).sum()
        torch.testing.assert_close(expected, value)
        torch.testing.assert_close(gradient(expected, z), grad)
    torch.testing.assert_close(gradient(reverse, z), p * (logp - ref - reverse))
    torch.testing.assert_close(gradient(forward, z), p - ref.exp())


@pytest.mark.parametrize("seed", range(3))
def test_importance_weighted_k3_has_value_and_gradient_of_the_reverse_divergence_on_any_samples(
    seed: int,
) -> None:
    z, ref, mu = setting(seed)
    logp, on = z.log_softmax(-1), torch.ones(4, dtype=torch.bool)
    reverse, forward = kl(logp.exp(), ref.exp()), kl(ref.exp(), logp.exp())
    for sampler in (mu, logp.detach()):
        value, _ = losses.k3_weighted(logp, ref, sampler, on)
        expected = (sampler.exp() * value).sum()
        torch.testing.assert_close(expected, reverse)
        torch.testing.assert_close(gradient(expected, z), gradient(reverse, z))
    k3, _ = losses.k3(logp, ref, on)
    detached = (mu.exp() * (logp.detach() - mu).exp() * k3).sum()  # the bug: a ratio without its gradient
    torch.testing.assert_close(gradient(detached, z), gradient(forward, z))


def test_a_reward_of_minus_beta_k1_gives_the_policy_gradient_of_minus_beta_kl() -> None:
    z, ref, _ = setting()
    logp, on = z.log_softmax(-1), torch.ones(4, dtype=torch.bool)
    reward, _ = losses.kl_reward(logp, ref, on, beta=0.3)
    assert not reward.requires_grad
    off, _ = losses.kl_reward(torch.full((4,), math.nan), ref, on & False, beta=0.3)
    assert off.tolist() == [0.0] * 4
    reinforce = (logp.detach().exp() * reward * logp).sum()
    torch.testing.assert_close(gradient(reinforce, z), gradient(-0.3 * kl(logp.exp(), ref.exp()), z))


@pytest.mark.parametrize("name", ["k2", "k3", "k3_weighted"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    x, mask = example()
    extra = (x["logp_mu"],) if name == "k3_weighted" else ()

    def total(logp: Tensor) -> Tensor:
        return getattr(losses, name)(logp, x["logp_ref"], *extra, mask)[0].sum()

    assert torch.autograd.gradcheck(total, x["logp"].clone().requires_grad_())


def test_k3_is_never_negative_and_exact_near_zero_where_exp_minus_one_is_not() -> None:
    d = torch.tensor([1e-6, -1e-6, 1e-4, 0.0], dtype=torch.float32)
    value, _ = losses.k3(d, torch.zeros(4), torch.ones(4, dtype=torch.bool))
    want = torch.expm1(-d.double()) + d.double()
    assert (value >= 0).all() and value[3] == 0
    torch.testing.assert_close(value.double(), want, rtol=0, atol=1e-11)
    naive = (-d).exp() - 1 + d
    assert (naive[:2] < 0).any() or (naive[:2].double() - want[:2]).abs().max() > 1e-8


def test_the_clamp_of_k3_stops_its_gradient_and_the_others_still_pull() -> None:
    logp, ref = torch.tensor([-40.0, -1.0], requires_grad=True), torch.tensor([-1.0, -40.0])
    mask = torch.ones(2, dtype=torch.bool)
    for name, want in (
        ("k3", [0.0, 0.0]),
        ("k2", [-39.0, 39.0]),
        ("k3_st", [-39.0, 39.0]),
        ("k1_st", [-39.0, 39.0]),
    ):
        value, aux = getattr(losses, name)(logp, ref, mask)
        assert value.isfinite().all()
        assert torch.autograd.grad(value.sum(), logp)[0].tolist() == want
    assert losses.k3(logp, ref, mask)[1]["clamped"].tolist() == [1, 1]
    near = torch.tensor([-20.5, -1.0]), torch.tensor([-1.0, -22.5])  # 19.5 and 21.5 nats
    for aux in (
        losses.k3(*near, mask)[1],
        losses.k3_st(*near, mask)[1],
        losses.k3_weighted(*near, near[0], mask)[1],
    ):
        assert aux["clamped"].tolist() == [0, 1]
    assert losses.k3(logp, ref, mask, clamp=100.0)[1]["clamped"].tolist() == [0, 0]


def test_bfloat16_log_probs_are_subtracted_in_float32() -> None:
    logp, ref = torch.tensor([-1.0078125]).bfloat16(), torch.tensor([-1.0])
    assert losses.k1(logp, ref, torch.ones(1, dtype=torch.bool))[0].item() == -0.0078125


def test_full_kl_is_the_sum_over_the_vocabulary_with_its_gradient_and_entropy() -> None:
    x, mask = example()
    z = x["logits"].clone().requires_grad_()
    value, aux = losses.full_kl(z, x["logits_ref"], mask)
    p, q = z.detach().softmax(-1), x["logits_ref"].softmax(-1)
    want = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(value, torch.where(mask, want, 0.0))
    torch.testing.assert_close(aux["entropy"], torch.where(mask, -(p * p.log()).sum(-1), 0.0))
    (grad,) = torch.autograd.grad(value.sum(), z)
    closed = p * ((p / q).log() - want[..., None])
    torch.testing.assert_close(grad, torch.where(mask[..., None], closed, 0.0))


def test_full_kl_of_impossible_tokens_is_zero_for_the_policys_and_infinite_for_the_references() -> None:
    inf = torch.inf
    z = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, -inf], [0.0, 0.0, 0.0]], requires_grad=True)
    ref = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -inf], [0.0, 0.0, -inf]])
    value, aux = losses.full_kl(z, ref, torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(value, torch.tensor([math.log(1.5), 0.0, inf]))
    torch.testing.assert_close(aux["entropy"], torch.tensor([2.0, 2.0, 3.0]).log())
    value, _ = losses.full_kl(z[:2], ref[:2], torch.ones(2, dtype=torch.bool))
    assert torch.autograd.grad(value.sum(), z)[0].isfinite().all()


def test_full_kl_and_entropy_are_exact_for_logits_of_ten_thousand() -> None:
    z, ref = torch.randn(2, 8, 50, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(8, dtype=torch.bool)
    shifted, aux = losses.full_kl(torch.round(z, decimals=2) + 1e4, ref, mask)
    exact = torch.round(z, decimals=2).add(1e4).double() - 1e4
    want, want_aux = losses.full_kl(exact, ref.double(), mask)
    torch.testing.assert_close(shifted.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(aux["entropy"].double(), want_aux["entropy"], rtol=1e-5, atol=1e-6)


def test_adaptive_beta_moves_towards_the_target_and_by_a_fifth_at_most() -> None:
    step = {"target": 0.1, "n": 10, "horizon": 100}
    assert losses.adaptive_beta(1.0, 0.11, **step) == pytest.approx(1.01)
    assert losses.adaptive_beta(1.0, 9.0, **step) == pytest.approx(1.02)
    assert losses.adaptive_beta(1.0, 0.0, **step) == pytest.approx(0.98)
    with pytest.raises(ValueError, match="positive"):
        losses.adaptive_beta(1.0, 0.1, target=0.0, n=1, horizon=1)
