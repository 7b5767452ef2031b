"""What every engine promises, asked through the interface alone: a class of tests that each engine's own test
file inherits, with a `host` that brings up its engines."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from models.attention import make_layout, packed_attention
from models.checksum import checksums
from models.config import ModelConfig
from models.transformer import Transformer
from rl.engines.base import Engine, PauseMode
from rl.types import Completion, SamplingParams

SLOTS = 8
CFG = ModelConfig(  # heads of 32: the least that vLLM serves on a CPU
    vocab_size=23, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=48, max_len=512
)
PROBE = (1, 2, 3, 4)
PROMPT = (3, 1, 4, 1, 5)
FREE = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=400)
ATOL = 1e-4  # nats in float32


class Host(Protocol):
    def run(self, main: Coroutine[Any, Any, Any]) -> Any: ...

    async def engine(self, model: Transformer, version: int = 0) -> Engine:
        """A started engine of `SLOTS` slots and `PROBE` that serves this model and has nothing to do."""
        ...

    async def release(self, engine: Engine) -> None: ...


def build(cfg: ModelConfig = CFG, seed: int = 0) -> Transformer:
    model = Transformer(cfg).requires_grad_(False)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def state(model: Transformer) -> dict[str, np.ndarray]:
    return {name: p.numpy().copy() for name, p in model.state_dict().items()}


def plain_logp(model: Transformer, ids, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature) [T - 1, V] of the tokens after the first, in float64."""
    layout = make_layout([len(ids)])
    hidden = model(torch.tensor(ids), layout.positions, lambda _, q, k, v: packed_attention(q, k, v, layout))
    return (model.logits(hidden)[:-1].double() / temperature).log_softmax(-1)


def plain_token_logp(model: Transformer, prompt, tokens, temperature: float = 1.0) -> np.ndarray:
    logp = plain_logp(model, [*prompt, *tokens], temperature)[len(prompt) - 1 :]
    return logp.gather(-1, torch.tensor(tokens, dtype=torch.int64)[:, None])[:, 0].float().numpy()


async def collect(engine: Engine, prompt, params, seeds, request_id: str = "r") -> list[Completion]:
    found = {}
    async for index, completion in engine.generate(prompt, params=params, seeds=seeds, request_id=request_id):
        assert index not in found
        found[index] = completion
    return [found[i] for i in sorted(found)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def tokens_more(engine: Engine, n: int) -> None:
    begun = engine.stats().sampled_tokens
    await until(lambda: engine.stats().sampled_tokens >= begun + n)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)


def same_tokens(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.tokens, b.tokens) and a.finish == b.finish


def with_engine(test):
    """Run `async test(self, engine, model)` on an engine that serves build()."""

    def run(self, host: Host):
        async def main():
            model = build()
            engine = await host.engine(model)
            try:
                await test(self, engine, model)
            finally:
                await host.release(engine)

        host.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class EngineContract:
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

    # ── Weights ─────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("mode", ["keep", "recompute"])
    def test_tokens_after_an_update_in_flight_carry_the_new_version(self, host: Host, mode: PauseMode):
        async def main():
            old, new = build(seed=0), build(seed=1)
            engine = await host.engine(old)
            task = asyncio.create_task(collect(engine, PROMPT, LONG, range(SLOTS)))
            await tokens_more(engine, SLOTS * 6)
            report = await engine.update(1, state(new), mode=mode)
            assert report.version == engine.stats().version == 1
            out = await task
            [later] = await collect(engine, PROMPT, FREE, (99,))
            await host.release(engine)
            assert (later.versions == 1).all()
            close(later.logps, plain_token_logp(new, PROMPT, later.tokens.tolist()))
            for c in out:
                n = int((c.versions == 0).sum())
                assert 3 <= n < 400 and c.versions.tolist() == [0] * n + [1] * (400 - n)
                close(c.logps[:n], plain_token_logp(old, PROMPT, c.tokens[:n].tolist()))
                rest = plain_token_logp(new, PROMPT, c.tokens.tolist())[n:]
                gap = np.abs(c.logps[n:] - rest).max()
                # as if all had been read under the new weights, or not at all so
                assert gap < ATOL if mode == "recompute" else gap > 1e-2

        host.run(main())

    def test_every_token_is_stamped_with_the_weights_that_made_it_however_late_it_is_read(self, host: Host):
        """Six updates, recomputed, under a caller whose event loop stands still again and again."""
        models = [build(seed=s) for s in range(7)]

        async def main():
            engine = await host.engine(models[0])
            out: list[Completion] = []
            updated = asyncio.Event()

            async def stall() -> None:
                while not updated.is_set():
                    time.sleep(0.02)
                    await asyncio.sleep(0.005)

            async def ask() -> None:
                while not updated.is_set():
                    out.extend(await collect(engine, PROMPT, LONG, range(4)))

            tasks = [asyncio.create_task(task()) for task in (ask, stall)]
            for version in range(1, 7):
                await tokens_more(engine, 4 * 5)
                await engine.update(version, state(models[version]), mode="recompute")
            updated.set()
            await asyncio.gather(*tasks)
            await host.release(engine)
            assert {int(v) for c in out for v in c.versions} >= set(range(6))
            assert any(c.versions[0] < c.versions[-1] for c in out)
            for c in out:
                assert (np.diff(c.versions) >= 0).all()
                by_model = np.stack([plain_token_logp(m, PROMPT, c.tokens.tolist()) for m in models])
                close(c.logps, by_model[c.versions, np.arange(400)])

        host.run(main())

    def test_wait_lets_running_samples_finish_and_holds_back_new_ones(self, host: Host):
        async def main():
            engine = await host.engine(build())
            running = asyncio.create_task(collect(engine, PROMPT, LONG, range(SLOTS)))
            await tokens_more(engine, 3 * SLOTS)
            update = asyncio.create_task(engine.update(1, state(build(seed=1)), mode="wait"))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(collect(engine, PROMPT, FREE, range(4)))
            assert {int(v) for c in await running for v in c.versions} == {0}
            await update
            assert {int(v) for c in await waiting for v in c.versions} == {1}
            await host.release(engine)

        host.run(main())

    def test_a_prompt_that_waits_for_slots_is_read_under_the_weights_of_its_first_token(self, host: Host):
        new, prompt = build(seed=1), [i % 23 for i in range(100)]

        async def main():
            engine = await host.engine(build())
            task = asyncio.create_task(collect(engine, prompt, LONG, range(SLOTS + 4)))
            await tokens_more(engine, 3 * SLOTS)
            await engine.update(1, state(new))
            late = (await task)[SLOTS:]
            await host.release(engine)
            for c in late:
                assert (c.versions == 1).all()
                close(c.logps, plain_token_logp(new, prompt, c.tokens.tolist()))

        host.run(main())

    def test_the_report_proves_the_weights_that_are_loaded(self, host: Host):
        old, new = build(seed=0), build(seed=1)

        async def main():
            engine = await host.engine(old, version=5)
            before = await engine.report()
            after = await engine.update(6, state(new))
            assert after.checksums == (await engine.report()).checksums
            await host.release(engine)
            return before, after

        for report, version, model in zip(host.run(main()), (5, 6), (old, new), strict=True):
            assert report.version == version
            assert report.checksums == checksums(model.state_dict())
            close(np.array(report.probe), plain_token_logp(model, PROBE[:1], PROBE[1:]))

    @with_engine
    async def test_o072_updates_with_the_same_weights_change_nothing(self, engine, model):
        weights, before = state(model), await engine.report()
        expected = await collect(engine, PROMPT, FREE, range(SLOTS))
        for version in range(1, 21):
            assert (await engine.update(version, weights)).checksums == before.checksums
        for a, b in zip(expected, await collect(engine, PROMPT, FREE, range(SLOTS)), strict=True):
            assert same_tokens(a, b) and (b.versions == 20).all()
            np.testing.assert_allclose(a.logps, b.logps, atol=1e-6)

    @with_engine
    async def test_o073_an_update_of_the_head_alone_is_followed_by_what_is_sampled_and_scored(
        self, engine, model
    ):
        await collect(engine, PROMPT, FREE, range(2))
        model.load_state_dict(
            {n: p if n.startswith("model.layers") else p * 1.5 for n, p in model.state_dict().items()}
        )
        await engine.update(1, state(model))
        for c in await collect(engine, PROMPT, FREE, range(4)):
            expected = plain_token_logp(model, PROMPT, c.tokens.tolist())
            close(c.logps, expected)
            [scores] = await engine.score([[*PROMPT, *c.tokens.tolist()]], [len(PROMPT)])
            close(scores.logps, expected)

    @with_engine
    async def test_one_corrupted_number_shows_in_the_checksum_of_its_tensor_alone(self, engine, model):
        good = state(build(seed=1))
        for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
            bad = {n: w.copy() for n, w in good.items()}
            bad[name].reshape(-1)[3] *= 1.0001
            report = await engine.update(1, bad)
            assert [n for n, total in checksums(good).items() if report.checksums[n] != total] == [name]

    @with_engine
    async def test_weights_are_copied_from_read_only_memory(self, engine, model):
        new = state(build(seed=1))
        for w in new.values():
            w.flags.writeable = False
        sent = await engine.update(1, new)
        for w in new.values():
            w.flags.writeable = True
            w[...] = 0
        assert (await engine.report()).checksums == sent.checksums

    @pytest.mark.parametrize(
        "change, names",
        [
            (lambda w: w.pop("model.norm.weight"), "missing model.norm.weight"),
            (lambda w: w.update(extra=np.zeros(1, np.float32)), "unexpected extra"),
            (lambda w: w.update({"model.norm.weight": np.zeros(3, np.float32)}), "model.norm.weight"),
            (lambda w: w.update({"model.norm.weight": np.zeros(64, np.int32)}), "model.norm.weight"),
        ],
    )
    def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(self, host, change, names):
        async def main():
            engine = await host.engine(build(), version=3)
            before, new = await engine.report(), state(build(seed=1))
            change(new)
            with pytest.raises(ValueError, match=names):
                await engine.update(4, new)
            after = await engine.report()
            assert (after.version, after.checksums) == (3, before.checksums)
            await host.release(engine)

        host.run(main())

    @with_engine
    async def test_concurrent_updates_are_applied_one_after_another(self, engine, model):
        task = asyncio.create_task(collect(engine, PROMPT, LONG, range(2)))
        await until(lambda: engine.stats().running == 2)
        models = [build(seed=s) for s in range(1, 5)]
        modes = ("keep", "wait", "recompute", "keep")
        reports = await asyncio.gather(
            *(
                engine.update(v, state(m), mode=mode)
                for v, (m, mode) in enumerate(zip(models, modes, strict=True), 1)
            )
        )
        for v, (report, m) in enumerate(zip(reports, models, strict=True), 1):
            assert (report.version, report.checksums) == (v, checksums(m.state_dict()))
        await task

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

    # ── Scoring ─────────────────────────────────────────────────────────────────────

    @with_engine
    async def test_scores_equal_a_plain_forward_pass(self, engine, model):
        rng = np.random.default_rng(1)
        sequences = [rng.integers(0, 23, n).tolist() for n in (2, 512, 9, 17, 5, 5)]
        starts = [1, 40, 9, 3, 1, 4]
        out = await engine.score(sequences, starts, top_k=4, full=True, temperature=0.7)
        top = await engine.score(sequences, starts, top_k=4)
        bare = await engine.score(sequences, starts)
        assert await engine.score([], []) == []
        for ids, start, a, b, c in zip(sequences, starts, out, top, bare, strict=True):
            logp = plain_logp(model, ids, 0.7)[start - 1 :]
            close(
                a.logps, logp.gather(-1, torch.tensor(ids[start:], dtype=torch.int64)[:, None])[:, 0].numpy()
            )
            close(a.full, logp.numpy())
            close(a.top_logps, logp.topk(4).values.numpy())
            np.testing.assert_array_equal(
                np.take_along_axis(a.full, a.top_ids.astype(np.int64), 1), a.top_logps
            )
            expected = plain_logp(model, ids)[start - 1 :]
            close(b.top_logps, expected.topk(4).values.numpy())
            close(np.take_along_axis(expected.numpy(), b.top_ids.astype(np.int64), 1), b.top_logps)
            close(b.logps, plain_token_logp(model, ids[:start], ids[start:]))
            close(c.logps, b.logps)
            assert b.full is None and c.top_ids is None and c.top_logps is None
            assert a.logps.shape == (len(ids) - start,) and a.full.shape == (len(ids) - start, 23)
            assert (a.logps.dtype, b.top_ids.dtype, b.top_logps.dtype) == (np.float32, np.int32, np.float32)

    @with_engine
    async def test_scores_of_sampled_tokens_are_their_log_probs(self, engine, model):
        out = await collect(engine, PROMPT, FREE, range(5))
        scores = await engine.score([[*PROMPT, *c.tokens.tolist()] for c in out], [len(PROMPT)] * 5)
        for c, s in zip(out, scores, strict=True):
            close(c.logps, s.logps)

    @with_engine
    async def test_the_log_probs_of_named_tokens_as_the_next_one(self, engine, model):
        expected = plain_logp(model, [*PROMPT, 0])[-1]
        for tokens in ([5], [7, 22, 0, 7], list(range(23))):
            found = await engine.likely(PROMPT, tokens)
            assert found.dtype == np.float32
            close(found, expected[tokens].float().numpy())
        for bad in ([], [23], [-1]):
            with pytest.raises(ValueError, match="likely"):
                await engine.likely(PROMPT, bad)

    @with_engine
    async def test_o075_scores_do_not_depend_on_what_was_read_before(self, engine, model):
        """A prompt of which the cache has some blocks is scored at those positions too."""
        ids = [i * 7 % 23 for i in range(100)]
        expected = plain_token_logp(model, ids[:1], ids[1:])
        for _ in range(2):
            [scores] = await engine.score([ids], [1], top_k=2)
            close(scores.logps, expected)
        await collect(engine, ids[:80], FREE, range(2))
        both = await engine.score([ids, [*ids[:70], 5, 6]], [1, 1])
        close(both[0].logps, expected)
        close(both[1].logps[:69], expected[:69])
        [last] = await engine.score([ids], [99])
        close(last.logps, expected[-1:])

    @pytest.mark.parametrize(
        "sequences, starts, how, names",
        [
            ([[1, 2]], [0], {}, "start from 1"),
            ([[1, 2]], [3], {}, "got 3"),
            ([[1, 2]], [1, 1], {}, "2 starts"),
            ([[]], [1], {}, "token ids"),
            ([[1] * 513], [1], {}, "got 513"),
            ([[1, 23]], [1], {}, r"\[0, 23\)"),
            ([[1, 2]], [1], {"temperature": 0.0}, "temperature"),
            ([[1, 2]], [1], {"top_k": 24}, "top_k"),
        ],
    )
    def test_scores_that_do_not_exist_are_refused(self, host: Host, sequences, starts, how, names):
        async def main():
            engine = await host.engine(build())
            with pytest.raises(ValueError, match=names):
                await engine.score(sequences, starts, **how)
            await host.release(engine)

        host.run(main())
