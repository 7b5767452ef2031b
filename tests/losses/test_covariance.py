"""Clip-Cov and KL-Cov: which tokens are chosen, and what becomes of them."""

from __future__ import annotations

import torch
from torch import Tensor

import losses
from tests.losses.invariance import example


def test_clip_cov_picks_by_covariance_and_noise_and_silences_its_pick() -> None:
    g = torch.Generator().manual_seed(0)
    shape = (20, 50)
    logp, adv, noise = torch.randn(3, *shape, generator=g, dtype=torch.float64)
    mask = torch.rand(shape, generator=g) < 0.8
    noise = torch.rand(shape, generator=g)
    picked, aux = losses.select_clip_cov(logp, logp, adv, mask, noise, ratio=0.01, cov_low=0.5, cov_high=2.0)
    n = int(mask.sum())
    cov = (adv - adv[mask].mean()) * (logp - logp[mask].mean())
    torch.testing.assert_close(aux["cov"], torch.where(mask, cov, 0.0))
    candidates = sorted(
        (noise[i, j].item(), i, j) for i, j in (mask & (cov > 0.5) & (cov < 2)).nonzero().tolist()
    )
    assert sorted((i, j) for _, i, j in candidates[: int(0.01 * n)]) == sorted(
        map(tuple, picked.nonzero().tolist())
    )

    leaf = logp.clone().requires_grad_()
    value, aux = losses.clip_cov_loss(leaf, logp, adv, mask, picked)
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(grad, torch.where(mask & ~picked, -adv, 0.0))
    assert aux["selected"].sum() == picked.sum()


def test_kl_cov_picks_the_largest_covariances_and_pulls_them_to_the_sampler() -> None:
    g = torch.Generator().manual_seed(0)
    logp, logp_mu, adv = torch.randn(3, 300, generator=g, dtype=torch.float64)
    mask = torch.rand(300, generator=g) < 0.8
    picked, aux = losses.select_kl_cov(logp, adv, mask, ratio=0.02)
    k = int(0.02 * int(mask.sum()))
    top = torch.where(mask, aux["cov"], -torch.inf).topk(k).indices
    assert set(picked.nonzero().flatten().tolist()) == set(top.tolist())

    leaf = logp.clone().requires_grad_()
    value, _ = losses.kl_cov_loss(leaf, logp_mu, adv, mask, picked, coef=0.5)
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    rho = (logp - logp_mu).exp()
    pull = torch.where(picked, 0.5 * (logp - logp_mu).sign(), 0.0)
    torch.testing.assert_close(grad, torch.where(mask, -rho * adv + pull, 0.0))


def test_a_covariance_choice_takes_one_token_at_least_if_there_is_one() -> None:
    adv, mask = torch.tensor([3.0, -3.0, 0.0]), torch.tensor([True, True, False])
    picked, _ = losses.select_kl_cov(adv, adv, mask)
    assert int(picked.sum()) == 1
    assert not losses.select_kl_cov(adv, adv, mask & False)[0].any()


def choices(x: dict[str, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
    a, _ = losses.select_clip_cov(
        x["logp"], x["logp_mu"], x["adv"], mask, x["logits"][..., 0].sigmoid(), cov_low=0.1
    )
    b, _ = losses.select_kl_cov(x["logp"], x["adv"], mask, ratio=0.1)
    return a, b


def test_covariance_choices_ignore_what_is_off_mask_and_compile_to_one_graph() -> None:
    x, mask = example()
    spoilt = {k: torch.where(mask, v, float("nan")) for k, v in x.items() if k in ("logp", "logp_mu", "adv")}
    want = choices(x, mask)
    assert all(torch.equal(a, b) for a, b in zip(want, choices({**x, **spoilt}, mask), strict=True))
    torch._dynamo.reset()
    compiled = torch.compile(choices, fullgraph=True, backend="eager")(x, mask)
    assert all(torch.equal(a, b) for a, b in zip(want, compiled, strict=True))
