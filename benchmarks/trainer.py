"""How fast is a training step, and what limits it? Qwen2.5 shapes, random weights, packed sequences.

    python benchmarks/trainer.py --device cuda                          the four sizes, 3 minutes on an H200
    python benchmarks/trainer.py --device cuda --ablate 1.5B            attention, recompute, compile, head
    python benchmarks/trainer.py --device cuda --sizes 1.5B --profile          its kernels by time
    python benchmarks/trainer.py --device cuda --sizes 1.5B --ranks 2          two GPUs, and the scaling
    python benchmarks/trainer.py --device cuda --sizes 1.5B --baseline         transformers + FSDP2 beside it
    python benchmarks/trainer.py --device cpu --sizes tiny              some seconds

A step is all of it: forward, the clipped policy loss, backward, reduction, clipping, AdamW on float32
masters. Its time is from one to the next, the median over `--seconds`, after four steps for compilation. A
line is a process.
MFU = (6 · params · tokens + 6 · layers · N · H · Σ length²) / time / 989 TFLOP/s, the datasheet's dense bf16.
Recomputation does not count as work. `proto` is the prototype's MFU (docs/results.md).

One GPU holds masters and working weights (models/replica.py). Each of several holds all working weights and
a share of the masters (models/zero.py) where that leaves two fifths of its memory to activations; else, and
with `--whole no` even on one, FSDP2. With `--whole yes` it is never FSDP2.

7B on one GPU of 139.8 GiB, 16384 tokens, in GiB: float32 masters 28.4 and two moments 56.7, bfloat16 weights
14.2: 99.3 at all times. Gradients stay bfloat16 until AdamW: 14.2 when backward ends, 1.0 (the head's) as it
begins, where activations are most. A block that recomputes selectively keeps of each token its input, q, k,
v, attention, its projection, gate and up: 53248 numbers, in all 1.63; one that starts from its input 0.11. 16
of the former and 12 of the latter are 27.3; with 3.0 for the block in work and 0.5 for CUDA itself 131. As
backward goes down a block gives back 1.63 and takes 0.43 of gradient, so what follows is less. The forward of
12 blocks again is 6 to 8 % of a step. Micro-batches would save activations, and add float32 sums of
gradients, 28.4: more than they save.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.trainer_work import SIZES, Row, step_flops, work  # noqa: E402

PEAK = 989e12
FORMULA = next(line for line in (__doc__ or "").splitlines() if line.startswith("MFU"))
PROTOTYPE = {"0.5B": 37.2, "1.5B": 45.8, "3B": 48.6, "7B": 41.6}
HEADER = (
    f"{'size':5s} {'tokens':>6s} {'attention':9s} {'recompute':18s} {'what else':20s} {'ranks':>5s} "
    f"{'ms':>8s} {'tok/s/GPU':>10s} {'MFU':>6s} {'proto':>6s} {'GiB':>6s} {'first s':>7s}"
)


def measure(row: Row) -> dict[str, Any] | None:
    """Runs the row in processes of its own and prints its line."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/result"
        try:
            mp.spawn(work, (row, port, path), nprocs=row.ranks)  # type: ignore[attr-defined]
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:  # type: ignore[attr-defined]
            why = str(error).strip().splitlines()
            print(f"{label(row, row.attention, row.shard is False)} failed: {why[-1][:300]}", flush=True)
            if "--trace" in sys.argv:
                print("\n".join(why))
            return None
        found = torch.load(path)
    flops = step_flops(row.cfg, row.tokens, row.length)
    mfu = 100 * flops / (found["ms"] / 1e3) / PEAK
    rate, proto = row.tokens / found["ms"] * 1e3, PROTOTYPE.get(row.size, float("nan"))
    print(
        f"{label(row, found['attention'], found['whole'])} {found['ms']:8.1f} {rate:10,.0f} {mfu:6.1f} "
        f"{proto:6.1f} {found['peak']:6.1f} {found['first']:7.1f}",
        flush=True,
    )
    return {**found, "mfu": mfu}


def label(row: Row, attention: str, whole: bool) -> str:
    also = [
        name
        for name, on in [
            (f"GPU {row.gpu}", row.gpu > 0),
            ("transformers", row.baseline),
            ("eager", not row.compile),
            ("head in 4 matmuls", not row.fuse),
            (f"{row.micros} micros", row.micros > 1),
            ("FSDP2", row.shard is True or (row.ranks > 1 and not whole)),
            ("whole weights", row.ranks > 1 and whole),
            ("exchange at the end", row.ranks > 1 and not row.overlap),
            (f"by {row.exchange}", row.ranks > 1 and row.exchange != "auto"),
            ("three projections", row.join is False),
            ("gathered twice", row.keep_gathered is False),
            ("gathered once", row.keep_gathered is True),
            ("offloaded", row.offload),
            *((setting, True) for setting in row.inductor),
        ]
        if on
    ]
    recompute = row.recompute + (f" +{row.full_blocks} full" if row.full_blocks else "")
    return (
        f"{row.size:5s} {row.tokens:6d} {attention:9s} {recompute:18s} {', '.join(also):20s} {row.ranks:5d}"
    )


def ablation(row: Row) -> Sequence[Row]:
    """One thing changed at a time, from the row itself."""
    return [
        row,
        *(replace(row, attention=a) for a in ("flash", "varlen")),
        replace(row, recompute="selective"),
        replace(row, recompute="full"),
        replace(row, fuse=False),
        replace(row, join=False),
        replace(row, shard=True),
        replace(row, shard=True, keep_gathered=False),
        replace(row, compile=False),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="+", default=["0.5B", "1.5B", "3B", "7B"], choices=SIZES)
    parser.add_argument("--ablate", choices=SIZES, help="this size alone, one thing changed at a time")
    parser.add_argument("--seconds", type=float, default=6.0, help="of timed steps, for each line")
    parser.add_argument("--tokens", type=int, help="a step; 16384, and 512 of tiny")
    parser.add_argument("--length", type=int, help="of each sequence; 4096, and 128 of tiny")
    parser.add_argument("--micros", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="with 2, each GPU alone is timed too")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], help="7B selective, else none")
    parser.add_argument("--full-blocks", type=int, help="7B on one GPU 12, else 0")
    parser.add_argument("--gather", choices=["once", "twice"], help="else by memory")
    parser.add_argument("--whole", choices=["yes", "no"], help="weights on each GPU; else as it is best")
    parser.add_argument(
        "--exchange",
        choices=["auto", "messages", "memory", "after"],
        default="auto",
        help="of whole weights; after: in messages, when backward has ended",
    )
    parser.add_argument("--join", choices=["yes", "no"], help="q, k, v in one matmul; else on CUDA")
    parser.add_argument("--compile", choices=["yes", "no"], help="else on CUDA")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--inductor", nargs="*", default=[], help="as coordinate_descent_tuning=True")
    parser.add_argument("--trace", action="store_true", help="all of a failure")
    cfg = parser.parse_args()
    if cfg.ablate and cfg.ranks > 1:
        parser.error("--ablate is of one GPU: leave out --ranks")
    # Rows of a step differ in size: fixed segments would leave gaps that 7B has no room for.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    name = torch.cuda.get_device_name() if cfg.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}\n{FORMULA}\n{HEADER}", flush=True)
    for size in [cfg.ablate] if cfg.ablate else cfg.sizes:
        tiny, large = size == "tiny", size == "7B" and cfg.device == "cuda"
        row = Row(
            size=size,
            tokens=cfg.tokens or (512 if tiny else 16384),
            length=cfg.length or (128 if tiny else 4096),
            micros=cfg.micros,
            device=cfg.device,
            seconds=cfg.seconds,
            attention=cfg.attention,
            recompute=cfg.recompute or ("selective" if large else "none"),
            full_blocks=(12 if large else 0) if cfg.full_blocks is None else cfg.full_blocks,
            compile=cfg.device == "cuda" if cfg.compile is None else cfg.compile == "yes",
            keep_gathered=None if cfg.gather is None else cfg.gather == "once",
            shard=None if cfg.whole is None else cfg.whole == "no",
            join=None if cfg.join is None else cfg.join == "yes",
            overlap=cfg.exchange != "after",
            exchange="messages" if cfg.exchange == "after" else cfg.exchange,
            offload=cfg.offload,
            profile=cfg.profile,
            inductor=tuple(cfg.inductor),
        )
        rows = ablation(row) if cfg.ablate else [row]
        if cfg.ranks > 1 and cfg.device == "cuda":
            rows = [replace(row, gpu=gpu) for gpu in range(cfg.ranks)]
        with ThreadPoolExecutor(cfg.ranks) as threads:  # each GPU alone, at the same time
            alone = list(threads.map(measure, rows))
        both = replace(row, ranks=cfg.ranks, full_blocks=cfg.full_blocks or 0)
        if cfg.ranks > 1 and (together := measure(both)):
            factors = ", ".join(f"{cfg.ranks * a['ms'] / together['ms']:.3f}" for a in alone if a)
            print(f"{size}: {cfg.ranks} GPUs do {factors} times the work of one (each)", flush=True)
        if cfg.baseline:
            for compiled in (True, False) if cfg.device == "cuda" else (False,):
                measure(replace(row, baseline=True, compile=compiled, recompute="none", full_blocks=0))


if __name__ == "__main__":
    main()
