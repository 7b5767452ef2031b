"""What does asynchronous training (η = 2) gain over synchronous (η = 0) on the same devices?

    python benchmarks/asynchrony.py --picture docs/asynchrony.svg      one H200: 6 runs of 2 to 3 minutes
    python benchmarks/asynchrony.py --parallel 2 --gpus 1              two H200s, with a run on each
    python benchmarks/asynchrony.py --exp rule_grpo --skip 0 --flags --trainer.steps 20        two cores
    python benchmarks/asynchrony.py --table-only                       the runs in --out once more

Both modes have all flags in common but those of --async and --sync. A run that has finished is not run again.
Every number is the median over the seeds, and in brackets each seed's.

Clock: from metrics.jsonl, where line k has the time at which step k ended, and `throughput/step_s` the
seconds since step k - 1 or since the loop began. Engines start before that; the clock begins at the end of
step --skip, as the first ones compile. "s/step" is over the steps from there to the step η before the last:
until then both modes admit new prompts, so that the asynchronous pipeline holds as much at its end as at its
beginning.
Accuracy: held-out, after the last step, when both have trained on equally many samples. Over time, and so at
equal time, it is that of validation.jsonl where the run has one (--flags --validation.every 5), at the time
of the validated version; else that of the trained samples themselves (`truth/accuracy`, the mean of SMOOTH
steps; in the asynchronous mode they are up to η versions older). Equal time is when the faster mode of the
same seed has ended; between its points a curve is straight.
Idle: the sampler while no group is between dispatch and generated (ledger.jsonl), the trainer by its clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.charts import Curve, Panel, draw  # noqa: E402

MODES = ("asynchronous", "synchronous")
SMOOTH = 4  # steps
QUANTILES = ("p50", "p90", "p99", "max")
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run. Lists have an entry for each step; `ends` one more, at its front 0, when it began."""

    ends: Sequence[float]  # seconds since the loop began
    lines: Sequence[Mapping[str, float]]  # metrics
    validated: Sequence[tuple[int, float]]  # (version, held-out accuracy)
    sampling: Sequence[tuple[float, float]]  # (from, to) of each group, seconds since the loop began
    summary: Mapping[str, Any]
    samples: int  # of a step
    max_age: int

    @property
    def steps(self) -> int:
        return len(self.lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exp", default="smollm2_async")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/asynchrony"))
    parser.add_argument("--async", dest="asynchronous", default="--staleness.max_age 2")
    parser.add_argument("--sync", dest="synchronous", default="--staleness.max_age 0")
    parser.add_argument("--skip", type=int, default=3, help="steps before the clock begins")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--gpus", type=int, default=0, help="GPUs of each run at a time; 0: all that there are"
    )
    parser.add_argument("--picture", type=Path, help="where to draw the curves, as SVG")
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of all runs; stands last")
    args = parser.parse_args()
    if not args.table_only:
        make_runs(args)
    runs = {mode: [read(args.out / f"{mode}-{seed}") for seed in args.seeds] for mode in MODES}
    print("\n".join(table(runs, args.seeds, args.skip)))
    if args.picture:
        args.picture.write_text(draw(panels(runs, args.skip)))


# ── Running ─────────────────────────────────────────────────────────────────────────────────────────


def make_runs(args: argparse.Namespace) -> None:
    """Both modes of a seed one after the other, so that what changes on the machine meets both."""
    places: SimpleQueue[int] = SimpleQueue()
    for place in range(args.parallel):
        places.put(place)

    def one(name: str, flags: Sequence[str]) -> None:
        if list((args.out / name).glob("*/summary.json")):
            return
        place = places.get()
        own = range(place * args.gpus, (place + 1) * args.gpus)
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))} if args.gpus else {}
        command = [sys.executable, "run.py", "--exp", args.exp, "--log.dir", str((args.out / name).resolve())]
        with (args.out / f"{name}.log").open("w") as log:
            done = subprocess.run([*command, *flags], cwd=ROOT, env={**os.environ, **devices}, stdout=log,
                                  stderr=subprocess.STDOUT)  # fmt: skip
        places.put(place)
        print(f"{name}: {'done' if done.returncode == 0 else 'failed, see its log'}", file=sys.stderr)
        if done.returncode:
            raise SystemExit(f"{' '.join([*command, *flags])}\n{Path(log.name).read_text()[-2000:]}")

    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.parallel) as threads:
        jobs = [
            threads.submit(
                one, f"{mode}-{seed}", [*args.flags, "--seed", str(seed), *getattr(args, mode).split()]
            )
            for seed in args.seeds
            for mode in MODES
        ]
        try:
            for job in jobs:
                job.result()
        finally:  # after a failure no further run is begun
            threads.shutdown(cancel_futures=True)


def read(folder: Path) -> Run:
    """The newest finished run in the folder."""
    found = sorted(folder.glob("*/summary.json"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise SystemExit(f"there is no finished run in {folder}")
    files = {name: found[-1].with_name(f"{name}.jsonl") for name in ("metrics", "ledger", "validation")}
    told = {name: [json.loads(line) for line in f.read_text().splitlines()] for name, f in files.items()}
    lines, config = told["metrics"], json.loads(found[-1].with_name("config.json").read_text())
    began = lines[0]["time"] - lines[0]["throughput/step_s"]
    return Run(
        ends=[0.0, *(line["time"] - began for line in lines)],
        lines=lines,
        validated=[(v["step"], v["validation/truth"]) for v in told["validation"]],
        sampling=_sampling(told["ledger"]),
        summary=json.loads(found[-1].read_text()),
        samples=config["trainer"]["prompts"] * config["sampler"]["samples"],
        max_age=config["staleness"]["max_age"],
    )


def _sampling(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """When each group began and ended to be sampled; the first issue is when the loop begins."""
    began: dict[int, float] = {}
    spans = []
    for event in events:
        at = event["at"] - events[0]["at"]
        if event["kind"] == "dispatch":
            began[event["ordinal"]] = at
        elif event["kind"] in ("generate", "drop") and event["ordinal"] in began:
            spans.append((began.pop(event["ordinal"]), at))
    return spans


# ── Measures ────────────────────────────────────────────────────────────────────────────────────────


def curve(run: Run, skip: int) -> list[tuple[int, float, float]]:
    """(version, seconds on the clock, accuracy), from where the clock begins."""
    truth = [line["truth/accuracy"] for line in run.lines]
    smooth = [(k, fmean(truth[max(0, k - SMOOTH) : k])) for k in range(1, run.steps + 1)]
    points = run.validated or smooth
    return [(k, run.ends[k] - run.ends[skip], accuracy) for k, accuracy in points if k >= max(1, skip)]


def at(points: Points, x: float) -> float:
    """The height of a piecewise straight line; beyond its ends, of the end."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return points[0][1] if x < points[0][0] else points[-1][1]


def equal_time(runs: Sequence[Run], skip: int) -> list[float]:
    """Accuracy of each run when the first of them has ended."""
    ends = min(run.ends[-1] - run.ends[skip] for run in runs)
    return [at([(seconds, accuracy) for _, seconds, accuracy in curve(run, skip)], ends) for run in runs]


def covered(spans: Sequence[tuple[float, float]], low: float, high: float) -> float:
    """Share of [low, high] in which at least one span is open."""
    total, reached = 0.0, low
    for begin, end in sorted(spans):
        end = min(end, high)
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total / (high - low)


def measures(
    skip: int, last: int, quantiles_told: Sequence[str]
) -> dict[str, tuple[str, Callable[[Run], float]]]:
    """Row → (format, what it is of a run), over the steps after `skip` up to `last`. quantiles_told: those of
    the answers' lengths that the metrics have."""

    def seconds(run: Run) -> float:
        return run.ends[last] - run.ends[skip]

    def mean(name: str, first: int = skip, end: int = last) -> Callable[[Run], float]:
        return lambda run: fmean(line[name] for line in run.lines[first:end])

    def rate(run: Run) -> float:
        return run.samples * sum(line["length/mean"] for line in run.lines[skip:last]) / seconds(run)

    def trainer_idle(run: Run) -> float:
        worked = [0.0, *((1 - m["idle/trainer"]) * t for m, t in zip(run.lines, run.ends[1:], strict=True))]
        return 1 - (worked[last] - worked[skip]) / seconds(run)

    def group_seconds(i: int) -> Callable[[Run], float]:
        return lambda run: quantiles((end - begin for begin, end in run.sampling), n=100)[i - 1]

    third = max(1, (last - skip) // 3)
    return {
        f"s/step, steps {skip + 1} to {last}": ("{:.3f}", lambda run: seconds(run) / (last - skip)),
        "trained tokens/s": ("{:,.0f}", rate),
        "held-out accuracy before": ("{:.3f}", lambda run: run.summary["before"]["truth"]),
        "held-out accuracy at equal samples": ("{:.3f}", lambda run: run.summary["after"]["truth"]),
        "sampler idle": ("{:.0%}", lambda run: 1 - covered(run.sampling, run.ends[skip], run.ends[last])),
        "trainer idle": ("{:.0%}", trainer_idle),
        "age, mean": ("{:.2f}", mean("age/mean")),
        "age, largest": ("{:.0f}", lambda run: run.summary["age_max"]),
        "groups dropped as stale": ("{:.0f}", lambda run: run.summary["dropped"].get("stale", 0)),
        "tokens an answer, first third of the steps": ("{:.0f}", mean("length/mean", skip, skip + third)),
        "tokens an answer, last third": ("{:.0f}", mean("length/mean", last - third, last)),
        **{f"tokens an answer, {q} of a step, mean": ("{:.0f}", mean(f"length/{q}")) for q in quantiles_told},
        "cut off at max_tokens": ("{:.1%}", mean("length/truncated")),
        "seconds to sample a group, p50": ("{:.2f}", group_seconds(50)),
        "seconds to sample a group, p95": ("{:.2f}", group_seconds(95)),
    }


# ── Table and picture ───────────────────────────────────────────────────────────────────────────────


def table(runs: Mapping[str, Sequence[Run]], seeds: Sequence[int], skip: int) -> list[str]:
    """Markdown. Raises SystemExit where runs are too short to compare, or unlike."""
    steps = {run.steps for of in runs.values() for run in of}
    last = min(steps) - max(run.max_age for of in runs.values() for run in of)
    if len(steps) > 1 or last <= skip:
        raise SystemExit(f"expected runs of the same length, of more than --skip ({skip}) + η steps: {steps}")
    told = [q for q in QUANTILES if all(f"length/{q}" in run.lines[0] for of in runs.values() for run in of)]
    rows = {
        name: [cell([value(run) for run in runs[mode]], form) for mode in MODES]
        for name, (form, value) in measures(skip, last, told).items()
    }
    pairs = list(zip(*(runs[mode] for mode in MODES), strict=True))
    same_time = zip(*(equal_time(pair, skip) for pair in pairs), strict=True)
    took = [[run.ends[last] - run.ends[skip] for run in pair] for pair in pairs]
    speedup = cell([slow / fast for fast, slow in took], "{:.2f}x")
    kind = "held-out" if pairs[0][0].validated else "trained samples'"
    first, *others = rows.items()
    rows = {first[0]: first[1], "speed-up": [speedup, ""], **dict(others[:3])}
    rows[f"{kind} accuracy at equal time"] = [cell(values, "{:.3f}") for values in same_time]
    rows |= dict(others[3:])
    head = [f"| seeds {', '.join(map(str, seeds))} | {' | '.join(MODES)} |", "|---|---|---|"]
    return [*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def cell(values: Sequence[float], form: str) -> str:
    return f"{form.format(median(values))} ({', '.join(form.format(v) for v in values)})"


def panels(runs: Mapping[str, Sequence[Run]], skip: int) -> list[Panel]:
    """Accuracy over time, and over samples."""
    found = {mode: [(run, curve(run, skip)) for run in of] for mode, of in runs.items()}
    over = {
        "seconds": lambda run, version, seconds: seconds,
        "trained samples": lambda run, version, seconds: version * run.samples,
    }
    return [
        Panel(
            x=name,
            y="accuracy",
            curves=[
                Curve(name=mode, points=[(x(run, k, s), accuracy) for k, s, accuracy in points])
                for mode, of in found.items()
                for run, points in of
            ],
        )
        for name, x in over.items()
    ]


if __name__ == "__main__":
    main()
