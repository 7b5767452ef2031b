"""What every engine promises, asked through the interface alone; engines join in ENGINES."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.attention import make_layout, packed_attention
from models.config import ModelConfig
from models.transformer import Transformer
from models.weights import checksums
from rl.engines.base import Engine
from rl.engines.torch import TorchEngine
from rl.types import SamplingParams

CFG = ModelConfig(
    vocab_size=23, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_len=64)
ENGINES = {"torch": TorchEngine}


@pytest.fixture(params=ENGINES)
def make(request):
    """(cfg, state, version=, max_slots=, probe_ids=) -> engine, not yet started."""
    return ENGINES[request.param]


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


def plain_token_logp(model, prompt, tokens, temperature=1.0):
    logp = plain_logp(model, [*prompt, *tokens], temperature)[len(prompt) - 1:]
    return logp.gather(-1, torch.tensor(tokens)[:, None].long())[:, 0].float()


def run(coroutine):
    torch.set_num_threads(1)
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def collect(engine: Engine, prompt, params, seeds, request_id="r"):
    found = {}
    async for index, completion in engine.generate(prompt, params=params, seeds=seeds, request_id=request_id):
        assert index not in found
        found[index] = completion
    return [found[i] for i in sorted(found)]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def same(a, b) -> bool:
    bits = [(c.tokens.tobytes(), c.logps.tobytes(), c.finish) for c in (a, b)]
    return bits[0] == bits[1]


FREE = SamplingParams(max_tokens=20)
PROMPT = (3, 1, 4, 1, 5)


# ── Sampling ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cfg", [
    CFG,
    replace(CFG, n_kv_heads=4, tie_embeddings=False),
    replace(CFG, family="qwen2", qkv_bias=True),
    replace(CFG, family="qwen3", qk_norm=True, n_kv_heads=1),
])
def test_log_probs_equal_a_plain_forward_pass(make, cfg):
    model = build(cfg)

    async def main():
        engine = make(cfg, state(model))
        await engine.start()
        out = await collect(engine, PROMPT, replace(FREE, temperature=0.8, max_tokens=40), range(6))
        await engine.stop()
        return out

    for c in run(main()):
        assert len(c.tokens) == len(c.logps) == len(c.versions) == 40 and c.finish == "length"
        expected = plain_token_logp(model, PROMPT, c.tokens.tolist(), 0.8)
        torch.testing.assert_close(torch.from_numpy(c.logps), expected, atol=1e-5, rtol=0)


def test_with_top_k_the_log_probs_are_those_of_the_kept_tokens(make):
    model = build()

    async def main():
        engine = make(CFG, state(model))
        await engine.start()
        return await collect(engine, PROMPT, replace(FREE, top_k=3), range(8))

    for c in run(main()):
        logp = plain_logp(model, [*PROMPT, *c.tokens.tolist()])[len(PROMPT) - 1:]
        top, ids = logp.topk(3)
        chosen = ids == torch.from_numpy(c.tokens)[:, None]
        assert chosen.any(-1).all()
        expected = top.log_softmax(-1)[chosen].float()
        torch.testing.assert_close(torch.from_numpy(c.logps), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cfg", [
    CFG,
    replace(CFG, vocab_size=31, d_model=64, n_kv_heads=4, n_heads=4, head_dim=16, d_ff=192),
    replace(CFG, d_model=24, n_heads=3, n_kv_heads=1, d_ff=40),
])
def test_a_sample_is_the_same_bits_whoever_shares_its_batch(make, cfg):
    """Alone, among 50 others of other lengths and parameters, in other slots, late, and in a queue."""
    model = build(cfg)
    rng = np.random.default_rng(0)
    others = [(rng.integers(0, 23, rng.integers(1, 30)).tolist(),
               SamplingParams(max_tokens=int(rng.integers(1, 30)), temperature=float(rng.uniform(0, 1.5)),
                              top_p=float(rng.choice([1, 0.7])), top_k=int(rng.choice([0, 5]))),
               range(i, i + int(rng.integers(1, 4)))) for i in range(50)]
    mine = [(PROMPT, replace(FREE, max_tokens=40), (11, 12)), ((7,), replace(FREE, top_p=0.8), (5,)),
            (tuple(range(20)), replace(FREE, temperature=0.3), (9,))]

    async def alone():
        out = []
        for request in mine:
            engine = make(cfg, state(model))
            await engine.start()
            out += await collect(engine, *request)
            await engine.stop()
        return out

    async def together(before: int, slots: int, pause: float):
        engine = make(cfg, state(model), max_slots=slots)
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


def test_the_seed_decides_the_tokens(make):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        a, b, c = await collect(engine, PROMPT, FREE, (1, 1, 2))
        [again] = await collect(engine, PROMPT, FREE, (1,))
        [wrapped] = await collect(engine, PROMPT, FREE, (1 + 2**64,))
        await engine.stop()
        assert same(a, b) and same(a, again) and same(a, wrapped)
        assert not np.array_equal(a.tokens, c.tokens)

    run(main())


def test_greedy_follows_the_argmax(make):
    model = build()

    async def main():
        engine = make(CFG, state(model))
        await engine.start()
        return await collect(engine, PROMPT, replace(FREE, temperature=0.0), (0, 1))

    a, b = run(main())
    assert same(a, b) and (a.logps == 0).all()
    best = plain_logp(model, [*PROMPT, *a.tokens.tolist()])[len(PROMPT) - 1:].argmax(-1)
    assert best.tolist() == a.tokens.tolist()


def test_a_stop_token_is_kept_with_its_log_prob_and_a_cut_answer_gets_none(make):
    model = build(replace(CFG, eos_ids=(2,)))

    async def main():
        engine = make(model.cfg, state(model))
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
        torch.testing.assert_close(torch.from_numpy(c.logps), expected, atol=1e-5, rtol=0)
    assert {int(c.tokens[-1]) for c in out if c.finish == "stop"} == {2, 9, 10}


@pytest.mark.parametrize("slots", [256, 3])
def test_the_samples_of_a_prompt_share_its_prefill(make, slots):
    async def main():
        engine = make(CFG, state(build()), max_slots=slots)
        await engine.start()
        out = await collect(engine, PROMPT, FREE, range(8))
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.sampled_tokens) == (len(PROMPT), 8 * 20)
        assert (stats.running, stats.waiting) == (0, 0)
        assert 0 < stats.busy_s < stats.wall_s
        await engine.stop()
        return out

    assert len(run(main())) == 8


def test_requests_beyond_the_slots_start_in_the_order_of_their_arrival(make):
    async def main():
        engine = make(CFG, state(build()), max_slots=1)
        await engine.start()
        order = []

        async def one(i):
            await collect(engine, PROMPT, replace(FREE, max_tokens=3), (i,), str(i))
            order.append(i)

        await asyncio.gather(*(one(i) for i in range(6)))
        assert order == list(range(6))
        await engine.stop()

    run(main())


# ── Weights ─────────────────────────────────────────────────────────────────────


async def update_in_flight(make, mode, params, after=6):
    """Eight samples; the weights change once each has about `after` tokens."""
    old, new = build(seed=0), build(seed=1)
    engine = make(CFG, state(old), probe_ids=(1, 2, 3))
    await engine.start()
    task = asyncio.create_task(collect(engine, PROMPT, params, range(8)))
    await until(lambda: engine.stats().sampled_tokens >= 8 * after)
    report = await engine.update(1, state(new), mode=mode)
    assert report.version == 1
    later = await collect(engine, PROMPT, params, (99,))
    assert (later[0].versions == 1).all()
    return await task, engine, old, new


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_tokens_after_an_update_in_flight_carry_the_new_version(make, mode):
    async def main():
        out, engine, old, _ = await update_in_flight(make, mode, replace(FREE, max_tokens=50))
        await engine.stop()
        for c in out:
            n = int((c.versions == 0).sum())
            assert 6 <= n < 50 and c.versions.tolist() == [0] * n + [1] * (50 - n)
            expected = plain_token_logp(old, PROMPT, c.tokens[:n].tolist())
            torch.testing.assert_close(torch.from_numpy(c.logps[:n]), expected, atol=1e-5, rtol=0)

    run(main())


def test_wait_lets_running_samples_finish_and_holds_back_new_ones(make):
    async def main():
        old, new = build(seed=0), build(seed=1)
        engine = make(CFG, state(old), max_slots=4)
        await engine.start()
        running = asyncio.create_task(collect(engine, PROMPT, replace(FREE, max_tokens=50), range(4)))
        await until(lambda: engine.stats().sampled_tokens >= 12)
        update = asyncio.create_task(engine.update(1, state(new), mode="wait"))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(collect(engine, PROMPT, FREE, range(4)))
        assert {int(v) for c in await running for v in c.versions} == {0}
        await update
        assert {int(v) for c in await waiting for v in c.versions} == {1}
        await engine.stop()

    run(main())


def test_recompute_continues_as_if_all_had_been_read_under_the_new_weights_and_keep_does_not(make):
    async def gap(mode):
        out, engine, _, new = await update_in_flight(make, mode, replace(FREE, max_tokens=50))
        await engine.stop()
        gaps = []
        for c in out:
            after = torch.from_numpy(c.versions == 1)
            expected = plain_token_logp(new, PROMPT, c.tokens.tolist())
            gaps.append((torch.from_numpy(c.logps) - expected)[after].abs().max().item())
        return gaps

    assert max(run(gap("recompute"))) < 1e-5
    assert min(run(gap("keep"))) > 1e-3


def test_recompute_equals_a_fresh_engine_given_prompt_and_partial_answer(make):
    greedy = replace(FREE, temperature=0.0, max_tokens=50)

    async def main():
        out, engine, _, new = await update_in_flight(make, "recompute", greedy)
        await engine.stop()
        fresh = make(CFG, state(new))
        await fresh.start()
        n = int((out[0].versions == 0).sum())
        partial = [*PROMPT, *out[0].tokens[:n].tolist()]
        [rest] = await collect(fresh, partial, replace(greedy, max_tokens=50 - n), (0,))
        await fresh.stop()
        assert rest.tokens.tolist() == out[0].tokens[n:].tolist()

    run(main())


def test_a_prompt_that_waits_for_slots_is_read_again_after_an_update(make):
    old, new = build(seed=0), build(seed=1)

    async def main():
        engine = make(CFG, state(old), max_slots=2)
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
            torch.testing.assert_close(torch.from_numpy(c.logps), expected, atol=1e-5, rtol=0)

    run(main())


def test_the_report_proves_the_weights_that_are_loaded(make):
    old, new = build(seed=0), build(seed=1)
    probe = (1, 2, 3, 4)

    async def main():
        engine = make(CFG, state(old), version=5, probe_ids=probe)
        await engine.start()
        before = await engine.report()
        after = await engine.update(6, state(new))
        assert after == await engine.report()
        await engine.stop()
        return before, after

    for report, version, model in zip(run(main()), (5, 6), (old, new), strict=True):
        assert report.version == version
        assert report.checksums == checksums(model.state_dict())
        expected = plain_token_logp(model, probe[:1], list(probe[1:]))
        torch.testing.assert_close(torch.tensor(report.probe), expected, atol=1e-5, rtol=0)


def test_one_corrupted_number_shows_in_the_checksum_of_its_tensor_alone(make):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        good = state(build(seed=1))
        bad = {name: w.copy() for name, w in good.items()}
        bad["model.norm.weight"][3] *= 1.0001
        report = await engine.update(1, bad)
        await engine.stop()
        changed = [name for name, sum in checksums(good).items() if report.checksums[name] != sum]
        assert changed == ["model.norm.weight"]

    run(main())


def test_weights_are_copied_from_read_only_memory(make):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        new = state(build(seed=1))
        for w in new.values():
            w.flags.writeable = False
        sent = await engine.update(1, new)
        for w in new.values():
            w.flags.writeable = True
            w[...] = 0
        assert await engine.report() == sent
        await engine.stop()

    run(main())


@pytest.mark.parametrize("change, names", [
    (lambda w: w.pop("model.norm.weight"), "missing model.norm.weight"),
    (lambda w: w.update(extra=np.zeros(1, np.float32)), "unexpected extra"),
    (lambda w: w.update({"model.norm.weight": np.zeros(3, np.float32)}), "model.norm.weight"),
    (lambda w: w.update({"model.norm.weight": np.zeros(32, np.int32)}), "model.norm.weight"),
])
def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(make, change, names):
    async def main():
        engine = make(CFG, state(build()), version=3)
        await engine.start()
        before = await engine.report()
        new = state(build(seed=1))
        change(new)
        with pytest.raises(ValueError, match=names):
            await engine.update(4, new)
        assert await engine.report() == before
        await engine.stop()

    run(main())


def test_concurrent_updates_are_applied_one_after_another(make):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        task = asyncio.create_task(collect(engine, PROMPT, replace(FREE, max_tokens=50), range(2)))
        await until(lambda: engine.stats().running == 2)
        models = [build(seed=s) for s in range(1, 5)]
        modes = ("keep", "wait", "recompute", "keep")
        reports = await asyncio.gather(*(
            engine.update(v, state(model), mode=mode)
            for v, model, mode in zip(range(1, 5), models, modes, strict=True)))
        for v, (report, model) in enumerate(zip(reports, models, strict=True)):
            assert (report.version, report.checksums) == (v + 1, checksums(model.state_dict()))
        await task
        await engine.stop()

    run(main())


# ── Pause, abort, failure ───────────────────────────────────────────────────────


def test_pause_stops_progress_and_resume_goes_on_to_the_same_tokens(make):
    params = replace(FREE, max_tokens=50)

    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        expected = await collect(engine, PROMPT, params, range(3))
        for mode in ("keep", "recompute"):
            task = asyncio.create_task(collect(engine, PROMPT, params, range(3)))
            begun = engine.stats().sampled_tokens
            await until(lambda begun=begun: engine.stats().sampled_tokens > begun + 9)
            await engine.pause(mode)
            frozen = engine.stats().sampled_tokens
            await asyncio.sleep(0.05)
            assert engine.stats().sampled_tokens == frozen and engine.stats().running == 3
            await engine.resume()
            for a, b in zip(expected, await task, strict=True):
                assert np.array_equal(a.tokens, b.tokens)
                np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)
        await engine.stop()

    run(main())


def test_pause_wait_drains_and_holds_what_comes_later(make):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        task = asyncio.create_task(collect(engine, PROMPT, replace(FREE, max_tokens=50), range(3)))
        await until(lambda: engine.stats().running == 3)
        await engine.pause("wait")
        assert engine.stats().running == 0 and len(await task) == 3
        late = asyncio.create_task(collect(engine, PROMPT, FREE, range(2)))
        await asyncio.sleep(0.05)
        assert (engine.stats().running, engine.stats().waiting) == (0, 2)
        await engine.resume()
        assert len(await late) == 2
        await engine.stop()

    run(main())


def test_abort_yields_what_was_sampled_so_far_and_leaves_others_alone(make):
    params = replace(FREE, max_tokens=50)

    async def main():
        engine = make(CFG, state(build()), max_slots=3)
        await engine.start()
        [whole] = await collect(engine, PROMPT, params, (0,))
        cut = asyncio.create_task(collect(engine, PROMPT, params, range(4), "cut"))  # one of them has no slot
        rest = asyncio.create_task(collect(engine, PROMPT, params, (0,), "rest"))
        begun = engine.stats().sampled_tokens
        await until(lambda: engine.stats().sampled_tokens > begun + 9)
        assert await engine.abort("cut") == 4
        out = await cut
        assert [c.finish for c in out] == ["abort"] * 4
        n = len(out[0].tokens)
        assert 3 <= n < 50 and len(out[3].tokens) == len(out[3].logps) == 0
        assert np.array_equal(out[0].tokens, whole.tokens[:n])
        assert np.array_equal(out[0].logps, whole.logps[:n])
        assert same((await rest)[0], whole)
        assert await engine.abort() == 0
        await engine.stop()

    run(main())


def test_abort_ends_a_paused_request(make):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        await engine.pause()
        task = asyncio.create_task(collect(engine, PROMPT, FREE, range(2)))
        await asyncio.sleep(0)
        assert await engine.abort() == 2
        assert [c.finish for c in await task] == ["abort", "abort"]
        await engine.stop()

    run(main())


def test_a_caller_that_goes_away_gives_its_slots_back(make):
    async def main():
        engine = make(CFG, state(build()), max_slots=2)
        await engine.start()
        task = asyncio.create_task(collect(engine, PROMPT, replace(FREE, max_tokens=50), range(4)))
        await until(lambda: engine.stats().running == 2)
        await engine.pause()
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)
        await engine.resume()
        assert len(await collect(engine, PROMPT, FREE, range(2))) == 2
        await engine.stop()

    run(main())


def test_stop_ends_every_caller_and_refuses_later_calls(make):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        task = asyncio.create_task(collect(engine, PROMPT, replace(FREE, max_tokens=50), range(2)))
        await until(lambda: engine.stats().running == 2)
        await engine.stop()
        assert [c.finish for c in await task] == ["abort", "abort"]
        with pytest.raises(RuntimeError, match="stopped"):
            await collect(engine, PROMPT, FREE, (0,))
        await engine.stop()

    run(main())


def test_a_call_before_start_is_refused(make):
    with pytest.raises(RuntimeError, match="not started"):
        run(make(CFG, state(build())).report())


@pytest.mark.parametrize("prompt, change, names", [
    ((1,) * 45, {}, "45 prompt tokens"),
    ((), {}, "token ids"),
    ((1, 23), {}, r"\[0, 23\)"),
    ((1,), {"max_tokens": 0}, "max_tokens=0"),
    ((1,), {"temperature": -1.0}, "temperature"),
    ((1,), {"top_p": 0.0}, "top_p"),
])
def test_requests_that_cannot_be_served_are_refused(make, prompt, change, names):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        with pytest.raises(ValueError, match=names):
            await collect(engine, prompt, replace(FREE, **change), (0,))
        assert len(await collect(engine, (1,) * 44, FREE, (0,))) == 1
        await engine.stop()

    run(main())


def test_an_unknown_mode_is_refused(make):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        for call in (engine.pause("drain"), engine.update(1, state(build()), mode="drain")):
            with pytest.raises(ValueError, match="drain"):
                await call
        await engine.stop()

    run(main())


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
        for call in (collect(engine, PROMPT, FREE, (0,)), engine.score([PROMPT], [1]), engine.report(),
                     engine.abort(), engine.pause(), engine.resume()):
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


def test_scores_equal_a_plain_forward_pass(make):
    model = build()
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 23, n).tolist() for n in (2, 64, 9, 17, 5, 5)]
    starts = [1, 40, 9, 3, 1, 4]

    async def main():
        engine = make(CFG, state(model))
        await engine.start()
        out = await engine.score(sequences, starts, top_k=4, full=True, temperature=0.7)
        bare = await engine.score(sequences, starts)
        alone = [(await engine.score([s], [b], top_k=4, full=True, temperature=0.7))[0]
                 for s, b in zip(sequences, starts, strict=True)]
        assert await engine.score([], []) == []
        await engine.stop()
        return out, bare, alone

    out, bare, alone = run(main())
    for ids, start, a, b, c in zip(sequences, starts, out, bare, alone, strict=True):
        logp = plain_logp(model, ids, 0.7)[start - 1:]
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


def test_scores_of_sampled_tokens_are_their_log_probs(make):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        out = await collect(engine, PROMPT, FREE, range(5))
        scores = await engine.score([[*PROMPT, *c.tokens.tolist()] for c in out], [len(PROMPT)] * 5)
        await engine.stop()
        for c, s in zip(out, scores, strict=True):
            np.testing.assert_allclose(c.logps, s.logps, atol=1e-5)

    run(main())


@pytest.mark.parametrize("sequences, starts, how, names", [
    ([[1, 2]], [0], {}, "start from 1"), ([[1, 2]], [3], {}, "got 3"), ([[1, 2]], [1, 1], {}, "2 starts"),
    ([[]], [1], {}, "token ids"), ([[1] * 65], [1], {}, "got 65"), ([[1, 23]], [1], {}, r"\[0, 23\)"),
    ([[1, 2]], [1], {"temperature": 0.0}, "temperature"), ([[1, 2]], [1], {"top_k": 24}, "top_k"),
])
def test_scores_that_do_not_exist_are_refused(make, sequences, starts, how, names):
    async def main():
        engine = make(CFG, state(build()))
        await engine.start()
        with pytest.raises(ValueError, match=names):
            await engine.score(sequences, starts, **how)
        await engine.stop()

    run(main())
