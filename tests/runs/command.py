"""Real runs, as a user starts them: `python run.py ...` in a process of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch

from models.config import ModelConfig
from models.tokenizer import char_tokenizer
from models.transformer import Transformer
from models.weights import save_folder

ROOT = Path(__file__).parents[2]


def command(*args: object) -> list[str]:
    return [sys.executable, str(ROOT / "run.py"), *map(str, args)]


def run(
    *args: object, seconds: float = 300.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The finished process; fails with its output if it takes too long."""
    done = subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, **(env or {})},
        cwd=ROOT,
    )
    return done


def write_copy_task(folder: Path, n: int = 200) -> list[object]:
    """Flags of a run with an untrained policy and a file of prompts: say the first letter again."""
    tokenizer = char_tokenizer("abcdef")
    cfg = ModelConfig(
        family="llama", vocab_size=tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=4, n_kv_heads=4,
        head_dim=8, d_ff=48, max_len=32, tie_embeddings=True,
        eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id,
    )  # fmt: skip
    model = Transformer(cfg)
    model.init_weights(torch.Generator().manual_seed(1))
    save_folder(folder / "policy", model, cfg, tokenizer)
    rng = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(n):
            letters = "".join(rng.choices("abcdef", k=2))
            file.write(json.dumps({"prompt": letters, "answer": letters[0]}) + "\n")
    return [
        "--exp", "rule_grpo", "--policy.model", folder / "policy", "--data.file", folder / "prompts.jsonl",
        "--data.held-out", 20, "--sampler.max-tokens", 3, "--sampler.samples", 4, "--trainer.prompts", 4,
        "--log.dir", folder / "runs", "--log.wandb", "disabled",
    ]  # fmt: skip


def read_lines(path: Path) -> list[dict]:
    """Whole lines of a JSONL file that may still be written to."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def wait_for_step(runs: Path, step: int, process: subprocess.Popen, seconds: float = 120.0) -> Path:
    """The run's folder, once its metrics have reached that step."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = process.stdout.read() if process.stdout else ""
            raise AssertionError(f"the run ended before it could be disturbed: {said[-2000:]}")
        for folder in runs.glob("*/metrics.jsonl"):
            lines = read_lines(folder)
            if lines and lines[-1]["step"] >= step:
                return folder.parent
        time.sleep(0.05)
    raise AssertionError(f"no run reached step {step} within {seconds} s")
