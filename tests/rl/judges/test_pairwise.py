"""Who meets whom, and what the games say of each answer."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import losses
from rl.config import Judge
from rl.judges.pairwise import schedule
from rl.judges.questions import questions
from rl.judges.verdicts import verdicts
from rl.types import Abstain, InfraFail, ParseFail, Prompt, Reply, Score, Verdict

PAIR = Judge(format="pairwise", template="{problem}|{first}|{second}")
PROMPT = Prompt(ids=(1,), text="which is longer")


def judged(texts, judge, cfg=PAIR, seeds=None) -> list[Verdict]:
    """`judge(first text, second text)` → Reply or its text."""
    asks = questions(cfg, PROMPT, texts, seeds or list(range(len(texts))))
    said = [judge(texts[a.about[0]], texts[a.about[1]]) for a in asks]
    replies = [r if isinstance(r, Reply) else Reply(text=r) for r in said]
    return verdicts(cfg, asks, replies, len(texts))


def longer(first: str, second: str) -> str:
    return "[[A]]" if len(first) > len(second) else "[[B]]" if len(first) < len(second) else "[[C]]"


def degrees(pairs, n) -> list[int]:
    counted = Counter(i for pair in pairs for i in pair)
    return [counted[i] for i in range(n)]


@pytest.mark.parametrize("n", range(10))
@pytest.mark.parametrize("opponents", range(12))
def test_a_schedule_gives_equal_degrees_and_neither_self_pairs_nor_duplicates(n, opponents):
    pairs = schedule(n, opponents)
    assert all(i != j for i, j in pairs) and len({frozenset(p) for p in pairs}) == len(pairs)
    degree = max(0, n - 1 if opponents == 0 else min(opponents, n - 1))
    odd = n * degree % 2  # no graph has an odd sum of degrees
    assert sorted(degrees(pairs, n)) == [degree] * (n - odd) + [degree + 1] * odd
    assert pairs == schedule(n, opponents)


@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.parametrize("opponents", range(10))
def test_in_one_order_each_player_is_first_as_often_as_second_give_or_take_one(n, opponents):
    first = Counter(i for i, _ in schedule(n, opponents))
    second = Counter(j for _, j in schedule(n, opponents))
    assert all(abs(first[i] - second[i]) <= 1 for i in range(n))


def test_a_score_is_the_share_of_wins():
    said = judged(["xxx", "x", "xx", "x"], longer)
    assert [v.outcome for v in said] == [Score(1.0), Score(0.5 / 3), Score(2 / 3), Score(0.5 / 3)]
    assert said[0].told == {"games": 6}


def test_the_score_is_the_mean_over_pairs_of_both_orders():
    table = {("a", "b"): 1.0, ("b", "a"): 0.5, ("a", "c"): 0.0, ("c", "a"): 0.0, ("b", "c"): 0.75,
             ("c", "b"): 1.0}  # fmt: skip
    words = {1.0: "[[A>>B]]", 0.75: "[[A>B]]", 0.5: "[[A=B]]", 0.25: "[[B>A]]", 0.0: "[[B>>A]]"}
    texts = ["a", "b", "c"]
    said = judged(texts, lambda first, second: words[table[first, second]])
    for verdict, me in zip(said, texts, strict=True):
        pairs = [losses.both_orders(table[me, other], table[other, me]) for other in texts if other != me]
        assert isinstance(verdict.outcome, Score)
        assert verdict.outcome.value == pytest.approx(sum(p for p in pairs if p is not None) / 2)


@given(st.lists(st.text("xy", max_size=4), min_size=2, max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_judge_that_only_likes_the_first_place_gives_everybody_one_half_with_both_orders(texts):
    for cfg in (PAIR, replace(PAIR, opponents=2)):
        said = judged(texts, lambda *_: "Verdict: A", cfg)
        assert {v.outcome for v in said} == {Score(0.5)}
        assert {c.score for v in said for c in v.calls} == {1.0}  # what shows the preference


@given(st.lists(st.text("xy", max_size=4), min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_permuting_answers_and_seeds_permutes_the_verdicts(texts, rng):
    order = list(range(len(texts)))
    rng.shuffle(order)
    seeds = [rng.randrange(10**6) * 10 + i for i in order]
    for cfg in (PAIR, replace(PAIR, orders="one"), replace(PAIR, opponents=2, orders="one")):
        here = judged(texts, longer, cfg, seeds)
        there = judged([texts[i] for i in order], longer, cfg, [seeds[i] for i in order])
        assert [v.outcome for v in there] == [here[i].outcome for i in order]


def test_an_answer_is_final_only_when_all_its_comparisons_were_read():
    def judge(first, second):
        return "cannot say" if {first, second} == {"x", "xx"} else longer(first, second)

    said = judged(["x", "xx", "xxx"], judge)
    assert [v.outcome for v in said] == [ParseFail("no_match", "cannot say")] * 2 + [Score(1.0)]
    assert said[0].told == {"games": 2}


def test_a_game_that_nobody_judged_is_an_infra_failure_of_its_two_answers():
    def judge(first, second):
        return Reply(failure="timeout") if (first, second) == ("x", "xx") else longer(first, second)

    said = judged(["x", "xx", "xxx"], judge)
    assert [v.outcome for v in said] == [InfraFail("timeout"), InfraFail("timeout"), Score(1.0)]


def test_a_group_of_one_abstains():
    (said,) = judged(["x"], longer)
    assert isinstance(said.outcome, Abstain) and said.calls == ()


def test_each_game_is_recorded_once_with_the_win_of_the_first_place():
    said = judged(["x", "xx", "xxx"], longer)
    calls = [call for verdict in said for call in verdict.calls]
    assert len(calls) == 6 and {c.about for c in said[1].calls} == {(1, 0), (1, 2)}
    assert {c.about: c.score for c in calls}[0, 2] == 0.0 and {c.about: c.score for c in calls}[2, 0] == 1.0


def test_votes_on_a_game_are_averaged_and_carry_their_noise():
    cfg = replace(PAIR, votes=2)
    asks = questions(cfg, PROMPT, ["a", "b"], [1, 2])
    replies = [Reply(text="[[A]]" if a.about == (0, 1) or a.part == "vote 0" else "[[B]]") for a in asks]
    first, second = verdicts(cfg, asks, replies, 2)
    assert first.outcome == Score(0.75) and second.outcome == Score(0.25)  # games 1 and 1 − 1/2
    assert first.noise == pytest.approx((0.0 + 0.25) / 4)  # variances of the games' means over games²


@pytest.mark.parametrize(
    ("text", "score"),
    [("[[A]]", 1.0), ("[[B]]", 0.0), ("[[C]]", 0.5), ("Winner: B", 0.0), ("[[A>>B]]", 1.0), ("[[B>A]]", 0.25),
     ("[[A=B]]", 0.5), ('{"winner": "A"}', 1.0)],
)  # fmt: skip
def test_words_for_the_winner(text, score):
    first, second = judged(["a", "b"], lambda *_: text, replace(PAIR, orders="one"))
    assert first.outcome == Score(score) and second.outcome == Score(1 - score)


def test_a_number_for_the_winner_is_not_read_as_a_place_on_the_scale():
    for text in ('{"winner": 1}', '{"winner": 2}', '{"winner": 0}'):
        assert all(isinstance(v.outcome, ParseFail) for v in judged(["a", "b"], lambda *_, t=text: t))


def test_o050_a_letter_in_prose_is_no_verdict():
    prose = "Answers A and B were compared line by line"
    first, _ = judged(["a", "b"], lambda *_: f"{prose}; my verdict is B.", replace(PAIR, orders="one"))
    assert first.outcome == Score(0.0)
    first, _ = judged(["a", "b"], lambda *_: prose)
    assert isinstance(first.outcome, ParseFail)
