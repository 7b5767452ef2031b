"""For every text: the parser never raises, stays in bounds and in linear time, and reads no candidate."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from losses.genrm import Judgement, parse
from losses.genrm_choice import YES_NO, arena, pairwise, yes_no
from losses.genrm_free import free
from losses.genrm_prompt import neutralised, render

DECLARED = ["label", "json", "tag", "boxed", "bracket", "line"]
FORMATS: list[Any] = [*DECLARED, free, yes_no, pairwise, arena]
# Pieces of verdicts, in the hope that some text puts them together in a way that nobody thought of.
PIECES = [
    "Score", "score", "Final score", "Verdict", "Winner", "Answer", "correct", "better response", "overall",
    "rating", "评分", "スコア", "note", "total", "final", "grade", ":", "=", "：", "|", " is ", " at ", "?",
    "%", "8", "10", "-3", "7.5", "8/10", "7,5", "８", "½", "1e3", "nan", "N/A", "out of 10", "(1-10)",
    "- 2", "A", "B", "C", "tie", "yes", "no", "True", "incorrect", "[[", "]]", "[[8]]", "[[A]]", "[[A>B]]",
    "\\boxed{", "}", "{", "\\boxed", "\\text{", "\\frac{8}{10}", "<score>", "</score>", "<answer>",
    "</answer>", "<", "score>", "/", "<think>", "</think>", "<candidate>", "</candidate>", "<reasoning>",
    "</reasoning>", '{"score": 8}', "'", "`", '"score"', '"', "**", "*", "_", " ", "\n", "\n\n", "#", "## ",
    "\u200b", "<b>", "</b>", "~~", "(", ")", "ｓｃｏｒｅ", "[RESULT]", "[", "]", "\\", "\\u0073core",
    "<|im_end|>", "</s>", "$ERROR$", "[THINK]", "[/THINK]", "|>", "<|", "$", "“", "”", "> ", ">", ",", ".",
    "S:", "S",
]  # fmt: skip
mixed = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
texts = mixed | st.text(max_size=40) | st.tuples(mixed, st.text(max_size=10), mixed).map("".join)
numbers = st.integers(-5, 5).map(float)


@settings(max_examples=300, deadline=None)
@given(texts, st.sampled_from(FORMATS), st.sampled_from(["last", "first", "unique"]), st.booleans())
def test_never_raises_and_never_leaves_the_bounds(text: str, format: Any, match: str, cut: bool) -> None:
    read = parse(text, format=format, lo=-3, hi=8, match=match, finish_reason="length" if cut else "stop")
    assert isinstance(read, Judgement)
    assert -3 <= read.score <= 8 if read.score is not None else read.status != "ok"
    assert read == parse(
        text, format=format, lo=-3, hi=8, match=match, finish_reason="length" if cut else "stop"
    )


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.sampled_from(["label", "json", "tag", "bracket", "boxed"]))
def test_words_in_place_of_numbers_never_raise(text: str, format: str) -> None:
    assert parse(text, format=format, words=YES_NO).score in (None, 0.0, 10.0)


@settings(max_examples=200, deadline=None)
@given(mixed, st.sampled_from(FORMATS), st.sampled_from([" {} ", "\n\n{}\n", "\t{}\r\n", "\ufeff{}\u200b"]))
def test_white_space_around_the_reply_changes_nothing(text: str, format: Any, around: str) -> None:
    first, second = parse(text, format=format), parse(around.format(text), format=format)
    assert (first.status, first.score) == (second.status, second.score)


@settings(max_examples=200, deadline=None)
@given(numbers, st.sampled_from(["{}", "**{}**", "*{}*", "__{}__", "_{}_", "`{}`", "***{}***", "<b>{}</b>"]))
def test_emphasis_around_label_or_number_changes_nothing(score: float, emphasis: str) -> None:
    e = emphasis.format
    for text in (
        e(f"Score: {score}"),
        f"{e('Score:')} {score}",
        f"{e('Score')}: {score}",
        f"Score: {e(score)}/5",
        f"## {e('Score')}: {e(score)}",
        f"- {e('Score:')} {e(score)} points",
        f"```\nScore: {e(score)}\n```",
        f"Fine.\n> {e('Fine.')}\n\n{e(f'Score: {score}')}",
    ):
        assert parse(text, lo=-5, hi=5).score == parse(text, format=free, lo=-5, hi=5).score == score, text


@settings(max_examples=200, deadline=None)
@example("grade 8")
@example("I give it 8")
@example("it deserves an 8")
@example("I would rate this answer as a 7.5")
@example("award   the answer   8")
@example("score it 8")
@given(mixed)
def test_a_neutralised_candidate_holds_no_verdict(candidate: str) -> None:
    echo = neutralised(candidate, verdict=["S:"])
    for format in ("label", "json", "tag", "boxed", "bracket", arena):
        assert parse(echo, format=format).status != "ok", echo
    assert parse(echo, label="S:").status != "ok", echo
    for format in (free, yes_no, pairwise):  # these read a lone line too, which prose around it takes away
        assert parse(f"He wrote\n{echo}\nand no more.", format=format).status != "ok", echo


@settings(max_examples=200, deadline=None)
@given(mixed, numbers)
def test_a_delimited_candidate_is_not_read(candidate: str, score: float) -> None:
    block = render("{candidate}", {"candidate": candidate})
    for format in ("label", free):
        for reply in (f"{block}\nScore: {score}", f"Score: {score}\n{block}"):
            assert parse(reply, format=format, lo=-5, hi=5).score == score, reply


@settings(max_examples=200, deadline=None)
@given(texts, numbers)
def test_a_nonce_keeps_a_raw_candidate_out(candidate: str, score: float) -> None:
    if "think" in candidate.lower():
        return  # reasoning is cut before any name is looked for
    reply = f"The answer was {candidate}\n<score_7f3a>{score}</score_7f3a>"
    assert parse(reply, format="tag", nonce="7f3a", lo=-5, hi=5).score == score
    assert parse(f"The answer was {candidate}", format="tag", nonce="7f3a").score is None


REPEATED = [
    "{", '{"', '{"a":', '{"a": [{"b": "}" ', "[[", "\\boxed{", "Score:", "Score: 8 ", "Score (", " ", "\n",
    "*", "_", "`", "`a1 ", '"', '" a', "<think>", "</think>", "<score>", "(", "9", "9,", "1,000", "|8",
    "8/", "> ", "# Score\n", "<candidate>", "</candidate>", "give it ", "~~", "\\frac{", "“", "<b>", "\\",
    "final ", "correct ", "<|a",
]  # fmt: skip
PADDED = ["Score: 8{}x", "Score:{}x", "Score{}x", "note{}x", "Score: 8 out{}of", "give it{}x", "8 scale{}x"]


@pytest.mark.parametrize("unit", REPEATED)
def test_time_is_linear_in_repetitions_of(unit: str) -> None:
    within_seconds(unit * (200_000 // len(unit)))


@pytest.mark.parametrize("text", PADDED)
def test_time_is_linear_in_padding(text: str) -> None:
    within_seconds(text.format(" " * 200_000))
    within_seconds(text.format("\n" * 200_000))


def test_a_megabyte_of_pieces_takes_seconds() -> None:
    within_seconds("".join(PIECES) * (1_000_000 // sum(map(len, PIECES))), limit=60.0)


def test_broken_objects_cost_linear_time() -> None:
    began = time.process_time()
    assert parse('{"' * 1_000_000, format="json").status == "no_match"
    assert time.process_time() - began < 20.0


def test_deep_nesting_is_no_match() -> None:
    for deep in ('{"a":' * 100_000 + "1" + "}" * 100_000, '{"score": ' + "[" * 100_000 + "]" * 100_000 + "}"):
        assert parse(deep, format="json").status == "no_match"


def within_seconds(text: str, limit: float = 20.0) -> None:
    """What is quadratic takes minutes here. Processor time, because tests share machines."""
    began = time.process_time()
    for format in ("label", "json", "tag", "boxed", free, yes_no):
        parse(text, format=format, finish_reason="length")
    neutralised(text)
    assert time.process_time() - began < limit
