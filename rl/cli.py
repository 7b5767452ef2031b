"""The command line before tyro sees it: `--exp NAME` anywhere, booleans and tuples as people and sweeps
write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_origin, get_type_hints

from rl.config import ConfigError

# A section's name alone names the field that people mean by it.
SHORT = {"--data": "--data.file", "--judge": "--judge.model", "--scalar": "--scalar.model",
         "--policy": "--policy.model"}  # fmt: skip
# What others have and people look for here, and where it is.
ELSEWHERE = {"--reward.kl": "there is no KL in the reward, it is a term of the objective: set --loss.kl and "
                            "--loss.kl-form"}  # fmt: skip
_TRUE, _FALSE = {"true", "1", "yes"}, {"false", "0", "no"}


def take(
    argv: Sequence[str], flag: str, *, default: str | None = None, bare: str | None = None
) -> tuple[str | None, list[str]]:
    """The value of `flag VALUE` or `flag=VALUE`, wherever it stands, and the other arguments.

    bare: the value of the flag without one; None: a value is required. Raises ConfigError if it is missing.
    """
    rest, value = [], default
    queue = list(argv)
    while queue:
        arg = queue.pop(0)
        name, equals, attached = arg.partition("=")
        if name != flag:
            rest.append(arg)
        elif equals:
            value = attached
        elif queue and not queue[0].startswith("--"):
            value = queue.pop(0)
        elif bare is not None:
            value = bare
        else:
            raise ConfigError(f"{flag} needs a value")
    return value, rest


def normalise(argv: Sequence[str], config: Any) -> list[str]:
    """Arguments in the one spelling that tyro takes with FlagConversionOff.

    Booleans: --a.b, --a.no-b, --a.b False, --a.b=False become --a.b True|False (wandb's agent writes
    --a.b=True).
    Tuples: --a.b=(1, 2), --a.b "[1, 2]" become --a.b 1 2. Underscores and hyphens are the same.
    Short names (SHORT) become whole ones.
    Raises ConfigError for a boolean that is neither.
    """
    kinds = {_key(path): kind for path, kind in leaves(config)}
    out: list[str] = []
    queue = list(argv)
    while queue:
        arg = queue.pop(0)
        name, equals, attached = arg.partition("=")
        if name in ELSEWHERE:
            raise ConfigError(f"{name}: {ELSEWHERE[name]}")
        name = SHORT.get(name, name)
        arg = name + equals + attached
        key = _key(name.removeprefix("--"))
        section, _, last = key.rpartition(".")
        positive = f"{section}.{last.removeprefix('no-')}".lstrip(".")
        if not name.startswith("--"):
            out.append(arg)
        elif kinds.get(key) is bool:
            follows = bool(queue) and queue[0].lower() in _TRUE | _FALSE
            out += [name, _boolean(name, attached if equals else queue.pop(0) if follows else "true")]
        elif last.startswith("no-") and kinds.get(positive) is bool and not equals:
            out += [f"--{positive}", "False"]
        elif kinds.get(key) is tuple and (attached or (queue and queue[0][:1] in "([")):
            text = attached if equals else queue.pop(0)
            out += [
                name,
                *(part.strip().strip("'\"") for part in text.strip("()[] ").split(",") if part.strip()),
            ]
        else:
            out.append(arg)
    return out


def given(args: Sequence[str]) -> set[str]:
    """Dotted names of the fields that normalised arguments set."""
    return {a.partition("=")[0].removeprefix("--").replace("-", "_") for a in args if a.startswith("--")}


def _key(name: str) -> str:
    return name.replace("_", "-")


def _boolean(name: str, text: str) -> str:
    if text.lower() in _TRUE | _FALSE:
        return str(text.lower() in _TRUE)
    raise ConfigError(f"{name} is a boolean: True or False, got {text!r}")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, type]]:
    """(dotted name, bool | tuple | object) of every field that a flag can set."""
    hints = get_type_hints(type(config))
    for f in fields(config):
        value, path = getattr(config, f.name), f"{prefix}{f.name}"
        if is_dataclass(value):
            yield from leaves(value, path + ".")
        elif isinstance(value, dict):
            for name, entry in value.items():
                yield from (
                    leaves(entry, f"{path}.{name}.") if is_dataclass(entry) else [(f"{path}.{name}", object)]
                )
        else:
            hint = hints[f.name]
            yield (
                path,
                bool
                if hint is bool or isinstance(value, bool) or bool in getattr(hint, "__args__", ())
                else (tuple if get_origin(hint) is tuple else object),
            )
