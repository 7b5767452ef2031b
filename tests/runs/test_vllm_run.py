"""A whole run whose sampler and judge are both vLLM, as a user starts it; only where vLLM is installed."""

import json

import pytest

from tests.runs.command import read_lines, run

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

STEPS = 20
PER_STEP = 32 * 8  # samples
UNREAD = 0.005  # share of verdicts that no score can be read from; the built-in engine's: 0 to 0.001


def test_genrm_grpo_learns_with_vllm_as_sampler_and_as_judge(tmp_path):
    done = run(
        "--exp", "genrm_grpo", "--sampler.engine.kind", "vllm", "--judge.engine.kind", "vllm",
        "--trainer.steps", STEPS, "--data.held-out", 256, "--deadlines.start", 900,
        "--log.dir", tmp_path, "--log.wandb", "disabled",
        seconds=2400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr  # 1 where a version could not be proved
    assert "SyncError" not in done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    kinds = json.loads((folder / "config.json").read_text())
    assert kinds["sampler"]["engine"]["kind"] == kinds["judge"]["engine"]["kind"] == "vllm"

    result = json.loads((folder / "summary.json").read_text())
    # Measured .52 → .82, and .55 → .86 of 64; two accuracies of 256 answers differ by .04 (σ) by chance.
    assert result["after"]["truth"] >= result["before"]["truth"] + 0.15
    assert result["after"]["judge"] > result["before"]["judge"]

    metrics = read_lines(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, STEPS + 1)) and result["version"] == STEPS
    # The tokens of the last step were sampled by a version that had reached vLLM at most two steps before.
    assert result["age_max"] <= 2 and metrics[-1]["age/max"] <= 2

    outcomes = result["judge_outcomes"]["judge"]
    unread = sum(n for kind, n in outcomes.items() if kind.startswith("parse_fail"))
    assert unread + outcomes["score"] == sum(outcomes.values()) >= STEPS * PER_STEP  # no infra failure
    assert unread <= UNREAD * outcomes["score"]
    assert round(sum(PER_STEP * m["reward/missing"] for m in metrics)) <= unread  # no other reward is missing
    assert sum(call["outcome"] == "score" for call in read_lines(folder / "calls.jsonl")) >= outcomes["score"]
