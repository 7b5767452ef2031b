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
    a reader  for replies of several forms: `genrm_free.free`; `genrm_choice.yes_no` and `pairwise`

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
    """One verdict in the text. Only those of the highest rank count: 4 plain, 1 qualified label, 0 an aside."""

    pos: int
    judgement: Judgement
    rank: int = 4


# A reader gets read(form, name, words), which gives the verdicts of a form under a name (regular expression of a label or
# tag, JSON keys), and returns those that compete.
Reader = Callable[[Callable[..., list[Found]]], list[Found]]


@dataclass(frozen=True, slots=True)
class _Rules:
    lo: float
    hi: float
    words: re.Pattern[str] | None  # the verdict is one of these words, which have places on the scale
    places: Mapping[str, float]
    open_end: bool  # generation was cut where a number could have gone on


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


def _without_blocks(text: str, names: Sequence[str]) -> str:
    """Drop <name>…</name>. A second closing tag moves the end of its block there: the first one was forged."""
    tags = re.compile(rf"<(/?)((?:{'|'.join(map(re.escape, names))})(?:_\w+)?)\s*>", re.I)
    kept, pos, opened, closed = [], 0, None, None
    for m in tags.finditer(text):
        closing, name = m[1], m[2].lower()
        if not closing and opened is None:
            opened = name, m.start()
        elif closing and opened and opened[0] == name:
            kept.append(text[pos : opened[1]])
            pos, opened, closed = m.end(), None, name
        elif closing and opened is None and closed == name:
            pos = m.end()
    return "\n".join([*kept, text[pos:]])


def _plain(text: str) -> str:
    r"""Narrow characters, no emphasis; a code span inside a line of prose goes between \x0e and \x0f: an aside."""
    text = text.translate(_NARROW)

    def code(m: re.Match[str]) -> str:
        before, after = text[max(0, m.start() - 60) : m.start()], text[m.end() : m.end() + 60]
        alone = not re.search(r"\w", before.rpartition("\n")[2] + after.partition("\n")[0])
        return m[1] if alone or not re.search(r"[A-Za-z].*[0-9]", m[1]) else f"\x0e{m[1]}\x0f"

    spanless = _CODE.sub(code, text)

    def emphasis(m: re.Match[str]) -> str:
        between = spanless[m.start() - 1 : m.start()].isdigit() and spanless[m.end() : m.end() + 1].isdigit()
        return "*" if between and m[0] < "\u2000" else ""  # 2*3 must not become 23

    return _EMPHASIS.sub(emphasis, spanless).strip()


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


def _bounded(value: float, rules: _Rules, matched: str) -> Judgement:
    if not math.isfinite(value):
        return Judgement("non_finite", None, matched)
    inside = rules.lo <= value <= rules.hi
    return Judgement("ok", value, matched) if inside else Judgement("out_of_bounds", None, matched)


def _float(number: str) -> float:
    return float(re.sub(r",(?=[0-9]{1,2}$)", ".", number).replace(",", ""))


def _value(s: str, pos: int, rules: _Rules) -> tuple[Judgement, int] | None:
    """The value whose opening brackets begin at `pos`, and where it ends; None where there is only prose."""
    opening = _OPEN.match(s, pos)
    start = opening.end() if opening else pos
    if rules.words:
        if not (m := rules.words.match(s, start)):
            return None
        if _CHOICE.match(s, m.end()):
            return Judgement("ambiguous", None, m[0]), m.end()
        score = rules.lo + rules.places[m[1].lower()] * (rules.hi - rules.lo)
        return Judgement("ok", score, m[0]), m.end()
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
    status, matched = "ok", s[start : percent.end() if percent else end]
    if (_GLUED.match(s, end) and not out_of) or s[end : end + 1].isnumeric() or len(m[1]) > 40:
        status = "no_match"
    elif _MORE.match(s, end):
        status = "ambiguous"
    elif rules.open_end and _UNFINISHED.match(s, end):
        status = "truncated"
    elif percent and (rules.lo, rules.hi) != (0, 100):
        status = "scale_mismatch"
    elif out_of and _float(next(filter(None, out_of.groups()))) != rules.hi:
        status = "scale_mismatch"
    judgement = _bounded(_float(m[1]), rules, matched) if status == "ok" else Judgement(status, None, matched)
    return judgement, percent.end() if percent else end


def _whole(content: str, rules: _Rules) -> Judgement | None:
    """The value that fills `content` (a tag, a box, a JSON string, a line); None if it holds anything else."""
    read = _value(content, 0, rules) if len(content) < 200 else None
    return read[0] if read and not content[read[1] :].strip(" \t\r\n.!。") else None


# ── The forms: every verdict of one form, by position ───────────────────────────────────────────────────────

_BENIGN = set(
    "final overall total my the a an your this its his our is so thus hence therefore and with as be at give given gives"
    " giving say assign assigned numeric numerical aggregate combined composite weighted global holistic average mean new"
    " revised updated corrected adjusted judge evaluation assessment answer response solution official".split()
)
_DISOWNED = set(
    "preliminary tentative draft initial previous prior old former first confidence max maximum min minimum perfect"
    " possible full self candidate student reference baseline example sample expected claimed requested".split()
)
_BEFORE = re.compile(r"([^\W\d_]+)(?:['’]s)?[ \t-]+$|([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+)$")
_BENIGN_CJK = re.compile(r"(?:最终|最終|综合|綜合|総合|总体?|總|整体|最后|的|给出?|为|최종|종합|총)$")
_LIST_ITEM = re.compile(r"[ \t]*\n\s*[0-9]+[.)]\s+\S")
_ASIDE = re.compile(r"\([^()\n]*\)|\x0e[^\x0f\n]*\x0f")
_SCALED = r"\s*(?:(?:\(([^()\n]{0,40})\)|(out\s+of\s+[0-9.]+))\s*)?"  # "Score (1-10):", "Score out of 10:"
_SCALE = re.compile(r"(?:/|out\s+of|max\w*:?|[-–~]|to|满分)\s*([0-9][0-9.]*)\D*$", re.I)


def _label(label: str) -> str:
    """The declared label as a pattern: any space around its colon, and "=" will do for the colon."""
    label = _plain(label)
    core = label.rstrip(":= ") or label
    edge = "(?<![A-Za-z'’])" if core[0].isalpha() else "(?<![0-9])" if core[0].isdigit() else ""
    separator = "[:=]" if core != label else "[:=]?" if core[-1] in ")]}>" else r"(?:[:=]|(?=\s*[-+.0-9\[(]))"
    return edge + r"\s+".join(map(re.escape, core.split())) + _SCALED + separator


def _rank(s: str, pos: int) -> int | None:
    """Of a label at `pos`, by the word before it; None where it is not the verdict's."""
    m = _BEFORE.search(s[max(0, pos - 30) : pos].rpartition("\n")[2])
    if not m:
        return 4
    if m[2]:
        return 4 if _BENIGN_CJK.search(m[2]) else 1
    word = m[1].lower()
    return None if word in _DISOWNED else 4 if word in _BENIGN else 1


def _labelled(s: str, label: str, rules: _Rules) -> list[Found]:
    found, asides = [], [m.span() for m in _ASIDE.finditer(s)][::-1]
    for m in re.finditer(label, s, re.I | re.M):
        while asides and asides[-1][1] <= m.start():
            asides.pop()
        rank = 0 if asides and asides[-1][0] < m.start() else _rank(s, m.start())
        if rank is None or _LIST_ITEM.match(s, m.end()):
            continue
        if read := _value(s, m.end(), rules):
            judgement, scale = read[0], _SCALE.search("".join(filter(None, m.groups())))
            if scale and judgement.status == "ok" and _float(scale[1]) != rules.hi:
                judgement = Judgement("scale_mismatch", None, judgement.matched)
            found.append(Found(m.start(), judgement, rank))
        elif not s[m.end() : m.end() + 8].strip(" \n\"'([{<$"):
            found.append(Found(m.start(), Judgement("truncated", None, m[0]), rank))
    return found


_BRACE = re.compile(r"[{}]")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LATEX = re.compile(r"\\(?:text|math|operatorname|displaystyle)[a-z]*|\\[,;!: ]|[{}$~]")
_INNER_LABEL = re.compile(r"\s*[^\W\d_]{1,20}(?:\s+[^\W\d_]{1,20})?\s*[:=]")


def _filled(pos: int, content: str, rules: _Rules) -> Found:
    label = _INNER_LABEL.match(content)
    judgement = _whole(content[label.end() if label else 0 :], rules)
    return Found(pos, judgement or Judgement("no_match", None, content[:80]))


def _boxed(s: str, name: str, rules: _Rules) -> list[Found]:
    found, pos, box = [], 0, re.compile(r"\\boxed\s*\{")
    while m := box.search(s, pos):
        depth, pos = 1, m.end()
        while depth and (brace := _BRACE.search(s, pos)):
            depth, pos = depth + (1 if brace[0] == "{" else -1), brace.end()
        if depth:
            return [*found, Found(m.start(), Judgement("truncated", None, m[0]))]
        content = _FRACTION.sub(r"\1/\2", s[m.end() : pos - 1][:200])
        found.append(_filled(m.start(), _LATEX.sub("", content), rules))
    return found


def _bracketed(s: str, name: str, rules: _Rules) -> list[Found]:
    read = ((m.start(), _value(s, m.start(), rules)) for m in re.finditer(r"\[\[(?=[^\[\]\n]{1,60}\]\])", s))
    return [Found(pos, value[0]) for pos, value in read if value]


def _tagged(s: str, tag: str, rules: _Rules) -> list[Found]:
    tags = re.finditer(rf"<(?:{tag})\s*>([^<]*)(</(?:{tag})\s*>)?", s, re.I)
    cut = Judgement("truncated")
    return [_filled(m.start(), m[1], rules) if m[2] else Found(m.start(), cut) for m in tags]


def _lone(s: str, name: str, rules: _Rules) -> list[Found]:
    lines = [re.sub(r"</?\w+>", "", line).strip(" \t\r#>|") for line in s.split("\n") if line.strip()]
    read = [(i, _whole(lines[i], rules)) for i in {0, len(lines) - 1} if lines]
    return [Found(i, judgement) for i, judgement in read if judgement]
