"""What a run will do, from service times: step time, idle shares, age, and what waits where. A pure model.

Groups go round a closed loop, at most (η + 1) · B of them at a time (rl/admission.py):

    admission ─► sampler ─► judge, scalar, teachers (side by side) ─► trainer ─► publish, deliver ─► admission
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

from rl.config import Config, to_dict

ROUND_TRIP = "round trip"  # the bottleneck where η is too small to keep any stage busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Engines that serve groups: rate = replicas · at_a_time / alone_s groups per second (Little 1961, of a
    replica that is full). Of one that does q questions or tokens/s, n per group: alone_s = n / q."""

    name: str
    alone_s: float  # a group's time in it when it waits for nobody
    at_a_time: float = 1.0  # groups in one replica
    replicas: int = 1
    full: float = 1.0  # share of its slots in use while it worked; below 1 it may be faster than its rate

    @property
    def rate(self) -> float:
        return self.replicas * self.at_a_time / self.alone_s if self.alone_s else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Service times of a run, in seconds."""

    sampler: Stage
    examiners: tuple[Stage, ...] = ()  # judge, scalar, teachers: a group is at all of them at the same time
    train_s: float  # of one optimiser step on B groups, without publishing
    publish_s: float = 0.0  # the trainer stands still
    between_s: float = 0.0  # the loop between two steps: packing, metrics, checkpoints
    deliver_s: float = 0.0  # beside training, before the next publishing and before new groups
    kept: float = 1.0  # share of admitted groups that is trained, in (0, 1]
    stream: bool = False  # groups are trained as they arrive (trainer.stream)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.sampler, *self.examiners)

    def at(self, replicas: Mapping[str, int]) -> Service:
        """With other numbers of replicas. replicas: stage → how many; others stay as they are."""

        def moved(s: Stage) -> Stage:
            return replace(s, replicas=replicas.get(s.name, s.replicas))

        return replace(self, sampler=moved(self.sampler), examiners=tuple(map(moved, self.examiners)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Means in the steady state. Groups are counted where they are trained in the end."""

    rates: Mapping[str, float]  # stage → groups/s that it could do, trainer and sync among them
    bottleneck: str  # a stage, or "round trip"
    step_s: float
    idle: Mapping[str, float]  # stage → share of time in which it has nothing to do
    round_trip_s: float  # of a batch that waits for no other batch
    under_way: Mapping[str, float]  # stage → groups there, served or waiting; in all (η + 1) · B
    age: float  # of the trained groups, in versions
    least_groups: float  # under way, so that the slowest stage never waits
    least_age: int  # the η of so many groups

    def seconds(self, steps: int) -> float:
        """Of a run from nothing: one round trip, then a step time for each further step."""
        return self.round_trip_s + (steps - 1) * self.step_s

    def idle_over(self, steps: int) -> dict[str, float]:
        """Idle shares with the time in which the pipeline fills: 1 - steps · busy / seconds(steps)."""
        scale = steps * self.step_s / self.seconds(steps)
        return {name: 1 - (1 - share) * scale for name, share in self.idle.items()}

    def age_over(self, steps: int) -> float:
        """Mean age with the first steps, as step k has no samples older than k: Σ_k min(k, age) / steps."""
        return sum(min(k, self.age) for k in range(steps)) / steps


def forecast(service: Service, *, prompts: int, max_age: int) -> Forecast:
    """The steady state of a run. prompts: B, groups of a step. max_age: η. Little's law is groups = rate ·
    time ("A Proof for the Queuing Formula: L = λW", J. D. C. Little, 1961).

    Rates, in trained groups per second, of stage i, of the trainer and of the way of the weights:

        rate_i = kept · replicas_i · at_a_time_i / alone_i
        rate_trainer = B / (train + publish + between),   rate_sync = B / (publish + deliver)

    A batch that waits for no other batch goes round, streaming from stage to stage as a flow shop does
    (Johnson 1954), with x_i = max(0, B / rate_i - alone_i) from its first to its last group, in

        R = alone_sampler + max_e [alone_e + max(x_sampler, x_e)] + train + publish + deliver,

    and with trainer.stream, where training is one more stage of the flow shop, with

        max(x + train / B, train)    in the place of    x + train,    x = max(x_sampler, x_e).

    η + 1 batches go round at a time, so by Little's law and the two bounds of a closed network (Denning and
    Buzen 1978)

        step = max(max_i B / rate_i, R / (η + 1)),   idle_i = 1 - (B / rate_i) / step,

    the trainer's without `between`, in which it stands still. So at η = 0 step = R, a sum instead of a
    maximum. By Little's law again,

        groups at a place = B / step · time there,   Σ over places = (η + 1) · B,

    and what a batch's (η + 1) · step is longer than R, it spends waiting for the bottleneck. Within a batch a
    group waits x / 2 at its slowest stage, and for the rest of it at the trainer.

    A batch is admitted when the version rises and is trained η versions later, so its age is η less the
    versions that pass between admission and the first token. That is 0 unless groups queue for the sampler:

        age = η - E ⌊u / step⌋,   u uniform on [wait, wait + x_sampler],

    wait = (η + 1) · step - R where the sampler is the bottleneck, else 0. The slowest stage always has work
    with at least rate · R groups under way: η = ⌈R / max_i (B / rate_i)⌉ - 1.

    Fluid, deterministic and steady: stragglers, failures and the time between an engine's calls make a run
    slower, and between two stages of nearly the same rate a queue moves for many steps. Streaming is taken as
    if the optimiser's own time were spread over the groups too. Raises ValueError for numbers out of range.
    """
    if prompts < 1 or max_age < 0 or not 0 < service.kept <= 1:
        raise ValueError(
            f"forecast: expected prompts > 0, max_age >= 0 and kept in (0, 1], got {prompts}, {max_age}, "
            f"{service.kept}"
        )
    train_s, sync_s = service.train_s + service.publish_s, service.publish_s + service.deliver_s
    busy = {s.name: prompts / (service.kept * s.rate) for s in service.stages}
    spread = {s.name: max(0.0, busy[s.name] - s.alone_s) for s in service.stages}
    busy |= {"trainer": train_s + service.between_s, "sync": sync_s}
    first = service.sampler
    exam = max(
        service.examiners or (Stage(name="", alone_s=0.0),),
        key=lambda s: s.alone_s + max(spread[first.name], spread.get(s.name, 0.0)),
    )
    behind = max((first.name, exam.name), key=lambda name: spread.get(name, 0.0))
    early = service.train_s - service.train_s / prompts if service.stream else 0.0  # before the last group
    trip = first.alone_s + exam.alone_s + max(spread[behind], early) + train_s - early + service.deliver_s
    slowest = max(busy, key=lambda name: busy[name])
    if busy[slowest] <= 0:
        raise ValueError("forecast: expected a stage that takes time, got service times that are all 0")
    step = max(busy[slowest], trip / (max_age + 1))
    wait = (max_age + 1) * step - trip
    there = {first.name: first.alone_s, "sync": service.deliver_s}
    there |= {s.name: s.alone_s for s in service.examiners if s is exam}
    there[behind] += spread[behind] / 2
    there["trainer"] = trip - sum(there.values())
    at = "trainer" if slowest == "sync" else slowest  # a trained step waits there until it may publish
    there[at] = there.get(at, 0.0) + wait
    queued = wait if slowest == first.name else 0.0
    return Forecast(
        rates={name: prompts / s if s else inf for name, s in busy.items()},
        bottleneck=slowest if step == busy[slowest] else ROUND_TRIP,
        step_s=step,
        idle={name: 1 - s / step for name, s in (busy | {"trainer": train_s}).items()},
        round_trip_s=trip,
        under_way={name: prompts / step * s for name, s in there.items()},
        age=max(0.0, max_age - _mean_floor(queued / step, (queued + spread[first.name]) / step)),
        least_groups=prompts / busy[slowest] * trip,
        least_age=max(0, ceil(trip / busy[slowest] - 1e-9) - 1),
    )


def _mean_floor(low: float, high: float) -> float:
    """E ⌊u⌋, u uniform on [low, high]: the difference of its integrals."""

    def integral(x: float) -> float:
        n = int(x)
        return n * (n - 1) / 2 + n * (x - n)

    return (integral(high) - integral(low)) / (high - low) if high - low > 1e-9 else float(int(low + 1e-9))


def has_times(summary: Mapping[str, Any]) -> bool:
    """Whether a summary holds service times: the run made a step, and took long enough to look at engines."""
    told = {"steps", "trained", "idle", "replicas", "sync_s"} <= summary.keys()
    return told and summary["steps"] > 0 and summary["trained"] > 0 and "sampler" in summary["idle"]


def measured(summary: Mapping[str, Any], cfg: Config, *, trainer_s: float | None = None) -> Service:
    """The service times in the summary of a finished run with this config (the replicas are the summary's).

    trainer_s: the trainer's seconds on a step, publishing too; None: the mean of all, whose first compile.

    A replica's work for one group is busy seconds · replicas / groups; with alone_s it tells how many it has
    at a time. alone_s is the group's measured time there, but at most work · slots / samples: more than the
    slots hold waits. An engine is busy while it runs anything, vLLM while anything is asked of it, so the
    rate of one that was never `full` is a lower bound, and no number of tokens/s is assumed. Work that is
    not for training (validation, canaries) counts as if it were, and where engines share cores or a GPU
    their times hold for this sharing alone. Raises ValueError for a summary without them (`has_times`).
    """
    if not has_times(summary):
        raise ValueError("measured: no service times: expected a run of a step and of a few seconds")
    steps, wall = summary["steps"], summary["wall_s"]
    kept = summary["trained"] / summary["issued"]
    groups = steps * cfg.trainer.prompts / kept
    stage_s, idle, replicas = summary["stage_s"], summary["idle"], summary["replicas"]
    slots: dict[str, float] = {"reference": cfg.sampler.slots}
    slots |= {"sampler": cfg.sampler.slots, "judge": cfg.judge.slots, "scalar": cfg.scalar.slots}
    slots["judge"] /= cfg.judge.votes
    slots |= {f"teacher {name}": teacher.slots for name, teacher in cfg.teachers.items()}

    def stage(name: str, seconds: float) -> Stage:
        work = (1 - idle[name]) * wall * replicas[name] / groups  # of one replica
        room = max(1.0, slots[name] / cfg.sampler.samples)
        alone = max(work, min(seconds, work * room))
        held = alone / work if work else inf
        full = min(1.0, held / room) if seconds else 1.0
        return Stage(name=name, alone_s=alone, at_a_time=held, replicas=replicas[name], full=full)

    examiners = [stage(name, stage_s["judge"]) for name in ("judge", "scalar") if name in idle]
    if stage_s["judge"] and not examiners:  # rules, functions, judges elsewhere: nobody knows their limit
        examiners = [Stage(name="reward", alone_s=stage_s["judge"], at_a_time=inf)]
    taught = [stage(name, stage_s["teach"]) for name in idle if name.startswith("teacher ")]
    taught += [stage("reference", 0.0)] if "reference" in idle else []  # no stage of its own is recorded
    publish_s = summary["sync_s"]["publish"]
    trainer_s = (1 - idle["trainer"]) * wall / steps if trainer_s is None else trainer_s
    stood_s = idle["trainer"] * wall - summary["trainer_waited_s"]  # though a batch was there
    return Service(
        sampler=stage("sampler", stage_s["generate"]),
        examiners=(*examiners, *taught),
        train_s=max(0.0, trainer_s - publish_s),
        publish_s=publish_s,
        between_s=max(0.0, stood_s) / steps,
        deliver_s=summary["sync_s"]["deliver"],
        kept=kept,
        stream=cfg.trainer.stream,
    )


def trainer_seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """What the trainer works on one step, publishing too: the mean of the later half of a run's steps, as the
    first compile. lines: its metrics, where idle/trainer is 1 - work / time since it began.
    """
    began = lines[0]["time"] - lines[0]["throughput/step_s"]
    work = [0.0, *((1 - line["idle/trainer"]) * (line["time"] - began) for line in lines)]
    half = len(lines) // 2
    return (work[-1] - work[half]) / (len(lines) - half)


# A run that agrees in these did the same work on the same engines ...
SAME = (
    "policy.model", "data.file", "data.reasoning_gym", "data.arithmetic", "data.tasks", "data.chat",
    "sampler", "judge", "scalar", "teachers", "reward", "loss", "trainer", "staleness", "sync",
)  # fmt: skip
FREE = {  # ... whatever these were
    "replicas", "max_age", "attempts", "steps", "lr", "warmup", "final_lr", "betas", "weight_decay",
}  # fmt: skip


def newest(cfg: Config) -> tuple[str, Mapping[str, Any], float] | None:
    """(name, summary, `trainer_seconds`) of the newest finished run in log.dir of this experiment that did
    the same work on the same engines (SAME); None: there is none. Its hardware is not compared."""
    wanted = json.loads(json.dumps(to_dict(cfg)))
    runs = sorted(Path(cfg.log.dir).glob(f"{cfg.name}-*/summary.json"), key=lambda p: p.stat().st_mtime)
    for path in reversed(runs):
        summary, told = json.loads(path.read_text()), path.with_name("config.json")
        had = json.loads(told.read_text()) if told.is_file() else {}
        if has_times(summary) and all(_work(had, name) == _work(wanted, name) for name in SAME):
            lines = path.with_name("metrics.jsonl").read_text().splitlines()[-summary["steps"] :]
            return path.parent.name, summary, trainer_seconds([json.loads(line) for line in lines])
    return None


def _work(config: Mapping[str, Any], name: str) -> Any:
    """What stands there, without FREE; None where another version of the code had nothing there."""
    found: Any = config
    for part in name.split("."):
        found = (found or {}).get(part)
    return _bound(found)


def _bound(value: Any) -> Any:
    return {k: _bound(v) for k, v in value.items() if k not in FREE} if isinstance(value, dict) else value


def describe(f: Forecast, steps: int) -> list[str]:
    """A forecast of a run of so many steps in words, as the plan prints it."""
    slow = min(f.rates, key=lambda name: f.rates[name])
    why = f"{slow} is the slowest ({f.rates[slow]:.3g} groups/s)"
    if f.bottleneck == ROUND_TRIP:
        why += f", but a batch takes {f.round_trip_s:.2f} s to go round"
    idle = ", ".join(f"{name} {100 * share:.0f} %" for name, share in f.idle.items())
    held = ", ".join(f"{n:.0f} at {name}" for name, n in f.under_way.items())
    return [
        f"{f.step_s:.2f} s a step, {steps} in {f.seconds(steps):.0f} s: {why}",
        f"idle: {idle}",
        f"age {f.age:.2f}; groups under way: {held}",
        f"{slow} never waits from {f.least_groups:.0f} groups under way on: η >= {f.least_age}",
    ]
