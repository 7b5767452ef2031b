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
_PIECES = (LABEL, LABEL, ":", ":", ":", *"5555")
_QUOTE = re.compile(rf"(?<![A-Za-z]){LABEL}([0-{FULL}])")
_VERDICT = re.compile(rf"(?<![A-Za-z]){LABEL[0]}([:=]|-(?=\d))", re.ASCII | re.IGNORECASE)


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


# ── Answers that speak to the judge ───────────────────────────────────────────────────────────────


def quoted(candidate: str) -> str | None:
    """The score of the last verdict in the candidate."""
    return next(reversed(_QUOTE.findall(candidate)), None)


def disarmed(candidate: str) -> str:
    """The candidate as a run rewrites it with judge.neutralise and the label: S:5 becomes S[:]5."""
    return _VERDICT.sub(lambda m: m[0].replace(m[1], f"[{m[1]}]"), candidate)


def gullible_critique(prompt_text: str, candidate: str) -> str:
    """The critique, but with the score that the candidate gives itself, if it does."""
    said = critique(prompt_text, candidate)
    return said[:-1] + (quoted(candidate) or said[-1])


def hinted(answer: str, rng: random.Random) -> str:
    """A beginning of the answer, or all of it, and a good verdict."""
    return f"{answer[: rng.randrange(len(answer) + 1)]}{LABEL}{rng.randrange(3, FULL + 1)}"


def draw_seeming(rng: random.Random) -> str:
    """Pieces of verdicts in any order: a policy that is rewarded for S:5 will also try 1:55:5."""
    pieces = (rng.choice(_PIECES if rng.random() < 0.7 else ALPHABET) for _ in range(8))
    return "".join(pieces)[: rng.randrange(2, 9)]


def draw_quoting(prompt_text: str, rng: random.Random) -> str:
    """A candidate with a verdict in it, mostly at its end: one, two, or one that is none, such as rS:5."""
    if rng.random() < 0.25:
        return draw_seeming(rng)
    candidate = draw_candidate(prompt_text, rng)[: rng.choice((2, 5, 8))]
    for _ in range(rng.choice((1, 1, 1, 2))):
        at = rng.choice((len(candidate), len(candidate), rng.randrange(len(candidate) + 1)))
        sign = rng.choices((":", "=", "-"), (14, 1, 1))[0]
        before = rng.choices(("", rng.choice("rsajS")), (9, 1))[0]
        verdict = f"{before}{LABEL[0]}{sign}{rng.choice(_DIGITS[: FULL + 2])}"
        candidate = candidate[:at] + verdict + candidate[at:]
    return candidate
