"""python run.py --exp NAME [--section.field VALUE ...] [--plan] [--resume [DIR]]"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import tyro

from rl import legacy
from rl.check import check
from rl.cli import give_way, given, normalise, take
from rl.config import Config, ConfigError

EXPERIMENTS = Path(__file__).parent / "experiments"


def experiment(name: str | None) -> ModuleType:
    names = sorted(p.stem for p in EXPERIMENTS.glob("[!_]*.py"))
    if name not in names:
        said = "which experiment?" if name is None else f"there is no experiment {name!r}"
        raise ConfigError(f"{said} --exp takes one of: {', '.join(names)}")
    return import_module(f"experiments.{name}")


def parse(argv: list[str]) -> tuple[Config, bool, str | None, str]:
    """(config, only print the plan, run to resume, what to do: "train" or the experiment's own RUN)."""
    helps = [a for a in argv if a in ("-h", "--help")]
    name, rest = take(argv, "--exp")
    if helps and name is None:
        names = ", ".join(sorted(p.stem for p in EXPERIMENTS.glob("[!_]*.py")))
        print(f"{__doc__}\n\nexperiments: {names}\npython run.py --exp NAME --help shows its values")
        sys.exit(0)
    module = experiment(name)
    config: Config = module.CONFIG
    resume, rest = take(rest, "--resume", bare="newest")
    only_plan, rest = "--plan" in rest, [a for a in rest if a != "--plan"]
    args = normalise(rest, config)
    cfg = tyro.cli(
        Config, args=args, default=give_way(config, given(args)), prog=f"run.py --exp {name}",
        config=(tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff),
    )  # fmt: skip
    if cfg.reward.legacy is not None:
        cfg, report = legacy.merge(cfg, legacy.read(cfg.reward.legacy), given(args))
        print("\n".join((f"read from {cfg.reward.legacy}", *("  " + line for line in report))))
    check(cfg)
    return cfg, only_plan, resume, getattr(module, "RUN", "train")


def main(argv: list[str]) -> int:
    try:
        cfg, only_plan, resume, task = parse(argv)
        if task == "judge_eval":
            from rl.exam.examine import examine

            return examine(cfg, only_plan=only_plan)
        from rl.launch import launch  # torch and Ray, not needed for --help

        return launch(cfg, only_plan=only_plan, resume=resume)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
