"""Answers that somebody has labelled right or wrong: what judges and rewards are measured against."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.data.rows import DataError, Row, make_row, read_columns
from rl.demo.critic import draw_candidate
from rl.demo.tasks import is_correct, make_prompts
from rl.types import Prompt

GROUP = 4  # the demo's answers to one problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """One answer. `prompt.ids` is empty: judges read texts."""

    where: str  # file and line, and whose answer if the line has several
    prompt: Prompt
    text: str
    label: float  # 1 right, 0 wrong; between them: in part
    key: str  # whose answer it is, or the prompt's key: the report has a line for each


def read_labelled(path: str | Path) -> list[Labelled]:
    """Rows of {"prompt", "completion", "label", "answer"?, "key"?, ...more}, from JSON lines or Parquet.

    completion: the answer to be judged, a text; label: true or false, or a number in [0, 1]; the rest as in
    rl/rows.py, answer being the reference. GSM8K's example solutions are read as they ship: a "question", its
    "ground_truth", and per model a {"solution", "is_correct"}; the key is the model's name. Raises DataError
    naming file and line, of Parquet file and row, counted from 0.
    """
    found = [labelled for row, where in read_columns(path) for labelled in _read(_object(row, where), where)]
    if not found:
        raise DataError(f"{path} holds no labelled answers")
    return found


def demo_labelled(tasks: Sequence[str], n: int, seed: int) -> list[Labelled]:
    """n answers to held-out problems of the demo's tasks, GROUP to each, right or wrong as a policy's."""
    rng = random.Random(f"{seed}/labelled/{'+'.join(tasks)}")
    problems = make_prompts(tasks, -(-n // GROUP), seed, "held_out")
    found = []
    for i in range(n):
        problem, answer, key = problems[i // GROUP]
        prompt, text = Prompt(ids=(), text=problem, key=key, answer=answer), draw_candidate(problem, rng)
        label = float(is_correct(problem, text))
        found.append(Labelled(where=f"demo answer {i}", prompt=prompt, text=text, label=label, key=key))
    return found


# ── Rows ──────────────────────────────────────────────────────────────────────────────────────────


def _read(data: dict[str, Any], where: str) -> Iterator[Labelled]:
    models = {name: said for name, said in data.items() if isinstance(said, dict) and "is_correct" in said}
    if "question" in data and models and "completion" not in data:
        shipped = {"question": data["question"], "answer": _text(data, "ground_truth", where)}
        prompt = _prompt(make_row(shipped, where))
        for name, said in models.items():
            of = f"{where} {name}"
            text, label = _text(said, "solution", of), _label(said, "is_correct", of)
            yield Labelled(where=of, prompt=prompt, text=text, label=label, key=name)
    else:
        text, label = _text(data, "completion", where), _label(data, "label", where)
        rest = {name: value for name, value in data.items() if name not in ("completion", "label")}
        prompt = _prompt(make_row(rest, where))
        yield Labelled(where=where, prompt=prompt, text=text, label=label, key=prompt.key)


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object, got {type(row).__name__}")
    return row


def _prompt(row: Row) -> Prompt:
    return Prompt(ids=(), text=row.text, key=row.key, answer=row.answer, extra=row.extra)


def _text(data: dict[str, Any], name: str, where: str) -> str:
    text = data.get(name)
    if not isinstance(text, str):
        raise DataError(f'{where}: "{name}" must be a text, got {text!r}')
    return text


def _label(data: dict[str, Any], name: str, where: str) -> float:
    label = data.get(name)
    if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
        raise DataError(f'{where}: "{name}" must be true or false, or a number in [0, 1], got {label!r}')
    return float(label)
