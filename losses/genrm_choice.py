r"""Read a verdict that is a word: readers for `parse(text, format=yes_no)` with `parse` of genrm.py.

    yes_no    Verdict: incorrect   <answer>Yes</answer>   \boxed{No}   {"correct": true}    yes = hi, no = lo
    pairwise  [[A]]   Winner: B   my verdict is B   [[C]], tie      A = hi, B = lo, tie = the scale's middle
    arena     [[A>>B]] [[A>B]] [[A=B]] [[B>A]] [[B>>A]]             five even steps from hi down to lo

A word counts where it is named (a label, tag, box or key), or as a first or last line of its own: a "Yes" or
an "A" in prose is no verdict. For other forms or words: parse(text, format="json", key="ok", words=YES_NO).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Found = tuple[int, int, Any]  # rank, position, judgement
Read = Callable[..., list[Found]]

# A regular expression for each verdict, read in any case, and its place on the scale: 0 = lo, 1 = hi.
YES_NO = {
    r"yes|true|correct|pass(?:ed|es)?|正确|是": 1.0,
    r"no|false|incorrect|wrong|fail(?:ed|s)?|not\s+correct|不正确|错误|否": 0.0,
}
ARENA = {
    r"(?-i:A\s*>>\s*B|B\s*<<\s*A)": 1.0,
    r"(?-i:A\s*>\s*B|B\s*<\s*A)": 0.75,
    r"(?-i:A\s*=\s*B|B\s*=\s*A)": 0.5,
    r"(?-i:B\s*>\s*A|A\s*<\s*B)": 0.25,
    r"(?-i:B\s*>>\s*A|A\s*<<\s*B)": 0.0,
}
_YES_NO_LABEL = (
    r"(?<![A-Za-z])(?:(?:verdict|judge?ment|decision|conclusion)(?:\s*[:=]|\s+is\b:?)"
    r"|(?:answer|result|score)\s*[:=]|correct(?:\b[^?\n]{0,30}\?|\s*:)|(?:判断|判定|结论)\s*:)"
)
_PAIR_LABEL = (
    r"(?<![A-Za-z])(?:answer\s*[:=]|(?:verdict|winner|choice|preference|decision|judge?ment|conclusion"
    r"|(?:better|best|preferred|chosen)(?:\s+(?:one|answer|response|assistant|model))?)(?:\s*[:=]|\s+is\b:?))"
)
_TAGS = r"answer|verdict|judge?ment|choice|winner|score"


def yes_no(read: Read) -> list[Found]:
    """Yes, true, correct, pass → hi; no, false, incorrect, wrong, fail → lo."""
    keys = ("verdict", "answer", "correct", "judgement", "judgment", "score")
    return read("json", keys, YES_NO) or _named(read, _YES_NO_LABEL, YES_NO)


def pairwise(read: Read, options: tuple[str, str] = ("A", "B")) -> list[Found]:
    """The first → hi, the second → lo, a tie → the middle. Other names: `partial(pairwise, options=…)`."""
    noun = r"(?:the\s+)?(?:(?:assistant|response|answer|model|candidate|output|option)\s+)?"
    first, second = (rf"{noun}(?-i:{name})" for name in options)
    words = {r"(?:an?\s+)?(?:tie|draw)|C(?=\]\])": 0.5, first: 1.0, second: 0.0}
    return read("json", ("verdict", "winner", "choice", "answer"), words) or _named(read, _PAIR_LABEL, words)


def arena(read: Read) -> list[Found]:
    """The five labels of Arena-Hard. With match="unique" several of them must agree."""
    return read("bracket", "", ARENA)


def _named(read: Read, label: str, words: dict[str, float]) -> list[Found]:
    forms = (("label", label), ("tag", _TAGS), ("bracket", ""), ("boxed", ""))
    named = [found for form, name in forms for found in read(form, name, words)]
    return named if any(rank > 0 for rank, *_ in named) else read("line", "", words) or named
