"""A scalar judge's logit is a score where it is finite; everything else is missing."""

import hashlib
import math

import pytest

from rl.config import Scalar
from rl.types import InfraFail, ParseFail, Reply, Score
from tests.rl.judges.replied import scalar, values


def test_a_scalar_judge_s_logit_is_the_score_or_goes_through_the_sigmoid():
    raw = [Reply(score=x) for x in (0.0, -2.5, 1000.0, -1000.0)]
    assert [v.outcome for v in scalar(Scalar(), *raw)] == [Score(x) for x in (0.0, -2.5, 1000.0, -1000.0)]
    squashed = scalar(Scalar(activation="sigmoid"), *raw)
    expected = [0.5, 1 / (1 + math.exp(2.5)), 1.0, 0.0]
    assert values(squashed) == pytest.approx(expected)


def test_a_scalar_judge_without_a_finite_number_gives_no_score():
    said = scalar(Scalar(), *(Reply(score=x) for x in (math.nan, math.inf)), Reply(), Reply(failure="down"))
    assert [v.outcome for v in said] == [
        ParseFail("non_finite", "nan"), ParseFail("non_finite", "inf"), ParseFail("empty"), InfraFail("down"),
    ]  # fmt: skip
    assert [c.producer for v in said for c in v.calls] == ["scalar"] * 4


def test_what_a_scalar_judge_of_a_chat_read_is_hashed_with_the_answer():
    first, second = scalar(Scalar(chat=True), Reply(score=1.0), Reply(score=1.0))
    assert first.calls[0].prompt == hashlib.sha256(b"problem 0").hexdigest()[:16] != second.calls[0].prompt
