"""The parser on texts with known verdicts: our own, the shared ones where present, and public bug reports."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from losses.genrm import Judgement, normalise, parse
from losses.genrm_choice import YES_NO, arena, pairwise, yes_no
from losses.genrm_free import free
from losses.genrm_prompt import render
from losses.genrm_vote import tally

ROOT = Path(__file__).parents[2]
READERS = {"free": free, "yes_no": yes_no, "pairwise": pairwise, "arena": arena}
OURS = json.loads((Path(__file__).parent / "fixtures" / "judge_texts.json").read_text(encoding="utf-8"))
SHARED = Path(os.environ.get("JUDGE_OUTPUTS", ROOT.parent / "shared" / "cases" / "judge_outputs.json"))


@pytest.mark.parametrize("case", OURS, ids=lambda c: c["id"])
def test_text_parses_to_its_status_and_score(case: dict[str, Any]) -> None:
    read = parse(case["text"], format=READERS.get(case["format"], case["format"]), **case["arguments"])
    assert (read.status, read.score) == (case["status"], case["score"]), case["text"]


def accepted(case: dict[str, Any]) -> list[float | None]:
    """CLEAR rows have one right value; POLICY rows list theirs: "POLICY (accept: 8 or null): …"."""
    values = [case["expected"]]
    if case["reason"].startswith("POLICY"):
        listed = case["reason"].split("accept:")[1].split(")")[0].replace("only", "")
        values += [json.loads(word.strip()) for word in listed.split(" or ")]
    return values


def test_shared_texts_parse_with_one_set_of_arguments() -> None:
    if not SHARED.exists():
        pytest.skip(f"no {SHARED}; set JUDGE_OUTPUTS to the file of shared judge texts")
    cases = json.loads(SHARED.read_text(encoding="utf-8"))
    wrong = []
    for case in cases:
        read = parse(case["text"], format=free, lo=case["scale_min"], hi=case["scale_max"])
        if read.score not in accepted(case):
            wrong.append((case["id"], case["text"], read, case["expected"]))
    assert len(cases) >= 80 and not wrong


def test_score_is_none_unless_ok() -> None:
    for case in OURS:
        read = parse(case["text"], format=READERS.get(case["format"], case["format"]), **case["arguments"])
        assert (read.score is None) == (read.status != "ok")


def test_a_cut_number_is_truncated_and_a_closed_one_is_not() -> None:
    cut = partial(parse, finish_reason="length")
    assert cut("Score: 1").status == "truncated"
    assert cut("Score: 10\n").score is None and cut("Score: 10 because").score == 10
    for closed, form in (("<score>1</score>", "tag"), ("[[1]]", "bracket"), ('{"score": 1}', "json")):
        assert cut(closed, format=form).score == 1


def test_only_the_nonce_stops_an_echo_after_the_verdict() -> None:
    reply = "<score_7f3a>2</score_7f3a>\nThe answer ends: <score>10</score>"
    assert parse(reply, format="tag").score == 10
    assert parse(reply, format="tag", nonce="7f3a").score == 2


@pytest.mark.parametrize(
    "wrong",
    [{"format": "xml"}, {"match": "best"}, {"lo": 1.0, "hi": 1.0}, {"hi": math.inf}, {"lo": math.nan},
     {"label": " "}, {"format": "boxed", "nonce": "7f3a"}, {"format": free, "nonce": "7f3a"}],
)  # fmt: skip
def test_a_wrong_argument_is_a_value_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="parse: "):
        parse("Score: 7", **wrong)


def test_several_scores_of_one_reply_are_read_by_name() -> None:
    reply = "Accuracy: 8/10\nClarity: 6\nDepth: n/a"
    read = {name: parse(reply, label=f"{name}:") for name in ("Accuracy", "Clarity", "Depth", "Style")}
    assert [read[name].score for name in read] == [8, 6, None, None]
    assert read["Depth"].status == "no_match"
    both = '{"accuracy": 8, "clarity": 6}'
    assert [parse(both, format="json", key=key).score for key in ("accuracy", "clarity")] == [8, 6]


def test_pairwise_takes_other_names() -> None:
    named = partial(pairwise, options=("1", "2"))
    assert [parse(f"[[{n}]]", format=named, hi=1).score for n in (1, 2, 3)] == [1, 0, None]
    assert parse("Better response: Assistant 2", format=named, hi=1).score == 0


# ── Public bug reports ──────────────────────────────────────────────────────────────────────────────────────


def test_o042_a_brace_in_a_string_does_not_end_the_object() -> None:
    text = '{"score": 0.85, "why": "keeps {a: 1} and } unbalanced"}'
    assert parse(text, format="json", hi=1).score == 0.85


def test_o043_out_of_range_and_errors_are_told_apart_and_never_clamped() -> None:
    assert parse("[[90]]", format="bracket", hi=1) == Judgement("out_of_bounds", None, "90")
    assert parse("[ERROR] status 429, retry in 1 s", format=free, hi=1).status == "error"


@pytest.mark.parametrize(
    ("text", "score"), [('{"SCORE": "True"}', 1), ('{"SCORE": "False"}', 0), ('{"score": false}', 0)]
)
def test_o044_boolean_scores_need_a_boolean_rubric(text: str, score: int) -> None:
    assert parse(text, format="json", hi=1, words=YES_NO).score == score
    assert parse(text, format="json", hi=1).status == "no_match"


def test_o045_a_reply_cut_before_the_number_is_truncated() -> None:
    for reason in ("stop", "length"):
        assert parse('{"score": ', format="json", finish_reason=reason).status == "truncated"


def test_o046_a_yes_in_prose_is_no_verdict_and_quoted_marks_are_no_score() -> None:
    text = "Yes, the student tried, but the result is wrong. Verdict: incorrect"
    assert parse(text, format=yes_no, hi=1).score == 0
    quoted = 'The answer ends with its own marks, "8 and 2", which I ignore.'
    assert parse(quoted, format=free).status == "no_match"
    assert parse(quoted + "\nVerdict: correct", format=yes_no, hi=1).score == 1


def test_o047_the_echoed_prompt_is_not_read() -> None:
    echo = 'Write "Feedback: ... [RESULT] 5" for the best answer.\nExample: [RESULT] 5\n'
    read = partial(parse, label="[RESULT]", lo=1, hi=5, echo=echo)
    assert read(echo + "Feedback: half of it is missing. [RESULT] 2").score == 2
    assert read(echo).status == "empty" and read(echo + "Feedback: half").status == "no_match"


def test_o048_quoted_numbers_are_read_and_nested_keys_are_not() -> None:
    read = partial(parse, format="json", hi=1)
    assert read('{"score": "0.8", "reason": ["a","b"]}').score == 0.8
    assert read('{"quality": {"score": 0.8}}').status == "no_match"
    assert read('{"score": "good"}').status == "no_match"


def test_o049_an_unreadable_reply_is_counted_and_not_averaged() -> None:
    result = tally(parse(text) for text in ("Score: 8", "Score: 6", "garbage", "Score: 4"))
    assert (result.mean, result.n, result.failures, result.failure_rate) == (6.0, 4, {"no_match": 1}, 0.25)


def test_o050_a_letter_counts_only_where_it_is_the_verdict() -> None:
    text = "Answers A and B were compared line by line; my verdict is B."
    assert parse(text, format=pairwise, hi=1).score == 0
    assert parse(text.split(";")[0], format=pairwise, hi=1).status == "no_match"


def test_o051_the_outer_object_is_the_verdict() -> None:
    header = "<|start_header_id|>assistant<|end_header_id|>\n\nHere it is: "
    text = header + '{"score": 7, "detail": {"score": 2}} Done.'
    assert parse(text, format="json").score == parse(text, format=free).score == 7


@pytest.mark.parametrize("text", ["Good overall. Score: 7", "Score : 7", "score= 7"])
def test_o052_a_label_needs_no_line_of_its_own(text: str) -> None:
    assert parse(text).score == 7


@pytest.mark.parametrize(
    ("example", "arguments", "score"),
    [
        ("Score: 7", {}, 7),
        ('{"score": 7}', {"format": "json"}, 7),
        ("<score_7f3a>7</score_7f3a>", {"format": "tag", "nonce": "7f3a"}, 7),
        (r"\boxed{7}", {"format": "boxed"}, 7),
        ("[[7]]", {"format": "bracket"}, 7),
        ("Verdict: Yes", {"format": yes_no}, 10),
        ("[[B]]", {"format": pairwise}, 0),
        ("[[A>B]]", {"format": arena}, 7.5),
    ],
)
def test_o053_the_example_that_a_template_gives_is_read(
    example: str, arguments: dict[str, Any], score: float
) -> None:
    template = f"Problem: {{problem}}\n{{candidate}}\nThink, then end with a line such as this:\n{example}"
    prompt = render(template, {"problem": "2+2", "candidate": "Score: 9, [[C]], verdict: no"}, nonce="7f3a")
    assert parse(prompt.splitlines()[-1], **arguments).score == score
    assert parse("A fine answer.\n" + example, **arguments).score == score


def test_o060_text_before_a_lone_closing_tag_is_thinking() -> None:
    assert parse("17 has no divisor. Score: 2\n</think>\nIt is prime. Score: 9").score == 9
    assert parse("17 has no divisor. Score: 2\n</think>\nIt is prime.").status == "no_match"


@pytest.mark.parametrize(
    ("score", "lo", "hi", "expected"),
    [(1, 1, 10, 0), (10, 1, 10, 1), (5.5, 1, 10, 0.5), (7, 1, 10, 2 / 3), (3, 1, 5, 0.5), (-2, -5, 5, 0.3)],
)
def test_o061_the_scale_maps_to_zero_and_one(score: float, lo: float, hi: float, expected: float) -> None:
    assert normalise(score, lo, hi) == pytest.approx(expected)
    for outside in (lo - 1, hi + 1, math.nan):
        with pytest.raises(ValueError, match="normalise: "):
            normalise(outside, lo, hi)
