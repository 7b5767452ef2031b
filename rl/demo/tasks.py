"""Three small skills with a ground truth: reverse five digits, sort five digits, add two two-digit numbers.

Free of torch. The rule never sees a judge, and a held-out problem is never trained on: its hash alone decides
where it belongs.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from typing import Literal

from rl.data.prompts import Row

Split = Literal["train", "held_out"]

TASKS = ("reverse", "sort", "add")
ALPHABET = "0123456789rsa+=j?S:!-"  # one for policies, teachers and judges: a token id means the same to all
BRACKETS = "[]"  # what a verdict is broken up with in an answer: S:5 becomes S[:]5
HELD_OUT_PERCENT = 10

_PROBLEM = re.compile(r"(?P<task>[rs])(?P<digits>\d{5})=|a(?P<x>\d\d)\+(?P<y>\d\d)=", re.ASCII)


def check_tasks(tasks: Sequence[str]) -> None:
    """Raises ValueError where there is no task, or one that is not known."""
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise ValueError(f"tasks must be some of {', '.join(TASKS)}, got {unknown or 'none'}")


def problem(task: str, rng: random.Random) -> tuple[str, str]:
    """Draws a problem of either split: (prompt text, answer), such as ("r52814=", "41825")."""
    check_tasks([task])
    if task == "add":
        text = f"a{rng.randrange(100):02d}+{rng.randrange(100):02d}="
    else:
        text = f"{task[0]}{rng.randrange(100_000):05d}="
    return text, answer_of(text)


def answer_of(prompt_text: str) -> str:
    """The one right answer. A sum has three digits, the least significant first: a12+34= gives 640."""
    match = _PROBLEM.fullmatch(prompt_text)
    if match is None:
        raise ValueError(f"answer_of: expected a problem like r52814=, s52814=, a12+34=, got {prompt_text!r}")
    if match["task"] is None:
        return f"{int(match['x']) + int(match['y']):03d}"[::-1]
    return match["digits"][::-1] if match["task"] == "r" else "".join(sorted(match["digits"]))


def is_correct(prompt_text: str, completion_text: str) -> bool:
    """Ground truth: the completion is the answer, whole and exact. A space or one more character is wrong."""
    return completion_text == answer_of(prompt_text)


def split_of(prompt_text: str) -> Split:
    """Where a problem belongs, by a hash of its content. a12+34= and a34+12= are one content."""
    content = prompt_text
    if prompt_text.startswith("a"):
        content = "+".join(sorted(prompt_text[1:-1].split("+")))
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest) % 100 < HELD_OUT_PERCENT else "train"


def make_prompts(tasks: Sequence[str], n: int, seed: int, split: Split) -> list[tuple[str, str, str]]:
    """n problems of one split as (text, answer, key), the tasks taking turns; the key is the task's name.

    Drawn with replacement, a function of the arguments alone. Raises ValueError for an unknown task or split.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f"make_prompts: split must be train or held_out, got {split!r}")
    check_tasks(tasks)
    rng = random.Random(f"{seed}/{split}/{'+'.join(tasks)}")
    return [(*draw(tasks[i % len(tasks)], rng, split), tasks[i % len(tasks)]) for i in range(n)]


def make_rows(tasks: Sequence[str], n: int, seed: int, split: Split) -> list[Row]:
    """`make_prompts` as rows of a data set."""
    prompts = make_prompts(tasks, n, seed, split)
    return [Row(f"demo {split} {i}", text, answer, key, {}) for i, (text, answer, key) in enumerate(prompts)]


def draw(task: str, rng: random.Random, split: Split) -> tuple[str, str]:
    """One problem of the split: (text, answer)."""
    while True:
        text, answer = problem(task, rng)
        if split_of(text) == split:
            return text, answer


def change_digit(digits: str, rng: random.Random) -> str:
    """One digit, somewhere, becomes another digit. The rest stays. Needs at least one character."""
    at = rng.randrange(len(digits))
    return digits[:at] + rng.choice([d for d in "0123456789" if d != digits[at]]) + digits[at + 1 :]
