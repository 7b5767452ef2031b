"""From a config to a finished run: check, plan, build, start Ray, run the loop, say what came of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl import checkpoint, plan, summary
from rl.config import Config, ConfigError, route
from rl.data import DataError, Row, Stream, make_prompts, read_jsonl
from rl.display import Display
from rl.ledger import Ledger
from rl.log import RunLog, changes, new_folder
from rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: anew, or at a checkpoint."""

    folder: Path | None = None  # None: a new one
    version: int = 0
    ledger: Ledger = Ledger()
    events: int = 0
    before: dict[str, float] | None = None
    checkpoint: Path | None = None


def launch(cfg: Config, *, only_plan: bool, resume: str | None) -> int:
    """The whole run. Returns the exit code, 0 only at its end. Raises ConfigError for the user's faults."""
    began = time.monotonic()
    with Display(cfg.trainer.steps) as show, ExitStack() as stack:
        try:
            rows = read_rows(cfg)
            for spec in cfg.reward.fn:
                if not Path(spec.rpartition(":")[0]).is_file():
                    raise ConfigError(f"reward.fn: there is no file {spec.rpartition(':')[0]}")
            nodes = local_nodes()
            if cfg.ray.address is not None:
                from rl.actors.cluster import cluster

                nodes = stack.enter_context(cluster(cfg))
            placed = plan.make_plan(cfg, nodes)
            from rl.objective import describe

            show.lines("plan", plan.describe(cfg, placed))
            show.lines("objective", describe(cfg))
            if only_plan:
                return 0
            return _launch(cfg, placed, rows, find_start(cfg, resume, show), show, stack, began)
        except (plan.PlanError, DataError) as error:
            raise ConfigError(str(error)) from None


def local_nodes() -> list[plan.Node]:
    """This machine as the one node of a private cluster."""
    import torch

    return [plan.Node("this machine", float(os.cpu_count() or 1), float(torch.cuda.device_count()))]


def read_rows(cfg: Config) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows), checked for all that can be known without a model."""
    if cfg.data.file is None:
        from rl.demo.tasks import make_prompts as demo_prompts

        train = _rows(demo_prompts(cfg.data.tasks, cfg.data.size, cfg.seed, "train"))
        held_out = _rows(demo_prompts(cfg.data.tasks, cfg.data.held_out, cfg.seed, "held_out"))
    else:
        rows = read_jsonl(cfg.data.file)
        if len(rows) <= cfg.data.held_out:
            raise DataError(
                f"{cfg.data.file} has {len(rows)} prompts; data.held_out ({cfg.data.held_out}) leaves none"
            )
        cut = len(rows) - cfg.data.held_out
        train, held_out = rows[:cut], rows[cut:]
    served = route(cfg) if cfg.uses_teachers else None
    for row in (*train, *held_out):
        if cfg.reward.rule and row.answer is None:
            raise DataError(f"{row.where}: the prompt has no answer, and reward.rule needs one")
        if served is not None and row.key not in served:
            raise DataError(
                f"{row.where}: key {row.key!r} has no teacher; the teachers serve {sorted(served)}"
            )
    return train, held_out


def _rows(problems: list[tuple[str, str, str]]) -> list[Row]:
    return [Row(f"demo problem {text}", text, answer, key, {}) for text, answer, key in problems]


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
    from rl.actors.cluster import Casting, cast_roles, cluster, seated, stop_roles
    from rl.loop import Loop, NothingToTrain
    from rl.roles import RoleError
    from rl.sources import load_bundles, resolve
    from rl.sync import SyncError

    bundles = load_bundles(cfg, resolve(cfg, show), start.checkpoint)
    prompts, held_out = (_encode(cfg, part, bundles) for part in rows)
    folder = start.folder or new_folder(cfg)
    resumed = str(start.checkpoint) if start.checkpoint else None
    if cfg.ray.address is None:
        stack.enter_context(cluster(cfg))
    log = stack.enter_context(RunLog(folder, cfg, version=start.version, events=start.events))
    try:
        group = stack.enter_context(seated(placed, folder.name, cfg.deadlines.start))
        loop = Loop(
            cfg=cfg,
            roles=cast_roles(cfg, bundles, Casting(folder.name, group, placed), start.version),
            stream=Stream(prompts, cfg.seed, cfg.data.shuffle),
            held_out=held_out,
            log=log,
            show=show,
            version=start.version,
            ledger=start.ledger,
            before=start.before,
        )
        show.note(f"starting {len(placed.seats)} actors; the run's files: {folder}")
        result = asyncio.run(_until_done(loop, resumed))
    except (RoleError, SyncError, NothingToTrain) as error:
        show.end_live()
        show.note(f"the run ended: {error}", "bold red")
        if checkpoint.newest(folder, lambda text: None):
            show.note(f"go on from its last checkpoint with --exp {cfg.name} --resume {folder}")
        return 1
    show.end_live()
    asyncio.run(stop_roles(loop.roles))
    result["seconds"] = time.monotonic() - began
    log.summary(result)
    summary.print_summary(result, cfg, folder, show)
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


def _encode(cfg: Config, rows: list[Row], bundles: Mapping[str, Any]) -> list[Prompt]:
    policy = bundles["policy"]
    return make_prompts(
        rows,
        policy.tokenizer,
        needs_answer="reward.rule" if cfg.reward.rule else None,
        keys=route(cfg) if cfg.uses_teachers else None,
        max_prompt=min(policy.cfg.max_len, cfg.trainer.micro_tokens) - cfg.sampler.max_tokens,
    )
