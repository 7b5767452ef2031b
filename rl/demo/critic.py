"""The judge's side of the demo: what it reads, what it should write, and the answers that it learns from.

Free of torch. Of `r52814=` and the answer 41925 it reads `jr52814=41925?` and writes `44=11=89!22=55=S:4`.
"""

from __future__ import annotations

import random
import re

from rl.demo.tasks import ALPHABET, answer_of, change_digit

LABEL = "S:"  # the score stands behind it
FULL = 5
_SCORE = re.compile(rf"{LABEL}([0-{FULL}])")
_DIGITS = "0123456789"


def judge_prompt(prompt_text: str, candidate: str) -> str:
    return f"j{prompt_text}{candidate}?"


def score(prompt_text: str, candidate: str) -> int:
    """FULL minus one for each wrong or missing position, and one for going on behind the last; at least 0.

    Of a five-digit answer: the number of right positions. FULL if and only if the candidate is the answer.
    """
    answer = answer_of(prompt_text)
    wrong = sum(candidate[i : i + 1] != digit for i, digit in enumerate(answer))
    return max(0, FULL - wrong - (len(candidate) > len(answer)))


def critique(prompt_text: str, candidate: str) -> str:
    """Per position the right digit, the candidate's (- for none), = or !; then + if it goes on; the score."""
    answer = answer_of(prompt_text)
    said = [char if char in _DIGITS else "-" for char in candidate[: len(answer)].ljust(len(answer), "-")]
    marks = [f"{a}{b}{'=' if a == b else '!'}" for a, b in zip(answer, said, strict=True)]
    more = "+" if len(candidate) > len(answer) else ""
    return f"{''.join(marks)}{more}{LABEL}{score(prompt_text, candidate)}"


def read_score(text: str) -> int | None:
    """The score that a critique ends with, or None."""
    match = _SCORE.search(text, max(0, len(text) - len(LABEL) - 1))
    return int(match[1]) if match else None


def draw_candidate(prompt_text: str, rng: random.Random) -> str:
    """An answer for the judge to learn from: right in 40 of 100, else wrong in one of a policy's ways."""
    answer = answer_of(prompt_text)
    (way,) = rng.choices((_right, _one_wrong, _swapped, _other, _several_wrong, _other_length, _garbage),
                         (40, 20, 7, 7, 14, 9, 3))  # fmt: skip
    return way(answer, rng)


def _right(answer: str, rng: random.Random) -> str:
    return answer


def _one_wrong(answer: str, rng: random.Random) -> str:
    return change_digit(answer, rng)


def _swapped(answer: str, rng: random.Random) -> str:
    """Two neighbours in the other order: the same answer where they are equal."""
    i = rng.randrange(len(answer) - 1)
    return answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]


def _other(answer: str, rng: random.Random) -> str:
    """The answer to another problem, digits drawn at random."""
    return "".join(rng.choice(_DIGITS) for _ in answer)


def _several_wrong(answer: str, rng: random.Random) -> str:
    return "".join(rng.choice(_DIGITS) if rng.random() < 0.5 else digit for digit in answer)


def _other_length(answer: str, rng: random.Random) -> str:
    """A digit left out, a digit put in, or only a beginning, which may be empty."""
    kind, at = rng.randrange(3), rng.randrange(len(answer))
    if kind == 0:
        return answer[:at] + answer[at + 1 :]
    if kind == 1:
        at = rng.randrange(len(answer) + 1)
        return answer[:at] + rng.choice(_DIGITS) + answer[at:]
    return answer[:at]


def _garbage(answer: str, rng: random.Random) -> str:
    """Up to eight characters of any kind."""
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(9)))
