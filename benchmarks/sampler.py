"""How many tokens a second does the vLLM engine sample, and how much of that is vLLM's own limit?

    python benchmarks/sampler.py --sizes 0.5B --slots 64 256 512      one GPU, under three minutes
    python benchmarks/sampler.py --sizes tiny --slots 64 256          the CPU build
    python benchmarks/sampler.py --sizes smollm2 --tokens 21 --group 1 --rounds 16    short, as a judge's

One engine per size, with random weights; every row asks it for `--rounds` times `slots` samples of `--tokens`
tokens, of which `slots` run at a time, after one round that is not counted:

ours                    VllmEngine.generate, `--group` samples a prompt, with seeds and log-probs
vllm                    AsyncLLM.generate of the same engine, one call a sample, nothing else asked for
vllm, logp              with the log-prob of each token
vllm, logp, seed        and with a seed of its own for each sample

`--profile` looks a thousand times a second where each thread stands, while `ours` runs once more, and prints
the functions in which they stood most: those of this process, and of the process of vLLM's worker, which on
one GPU is that of its scheduler too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.config import ModelConfig  # noqa: E402
from rl.engines.vllm import VllmEngine  # noqa: E402
from rl.engines.vllm_args import VllmOptions, sampling  # noqa: E402
from rl.made.noise import SHAPES  # noqa: E402
from rl.types import SamplingParams  # noqa: E402

SIZES = {
    "tiny": ModelConfig(vocab_size=512, d_model=32, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=32, d_ff=64,
                        dtype="bfloat16"),
    "smollm2": ModelConfig(vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
                           d_ff=1536, rope_theta=1e5, dtype="bfloat16"),
    "0.5B": SHAPES["0.5B"],
}  # fmt: skip
PLAIN: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm, logp": {"logprobs": 0},
    "vllm, logp, seed": {"logprobs": 0, "seed": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--sizes", nargs="+", default=["0.5B"], choices=list(SIZES))
    parser.add_argument("--slots", nargs="+", type=int, default=[64, 256, 512])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.profile:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to send the worker a function
    for size in args.sizes:
        asyncio.run(measure(size, args))


async def measure(size: str, args: argparse.Namespace) -> None:
    length = args.prompt + args.tokens
    engine = VllmEngine(SIZES[size], {}, max_slots=max(args.slots), max_len=length, options=VllmOptions())
    began = time.perf_counter()
    await engine.start()
    config = engine._core.llm.vllm_config
    print(
        f"{size}: up in {time.perf_counter() - began:.0f} s; async scheduling "
        f"{config.scheduler_config.async_scheduling}, V2 runner {config.use_v2_model_runner}, "
        f"graphs {config.compilation_config.cudagraph_mode}, executor "
        f"{config.parallel_config.distributed_executor_backend}",
        flush=True,
    )
    try:
        await ours(engine, min(args.slots), args)
        print(f"{'':<18}{'slots':>7}{'samples/s':>11}{'tokens/s':>10}{'ms a step':>11}")
        for slots in args.slots:
            await row("ours", slots, args, lambda n=slots: ours(engine, n, args))
            for name, asked in PLAIN.items() if not args.ours_only else ():
                await row(name, slots, args, lambda n=slots, how=asked: plain(engine, n, args, how))
        if args.profile:
            await profile(engine, max(args.slots), args)
    finally:
        await engine.stop()


async def row(name: str, slots: int, args: argparse.Namespace, work: Callable[[], Awaitable[int]]) -> None:
    began = time.perf_counter()
    tokens = await work()
    seconds = time.perf_counter() - began
    assert tokens == slots * args.rounds * args.tokens
    print(
        f"{name:<18}{slots:>7}{slots * args.rounds / seconds:>11,.0f}{tokens / seconds:>10,.0f}"
        f"{1e3 * seconds / args.tokens / args.rounds:>11.2f}",
        flush=True,
    )


def prompt(i: int, args: argparse.Namespace) -> list[int]:
    return [(7 * i + 3 * j) % 500 for j in range(args.prompt)]


async def ours(engine: VllmEngine, slots: int, args: argparse.Namespace) -> int:
    params = SamplingParams(max_tokens=args.tokens)

    async def group(i: int, n: int) -> int:
        seeds = range(1000 * i, 1000 * i + n)
        asked = engine.generate(prompt(i, args), params=params, seeds=seeds, request_id=f"group-{i}")
        return sum([len(completion.tokens) async for _, completion in asked])

    asked = slots * args.rounds
    sizes = [min(args.group, asked - first) for first in range(0, asked, args.group)]
    return sum(await asyncio.gather(*(group(i, n) for i, n in enumerate(sizes))))


async def plain(engine: VllmEngine, slots: int, args: argparse.Namespace, how: dict[str, Any]) -> int:
    async def one(i: int) -> int:
        asked = {**how, "seed": i} if "seed" in how else how
        params = sampling(max_tokens=args.tokens, temperature=1.0, **asked)
        ids = {"prompt_token_ids": prompt(i // args.group, args)}
        outputs = engine._core.llm.generate(ids, params, f"plain-{i}-{time.time()}")
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    return sum(await asyncio.gather(*(one(i) for i in range(slots * args.rounds))))


class Looks:
    """Where the threads of a process stand: functions by the share of looks that found a thread there."""

    def __init__(self) -> None:
        self.own: Counter[tuple[str, str]] = Counter()  # (thread, function) that runs, or waits
        self.within: Counter[tuple[str, str]] = Counter()  # or something that it calls
        self.looks, self.over = 0, threading.Event()
        sys.setswitchinterval(1e-4)  # seconds; a thread that is busy gives way to the looking one
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        me = threading.get_ident()
        while not self.over.wait(1e-3):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident == me:
                    continue
                stack, at = [], frame
                while at is not None:
                    code = at.f_code
                    where = "/".join(code.co_filename.rsplit("/", 2)[1:])
                    stack.append((names.get(ident, "?"), f"{where}:{code.co_firstlineno} {code.co_name}"))
                    at = at.f_back
                self.own[stack[0]] += 1
                self.within.update({x for x in stack if not x[1].startswith(("python3", "asyncio", "multi"))})
            self.looks += 1

    def stop(self, top: int = 30) -> str:
        self.over.set()
        self.thread.join()
        lines = [f"{self.looks} looks"]
        for title, counts in (("itself", self.own), ("with what it calls", self.within)):
            lines.append(f"{title:<20}{'thread':<22}function")
            for (thread, function), n in counts.most_common(top):
                lines.append(f"{n / self.looks:>18.1%}  {thread[:20]:<22}{function}")
        return "\n".join(lines)


def begin_to_look(worker: Any) -> None:
    worker.viva_looks = Looks()


def end_to_look(worker: Any) -> str:
    return worker.viva_looks.stop()


async def profile(engine: VllmEngine, slots: int, args: argparse.Namespace) -> None:
    here = Looks()
    await engine._core.llm.collective_rpc(begin_to_look)
    await ours(engine, slots, args)
    [there, *_] = await engine._core.llm.collective_rpc(end_to_look)
    print(f"\nthis process, {slots} slots: {here.stop()}\n\nvLLM's worker: {there}", flush=True)


if __name__ == "__main__":
    main()
