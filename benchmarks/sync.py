"""How long do new weights take, and how long does generation stand still for them?

    python benchmarks/sync.py --gpus 2 --sizes 0.5B 1.5B 7B     NCCL between two GPUs, and by value
    python benchmarks/sync.py --gpus 1 --sizes 0.5B 1.5B        CUDA IPC on one GPU
    python benchmarks/sync.py --gpus 0 --sizes tiny             built-in engine on the CPU, by value and gloo

The run's own parts do the work: a trainer rank (FSDP2, float32 master weights, no optimiser step), an engine
that generates for `--running` requests all the time, and rl/delivery.py between them; weights are random.
All in milliseconds, medians over `--syncs` deliveries after the first:

publish   the trainer stands still: gather, round, pack
receive   weights travel to staging memory beside the engine's own, while it generates
pause     from the request to stand still until the last step is over
commit    from there until it generates again: the copy, and the messages
stands    pause + commit
gap       the longest time between two of the engine's steps in which weights changed
step      the median time between two of its steps
prove     version, checksums of all tensors, log-probs of the probe
total     from the end of publish to the proof
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ray  # noqa: E402
import torch  # noqa: E402

from models.config import ModelConfig  # noqa: E402
from models.weights import as_array, expected_shapes  # noqa: E402
from rl.actors.cluster import WIRE_CALLS, Remote  # noqa: E402
from rl.actors.rollout import Rollout  # noqa: E402
from rl.actors.trainer import WIRE, TrainerRank  # noqa: E402
from rl.config import Config, Engine, Sync  # noqa: E402
from rl.delivery import Delivery  # noqa: E402
from rl.engines.make import Bundle  # noqa: E402
from rl.made.noise import SHAPES  # noqa: E402
from rl.pool import Pool  # noqa: E402
from rl.roles import TrainerGroup  # noqa: E402
from rl.types import SamplingParams  # noqa: E402

SIZES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32,
                        d_ff=128),
    **{size: replace(cfg, max_len=4096) for size, cfg in SHAPES.items()},
}  # fmt: skip
COLUMNS = ("publish", "receive", "pause", "commit", "stands", "gap", "step", "prove", "total")


class Nothing:
    """In a tokenizer's place: nobody reads these answers."""

    template = None

    def decode(self, ids: Any) -> str:
        return ""


@dataclass(frozen=True)
class Setting:
    size: str
    gpus: int
    kind: str
    compile: bool
    running: int

    @property
    def bundle(self) -> Bundle:
        return Bundle(cfg=SIZES[self.size], weights={}, tokenizer=Nothing(), folder=self.size)  # type: ignore

    @property
    def share(self) -> float:
        return 0.5 if self.gpus == 1 else float(self.gpus > 0)

    @property
    def engine(self) -> Engine:
        return Engine(kind=self.kind, gpus=self.share, compile=self.compile, cache_gb=8.0)  # type: ignore


def random_weights(cfg: ModelConfig, seed: int) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, cfg.dtype)
    return {
        name: as_array(torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator))
        for name, shape in expected_shapes(cfg).items()
    }


class RandomTrainer(TrainerRank):
    """Its weights are drawn where it lives."""

    def __init__(self, setting: Setting, cfg: Config) -> None:
        bundle = replace(setting.bundle, weights=random_weights(SIZES[setting.size], 0))
        super().__init__(bundle, cfg, 0)

    @torch.no_grad()
    def change(self) -> None:
        """As a step would."""
        for p in self.state.model.parameters():
            p.mul_(1.001)
        self.state = replace(self.state, version=self.state.version + 1)


class BusyRollout(Rollout):
    """Generates all the time and remembers when each of its steps ended."""

    def __init__(self, setting: Setting, cfg: Config) -> None:
        params = SamplingParams(max_tokens=1024)
        own = setting.kind == "torch"
        weights = random_weights(SIZES[setting.size], 1) if own else {}
        bundle = replace(setting.bundle, weights=weights)
        slots = cfg.sampler.slots
        super().__init__(bundle, params, slots, engine=setting.engine, name="sampler-0")
        self.setting, self.ends = setting, list[float]()

    async def keep_busy(self) -> None:
        self._note_steps()
        self.tasks = [asyncio.create_task(self._forever(i)) for i in range(self.setting.running)]
        while self.engine.stats().running < self.setting.running:
            await asyncio.sleep(0.05)

    async def _forever(self, i: int) -> None:
        n = 0
        while True:
            await self.generate([1 + i % 40] * 32, [i], f"{i}.{n}")
            n += 1

    def _note_steps(self) -> None:
        if self.setting.kind == "vllm":
            processor = self.engine._core.llm.output_processor  # type: ignore[attr-defined]
            process = processor.process_outputs

            def noted(outputs: Any, when: float, *args: Any, **kwargs: Any) -> Any:
                if outputs:
                    self.ends.append(when)
                return process(outputs, when, *args, **kwargs)

            processor.process_outputs = noted
        else:
            deliver = self.engine._deliver  # type: ignore[attr-defined]

            def after(finished: Any) -> None:
                self.ends.append(time.monotonic())
                deliver(finished)

            self.engine._deliver = after  # type: ignore[attr-defined]

    def steps(self, since: float) -> tuple[float, float]:
        """(longest, median) time between two steps since then, in milliseconds."""
        ends = [t for t in self.ends if t >= since]
        gaps = [1e3 * (b - a) for a, b in zip(ends, ends[1:], strict=False)]
        return (max(gaps), median(gaps)) if gaps else (float("nan"), float("nan"))


async def measure(setting: Setting, transports: list[str], syncs: int) -> list[dict[str, Any]]:
    base = Config()
    cfg = replace(base, sampler=replace(base.sampler, slots=setting.running),
                  trainer=replace(base.trainer, compile=False, device="cuda" if setting.gpus else "cpu"),
                  deadlines=replace(base.deadlines, start=300.0, sync=120.0))  # fmt: skip
    options = {"num_gpus": setting.share, "num_cpus": 1}
    rank = ray.remote(concurrency_groups={WIRE: WIRE_CALLS})(RandomTrainer)
    trainer = Remote("trainer-0", rank.options(**options).remote(setting, cfg))
    sampler = Remote(
        "sampler-0", ray.remote(BusyRollout).options(**options, max_concurrency=512).remote(setting, cfg)
    )
    address = await trainer.call("rendezvous")
    began = time.monotonic()
    await asyncio.gather(trainer.call("start", *address), sampler.call("start"))
    print(f"{setting.size}: up after {time.monotonic() - began:.0f} s", flush=True)
    rows = []
    for transport in transports:
        asked = replace(cfg, sync=Sync(transport=transport))  # type: ignore[arg-type]
        delivery = Delivery(asked, TrainerGroup([trainer]), Pool([sampler]), address=address)
        found: list[dict[str, float]] = []
        for i in range(syncs + 1):
            await delivery.publish()
            since = time.monotonic()
            await delivery.deliver()
            await asyncio.sleep(0.2)
            longest, usual = await sampler.call("steps", since) if rows or i else (0.0, 0.0)
            told = {k.removeprefix("sync/").removesuffix("_ms"): v for k, v in delivery.metrics.items()}
            told |= {"gap": longest, "step": usual}
            told["stands"] = told.get("pause", 0.0) + told["commit"]
            if i:
                found.append(told)
            elif not rows:
                await sampler.call("keep_busy")
            await trainer.call("change")
        line = {name: median(f.get(name, float("nan")) for f in found) for name in COLUMNS}
        size = sum(torch.Size(s).numel() for s in expected_shapes(SIZES[setting.size]).values())
        gib = size * getattr(torch, SIZES[setting.size].dtype).itemsize / 2**30
        rows.append(
            {
                **asdict(setting),
                "transport": transport,
                "GiB": gib,
                **line,
                "worst_gap": max(f["gap"] for f in found),
            }
        )
        print(row(rows[-1]), flush=True)
    for actor in (trainer.actor, sampler.actor):
        ray.kill(actor)
    return rows


def heading() -> str:
    return f"{'size':5} {'transport':10} {'GiB':>6} " + " ".join(f"{c:>8}" for c in COLUMNS) + "  worst gap"


def row(r: dict[str, Any]) -> str:
    values = " ".join(f"{r[c]:8.1f}" for c in COLUMNS)
    return f"{r['size']:5} {r['transport']:10} {r['GiB']:6.2f} {values}  {r['worst_gap']:9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["0.5B"], choices=list(SIZES))
    parser.add_argument("--gpus", type=int, default=2, choices=(0, 1, 2))
    parser.add_argument("--transports", nargs="+", help="of store, broadcast, ipc; default: what fits")
    parser.add_argument("--running", type=int, default=64, help="requests that generate all the time")
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="vLLM with torch.compile and captured graphs")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    default = {0: ["store", "broadcast"], 1: ["ipc", "store"], 2: ["broadcast", "store"]}
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    ray.init(include_dashboard=False, logging_level="error", runtime_env={"env_vars": {"PYTHONPATH": paths}})
    print(heading())
    rows = []
    for size in args.sizes:
        kind = "vllm" if args.gpus else "torch"
        setting = Setting(size, args.gpus, kind, args.compile, args.running)
        rows += asyncio.run(measure(setting, args.transports or default[args.gpus], args.syncs))
    print(heading(), *map(row, rows), sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
