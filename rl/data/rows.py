"""Rows of a data file: JSON lines or Parquet, in our layout, verl's, or GSM8K's as it ships.

Columns, in all formats: "prompt" (a text, or a list of chat messages {"role", "content"}), and if there is
one "answer" (the ground truth), "key" (which teacher or judge serves it). The rest is `extra`. Also read:

- GSM8K: without "prompt", a "question" is the prompt, and the key is "gsm8k" if none is given;
- verl: "data_source" is the key, "reward_model": {"ground_truth"} the answer, and the entries of "extra_info"
  go into `extra` by their own names. A row that says a thing twice, and differently, is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = Mapping[str, str]  # {"role", "content"}
ROLES = ("system", "developer", "user", "assistant", "tool")


class DataError(ValueError):
    """A prompt that cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt as it was written, with the place that an error message names."""

    where: str
    text: str  # what a judge reads; of messages: `readable`
    answer: str | None
    key: str
    extra: dict[str, Any]
    messages: tuple[Message, ...] = ()  # empty: a plain prompt
    weight: float = 1.0  # see Prompt


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a .jsonl, .json (an object per line) or .parquet file. Raises DataError naming file and line;
    of Parquet file and row, counted from 0."""
    rows = [make_row(data, where) for data, where in read_columns(path)]
    if not rows:
        raise DataError(f"{path} holds no prompts")
    return rows


def read_columns(path: str | Path) -> Iterator[tuple[Any, str]]:
    """(columns of a row as they stand in the file, its place)."""
    path = Path(path)
    readers = {".jsonl": _json_lines, ".json": _json_lines, ".parquet": _parquet}
    if path.suffix not in readers:
        raise DataError(f"data.file: expected one of {', '.join(readers)}, got {path}")
    if not path.is_file():
        raise DataError(f"data.file: there is no file {path}")
    return readers[path.suffix](path)


def _json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line), f"{path}:{number}"
                except ValueError as error:
                    raise DataError(f"{path}:{number}: not JSON ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{path}: Parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches():
            for data in batch.to_pylist():
                yield data, f"{path} row {number}"
                number += 1
    except ArrowException as error:
        raise DataError(f"{path}: not a Parquet file that can be read ({error})") from None


def make_row(data: Any, where: str) -> Row:
    """One row from its columns; numpy scalars and arrays become Python's own. Raises DataError naming the
    place."""
    if not isinstance(data, Mapping):
        raise DataError(f'{where}: expected an object like {{"prompt": ...}}, got {type(data).__name__}')
    extra: dict[str, Any] = _native(data)
    shipped = "question" in extra and "prompt" not in extra  # GSM8K: {"question", "answer"}
    field = "question" if shipped else "prompt"
    asked = extra.pop(field, None)
    answers, keys = {'"answer"': extra.pop("answer", None)}, {'"key"': extra.pop("key", None)}
    keys['"data_source"'] = extra.pop("data_source", None)
    if isinstance(extra.get("reward_model"), dict):
        answers['"reward_model": {"ground_truth"}'] = extra["reward_model"].pop("ground_truth", None)
        if not extra["reward_model"]:
            del extra["reward_model"]
    if isinstance(extra.get("extra_info"), dict):
        for name, value in extra.pop("extra_info").items():
            extra[name] = _one(where, {f'"{name}"': extra.get(name), f'"extra_info": {{"{name}"}}': value})
    answer = _one(where, {name: _answer(where, name, value) for name, value in answers.items()})
    key = _one(where, {name: _key(where, name, value) for name, value in keys.items()})
    messages = () if isinstance(asked, str) else _messages(where, field, asked)
    text = readable(messages) if messages else asked
    if not text.strip():
        raise DataError(f'{where}: "{field}" must be a text that is not empty, got {text!r}')
    key, weight = key or ("gsm8k" if shipped else ""), _weight(where, extra.pop("weight", None))
    return Row(where, text, answer, key, extra, messages, weight)


def readable(messages: Sequence[Message]) -> str:
    """What a judge reads of a chat: the user's message where there is one, else every turn under its role."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if len(asked) == 1:
        return asked[0]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _messages(where: str, field: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f'{where}: "{field}" must be a text or a list of chat messages, not empty, got {value!r}'
        )
    for place, message in enumerate(value):
        said = f"{where}: message {place} of {field!r}"
        if not isinstance(message, dict):
            raise DataError(f'{said}: expected {{"role", "content"}}, got {message!r}')
        if message.get("role") not in ROLES:
            raise DataError(f"{said}: role must be one of {', '.join(ROLES)}, got {message.get('role')!r}")
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            raise DataError(f"{said}: content must be a text that is not empty, got {content!r}")
        if more := [
            name for name in message if name not in ("role", "content") and message[name] is not None
        ]:
            raise DataError(f"{said}: only role and content are supported, got also {', '.join(more)}")
    if value[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: {field!r} ends with the assistant's message, which is the policy's to write"
        )
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _answer(where: str, name: str, value: Any) -> str | None:
    """A column of integers in which some are missing holds floats: 18.0 is 18."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: {name} must be a text or a number, got {type(value).__name__}")
    exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if exact else value)


def _key(where: str, name: str, value: Any) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be a text, got {value!r}")
    return value or None


def _weight(where: str, value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError(f'{where}: "weight" must be a number >= 0, got {value!r}')
    return float(value)


def _one(where: str, said: Mapping[str, Any]) -> Any:
    """The one value that is given; None: there is none."""
    given = {name: value for name, value in said.items() if value is not None}
    first, *others = given.values() or (None,)
    if any(value != first for value in others):
        told = " but ".join(f"{name} is {value!r}" for name, value in given.items())
        raise DataError(f"{where}: {told}; give one of them, or both the same")
    return first


def _native(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _native(entry) for name, entry in value.items()}
    return [_native(entry) for entry in value] if isinstance(value, list | tuple) else value
