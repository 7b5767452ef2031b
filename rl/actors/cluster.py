"""Ray: join or start a cluster, seat every actor where the plan says, and hand the controller its roles."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl.actors.judge import Judge
from rl.actors.reward import Function, Reward
from rl.actors.rollout import Rollout
from rl.actors.scalar import ScalarJudge
from rl.actors.teacher import Teacher
from rl.actors.trainer import WIRE, TrainerRank
from rl.config import Config, Dispatch
from rl.engines.make import Bundle
from rl.plan import Node, Plan, Seat
from rl.pool import SIMPLE
from rl.rewards.producers import make_producers
from rl.roles import Handle, Pool, RoleError, Roles, TrainerGroup
from rl.types import SamplingParams

ROOT = Path(__file__).parents[2]
WIRE_CALLS = 32  # of the trainer's rank 0, beside its step: one for each sampler that is sent weights
CALLS = 4096  # calls that one engine actor may have under way; the controller's admission keeps far below it


@dataclass(frozen=True, slots=True)
class Remote:
    """A replica that is a Ray actor."""

    name: str
    actor: Any
    held: tuple[Any, ...] = ()  # what its constructor got, so that one born anew gets it too

    async def call(self, method: str, *args: Any, returns: int = 1) -> Any:
        refs = getattr(self.actor, method).options(num_returns=returns).remote(*args)
        first, *rest = refs if returns > 1 else [refs]
        try:
            value = await first
        except RayTaskError as error:
            raise RoleError(f"{self.name}.{method} failed: {error.cause!r}") from error.cause
        except RayActorError as error:
            raise RoleError(f"{self.name} died during {method}: {_reason(error)}") from None
        except RayError as error:
            raise RoleError(f"{self.name}.{method} could not be reached: {error}") from None
        return (value, *rest) if rest else value


@dataclass(frozen=True, slots=True)
class Held:
    """An object that an actor's constructor fetches itself, by a reference in bytes. A plain one Ray would
    resolve for the first actor only, and not for those that come after its death."""

    ref: bytes


def revivable(cls: type) -> type:
    """The class with a constructor that may be run again: it fetches what is Held."""

    class Revivable(cls):
        def __init__(self, *args: Any) -> None:
            super().__init__(*(ray.get(pickle.loads(a.ref)) if isinstance(a, Held) else a for a in args))

    Revivable.__name__ = Revivable.__qualname__ = cls.__name__
    return Revivable


def _reason(error: RayActorError) -> str:
    """Ray's first sentence, and if there is one the exit of the process or the error that ended it."""
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    told = [
        line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception)\b|.*\bexit", line, re.IGNORECASE)
    ]
    return " ".join([lines[0], *told[-1:]])


@contextmanager
def cluster(cfg: Config) -> Iterator[tuple[Node, ...]]:
    """A private cluster on this machine, or the running one at ray.address; its nodes. Left again at the
    end."""
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    if cfg.ray.address is not None:
        # Other machines need the code; on one machine the workers find it next to run.py.
        env = {"working_dir": str(ROOT), "excludes": ["runs", "wandb", ".git", ".venv*", "docs", "tests"]}
        options = {
            "address": cfg.ray.address,
            "log_to_driver": False,
            "logging_level": "error",
            "runtime_env": env,
        }
    else:
        options["runtime_env"] = {
            "env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        }
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # do not touch visible devices of CPU actors
    ray.init(**options)
    try:
        alive = [n for n in ray.nodes() if n["Alive"]]
        yield tuple(
            Node(n["NodeManagerAddress"], n["Resources"].get("CPU", 0.0), n["Resources"].get("GPU", 0.0))
            for n in alive
        )
    finally:
        ray.shutdown()


@contextmanager
def seated(plan: Plan, run_id: str, deadline: float) -> Iterator[Any]:
    """The plan's bundles, reserved. Raises RoleError naming wanted and available resources if they are not
    to be had."""
    group = placement_group(plan.bundles(), strategy=plan.strategy, name=run_id)
    try:
        if not group.wait(deadline):
            raise RoleError(
                f"the cluster could not seat the plan within {deadline:g} s: wanted {plan.bundles()}, "
                f"available {ray.available_resources()}"
            )
        yield group
    finally:
        remove_placement_group(group)


@dataclass(frozen=True, slots=True)
class Casting:
    """Makes the actors of one run: names carry run id, role and index, so that two runs never clash."""

    run_id: str
    group: Any
    plan: Plan

    def cast(
        self, cls: type, seat: Seat, *args: Any, concurrent: bool = True, revive: bool = False
    ) -> Handle:  # fmt: skip
        """revive: Ray makes a new one where it died; whoever calls it must start it again (rl/pool.py)."""
        refs: tuple[Any, ...] = ()
        if revive:
            cls, refs = revivable(cls), args
            args = tuple(Held(cloudpickle.dumps(a)) if isinstance(a, ray.ObjectRef) else a for a in args)
        options: dict[str, Any] = {
            "name": f"{self.run_id}/{seat.name}",
            "num_cpus": seat.cpus,
            "num_gpus": seat.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.plan.seats.index(seat)
            ),
            **({"max_concurrency": CALLS} if concurrent else {}),
            **({"max_restarts": -1} if revive else {}),
        }
        aside: dict[str, Any] = {"concurrency_groups": {WIRE: WIRE_CALLS}}
        remote: Any = ray.remote(cls) if concurrent else ray.remote(**aside)(cls)
        return Remote(seat.name, remote.options(**options).remote(*args), refs)

    def all(self, cls: type, role: str, *args: Any, revive: bool = False) -> list[Handle]:
        return [self.cast(cls, seat, *args, revive=revive) for seat in self.plan.of(role)]


def cast_roles(
    cfg: Config, bundles: Mapping[str, Bundle], casting: Casting, version: int, prompts: Sequence[int] = ()
) -> Roles:
    """Every actor of the run. Constructors are cheap; `start_roles` brings them up.

    bundles: "policy", "judge", and "teacher/<name>" for each teacher; the policy of a resumed run is the
    checkpoint's. prompts: lengths of what is trained on, in tokens.
    """
    refs = {name: ray.put(bundle) for name, bundle in bundles.items()}
    s = cfg.sampler
    params = SamplingParams(temperature=s.temperature, max_tokens=s.max_tokens)
    trainer = [
        casting.cast(TrainerRank, seat, refs["policy"], cfg, rank, version, prompts, concurrent=False)
        for rank, seat in enumerate(casting.plan.of("trainer"))
    ]
    rollout = refs["policy"], params, s.slots, version, s.engine
    samplers, validator = (
        [
            casting.cast(Rollout, seat, *rollout, seat.name, revive=role == "sampler")
            for seat in casting.plan.of(role)
        ]
        for role in ("sampler", "validator")
    )
    judges, raters = cast_judges(cfg, refs, casting), cast_raters(cfg, casting)
    return Roles(
        trainer=TrainerGroup(trainer),
        sampler=Pool(samplers, name="sampler", dispatch=_sampling(cfg)),
        judges=judges,
        raters=raters,
        producers=make_producers(cfg, judges, raters),
        teachers=_cast_teachers(cfg, refs, casting),
        reference=Pool(
            casting.all(Teacher, "reference", refs["reference"], s.slots, s.temperature, 0, False, s.engine)
        )
        if cfg.uses_reference
        else None,
        validator=Pool(validator) if validator else None,
    )


def _sampling(cfg: Config) -> Dispatch:
    """Admission says how much is asked of samplers; one that fails leaves the run until it is back."""
    far = sys.maxsize
    patience = cfg.deadlines.start + cfg.deadlines.sync
    return replace(SIMPLE, attempts=3, breaker=1, in_flight=far, queue=far, patience=patience)


def cast_judges(cfg: Config, refs: Mapping[str, Any], casting: Casting) -> dict[str, Pool]:
    """The judges that the config uses, by the name under which they give rewards."""
    pools: dict[str, Pool] = {}
    if cfg.uses_judge:
        seats, urls = casting.plan.of("judge"), cfg.judge.urls or (None,) * len(casting.plan.of("judge"))
        handles = [
            casting.cast(Judge, seat, refs.get("judge"), cfg.judge, url, seat.name, revive=True)
            for seat, url in zip(seats, urls, strict=True)
        ]
        pools["judge"] = Pool(handles, name="judge", dispatch=cfg.dispatch)
    if cfg.uses_scalar:
        handles = [
            casting.cast(ScalarJudge, seat, refs["scalar"], cfg.scalar, seat.name, revive=True)
            for seat in casting.plan.of("scalar")
        ]
        pools["scalar"] = Pool(handles, name="scalar judge", dispatch=cfg.dispatch)
    return pools


def cast_raters(cfg: Config, casting: Casting) -> dict[str, Pool]:
    """Rule and users' functions, by the name under which they give rewards."""
    pools = {"rule": Pool(casting.all(Reward, "rule", cfg.reward.rule_name))} if cfg.reward.rule else {}
    for i, spec in enumerate(cfg.reward.fn):
        path, colon, function = spec.rpartition(":")
        if f"fn/{i}" in cfg.reward.weights:
            where = str(Path(path).resolve()) + colon + function
            pools[f"fn/{i}"] = Pool(casting.all(Function, f"fn/{i}", where, cfg.reward))
    return pools


def _cast_teachers(cfg: Config, refs: Mapping[str, Any], casting: Casting) -> dict[str, Pool]:
    if not cfg.uses_teachers:
        return {}
    s, top_k = cfg.sampler, cfg.loss.distill_top_k
    full = cfg.loss.distill_form == "divergence" and not top_k
    pools = {}
    for name, teacher in cfg.teachers.items():
        args = refs[f"teacher/{name}"], teacher.slots, s.temperature, top_k, full, teacher.engine
        handles = casting.all(Teacher, f"teacher/{name}", *args, revive=True)
        pools[name] = Pool(handles, name=f"teacher {name}", dispatch=cfg.dispatch)
    return pools


async def stop_roles(roles: Roles, deadline: float = 10.0) -> None:
    """Ask everyone to end in order; who does not answer is ended with the cluster's processes."""
    calls = [
        *(pool.all("stop", deadline=deadline) for pool in roles.pools()),
        roles.trainer.call("stop", deadline=deadline),
    ]
    await asyncio.gather(*calls, return_exceptions=True)
