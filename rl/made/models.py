"""Names of models that are made here, and where they lie: "random-0.5B" and others, "arithmetic-judge"."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rl.config import Config, ConfigError
from rl.demo.build import REPORT, Built, cache_dir
from rl.hub import smollm2

JUDGE = "arithmetic-judge"
RANDOM = "random-"
_ROOT = Path(__file__).parents[2]


def is_made(model: str) -> bool:
    return model == JUDGE or model.startswith(RANDOM)


def make(model: str, cfg: Config) -> Built:
    """The model, made in a process of its own (which gives the GPU back) where the cache lacks it.

    Raises ConfigError for a shape that is not there, FileNotFoundError without SmolLM2's package.
    """
    if model == JUDGE:
        from rl.made.judge import Recipe, train_judge

        if not cfg.data.arithmetic:
            raise ConfigError(f"judge.model {JUDGE} judges answers to data.arithmetic, and there are none")
        data = cfg.data
        base, recipe = smollm2(), Recipe(judge=cfg.judge, tasks=data.arithmetic, largest=data.largest)
        made_of = {**recipe.key(), "base": base.name}
        sources = ("made/judge", "made/judged", "made/fine_tune", "data/rows_arithmetic", "rewards/gsm8k")
        return _cached(JUDGE, made_of, sources, partial(train_judge, recipe, base))
    from rl.made.noise import SHAPES, save_random

    shape = SHAPES.get(model.removeprefix(RANDOM))
    if shape is None:
        raise ConfigError(f"{model}: the shapes are {', '.join(RANDOM + name for name in SHAPES)}")
    return _cached(model, asdict(shape), ("made/noise",), partial(save_random, shape))


def _cached(
    name: str,
    made_of: Mapping[str, object],
    sources: tuple[str, ...],
    write: Callable[[Path], Mapping[str, float]],
) -> Built:
    """The cache's folder, named by a hash of what the model is made of; written whole or not at all."""
    digest = hashlib.sha256(json.dumps([name, made_of], default=str).encode())
    for source in sources:
        digest.update((_ROOT / f"rl/{source}.py").read_bytes())
    folder = cache_dir() / f"{name}-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".building-") as scratch:
            spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                numbers = process.submit(write, Path(scratch) / "model").result()
            (Path(scratch) / "model" / REPORT).write_text(json.dumps({"numbers": numbers}))
            try:
                (Path(scratch) / "model").rename(folder)
            except OSError:  # another process was first
                if not folder.is_dir():
                    raise
    return Built(folder=folder, numbers=json.loads((folder / REPORT).read_text())["numbers"])
