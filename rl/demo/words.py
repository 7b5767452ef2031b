"""The text models' side of the demo: short word problems, answers to them, and how their form is judged.

Free of torch. Of any text the policy writes a number, more often than not as "#### 12"; the judge reads
`j{problem}{candidate}?` and prefers that form. Neither knows what is right.
"""

from __future__ import annotations

import random
import re

from rl.demo.critic import FULL, LABEL

FORM, BARE, OTHER = FULL, 3, 2  # scores of "#### 12", of "12", and of another text with a number
_NAMES = ("Ada", "Ben", "Dev", "Emma", "Farid", "Hugo", "Ines", "Jun")
_THINGS = ("apples", "books", "cards", "eggs", "kites", "pens", "shells", "stamps")
_PROBLEMS = (
    ("{who} has {x} {things} and buys {y}. How many now?", lambda x, y: x + y),
    ("{who} had {x} {things} and sold {y}. How many are left?", lambda x, y: abs(x - y)),
    ("{x} boxes of {y} {things}: how many?", lambda x, y: x * y),
    ("{who} sells {x} {things} for ${y} each. What is made?", lambda x, y: x * y),
    ("What is {x} plus {y}?", lambda x, y: x + y),
    ("Add {x} and {y}.", lambda x, y: x + y),
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzaeiou" * 4 + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'-,.$%/()\n#äéß答€😀"
_JUNK = ("", "#### ", "I do not know", "ten", "the", "####", "?", "##", "A", "não sei", "\n", "答")
_ANSWER = re.compile(r"(?:#### )?\d+", re.ASCII)
_DIGIT = re.compile(r"\d", re.ASCII)


def problem(rng: random.Random, fillers: int) -> tuple[str, int]:
    """A problem behind so many sentences of random letters, which stand for any text, and its answer."""
    text, rule = rng.choice(_PROBLEMS)
    who, things = rng.choice(_NAMES), rng.choice(_THINGS)
    x, y = rng.randrange(2, 13), rng.randrange(2, 10)
    before = "".join(_sentence(rng) for _ in range(fillers))
    return before + text.format(who=who, things=things, x=x, y=y), rule(x, y)


def _sentence(rng: random.Random) -> str:
    words = ("".join(rng.choices(_LETTERS, k=rng.randrange(1, 9))) for _ in range(rng.randrange(3, 12)))
    return " ".join(words) + rng.choice((". ", "? ", "! ", "\n"))


def answer(number: int) -> str:
    return f"#### {number}"


def draw_answer(number: int, rng: random.Random) -> str:
    """As a policy writes it that may still improve: in form, bare, or otherwise."""
    return rng.choices((answer(number), str(number), f"= {number}"), (6, 3, 1))[0]


def score(candidate: str) -> int:
    """FORM for "#### 12" and nothing else, BARE for "12", OTHER with digits, 0 without."""
    if _ANSWER.fullmatch(candidate):
        return FORM if candidate.startswith("#") else BARE
    return OTHER if _DIGIT.search(candidate) else 0


def judge_prompt(text: str, candidate: str) -> str:
    return f"j{text}{candidate}?"


def critique(candidate: str) -> str:
    return f"{LABEL}{score(candidate)}"


def draw_candidate(rng: random.Random) -> str:
    """An answer for the judge to learn from: of every form, with one to three digits, and without."""
    forms = (
        "#### {}",
        "{}",
        "It is {}",
        "{} apples",
        "= {}.",
        "#### {}.",
        "### {}",
        "####{}",
        "#### #### {}",
    )
    (form,) = rng.choices(forms, (12, 6, 1, 1, 1, 1, 1, 1, 1))
    return rng.choice(_JUNK) if rng.random() < 0.15 else form.format(rng.randrange(10 ** rng.randrange(1, 4)))
