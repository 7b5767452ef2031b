"""Prompts: from a JSONL file or a list, checked line by line before anything starts; an ordinal names one
for ever."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl.seeds import fold_in
from rl.types import Prompt


class DataError(ValueError):
    """A prompt that cannot be used; the message names file and line."""


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt as it was written, with the place that an error message names."""

    where: str
    text: str
    answer: str | None
    key: str
    extra: dict[str, Any]


def read_jsonl(path: str | Path) -> list[Row]:
    """Rows of {"prompt": text, "answer"?: text, "key"?: text, ...more}. GSM8K is read as it ships: without
    "prompt", a "question" is the prompt, and the key is "gsm8k" if none is given. Raises DataError naming
    file and line."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"data.file: there is no file {path}")
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_row(line, f"{path}:{number}"))
    if not rows:
        raise DataError(f"{path} holds no prompts")
    return rows


def _row(line: str, where: str) -> Row:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise DataError(f'{where}: expected an object like {{"prompt": ...}}, got {type(data).__name__}')
    shipped = "question" in data and "prompt" not in data  # GSM8K: {"question", "answer"}
    field, key = ("question", "gsm8k") if shipped else ("prompt", "")
    text, answer, key = data.pop(field, None), data.pop("answer", None), data.pop("key", key)
    if not isinstance(text, str) or not text:
        raise DataError(f'{where}: "{field}" must be a text that is not empty, got {text!r}')
    if answer is not None and not isinstance(answer, str | int | float):
        raise DataError(f'{where}: "answer" must be a text or a number, got {type(answer).__name__}')
    if not isinstance(key, str):
        raise DataError(f'{where}: "key" must be a text, got {key!r}')
    return Row(where, text, None if answer is None else str(answer), key, data)


def make_prompts(
    rows: Iterable[Row],
    encoder: Encoder,
    *,
    needs_answer: str | None,
    keys: Iterable[str] | None,
    max_prompt: int,
) -> list[Prompt]:
    """Encoded prompts. Raises DataError for the first row that the run could not use.

    Args:
      needs_answer: what needs an answer (for the message), or None.
      keys: the keys that have a teacher, or None where no teacher is asked.
      max_prompt: tokens that a prompt may have, so that the answer still fits into the model.
    """
    served = None if keys is None else set(keys)
    prompts = []
    for row in rows:
        if needs_answer and row.answer is None:
            raise DataError(f"{row.where}: the prompt has no answer, and {needs_answer} needs one")
        if served is not None and row.key not in served:
            raise DataError(
                f"{row.where}: key {row.key!r} has no teacher; the teachers serve {sorted(served)}"
            )
        try:
            ids = tuple(encoder.encode(row.text))
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from None
        if not 0 < len(ids) <= max_prompt:
            raise DataError(
                f"{row.where}: the prompt has {len(ids)} tokens; 1 to {max_prompt} leave room for an answer"
            )
        prompts.append(Prompt(ids=ids, text=row.text, key=row.key, answer=row.answer, extra=row.extra))
    return prompts


@dataclass(slots=True)
class Stream:
    """Ordinal → prompt, a function of the seed alone: nothing to save, nothing to skip after a resume."""

    prompts: Sequence[Prompt]
    seed: int
    shuffle: bool = True
    _epoch: int = -1
    _order: Sequence[int] = ()

    def __getitem__(self, ordinal: int) -> Prompt:
        epoch, place = divmod(ordinal, len(self.prompts))
        if epoch != self._epoch:
            order = list(range(len(self.prompts)))
            if self.shuffle:
                random.Random(fold_in(self.seed, "order", epoch)).shuffle(order)
            self._epoch, self._order = epoch, order
        return self.prompts[self._order[place]]
