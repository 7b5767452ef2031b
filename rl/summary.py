"""What came of a run, as a person reads it at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.config import Config
from rl.display import Display
from rl.forecast import forecast, has_times, measured


def print_summary(result: Mapping[str, Any], cfg: Config, folder: Path, show: Display) -> None:
    """Held-out truth and judge score before and after, where the time went, where the files lie."""
    before, after = result["before"], result["after"]
    rows = [
        [f"{_NAMES.get(name, name)}", f"{before[name]:.3f}", f"{after[name]:.3f}"]
        for name in after
        if name in before and name != "prompts"
    ]
    show.note("")
    show.table(
        f"{after['prompts']:.0f} held-out problems, one sampled answer each", ["", "before", "after"], rows
    )
    show.note("")
    show.lines("where the time went", _time(result))
    if has_times(result):
        show.note("")
        show.table("by the model of rl/forecast.py", ["", "predicted", "actual"], beside(result, cfg))
        show.note("")
    show.lines("groups", _groups(result, cfg))
    show.lines("files", _files(folder, cfg))


_NAMES = {"truth": "ground-truth accuracy", "judge": "judge's score", "scalar": "scalar judge's score"}


def _time(result: Mapping[str, Any]) -> list[str]:
    idle = ", ".join(f"{name} {100 * share:.0f} %" for name, share in result["idle"].items())
    stages = ", ".join(f"{name.replace('_', ' ')} {s:.2f} s" for name, s in result["stage_s"].items() if s)
    return [
        f"{result['seconds']:.0f} s in all, of which {result['wall_s']:.0f} s for {result['steps']} steps "
        f"({result['tokens_per_s']:,.0f} tokens/s sampled by policy and judge)",
        f"idle: {idle}",
        f"a group's life, on average: {stages}",
    ]


def beside(result: Mapping[str, Any], cfg: Config) -> list[list[str]]:
    """Rows (what, predicted from the service times that this run measured, actual): it tests the model, not
    the machine."""
    steps = result["steps"]
    said = forecast(measured(result, cfg), prompts=cfg.trainer.prompts, max_age=cfg.staleness.max_age)
    idle = said.idle_over(steps)
    return [
        ["seconds per step", f"{said.seconds(steps) / steps:.3f}", f"{result['wall_s'] / steps:.3f}"],
        *(
            [f"{name} idle", f"{100 * idle[name]:.0f} %", f"{100 * share:.0f} %"]
            for name, share in result["idle"].items()
            if name in idle
        ),
        ["mean age", f"{said.age_over(steps):.2f}", f"{result['age_mean']:.2f}"],
    ]


def _groups(result: Mapping[str, Any], cfg: Config) -> list[str]:
    dropped = ", ".join(f"{n} {reason}" for reason, n in result["dropped"].items()) or "none"
    lines = [
        f"{result['trained']} trained of {result['issued']} issued; dropped: {dropped}",
        f"age of the trained samples: mean {result['age_mean']:.2f}, at most {result['age_max']} "
        f"(bound {cfg.staleness.max_age})",
    ]
    if result["stale_length_ratio"]:
        lines.append(
            f"stale groups were {result['stale_length_ratio']:.2f} times as long as the trained ones"
        )
    for name, counted in result["judge_outcomes"].items():
        lines.append(f"{name}: " + ", ".join(f"{n} {kind}" for kind, n in sorted(counted.items())))
    for which, n in result["alarms"].items():
        lines.append(f"alarm {which}: at {n} looks; what it means is said above and in rl/judges/alarms.py")
    return lines


def _files(folder: Path, cfg: Config) -> list[str]:
    files = [
        f"{folder}/  metrics.jsonl, samples.jsonl, calls.jsonl (of judges), ledger.jsonl, config.json, "
        "summary.json"
    ]
    if cfg.checkpoint.every:
        files.append(f"{folder}/checkpoints/  each with policy/, a Hugging Face folder")
    if cfg.log.wandb != "disabled":
        files.append(f"{folder}/wandb/  an offline run is sent with `wandb sync` and its folder")
    return files
