"""python run.py --exp NAME [--section.field VALUE ...] [--plan] [--resume [DIR]]"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import tyro

from rl.check import check
from rl.cli import normalise, take
from rl.config import Config, ConfigError

EXPERIMENTS = Path(__file__).parent / "experiments"


def experiment(name: str | None) -> Config:
    names = sorted(p.stem for p in EXPERIMENTS.glob("[!_]*.py"))
    if name not in names:
        said = "which experiment?" if name is None else f"there is no experiment {name!r}"
        raise ConfigError(f"{said} --exp takes one of: {', '.join(names)}")
    return import_module(f"experiments.{name}").CONFIG


def parse(argv: list[str]) -> tuple[Config, bool, str | None]:
    """(config, only print the plan, run to resume)."""
    helps = [a for a in argv if a in ("-h", "--help")]
    name, rest = take(argv, "--exp")
    if helps and name is None:
        names = ", ".join(sorted(p.stem for p in EXPERIMENTS.glob("[!_]*.py")))
        print(f"{__doc__}\n\nexperiments: {names}\npython run.py --exp NAME --help shows its values")
        sys.exit(0)
    config = experiment(name)
    resume, rest = take(rest, "--resume", bare="newest")
    only_plan, rest = "--plan" in rest, [a for a in rest if a != "--plan"]
    cfg = tyro.cli(
        Config, args=normalise(rest, config), default=config, prog=f"run.py --exp {name}",
        config=(tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff),
    )  # fmt: skip
    check(cfg)
    return cfg, only_plan, resume


def main(argv: list[str]) -> int:
    try:
        cfg, only_plan, resume = parse(argv)
        from rl.launch import launch  # torch and Ray, not needed for --help

        return launch(cfg, only_plan=only_plan, resume=resume)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
