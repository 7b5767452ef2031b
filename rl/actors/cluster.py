"""Ray: join or start a cluster, seat every actor where the plan says, and hand the controller its roles."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl.actors.judge import Judge
from rl.actors.reward import Function, Reward
from rl.actors.rollout import Rollout
from rl.actors.teacher import Teacher
from rl.actors.trainer import TrainerRank
from rl.config import Config
from rl.engines.make import Bundle
from rl.plan import Node, Plan, Seat
from rl.roles import Handle, Pool, RoleError, Roles, TrainerGroup
from rl.types import SamplingParams

ROOT = Path(__file__).parents[2]
CALLS = 4096  # calls that one engine actor may have under way; the controller's admission keeps far below it


@dataclass(frozen=True, slots=True)
class Remote:
    """A replica that is a Ray actor."""

    name: str
    actor: Any

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

    def cast(self, cls: type, seat: Seat, *args: Any, concurrent: bool = True) -> Handle:
        options: dict[str, Any] = {
            "name": f"{self.run_id}/{seat.name}",
            "num_cpus": seat.cpus,
            "num_gpus": seat.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.plan.seats.index(seat)
            ),
            **({"max_concurrency": CALLS} if concurrent else {}),
        }
        return Remote(seat.name, ray.remote(cls).options(**options).remote(*args))

    def all(self, cls: type, role: str, *args: Any) -> list[Handle]:
        return [self.cast(cls, seat, *args) for seat in self.plan.of(role)]


def cast_roles(cfg: Config, bundles: Mapping[str, Bundle], casting: Casting, version: int) -> Roles:
    """Every actor of the run. Constructors are cheap; `start_roles` brings them up.

    bundles: "policy", "judge", and "teacher/<name>" for each teacher; the policy of a resumed run is the
    checkpoint's.
    """
    refs = {name: ray.put(bundle) for name, bundle in bundles.items()}
    s = cfg.sampler
    params = SamplingParams(temperature=s.temperature, max_tokens=s.max_tokens)
    trainer = [
        casting.cast(TrainerRank, seat, refs["policy"], cfg, rank, version, concurrent=False)
        for rank, seat in enumerate(casting.plan.of("trainer"))
    ]
    calls = cfg.reward.fn_workers, cfg.reward.fn_deadline
    full = cfg.loss.distill_form == "divergence" and not cfg.loss.distill_top_k
    teachers = {
        name: Pool(casting.all(Teacher, f"teacher/{name}", refs[f"teacher/{name}"], teacher.slots,
        s.temperature,
                               cfg.loss.distill_top_k, full))
        for name, teacher in cfg.teachers.items() if cfg.uses_teachers
    }  # fmt: skip
    return Roles(
        trainer=TrainerGroup(trainer),
        sampler=Pool(casting.all(Rollout, "sampler", refs["policy"], params, s.slots, version)),
        judge=Pool(casting.all(Judge, "judge", refs["judge"], cfg.judge)) if cfg.uses_judge else None,
        rule=Pool(casting.all(Reward, "rule", cfg.reward.rule_name)) if cfg.reward.rule else None,
        functions={
            f"fn/{i}": Pool(
                casting.all(Function, f"fn/{i}", str(Path(path).resolve()) + colon + name, *calls)
            )
            for i, (path, colon, name) in enumerate(spec.rpartition(":") for spec in cfg.reward.fn)
            if f"fn/{i}" in cfg.reward.weights
        },
        teachers=teachers,
        reference=Pool(casting.all(Teacher, "reference", refs["reference"], s.slots, s.temperature))
        if cfg.uses_reference
        else None,
    )


async def stop_roles(roles: Roles, deadline: float = 10.0) -> None:
    """Ask everyone to end in order; who does not answer is ended with the cluster's processes."""
    pools = [*roles.engines().values(), *roles.producers().values()]
    calls = [
        *(pool.all("stop", deadline=deadline) for pool in pools),
        roles.trainer.call("stop", deadline=deadline),
    ]
    await asyncio.gather(*calls, return_exceptions=True)
