"""Votes, rubrics and pairs with missing values; a score from log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from losses.genrm import Judgement
from losses.genrm_logprob import expected_score, label_ids, label_logps
from losses.genrm_vote import Vote, both_orders, rubric, tally, vote

unit = st.floats(0, 1)


@given(st.lists(st.none() | unit, max_size=8), st.sampled_from(["mean", "median"]), st.integers(1, 4))
def test_missing_votes_are_as_if_not_cast(scores: list[float | None], how: str, min_valid: int) -> None:
    valid = [s for s in scores if s is not None]
    result = vote(scores, how=how, min_valid=min_valid)
    assert result == vote(valid, how=how, min_valid=min_valid) and result.n_valid == len(valid)
    assert (result.score is None) == (len(valid) < min_valid)
    assert result.score is None or min(valid) - 1e-9 <= result.score <= max(valid) + 1e-9


def test_votes_have_known_values() -> None:
    read = vote([0.0, 1.0, 0.2, None])
    assert (read.score, read.n_valid, read.noise) == (pytest.approx(0.4), 3, pytest.approx(0.28 / 3))
    assert vote([0.0, 1.0, 0.2, None], how="median").score == 0.2
    assert vote([1.0, 1.0, 0.0], how="majority").score == 1.0
    assert vote([1.0, None], how="majority") == Vote(score=1.0, n_valid=1, noise=None)
    assert vote([], min_valid=1) == Vote(score=None, n_valid=0, noise=None)


def test_an_even_majority_is_missing_unless_a_tie_has_a_value() -> None:
    assert vote([1.0, 0.0], how="majority").score is None
    assert vote([1.0, 0.0], how="majority", tie=0.5).score == 0.5
    with pytest.raises(ValueError, match="votes of 0 and 1"):
        vote([0.5, 1.0], how="majority")
    with pytest.raises(ValueError, match="min_valid"):
        vote([1.0], min_valid=0)


def test_rubric_is_the_share_of_positive_points() -> None:
    points = {"proof": 5.0, "style": 3.0, "rude": -2.0}
    assert rubric({"proof": 1, "style": 0, "rude": 0}, points) == 5 / 8
    assert rubric({"proof": 1, "style": 0, "rude": 1}, points) == 3 / 8
    assert rubric({"proof": 0, "style": 0, "rude": 1}, points) == 0.0
    assert rubric({"proof": 1, "style": 1, "rude": 0}, points) == 1.0


def test_an_unread_criterion_makes_the_rubric_missing_or_is_skipped() -> None:
    points = {"proof": 5.0, "style": 3.0}
    assert rubric({"proof": 1, "style": None}, points) is None
    assert rubric({"proof": 1, "style": None}, points, missing="skip") == 1.0
    assert rubric({"proof": None, "style": None}, points, missing="skip") is None


def test_o059_a_missing_part_is_left_out_and_all_missing_is_unscored() -> None:
    weights = {"f": 0.7, "g": 0.3}
    assert rubric({"f": 1.0, "g": None}, weights, missing="skip") == 1.0  # weights of what is there
    assert rubric({"f": None, "g": None}, weights, missing="skip") is None
    assert rubric({"f": 1.0, "g": 0.0}, weights) == 0.7


@pytest.mark.parametrize(
    ("met", "points", "message"),
    [
        ({"a": 1}, {"a": 1, "b": 1}, "criteria differ"),
        ({"a": 1}, {"a": -1}, "positive points"),
        ({"a": 2}, {"a": 1}, r"in \[0, 1\]"),
        ({"a": math.nan}, {"a": 1}, r"in \[0, 1\]"),
    ],
)
def test_a_wrong_rubric_is_a_value_error(
    met: dict[str, float | None], points: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=f"rubric: .*{message}"):
        rubric(met, points)


@given(unit, unit)
def test_swapping_the_answers_mirrors_the_pair(first: float, second: float) -> None:
    for strict in (False, True):
        a, b = both_orders(first, second, strict=strict), both_orders(second, first, strict=strict)
        assert a is not None and b is not None and a + b == pytest.approx(1.0) and 0 <= a <= 1


def test_pairs_have_known_values() -> None:
    games = [(1, 0), (0, 1), (1, 1), (0, 0), (0.5, 0.5), (1, 0.5)]
    assert [both_orders(*g) for g in games] == [1, 0, 0.5, 0.5, 0.5, 0.75]
    assert [both_orders(*g, strict=True) for g in games] == [1, 0, 0.5, 0.5, 0.5, 0.5]
    assert both_orders(None, 1) is both_orders(1, None) is None
    with pytest.raises(ValueError, match="both_orders"):
        both_orders(2, 0)


def test_tally_without_any_score_has_no_mean() -> None:
    assert tally([Judgement("empty"), Judgement("empty")]).mean is None
    assert tally([Judgement("empty"), Judgement("ok", 3.0)]).failures == {"empty": 1}
    assert tally([]).failure_rate == 0.0


# ── Log-probabilities ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("compiled", [False, True])
def test_expected_score_is_the_mean_under_the_labels_own_share(compiled: bool) -> None:
    p = torch.tensor([[0.1, 0.2, 0.3], [0.6, 0.0, 0.2], [0.0, 0.0, 0.1]], dtype=torch.float64)
    fn = torch.compile(expected_score, fullgraph=True, backend="aot_eager") if compiled else expected_score
    score, coverage = fn(p.log(), (1.0, 2.0, 4.0))
    torch.testing.assert_close(coverage, torch.tensor([0.6, 0.8, 0.1], dtype=torch.float64))
    want = [(0.1 + 0.4 + 1.2) / 0.6, (0.6 + 0.8) / 0.8, math.nan]
    torch.testing.assert_close(score, torch.tensor(want, dtype=torch.float64), equal_nan=True)


def test_yes_no_is_the_share_of_yes() -> None:
    top = {" Yes": math.log(0.5), "yes": math.log(0.1), "No": math.log(0.2), "Maybe": math.log(0.1)}
    score, coverage = expected_score(label_logps(top, ["Yes", "No"]), (1.0, 0.0))
    assert score.item() == pytest.approx(0.75) and coverage.item() == pytest.approx(0.8)


def test_low_coverage_is_refused_and_no_label_is_no_score() -> None:
    logp = label_logps({"Yes": math.log(0.3), "The": math.log(0.6)}, ["Yes", "No"])
    assert expected_score(logp, (1.0, 0.0))[0].isnan()
    assert expected_score(logp, (1.0, 0.0), min_coverage=0.2)[0] == 1.0
    score, coverage = expected_score(label_logps({}, ["Yes", "No"]), (1.0, 0.0), min_coverage=1e-6)
    assert score.isnan() and coverage == 0.0


@given(st.lists(st.floats(-20, 0), min_size=2, max_size=6))
def test_expected_score_stays_between_the_values(logits: list[float]) -> None:
    logp = torch.tensor(logits).log_softmax(-1)
    values = [float(i) for i in range(len(logits))]
    score, coverage = expected_score(logp, values)
    assert 0 <= score <= len(logits) - 1 and coverage.item() == pytest.approx(1.0, abs=1e-5)


def test_bf16_log_probabilities_stay_close() -> None:
    logp = torch.tensor([0.1, 0.3, 0.6]).log()
    score, _ = expected_score(logp.bfloat16(), (1.0, 5.0, 10.0))
    assert score.dtype == torch.float32
    assert score.item() == pytest.approx(expected_score(logp, (1.0, 5.0, 10.0))[0].item(), abs=0.05)


@pytest.mark.parametrize(
    ("logp", "values"), [([0.0, 0.0], (1.0, 0.0)), ([math.nan, -1.0], (1.0, 0.0)), ([-1.0, -1.0], (1.0,))]
)
def test_what_is_not_log_probabilities_is_refused(logp: list[float], values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected_score"):
        expected_score(torch.tensor(logp), values)


def test_a_label_that_begins_another_is_refused_unless_each_is_one_token() -> None:
    top = {"1": math.log(0.5), "10": math.log(0.25)}
    with pytest.raises(ValueError, match="begins"):
        label_logps(top, ["1", "10"])
    torch.testing.assert_close(label_logps(top, ["1", "10"], whole=True).exp(), torch.tensor([0.5, 0.25]))
    with pytest.raises(ValueError, match="one spelling"):
        label_logps(top, ["Yes", "yes"])


def test_label_ids_are_those_of_single_tokens() -> None:
    vocabulary = {"Yes": 1, " Yes": 2, "yes": 3, "No": 4, "1": 5, "0": 6}

    def encode(text: str) -> list[int]:
        return [vocabulary[text]] if text in vocabulary else [ord(c) for c in text]

    assert label_ids(encode, ["Yes", "No"]) == [[1, 2, 3], [4]]
    with pytest.raises(ValueError, match="no single token writes '10'"):
        label_ids(encode, ["1", "10"])
    with pytest.raises(ValueError, match="writes two"):
        label_ids(encode, ["Yes", "yes"])
