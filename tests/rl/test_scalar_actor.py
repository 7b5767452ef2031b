"""The scalar judge's shell over a real model: raw logits, and what cannot be read fails alone."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import processors

from models.chat import ChatTemplate
from models.config import ModelConfig
from models.tokenizer import Tokenizer, char_tokenizer
from models.transformer import Transformer
from rl.actors.scalar import ScalarJudge, replies
from rl.config import Scalar
from rl.engines.classifier import EngineClassifier
from rl.engines.make import Bundle
from rl.judges.verdicts import scalar_verdicts
from rl.types import Ask, ParseFail, Reply

PLAIN = char_tokenizer("ab=?UA.", bos="<bos>")  # <pad> 0, <eos> 1, <bos> 2, then the characters
BOS = PLAIN.bos_id
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }}.{% endfor %}"


def chat_tokenizer(template=TEMPLATE) -> Tokenizer:
    """Writes <bos> before a text, as does the template."""
    backend = tokenizers.Tokenizer.from_str(PLAIN._json)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return Tokenizer(backend, eos="<eos>", pad="<pad>", bos="<bos>", template=ChatTemplate(template))


def bundle(tokenizer=PLAIN, **change) -> Bundle:
    cfg = ModelConfig(
        head="score", vocab_size=PLAIN.vocab_size, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1,
        head_dim=8, d_ff=24, max_len=16)  # fmt: skip
    model = Transformer(cfg).requires_grad_(False)
    model.init_weights(torch.Generator().manual_seed(0))
    weights = {name: p.numpy() for name, p in model.state_dict().items()} | change
    return Bundle(cfg=cfg, weights=weights, tokenizer=tokenizer, folder="here")


def ask(text: str, said: str = "", i: int = 0) -> Ask:
    return Ask(text=text, said=said, about=(i,), seed=i)


def answer(asks, model: Bundle | None = None, **cfg) -> list[Reply]:
    async def main():
        judge = ScalarJudge(model or bundle(), Scalar(**cfg), "scalar-0")
        await judge.start()
        out = await judge.answer(asks)
        await judge.stop()
        return out

    torch.set_num_threads(1)
    return asyncio.run(asyncio.wait_for(main(), 60))


def test_each_question_gets_the_raw_logit_of_its_text_in_its_place():
    said = answer([ask("a=b?"), ask("b"), ask("a=b?"), ask("aaaaaaaaaaaa")])
    assert len({r.score for r in said}) == 3 and said[0].score == said[2].score
    assert [r.n_prompt for r in said] == [4, 1, 4, 12]
    assert all((r.failure, r.replica, r.attempts) == ("", "scalar-0", 1) and r.seconds > 0 for r in said)
    assert [answer([ask("b")])[0].score, answer([ask("a=b?")])[0].score] == [said[1].score, said[0].score]
    doubled = bundle(**{"score.weight": 2 * bundle().weights["score.weight"]})
    assert answer([ask("b")], doubled)[0].score == pytest.approx(2 * said[1].score)  # no activation: not here


def test_what_the_model_cannot_read_fails_alone_and_for_good():
    said = answer([ask("a"), ask("a" * 17), ask("aé"), ask(""), ask("a" * 16)])
    assert [r.score is None for r in said] == [False, True, True, True, False]
    assert [r.again for r in said if r.failure] == [False] * 3
    assert "1 to 16 token ids, got 17" in said[1].failure  # never cut
    assert "unknown character" in said[2].failure and "got 0" in said[3].failure


def test_when_nothing_can_be_read_there_is_a_failure_each():
    assert [bool(r.failure) for r in answer([ask(""), ask("é")])] == [True, True]
    assert answer([]) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_score_that_is_no_number_is_a_failure_not_a_score(value):
    weight = np.full_like(bundle().weights["score.weight"], value)
    (said,) = answer([ask("a")], bundle(**{"score.weight": weight}))
    assert not math.isfinite(said.score)  # told as it is
    (verdict,) = scalar_verdicts(Scalar(), [ask("a")], [said], 1)
    assert verdict.outcome == ParseFail("non_finite", verdict.outcome.text)


def test_a_zero_is_a_score():
    zero = np.zeros_like(bundle().weights["score.weight"])
    (said,) = answer([ask("a")], bundle(**{"score.weight": zero}))
    assert said == Reply(score=0.0, n_prompt=1, replica="scalar-0", seconds=said.seconds)


def encoded(tokenizer, text, said=None):
    row = EngineClassifier(None, bundle().cfg, tokenizer).encode(text, said)  # type: ignore[arg-type]
    return row["input_ids"]


def test_o099_a_model_with_a_first_token_reads_exactly_one_in_text_and_in_chat():
    once, twice = chat_tokenizer(), chat_tokenizer("{{ bos_token }}" + TEMPLATE)
    assert encoded(once, "a=") == [BOS, *PLAIN.encode("a=")]
    assert twice.chat([{"role": "user", "content": "a"}], False)[:2] == [BOS, BOS]  # the trap is real
    for tokenizer in (once, twice):
        assert encoded(tokenizer, "a", "b") == [BOS, *PLAIN.encode("Ua.Ab.")]


def test_problem_and_answer_are_two_messages_and_an_empty_answer_is_an_empty_message():
    asks = [ask("a", "b"), ask("a", ""), ask("Ua.A.")]
    chat = answer(asks, bundle(chat_tokenizer()), chat=True)
    assert [r.n_prompt for r in chat] == [1 + 6, 1 + 5, 1 + 9]
    plain = answer(asks, bundle(chat_tokenizer()))
    assert plain[0].score == chat[0].score  # an answer apart is always a message
    assert [r.n_prompt for r in plain[1:]] == [1 + 1, 1 + 5]
    assert plain[2].score == chat[1].score


def test_replies_follow_the_rows_and_take_the_scores_in_their_order():
    rows = [{"input_ids": [1, 2]}, "too long", {"input_ids": [3]}]
    assert replies(rows, [0.5, -2.0], "r", 1.0) == [
        Reply(score=0.5, n_prompt=2, replica="r", seconds=1.0),
        Reply(failure="question: too long", again=False, replica="r", seconds=1.0),
        Reply(score=-2.0, n_prompt=1, replica="r", seconds=1.0),
    ]


def test_start_may_be_called_twice_and_at_once_and_an_answer_before_it_is_refused():
    async def main():
        judge = ScalarJudge(bundle(), Scalar())
        with pytest.raises(RuntimeError, match="scalar: not started"):
            await judge.answer([ask("a")])
        await judge.stop()
        await asyncio.gather(judge.start(), judge.start())
        first = judge.classifier
        await judge.start()
        assert judge.classifier is first
        await asyncio.gather(*(judge.answer([ask("a" * n)]) for n in range(1, 9)))
        assert (await judge.stats()).prompt_tokens == sum(range(1, 9))
        await judge.stop()
        with pytest.raises(RuntimeError, match="stopped"):
            await judge.answer([ask("a")])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_model_that_cannot_be_this_judge_is_refused_at_start():
    lm = replace(bundle(), cfg=replace(bundle().cfg, head="lm"))
    with pytest.raises(ValueError, match="here is a language model"):
        answer([], lm)
    with pytest.raises(ValueError, match="here has no chat template"):
        answer([], chat=True)


def test_the_experiment_rewards_by_the_scalar_judge_alone():
    from experiments.disrm_grpo import CONFIG

    assert CONFIG.reward.weights == {"scalar": 1.0} and CONFIG.uses_scalar and not CONFIG.uses_judge
