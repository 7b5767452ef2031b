"""Checkpoints are written while training goes on, and hold one moment all the same."""

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from models.weights import load_folder
from rl import checkpoint
from rl.actors.trainer import TrainerRank
from rl.config import Checkpoint
from rl.ledger import Event, fold
from rl.roles import RoleError
from tests.rl.fakes import FakeTrainer, finish, make_loop, small
from tests.rl.test_synchronous import asynchronous, config, tiny_bundle

PROMPTS = 3


def saving(every=4, keep=9, **how):
    return replace(small(prompts=PROMPTS, **how), checkpoint=Checkpoint(every=every, keep=keep))


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_of_one_moment(folder, run_folder):
    """Weights, ledger and events of a checkpoint are of the same version."""
    version, ledger, extra = checkpoint.read(folder)
    assert folder.name == f"step_{version:06d}"
    assert (folder / "weights").read_text() == str(version)
    assert ledger.trained == version * PROMPTS
    lines = (run_folder / "ledger.jsonl").read_text().splitlines()[: extra["events"]]
    assert fold(Event(**json.loads(line)) for line in lines) == ledger


@dataclass
class Watched(FakeTrainer):
    """Remembers the version that training had come to when each checkpoint was written, and how many were
    under way."""

    reached: list[tuple[int, int]] = field(default_factory=list)  # (staged, trained meanwhile)
    under_way: int = 0

    async def write(self, path):
        assert self.under_way == 0, "two checkpoints at a time"
        self.under_way += 1
        await super().write(path)

    async def write_policy(self, path):
        self.under_way -= 1
        self.reached.append((self.staged, self.version))


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_what_was_before(tmp_path):
    trainer = Watched(2, delay=0.01, writing=0.15)
    finish(make_loop(tmp_path, saving(steps=12), trainer=trainer))
    assert [staged for staged, _ in trainer.reached] == [4, 8, 12]
    assert all(version > staged for staged, version in trainer.reached[:-1])
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert len(folders) == 3, "also the last step's, before the run ends"
    for folder in folders:
        assert_of_one_moment(folder, tmp_path)
    lines = metrics(tmp_path)
    assert "checkpoint/stage_ms" not in lines[3]
    assert lines[4].keys() >= {"checkpoint/stage_ms", "checkpoint/wait_ms"}
    assert max(line.get("checkpoint/write_ms", 0.0) for line in lines) > 150


def test_one_is_under_way_at_a_time_and_the_next_waits_for_it(tmp_path):
    trainer = Watched(2, writing=0.1)
    finish(make_loop(tmp_path, saving(steps=5, every=1), trainer=trainer))
    assert [staged for staged, _ in trainer.reached] == [1, 2, 3, 4, 5]
    for folder in (tmp_path / "checkpoints").iterdir():
        assert_of_one_moment(folder, tmp_path)
    assert max(line["checkpoint/wait_ms"] for line in metrics(tmp_path)[2:]) > 10


def test_a_run_that_is_stopped_ends_with_a_whole_checkpoint_of_its_last_step(tmp_path):
    class Stopping(Watched):
        async def write(self, path):
            loop.stop = True
            await super().write(path)

    loop = make_loop(tmp_path, saving(steps=50), trainer=Stopping(2, delay=0.01, writing=0.1))
    result = finish(loop)
    assert 4 < result["version"] < 50
    newest = checkpoint.newest(tmp_path, pytest.fail)
    assert newest is not None and newest.name == f"step_{result['version']:06d}"
    assert_of_one_moment(newest, tmp_path)


def test_what_is_cut_off_while_it_is_written_is_passed_over_for_the_one_before(tmp_path):
    class Slow(Watched):
        async def write(self, path):
            await super().write(path)
            if self.staged == 8:
                half_written.set()
                await asyncio.sleep(60)

    async def cut_off():
        run = asyncio.create_task(loop.run())
        await half_written.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    half_written = asyncio.Event()
    loop = make_loop(tmp_path, saving(steps=12), trainer=Slow(2, delay=0.01))
    asyncio.run(cut_off())
    said = []
    newest = checkpoint.newest(tmp_path, said.append)
    assert newest is not None and newest.name == "step_000004"
    assert said == ["passing over checkpoint step_000008.tmp: it was never finished"]
    assert_of_one_moment(newest, tmp_path)


def test_a_checkpoint_under_way_is_finished_though_the_run_fails_meanwhile(tmp_path):
    class Fails(Watched):
        async def step(self, *args):
            if self.version == 5:
                raise RuntimeError("no memory")
            return await super().step(*args)

    trainer = Fails(2, writing=0.3)
    with pytest.raises(RoleError, match="no memory"):
        finish(make_loop(tmp_path, saving(steps=12), trainer=trainer))
    assert trainer.reached == [(4, 5)]
    newest = checkpoint.newest(tmp_path, print)
    assert newest is not None and newest.name == "step_000004"
    assert_of_one_moment(newest, tmp_path)


def test_a_write_that_fails_ends_the_run_by_name(tmp_path):
    class Full(FakeTrainer):
        async def write(self, path):
            raise RuntimeError("no space left on device")

    with pytest.raises(RoleError, match="trainer-0.write failed: no space left on device"):
        finish(make_loop(tmp_path, saving(steps=50), trainer=Full(2, delay=0.01)))
    assert len(metrics(tmp_path)) < 50


def test_a_folder_that_a_rank_does_not_share_ends_the_run_by_name(tmp_path):
    class Elsewhere(FakeTrainer):
        async def write(self, path): ...

    with pytest.raises(RoleError, match="^trainer-0 cannot write .* a folder that all nodes share"):
        finish(make_loop(tmp_path, saving(steps=50), trainer=Elsewhere(2)))


def test_a_folder_that_the_controller_cannot_write_ends_the_run_by_name(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(RoleError, match="the checkpoint of step 4 cannot be written: .*checkpoints"):
        finish(make_loop(tmp_path, saving(steps=50)))


def test_hashing_holds_nobody_up(tmp_path, monkeypatch):
    steps = []  # during each file's hash

    def slowly(path):
        before = trainer.version
        time.sleep(0.2)
        steps.append(trainer.version - before)
        return [0, ""]

    trainer = FakeTrainer(2, delay=0.01)
    monkeypatch.setattr(checkpoint, "_fingerprint", slowly)
    finish(make_loop(tmp_path, saving(steps=60, every=10), trainer=trainer))
    assert max(steps) > 0


class Aside(TrainerRank):
    """Writes in a thread, as the actor does, and takes its time; remembers what it staged."""

    staged_weights: list[dict[str, torch.Tensor]] = []

    def whole(self):
        model = self.state.model.state_dict()
        return {name: p.full_tensor().clone() for name, p in model.items()}

    def stage(self):
        super().stage()
        Aside.staged_weights.append(self.whole())

    async def write(self, path):  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0.05)
        write: Any = super().write
        await asyncio.to_thread(write, path)


def test_a_checkpoint_has_weights_and_policy_of_its_version_and_changes_nothing_of_the_run(tmp_path):
    cfg, bundle = config(), tiny_bundle()
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    Aside.staged_weights = []
    every = replace(cfg, checkpoint=Checkpoint(every=1, keep=99))
    weights, _ = asynchronous(every, bundle, tmp_path / "with", rank=Aside)
    untouched, _ = asynchronous(cfg, bundle, tmp_path / "without")
    folders = sorted((tmp_path / "with" / "checkpoints").iterdir())
    assert len(folders) == len(Aside.staged_weights) == cfg.trainer.steps
    for folder, staged in zip(folders, Aside.staged_weights, strict=True):
        _, policy = load_folder(folder / "policy")
        assert policy.keys() == staged.keys()
        for name, value in staged.items():
            assert policy[name].dtype == torch.float32 and torch.equal(policy[name], value), name
    for name, value in untouched.items():
        assert torch.equal(weights[name], value) and torch.equal(Aside.staged_weights[-1][name], value), name


def test_a_rank_that_loads_a_checkpoint_has_its_weights_and_keeps_its_attention(tmp_path):
    cfg, bundle = config(), tiny_bundle()
    (tmp_path / "run").mkdir()
    every = replace(cfg, checkpoint=Checkpoint(every=cfg.trainer.steps, keep=9))
    weights, _ = asynchronous(every, bundle, tmp_path / "run", rank=Aside)
    rank = TrainerRank(bundle, cfg, rank=0)
    rank.start(*rank.rendezvous())
    try:
        attention = rank.state.attention
        newest = checkpoint.newest(tmp_path / "run", pytest.fail)
        rank.load(str(newest), cfg.trainer.steps)
        assert rank.state.version == cfg.trainer.steps and rank.state.attention == attention is not None
        for name, p in rank.state.model.state_dict().items():
            assert torch.equal(p.full_tensor(), weights[name]), name
    finally:
        rank.stop()
