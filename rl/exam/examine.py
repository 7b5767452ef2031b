"""`--exp judge_eval`: judges and rewards alone, on answers that somebody has labelled. Nothing is trained."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from rl import intake, plan
from rl.config import Config, ConfigError
from rl.data.prompts import DataError
from rl.display import Display
from rl.exam.judge_eval import run
from rl.exam.labelled import Labelled, demo_labelled, read_labelled
from rl.log import new_folder


def examine(cfg: Config, *, only_plan: bool) -> int:
    """Returns the exit code, 0 only at its end. Raises ConfigError for the user's faults."""
    from rl.launch import local_nodes

    with Display(0) as show, ExitStack() as stack:
        try:
            intake.check_files(cfg)
            answers = read_answers(cfg)
            intake.check_templates(cfg, has_answers=all(a.prompt.answer is not None for a in answers))
            nodes = local_nodes()
            if cfg.ray.address is not None:
                from rl.actors.cluster import cluster

                nodes = stack.enter_context(cluster(cfg))
            placed = plan.make_plan(cfg, nodes, only=cfg.reward.weights)
        except (plan.PlanError, DataError) as error:
            raise ConfigError(str(error)) from None
        show.lines("plan", plan.describe(cfg, placed))
        if only_plan:
            return 0
        return _examine(cfg, placed, answers, show, stack)


def read_answers(cfg: Config) -> list[Labelled]:
    """Those of data.file, or the demo's own."""
    if cfg.data.file is None:
        return demo_labelled(cfg.data.tasks, cfg.data.held_out, cfg.seed)
    return read_labelled(cfg.data.file)


def _examine(
    cfg: Config, placed: plan.Plan, answers: list[Labelled], show: Display, stack: ExitStack
) -> int:  # fmt: skip
    import ray

    from rl.actors.cluster import Casting, cast_judges, cast_raters, cluster, seated
    from rl.rewards.producers import make_producers
    from rl.roles import RoleError
    from rl.sources import load_bundles, resolve

    bundles = load_bundles(cfg, resolve(cfg, show, only=("judge", "scalar")), None)
    if cfg.ray.address is None:
        stack.enter_context(cluster(cfg))
    folder = new_folder(cfg)
    try:
        group = stack.enter_context(seated(placed, folder.name, cfg.deadlines.start))
        casting = Casting(folder.name, group, placed)
        refs = {name: ray.put(bundle) for name, bundle in bundles.items()}
        judges, raters = cast_judges(cfg, refs, casting), cast_raters(cfg, casting)
        producers = make_producers(cfg, judges, raters)
        pools = [*judges.values(), *raters.values()]

        async def all_of_it() -> None:
            await asyncio.gather(*(pool.all("start", deadline=cfg.deadlines.start) for pool in pools))
            try:
                await run(cfg, producers, answers, show, folder)
            finally:
                await asyncio.gather(*(pool.each("stop", deadline=10.0) for pool in pools))

        asyncio.run(all_of_it())
    except RoleError as error:
        show.note(f"the evaluation ended: {error}", "bold red")
        return 1
    return 0
