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
_QUOTED = re.compile(
    r'"[^"\n]+"|“[^“”\n]+”|「[^「」\n]+」|『[^『』\n]+』|«[^«»\n]+»|(?<=\w )`[^`\n]+`|`[^`\n]+`(?= \w)'
)
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
    """Narrow characters, no emphasis, nothing quoted; a bare value in quotes and a reply that is all quote stay."""
    s = text.translate(_NARROW).strip()

    def mask(m: re.Match[str]) -> str:
        return m[0] if len(m[0]) == len(s) or _QUOTED_VALUE.fullmatch(m[0]) else "\ufffd"

    def emphasis(m: re.Match[str]) -> str:
        between = m.string[m.start() - 1 : m.start()].isdigit() and m.string[m.end() : m.end() + 1].isdigit()
        return "*" if between and m[0] < "\u2000" else ""  # 2*3 must not become 23

    quotes = _BLOCK_QUOTE.sub("", s).strip()
    return _EMPHASIS.sub(emphasis, _QUOTED.sub(mask, quotes or s)).strip()


# ── One value: a number with its denominator, or a word ─────────────────────────────────────────────────────

_NUM = (
    r"[-+]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+|,[0-9]{1,2}(?![0-9]))?|\.[0-9]+)"
)
_GAP = r"[^\S\n]*"
_OPEN = re.compile(r"\s*(?:~~[^~\n]{0,40}~~\s*)?[\"'“‘「『«(\[{$]*(?:<(?=[0-9.]+>))?\s*")
_NUMBER = re.compile(rf"({_NUM})[\"'”’」』»)\]}}>$]*")
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


# ── The forms: every verdict of one form, by position ───────────────────────────────────────────────────────

# The words before a label on its line.
_PLAIN = re.compile(
    r"(?:^|[^\w\s'’]|\b(?:final|overall|total|numeric(?:al)?|aggregate|combined|weighted|global|average|mean|new|revised"
    r"|updated|adjusted|my|the|an?|your|this|its|our|is|so|thus|hence|therefore|and|with|give[sn]?|say|assign|answer"
    r"|response|solution|evaluation|assessment|official)|最[终終]|[综綜]合|総合|总体?|總|整体|最后|的|给出?|최종|종합|총)\s*$",
    re.I,
)
_DISOWNED = re.compile(
    r"\b(?:preliminary|tentative|draft|initial|previous|prior|old|former|first|confidence|max(?:imum)?|min(?:imum)?|perfect"
    r"|possible|full|self|candidate|student|reference|baseline|example|sample|expected|claimed|requested)(?:['’]s)?[ \t-]*$",
    re.I,
)
_ASIDE = re.compile(r"\([^()\n]*\)")
_SCALED = r"\s*(?:(?:\(([^()\n]{0,40})\)|(out\s+of\s+[0-9.]+))\s*)?"  # "Score (1-10):", "Score out of 10:"
_SCALE = re.compile(r"(?:/|out\s+of|max\w*:?|[-–~]|to|满分)\s*([0-9][0-9.]*)\D*$", re.I)
_NO_LIST = r"(?![ \t]*\n\s*[0-9]+[.)]\s+\S)"


def _label(label: str) -> str:
    """The declared label as a pattern: any space around its colon, and "=" will do for the colon."""
    label = _plain(label)
    core = label.rstrip(":= ") or label
    edge = "(?<![A-Za-z'’])" if core[0].isalpha() else "(?<![0-9])" if core[0].isdigit() else ""
    separator = "[:=]" if core != label else "[:=]?" if core[-1] in ")]}>" else r"(?:[:=]|(?=\s*[-+.0-9\[(]))"
    return edge + r"\s+".join(map(re.escape, core.split())) + _SCALED + separator


def _labelled(s: str, label: str, value: _Value) -> list[Found]:
    found, asides = [], [m.span() for m in _ASIDE.finditer(s)][::-1]
    for m in re.finditer(label + _NO_LIST, s, re.I | re.M):
        while asides and asides[-1][1] <= m.start():
            asides.pop()
        before = s[max(0, m.start() - 30) : m.start()].rpartition("\n")[2]
        rank = 0 if asides and asides[-1][0] < m.start() else 4 if not before or _PLAIN.search(before) else 1
        if _DISOWNED.search(before):
            continue
        if read := value(s, m.end()):
            judgement, scale = read[0], _SCALE.search("".join(filter(None, m.groups())))
            if scale and judgement.status == "ok" and value(f"0/{scale[1]}", 0)[0].status == "scale_mismatch":
                judgement = Judgement("scale_mismatch", None, judgement.matched)
            found.append(Found(m.start(), judgement, rank))
        elif not s[m.end() : m.end() + 8].strip(" \n\"'([{<$"):
            found.append(Found(m.start(), Judgement("truncated", None, m[0]), rank))
    return found


_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LATEX = re.compile(r"\\(?:text|math|operatorname|displaystyle)[a-z]*|\\[,;!: ]|[{}$~]")
_INNER_LABEL = re.compile(r"\s*[^\W\d_]{1,20}(?:\s+[^\W\d_]{1,20})?\s*[:=]")
_BRACED = r"(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*\})*+\})*+"


def _closed(s: str, form: str, tag: str, value: _Value) -> list[Found]:
    pattern = {
        "tag": rf"<(?:{tag})\s*>([^<]*)(</(?:{tag})\s*>)?",
        "boxed": rf"\\boxed\s*\{{({_BRACED})(\}})?",
        "bracket": r"\[\[([^\[\]\n]{1,60})(\]\])",
    }[form]
    found = []
    for m in re.finditer(pattern, s, re.I):
        content = _LATEX.sub("", _FRACTION.sub(r"\1/\2", m[1][:200]))
        label = _INNER_LABEL.match(content)
        judgement = _whole(content[label.end() if label else 0 :], value) if m[2] else Judgement("truncated")
        unread = Judgement("no_match", None, m[0][:80])
        found.append(Found(m.start(), judgement or unread, 4 if judgement else 0))
    return found


def _alone(s: str, value: _Value) -> list[Found]:
    lines = [re.sub(r"</?\w+>", "", line).strip(" \t\r#>|") for line in s.split("\n") if line.strip()]
    read = [(i, _whole(lines[i], value)) for i in {0, len(lines) - 1} if lines]
    return [Found(i, judgement) for i, judgement in read if judgement]


class _Object(list[tuple[str, Any]]):
    """A JSON object as pairs, so that a key that occurs twice is seen."""


_DECODER = json.JSONDecoder(object_pairs_hook=_Object, parse_int=float, strict=False)
_JSON_START = re.compile(r"\{(?=\s*(?:\"|\Z))|\[(?=\s*\{)")
_BACKSLASH = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')  # a lone one is LaTeX in a string


def _json(text: str, keys: Sequence[str], value: _Value, number: Callable[[float], Judgement]) -> list[Found]:
    text = _BACKSLASH.sub(lambda m: m[0] if len(m[0]) > 1 else r"\\", text).rstrip()
    found, pos, budget = [], 0, 8 * len(text) + 1000  # characters that failed attempts may read: linear time
    while budget > 0 and (m := _JSON_START.search(text, pos)):
        try:
            decoded, pos = _DECODER.raw_decode(text, m.start())
        except json.JSONDecodeError as e:
            if e.pos >= len(text) or e.msg.startswith("Unterminated"):
                return [*found, Found(m.start(), Judgement("truncated"))]
            pos, budget = m.end(), budget - (e.pos - m.start()) - 1
        except RecursionError:
            return [*found, Found(m.start(), Judgement("no_match"))]
        else:
            hits = _shallowest(decoded, keys)
            read = [number(v) if isinstance(v, float) else _whole(_plain(str(v)), value) for v in hits]
            agreed = {j or Judgement("no_match") for j in read}
            if hits:
                found.append(Found(m.start(), agreed.pop() if len(agreed) == 1 else Judgement("ambiguous")))
    return found


def _shallowest(decoded: Any, keys: Sequence[str]) -> list[Any]:
    """The plain values under the first of `keys` that occurs at the smallest depth where any does."""
    level = [decoded]
    while level:
        pairs = [pair for node in level if isinstance(node, _Object) for pair in node]
        for key in keys:
            if hits := [v for k, v in pairs if k.strip().lower() == key and not isinstance(v, list)]:
                return hits
        items = [v for node in level if not isinstance(node, _Object) for v in node]
        level = [v for v in [*items, *(v for _, v in pairs)] if isinstance(v, list)]
    return []


# ── parse ───────────────────────────────────────────────────────────────────────────────────────────────────


def normalise(score: float, lo: float, hi: float) -> float:
    """(score − lo)/(hi − lo), in [0, 1]. Raises ValueError for a score outside the bounds."""
    if not lo < hi or not lo <= score <= hi:
        raise ValueError(f"normalise: expected lo <= score <= hi, lo < hi; got score={score}, lo={lo}, hi={hi}")
    return (score - lo) / (hi - lo)


def parse(
    text: str | None,
    *,
    format: str | Callable[[Read], list[Found]] = "label",
    label: str = "Score:",
    lo: float = 0.0,
    hi: float = 10.0,
    match: str = "last",
    finish_reason: str | None = "stop",
    key: str = "score",
    tag: str = "score",
    nonce: str | None = None,
    words: Mapping[str, float] | None = None,
    echo: str | None = None,
    delimiter: str = "candidate",
) -> Judgement:
    """Read the verdict in one reply of a judge; the module's docstring has the forms and the grammar of numbers.

    text           what the judge generated, and nothing else
    lo, hi         the declared scale, inclusive
    match          the "last" or "first" verdict, or "unique": ambiguous where verdicts differ
    finish_reason  after "length", "max_tokens" or "abort" a number that ends the text is truncated
    nonce          a secret per call: the label, key or tag is name_nonce. The only defence against a candidate that
                   makes the judge repeat a verdict after its own
    words          verdicts that are words, and their places from 0 (lo) to 1 (hi): {"true": 1, "false": 0}
    echo           the judge's prompt: verbatim copies of it are not read
    delimiter      the tag around the candidate in the prompt: such blocks are not read

    Raises ValueError for a wrong argument, never for a text.
    """
    names = {"label": label, "json": key, "tag": tag, "boxed": "", "bracket": "", "line": ""}
    if not callable(format) and format not in names or match not in ("last", "first", "unique"):
        raise ValueError(f"parse: format must be one of {[*names]} or a reader, match last, first or unique;"
                         f" got {format!r}, {match!r}")  # fmt: skip
    if not (math.isfinite(lo) and math.isfinite(hi) and lo < hi):
        raise ValueError(f"parse: the scale needs finite lo < hi, got lo={lo}, hi={hi}")
    if nonce and (callable(format) or not names[format]):
        raise ValueError(f"parse: {format!r} has no name to carry a nonce; use label, json or tag")
    cut = finish_reason in ("length", "max_tokens", "abort")
    body = (text or "").replace(echo or "\0", "\n")
    if _SENTINEL.match(body):
        return Judgement("error", None, body[:80])
    body = _REASONED.split(body)[-1]
    if _REASONING.search(body):
        return Judgement("truncated")
    body = _SPECIAL_TOKEN.sub("", _without_blocks(body, delimiter, "reasoning", "analysis", "scratchpad"))
    if not body.strip():
        return Judgement("truncated" if cut else "empty")
    s = _plain(body)

    def read(form: str, name: Any = "", words: Mapping[str, float] | None = words) -> list[Found]:
        open_end = cut and form in ("label", "line")
        value = _words(lo, hi, words) if words else _numbers(lo, hi, open_end)
        if form == "label":
            return _labelled(s, name, value)
        if form == "line":
            return _alone(s, value)
        if form == "json":
            return _json(body, name, value, lambda x: _bounded(x, lo, hi, repr(x)))
        return _closed(s, form, name, value)

    suffix = f"_{nonce}" if nonce else ""
    if callable(format):
        found = format(read)
    else:
        found = read(format, {"label": _label(label, suffix), "json": (key.lower() + suffix,)}.get(format, re.escape(tag + suffix)))
    if not found:
        return Judgement("truncated" if cut else "no_match")
    top = max(f.rank for f in found)
    best = sorted((f for f in found if f.rank == top), key=lambda f: f.pos)
    if len({(f.judgement.status, f.judgement.score) for f in best}) > 1 and (match == "unique" or top < 2):
        return Judgement("ambiguous", None, best[-1].judgement.matched)
    return best[0 if match == "first" else -1].judgement
