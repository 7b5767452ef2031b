"""Users' reward functions: found in a file, called in either signature, read as typed outcomes.

Nothing of a user's runs in the controller: function_pool.py calls it in processes that can be killed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import reprlib
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from numbers import Complex, Real
from pathlib import Path
from typing import Any

from rl.types import Abstain, Outcome, ParseFail, Prompt, Score

Metrics = dict[str, float | str | bool]
Rated = tuple[Outcome, Metrics]

TEXT = 4096  # characters of a text metric that are kept


def load(spec: str) -> Callable[..., Any]:
    """The function that "path/to/file.py:name" names.

    The file is run anew, under a module name of its own, with its folder first on the import path. Raises
    ValueError if there is no such file or function; what the file itself raises gets a note naming it.
    """
    where, colon, name = spec.rpartition(":")
    path = Path(where).expanduser().resolve()
    if not colon or not name or path.suffix != ".py":
        raise ValueError(f"load: expected path/to/file.py:name, got {spec!r}")
    if not path.is_file():
        raise ValueError(f"load: there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module_name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None and found.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        error.add_note(f"while importing {path}")
        raise
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and v.__module__ == module_name]
        raise ValueError(f"load: no function {name!r} in {path}; it has {', '.join(own) or 'none'}")
    return function


def _ours(prompt: Prompt, text: str) -> dict[str, Any]:
    return {"prompt": prompt.text, "completion": text, "answer": prompt.answer, "extra": dict(prompt.extra)}


def _verl(prompt: Prompt, text: str) -> dict[str, Any]:
    return {
        "data_source": prompt.key,
        "solution_str": text,
        "ground_truth": prompt.answer,
        "extra_info": dict(prompt.extra),
    }


def adapt(
    function: Callable[..., Any], /, offered: Mapping[str, Any] | None = None, **fixed: Any
) -> Callable[[Prompt, str], Any]:  # fmt: skip
    """(prompt, completion's text) → what the function returns, for a function of either signature:

      (prompt, completion, answer, extra)
      (data_source, solution_str, ground_truth, extra_info, **kwargs)    verl's; data_source = prompt.key

    Arguments go by name; `fixed` ones are added, and win; `offered` ones only where the function takes them.
    An async function is run to its end, on one event loop for all calls. Raises ValueError for any other
    signature.
    """
    signature = inspect.signature(function)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    fixed = {n: v for n, v in (offered or {}).items() if takes_any or n in signature.parameters} | fixed
    arguments = _verl if "solution_str" in signature.parameters else _ours
    try:
        signature.bind(**{**arguments(Prompt(ids=(), text=""), ""), **fixed})
        if not {"completion", "solution_str"} & signature.parameters.keys():
            raise TypeError("no argument is named completion or solution_str")
    except TypeError as error:
        raise ValueError(
            "adapt: expected a function (prompt, completion, answer, extra) or verl's (data_source, "
            "solution_str, ground_truth, extra_info, **kwargs), got "
            f"{getattr(function, '__name__', 'one')}{signature}: {error}"
        ) from None
    runner = asyncio.Runner()

    def rate(prompt: Prompt, text: str) -> Any:
        value = function(**{**arguments(prompt, text), **fixed})
        return runner.run(_finish(value)) if inspect.isawaitable(value) else value

    return rate


async def _finish(value: Any) -> Any:
    return await value


def read(value: Any) -> Rated:
    """The outcome and the metrics in what a reward function returned.

    A finite number (also a bool, a numpy scalar, a tensor of one element) is a Score, of any size; None is an
    Abstain. A dict is read by its "score"; its other keys are metrics: numbers, texts, the repr of anything
    else, and nothing for None. All else is a ParseFail, with status nan, inf, string, list, complex,
    not_one_element, no_score or not_a_number.
    """
    if not isinstance(value, Mapping):
        return _outcome(value), {}
    metrics = {str(k): _metric(v) for k, v in value.items() if k != "score" and v is not None}
    if "score" not in value:
        return ParseFail("no_score", reprlib.repr(value)), metrics
    return _outcome(value["score"]), metrics


def _outcome(value: Any) -> Outcome:
    if value is None:
        return Abstain("the function returned None")
    number = _number(_scalar(value))
    return ParseFail(number, reprlib.repr(value)) if isinstance(number, str) else Score(number)


def _scalar(value: Any) -> Any:
    """A numpy scalar or an array or tensor of one element as Python's own number; anything else as it is."""
    shape = getattr(value, "shape", None)
    if shape is None or isinstance(value, Real) or math.prod(shape) != 1:
        return value
    return value.item()


def _number(value: Any) -> float | str:
    """A finite number, or the word for why it is none."""
    match value:
        case Real() | Decimal():
            try:
                number = float(value)
            except OverflowError:
                return "inf"
            return number if math.isfinite(number) else "nan" if math.isnan(number) else "inf"
        case Complex():
            return "complex"
        case str():
            return "string"
        case list() | tuple():
            return "list"
    return "not_one_element" if hasattr(value, "shape") else "not_a_number"


def _metric(value: Any) -> float | str | bool:
    match _scalar(value):
        case bool(flag):
            return flag
        case str(text):
            return text[:TEXT]
        case Real() | Decimal() as number:
            with suppress(OverflowError):
                return float(number)
    return reprlib.repr(value)


def union(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every key of any row → its values over all rows, None where a row lacks it. Keys as first seen."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key) for row in rows] for key in keys}
