"""Judged examples: problems of arithmetic, answers as a small chat model writes them, and what a judge should
write about each.

Whether an answer is right is what the rule says of it, never what was meant when it was made. Problems are of
both splits: what is held out is held out from the policy, and a judge should know what it judges.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rl.data.rows_arithmetic import DIGIT, asked, problems, value
from rl.rewards.gsm8k import gsm8k, readings
from rl.types import Prompt, Score

_SAID = ("{n}", "{n}.", "= {n}", "{p} = {n}", "{p} = {n}.", "{p} is {n}.", "{p} equals {n}.",
         "So, {p} = {n}.", "The answer is {n}.", "The result is {n}.", "The result of {p} is {n}.",
         "Therefore, {p} = {n}.", "The sum of {a} and {b} is {n}.", "The difference of {a} and {b} is {n}.",
         "So, the final answer is {n}.", "Adding {a} and {b}, the result is {n}.")  # fmt: skip
_BEFORE = ("To compute {p}, we need to evaluate the expression {p}.", "Let's break it down:",
           "First, {x} + {y} = {z}.", "Here's a Python solution:\n\n```\nprint({p})\n```\n",
           "1. {x} - {y} = {z}\n2. {p} = {z}\n", "We can subtract {x} from {y}.", "This is a simple problem.",
           "To find the result of {a} and {b}, we use {x} and {y}.", "Since both {a} and {b} are numbers,",
           "To solve this equation, we need to isolate the variable.", "{z}.", "{p} = {z}. No:")  # fmt: skip
_AFTER = ("I hope this helps!", "This is the answer.", "\n\nThat is all.", "It is that simple.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    problem: Prompt  # as the data has it; without ids, which no judge reads
    candidate: str
    verdict: str  # 3 + 4 = 7, the answer is 8. Verdict: No
    right: bool


def draw(tasks: Sequence[str], rng: random.Random, largest: int = DIGIT) -> Judged:
    """One example of a task of data.arithmetic with numbers up to `largest`. About half of the candidates are
    right."""
    task = rng.choice(tasks)
    problem = rng.choice(problems(task, largest))
    n = value(problem)
    candidate = _candidate(problem, n if rng.random() < 0.55 else _wrong(n, rng), rng)
    prompt = Prompt(ids=(), text=asked(problem), key=task, answer=str(n), extra={})
    outcome = gsm8k(prompt, candidate)
    right = isinstance(outcome, Score) and outcome.value == 1.0
    said = readings(candidate)
    what = f"the answer is {said[0]}" if said else "the answer is no number"
    verdict = f"{problem} = {n}, {what}. Verdict: {'Yes' if right else 'No'}"
    return Judged(problem=prompt, candidate=candidate, verdict=verdict, right=right)


def _wrong(n: int, rng: random.Random) -> int:
    near = [n + 1, n - 1, n + 2, n - 2, -n, n + 10, abs(n) * 10, rng.randint(-17, 27)]
    return rng.choice([m for m in near if m != n])


def _candidate(problem: str, n: int, rng: random.Random) -> str:
    """A text that says n, often behind other numbers; now and then cut off, or without any answer."""

    def filled(form: str) -> str:
        x, y = rng.randint(1, 20), rng.randint(1, 20)
        z = rng.choice([x + y, x - y, n, value(problem)])
        a, *_, b = problem.split()
        return form.format(p=problem, n=n, a=a, b=b, x=x, y=y, z=z)

    before = [filled(rng.choice(_BEFORE)) for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3)))]
    said = [filled(rng.choice(_SAID))] if rng.random() < 0.9 else []
    after = [rng.choice(_AFTER)] if rng.random() < 0.15 else []
    text = " ".join((*before, *said, *after))
    return text[: rng.randint(1, len(text))] if text and rng.random() < 0.1 else text
