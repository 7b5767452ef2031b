"""Who runs where: a pure function from the config and a cluster's resources. What does not fit fails here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.config import Config

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


def replicas(cfg: Config) -> dict[str, int]:
    """Role → how many actors the config wants of it."""
    wanted = {"trainer": cfg.trainer.ranks, "sampler": cfg.sampler.replicas}
    if cfg.uses_judge:
        wanted["judge"] = cfg.judge.replicas
    if cfg.reward.rule:
        wanted["rule"] = 1
    wanted |= {name: 1 for name in cfg.reward.weights if name.startswith("fn/")}
    if cfg.uses_teachers:
        wanted |= {f"teacher/{name}": teacher.replicas for name, teacher in cfg.teachers.items()}
    if cfg.uses_reference:
        wanted["reference"] = 1
    return wanted


def make_plan(cfg: Config, nodes: Sequence[Node]) -> Plan:
    """Seats for every actor, the cores shared evenly where there are fewer than actors. Raises PlanError."""
    wanted = replicas(cfg)
    actors = sum(wanted.values())
    cpus, gpus = sum(n.cpus for n in nodes), sum(n.gpus for n in nodes)
    if not nodes or cpus <= 0:
        raise PlanError("the cluster offers no CPU: start Ray with at least one")
    if cfg.trainer.device == "cuda" and gpus < cfg.trainer.ranks:
        raise PlanError(
            f"trainer.device cuda wants {cfg.trainer.ranks} GPUs (trainer.ranks), the cluster has {gpus:g}"
        )
    share = min(1.0, _largest_share([n.cpus for n in nodes], actors))
    if share < SMALLEST_CPU:
        listed = ", ".join(f"{n} {role}" for role, n in wanted.items())
        raise PlanError(
            f"{actors} actors ({listed}) on {cpus:g} cores leave less than {SMALLEST_CPU:g} of a core each: "
            "lower the replicas or join a larger cluster with --ray.address"
        )
    on_gpu = cfg.trainer.device != "cpu" and gpus >= cfg.trainer.ranks
    seats = [
        Seat(role=role, index=i, cpus=share, gpus=float(role == "trainer" and on_gpu))
        for role, n in wanted.items()
        for i in range(n)
    ]
    return Plan(nodes=tuple(nodes), seats=tuple(seats), strategy="SPREAD" if cfg.ray.spread else "PACK")


def _largest_share(cpus: Sequence[float], actors: int) -> float:
    """The largest s, in hundredths of a core, such that nodes of these sizes seat that many actors of s
    each."""
    hundredths = [round(100 * c) for c in cpus]
    return next((s / 100 for s in range(100, 0, -1) if sum(c // s for c in hundredths) >= actors), 0.0)


def describe(cfg: Config, plan: Plan) -> list[str]:
    """Placement, batch and bound, as they are printed before anything starts."""
    t, s, st = cfg.trainer, cfg.sampler, cfg.staleness
    cpus, gpus = sum(n.cpus for n in plan.nodes), sum(n.gpus for n in plan.nodes)
    roles = {seat.role: plan.of(seat.role) for seat in plan.seats}
    seats = ", ".join(
        f"{len(v)} {role} ({v[0].cpus:g} core{', 1 GPU' if v[0].gpus else ''})" for role, v in roles.items()
    )
    bound = "synchronous" if st.max_age == 0 else f"no token older than {st.max_age} versions is trained"
    return [
        f"placement  {len(plan.nodes)} node(s), {cpus:g} cores, {gpus:g} GPUs: {seats}",
        f"batch      {t.prompts} prompts x {s.samples} samples = {t.prompts * s.samples}, {t.steps} steps",
        f"staleness  η = {st.max_age}: {bound}; at most {(st.max_age + 1) * t.prompts} groups under way",
        f"           late groups: {st.late}; running samples at new weights: {st.weights}",
    ]
