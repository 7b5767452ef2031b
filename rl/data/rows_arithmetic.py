"""Sums and differences of small numbers, in words that a chat model knows: "Compute 3 + 4."

Of one digit there are few: 81 sums and 81 differences of two numbers, 2,916 with three. One content in four
is held out and never trained on, of small results as often as of large ones; 3 + 4 and 4 + 3 are one content.
A problem of two numbers that is held out may still be a step on the way through one of three. Problems of
larger numbers are for training alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Literal

from rl.data.rows import DataError, Row

Split = Literal["train", "held_out"]

DIGIT = 9  # the largest number in what is held out
HELD_OUT = 4  # one content in so many
# Task → what may stand between its numbers, one after the other.
TASKS = {"addition": ("+",), "subtraction": ("-",), "three_terms": ("+-", "+-")}


def arithmetic_rows(
    tasks: Sequence[str], size: int, seed: int, split: Split, largest: int = DIGIT
) -> list[Row]:
    """`size` problems of one split, the tasks taking turns, drawn with replacement: a function of the
    arguments alone. The key is the task's name, the answer a number such as "-5". largest: the numbers of
    those that are trained on go up to it.

    Raises DataError for a task that is not there.
    """
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        named = ", ".join(unknown) or "none"
        raise DataError(f"data.arithmetic: tasks are {', '.join(TASKS)}, got {named}")
    rng = random.Random(f"{seed}/{split}/{'+'.join(tasks)}")
    rows = []
    for i in range(size):
        task = tasks[i % len(tasks)]
        problem = rng.choice(pool(task, split, largest))
        rows.append(Row(f"arithmetic {split} {i}", asked(problem), str(value(problem)), task, {}))
    return rows


@cache
def problems(task: str, largest: int = DIGIT) -> tuple[str, ...]:
    """Every problem of a task with numbers from 1: "3 + 4", ..."""
    numbers = [str(n) for n in range(1, largest + 1)]
    choices = [numbers, *(choice for signs in TASKS[task] for choice in (signs, numbers))]
    return tuple(" ".join(parts) for parts in product(*choices))


@cache
def pool(task: str, split: Split, largest: int = DIGIT) -> tuple[str, ...]:
    """Those of one split."""
    return tuple(p for p in problems(task, largest) if split_of(p) == split)


def asked(problem: str) -> str:
    """The prompt's text."""
    return f"Compute {problem}."


def value(problem: str) -> int:
    """3 + 4 - 9 is -2."""
    first, *rest = problem.split()
    signs, numbers = rest[::2], rest[1::2]
    return int(first) + sum(int(sign + n) for sign, n in zip(signs, numbers, strict=True))


def split_of(problem: str) -> Split:
    """Where a problem belongs: in the order of their values, and of their hashes where these are the same,
    every fourth content of one-digit numbers, with so many of them and so many signs, is held out."""
    return "held_out" if _content(problem) in _held_out(len(problem.split())) else "train"


def _content(problem: str) -> tuple[str, ...]:
    """The numbers with their signs, in any order."""
    terms = f"+ {problem}".split()
    return tuple(sorted(sign + n for sign, n in zip(terms[::2], terms[1::2], strict=True)))


@cache
def _held_out(n_words: int) -> frozenset[tuple[str, ...]]:
    every = {_content(p): value(p) for task in TASKS for p in problems(task) if len(p.split()) == n_words}
    alike = {c: (sum(term[0] == "-" for term in c), v) for c, v in every.items()}
    ordered = sorted(every, key=lambda c: (alike[c], hashlib.blake2b(" ".join(c).encode()).digest()))
    return frozenset(ordered[HELD_OUT // 2 :: HELD_OUT])
