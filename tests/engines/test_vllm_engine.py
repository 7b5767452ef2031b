"""The engine contract on real vLLM, and what only vLLM can get wrong: families, judges, dead processes."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
import psutil

from models.attention import make_layout, packed_attention
from models.checksum import checksums
from models.weights import save_folder
from rl.engines.vllm import VllmEngine
from rl.engines.vllm_args import VllmOptions, cache_bytes
from rl.wire.parcel import choose
from tests.engines.asked import (
    CFG,
    FREE,
    LONG,
    PROBE,
    PROMPT,
    SLOTS,
    build,
    close,
    collect,
    plain_token_logp,
    state,
    until,
)
from tests.engines.contract import EngineContract
from tests.engines.contract_parcels import posted, proven, whole

pytestmark = pytest.mark.slow
SHARE = 0.2  # of a GPU: several engines live at the same time
PATIENCE = 600  # seconds; vLLM may start beside other work
CUDA = torch.cuda.is_available()
TWO_GPUS = pytest.mark.skipif(CUDA and torch.cuda.device_count() < 2, reason="needs two GPUs")


class VllmHost:
    """One engine for all tests, as its start takes long; each test gets it with the weights it wants."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.made: VllmEngine | None = None

    def run(self, main):
        return self.runner.run(asyncio.wait_for(main, PATIENCE))

    async def engine(self, model, version=0):
        if self.made is None:
            self.made = VllmEngine(
                CFG, state(build(seed=7)), max_slots=SLOTS, probe_ids=PROBE, options=VllmOptions(memory=SHARE)
            )
            await self.made.start()
        await self.made.update(version, state(model), mode="wait")
        return self.made

    async def release(self, engine):
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)

    def close(self):
        if self.made is not None:
            self.run(self.made.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def host():
    torch.set_num_threads(1)
    before, host = children(), VllmHost()
    yield host
    host.close()
    assert children() == before


@pytest.fixture
def none_left():
    """Afterwards no process of vLLM that the test began is alive."""
    before = children()
    yield
    assert children() == before


def children() -> set[int]:
    found = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return {p.pid for p in found if "resource_tracker" not in " ".join(p.cmdline())}


class TestVllm(EngineContract):
    pass


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_memory_of_the_same_gpu_is_read_where_it_lies(host):
    async def main():
        engine = await host.engine(build())
        place = await engine.place()
        post = posted(0, 0, "cuda:0")
        assert choose("auto", post.place(), place) == "ipc"
        parcel = post.mapped()
        for version, seed in ((1, 1), (2, 5)):
            post.pack(version, whole(seed))
            await proven(engine, version, seed, await engine.update(version, parcel))

    host.run(main())


async def started(cfg, model, **how) -> VllmEngine:
    options = replace(how.pop("options", VllmOptions()), memory=SHARE, compile=False)
    engine = VllmEngine(cfg, state(model), max_slots=4, options=options, **how)
    await engine.start()
    return engine


def run(main):
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


@pytest.mark.parametrize(
    "cfg",
    [
        replace(CFG, family="qwen2", qkv_bias=True, tie_embeddings=False, eos_ids=(2,)),
        replace(CFG, family="qwen3", qk_norm=True, n_kv_heads=2, eos_ids=(2, 3)),
    ],
)
def test_other_families_sample_score_and_take_new_weights(none_left, cfg):
    old, new = build(cfg, 0), build(cfg, 1)
    for model in (old, new):
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(generator=torch.Generator().manual_seed(5))

    async def main():
        engine = await started(cfg, old, version=3, probe_ids=PROBE)
        for version, model in ((3, old), (4, new)):
            if version > 3:
                await engine.update(version, state(model))
            report = await engine.report()
            assert (report.version, report.checksums) == (version, checksums(model.state_dict()))
            close(np.array(report.probe), plain_token_logp(model, PROBE[:1], PROBE[1:]))
            for c in await collect(engine, PROMPT, replace(FREE, max_tokens=60), range(12)):
                close(c.logps, plain_token_logp(model, PROMPT, c.tokens.tolist()))
                ends = np.isin(c.tokens, cfg.eos_ids)
                assert not ends[:-1].any() and c.finish == ("stop" if ends[-1] else "length")
        await engine.stop()
        with pytest.raises(RuntimeError, match="stopped"):
            await collect(engine, PROMPT, FREE, (0,))

    run(main())


@TWO_GPUS
def test_two_ranks_share_a_model_with_one_key_value_head():
    old, new = build(seed=0), build(seed=1)

    async def main():
        engine = await started(CFG, old, probe_ids=PROBE, options=VllmOptions(tensor_parallel=2))
        assert (await engine.report()).checksums == checksums(old.state_dict())
        report = await engine.update(1, state(new))
        assert report.checksums == checksums(new.state_dict())
        close(np.array(report.probe), plain_token_logp(new, PROBE[:1], PROBE[1:]))
        for c in await collect(engine, PROMPT, FREE, range(4)):
            close(c.logps, plain_token_logp(new, PROMPT, c.tokens.tolist()))
        await engine.stop()

    run(main())


def test_samples_that_lose_their_cache_to_others_go_on_where_they_were():
    model = build()
    room = cache_bytes(CFG, slots=1, max_len=513)  # for two whole sequences; four ask

    async def main():
        engine = await started(CFG, model, options=VllmOptions(cache_bytes=room))
        assert [len(c.tokens) for c in await collect(engine, PROMPT, LONG, range(4))] == [400] * 4
        assert engine.stats().slots == 2 and engine.stats().preemptions == 0
        engine._turns.room = replace(engine._turns.room, tried=4)
        task, most = asyncio.create_task(collect(engine, PROMPT, LONG, range(4))), 0.0
        while not task.done():
            most = max(most, engine.stats().kv_use)
            await asyncio.sleep(0.001)
        for c in await task:
            close(c.logps, plain_token_logp(model, PROMPT, c.tokens.tolist()))
        assert engine.stats().preemptions > 0 and 0.8 < most <= 1
        assert engine.stats().slots < 4
        await engine.stop()

    run(main())


@pytest.mark.parametrize(
    "cfg, options, error, says",
    [
        pytest.param(
            replace(CFG, head_dim=8), VllmOptions(), ValueError, "heads of 8",
            marks=pytest.mark.skipif(CUDA, reason="refused on a CPU alone"),
        ),
        (CFG, VllmOptions(cache_bytes=1 << 15), RuntimeError, "initialization failed"),
    ],
)  # fmt: skip
def test_what_vllm_cannot_serve_fails_at_start_and_leaves_no_process(none_left, cfg, options, error, says):
    async def main():
        engine = VllmEngine(
            cfg, state(build(cfg)), max_slots=4, options=replace(options, memory=SHARE, compile=False)
        )
        with pytest.raises(error, match=says):
            await engine.start()
        with pytest.raises(RuntimeError, match="not started"):
            await engine.report()
        await engine.stop()

    run(main())


def test_a_start_that_is_given_up_leaves_no_process(none_left):
    async def main():
        engine = VllmEngine(
            CFG, state(build()), max_slots=4, options=VllmOptions(memory=SHARE, compile=False)
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.start(), 2)

    run(main())


def test_a_folder_is_served_as_it_is_in_its_own_dtype(tmp_path):
    cfg = replace(CFG, dtype="bfloat16")
    model = build(cfg)
    save_folder(tmp_path, model, cfg)

    async def main():
        engine = VllmEngine(
            cfg, tmp_path, max_slots=4, probe_ids=PROBE, options=VllmOptions(memory=SHARE, compile=False)
        )
        await engine.start()
        report = await engine.report()
        assert report.checksums == checksums(model.state_dict())
        np.testing.assert_allclose(report.probe, plain_token_logp(model, PROBE[:1], PROBE[1:]), atol=0.05)
        task = asyncio.create_task(collect(engine, PROMPT, LONG, range(4)))
        await until(lambda: engine.stats().running == 4)
        await engine.stop()
        assert [c.finish for c in await task] == ["abort"] * 4

    run(main())


def test_a_scalar_judge_gives_the_score_head_s_number():
    cfg = replace(CFG, family="qwen3", qk_norm=True, head="score")
    old, new = build(cfg, 0), build(cfg, 1)
    rows = [[1, 2, 3], [5], list(range(20)) * 25 + [1] * 12]

    async def main():
        engine = await started(cfg, old)
        for version, model in ((0, old), (1, new)):
            if version:
                await engine.update(version, state(model), mode="recompute")
            assert (await engine.report()).checksums == checksums(model.state_dict())
            for ids, found in zip(rows, await engine.classify(rows), strict=True):
                assert abs(found - plain_score(model, ids)) < 1e-4
        for call in (engine.score([PROMPT], [1]), collect(engine, PROMPT, FREE, (0,))):
            with pytest.raises(ValueError, match="head"):
                await call
        await engine.stop()

    run(main())


def plain_score(model, ids) -> float:
    layout = make_layout([len(ids)])
    hidden = model(torch.tensor(ids), layout.positions, lambda _, q, k, v: packed_attention(q, k, v, layout))
    return float(model.score(hidden)[-1])


@pytest.mark.parametrize(
    "victim, ranks",
    # one rank on a GPU has no process of its own
    [("EngineCore", 1), pytest.param("Worker", 2 if CUDA else 1, marks=TWO_GPUS)],
)
def test_a_dead_process_fails_every_caller_and_leaves_none_behind(none_left, victim, ranks):
    async def main():
        before, options = children(), VllmOptions(tensor_parallel=ranks)
        engine = await started(CFG, build(), probe_ids=PROBE, options=options)
        callers = [asyncio.create_task(collect(engine, PROMPT, LONG, range(4))) for _ in range(3)]
        await until(lambda: engine.stats().running == 4)
        await engine.pause()
        callers.append(asyncio.create_task(engine.score([PROMPT], [1])))
        callers.append(asyncio.create_task(engine.report()))
        await asyncio.sleep(0.2)
        mine = [psutil.Process(pid) for pid in children() - before]
        victims = [p.pid for p in mine if victim in " ".join(p.cmdline())]
        assert len(victims) == ranks
        os.kill(victims[0], signal.SIGKILL)
        for caller in callers:
            with pytest.raises(RuntimeError, match="died"):
                await asyncio.wait_for(caller, 60)
        for call in (engine.report(), engine.pause(), engine.resume(), engine.abort(), engine.score([], [])):
            with pytest.raises(RuntimeError, match="died"):
                await call
        await engine.stop()

    run(main())


OWNER = """
import asyncio, psutil
from tests.engines.asked import CFG, build, state
from rl.engines.vllm import VllmEngine
from rl.engines.vllm_args import VllmOptions

async def main():
    engine = VllmEngine(CFG, state(build()), max_slots=4, options=VllmOptions(memory=0.2, compile=False))
    await engine.start()
    print("pids", *(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_vllm_s_processes_end_with_an_owner_that_is_killed(tmp_path):
    (tmp_path / "owner.py").write_text(OWNER)
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, tmp_path / "owner.py"],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    line = next(line for line in owner.stdout if line.startswith("pids"))
    processes = [psutil.Process(int(pid)) for pid in line.split()[1:]]
    assert len(processes) >= 2
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
