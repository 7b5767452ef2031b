r"""Read the verdict in a generative judge's reply: text → `Judgement(status, score, matched)`.

A judge's prompt declares one form for the verdict, and `parse` reads that form alone. What is not a clean
verdict has a status and no score, so its reward is missing: never 0, never a default, never a clamp.

    label     Score: 7.5   **Score**: 8/10                   named by `label`
    json      {"score": 7}                                   `key` of the last outermost object that has it
    tag       <score>7</score>   <score_7f3a>7</score_7f3a>  `tag`
    boxed     \boxed{7}
    bracket   [[7]]
    line      a first or last line that is only 7 or 7/10; ambiguous where both are, and differ
    a reader  several forms: `free` of genrm_free.py; `yes_no`, `pairwise` of genrm_choice.py

Numbers: the sign touches the digit; a thousands comma has three digits behind it, a decimal comma one or two;
exponents only in JSON. "8/10" and "8 out of 10" need hi = 10, else scale_mismatch; % needs the scale 0..100;
"7-8", "7 or 8", "10 - 2" are ambiguous. Not read: reasoning up to the last </think>, an echoed
<candidate>…</candidate> block, what the judge quotes, another quantity ("style score", "maximum score").
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal[
    "ok", "empty", "truncated", "no_match", "ambiguous", "out_of_bounds", "scale_mismatch", "non_finite",
    "error",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was read. `score`: on the declared scale, None unless `status` is "ok"; `matched`: its text."""

    status: Status
    score: float | None = None
    matched: str = ""


# (rank, position, what was read). Of several, those of the highest rank compete.
Found = tuple[int, int, Judgement]
# A reader composes calls of read(form, name, words), which gives the verdicts of one form.
Reader = Callable[[Callable[..., list[Found]]], list[Found]]
_Value = Callable[[str, int], tuple[Judgement, int] | None]  # (text, where) → (what was read, where it ends)


# ── The judge's own words: no reasoning, echoes, quotations or emphasis ─────────────────────────────────────

_REASONED = re.compile(r"</(?:seed:)?think(?:ing)?\s*>|\[/THINK\]|<\|channel\|>final<\|message\|>", re.I)
_REASONING = re.compile(r"<(?:seed:)?think(?:ing)?\s*>|\[THINK\]|<\|channel\|>analysis", re.I)
_SENTINEL = re.compile(r"\s*(?:\$ERROR\$|\[ERROR\]|Error code: [0-9]{3}|\{\s*\"error\"\s*:\s*\{)", re.I)
_INVISIBLE = dict.fromkeys([0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF])  # zero width
# Full-width ASCII, ideographic space, minus sign. Not NFKC, which turns ½ into 1⁄2 and ² into 2.
_NARROW = {c: c - 0xFEE0 for c in range(0xFF01, 0xFF5F)} | {0x3000: 0x20, 0x2212: 0x2D}
_EMPHASIS = re.compile(
    r"(?i)[*`]+|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|</?(?:b|strong|em|i|u|s)>|<\|[^|<>\n]{1,40}\|>"
)
_QUOTED = re.compile(
    r'"[^"\n]+"|“[^“”\n]+”|「[^「」\n]+」|『[^『』\n]+』|«[^«»\n]+»|(?<=\w )`[^`\n]+`|`[^`\n]+`(?= \w)'
)
_QUOTED_VALUE = re.compile(r".\s*(?:[-+.]?[0-9][^:=\[<]{0,24}|\w+|[\w ]+[:=])[\s.,]*.")
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
    """No full width, emphasis or quotations. A bare value in quotes stays, and a reply that is all quote."""
    s = text.translate(_NARROW).strip()

    def mask(m: re.Match[str]) -> str:
        return m[0] if len(m[0]) == len(s) or _QUOTED_VALUE.fullmatch(m[0]) else "\ufffd"

    def emphasis(m: re.Match[str]) -> str:
        between = m.string[m.start() - 1 : m.start()].isdigit() and m.string[m.end() : m.end() + 1].isdigit()
        return "*" if between else ""  # 2*3 must not become 23

    quotes = _BLOCK_QUOTE.sub("", s).strip()
    return _EMPHASIS.sub(emphasis, _QUOTED.sub(mask, quotes or s)).strip()


# ── One value: a number with its denominator, or a word ─────────────────────────────────────────────────────

_NUM = (
    r"[-+]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+|,[0-9]{1,2}(?![0-9]))?|\.[0-9]+)"
)
_GAP = r"[^\S\n]*"
_OPEN = r"\s*(?:~~[^~\n]{0,40}~~\s*)?(?:(?:[\"'“‘「『«(\[{$]|\\[(\[]|\\text\{|<(?=[0-9.]{1,40}>))+\s*)?"
_UNIT = re.compile(rf"{_GAP}(?:points?|pts?|marks?|stars?|балл(?:а|ов)?|[分点點점])(?![A-Za-z0-9])", re.I)
_OUT_OF = re.compile(
    rf"(?i){_GAP}(?:[(\[,]{_GAP})?(?:(?:[/⁄∕]|out\s+of(?:\s+an?\s+\w+(?:\s+of)?)?|of|von|sur|de|su|из|满分|滿分|max(?:imum)?:?){_GAP}({_NUM})"
    rf"|on\s+an?\s+({_NUM})[- ]point\s+scale"
    rf"|(?:on\s+(?:a|the)\s+)?scale:?(?:\s*(?:of|from))?\s*{_NUM}\s*(?:[-–]|to)\s*({_NUM}))"
    r"(?:\s*[分点點점])?\s*[)\]]?(?![\w/])"
)
_GLUED = re.compile(r"[.,]?[0-9]|[A-Za-z_\u00c0-\u024f/⁄∕]|[分点點점][0-9]")
_PERCENT = re.compile(rf"{_GAP}(?:\\?%|percent|per\s+cent)", re.I)
# Before a second number these make a range, a choice, a sum or a table row.
_MORE = re.compile(
    rf"(?i)(?:{_GAP}(?:[-‐-―~〜+*×÷→±|、至到或]|->|から|to|or|and|bis))?{_GAP}\[?{_NUM}|{_GAP}\+(?!\w)"
    rf"|{_GAP}(?:or|and)\s+(?:more|less|above|below|higher|lower)|,{_GAP}{_NUM}{_GAP}(?:[,;.\n]|$)"
)
_UNFINISHED = re.compile(rf"{_GAP}(?:(?:[.,/]|out|out of|of){_GAP})?\Z", re.I)
_NON_FINITE = r"[-+]?(?:nan|inf(?:inity)?|∞)(?![A-Za-z])"
# A label with one of these has spoken and cannot be read: an earlier value must not stand in for it.
_VOID = (
    r"(?:n/?a|none|null|nil|unknown|undefined|tbd|not\s+\w+|zero|one|two|three|four|five|six|seven|eight|nine|ten"
    r"|(?-i:I{2,3}|I?[VX]I{0,3})|[无無零一二三四五六七八九十])(?!\w)|[-–—?](?=\s|$)"
    r"|(?:[~≈<>≤≥]=?|about|around|approx\w*|roughly|between|nearly|almost|over|under|at\s+\w+)\s*[0-9]"
)
_VALUE = re.compile(
    rf"{_OPEN}(?:(?P<odd>{_NON_FINITE})|(?P<void>{_VOID})|(?P<num>{_NUM})[\"'”’」』»)\]}}>$]*)", re.I
)
_CHOICE = r"\s*(?:[/|&<>=]|(?:or|and|vs)\b)"


def _numbers(lo: float, hi: float, open_end: bool) -> _Value:
    """Reads the number whose opening brackets begin at `pos`; None where there is only prose."""

    def value(s: str, pos: int) -> tuple[Judgement, int] | None:
        if not (m := _VALUE.match(s, pos)):
            return None
        if not (number := m["num"]):
            return Judgement("non_finite" if m["odd"] else "no_match", None, m[0].strip()), m.end()
        unit = _UNIT.match(s, m.end())
        out_of = _OUT_OF.match(s, unit.end() if unit else m.end())
        after = out_of.end() if out_of else unit.end() if unit else m.end()
        percent = _PERCENT.match(s, after)
        end = percent.end() if percent else after
        scale = _float(next(filter(None, out_of.groups()))) if out_of else 100.0 if percent else hi
        if (_GLUED.match(s, after) and not out_of) or s[after : after + 1].isnumeric() or len(number) > 40:
            return Judgement("no_match", None, s[m.start("num") : end]), end
        if _MORE.match(s, end):
            return Judgement("ambiguous", None, s[m.start("num") : end]), end
        if open_end and _UNFINISHED.match(s, end):
            return Judgement("truncated", None, s[m.start("num") : end]), end
        if scale != hi or (percent and lo != 0):
            return Judgement("scale_mismatch", None, s[m.start("num") : end]), end
        return _bounded(_float(number), lo, hi, s[m.start("num") : end]), end

    return value


def _float(number: str) -> float:
    return float(re.sub(r",(?=[0-9]{1,2}$)", ".", number).replace(",", ""))


def _bounded(value: float, lo: float, hi: float, matched: str) -> Judgement:
    if lo <= value <= hi:
        return Judgement("ok", value, matched)
    return Judgement("out_of_bounds" if math.isfinite(value) else "non_finite", None, matched)


def _words(lo: float, hi: float, places: Mapping[str, float]) -> _Value:
    """Reads a word. `places`: a regular expression for each, and its place from 0 (lo) to 1 (hi)."""
    end = rf"(?![\w-])(?P<choice>{_CHOICE})?"
    known = [(re.compile(f"{_OPEN}(?:{w}){end}", re.I), lo + at * (hi - lo)) for w, at in places.items()]

    def value(s: str, pos: int) -> tuple[Judgement, int] | None:
        for word, score in known:
            if m := word.match(s, pos):
                ok = not m["choice"]  # "yes or no", "A > B"
                return Judgement("ok" if ok else "ambiguous", score if ok else None, m[0]), m.end()
        return None

    return value


def _whole(content: str, value: _Value) -> Judgement | None:
    """The value that fills `content` (a tag, a box, a JSON string, a line); None if it is not alone."""
    read = value(content, 0) if len(content) < 200 else None
    filled = read and (read[0].status == "ambiguous" or not content[read[1] :].strip(" \t\r\n.!。\"'”’)]}"))
    return read[0] if read and filled else None


# ── The forms: every verdict of one form, by position ───────────────────────────────────────────────────────

# What may stand before a label on its line. After another word it names another quantity.
_PLAIN = re.compile(
    r"(?i)(?:[0-9]|(?:^|[^\w\s'’]|\b(?:(?:final|overall|total)\s+\w+|actually|final|overall|total|aggregate|weighted|global|average|mean|new|revised|updated|adjusted"
    r"|numeric|my|the|an?|your|this|its|our|is|so|thus|hence|therefore|and|with|give[sn]?|say|assign(?:ed)?|answer"
    r"|response|solution|evaluation)|最[终終]|[综綜]合|総合|总体?|總|整体|最后|的|给出?|최종|종합|총)\s*)$"
)
_SAID = re.compile(r"(?i)\b(?:says|said|wrote|writes|claims|claimed|asks|asked)(?:for|its|that|a|the|\W)*$")
_SCALED = r"\s*(?:(?:\(([^()\n]{0,40})\)|(out\s+of\s+[0-9.]+))\s*)?"  # "Score (1-10):", "Score out of 10:"
_SCALE = re.compile(r"(?:/|out\s+of|max\w*:?|[-–~]|to|满分)\s*([0-9][0-9.]*)\D*$", re.I)


def _label(label: str, suffix: str) -> str:
    """The declared label as a pattern: any space around its colon, and "=" will do for the colon."""
    if not (label := _plain(label)):
        raise ValueError("parse: the label is empty")
    core = (label.rstrip(":= ") or label) + suffix
    edge = "(?<![A-Za-z'’])" if core[0].isalpha() else "(?<![0-9])" if core[0].isdigit() else ""
    separator = r"(?:[:=]|(?=\s*[-+.0-9\[(]))" if label[-1] not in ":= " else "[:=]" if core != label else ""
    return edge + r"\s+".join(map(re.escape, core.split())) + _SCALED + separator


def _labelled(s: str, label: str, value: _Value) -> list[Found]:
    found = []
    no_list = r"(?![ \t]*\n\s*[0-9]+[.)]\s+\S)"  # "Score:", and below it "1. Accuracy"
    for m in re.finditer(f"(?:{label}){no_list}", s, re.I | re.M):
        before = s[max(0, m.start() - 80) : m.start()].rpartition("\n")[2]
        rank = 0 if before.rfind("(") > before.rfind(")") else 4  # in parentheses: an aside
        if _SAID.search(before[-30:]) or (m[0][:1].isalpha() and not _PLAIN.search(before[-30:])):
            continue
        if read := value(s, m.end()):
            scale = _SCALE.search("".join(filter(None, m.groups())))
            other = value(f"0/{scale[1]}", 0) if scale else None
            read = other if other and other[0].status == "scale_mismatch" else read
            found.append((rank, m.start(), read[0]))
        elif not s[m.end() : m.end() + 8].strip(" \n\"'([{<$"):
            found.append((rank, m.start(), Judgement("truncated", None, m[0])))
    return found


_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LATEX = re.compile(r"\\(?:text|math|operatorname|displaystyle)[a-z]*|\\[,;!: ]|[{}$~]")
_INNER_LABEL = re.compile(r"\s*[^\W\d_]{2,20}(?:\s+[^\W\d_]{1,20})?\s*[:=]")
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
        unread = (0, m.start(), Judgement("no_match", None, m[0][:80]))
        found.append((4, m.start(), judgement) if judgement else unread)
    return found


def _alone(s: str, value: _Value) -> list[Found]:
    lines = [re.sub(r"</?\w+>", "", line).strip(" \t\r#>|") for line in s.split("\n") if line.strip()]
    ends = {0: "\n" * (len(lines) > 1), len(lines) - 1: ""} if lines else {}
    read = [(i, _whole(lines[i] + end, value)) for i, end in ends.items()]
    return [(1, i, judgement) for i, judgement in read if judgement]


_DECODER = json.JSONDecoder(object_pairs_hook=tuple, parse_int=float, strict=False)  # a tuple is an object
_JSON_START = re.compile(r"\{(?=\s*(?:\"|\Z))|\[(?=\s*\{)")
_BACKSLASH = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')  # a lone one is LaTeX in a string


def _json(text: str, keys: Sequence[str], value: _Value, number: Callable[[float], Judgement]) -> list[Found]:
    text = _BACKSLASH.sub(lambda m: m[0] if len(m[0]) > 1 else r"\\", text).rstrip()
    found, pos, budget = [], 0, 100 * len(text) + 1000  # characters that failures may read: linear time
    while budget > 0 and (m := _JSON_START.search(text, pos)):
        try:
            decoded, pos = _DECODER.raw_decode(text, m.start())
        except json.JSONDecodeError as e:
            if e.pos >= len(text) or e.msg.startswith("Unterminated"):
                return [*found, (4, m.start(), Judgement("truncated"))]
            pos, budget = m.end(), budget - e.pos - 1
        except RecursionError:
            return [*found, (4, m.start(), Judgement("no_match"))]
        else:
            pairs = decoded if isinstance(decoded, tuple) else ()
            hits = [v for k, v in pairs if k.strip().lower() in keys and not isinstance(v, (tuple, list))]
            read = [number(v) if isinstance(v, float) else _whole(_plain(str(v)), value) for v in hits]
            agreed = {j or Judgement("no_match") for j in read}
            if hits:
                found.append((4, m.start(), agreed.pop() if len(agreed) == 1 else Judgement("ambiguous")))
    return found


# ── parse ───────────────────────────────────────────────────────────────────────────────────────────────────
def normalise(score: float, lo: float, hi: float) -> float:
    """(score − lo)/(hi − lo), in [0, 1]. Raises ValueError for a score outside the bounds."""
    if not lo < hi or not lo <= score <= hi:
        raise ValueError(f"normalise: expected lo <= score <= hi, lo < hi; got {score=}, {lo=}, {hi=}")
    return (score - lo) / (hi - lo)


def parse(
    text: str | None, *, format: str | Reader = "label", label: str = "Score:", lo: float = 0.0,
    hi: float = 10.0, match: str = "last", finish_reason: str | None = "stop", key: str = "score",
    tag: str = "score", nonce: str | None = None, words: Mapping[str, float] | None = None,
    echo: str | None = None, delimiter: str = "candidate",
) -> Judgement:  # fmt: skip
    """Read the verdict in one reply of a judge. The module's docstring has the forms and the numbers.

    text           what the judge generated, and nothing else
    lo, hi         the declared scale, inclusive
    match          the "last" or "first" verdict, or "unique": ambiguous where verdicts differ
    finish_reason  after "length", "max_tokens" or "abort" a number that ends the text is truncated
    nonce          a secret per call; the label, key or tag is then name_nonce. The only defence against a
                   candidate that makes the judge repeat a verdict after its own
    words          verdicts that are words, and their places from 0 (lo) to 1 (hi): {"yes": 1, "no": 0}
    echo           the judge's prompt: verbatim copies of it are not read
    delimiter      the tag around the candidate in the prompt: such blocks are not read

    Raises ValueError for a wrong argument, never for a text.
    """
    suffix = f"_{nonce}" if nonce else ""
    names = {"label": _label(label, suffix), "json": [(key + suffix).lower()], "tag": re.escape(tag + suffix)}
    forms = [*names, "boxed", "bracket", "line"]
    if not (callable(format) or format in forms) or match not in ("last", "first", "unique"):
        raise ValueError(f"parse: got {format=}, {match=}; formats: a reader, {', '.join(forms)}")
    if not (math.isfinite(lo) and math.isfinite(hi) and lo < hi):
        raise ValueError(f"parse: the scale needs finite lo < hi, got {lo=}, {hi=}")
    if nonce and (format not in names):
        raise ValueError(f"parse: {format=} has no name to carry a nonce; use label, json or tag")
    cut = finish_reason in ("length", "max_tokens", "abort")
    body = (text or "").replace(echo or "\0", "\n").translate(_INVISIBLE)
    if _SENTINEL.match(body):
        return Judgement("error", None, body[:80])
    body = _REASONED.split(body)[-1]
    if _REASONING.search(body):
        return Judgement("truncated")
    body = _without_blocks(body, delimiter, "reasoning", "analysis", "scratchpad")
    if not (s := _plain(body)):
        return Judgement("truncated" if cut else "empty")

    def read(form: str, name: Any = "", words: Mapping[str, float] | None = words) -> list[Found]:
        value = _words(lo, hi, words) if words else _numbers(lo, hi, cut and form in ("label", "line"))
        if form == "json":
            return _json(body, name, value, lambda x: _bounded(x, lo, hi, repr(x)))
        if form == "label":
            return _labelled(s, name, value)
        return _alone(s, value) if form == "line" else _closed(s, form, name, value)

    found = format(read) if callable(format) else read(format, names.get(format, ""))
    if not found:
        return Judgement("truncated" if cut else "no_match")
    top = max(rank for rank, _, _ in found)
    best = [judgement for rank, _, judgement in sorted(found, key=lambda f: f[1]) if rank == top]
    if len({(j.status, j.score) for j in best}) > 1 and (match == "unique" or top < 2):
        return Judgement("ambiguous", None, best[-1].matched)
    return best[0 if match == "first" else -1]
