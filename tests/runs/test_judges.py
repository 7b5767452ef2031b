"""Judges in real runs: killed, behind HTTP, scalar, validating meanwhile, fooled; and alone."""

import asyncio
import json
import os
import signal
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rl.judges.server import Answer, Server, said
from tests.runs.command import ROOT, command, read_lines, run, wait_for_step, write_copy_task

pytestmark = pytest.mark.slow


def folder_of(tmp_path) -> Path:
    (folder,) = tmp_path.iterdir()
    return folder


def pids(title: str) -> list[int]:
    """Processes whose command line begins with that."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(title.encode()):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_judge_killed_in_the_middle_pauses_admission_and_comes_back(tmp_path):
    flags = ["--exp", "genrm_grpo", "--trainer.steps", 40, "--data.held-out", 64, "--log.dir", tmp_path,
             "--log.wandb", "disabled", "--checkpoint.every", 0]  # fmt: skip
    out = tmp_path.parent / f"{tmp_path.name}.out"
    with out.open("w") as file:
        process = subprocess.Popen(command(*flags), stdout=file, stderr=file)
        folder = wait_for_step(tmp_path, 5, process, seconds=400)
        (judge,) = pids("ray::Judge")
        os.kill(judge, signal.SIGKILL)
        assert process.wait(300) == 0, out.read_text()
    text = out.read_text()
    assert "no new groups are admitted: no replica of judge answers" in text
    assert text.index("no new groups are admitted") < text.index("going on")
    metrics = read_lines(folder / "metrics.jsonl")
    calls = read_lines(folder / "calls.jsonl")
    unread = sum(call["outcome"].startswith("parse_fail") for call in calls)  # now and then, by itself
    assert len(metrics) == 40 and round(sum(256 * m["reward/missing"] for m in metrics)) <= unread
    assert max(m["age/max"] for m in metrics) <= 2
    assert max(call["attempts"] for call in calls) >= 2 and {call["outcome"] for call in calls} >= {"score"}


def grade(text: str) -> str:
    """What the server's judge says of "letters:candidate": full marks for the first letter again."""
    problem, candidate = text.rsplit("|", 2)[1:]
    return f"S:{5 if candidate[:1] == problem[:1] else 1}"


@contextmanager
def serving(server: Server):
    loop = asyncio.new_event_loop()
    ready, done = threading.Event(), asyncio.Event()

    async def main():
        async with server.up():
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


def test_judges_behind_http_of_which_one_answers_500_half_of_the_time(tmp_path):
    good = Server(lambda n, text: Answer(body=said(grade(text))))
    bad = Server(lambda n, text: Answer(status=500, body="no") if n % 2 else Answer(body=said(grade(text))))
    with serving(good), serving(bad):
        done = run(
            *write_copy_task(tmp_path), "--reward.rule", 0, "--reward.judge", 1, "--judge.model", "m",
            "--judge.urls", good.url, bad.url, "--judge.template", "grade|{problem}|{candidate}",
            "--trainer.steps", 60, "--trainer.lr", "2e-3", "--trainer.prompts", 8,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder_of(tmp_path / "runs") / "summary.json").read_text())
    assert result["after"]["judge"] > result["before"]["judge"] + 0.2
    calls = read_lines(folder_of(tmp_path / "runs") / "calls.jsonl")
    assert {call["replica"] for call in calls} == {"judge-0", "judge-1"}
    assert max(call["attempts"] for call in calls) >= 2
    assert sum(call["outcome"] == "score" for call in calls) >= 0.95 * len(calls)


def test_disrm_grpo_learns_from_a_scalar_judge(tmp_path):
    done = run("--exp", "disrm_grpo", "--trainer.steps", 60, "--data.held-out", 256, "--log.dir", tmp_path,
               "--log.wandb", "disabled", seconds=600)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder_of(tmp_path) / "summary.json").read_text())
    assert result["after"]["truth"] >= result["before"]["truth"] + 0.2
    assert result["after"]["scalar"] > result["before"]["scalar"]


@pytest.mark.parametrize("on", ["replica", "trainer"])
def test_validation_beside_training_uses_the_judge_and_names_its_version(tmp_path, on):
    done = run("--exp", "genrm_grpo", "--trainer.steps", 24, "--data.held-out", 128, "--log.dir", tmp_path,
               "--log.wandb", "disabled", "--validation.every", 8, "--validation.on", on,
               seconds=600)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_lines(folder_of(tmp_path) / "validation.jsonl")
    assert rows and {row["validation/version"] for row in rows} <= {8, 16, 24}
    assert all(row["step"] == row["validation/version"] and 0 < row["validation/judge"] <= 1 for row in rows)
    last, result = rows[-1], json.loads((folder_of(tmp_path) / "summary.json").read_text())
    if last["validation/version"] == 24:  # the weights that the run ended with, and the same seeds
        assert last["validation/truth"] == pytest.approx(result["after"]["truth"])
    assert f"validation of version {last['validation/version']}" in done.stdout


def test_a_judge_that_can_be_fooled_is_flagged_and_the_defence_holds(tmp_path):
    flags = ["--exp", "reward_hacking", "--data.held-out", 256, "--log.wandb", "disabled"]
    fooled = run(*flags, "--log.dir", tmp_path / "off", seconds=600)
    assert fooled.returncode == 0, fooled.stdout + fooled.stderr
    off = json.loads((folder_of(tmp_path / "off") / "summary.json").read_text())
    assert off["after"]["judge"] > 0.9 and off["after"]["truth"] < 0.3
    assert "judge/gap" in off["alarms"] and "score minus ground truth grew" in fooled.stdout
    assert read_lines(folder_of(tmp_path / "off") / "metrics.jsonl")[-1]["reward/mean"] > 0.9

    defended = run(*flags, "--judge.neutralise", "--log.dir", tmp_path / "on", seconds=600)
    assert defended.returncode == 0, defended.stdout + defended.stderr
    on = json.loads((folder_of(tmp_path / "on") / "summary.json").read_text())
    assert on["after"]["truth"] > on["before"]["truth"] + 0.3
    assert "judge/gap" not in on["alarms"]


def test_judge_eval_reports_a_judge_and_a_rule_on_labelled_answers(tmp_path):
    done = run("--exp", "judge_eval", "--data.held-out", 128, "--reward.rule", 1, "--log.dir", tmp_path,
               seconds=400)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder_of(tmp_path) / "report.json").read_text())
    assert set(report["reports"]) == {"judge", "rule"}
    assert report["reports"]["rule"]["accuracy"] == 1.0 and report["reports"]["judge"]["auc"] > 0.95
    for shown in ("accuracy", "AUC", "calibration", "latency", "tokens"):
        assert shown in done.stdout, shown


def test_gsm8k_as_it_ships_runs_with_the_demo_models(tmp_path):
    path = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
    if not path.is_file():
        pytest.skip("GSM8K is not there")
    done = run("--exp", "genrm_grpo", "--data", path, "--trainer.steps", 2, "--trainer.prompts", 4,
               "--data.held-out", 8, "--log.dir", tmp_path, "--log.wandb", "disabled",
               seconds=600)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_lines(folder_of(tmp_path) / "metrics.jsonl")) == 2
