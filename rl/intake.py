"""What the user handed in beside the config: files, prompts, templates, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl import teaching
from rl.config import Config, ConfigError
from rl.data.prompts import DataError, Row, make_prompts, read_rows
from rl.display import Display
from rl.engines.make import Bundle
from rl.rewards.combine import UNANSWERED
from rl.seeds import fold_in
from rl.types import Prompt


def check_files(cfg: Config) -> None:
    """Raises ConfigError where a file of the user's code is not there."""
    named = {
        "reward.fn": cfg.reward.fn,
        "staleness.pick": (cfg.staleness.pick,) if cfg.staleness.pick else (),
    }
    for field, specs in named.items():
        for spec in specs:
            if not Path(spec.rpartition(":")[0]).expanduser().is_file():
                raise ConfigError(f"{field}: there is no file {spec.rpartition(':')[0]}")


def check_templates(cfg: Config, *, has_answers: bool) -> None:
    """Raises ConfigError with every fault of the judges' templates."""
    from rl.judges.templates import check_template

    used = [*([cfg.judge] if cfg.uses_judge else []), *([cfg.scalar] if cfg.uses_scalar else [])]
    faults = [fault for section in used for fault in check_template(section, has_answers)]
    if faults:
        raise ConfigError("\n".join(faults))


def read_data(cfg: Config) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows), checked for all that can be known without a model."""
    data = cfg.data
    if data.file is not None:
        rows = read_rows(data.file)
        if len(rows) <= data.held_out:
            raise DataError(
                f"{data.file} has {len(rows)} prompts; data.held_out ({data.held_out}) leaves none"
            )
        cut = len(rows) - data.held_out
        train, held_out = rows[:cut], rows[cut:]
    elif data.reasoning_gym:
        from rl.data.rows_gym import reasoning_gym_rows

        names, seeds = data.reasoning_gym, (fold_in(cfg.seed, "held out"), fold_in(cfg.seed, "train"))
        held_out = reasoning_gym_rows(names, data.held_out, seeds[0])
        train = reasoning_gym_rows(names, data.size, seeds[1], avoid=(row.text for row in held_out))
    elif data.arithmetic:
        from rl.data.rows_arithmetic import arithmetic_rows

        train = arithmetic_rows(data.arithmetic, data.size, cfg.seed, "train", data.largest)
        held_out = arithmetic_rows(data.arithmetic, data.held_out, cfg.seed, "held_out")
    else:
        from rl.demo.tasks import make_rows

        train = make_rows(data.tasks, data.size, cfg.seed, "train")
        held_out = make_rows(data.tasks, data.held_out, cfg.seed, "held_out")
    for row in (*train, *held_out):
        if needs_answer(cfg) and row.answer is None:
            raise DataError(f"{row.where}: the prompt has no answer, and {needs_answer(cfg)} needs one")
        if cfg.uses_teachers and not teaching.teachers_of(cfg, row.key):
            served = sorted(key for teacher in cfg.teachers.values() for key in teacher.keys)
            raise DataError(f"{row.where}: key {row.key!r} has no teacher; the teachers serve {served}")
    return train, held_out


def needs_answer(cfg: Config) -> str | None:
    """What of the config cannot do without the prompts' answers, for a message."""
    if cfg.reward.rule and cfg.reward.rule_name not in UNANSWERED:
        return "reward.rule"
    used = {"judge": cfg.uses_judge and cfg.judge, "scalar": cfg.uses_scalar and cfg.scalar}
    return next((f"{n}.template" for n, s in used.items() if s and "{reference}" in s.template), None)


def encode(cfg: Config, rows: Sequence[Row], policy: Bundle, show: Display) -> list[Prompt]:
    """The rows as the policy reads them. Says how many were cut or left out."""
    prompts, counts = make_prompts(
        rows,
        policy.tokenizer,
        needs_answer=None,  # that, and the keys, `read_data` has seen to before any model was there
        keys=None,
        max_prompt=min(policy.cfg.max_len, cfg.trainer.micro_tokens) - cfg.sampler.max_tokens,
        too_long=cfg.data.too_long,
        chat=cfg.data.chat,
    )
    if counts.cut or counts.dropped:
        show.note(
            f"{counts.used} prompts used, {counts.cut} of them cut to fit, {counts.dropped} left out as too "
            f"long (data.too_long {cfg.data.too_long})",
            "yellow",
        )
    return prompts
