"""kill -9 at any moment, then --resume: the run goes on from its checkpoint and every prompt is trained
exactly once."""

import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest
import torch

from models.transformer import Transformer
from models.weights import load_folder, save_folder
from rl.ledger import Event, Ledger, apply
from tests.runs.command import command, read_lines, run, wait_for_step, write_copy_task

pytestmark = pytest.mark.slow
STEPS, EVERY, PROMPTS = 60, 10, 4


def trained_ordinals(folder) -> list[int]:
    ledger, trained = Ledger(), []
    for line in read_lines(folder / "ledger.jsonl"):
        ledger = apply(ledger, Event(**line))
        assert ledger.balanced
        trained += [line["ordinal"]] if line["kind"] == "train" else []
    return trained


@pytest.mark.parametrize("step", [3, 17, 41])
def test_sigkill_then_resume_trains_every_ordinal_exactly_once(tmp_path, step):
    flags = [*write_copy_task(tmp_path), "--trainer.steps", STEPS, "--checkpoint.every", EVERY]
    with (tmp_path / "out").open("w") as out:
        first = subprocess.Popen(command(*flags), stdout=out, stderr=out)
        folder = wait_for_step(tmp_path / "runs", step, first)
        time.sleep(0.03 * step % 0.2)
        first.kill()
        first.wait()
    second = run(*flags, "--resume", folder)
    assert second.returncode == 0, second.stdout + second.stderr
    assert ("resuming" in second.stdout) == (step >= EVERY)
    trained = trained_ordinals(folder)
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
    assert [m["step"] for m in read_lines(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_sigkill_while_a_checkpoint_is_written_then_resume_goes_on_from_the_one_before(tmp_path):
    flags = [*write_copy_task(tmp_path), "--trainer.steps", 30, "--checkpoint.every", EVERY]
    widen(tmp_path / "policy")
    with (tmp_path / "out").open("w") as out:
        first = subprocess.Popen(command(*flags), stdout=out, stderr=out)
        folder = wait_for_step(tmp_path / "runs", EVERY, first)
        until = time.monotonic() + 120
        while not (folder / "checkpoints" / "step_000020.tmp").exists() and time.monotonic() < until:
            assert first.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.002)
        first.kill()
        first.wait()
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["step_000010", "step_000020.tmp"]
    second = run(*flags, "--resume", folder)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "passing over checkpoint step_000020.tmp: it was never finished" in second.stdout
    assert "at step 10" in second.stdout
    trained = trained_ordinals(folder)
    assert len(trained) == len(set(trained)) == 30 * PROMPTS
    metrics = read_lines(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 31))
    assert any("checkpoint/write_ms" in m for m in metrics)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_is_named(tmp_path):
    flags = [*write_copy_task(tmp_path), "--trainer.steps", 5000, "--checkpoint.every", 50]
    process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folder = wait_for_step(tmp_path / "runs", 2, process)
    (folder / "checkpoints").write_text("where a folder should be")
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 1 and "the checkpoint of step 50 cannot be written" in out, out


def test_after_sigkill_nothing_of_the_run_is_left(tmp_path):
    flags = [*write_copy_task(tmp_path), "--trainer.steps", 5000]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command(*flags), stdout=out, stderr=out)
        wait_for_step(tmp_path / "runs", 2, process)
        ours = descendants(process.pid)
        assert len(ours) > 4
        process.kill()
        process.wait()
    deadline = time.monotonic() + 120  # two of Ray's agents look for their parent only now and then
    while time.monotonic() < deadline and any(map(alive, ours)):
        time.sleep(0.2)
    assert not [pid for pid in ours if alive(pid)]


def test_sigterm_ends_after_the_step_with_a_checkpoint_and_a_summary(tmp_path):
    flags = [*write_copy_task(tmp_path), "--trainer.steps", 5000]
    process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folder = wait_for_step(tmp_path / "runs", 2, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "ground-truth accuracy" in out, out
    last = read_lines(folder / "metrics.jsonl")[-1]["step"]
    assert (folder / "checkpoints" / f"step_{last:06d}" / "manifest.json").exists()


@pytest.mark.parametrize("role", ["Reward", "TrainerRank"])
def test_o085_an_actor_that_is_killed_is_named_and_the_run_ends_cleanly(tmp_path, role):
    flags = [*write_copy_task(tmp_path), "--trainer.steps", 5000]
    process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_step(tmp_path / "runs", 2, process)
    (victim,) = [pid for pid in descendants(process.pid) if f"ray::{role}" in title(pid)]
    os.kill(victim, signal.SIGKILL)
    out, _ = process.communicate(timeout=90)
    name = {"Reward": "rule-0", "TrainerRank": "trainer-0"}[role]
    assert process.returncode == 1 and f"{name} died" in out, out


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sampler_that_is_killed_leaves_the_run_and_comes_back_with_the_newest_weights(tmp_path, replicas):
    flags = [*write_copy_task(tmp_path), "--trainer.steps", 50000, "--sampler.replicas", replicas]
    out = tmp_path / "out"
    with out.open("w") as file:
        process = subprocess.Popen(command(*flags), stdout=file, stderr=file)
        folder = wait_for_step(tmp_path / "runs", 2, process)
        victim = [pid for pid in descendants(process.pid) if "ray::Rollout" in title(pid)][-1]
        os.kill(victim, signal.SIGKILL)
        until = time.monotonic() + 120
        while "is back" not in out.read_text() and time.monotonic() < until:
            assert process.poll() is None, out.read_text()
            time.sleep(0.1)
        back = read_lines(folder / "metrics.jsonl")[-1]["step"]
        wait_for_step(tmp_path / "runs", back + 20, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130, out.read_text()
    text = out.read_text()
    (name,) = [f"sampler-{i}" for i in range(replicas) if f"sampler-{i} left the run" in text]
    assert f"{name} is back" in text
    metrics = read_lines(folder / "metrics.jsonl")
    assert max(m["age/max"] for m in metrics) <= 2
    trained = trained_ordinals(folder)
    assert len(trained) == len(set(trained)) == PROMPTS * len(metrics)


def widen(folder) -> None:
    """So many weights that a checkpoint takes a while."""
    cfg, _ = load_folder(folder)
    wide = replace(cfg, d_ff=1 << 15)
    model = Transformer(wide)
    model.init_weights(torch.Generator().manual_seed(1))
    save_folder(folder, model, wide)


def descendants(pid: int) -> list[int]:
    table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines()[1:]:
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, queue = [], [pid]
    while queue:
        found += children.get(queue[0], [])
        queue += children.get(queue.pop(0), [])
    return found


def title(pid: int) -> str:
    done = subprocess.run(["ps", "-p", str(pid), "-o", "args="], capture_output=True, text=True)
    return done.stdout


def alive(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-p", str(pid), "-o", "stat="], capture_output=True, text=True
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")
