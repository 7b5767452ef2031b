"""The engine contract on the built-in engine, and what it promises beyond that: the same bits, whoever shares
the batch."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.config import ModelConfig
from rl.engines.torch import TorchEngine
from rl.types import SamplingParams
from tests.engines.asked import (
    FREE,
    PROBE,
    PROMPT,
    SLOTS,
    collect,
    plain_logp,
    plain_token_logp,
    state,
    until,
)
from tests.engines.asked import build as build_any
from tests.engines.contract import EngineContract

CFG = ModelConfig(
    vocab_size=23, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_len=64
)


def build(cfg=CFG, seed=0):
    return build_any(cfg, seed)


def run(coroutine):
    torch.set_num_threads(1)
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def same(a, b) -> bool:
    bits = [(c.tokens.tobytes(), c.logps.tobytes(), c.finish) for c in (a, b)]
    return bits[0] == bits[1]


class TorchHost:
    def run(self, main):
        return run(main)

    async def engine(self, model, version=0):
        engine = TorchEngine(model.cfg, state(model), version=version, max_slots=SLOTS, probe_ids=PROBE)
        await engine.start()
        return engine

    async def release(self, engine):
        await engine.stop()


@pytest.fixture
def host():
    return TorchHost()


class TestTorch(EngineContract):
    pass


# ── Sampling ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "cfg",
    [
        CFG,
        replace(CFG, n_kv_heads=4, tie_embeddings=False),
        replace(CFG, family="qwen2", qkv_bias=True),
        replace(CFG, family="qwen3", qk_norm=True, n_kv_heads=1),
    ],
)
def test_log_probs_equal_a_plain_forward_pass(cfg):
    model = build(cfg)

    async def main():
        engine = TorchEngine(cfg, state(model))
        await engine.start()
        out = await collect(engine, PROMPT, replace(FREE, temperature=0.8, max_tokens=40), range(6))
        await engine.stop()
        return out

    for c in run(main()):
        assert len(c.tokens) == len(c.logps) == len(c.versions) == 40 and c.finish == "length"
        expected = plain_token_logp(model, PROMPT, c.tokens.tolist(), 0.8)
        np.testing.assert_allclose(c.logps, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "cfg",
    [
        CFG,
        replace(CFG, vocab_size=31, d_model=64, n_kv_heads=4, n_heads=4, head_dim=16, d_ff=192),
        replace(CFG, d_model=24, n_heads=3, n_kv_heads=1, d_ff=40),
    ],
)
def test_a_sample_is_the_same_bits_whoever_shares_its_batch(cfg):
    """Alone, among 50 others of other lengths and parameters, in other slots, late, and in a queue."""
    model = build(cfg)
    rng = np.random.default_rng(0)
    others = [
        (
            rng.integers(0, 23, rng.integers(1, 30)).tolist(),
            SamplingParams(
                max_tokens=int(rng.integers(1, 30)),
                temperature=float(rng.uniform(0, 1.5)),
                top_p=float(rng.choice([1, 0.7])),
                top_k=int(rng.choice([0, 5])),
            ),
            range(i, i + int(rng.integers(1, 4))),
        )
        for i in range(50)
    ]
    mine = [
        (PROMPT, replace(FREE, max_tokens=40), (11, 12)),
        ((7,), replace(FREE, top_p=0.8), (5,)),
        (tuple(range(20)), replace(FREE, temperature=0.3), (9,)),
    ]

    async def alone():
        out = []
        for request in mine:
            engine = TorchEngine(cfg, state(model))
            await engine.start()
            out += await collect(engine, *request)
            await engine.stop()
        return out

    async def together(before: int, slots: int, pause: float):
        engine = TorchEngine(cfg, state(model), max_slots=slots)
        await engine.start()
        tasks = [asyncio.create_task(collect(engine, *request)) for request in others[:before]]
        await asyncio.sleep(pause)
        wanted = [asyncio.create_task(collect(engine, *request)) for request in mine]
        tasks += [asyncio.create_task(collect(engine, *request)) for request in others[before:]]
        out = [c for task in wanted for c in await task]
        await asyncio.gather(*tasks)
        await engine.stop()
        return out

    expected = run(alone())
    for before, slots, pause in ((0, 256, 0.0), (50, 256, 0.0), (25, 256, 0.01), (20, 7, 0.005)):
        found = run(together(before, slots, pause))
        assert [same(a, b) for a, b in zip(expected, found, strict=True)] == [True] * 4


def test_a_stop_token_is_kept_with_its_log_prob_and_a_cut_answer_gets_none():
    model = build(replace(CFG, eos_ids=(2,)))

    async def main():
        engine = TorchEngine(model.cfg, state(model))
        await engine.start()
        return await collect(engine, PROMPT, replace(FREE, stop_ids=(9, 10)), range(40))

    out = run(main())
    assert {c.finish for c in out} == {"stop", "length"}
    for c in out:
        ends = np.isin(c.tokens, (2, 9, 10))
        assert not ends[:-1].any()
        assert c.finish == ("stop" if ends[-1] else "length")
        assert len(c.tokens) == 20 or ends[-1]
        expected = plain_token_logp(model, PROMPT, c.tokens.tolist())
        np.testing.assert_allclose(c.logps, expected, atol=1e-5, rtol=0)
    assert {int(c.tokens[-1]) for c in out if c.finish == "stop"} == {2, 9, 10}


@pytest.mark.parametrize("slots", [256, 3])
def test_the_samples_of_a_prompt_share_its_prefill(slots):
    async def main():
        engine = TorchEngine(CFG, state(build()), max_slots=slots)
        await engine.start()
        out = await collect(engine, PROMPT, FREE, range(8))
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.sampled_tokens) == (len(PROMPT), 8 * 20)
        assert (stats.running, stats.waiting) == (0, 0)
        assert 0 < stats.busy_s < stats.wall_s
        await engine.stop()
        return out

    assert len(run(main())) == 8


# ── Weights ─────────────────────────────────────────────────────────────────────


def test_a_prompt_that_waits_for_slots_is_read_again_after_an_update():
    old, new = build(seed=0), build(seed=1)

    async def main():
        engine = TorchEngine(CFG, state(old), max_slots=2)
        await engine.start()
        task = asyncio.create_task(collect(engine, PROMPT, replace(FREE, max_tokens=30), range(4)))
        await until(lambda: engine.stats().sampled_tokens >= 6)
        await engine.update(1, state(new))
        out = await task
        assert engine.stats().prompt_tokens == 2 * len(PROMPT)
        await engine.stop()
        for c in out[2:]:
            assert (c.versions == 1).all()
            expected = plain_token_logp(new, PROMPT, c.tokens.tolist())
            np.testing.assert_allclose(c.logps, expected, atol=1e-5, rtol=0)

    run(main())


# ── Pause, abort, failure ───────────────────────────────────────────────────────


def test_stop_ends_every_caller_and_refuses_later_calls():
    async def main():
        engine = TorchEngine(CFG, state(build()))
        await engine.start()
        task = asyncio.create_task(collect(engine, PROMPT, replace(FREE, max_tokens=50), range(2)))
        await until(lambda: engine.stats().running == 2)
        await engine.stop()
        assert [c.finish for c in await task] == ["abort", "abort"]
        with pytest.raises(RuntimeError, match="stopped"):
            await collect(engine, PROMPT, FREE, (0,))
        await engine.stop()

    run(main())


def test_a_call_before_start_is_refused():
    with pytest.raises(RuntimeError, match="not started"):
        run(TorchEngine(CFG, state(build())).report())


def test_an_error_in_a_step_reaches_every_caller_and_every_later_call():
    async def main():
        engine = TorchEngine(CFG, state(build()), max_slots=2)
        await engine.start()
        callers = [asyncio.create_task(collect(engine, PROMPT, FREE, range(2))) for _ in range(3)]
        await until(lambda: engine.stats().running == 2)
        drain = asyncio.create_task(engine.update(1, state(build()), mode="wait"))

        def step(arrived, admit):
            raise MemoryError("no room")

        engine._decoder.step = step
        for task in [*callers, drain]:
            with pytest.raises(RuntimeError, match="no room") as caught:
                await task
            assert isinstance(caught.value.__cause__, MemoryError)
        for call in (
            collect(engine, PROMPT, FREE, (0,)),
            engine.score([PROMPT], [1]),
            engine.report(),
            engine.abort(),
            engine.pause(),
            engine.resume(),
        ):
            with pytest.raises(RuntimeError, match="no room"):
                await call
        await engine.stop()

    run(main())


def test_a_long_step_does_not_block_the_event_loop():
    async def main():
        engine = TorchEngine(CFG, state(build()))
        await engine.start()
        real = engine._decoder.step

        def slow(arrived, admit):
            time.sleep(0.2)
            return real(arrived, admit)

        engine._decoder.step = slow
        task = asyncio.create_task(collect(engine, PROMPT, replace(FREE, max_tokens=2), (0,)))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await engine.stop()
        assert ticks >= 5

    run(main())


# ── Scoring ─────────────────────────────────────────────────────────────────────


def test_scores_equal_a_plain_forward_pass():
    model = build()
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 23, n).tolist() for n in (2, 64, 9, 17, 5, 5)]
    starts = [1, 40, 9, 3, 1, 4]

    async def main():
        engine = TorchEngine(CFG, state(model))
        await engine.start()
        out = await engine.score(sequences, starts, top_k=4, full=True, temperature=0.7)
        bare = await engine.score(sequences, starts)
        alone = [
            (await engine.score([s], [b], top_k=4, full=True, temperature=0.7))[0]
            for s, b in zip(sequences, starts, strict=True)
        ]
        assert await engine.score([], []) == []
        await engine.stop()
        return out, bare, alone

    out, bare, alone = run(main())
    for ids, start, a, b, c in zip(sequences, starts, out, bare, alone, strict=True):
        logp = plain_logp(model, ids, 0.7)[start - 1 :]
        own = logp.gather(-1, torch.tensor(ids[start:])[:, None])[:, 0]
        np.testing.assert_allclose(a.logps, own.numpy(), atol=1e-5)
        np.testing.assert_allclose(a.full, logp.numpy(), atol=1e-5)
        np.testing.assert_allclose(a.top_logps, logp.topk(4).values.numpy(), atol=1e-5)
        np.testing.assert_array_equal(np.take_along_axis(a.full, a.top_ids.astype(np.int64), 1), a.top_logps)
        np.testing.assert_allclose(b.logps, plain_token_logp(model, ids[:start], ids[start:]), atol=1e-5)
        assert b.top_ids is None and b.top_logps is None and b.full is None
        assert a.logps.shape == (len(ids) - start,) and a.logps.dtype == np.float32
        for name in ("logps", "top_ids", "top_logps", "full"):
            assert getattr(a, name).tobytes() == getattr(c, name).tobytes()
