"""A user's own reward functions in a real run."""

import json

import pytest

from tests.runs.command import read_lines, run, write_copy_task

pytestmark = pytest.mark.slow

OURS = """
import time

def first_letter(prompt, completion, answer, extra):
    print("noise on stdout")
    if prompt == "fa" and completion[:1] == "b":
        time.sleep(60)  # beyond its deadline: the reward is missing, the run goes on
    found = {"score": float(completion[:1] == answer), "length": len(completion)}
    return found if completion else None
"""

VERLS = """
async def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return 0.5 if ground_truth in solution_str else 0.0
"""


def test_several_functions_with_weights_one_of_them_verls(tmp_path):
    (tmp_path / "mine.py").write_text(OURS)
    (tmp_path / "theirs.py").write_text(VERLS)
    flags = write_copy_task(tmp_path)
    done = run(
        *flags, "--reward.rule", 0, "--reward.fn", f"{tmp_path}/mine.py:first_letter",
        f"{tmp_path}/theirs.py:compute_score", "--reward.fn-weights", 0.7, 0.3, "--reward.fn-deadline", 2,
        "--trainer.steps", 60, "--trainer.lr", "2e-3", "--trainer.prompts", 8,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.7 mine.py:first_letter + 0.3 theirs.py:compute_score" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    metrics = read_lines(folder / "metrics.jsonl")
    early, late = metrics[:10], metrics[-10:]
    assert sum(m["reward/mean"] for m in late) > sum(m["reward/mean"] for m in early)
    assert all(0 < m["reward/fn/0/length"] <= 3 for m in metrics)
    assert json.loads((folder / "config.json").read_text())["reward"]["fn_weights"] == [0.7, 0.3]


def test_a_function_that_cannot_be_loaded_is_named_before_training(tmp_path):
    (tmp_path / "mine.py").write_text("def other(): pass\n")
    done = run(*write_copy_task(tmp_path), "--reward.fn", f"{tmp_path}/mine.py:first_letter")
    assert done.returncode != 0 and "first_letter" in done.stdout + done.stderr, done.stdout + done.stderr
    missing = run(*write_copy_task(tmp_path), "--reward.fn", "nowhere.py:f")
    assert missing.returncode == 2 and "reward.fn: there is no file nowhere.py" in missing.stderr
