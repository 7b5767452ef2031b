"""The command line before tyro sees it: `--exp NAME` anywhere, booleans and tuples as people and sweeps
write them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_origin, get_type_hints

from rl.config import Config, ConfigError, Data

# A section's name alone names the field that people mean by it.
SHORT = {"--data": "--data.file", "--judge": "--judge.model", "--scalar": "--scalar.model",
         "--policy": "--policy.model"}  # fmt: skip
# What others have and people look for here, and where it is.
ELSEWHERE = {"--reward.kl": "there is no KL in the reward, it is a term of the objective: set --loss.kl and "
                            "--loss.kl-form"}  # fmt: skip
# Of prompts, each with what is said of it alone. A run has one, or the demo's.
SOURCES = {"file": (), "reasoning_gym": (), "arithmetic": ("largest",)}
_TRUE, _FALSE, _NONE = {"true", "1", "yes"}, {"false", "0", "no"}, {"none"}
_BRACKETS = {"(": ")", "[": "]"}


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
    --a.b=True). None stays, for fields that may be None.
    Tuples: --a.b=(1, 2), --a.b "[1, 2]" become --a.b 1 2; text with commas stands in quotes within the
    brackets. Underscores and hyphens are the same. Short names (SHORT) become whole ones.
    Raises ConfigError for a boolean that is neither, a section that is given a value, and a teacher that the
    experiment does not have.
    """
    kinds = {_key(path): kind for path, kind in leaves(config)}
    teachers = sorted(getattr(config, "teachers", ()))
    out: list[str] = []
    queue = list(argv)
    while queue:
        arg = queue.pop(0)
        name, equals, attached = arg.partition("=")
        if name in ELSEWHERE:
            raise ConfigError(f"{name}: {ELSEWHERE[name]}")
        if name.startswith("--"):
            _refuse(name, attached if equals else next(iter(queue), ""), kinds, teachers)
        name = SHORT.get(name, name)
        arg = name + equals + attached
        key = _key(name.removeprefix("--"))
        section, _, last = key.rpartition(".")
        positive = f"{section}.{last.removeprefix('no-')}".lstrip(".")
        if not name.startswith("--"):
            out.append(arg)
        elif kinds.get(key) is bool:
            follows = bool(queue) and queue[0].lower() in _TRUE | _FALSE | _NONE
            out += [name, _boolean(name, attached if equals else queue.pop(0) if follows else "true")]
        elif last.startswith("no-") and kinds.get(positive) is bool and not equals:
            out += [f"--{positive}", "False"]
        elif kinds.get(key) is tuple and (equals or (queue and _bracketed(queue[0]))):
            out += [name, *_elements(attached if equals else queue.pop(0))]
        else:
            out.append(arg)
    return out


def given(args: Sequence[str]) -> set[str]:
    """Dotted names of the fields that normalised arguments set."""
    return {a.partition("=")[0].removeprefix("--").replace("-", "_") for a in args if a.startswith("--")}


def give_way(config: Config, named: set[str]) -> Config:
    """The experiment without its source of prompts where the command line names another. named: `given`."""
    if not any(f"data.{source}" in named for source in SOURCES):
        return config
    others = [(source, *own) for source, own in SOURCES.items() if f"data.{source}" not in named]
    blank = {k: getattr(Data(), k) for fields in others for k in fields if f"data.{k}" not in named}
    return replace(config, data=replace(config.data, **blank))


def _key(name: str) -> str:
    return name.replace("_", "-")


def _refuse(name: str, value: str, kinds: Mapping[str, type], teachers: Sequence[str]) -> None:
    """Raises ConfigError where a value is no field's: what a nested sweep writes, or a teacher's name."""
    key = _key(name.removeprefix("--"))
    first, _, rest = key.partition(".")
    fields_of = [k for k in kinds if k.startswith(key + ".")]
    if key not in kinds and (value[:1] == "{" or (fields_of and name not in SHORT)):
        said = "takes no dictionary" if value[:1] == "{" else "is a section, which takes no value"
        such = f", as --{fields_of[0]}" if fields_of else ""
        raise ConfigError(f"{name} {said}: name each of its fields with dots{such}")
    teacher = rest.partition(".")[0]
    if first == "teachers" and teacher and teacher not in map(_key, teachers):
        has = f"the teachers {', '.join(teachers)}" if teachers else "no teachers"
        raise ConfigError(f"{name}: this experiment has {has}; others are added in a file of experiments/")


def _bracketed(text: str) -> bool:
    text = text.strip()
    return bool(text) and text[-1] == _BRACKETS.get(text[0])


def _elements(text: str) -> list[str]:
    """Of a tuple or list as Python writes it, or of words in brackets; other text is one element."""
    text = text.strip()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # words without quotes
        value = None
    if isinstance(value, list | tuple):
        return [str(element) for element in value]
    if not _bracketed(text):
        words = [text]
    else:
        words = text[1:-1].split(",") if value is None else [str(value)]
    return [word.strip() for word in words if word.strip()]


def _boolean(name: str, text: str) -> str:
    if text.lower() in _NONE:
        return "None"
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
