"""What every engine promises of new weights that come by value; see contract.py."""

import asyncio
import time

import numpy as np
import pytest

from models.checksum import checksums
from rl.engines.base import PauseMode
from rl.types import Completion
from tests.engines.asked import (
    ATOL,
    FREE,
    LONG,
    PROBE,
    PROMPT,
    SLOTS,
    Host,
    build,
    close,
    collect,
    plain_token_logp,
    same_tokens,
    state,
    tokens_more,
    until,
    with_engine,
)


class WeightContract:
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
