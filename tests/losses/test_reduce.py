"""Weights from global counts against the plain formulas, padded and packed, split and whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import losses
from tests.losses.invariance import Totals, example, failures, from_token_loss

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()
VALUE = torch.arange(16, dtype=torch.float64).reshape(4, 4)
TOTALS: dict[str, Any] = {
    "total_tokens": 7, "total_rows": 3, "norm_length": 10,
    "group_tokens": torch.tensor([4, 4, 3, 3]), "total_groups": 2,
}  # fmt: skip
ROWS = [[0.0, 1.0, 2.0], [4.0], [12.0, 14.0, 15.0]]
WANT = {
    "token_mean": sum(map(sum, ROWS)) / 7,
    "seq_mean_token_sum": sum(map(sum, ROWS)) / 3,
    "seq_mean_token_mean": sum(sum(r) / len(r) for r in ROWS) / 3,
    "constant": sum(map(sum, ROWS)) / 3 / 10,
    "prompt_mean": ((0 + 1 + 2 + 4) / 4 + (12 + 14 + 15) / 3) / 2,
}
aggs = pytest.mark.parametrize("agg", WANT)


@aggs
def test_the_weighted_sum_is_the_mean_that_it_is_called(agg: Any) -> None:
    weight = losses.token_weight(MASK, agg=agg, **TOTALS)
    assert weight.dtype == torch.float32 and weight.isfinite().all() and not weight[~MASK].any()
    assert float((weight * VALUE).sum()) == pytest.approx(WANT[agg])
    rows = losses.row_weight(MASK.sum(1), agg=agg, **TOTALS)
    assert torch.equal(torch.where(MASK, rows[:, None], 0.0), weight) and rows[2] == 0


@aggs
def test_packed_tokens_in_any_order_get_the_weights_of_their_rows(agg: Any) -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    row = torch.arange(4).repeat_interleave(4)[order]
    packed = losses.token_weight(MASK.flatten()[order], agg=agg, **TOTALS, row=row, n_rows=4)
    assert torch.equal(packed, losses.token_weight(MASK, agg=agg, **TOTALS).flatten()[order])


@aggs
def test_weights_are_one_graph(agg: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(losses.token_weight, fullgraph=True, backend="eager")
    assert torch.equal(compiled(MASK, agg=agg, **TOTALS), losses.token_weight(MASK, agg=agg, **TOTALS))


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"])
def test_every_aggregation_is_exact_under_every_split(agg: Any) -> None:
    inputs, mask = example()

    def weight(mask: Tensor, totals: Totals) -> Tensor:
        return losses.token_weight(
            mask, agg=agg, total_tokens=totals.tokens, total_rows=totals.rows, norm_length=8
        )

    def loss(x: dict[str, Tensor], m: Tensor) -> Tensor:
        return losses.grpo_loss(x["logp"], x["logp_mu"], x["adv"], m)[0]

    assert failures(from_token_loss(loss, weight), inputs, mask) == {}


def test_prompt_mean_is_exact_when_a_group_is_split() -> None:
    whole = losses.token_weight(MASK, agg="prompt_mean", **TOTALS)
    parts = [
        losses.token_weight(
            MASK[i : i + 1],
            agg="prompt_mean",
            **{**TOTALS, "group_tokens": TOTALS["group_tokens"][i : i + 1]},
        )
        for i in range(4)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_totals_may_be_tensors_and_a_step_without_tokens_has_weight_zero() -> None:
    as_tensors = {k: torch.as_tensor(v) for k, v in TOTALS.items()}
    for agg in WANT:
        same = losses.token_weight(MASK, agg=agg, **as_tensors)  # pyright: ignore[reportArgumentType]
        assert torch.equal(same, losses.token_weight(MASK, agg=agg, **TOTALS))  # pyright: ignore[reportArgumentType]
        nothing = {
            **TOTALS,
            "total_tokens": 0,
            "total_rows": 0,
            "total_groups": 0,
            "group_tokens": torch.zeros(4),
        }
        assert not losses.token_weight(MASK & False, agg=agg, **nothing).any()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "kw",
    [
        {"agg": "mean"},
        {"agg": "constant"},
        {"agg": "prompt_mean", "total_groups": 2},
        {"agg": "token_mean", "row": torch.zeros(4, dtype=torch.int64)},
        {"agg": "token_mean", "row": torch.zeros(4, dtype=torch.int64), "n_rows": 1},
    ],
)
def test_an_aggregation_that_lacks_something_is_refused(kw: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        losses.token_weight(MASK, total_tokens=7, total_rows=3, **kw)
