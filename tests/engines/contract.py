"""What every engine promises, asked through the interface alone: a class of tests that each engine's own test
file inherits, with a `host` that brings up its engines. Here: how it samples, and is held or cut short."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.engines.base import PauseMode
from tests.engines.asked import (
    FREE,
    LONG,
    PROMPT,
    SLOTS,
    Host,
    build,
    close,
    collect,
    plain_logp,
    plain_token_logp,
    same_tokens,
    state,
    tokens_more,
    until,
    with_engine,
)
from tests.engines.contract_parcels import ParcelContract
from tests.engines.contract_scores import ScoreContract
from tests.engines.contract_weights import WeightContract


class EngineContract(WeightContract, ParcelContract, ScoreContract):
    # ── Sampling ────────────────────────────────────────────────────────────────────

    @with_engine
    async def test_log_probs_equal_a_plain_forward_pass(self, engine, model):
        for c in await collect(engine, PROMPT, replace(FREE, temperature=0.8, max_tokens=40), range(6)):
            assert len(c.tokens) == len(c.logps) == len(c.versions) == 40 and c.finish == "length"
            assert (c.tokens.dtype, c.logps.dtype, c.versions.dtype) == (np.int32, np.float32, np.int32)
            close(c.logps, plain_token_logp(model, PROMPT, c.tokens.tolist(), 0.8))

    @with_engine
    async def test_with_top_k_the_log_probs_are_those_of_the_kept_tokens(self, engine, model):
        for c in await collect(engine, PROMPT, replace(FREE, top_k=3), range(8)):
            top, ids = plain_logp(model, [*PROMPT, *c.tokens.tolist()])[len(PROMPT) - 1 :].topk(3)
            chosen = ids == torch.from_numpy(c.tokens)[:, None]
            assert chosen.any(-1).all()
            close(c.logps, top.log_softmax(-1)[chosen].float().numpy())

    @with_engine
    async def test_with_top_p_the_log_probs_are_those_of_the_nucleus(self, engine, model):
        for c in await collect(engine, PROMPT, replace(FREE, top_p=0.6), range(8)):
            p = plain_logp(model, [*PROMPT, *c.tokens.tolist()])[len(PROMPT) - 1 :].exp()
            falling = p.sort(-1, descending=True).values
            mass = torch.where(falling.cumsum(-1) - falling < 0.6, falling, 0).sum(-1)
            own = p.gather(-1, torch.from_numpy(c.tokens).long()[:, None])[:, 0]
            close(c.logps, (own / mass).log().float().numpy())

    @with_engine
    async def test_the_seed_decides_the_tokens(self, engine, model):
        a, b, c = await collect(engine, PROMPT, FREE, (1, 1, 2))
        [again] = await collect(engine, PROMPT, FREE, (1 + 2**64,))
        minus, too = await collect(engine, PROMPT, FREE, (-1, -1))
        assert same_tokens(a, b) and same_tokens(a, again) and same_tokens(minus, too)
        assert not same_tokens(a, c) and not same_tokens(a, minus)

    @with_engine
    async def test_greedy_follows_the_argmax(self, engine, model):
        a, b = await collect(engine, PROMPT, replace(FREE, temperature=0.0), (0, 1))
        assert same_tokens(a, b) and (a.logps == 0).all()
        best = plain_logp(model, [*PROMPT, *a.tokens.tolist()])[len(PROMPT) - 1 :].argmax(-1)
        assert best.tolist() == a.tokens.tolist()

    @with_engine
    async def test_a_stop_token_is_kept_with_its_log_prob_and_a_cut_answer_gets_none(self, engine, model):
        out = await collect(engine, PROMPT, replace(FREE, stop_ids=(9, 10)), range(40))
        assert {c.finish for c in out} == {"stop", "length"}
        for c in out:
            ends = np.isin(c.tokens, (9, 10))
            assert not ends[:-1].any()
            assert c.finish == ("stop" if ends[-1] else "length")
            assert len(c.tokens) == 20 or ends[-1]
            close(c.logps, plain_token_logp(model, PROMPT, c.tokens.tolist()))
        assert {int(c.tokens[-1]) for c in out if c.finish == "stop"} == {9, 10}

    @with_engine
    async def test_o074_a_stop_token_in_the_last_place_is_a_stop_and_no_cut(self, engine, model):
        out = await collect(engine, PROMPT, replace(FREE, max_tokens=1, stop_ids=tuple(range(12))), range(24))
        assert {c.finish for c in out} == {"stop", "length"}
        assert all((c.finish == "stop") == (c.tokens[0] < 12) for c in out)

    @with_engine
    async def test_o076_the_gap_to_a_plain_forward_pass_is_far_below_a_thousandth_in_float32(
        self, engine, model
    ):
        gaps = [
            c.logps - plain_token_logp(model, PROMPT, c.tokens.tolist())
            for c in await collect(engine, PROMPT, LONG, range(SLOTS))
        ]
        gap = np.abs(np.concatenate(gaps))
        assert np.sqrt((gap**2).mean()) < 1e-5 and np.quantile(gap, 0.95) < 2e-5

    @with_engine
    async def test_the_samples_of_a_prompt_share_its_prefill(self, engine, model):
        prompt, before = [i % 23 for i in range(200)], engine.stats()
        await collect(engine, prompt, FREE, range(SLOTS))
        after = engine.stats()
        # what fills no block of the cache may be computed for each
        assert after.prompt_tokens - before.prompt_tokens <= 200 + (SLOTS - 1) * 32
        assert after.sampled_tokens - before.sampled_tokens == SLOTS * 20
        assert (after.running, after.waiting) == (0, 0)
        assert 0 < after.busy_s - before.busy_s < after.wall_s - before.wall_s

    @with_engine
    async def test_samples_beyond_the_slots_start_in_the_order_of_their_arrival(self, engine, model):
        order = []

        async def one(i: int) -> None:
            await collect(engine, PROMPT, replace(FREE, max_tokens=5), (i,), str(i))
            order.append(i)

        await asyncio.gather(*(one(i) for i in range(4 * SLOTS)))
        assert [i // SLOTS for i in order] == sorted(i // SLOTS for i in range(4 * SLOTS))

    # ── Pause, abort ────────────────────────────────────────────────────────────────
    @pytest.mark.parametrize("mode", ["keep", "recompute"])
    def test_pause_stops_progress_and_resume_goes_on_to_the_same_tokens(self, host: Host, mode: PauseMode):
        async def main():
            engine = await host.engine(build())
            expected = await collect(engine, PROMPT, LONG, range(3))
            task = asyncio.create_task(collect(engine, PROMPT, LONG, range(3)))
            await tokens_more(engine, 9)
            await engine.pause(mode)
            frozen = engine.stats().sampled_tokens
            await asyncio.sleep(0.05)
            assert engine.stats().sampled_tokens == frozen and engine.stats().running == 3
            await engine.resume()
            for a, b in zip(expected, await task, strict=True):
                assert same_tokens(a, b)
                close(a.logps, b.logps)
            await host.release(engine)

        host.run(main())

    @with_engine
    async def test_pause_wait_drains_and_holds_what_comes_later(self, engine, model):
        task = asyncio.create_task(collect(engine, PROMPT, LONG, range(3)))
        await until(lambda: engine.stats().running == 3)
        await engine.pause("wait")
        assert engine.stats().running == 0 and len(await task) == 3
        late = asyncio.create_task(collect(engine, PROMPT, FREE, range(2)))
        await asyncio.sleep(0.05)
        assert (engine.stats().running, engine.stats().waiting) == (0, 2)
        await engine.resume()
        assert len(await late) == 2

    @with_engine
    async def test_abort_yields_what_was_sampled_so_far_and_leaves_others_alone(self, engine, model):
        [whole] = await collect(engine, PROMPT, LONG, (0,))
        rest = asyncio.create_task(collect(engine, PROMPT, LONG, (0,), "rest"))
        cut = asyncio.create_task(collect(engine, PROMPT, LONG, range(SLOTS), "cut"))  # one has no slot
        await until(lambda: engine.stats().running == SLOTS)
        await tokens_more(engine, 3 * SLOTS)
        assert await engine.abort("cut") == SLOTS
        out = await cut
        assert [c.finish for c in out] == ["abort"] * SLOTS
        n = len(out[0].tokens)
        assert 3 <= n < 400 and len(out[-1].tokens) == len(out[-1].logps) == 0
        assert np.array_equal(out[0].tokens, whole.tokens[:n])
        close(out[0].logps, whole.logps[:n])
        assert same_tokens((await rest)[0], whole)
        assert await engine.abort() == 0

    @with_engine
    async def test_abort_ends_a_paused_request(self, engine, model):
        await engine.pause()
        task = asyncio.create_task(collect(engine, PROMPT, FREE, range(2)))
        await asyncio.sleep(0)
        assert await engine.abort() == 2
        assert [c.finish for c in await task] == ["abort", "abort"]
        await engine.resume()

    @with_engine
    async def test_a_caller_that_goes_away_gives_its_slots_back(self, engine, model):
        task = asyncio.create_task(collect(engine, PROMPT, LONG, range(2 * SLOTS)))
        await until(lambda: engine.stats().running == SLOTS)
        await engine.pause()
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)
        await engine.resume()
        assert len(await collect(engine, PROMPT, FREE, range(SLOTS))) == SLOTS

    @pytest.mark.parametrize(
        "prompt, change, names",
        [
            ((1,) * 493, {}, "493 prompt tokens"),
            ((), {}, "token ids"),
            ((1, 23), {}, r"\[0, 23\)"),
            ((1,), {"max_tokens": 0}, "max_tokens=0"),
            ((1,), {"temperature": -1.0}, "temperature"),
            ((1,), {"top_p": 0.0}, "top_p"),
        ],
    )
    def test_requests_that_cannot_be_served_are_refused(self, host: Host, prompt, change, names):
        async def main():
            engine = await host.engine(build())
            with pytest.raises(ValueError, match=names):
                await collect(engine, prompt, replace(FREE, **change), (0,))
            [c] = await collect(engine, (1,) * 492, FREE, (0,))
            assert len(c.tokens) == 20
            await host.release(engine)

        host.run(main())

    @with_engine
    async def test_an_unknown_mode_is_refused(self, engine, model):
        for call in (engine.pause("drain"), engine.update(1, state(model), mode="drain")):
            with pytest.raises(ValueError, match="drain"):
                await call

    @with_engine
    async def test_a_language_model_does_not_classify(self, engine, model):
        with pytest.raises(ValueError, match="classify"):
            await engine.classify([PROMPT])
