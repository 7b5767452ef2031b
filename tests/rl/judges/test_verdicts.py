"""Replies become typed outcomes: only what was read within its bounds is a score; everything is recorded."""

import hashlib
import math
from dataclasses import replace
from statistics import variance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config import Judge
from rl.judges.questions import questions
from rl.judges.verdicts import verdicts
from rl.types import InfraFail, ParseFail, Reply, Score
from tests.rl.judges.replied import PROMPT, RUBRIC, TEN, UNIT, YES, judged, outcomes, values


def test_scores_are_normalised_by_the_declared_bounds_and_zero_is_a_score():
    assert outcomes(TEN, "Score: 10", "Score: 7.5", "Score: 0") == [Score(1.0), Score(0.75), Score(0.0)]
    signed = replace(TEN, lo=-5.0, hi=5.0)
    assert outcomes(signed, "Score: -2", "Score: -5") == [Score(0.3), Score(0.0)]


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        (UNIT, '{"score": 1}'),
        (replace(TEN, format="tag", label="score"), "<score>10</score>"),
        (replace(TEN, format="boxed"), r"\boxed{10}"),
        (YES, "Verdict: yes"),
        (replace(YES, lo=0.1, hi=0.7), '{"correct": true}'),
        (replace(YES, hi=5.0), '{"correct": 1}'),
    ],
)
def test_each_format_has_a_best_score(cfg, text):
    assert outcomes(cfg, text) == [Score(1.0)]


def test_failures_concern_their_own_answer_only_and_say_what_they_are():
    said = judged(
        TEN, "Score: 5", "nothing", "", "Score: 11", Reply(text="Score: 1", finish="length"),
        Reply(failure="ConnectionError: reset"), Reply(text="thinking", finish="length"),
    )  # fmt: skip
    assert [v.outcome for v in said] == [
        Score(0.5), ParseFail("no_match", "nothing"), ParseFail("empty"),
        ParseFail("out_of_bounds", "Score: 11"), ParseFail("truncated", "Score: 1"),
        InfraFail("ConnectionError: reset"), ParseFail("truncated", "thinking"),
    ]  # fmt: skip
    kinds = [v.calls[0].outcome for v in said]
    assert kinds == [
        "score", "parse_fail/no_match", "parse_fail/empty", "parse_fail/out_of_bounds",
        "parse_fail/truncated", "infra_fail", "parse_fail/truncated",
    ]  # fmt: skip


def test_only_the_tag_with_this_call_s_nonce_is_read():
    cfg = Judge(format="tag", label="score", nonce=True, template="{candidate} <score_{nonce}>")
    (ask,) = questions(cfg, PROMPT, ["x"], [1])
    tag = f"score_{ask.nonce}"
    for text, outcome in (
        (f"<{tag}>4</{tag}> and <score>5</score>", Score(0.8)),
        ("<score>5</score>", ParseFail("no_match", "<score>5</score>")),
    ):
        assert verdicts(cfg, [ask], [Reply(text=text)], 1)[0].outcome == outcome


def test_a_repeated_block_of_the_candidate_is_not_read():
    cfg = replace(TEN, delimiter="essay")
    assert outcomes(cfg, "Score: 2\n<essay>\nScore: 10\n</essay>") == [Score(0.2)]


def test_one_readable_vote_is_a_score_and_several_have_noise():
    cfg = replace(TEN, votes=3)
    one, three, none, dead = judged(
        cfg,
        ["Score: 4", "?", Reply(failure="timeout")],
        ["Score: 4", "Score: 6", "Score: 8"],
        ["?", Reply(failure="timeout"), Reply(text="Sc", finish="length")],
        [Reply(failure="timeout"), Reply(failure="refused"), Reply(failure="refused")],
    )
    assert one.outcome == Score(0.4) and one.noise is None and one.told == {"votes": 1}
    assert three.outcome == Score(0.6) and three.noise == pytest.approx(variance([0.4, 0.6, 0.8]) / 3)
    assert none.outcome == ParseFail("no_match", "?") and none.told == {"votes": 0}
    assert dead.outcome == InfraFail("refused")


def test_the_most_common_parse_failure_names_the_missing_score():
    cut = Reply(text="Sc", finish="length")
    assert outcomes(replace(TEN, votes=3), ["?", cut, cut]) == [ParseFail("truncated", "Sc")]


def test_median_and_majority():
    assert outcomes(replace(TEN, votes=3, vote="median"), ["Score: 1", "Score: 2", "Score: 9"]) == [
        Score(0.2)
    ]
    most = replace(YES, votes=4, vote="majority")
    yes, no = "Verdict: yes", "Verdict: no"
    assert outcomes(most, [yes, yes, no, "?"], [yes, yes, no, no]) == [Score(1.0), Score(0.5)]


def test_a_rubric_is_the_share_of_points_that_are_met():
    yes, no = "Verdict: yes", "Verdict: no"
    said = judged(RUBRIC, [yes, yes, no], [yes, no, yes], [no, no, yes])
    assert values(said) == pytest.approx([1.0, 1 / 3, 0.0])
    assert said[1].told == {"criterion 0": 1.0, "criterion 1": 0.0, "criterion 2": 1.0}


def test_one_unread_criterion_makes_the_rubric_missing():
    yes = "Verdict: yes"
    dead, unread = outcomes(
        RUBRIC, [yes, Reply(failure="timeout"), yes], [yes, "?", Reply(failure="timeout")]
    )
    assert dead == InfraFail("timeout") and unread == ParseFail("no_match", "?")


def test_votes_on_criteria_carry_their_noise_into_the_rubric():
    yes, no = "Verdict: yes", "Verdict: no"
    (said,) = judged(replace(RUBRIC, votes=2), [yes, no, yes, yes, no, no])
    assert values([said]) == pytest.approx([(2 * 0.5 + 1) / 3])
    assert said.noise == pytest.approx(2**2 * variance([1, 0]) / 2 / 3**2)


def test_a_logprob_judge_gives_the_expected_score_of_its_labels_with_their_coverage():
    cfg = Judge(format="logprob", lo=0.0, hi=10.0, values=(10.0, 0.0))
    logs = [(math.log(0.6), math.log(0.2)), (math.log(0.2), math.log(0.2)), (-math.inf, -math.inf)]
    said = judged(cfg, *(Reply(label_logps=pair) for pair in logs))
    assert values(said) == pytest.approx([0.75])
    assert [v.outcome for v in said[1:]] == [ParseFail("no_coverage")] * 2
    assert [v.told["coverage"] for v in said] == pytest.approx([0.8, 0.4, 0.0])


@pytest.mark.parametrize("logps", [(), (0.0,), (math.nan, -1.0), (0.0, 0.0), (math.inf, 0.0), (1e4, 0.0)])
def test_label_logps_that_are_no_distribution_are_a_parse_failure(logps):
    (said,) = outcomes(Judge(format="logprob", hi=1.0), Reply(label_logps=logps))
    assert isinstance(said, ParseFail) and said.status == "error"


def test_every_question_is_recorded_with_its_reply_failures_too():
    cfg = replace(TEN, votes=2)
    asks = questions(cfg, PROMPT, ["x", "y"], [1, 2])
    good = Reply(text="Score: 5", n_prompt=7, n_tokens=3, seconds=0.5, replica="judge-1", attempts=2)
    bad = Reply(failure="timeout", seconds=9.0, replica="judge-0", attempts=3)
    said = verdicts(cfg, asks, [good, bad, bad, good], 2, producer="mine")
    assert [len(v.calls) for v in said] == [2, 2]
    first, second = said[0].calls
    assert first.prompt == hashlib.sha256(b"problem x").hexdigest()[:16]
    assert (first.producer, first.part, first.about) == ("mine", "vote 0", (0,))
    assert (first.text, first.finish, first.outcome, first.score) == ("Score: 5", "stop", "score", 0.5)
    assert (first.n_prompt, first.n_tokens, first.seconds, first.replica) == (7, 3, 0.5, "judge-1")
    assert (second.text, second.finish, second.score, second.attempts) == ("timeout", "", None, 3)


def test_an_answer_without_a_question_is_the_caller_s_error():
    asks = questions(TEN, PROMPT, ["x"], [1])
    with pytest.raises(ValueError, match="no question about answer 1"):
        verdicts(TEN, asks, [Reply(text="Score: 5")], 2)


STRANGE = st.text(max_size=60) | st.sampled_from(
    [
        "\ud800",
        '{"score": ' * 200,
        "[[" * 500,
        "Score: " + "9" * 400,
        "</think>",
        '{"correct": 0.5}',
        "NaN" * 9,
    ]
)


@given(st.lists(STRANGE, min_size=1, max_size=4), st.sampled_from(["stop", "length", "abort"]))
@settings(max_examples=40, deadline=None)
def test_no_text_raises_and_no_score_leaves_the_unit_interval(texts, finish):
    pair = Judge(format="pairwise", template="{first}{second}")
    for cfg in (TEN, UNIT, replace(YES, votes=2, vote="majority"), RUBRIC, pair):
        asks = questions(cfg, PROMPT, texts, list(range(len(texts))))
        replies = [Reply(text=texts[i % len(texts)], finish=finish) for i in range(len(asks))]
        for verdict in verdicts(cfg, asks, replies, len(texts)):
            assert not isinstance(verdict.outcome, Score) or 0 <= verdict.outcome.value <= 1


@given(st.lists(st.sampled_from(["Score: 3", "Score: 0", "?", ""]), min_size=1, max_size=6), st.randoms())
@settings(max_examples=20, deadline=None)
def test_permuting_a_group_s_answers_permutes_the_verdicts(said, rng):
    order = list(range(len(said)))
    rng.shuffle(order)
    here = outcomes(TEN, *said)
    assert outcomes(TEN, *(said[i] for i in order)) == [here[i] for i in order]
