"""The GSM8K rule: is the final number of an answer the number of the reference? Pure and exact.

Where the final number is looked for, in the answer alone (never in the question, nor before a `</think>`):

1. The last declaration: `\\boxed{...}`, `#### n`, "answer is n", "answer: n", or "A: n" as a line begins.
   Before n may stand markup, a currency, "about" and the like, or the arithmetic that leads to it ("3 * 6 =
   18"). Other words there make it no declaration ("the answer is not 7", the heading "#### Step 2"). What is
   declared but left open is wrong: alternatives ("5 or 6"), a range, arithmetic without a result ("10 + 8"),
   a box of no number or of several.
2. Without a declaration, the last number of the text.

How a number is read: sign (ASCII or Unicode minus, "negative"), currency in front, thousands separators
(comma, LaTeX `{,}` and `\\,`, thin space), decimals, fractions (1/2, ½, 1 1/2, \\frac12), powers of ten
(1.5e3, 1.5 × 10^3); full-width digits too. What follows (unit, "%", "kg") is ignored: 50% is 50. "2 million"
is right for 2 and for 2,000,000, since the question alone says which of the two it asks for.

Not supported: decimal commas ("1.234,50"), lakh groups ("1,00,000"), numbers in words. What is glued to
digits is read whole or not at all: a time (10:30), a date (3/4/2024) or a version (1.2.3) is no number.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from rl.types import Abstain, Outcome, Prompt, Score

LONGEST = 4000  # characters of one number: Python refuses to read an integer of more than 4300 digits
LARGEST = 1000  # |power of ten|, so that 1e999999999 costs nothing
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# Possessive repeats (*+) and bounded gaps keep each pattern linear in the length of the answer.
_NUMBER = r"""
    (?<![A-Za-z0-9^]) (?<![A-Za-z]_) (?<!\^-)                     # B12, m^2, x_1, s^-1
    (?P<minus>(?<!\))-|(?i:negative)[ ])?                         # in (8)-5 the minus is arithmetic
    (?:[$€£¥₹][ ]?)?
    (?P<whole>\d+[ ](?=\d+/\d))?
    (?P<body>\d{4}-\d\d?-\d\d?(?!\d) | (?:(?<![.\w])\.)?\d(?:[\d.,:/'_]*\d)?)
    (?:[ ]?[*x][ ]?10\^(?P<ten>[-+]?\d+) | [eE](?P<exponent>[-+]?\d+) | \^(?P<power>-?\d+))?
    (?:[ ]?(?P<scale>(?i:thousand|million|billion|trillion))s?\b)?
"""
_STEPS = r"""
    (?:[A-Za-z{][A-Za-z{}' ]{0,40}=[ ]*)?+ (?:[-\d.,+*/x()$% \t]*+[=≈][ \t]*+)*+   # x = 3 * 6 =
"""
_DECLARATION = rf"""
    (?:(?<!\#)\#{{4,}}+ | (?i:\banswer\b)[^.\n\d:=]{{0,60}}?(?:\b(?:is|was|be)\b|[:=]) | ^[ \t]*A[ \t]*:)
    (?:[\s:=*`"'“‘(\[{{$~≈<_]
     | \b(?i:about|approximately|exactly|only|just|simply|thus|therefore|a[ ]total[ ]of)\b)*+
    (?!(?<=\n)\d+[.)][ ])                                         # the first line of a numbered list
    {_STEPS} {_NUMBER}
"""
_OPEN = r"""
    [ \t]*+ (?: \+[ \t]*\w | [-*/x^][ \t]*\$?\d | (?:[A-Za-z%$€£]{1,30}[ \t]+)?(?:or|and|to)[ \t]+\$?\d )
"""
NUMBER = re.compile(_NUMBER, re.VERBOSE | re.ASCII)
DECLARATION = re.compile(_DECLARATION, re.VERBOSE | re.ASCII | re.MULTILINE)
OPEN = re.compile(_OPEN, re.VERBOSE | re.ASCII)
STEPS = re.compile(_STEPS, re.VERBOSE | re.ASCII)
DECIMAL = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?", re.ASCII)
REFERENCE = re.compile(r"(?:####|^A:)(.*)", re.MULTILINE)

_PLAIN = [  # in this order: NFKC would turn 1½ into 11/2 and 10³ into 103
    (re.compile("([⁰¹²³⁴-⁹]+)"), r"^\1"),
    (re.compile("([¼-¾⅐-⅞])"), r" \1"),
    (re.compile(r"(?<=\d)(?:[\u2009\u202f]|\\[,;: ])(?=\d{3})", re.ASCII), ""),
]
_LATEX = [
    (re.compile(r"\\!"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d)(?=\\[dtc]?frac)", re.ASCII), " "),
    (re.compile(r"\\[dtc]?frac(?:\{([-\d.,]+)\}|(\d))(?:\{([\d.,]+)\}|(\d))", re.ASCII), r"\1\2/\3\4"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])|[×·]"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"\\([$%&#])"), r"\1"),
    (re.compile(r"\\(?!boxed)[A-Za-z]+|\\[^A-Za-z\n]|\*\*|__"), " "),
    (re.compile(r"\^\{([^{}]{0,20})\}"), r"^\1"),
]
_CHARACTERS = str.maketrans({"−": "-", "–": "-", "⁄": "/"})


def gsm8k(prompt: Prompt, text: str) -> Outcome:
    """1 if the final number of the text equals the reference exactly, else 0; without a number it is 0.

    The prompt's answer is GSM8K's own text (reasoning, then `#### n`, or "A: n") or a bare number. Abstains
    where there is none, and where it does not hold exactly one number.
    """
    if prompt.answer is None:
        return Abstain("the prompt has no answer")
    expected = reference(prompt.answer)
    if expected is None:
        return Abstain(f"gsm8k: no single number in the prompt's answer {prompt.answer[-80:]!r}")
    return Score(float(expected in readings(text)))


def reference(answer: str) -> Fraction | None:
    """The one number after the last `####` (or "A:") in its line, or of a bare text; else None."""
    marked = REFERENCE.findall(answer)
    value = _only(_plain(marked[-1] if marked else answer))
    return value[0] if value else None


def readings(text: str) -> tuple[Fraction, ...]:
    """What an answer's final number can mean: nothing (no number, or left open), n, or n and n million."""
    plain = _plain(text.rpartition("</think>")[2])
    declared = max(DECLARATION.finditer(plain), key=re.Match.start, default=None)
    box = plain.rfind("\\boxed{")
    if box > (declared.start() if declared else -1) and (content := _braced(plain, box + 7)) is not None:
        return _only(content.strip())
    if declared:
        return () if OPEN.match(plain, declared.end()) else _value(declared)
    numbers = list(NUMBER.finditer(plain))
    return next((value for number in reversed(numbers) if (value := _value(number))), ())


def _plain(text: str) -> str:
    """The text without LaTeX and Markdown (`\\boxed{}` aside), its characters in their plain form."""
    for pattern, new in _PLAIN:
        text = pattern.sub(new, text)
    text = unicodedata.normalize("NFKC", text).translate(_CHARACTERS)
    for pattern, new in _LATEX:
        text = pattern.sub(new, text)
    return text


def _braced(text: str, start: int) -> str | None:
    """From start to the brace that closes the one before it; None if nothing does."""
    depth = 1
    for brace in re.compile("[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return None


def _only(text: str) -> tuple[Fraction, ...]:
    """Of a text that should be one number and its unit."""
    steps = STEPS.match(text)
    numbers = list(NUMBER.finditer(text, steps.end() if steps else 0))
    if len(numbers) != 1 or OPEN.match(text, numbers[0].end()):
        return ()
    return _value(numbers[0])


def _value(number: re.Match[str]) -> tuple[Fraction, ...]:
    """Of a match of NUMBER; nothing where its digits are part of something else."""
    over, _, under = number["body"].partition("/")
    exponent = number["ten"] or number["exponent"] or "0"
    if number["power"]:
        over, exponent = ("1", number["power"]) if over == "10" else ("", "0")
    under = under or "1"
    if len(number[0]) > LONGEST or not over or not (DECIMAL.fullmatch(over) and DECIMAL.fullmatch(under)):
        return ()
    whole, top, bottom = (Fraction(part.replace(",", "")) for part in (number["whole"] or "0", over, under))
    if bottom == 0 or abs(int(exponent)) > LARGEST:
        return ()
    value = (whole + top / bottom) * Fraction(10) ** int(exponent)
    if number["minus"]:
        value = -value
    scale = number["scale"]
    return (value, value * SCALES[scale.lower()]) if scale else (value,)
