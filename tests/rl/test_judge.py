"""The judge's shell over a real engine: what cannot be read or raises concerns its own answer only."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from experiments.genrm_grpo import CONFIG
from models.tokenizer import char_tokenizer
from rl.actors.judge import Judge, outcome_of
from rl.demo.tasks import ALPHABET
from rl.types import Completion, InfraFail, ParseFail, Prompt, SamplingParams, Score

CFG = CONFIG.judge
PROMPT = Prompt(ids=(1,), text="r52814=", answer="41825")


class Scripted:
    """An engine that writes what it is told to, by the answer that it reads, or raises."""

    def __init__(self, replies: dict[str, str | Exception]) -> None:
        self.replies, self.tokenizer = replies, char_tokenizer(ALPHABET)

    async def generate(self, ids, *, params, seeds, request_id) -> AsyncIterator[tuple[int, Completion]]:
        read = self.tokenizer.decode(list(ids))
        (reply,) = [r for answer, r in self.replies.items() if f"={answer}?" in read]
        if isinstance(reply, Exception):
            raise reply
        tokens = np.array(self.tokenizer.encode(reply), np.int32)
        finish = "length" if len(tokens) >= params.max_tokens else "stop"
        yield 0, Completion(tokens=tokens, logps=np.zeros(len(tokens)), versions=tokens * 0, finish=finish)


def judged(replies: dict[str, str | Exception], cfg=CFG):
    judge = Judge.__new__(Judge)
    judge.engine = Scripted(replies)  # type: ignore[assignment]
    judge.tokenizer, judge.cfg = judge.engine.tokenizer, cfg  # type: ignore[attr-defined]
    judge.params = SamplingParams(temperature=cfg.temperature, max_tokens=cfg.max_tokens)
    texts = list(replies)
    return asyncio.run(judge.judge(PROMPT, texts, list(range(len(texts)))))


def test_scores_are_normalised_by_the_declared_bounds():
    said = judged({"41825": "44=S:5", "41925": "44=S:4", "00000": "40!S:0"})
    assert [v.outcome for v in said] == [Score(1.0), Score(0.8), Score(0.0)]
    assert said[0].text == "44=S:5" and said[0].n_tokens == 6


def test_an_unparseable_judgement_and_a_judge_that_raises_concern_their_own_answer_only():
    said = judged({"1": "S:5", "2": "44=11=", "3": RuntimeError("out of memory"), "4": "S:9", "5": "S:3"})
    kinds = [type(v.outcome) for v in said]
    assert kinds == [Score, ParseFail, InfraFail, ParseFail, Score]
    assert said[2].outcome == InfraFail("RuntimeError: out of memory")
    assert isinstance(said[3].outcome, ParseFail) and said[3].outcome.status == "out_of_bounds"


def test_an_answer_that_the_judge_cannot_read_is_an_infra_failure_not_a_zero():
    (said,) = judged({"é": "S:5"})  # not in the judge's alphabet
    assert isinstance(said.outcome, InfraFail) and "unknown character" in said.outcome.why


@pytest.mark.parametrize(
    ("text", "finish", "outcome"),
    [
        ("44=S:5", "stop", Score(1.0)),
        ("S:5. S:2", "stop", Score(0.4)),  # the last one
        ("", "stop", ParseFail("empty", "")),
        ("44=11=", "stop", ParseFail("no_match", "44=11=")),
        ("44=11=", "length", ParseFail("truncated", "44=11=")),
        ("S:6", "stop", ParseFail("out_of_bounds", "S:6")),
    ],
)
def test_outcomes_of_texts(text, finish, outcome):
    assert outcome_of(text, finish, CFG) == outcome
