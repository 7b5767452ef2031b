"""The judge's shell over the built-in engine: questions in, replies out, each failing alone."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.config import ModelConfig
from models.tokenizer import char_tokenizer
from models.transformer import Transformer
from rl.actors.judge import Judge
from rl.config import Judge as JudgeConfig
from rl.engines.make import Bundle
from rl.types import Ask
from tests.rl.judges.server import Server

ALPHABET = "0123456789yn?j"
CFG = JudgeConfig(template="j{problem}{candidate}?", max_tokens=6, temperature=1.0, slots=8)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    torch.set_num_threads(1)
    tokenizer = char_tokenizer(ALPHABET)
    cfg = ModelConfig(
        vocab_size=tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=16,
        d_ff=48, max_len=32,
    )  # fmt: skip
    model = Transformer(cfg)
    model.init_weights(torch.Generator().manual_seed(3))
    weights = {name: p.numpy().copy() for name, p in model.state_dict().items()}
    return Bundle(cfg=cfg, weights=weights, tokenizer=tokenizer, folder="")


def using(judge: Judge, work):
    async def go():
        await judge.start()
        try:
            return await work(judge)
        finally:
            await judge.stop()

    return asyncio.run(asyncio.wait_for(go(), 30))


def ask(text, seed=1, labels=()):
    return Ask(text=text, about=(0,), seed=seed, labels=labels)


def test_a_reply_is_a_function_of_question_and_seed_whoever_is_asked_beside(bundle):
    questions = [ask("j12?", 1), ask("j12?", 2), ask("j9?", 1), ask("j12?", 3), ask("j12?", 1)]

    async def work(judge):
        together = await judge.answer(questions)
        alone = [(await judge.answer([question]))[0] for question in questions]
        return together, alone

    together, alone = using(Judge(bundle, CFG, name="judge-3"), work)
    assert [r.text for r in together] == [r.text for r in alone]
    assert together[0].text == together[4].text
    assert len({together[i].text for i in (0, 1, 3)}) == 3, "seeds of one question that write the same"
    first = together[0]
    assert not first.failure and first.n_prompt == 4 and 1 <= first.n_tokens <= 6
    assert first.finish in ("stop", "length") and first.replica == "judge-3" and first.seconds > 0


def test_a_greedy_judge_is_asked_the_same_question_once(bundle):
    questions = [ask("j12?", 1), ask("j9?", 2), ask("j12?", 3), ask("j12?", 4)]

    async def work(judge):
        asked = []
        write = judge.judge._write

        async def counted(ids, seeds, found):
            asked.append(len(seeds))
            await write(ids, seeds, found)

        judge.judge._write = counted
        return await judge.answer(questions), asked

    replies, asked = using(Judge(bundle, replace(CFG, temperature=0.0)), work)
    assert asked == [1, 1]
    first, other, *again = replies
    assert first.text and [r.text for r in again] == [first.text] * 2 and other.n_prompt == 3
    assert first.n_tokens >= 1 and [(r.n_prompt, r.n_tokens) for r in again] == [(0, 0)] * 2
    assert [r.finish for r in again] == [first.finish] * 2 and not any(r.failure for r in replies)
    _, asked = using(Judge(bundle, CFG), work)
    assert asked == [3, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_that_ends_without_an_answer_fails_that_question_alone(bundle, temperature):
    async def work(judge):
        generate = judge.judge.engine.generate

        async def nothing(ids, **how):
            if len(ids) == 4:  # j12?
                return
            async for sample in generate(ids, **how):
                yield sample

        judge.judge.engine.generate = nothing
        return await judge.answer([ask("j12?", 1), ask("j9?", 2), ask("j12?", 3)])

    one, other, again = using(Judge(bundle, replace(CFG, temperature=temperature)), work)
    assert one.failure == again.failure == "engine: it ended without an answer" and one.text == ""
    assert not other.failure and other.n_tokens >= 1


def test_label_logps_are_those_of_the_next_token_under_the_whole_vocabulary(bundle):
    async def work(judge):
        replies = await judge.answer([ask("j12?", labels=("y", "n")), ask("j9?", labels=("y", "n"))])
        ids = bundle.tokenizer.encode("j12?y")
        (scores,) = await judge.judge.engine.score([ids], [4], full=True)
        return replies, scores.full[0]

    (first, second), full = using(Judge(bundle, CFG), work)
    y, n = (bundle.tokenizer.encode(label)[0] for label in "yn")
    assert first.label_logps == pytest.approx((full[y], full[n])) and first.text == ""
    assert second.label_logps != first.label_logps
    assert sum(map(math.exp, first.label_logps)) < 1


def test_spellings_of_a_label_are_summed(bundle):
    tokenizer = char_tokenizer(ALPHABET + "YN")
    wide = replace(bundle, tokenizer=tokenizer, cfg=replace(bundle.cfg, vocab_size=tokenizer.vocab_size))
    model = Transformer(wide.cfg)
    model.init_weights(torch.Generator().manual_seed(3))
    wide = replace(wide, weights={name: p.numpy().copy() for name, p in model.state_dict().items()})

    async def work(judge):
        (reply,) = await judge.answer([ask("j1?", labels=("Y", "N"))])
        (scores,) = await judge.judge.engine.score([tokenizer.encode("j1?y")], [3], full=True)
        return reply, scores.full[0]

    reply, full = using(Judge(wide, CFG), work)
    both = [np.exp(full[[tokenizer.encode(c)[0] for c in (label, label.lower())]]).sum() for label in "YN"]
    assert np.exp(reply.label_logps) == pytest.approx(both)


def test_a_question_beyond_the_context_fails_alone_before_any_call_and_names_both_numbers(bundle):
    long = "j" + "1" * 26  # 27 + 6 > 32

    async def work(judge):
        replies = await judge.answer([ask("j1?"), ask(long), ask(long, labels=("y", "n"))])
        return replies, await judge.stats()

    (fine, refused, label), stats = using(Judge(bundle, CFG), work)
    assert not fine.failure and not label.failure  # labels need one token of room
    assert refused.failure.startswith("question: ") and not refused.again
    assert "32 tokens" in refused.failure and "27 of the question and 6" in refused.failure
    assert stats.sampled_tokens == fine.n_tokens


def test_an_unreadable_question_and_labels_without_a_token_fail_alone(bundle):
    async def work(judge):
        return await judge.answer([ask("é"), ask("j1?", labels=("yes", "no")), ask("j2?")])

    unread, labels, fine = using(Judge(bundle, CFG), work)
    assert "unknown character 'é'" in unread.failure and not unread.again
    assert "no single token writes 'yes'" in labels.failure and not labels.again
    assert not fine.failure


def test_chat_goes_through_the_models_template(bundle):
    async def work(judge):
        return await judge.answer([ask("j1?")])

    (reply,) = using(Judge(bundle, replace(CFG, chat=True)), work)
    assert reply.failure.startswith("question: ") and "no chat template" in reply.failure

    class Chatty:
        eos_ids = bundle.tokenizer.eos_ids
        decode = bundle.tokenizer.decode

        def chat(self, messages, add_generation_prompt=True):
            assert messages == [{"role": "user", "content": "j1?"}] and add_generation_prompt
            return [2, 3, 4, 5, 6]

    templated = replace(bundle, tokenizer=Chatty())  # type: ignore[arg-type]
    (reply,) = using(Judge(templated, replace(CFG, chat=True)), work)
    assert not reply.failure and reply.n_prompt == 5


def test_what_is_not_there_in_time_fails_alone_and_may_be_asked_again(bundle):
    async def work(judge):
        (reply,) = await judge.answer([ask("j1?")], 0.0)
        return reply, await judge.answer([ask("j1?")], 10.0)

    late, (fine,) = using(Judge(bundle, CFG), work)
    assert late.failure.startswith("timeout: ") and late.again and not fine.failure


def test_start_is_harmless_to_a_running_judge_and_mends_one_whose_engine_failed(bundle):
    async def work(judge):
        engine = judge.judge.engine
        await asyncio.gather(judge.start(), judge.start())
        assert judge.judge.engine is engine

        def broken(*_):
            raise RuntimeError("out of memory")

        engine._decoder.step = broken
        (lost,) = await judge.answer([ask("j1?")])
        assert lost.failure.startswith("engine: ") and "out of memory" in lost.failure and lost.again
        await judge.start()
        assert judge.judge.engine is not engine
        return (await judge.answer([ask("j1?")]))[0]

    assert not using(Judge(bundle, CFG), work).failure


def test_o085_a_judge_that_was_born_anew_says_that_it_was_not_started(bundle):
    async def go():
        judge = Judge(bundle, CFG)
        (reply,) = await judge.answer([ask("j1?")])
        with pytest.raises(RuntimeError, match="not started"):
            await judge.stats()
        return reply

    reply = asyncio.run(go())
    assert reply.failure == "engine: not started" and reply.again


def test_a_judge_has_a_model_or_a_url(bundle):
    for args in ((None, CFG, None), (bundle, CFG, "http://127.0.0.1:1/v1")):
        with pytest.raises(ValueError, match="expected a model or a url"):
            Judge(*args)


def test_the_same_shell_speaks_to_a_server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-9")

    async def go():
        async with Server().up() as server:
            judge = Judge(None, CFG, server.url, "judge-1")
            await judge.start()
            await judge.start()
            (reply,) = await judge.answer([ask("j1?")], 5.0)
            stats = await judge.stats()
            await judge.stop()
            return reply, stats, server.requests

    reply, stats, requests = asyncio.run(go())
    assert (reply.text, reply.replica, stats.sampled_tokens) == ("S:5", "judge-1", 3)
    assert requests[0].headers["authorization"] == "Bearer sk-9" and requests[0].body["max_tokens"] == 6
