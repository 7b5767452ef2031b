"""Several teachers: what each way of combining them is, and is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from losses.distill import distill_advantage, full_divergence
from losses.distill_teachers import average_teachers, mix_sampled, mix_teachers, route_teachers

TWO = torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]], dtype=torch.float64).log()  # [K=2, T=1, V=2]
STUDENT = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log()
ON = torch.tensor([True])


def random(k: int = 3, n: int = 4, v: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(k + 1, n, v, generator=g, dtype=torch.float64)
    return z[0], z[1:].log_softmax(-1), torch.rand(k, n, generator=g, dtype=torch.float64)


def test_the_arithmetic_mixture_shifts_forward_and_the_geometric_one_reverse_by_a_constant() -> None:
    z, t, w = random()
    w = w / w.sum(0)
    mask = torch.ones(4, dtype=torch.bool)
    pairs: Any = (("forward", "arithmetic"), ("reverse", "geometric"))
    constant = torch.zeros(())
    for k, mixture in pairs:
        each, _ = full_divergence(z, t, mask.expand(3, 4), kind=k)
        mixed, _ = full_divergence(z, mix_teachers(t, w, kind=mixture), mask, kind=k)
        other, _ = full_divergence(2 * z.flip(-1), t, mask.expand(3, 4), kind=k)
        other_mixed, _ = full_divergence(2 * z.flip(-1), mix_teachers(t, w, kind=mixture), mask, kind=k)
        constant = average_teachers(each, w) - mixed
        torch.testing.assert_close(constant, average_teachers(other, w) - other_mixed)
    log_z = (w.unsqueeze(-1) * t).sum(0).logsumexp(-1)
    torch.testing.assert_close(constant, -log_z)


def test_mixtures_are_distributions_by_their_definitions() -> None:
    _, t, w = random()
    p = w / w.sum(0)
    torch.testing.assert_close(
        mix_teachers(t, w, kind="arithmetic").exp(), (p.unsqueeze(-1) * t.exp()).sum(0)
    )
    geometric = (t.exp() ** p.unsqueeze(-1)).prod(0)
    want = geometric / geometric.sum(-1, keepdim=True)
    torch.testing.assert_close(mix_teachers(t, w, kind="geometric").exp(), want)


def test_sampled_mixtures_are_those_of_the_vocabulary_but_for_the_geometric_normaliser() -> None:
    _, t, w = random()
    ids = torch.tensor([[[0], [5], [2], [2]]])
    picked = t.gather(-1, ids.expand(3, 4, 1)).squeeze(-1)
    kinds: Any = ("arithmetic", "geometric")
    for kind in kinds:
        full = mix_teachers(t, w, kind=kind).gather(-1, ids[0]).squeeze(-1)
        sampled = mix_sampled(picked, w, kind=kind)
        log_z = 0.0 if kind == "arithmetic" else ((w / w.sum(0)).unsqueeze(-1) * t).sum(0).logsumexp(-1)
        torch.testing.assert_close(sampled - log_z, full)


def test_the_missing_normaliser_is_a_baseline_of_the_advantage() -> None:
    z, t, _ = random(2, 1)
    z.requires_grad_()
    logp, every = z.log_softmax(-1), torch.ones(1, 6, dtype=torch.bool)
    grads = []
    for teacher in (
        mix_sampled(t, [1.0, 2.0], kind="geometric"),
        mix_teachers(t, [1.0, 2.0], kind="geometric"),
    ):
        adv, _ = distill_advantage(logp, teacher, every)
        grads.append(torch.autograd.grad(-(logp.detach().exp() * adv * logp).sum(), z, retain_graph=True)[0])
    torch.testing.assert_close(*grads)


def test_each_token_takes_its_own_teacher_and_none_is_masked() -> None:
    _, t, _ = random()
    route = torch.tensor([2, -1, 0, 1])
    full, mask = route_teachers(t, route)
    assert mask.tolist() == [True, False, True, True]
    for i, k in enumerate(route.tolist()):
        assert torch.equal(full[i], t[k, i] if k >= 0 else torch.zeros(6, dtype=t.dtype))
    sampled, _ = route_teachers(t[..., 3], route)
    assert torch.equal(sampled, full[..., 3])
    with pytest.raises(ValueError, match="route"):
        route_teachers(t, route[:3])
    with pytest.raises((IndexError, RuntimeError), match="index"):
        route_teachers(t, torch.tensor([0, 0, 0, 3]))


def test_a_teacher_of_weight_zero_may_be_infinite_and_a_token_without_weights_is_nan() -> None:
    loss = torch.tensor([[1.0, 2.0], [math.inf, 4.0]])
    assert average_teachers(loss, [1.0, 0.0]).tolist() == [1.0, 2.0]
    per_token = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert average_teachers(loss, per_token)[0] == 1.0 and average_teachers(loss, per_token)[1].isnan()


@pytest.mark.parametrize("fn", ["mix_teachers", "mix_sampled", "average_teachers"])
def test_one_graph_and_arguments_untouched(fn: str) -> None:
    _, t, w = random()

    def run(t: Tensor, w: Tensor) -> Tensor:
        if fn == "mix_teachers":
            return mix_teachers(t, w, kind="geometric") + mix_teachers(t, [1.0, 1.0, 2.0], kind="arithmetic")
        return (
            mix_sampled(t[..., 0], w, kind="arithmetic")
            if fn == "mix_sampled"
            else average_teachers(-t[..., 0], w)
        )

    before = t.clone(), w.clone()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(t, w), run(t, w))
    assert torch.equal(t, before[0]) and torch.equal(w, before[1])
    assert run(t.bfloat16(), w.bfloat16()).dtype == torch.float32


def test_O039_a_mixture_of_teachers_is_a_distribution() -> None:
    arithmetic = mix_teachers(TWO, [0.5, 0.5], kind="arithmetic")
    assert full_divergence(STUDENT, arithmetic, ON)[0].item() == pytest.approx(0.0, abs=1e-12)
    wanted: Any = (("reverse", 0.1180), ("forward", 0.1017))
    for kind, want in wanted:
        each, _ = full_divergence(STUDENT, TWO, ON.expand(2, 1), kind=kind)
        assert average_teachers(each, [0.5, 0.5]).item() == pytest.approx(want, abs=1e-4)
    assert mix_teachers(TWO, [0.5, 0.5], kind="geometric").exp()[0].tolist() == pytest.approx([0.75, 0.25])
    assert mix_sampled(TWO, [0.5, 0.5], kind="geometric").exp().sum().item() == pytest.approx(0.894, abs=1e-3)


@pytest.mark.parametrize("weight", [(3.0, 1.0), (0.75, 0.25)])
def test_O040_weights_are_brought_to_sum_one(weight: tuple[float, float]) -> None:
    each, _ = full_divergence(STUDENT, TWO, ON.expand(2, 1))
    for w in (weight, torch.tensor(weight), torch.tensor(weight)[:, None]):
        assert average_teachers(each, w).item() == pytest.approx(0.1358, abs=1e-4)


@pytest.mark.parametrize("weight", [[-1.0, 2.0], [0.0, 0.0], [math.nan, 1.0], [1.0], [1.0, 1.0, 1.0], []])
def test_O040_weights_that_cannot_be_normalised_are_refused(weight: list[float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        mix_teachers(TWO, weight, kind="arithmetic")
