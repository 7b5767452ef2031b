"""Log-probs of the distribution that was sampled, and masks from token ids."""

from __future__ import annotations

import math

import pytest
import torch

import losses


def test_log_probs_and_entropy_are_those_of_the_softmax_at_the_temperature() -> None:
    g = torch.Generator().manual_seed(0)
    z, target = (
        torch.randn(3, 4, 7, generator=g, dtype=torch.float64),
        torch.randint(0, 7, (3, 4), generator=g),
    )
    logp, aux = losses.token_logp(z, target, temperature=0.7)
    p = (z / 0.7).softmax(-1)
    torch.testing.assert_close(logp, p.gather(-1, target[..., None])[..., 0].log())
    torch.testing.assert_close(aux["entropy"], -(p * p.log()).sum(-1))


def test_the_gradient_is_one_hot_minus_softmax_over_temperature() -> None:
    z = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 6])
    (grad,) = torch.autograd.grad(losses.token_logp(z, target, temperature=2.0)[0].sum(), z)
    one_hot = torch.nn.functional.one_hot(target, 7)
    torch.testing.assert_close(grad, (one_hot - (z.detach() / 2).softmax(-1)) / 2)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    z = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()
    assert losses.nucleus(z, top_p=0.9).tolist() == [[True, True, True, False], [False, True, True, True]]
    assert losses.nucleus(z, top_p=0.5)[0].tolist() == [True, False, False, False]
    many = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    assert losses.nucleus(many, top_p=1.0).all()  # though a float32 running sum reaches 1 before the end
    assert losses.nucleus(torch.zeros(4), top_p=0.1).tolist() == [True, False, False, False]


def test_a_target_outside_the_allowed_set_has_probability_zero_and_the_entropy_stays_finite() -> None:
    allowed = torch.tensor([True, True, False])
    logp, aux = losses.token_logp(torch.zeros(2, 3), torch.tensor([0, 2]), allowed=allowed)
    assert logp.tolist() == [pytest.approx(math.log(0.5)), -math.inf]
    torch.testing.assert_close(aux["entropy"], torch.full((2,), math.log(2)))


def test_log_probs_are_one_graph() -> None:
    torch._dynamo.reset()
    z, target = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3])
    compiled = torch.compile(losses.token_logp, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(z, target, temperature=0.5), losses.token_logp(z, target, temperature=0.5)
    )
    nucleus = torch.compile(losses.nucleus, fullgraph=True, backend="eager")
    assert torch.equal(nucleus(z, top_p=0.6), losses.nucleus(z, top_p=0.6))


@pytest.mark.parametrize("kw", [{"temperature": 0.0}, {"target": torch.zeros(2, dtype=torch.int64)}])
def test_shapes_and_temperatures_that_do_not_fit_are_refused(kw: dict) -> None:
    with pytest.raises(ValueError, match="temperature"):
        losses.token_logp(torch.zeros(3, 4), **{"target": torch.zeros(3, dtype=torch.int64), **kw})
    with pytest.raises(ValueError, match="top_p"):
        losses.nucleus(torch.zeros(3), top_p=0.0)


def test_a_completion_mask_ends_with_the_first_eos_or_the_length_whichever_is_first() -> None:
    tokens = torch.tensor([[5, 2, 5, 2, 0], [5, 5, 5, 2, 0], [5, 5, 5, 5, 5], [0, 0, 0, 0, 0]])
    mask, aux = losses.completion_mask(tokens, torch.tensor([5, 3, 5, 0]), eos_ids={2})
    assert mask.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert aux["n_tokens"].tolist() == [2, 3, 5, 0] and aux["truncated"].tolist() == [False, True, True, True]
    compiled = torch.compile(losses.completion_mask, fullgraph=True, backend="eager")
    assert torch.equal(compiled(tokens, torch.tensor([5, 3, 5, 0]), (2,))[0], mask)


def test_masks_of_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        losses.completion_mask(torch.zeros(2, 3), torch.zeros(3), {0})
    with pytest.raises(ValueError, match="truncated"):
        losses.drop_truncated(torch.ones(2, 3, dtype=torch.bool), torch.ones(3, dtype=torch.bool))
