"""A judge's config that cannot work is refused with a message that names the field."""

import re
from dataclasses import replace

import pytest

from rl.config import Judge, Scalar
from rl.judges.templates import check_template

PAIR = Judge(format="pairwise", template="{problem}{first}{second}")
RUBRIC = Judge(format="rubric", template="{candidate}{criterion}", criteria=("a", "b"))
TAG = Judge(format="tag", label="score", template="{candidate} <score_{nonce}>", nonce=True)
LOGPROB = Judge(format="logprob", hi=1.0)


@pytest.mark.parametrize(
    "cfg",
    [
        Judge(),
        Judge(format="json", label="score"),
        Judge(format="boxed", template=r"{problem}{candidate} Write \boxed{score}."),
        Judge(format="yes_no", votes=3, vote="majority"),
        Judge(lo=-1.0, hi=1e9),
        Judge(delimiter="candidate", neutralise=True),
        Judge(template='{problem}{candidate} Write {"score": 3} or {}.'),
        PAIR,
        replace(PAIR, opponents=3, votes=2),
        RUBRIC,
        replace(RUBRIC, points=(1.0, -2.0)),
        TAG,
        LOGPROB,
        Scalar(),
        Scalar(chat=True, template=""),
    ],
)
def test_what_can_work_has_no_fault(cfg):
    assert check_template(cfg, has_answers=False) == []


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (Judge(template="{problem}"), r"must contain \{candidate\}"),
        (Judge(template="{candidat}{candidate}"), r"has \{candidat\}, which is no field"),
        (Judge(template=r"{candidate} \boxed{answer}"), r"has \{answer\}"),
        (Judge(template="{first}{candidate}"), r"has \{first\}"),
        (Judge(template="{candidate}{nonce}"), r"has \{nonce\}"),
        (Judge(template="{candidate}{reference}"), "not every prompt of the data has an answer"),
        (replace(PAIR, template="{first}"), r"must contain \{second\}"),
        (replace(PAIR, template="{first}{second}{candidate}"), r"has \{candidate\}"),
        (replace(RUBRIC, template="{candidate}"), r"must contain \{criterion\}"),
        (replace(TAG, template="{candidate}"), r"must contain \{nonce\}"),
        (replace(TAG, format="label"), "judge.nonce needs a tag"),
        (replace(TAG, delimiter="score"), "cannot read '<score_0f1e2d3c>5"),
        (replace(TAG, label="_score"), "cannot read"),
        (Judge(format="yes_no", delimiter="answer"), "judge.delimiter"),
        (replace(PAIR, delimiter="verdict"), "judge.delimiter"),
        (Judge(delimiter="a b"), "name of a tag"),
        (Judge(label=""), "judge.label"),
        (Judge(lo=5.0), "judge.lo must be below judge.hi"),
        (Judge(hi=float("inf")), "judge.lo must be below judge.hi"),
        (Judge(votes=0), "judge.votes must be >= 1"),
        (Judge(votes=2, temperature=0.0), "judge.temperature 0"),
        (Judge(vote="majority"), "judge.vote majority"),
        (Judge(opponents=2), "judge.opponents has no effect"),
        (replace(PAIR, opponents=-1), "judge.opponents must be >= 0"),
        (Judge(criteria=("a",)), "no effect"),
        (replace(RUBRIC, criteria=()), "needs judge.criteria"),
        (replace(RUBRIC, criteria=("a", " ")), "empty criterion"),
        (replace(RUBRIC, points=(1.0,)), "1 numbers for 2 criteria"),
        (replace(RUBRIC, points=(-1.0, 0.0)), "needs one above 0"),
        (replace(RUBRIC, points=(1.0, float("nan"))), "must be finite"),
        (replace(LOGPROB, votes=2), "samples nothing"),
        (replace(LOGPROB, values=(1.0,)), "1 numbers for 2 labels"),
        (replace(LOGPROB, values=(2.0, 0.0)), "lie on the scale"),
        (replace(LOGPROB, labels=("Yes",), values=(1.0,)), "two or more"),
        (replace(LOGPROB, labels=("yes", " Yes")), "one spelling"),
        (replace(LOGPROB, labels=("1", "10"), urls=("http://x/v1",)), "begins"),
        (replace(LOGPROB, coverage=0.0), "judge.coverage"),
        (Scalar(template="{problem}"), r"scalar.template must contain \{candidate\}"),
        (Scalar(template="{candidate}{reference}"), "scalar.template asks for"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_named(cfg, words):
    faults = check_template(cfg, has_answers=False)
    assert len(faults) == 1 or "cannot read" in faults[0]
    assert any(re.search(words, fault) for fault in faults), faults


def test_the_reference_may_be_shown_where_every_prompt_has_an_answer():
    for cfg in (Judge(template="{candidate}{reference}"), Scalar(template="{candidate}{reference}")):
        assert check_template(cfg, has_answers=True) == []
