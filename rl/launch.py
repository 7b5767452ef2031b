"""From a config to a finished run: check, plan, build, start Ray, run the loop, say what came of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rl import checkpoint, intake, plan, summary
from rl.config import Config, ConfigError
from rl.data.prompts import DataError, Row, Stream, fingerprint
from rl.display import Display
from rl.ledger import Ledger
from rl.log import RunLog, changes, new_folder
from rl.rewards.functions import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: anew, or at a checkpoint."""

    folder: Path | None = None  # None: a new one
    version: int = 0
    ledger: Ledger = Ledger()
    events: int = 0
    before: dict[str, float] | None = None
    canaries: Sequence[str] = ()
    watched: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None  # fingerprint of the prompts
    checkpoint: Path | None = None


def launch(cfg: Config, *, only_plan: bool, resume: str | None) -> int:
    """The whole run. Returns the exit code, 0 only at its end. Raises ConfigError for the user's faults."""
    began = time.monotonic()
    with Display(cfg.trainer.steps) as show, ExitStack() as stack:
        try:
            check_stream(cfg)
            intake.check_files(cfg)
            rows = intake.read_data(cfg)
            intake.check_templates(
                cfg, has_answers=all(row.answer is not None for part in rows for row in part)
            )
            nodes = local_nodes()
            if cfg.ray.address is not None:
                from rl.actors.cluster import cluster

                nodes = stack.enter_context(cluster(cfg))
            placed = plan.make_plan(cfg, nodes, prompts=Counter(row.key for row in rows[0]))
            from rl.objective import describe

            show.lines("plan", plan.describe(cfg, placed))
            show.lines("objective", describe(cfg))
            if only_plan:
                return 0
            return _launch(cfg, placed, rows, find_start(cfg, resume, show), show, stack, began)
        except (plan.PlanError, DataError) as error:
            raise ConfigError(str(error)) from None


def check_stream(cfg: Config) -> None:
    """Raises ConfigError for trainer.stream with a loss that looks at the whole step."""
    from rl.terms import unstreamable

    if cfg.trainer.stream and (reasons := unstreamable(cfg)):
        raise ConfigError("\n".join(f"trainer.stream: {reason}; set it to False" for reason in reasons))


def local_nodes() -> list[plan.Node]:
    """This machine as the one node of a private cluster."""
    import torch

    return [plan.Node("this machine", float(os.cpu_count() or 1), float(torch.cuda.device_count()))]


def find_start(cfg: Config, resume: str | None, show: Display) -> Start:
    """A new folder, or the newest complete checkpoint of the run to resume ("newest": the latest run of this
    name)."""
    if resume is None:
        return Start()
    folder = Path(resume).resolve()
    if resume == "newest":
        runs = sorted(Path(cfg.log.dir).resolve().glob(f"{cfg.name}-*"), key=lambda p: p.stat().st_mtime)
        if not runs:
            raise ConfigError(f"--resume: no run of {cfg.name} in {cfg.log.dir}")
        folder = runs[-1]
    if not folder.is_dir():
        raise ConfigError(f"--resume: there is no run folder {folder}")
    for change in changes(folder, cfg):
        show.note(f"changed since the run began: {change}", "yellow")
    found = checkpoint.newest(folder, lambda text: show.note(text, "yellow"))
    if found is None:
        show.note(f"{folder} has no complete checkpoint: starting it anew", "yellow")
        return Start(folder=folder)
    version, ledger, extra = checkpoint.read(found)
    show.note(f"resuming {folder.name} at step {version}")
    return Start(folder=folder, version=version, ledger=ledger, checkpoint=found, **extra)


def _launch(
    cfg: Config,
    placed: plan.Plan,
    rows: tuple[list[Row], list[Row]],
    start: Start,
    show: Display,
    stack: ExitStack,
    began: float,
) -> int:
    from models.flops import forward_flops
    from rl.actors.cluster import Casting, cast_roles, cluster, seated, stop_roles
    from rl.harvest import NothingToTrain, PickError
    from rl.loop import Loop
    from rl.roles import RoleError
    from rl.sources import load_bundles, resolve
    from rl.sync import SyncError

    bundles = load_bundles(cfg, resolve(cfg, show), start.checkpoint)
    prompts, held_out = (intake.encode(cfg, part, bundles["policy"], show) for part in rows)
    data = fingerprint(rows[0])
    if start.data is not None and start.data != data:
        show.note("changed since the run began: the prompts themselves, or their order", "yellow")
    lengths = [len(prompt.ids) for prompt in prompts]
    folder = start.folder or new_folder(cfg)
    resumed = str(start.checkpoint) if start.checkpoint else None
    if cfg.ray.address is None:
        stack.enter_context(cluster(cfg))
    log = stack.enter_context(RunLog(folder, cfg, version=start.version, events=start.events))
    try:
        group = stack.enter_context(seated(placed, folder.name, cfg.deadlines.start))
        loop = Loop(
            cfg=cfg,
            roles=cast_roles(cfg, bundles, Casting(folder.name, group, placed), start.version, lengths),
            stream=Stream(prompts, cfg.seed, cfg.data.shuffle),
            held_out=held_out,
            log=log,
            show=show,
            version=start.version,
            ledger=start.ledger,
            before=start.before,
            canaries=list(start.canaries),
            watched=dict(start.watched),
            data=data,
            pick=load(cfg.staleness.pick) if cfg.staleness.pick else None,
            cost=partial(forward_flops, bundles["policy"].cfg),
        )
        show.note(f"starting {len(placed.seats)} actors; the run's files: {folder}")
        result = asyncio.run(_until_done(loop, resumed))
    except (RoleError, SyncError, NothingToTrain, PickError) as error:
        show.end_live()
        show.note(f"the run ended: {error}", "bold red")
        if checkpoint.newest(folder, lambda text: None):
            show.note(f"go on from its last checkpoint with --exp {cfg.name} --resume {folder}")
        return 1
    show.end_live()
    result["seconds"] = time.monotonic() - began
    log.summary(result)
    summary.print_summary(result, cfg, folder, show)
    asyncio.run(stop_roles(loop.roles))  # engines may take their time
    return 0 if result["version"] == cfg.trainer.steps else 130


async def _until_done(loop: Any, resume: str | None) -> dict[str, Any]:
    """Ctrl-C or SIGTERM ends the run after the step under way, with a checkpoint and a summary."""

    def stop() -> None:
        loop.stop = True
        loop.show.note("ending after this step (once more to end at once)", "yellow")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await loop.run(resume)
