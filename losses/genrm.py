r"""Read the verdict in a generative judge's reply: text → `Judgement(status, score, matched)`.

A judge's prompt declares one form for the verdict, and `parse` reads that form alone. What is not a clean verdict has a
status and no score, so its reward is missing: never 0, never a default, never a clamp.

    format    verdict in the reply                           named by
    label     Score: 7.5   **Score**: 8/10                   label
    json      {"score": 7}                                   key: the shallowest, in the last object that has it
    tag       <score>7</score>   <score_7f3a>7</score_7f3a>  tag
    boxed     \boxed{7}
    bracket   [[7]]
    line      a first or last line that is only 7 or 7/10
    a reader  several forms at once: `free` in genrm_free.py; `yes_no`, `pairwise` and `arena` in genrm_choice.py

Numbers: the sign touches the digit; a thousands comma has exactly three digits behind it, a decimal comma one or two; no
exponent outside JSON. "8/10" and "8 out of 10" need hi = 10, else scale_mismatch; % needs the scale 0..100; "7-8",
"7 or 8", "10 - 2" are ambiguous. Not read: reasoning up to the last </think>, an echoed <candidate>…</candidate> block,
what the judge quotes, a "draft score" or "maximum score". A "style score" counts only where there is no plain one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal[
    "ok", "empty", "truncated", "no_match", "ambiguous", "out_of_bounds", "scale_mismatch", "non_finite", "error"
]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was read. `score` is on the declared scale, and None unless `status` is "ok"; `matched` is its text."""

    status: Status
    score: float | None = None
    matched: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """One verdict in the text. Those of the highest rank compete: 4 plain, 1 qualified label, 0 an aside."""

    pos: int
    judgement: Judgement
    rank: int = 4


# read(form, name, words) gives the verdicts of one form; a reader composes several such calls.
Read = Callable[..., list[Found]]
_Value = Callable[[str, int], tuple[Judgement, int] | None]


# ── The judge's own words: no reasoning, echoes, quotations or emphasis ─────────────────────────────────────

_REASONED = re.compile(r"</(?:seed:)?think(?:ing)?\s*>|\[/THINK\]|<\|channel\|>final<\|message\|>", re.I)
_REASONING = re.compile(r"<(?:seed:)?think(?:ing)?\s*>|\[THINK\]|<\|channel\|>analysis", re.I)
_SENTINEL = re.compile(r"\s*(?:\$ERROR\$|\[ERROR\]|Error code: [0-9]{3}|\{\s*\"error\"\s*:)", re.I)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\n]{1,40}\|>|</s>")
# Full-width ASCII, ideographic space, minus sign. Not NFKC, which turns ½ into 1⁄2 and ² into 2.
_NARROW = {c: c - 0xFEE0 for c in range(0xFF01, 0xFF5F)} | {0x3000: 0x20, 0x2212: 0x2D}
_EMPHASIS = re.compile(
    r"[*`]+|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[\u200b-\u200d\u2060\ufeff]+|</?(?:b|strong|em|i|u)>", re.I
)
_CODE = re.compile(r"`([^`\n]+)`")
_QUOTED = re.compile(r'"[^"\n]+"|“[^“”\n]+”|「[^「」\n]+」|『[^『』\n]+』|«[^«»\n]+»')
_QUOTED_VALUE = re.compile(r".\s*(?:[-+.]?[0-9][^:=\[<]{0,24}|\w+)[\s.,]*.")
_BLOCK_QUOTE = re.compile(r"(?m)^[ \t]*>[^\n]*")


def _without_blocks(text: str, *names: str) -> str:
    """Drop what lies between the first <name…> and the last </name…>: an inner closing tag may be forged."""
    for name in names:
        opened = re.search(rf"<{re.escape(name)}(?:_\w+)?>", text, re.I)
        closed = [m.span() for m in re.finditer(rf"</{re.escape(name)}(?:_\w+)?>", text, re.I)]
        if opened and closed and opened.end() <= closed[-1][0]:
            text = text[: opened.start()] + "\n" + text[closed[-1][1] :]
    return text


def _plain(text: str) -> str:
    r"""Narrow characters, no emphasis; a code span inside a line of prose goes between \x0e and \x0f: an aside."""
    text = text.translate(_NARROW)

    def code(m: re.Match[str]) -> str:
        before, after = text[max(0, m.start() - 60) : m.start()], text[m.end() : m.end() + 60]
        alone = not re.search(r"\w", before.rpartition("\n")[2] + after.partition("\n")[0])
        return m[1] if alone or not re.search(r"[A-Za-z].*[0-9]", m[1]) else f"\x0e{m[1]}\x0f"

    def emphasis(m: re.Match[str]) -> str:
        between = m.string[m.start() - 1 : m.start()].isdigit() and m.string[m.end() : m.end() + 1].isdigit()
        return "*" if between and m[0] < "\u2000" else ""  # 2*3 must not become 23

    return _EMPHASIS.sub(emphasis, _CODE.sub(code, text)).strip()


def _unquoted(s: str) -> str:
    """Blank, at equal length, what is quoted; a bare value in quotes and a reply that is all quote stay."""

    def mask(m: re.Match[str]) -> str:
        kept = len(m[0]) == len(s) or _QUOTED_VALUE.fullmatch(m[0])
        return m[0] if kept else "\ufffd" * len(m[0])

    if _BLOCK_QUOTE.sub("", s).strip():
        s = _BLOCK_QUOTE.sub(lambda m: "\ufffd" * len(m[0]), s)
    return _QUOTED.sub(mask, s)


# ── One value: a number with its denominator, or a word ─────────────────────────────────────────────────────

_NUM = (
    r"[-+]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+|,[0-9]{1,2}(?![0-9]))?|\.[0-9]+)"
)
_GAP = r"[^\S\n]*"
_OPEN = re.compile(r"\s*(?:~~[^~\n]{0,40}~~\s*)?[\"'“‘「『«(\[{$\x0e]*(?:<(?=[0-9.]+>))?\s*")
_NUMBER = re.compile(rf"({_NUM})[\"'”’」』»)\]}}>$\x0f]*")
_UNIT = re.compile(
    rf"{_GAP}(?:points?|pts?|marks?|stars?|puntos?|Punkten?|балл(?:а|ов)?|[分点點점])(?![A-Za-z0-9])", re.I
)
_OUT_OF = re.compile(
    rf"{_GAP}(?:[(\[,]{_GAP})?"
    rf"(?:(?:/|out\s+of|of|von|sur|de|su|из|满分|滿分|max(?:imum)?:?){_GAP}({_NUM})"
    rf"|on\s+an?\s+({_NUM})[- ]point\s+scale"
    rf"|(?:on\s+(?:a|the)\s+)?scale:?\s*(?:of|from)?\s*{_NUM}\s*(?:[-–]|to)\s*({_NUM}))"
    r"(?:\s*[分点點점])?\s*[)\]]?(?![\w/])",
    re.I,
)
_GLUED = re.compile(r"[.,]?[0-9]|[A-Za-z_\u00c0-\u024f/]|[分点點점][0-9]")
_PERCENT = re.compile(rf"{_GAP}(?:\\?%|percent|per\s+cent)", re.I)
# Before a second number these make a range, a choice, a sum or a table row.
_MORE = re.compile(
    rf"(?:{_GAP}(?:[-‐-―~〜+*×÷→±|、至到或]|->|から|to|or|and|bis))?{_GAP}\[?{_NUM}|{_GAP}\+(?!\w)"
    rf"|{_GAP}(?:or|and)\s+(?:more|less|above|below|higher|lower)|,{_GAP}{_NUM}{_GAP}(?:[,;.\n]|$)",
    re.I,
)
_UNFINISHED = re.compile(r"\s*(?:[.,/]|out|out of|of)?\s*\Z", re.I)
_NON_FINITE = re.compile(r"[-+]?(?:nan|inf(?:inity)?|∞)(?![A-Za-z])", re.I)
# A label with one of these has spoken and cannot be read: an earlier value must not stand in for it.
_VOID = re.compile(
    r"(?:n/?a|none|null|nil|unknown|undefined|tbd|not\s+(?:applicable|available|given|scored)|zero|one|two|three"
    r"|four|five|six|seven|eight|nine|ten|(?-i:I{2,3}|I?[VX]I{0,3})|[无無零一二三四五六七八九十])(?!\w)"
    r"|[-–—?](?=\s|$)",
    re.I,
)
_CHOICE = re.compile(r"\s*(?:[/|&<>=]|(?:or|and|vs)\b)", re.I)


def _float(number: str) -> float:
    return float(re.sub(r",(?=[0-9]{1,2}$)", ".", number).replace(",", ""))


def _bounded(value: float, lo: float, hi: float, matched: str) -> Judgement:
    if not math.isfinite(value):
        return Judgement("non_finite", None, matched)
    return Judgement("ok", value, matched) if lo <= value <= hi else Judgement("out_of_bounds", None, matched)


def _numbers(lo: float, hi: float, open_end: bool) -> _Value:
    """value(s, pos): the number whose opening brackets begin at `pos`, and where it ends; None for prose."""

    def value(s: str, pos: int) -> tuple[Judgement, int] | None:
        opening = _OPEN.match(s, pos)
        start = opening.end() if opening else pos
        if m := _NON_FINITE.match(s, start):
            return Judgement("non_finite", None, m[0]), m.end()
        if m := _VOID.match(s, start):
            return Judgement("no_match", None, m[0]), m.end()
        if not (m := _NUMBER.match(s, start)):
            return None
        unit = _UNIT.match(s, m.end())
        end = unit.end() if unit else m.end()
        out_of = _OUT_OF.match(s, end)
        end = out_of.end() if out_of else end
        percent = _PERCENT.match(s, end)
        end, after = percent.end() if percent else end, end
        scale = _float(next(filter(None, out_of.groups()))) if out_of else 100.0 if percent else hi
        status = "ok"
        if (_GLUED.match(s, after) and not out_of) or s[after : after + 1].isnumeric() or len(m[1]) > 40:
            status = "no_match"
        elif _MORE.match(s, end):
            status = "ambiguous"
        elif open_end and _UNFINISHED.match(s, end):
            status = "truncated"
        elif scale != hi or (percent and lo != 0):
            status = "scale_mismatch"
        if status == "ok":
            return _bounded(_float(m[1]), lo, hi, s[start:end]), end
        return Judgement(status, None, s[start:end]), end

    return value


def _words(lo: float, hi: float, places: Mapping[str, float]) -> _Value:
    """value(s, pos) for verdicts that are words. One capital letter is read in that case only."""
    longest = sorted(places, key=len, reverse=True)
    known = "|".join(f"(?-i:{w})" if re.fullmatch("[A-Z]", w) else re.escape(w) for w in longest)
    noun = r"(?:(?:an?|the|assistant|response|answer|model|candidate|output|option)\s+){0,2}"
    word = re.compile(rf"{noun}({known})(?![\w-])", re.I)
    score = {w.lower(): lo + place * (hi - lo) for w, place in places.items()}

    def value(s: str, pos: int) -> tuple[Judgement, int] | None:
        opening = _OPEN.match(s, pos)
        if not (m := word.match(s, opening.end() if opening else pos)):
            return None
        choice = _CHOICE.match(s, m.end())
        return Judgement("ambiguous", None, m[0]) if choice else Judgement("ok", score[m[1].lower()], m[0]), m.end()

    return value


def _whole(content: str, value: _Value) -> Judgement | None:
    """The value that fills `content` (a tag, a box, a JSON string, a line); None if it holds anything else."""
    read = value(content, 0) if len(content) < 200 else None
    return read[0] if read and not content[read[1] :].strip(" \t\r\n.!。\"'”’)]}") else None
