"""Who runs where: a pure function from the config and a cluster's resources. What does not fit fails here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rl import forecast, teaching
from rl.config import Config, Engine

SMALLEST_CPU = 0.05  # logical cores: below this share the actors of a laptop would only wait for each other


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One actor's place."""

    role: str  # trainer, sampler, judge, rule, reference, or teacher/<name>
    index: int
    cpus: float
    gpus: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    nodes: tuple[Node, ...]
    seats: tuple[Seat, ...]
    strategy: str  # of Ray's placement group

    def of(self, role: str) -> list[Seat]:
        return [s for s in self.seats if s.role == role]

    def bundles(self) -> list[dict[str, float]]:
        return [{"CPU": s.cpus, **({"GPU": s.gpus} if s.gpus else {})} for s in self.seats]


class PlanError(ValueError):
    """The run does not fit; the message says what is there, what is wanted and what to change."""


def replicas(cfg: Config, prompts: Mapping[str, float] | None = None) -> dict[str, int]:
    """Role → how many actors the config wants of it. prompts: see `split_teachers`."""
    wanted = {"trainer": cfg.trainer.ranks, "sampler": cfg.sampler.replicas}
    if cfg.uses_judge:
        wanted["judge"] = len(cfg.judge.urls) or cfg.judge.replicas
    if cfg.uses_scalar:
        wanted["scalar"] = cfg.scalar.replicas
    if cfg.reward.rule:
        wanted["rule"] = 1
    wanted |= {name: 1 for name in cfg.reward.weights if name.startswith("fn/")}
    if cfg.uses_teachers:
        wanted |= {f"teacher/{name}": n for name, n in split_teachers(cfg, prompts).items()}
    if cfg.uses_reference:
        wanted["reference"] = 1
    if cfg.validation.every and cfg.validation.on == "replica":
        wanted["validator"] = 1
    return wanted


def split_teachers(cfg: Config, prompts: Mapping[str, float] | None = None) -> dict[str, int]:
    """Teacher → its engines: its own number, or its part of teacher_replicas.

    prompts: key → number of prompts (or their share); the engines are split by what each teacher is asked,
    by largest remainder, at least one each. None: equally. Raises PlanError for fewer engines than teachers.
    """
    n, k = cfg.teacher_replicas, len(cfg.teachers)
    if not n:
        return {name: teacher.replicas for name, teacher in cfg.teachers.items()}
    if n < k:
        raise PlanError(
            f"teacher_replicas is {n} for {k} teachers ({', '.join(sorted(cfg.teachers))}): each needs one. "
            f"Set teacher_replicas to {k} or more, or to 0 for teachers.<name>.replicas"
        )
    load = dict.fromkeys(cfg.teachers, 0.0 if prompts else 1.0)
    for key, count in (prompts or {}).items():
        for name in teaching.teachers_of(cfg, key):
            load[name] += count
    return teaching.split(n, load)


def make_plan(
    cfg: Config,
    nodes: Sequence[Node],
    *,
    only: Collection[str] | None = None,
    prompts: Mapping[str, float] | None = None,
) -> Plan:
    """Seats for every actor, the cores shared evenly where there are fewer than actors. Raises PlanError.

    only: the roles that are wanted; None: all that the config uses. prompts: see `split_teachers`.
    """
    wanted = {role: n for role, n in replicas(cfg, prompts).items() if only is None or role in only}
    actors = sum(wanted.values())
    cpus, gpus = sum(n.cpus for n in nodes), sum(n.gpus for n in nodes)
    if not nodes or cpus <= 0:
        raise PlanError("the cluster offers no CPU: start Ray with at least one")
    each = gpus_of(cfg, wanted, gpus)
    if wanted.get("trainer", 0) > 1 and 0 < each["trainer"] <= 0.5:
        raise PlanError(
            f"trainer.gpus is {each['trainer']:g} for {wanted['trainer']} ranks: two could come to lie on "
            "one GPU, and NCCL takes one rank a GPU. Set it above 0.5"
        )
    _seat_gpus([each[role] for role, n in wanted.items() for _ in range(n)], nodes, wanted, each)
    share = min(1.0, _largest_share([n.cpus for n in nodes], actors))
    if share < SMALLEST_CPU:
        listed = ", ".join(f"{n} {role}" for role, n in wanted.items())
        raise PlanError(
            f"{actors} actors ({listed}) on {cpus:g} cores leave less than {SMALLEST_CPU:g} of a core each: "
            "lower the replicas or join a larger cluster with --ray.address"
        )
    seats = [
        Seat(role=role, index=i, cpus=share, gpus=each[role]) for role, n in wanted.items() for i in range(n)
    ]
    return Plan(nodes=tuple(nodes), seats=tuple(seats), strategy="SPREAD" if cfg.ray.spread else "PACK")


def engine_of(cfg: Config, role: str) -> Engine:
    """What runs the model of a role; of a rule or a function nothing does."""
    if role.startswith("teacher/"):
        return cfg.teachers[role.removeprefix("teacher/")].engine
    own = {"judge": cfg.judge.engine, "scalar": cfg.scalar.engine}
    of_policy = role in ("sampler", "validator", "reference")
    return own.get(role, cfg.sampler.engine if of_policy else Engine())


def gpus_of(cfg: Config, wanted: Mapping[str, int], available: float) -> dict[str, float]:
    """Role → GPUs of each of its actors. trainer.device auto: CUDA where the engines leave enough."""
    each = {role: engine_of(cfg, role).gpus for role in wanted}
    if cfg.judge.urls and "judge" in each:
        each["judge"] = 0.0
    engines = sum(each[role] * n for role, n in wanted.items())
    train = cfg.trainer.gpus * cfg.trainer.ranks
    fits = available + 1e-6 >= engines + train
    if "trainer" in each:
        on_gpu = cfg.trainer.device == "cuda" or (cfg.trainer.device == "auto" and fits)
        each["trainer"] = cfg.trainer.gpus if on_gpu else 0.0
    return each


def _seat_gpus(
    shares: Sequence[float], nodes: Sequence[Node], wanted: Mapping[str, int], each: Mapping[str, float]
) -> None:  # fmt: skip
    """Raises PlanError where the nodes' GPUs cannot seat the shares: a share lies on one GPU, several GPUs on
    one node. The largest are seated first."""
    left = [[1.0] * int(node.gpus) for node in nodes]
    for share in sorted((s for s in shares if s), reverse=True):
        if not any(_take(gpus, share) for gpus in left):
            asked = ", ".join(f"{n} {role} x {each[role]:g}" for role, n in wanted.items() if each[role])
            there = ", ".join(f"{node.gpus:g}" for node in nodes)
            raise PlanError(
                f"the GPUs cannot seat {asked}: the nodes have {there}. Lower the replicas or trainer.ranks, "
                "or give shares below 1 with <role>.engine.gpus and trainer.gpus"
            )


def _take(gpus: list[float], share: float) -> bool:
    whole = round(share) if share >= 1 else 1
    need = min(share, 1.0)
    free = [i for i, left in enumerate(gpus) if left + 1e-6 >= need]
    if len(free) < whole:
        return False
    for i in free[:whole]:
        gpus[i] -= need
    return True


def _largest_share(cpus: Sequence[float], actors: int) -> float:
    """The largest s, in hundredths of a core, such that nodes of these sizes seat that many actors of s
    each."""
    hundredths = [round(100 * c) for c in cpus]
    return next((s / 100 for s in range(100, 0, -1) if sum(c // s for c in hundredths) >= actors), 0.0)


def describe(cfg: Config, plan: Plan) -> list[str]:
    """Placement, batch, bound and forecast, as they are printed before anything starts."""
    t, s, st = cfg.trainer, cfg.sampler, cfg.staleness
    head = [_placement(plan)]
    if not plan.of("trainer"):
        return head
    bound = "synchronous" if st.max_age == 0 else f"no token older than {st.max_age} versions is trained"
    return [
        *head,
        *_teachers(cfg, plan),
        f"batch      {t.prompts} prompts x {s.samples} samples = {t.prompts * s.samples}, {t.steps} steps",
        *_stream(cfg),
        f"staleness  η = {st.max_age}: {bound}; at most {(st.max_age + 1) * t.prompts} groups under way",
        f"           late groups: {st.late}; running samples at new weights: {st.weights}",
        *_validation(cfg),
        *_forecast(cfg, plan),
    ]


def _placement(plan: Plan) -> str:
    cpus, gpus = sum(n.cpus for n in plan.nodes), sum(n.gpus for n in plan.nodes)
    roles = {seat.role: plan.of(seat.role) for seat in plan.seats}
    seats = ", ".join(
        f"{len(v)} {role} ({v[0].cpus:g} core{f', {v[0].gpus:g} GPU' if v[0].gpus else ''})"
        for role, v in roles.items()
    )
    return f"placement  {len(plan.nodes)} node(s), {cpus:g} cores, {gpus:g} GPUs: {seats}"


def _teachers(cfg: Config, plan: Plan) -> list[str]:
    if not cfg.uses_teachers:
        return []
    parts = ", ".join(f"{len(plan.of(f'teacher/{name}'))} {name}" for name in cfg.teachers)
    how = f"teacher_replicas {cfg.teacher_replicas}, split by the prompts of each teacher"
    return [f"teachers   {parts} ({how if cfg.teacher_replicas else 'teachers.<name>.replicas'})"]


def _stream(cfg: Config) -> list[str]:
    said = "           streamed: groups are trained as they arrive, one optimiser step when all are there"
    return [said] if cfg.trainer.stream else []


def _validation(cfg: Config) -> list[str]:
    v = cfg.validation
    if not v.every:
        return []
    who = "an engine of its own" if v.on == "replica" else "the trainer's ranks while they have no batch"
    n = v.prompts or cfg.data.held_out
    return [f"validation every {v.every} steps, {n} prompts by {who}, {v.share:.0%} of them at a time"]


def _forecast(cfg: Config, plan: Plan) -> list[str]:
    """What this run will do, from the service times of the newest one like it."""
    found = forecast.newest(cfg)
    if found is None:
        return [
            f"forecast   nothing is measured yet: no finished run in {cfg.log.dir} of the same models, data, "
            "batch, engines and shares. A short one will do, such as --trainer.steps 50"
        ]
    name, summary, trainer_s = found
    seats = {
        role.replace("teacher/", "teacher "): len(plan.of(role)) for role in {s.role for s in plan.seats}
    }
    service = forecast.measured(summary, cfg, trainer_s=trainer_s).at(seats)
    said = forecast.forecast(service, prompts=cfg.trainer.prompts, max_age=cfg.staleness.max_age)
    lines = [*forecast.describe(said, cfg.trainer.steps), assumed(plan, service, name, summary["steps"])]
    return [f"{'' if i else 'forecast':11}{line}" for i, line in enumerate(lines)]


def assumed(plan: Plan, service: forecast.Service, name: str, steps: int) -> str:
    """In one line, what a forecast from the service times of the run `name` takes for granted."""
    sharing = sorted({s.role for s in plan.seats if 0 < s.gpus < 1})
    partly = [f"{s.name} ({s.full:.0%})" for s in service.stages if s.full < 0.9]
    parts = [
        f"the rates of {name} ({steps} steps), on hardware like its own, without compilation",
        *([f"{' and '.join(sharing)} slow each other on shared GPUs as there"] if sharing else []),
        *([f"lower bounds where slots were free: {', '.join(partly)} in use"] if partly else []),
    ]
    return "assumes: " + "; ".join(parts)
