"""The kit catches the classic bugs: each is planted here, and named by the property that must break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.losses.invariance import Inputs, Totals, example, failures, from_token_loss

eos, pad = 0, 0


def reference(x: Inputs, mask: Tensor) -> Tensor:
    log_rho = torch.where(mask, x["logp"] - x["logp_mu"].detach(), 0.0)
    return torch.where(mask, -log_rho.exp() * x["adv"].detach(), 0.0)


def token_mean(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return reference(x, mask).sum() / max(totals.tokens, 1)


def masked_by_product(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return (-(x["logp"] - x["logp_mu"].detach()).exp() * x["adv"].detach() * mask).sum() / max(
        totals.tokens, 1
    )


def masked_after_the_exponent(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    loss = -(x["logp"] - x["logp_mu"].detach()).exp() * x["adv"].detach()  # forward fine, backward 0 * inf
    return torch.where(mask, loss, 0.0).sum() / max(totals.tokens, 1)


def mean_over_the_padded_width(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return reference(x, mask).mean(1).sum() / max(totals.rows, 1)


def mean_over_the_micro_batch(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return reference(x, mask).sum() / mask.sum().clamp(min=1)


def mean_over_the_rows_at_hand(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return (reference(x, mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / max(mask.shape[0], 1)


def division_by_an_empty_row(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return (reference(x, mask).sum(1) / mask.sum(1)).sum() / max(totals.rows, 1)


def statistic_before_the_mask(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return token_mean({**x, "adv": x["adv"] - x["adv"].mean()}, mask, totals)


def statistic_of_the_micro_batch(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    centre = torch.where(mask, x["adv"], 0.0).sum() / mask.sum().clamp(min=1)
    return token_mean({**x, "adv": x["adv"] - centre}, mask, totals)


def temperature_in_place(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    with torch.no_grad():
        x["logp"].mul_(0.5)
    return token_mean(x, mask, totals)


def advantages_in_place(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    x["adv"] -= 0.5
    return token_mean(x, mask, totals)


def sampler_not_detached(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    loss = -torch.where(mask, x["logp"] - x["logp_mu"], 0.0).exp() * torch.where(mask, x["adv"].detach(), 0.0)
    return torch.where(mask, loss, 0.0).sum() / max(totals.tokens, 1)


def mask_from_token_ids(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return token_mean(x, mask & (x["tokens"] != pad), totals)


def mask_one_token_late(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    late = torch.cat([mask[:, :1] & False, mask[:, :-1]], dim=1)
    return token_mean(x, late, totals)


def lengths_in_place_of_a_mask(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return token_mean(x, torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True), totals)


def groups_by_position(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    rows = torch.arange(mask.shape[0]) % 2
    return token_mean({**x, "adv": x["adv"] * (1 + rows[:, None])}, mask, totals)


def global_randomness(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return token_mean(x, mask & (torch.rand(mask.shape) < 0.9), totals)


def constant_for_an_empty_batch(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    return token_mean(x, mask, totals) if mask.any() else torch.zeros((), dtype=torch.float64)


def sequence_ratio_over_the_padding(x: Inputs, mask: Tensor, totals: Totals) -> Tensor:
    s = torch.where(mask, x["logp"] - x["logp_mu"].detach(), 0.0).mean(1, keepdim=True).exp()
    return torch.where(mask, -s * torch.where(mask, x["adv"].detach(), 0.0), 0.0).sum() / max(
        totals.tokens, 1
    )


BUGS = {
    masked_by_product: "nan_off_mask",
    masked_after_the_exponent: "nan_off_mask",
    mean_over_the_padded_width: "padding_amount",
    mean_over_the_micro_batch: "micro_batch_split",
    mean_over_the_rows_at_hand: "rank_split",
    division_by_an_empty_row: "all_masked_row",
    statistic_before_the_mask: "mask_content",
    statistic_of_the_micro_batch: "micro_batch_split",
    temperature_in_place: "purity",
    advantages_in_place: "purity",
    sampler_not_detached: "constants",
    mask_from_token_ids: "pad_equals_eos",
    mask_one_token_late: "mask_content",
    lengths_in_place_of_a_mask: "padding_side",
    groups_by_position: "row_order",
    global_randomness: "purity",
    constant_for_an_empty_batch: "all_masked_rank",
    sequence_ratio_over_the_padding: "padding_amount",
}


def test_a_correct_objective_breaks_nothing() -> None:
    inputs, mask = example()
    assert failures(token_mean, inputs, mask) == {}
    assert failures(from_token_loss(reference), inputs, mask) == {}


@pytest.mark.parametrize(
    ("bug", "broken"), BUGS.items(), ids=lambda x: x if isinstance(x, str) else x.__name__
)
def test_a_planted_bug_is_caught(bug: Callable[[Inputs, Tensor, Totals], Tensor], broken: str) -> None:
    inputs, mask = example()
    assert broken in failures(bug, inputs, mask)


def test_every_property_catches_some_bug_alone_or_with_others() -> None:
    caught = set().union(*(failures(bug, *example()) for bug in BUGS))
    assert caught == {
        "mask_content", "nan_off_mask", "padding_amount", "padding_side", "row_order", "micro_batch_split",
        "rank_split", "all_masked_row", "all_masked_rank", "pad_equals_eos", "purity", "constants",
    }  # fmt: skip
