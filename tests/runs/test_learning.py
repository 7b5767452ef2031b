"""The demos learn, by ground truth: real runs on Ray, smaller than the defaults."""

import json

import pytest

from tests.runs.command import read_lines, run

pytestmark = pytest.mark.slow


def learn(tmp_path, exp, *flags):
    done = run("--exp", exp, "--log.dir", tmp_path, "--data.held-out", 256, *flags, seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.glob(f"{exp}-*")
    return (
        json.loads((folder / "summary.json").read_text()),
        read_lines(folder / "metrics.jsonl"),
        done.stdout,
    )


def test_genrm_grpo_raises_ground_truth_accuracy_that_its_judge_never_sees(tmp_path):
    result, metrics, out = learn(tmp_path, "genrm_grpo", "--trainer.steps", 60)
    assert result["after"]["truth"] >= result["before"]["truth"] + 0.15
    assert result["after"]["judge"] > result["before"]["judge"]
    assert max(m["age/max"] for m in metrics) <= 2
    assert all(m["groups/issued"] == m["groups/trained"] + m["groups/live"] + dropped(m) for m in metrics)
    for shown in ("plan", "objective", "verdict", "ground-truth accuracy", "judge's score", "idle:", "files"):
        assert shown in out, shown


def dropped(metrics):
    return sum(n for name, n in metrics.items() if name.startswith("dropped/"))


def test_opd_learns_both_skills_from_its_two_teachers(tmp_path):
    result, metrics, _ = learn(tmp_path, "opd", "--trainer.steps", 40)
    for skill in ("truth reverse", "truth sort"):
        assert result["after"][skill] >= result["before"][skill] + 0.1, skill
    assert metrics[-1]["loss/distill"] < 0.5 * metrics[0]["loss/distill"]
