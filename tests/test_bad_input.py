"""Bad input: a clear message on stderr and exit code 2 before anything starts: no folder, no build."""

import json

import pytest

from tests.runs.command import run


def refused(tmp_path, message, *flags):
    done = run(*flags, "--log.dir", tmp_path / "runs", env={"HOME": str(tmp_path)})
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in "\n" + done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists() and not (tmp_path / ".cache").exists()


def prompts(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


GOOD = {"prompt": "r12345=", "answer": "54321", "key": "reverse"}
FILE = ["--data.held-out", "1", "--data.file"]


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("--exp takes one of: disrm_grpo, genrm_grpo", ["--exp", "nope"]),
        ("staleness.max_age (η) must be >= 0, got -1", ["--exp", "genrm_grpo", "--staleness.max-age", "-1"]),
        ("group baseline", ["--exp", "genrm_grpo", "--sampler.samples", "1"]),
        ("cannot hold a group", ["--exp", "genrm_grpo", "--sampler.slots", "4"]),
        (
            "every rank needs a group",
            ["--exp", "genrm_grpo", "--trainer.prompts", "1", "--trainer.ranks", "2"],
        ),
        ("lower the replicas", ["--exp", "genrm_grpo", "--sampler.replicas", "900"]),
        ("policy.model", ["--exp", "rule_grpo", "--policy.model", "no/such/folder"]),
        ("there is no file nowhere.jsonl", ["--exp", "rule_grpo", "--data.file", "nowhere.jsonl"]),
        ("no run of rule_grpo", ["--exp", "rule_grpo", "--resume"]),
        ("\njudge.template must contain {candidate}", ["--exp", "genrm_grpo", "--judge.template", "none"]),
        ("\nscalar.template must contain {candidate}", ["--exp", "disrm_grpo", "--scalar.template", "none"]),
        ("judge.format rubric needs judge.criteria", ["--exp", "genrm_grpo", "--judge.format", "rubric"]),
        ("set judge.model", ["--exp", "genrm_grpo", "--judge.urls", "http://localhost:1/v1"]),
        ("there is no file nowhere.py", ["--exp", "rule_grpo", "--reward.fn", "nowhere.py:f"]),
        (
            "reward.legacy: nowhere.yaml cannot be read",
            ["--exp", "rule_grpo", "--reward.legacy", "nowhere.yaml"],
        ),
        ("there is no KL in the reward", ["--exp", "genrm_grpo", "--reward.kl", "0.1"]),
        (
            "cannot seat 1 sampler x 99",
            [
                "--exp",
                "genrm_grpo",
                "--sampler.engine.gpus",
                "99",
                "--sampler.engine.kind",
                "vllm",
                "--sampler.engine.tensor-parallel",
                "99",
            ],
        ),
        ("there is no run folder", ["--exp", "rule_grpo", "--resume", "runs/none"]),
    ],
)
def test_a_config_that_cannot_run(tmp_path, message, flags):
    refused(tmp_path, message, *flags)


@pytest.mark.parametrize(
    ("message", "exp", "rows"),
    [
        ("prompts.jsonl:2: not JSON", "rule_grpo", [GOOD, "{oops", GOOD]),
        (
            "prompts.jsonl:1: the prompt has no answer, and reward.rule needs one",
            "rule_grpo",
            [{"prompt": "r1="}, GOOD],
        ),
        ("prompts.jsonl:2: key 'other' has no teacher", "opd", [GOOD, {**GOOD, "key": "other"}, GOOD]),
        ("data.held_out (1) leaves none", "rule_grpo", [GOOD]),
    ],
)
def test_a_prompt_file_with_a_bad_line(tmp_path, message, exp, rows):
    refused(tmp_path, message, "--exp", exp, *FILE, prompts(tmp_path, *rows))
