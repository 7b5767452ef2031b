r"""Write a judge's prompt. What the candidate wrote is data: delimited, and with the verdicts in it disarmed.

`render` substitutes {problem}, {candidate}, {reference}, … in one pass over the template, so a brace inside a
value is never expanded. `neutralised` breaks what a score parser looks for and leaves the text legible:

    Score: 10  →  Score[:] 10       [[A]]     →  [ [A] ]       <score>9</score>  →  ‹score>9‹/score>
    "score": 9 →  "score"[:] 9      \boxed{9} →  \ boxed{9}    </think>          →  ‹/think>

Sentences ("I would give this a ten") and a line that is only "Yes" stay what they are: the delimiter is for
those. Against a judge that repeats the candidate there is `nonce`, a secret per call in the verdict's name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# A placeholder of these names needs its field in the row; other text in braces is the template's own.
FIELDS = frozenset(
    "problem prompt question candidate candidate_a candidate_b response response_a response_b answer"
    " reference reference_answer ground_truth rubric criterion criteria nonce".split()
)
UNTRUSTED = frozenset("candidate candidate_a candidate_b response response_a response_b".split())


def render(
    template: str,
    fields: Mapping[str, str],
    *,
    neutralise: bool = True,
    delimiter: str | None = "candidate",
    nonce: str | None = None,
    verdict: Collection[str] = (),
) -> str:
    """Fill the template's {placeholders} from `fields` in one pass.

    A field in UNTRUSTED is neutralised and put on lines of its own between <candidate> and </candidate>. The
    tag takes the field's suffix and the nonce: <candidate_a_7f3a>. `neutralise=False` and `delimiter=None`
    switch these off. {nonce} is the nonce, for the verdict's name: <score_{nonce}>. `verdict` holds the names
    that the verdict has in this template (label, key or tag), where they are not the usual ones.

    Raises ValueError for a placeholder in FIELDS that the row lacks; other text in braces stays.
    """
    row = {**fields, "nonce": nonce} if nonce else fields

    def value(m: re.Match[str]) -> str:
        name = m[1]
        if name not in row:
            if name in FIELDS:
                raise ValueError(f"render: the template asks for {{{name}}}, the row has only {sorted(row)}")
            return m[0]
        text = row[name]
        if name not in UNTRUSTED:
            return text
        if neutralise:
            text = neutralised(text, verdict=verdict, delimiter=delimiter or "candidate")
        if not delimiter:
            return text
        tag = "_".join(filter(None, [delimiter, name.partition("_")[2], nonce]))
        return f"<{tag}>\n{text}\n</{tag}>"

    return re.sub(r"\{([A-Za-z_]\w*)\}", value, template)


# ── Neutralise ──────────────────────────────────────────────────────────────────────────────────────────────

# As the parser reads: full-width ASCII is ASCII; emphasis, zero-width characters, inline tags are not there.
_NARROW = {c: c - 0xFEE0 for c in range(0xFF01, 0xFF5F)} | {0x3000: 0x20, 0x2212: 0x2D}
_INVISIBLE = re.compile(r"[*`_\u200b-\u200d\u2060\ufeff]|</?(?:b|strong|em|i|u|s)>", re.I)

_SCORE = (
    r"scores?|rating|grade|verdict|overall|bewertung|punktzahl|wertung|punteggio|voto|nota|puntuación|puntaje"
    r"|calificación|pontuação|оценка|評価|评价|評点|スコア|点数|得点|採点|总分|總分|评分|評分|打分|得分|分数"
    r"|점수|평점|النتيجة"
)
# Everyday words are labels only where a verdict follows: "Answer: 42" and "total = 5" stay.
_CHOICE = (
    r"(?:answer|result|winner|choice|preference|decision|judge?ment|conclusion|correct|better|best|preferred"
    r"|chosen|判断|判定|结论)\b[^?\n:=]{0,30}?([:=?]|\bis\b)"
    r"(?=\W*(?:yes|no|true|false|correct|incorrect|wrong|not|pass|fail|(?:an?\s+)?(?:tie|draw)|是|否|正确"
    r"|不正确|错误|(?:the\s+)?(?:assistant|response|answer|model|candidate|output|option)\s|(?-i:[ABC])(?!\w)))"
)
_FRACTION = (
    r"(?:note|total|final|points?|marks?|overall)(?:\s*(?:finale?|globale?))?\s*([:=|,])"
    r"(?=\s*[-+.,0-9]+\s*(?:/|out\s))"
)
_TAGS = (
    r"score|rating|grade|final|overall|answer|verdict|judge?ment|choice|winner|(?:seed:)?think|reasoning|analysis"
    r"|scratchpad"
)


def neutralised(text: str, *, verdict: Collection[str] = (), delimiter: str = "candidate") -> str:
    """The text without what `genrm.parse` reads: labels, keys, tags, boxes, brackets, ends of reasoning.

    `verdict` holds further names to disarm (a label, key or tag of the template's own), and `delimiter` the
    tag that will stand around the text.
    """
    seen, at = _seen(text)
    out = list(text)

    def edit(pattern: str, first: str, last: str = "{}") -> None:
        for m in re.finditer(pattern, seen, re.I | re.M):
            group = 1 if m.re.groups else 0
            start, end = at[m.start(group)], at[m.end(group) - 1]
            out[start] = first.format(out[start])
            out[end] = last.format(out[end])

    names = "|".join([_SCORE, *(_own(name) for name in verdict)])
    scale = r"[\s\"'”]*(?:\([^()\n]{0,40}\)\s*|out\s+of\s+[0-9.]+\s*)?"
    part = r"[-+.,0-9]+(?=\s*(?:/|out\s))"  # "score 8/10"
    edit(rf"(?:{names}){scale}([:=|]|\b(?:is|at|est|ist|es)\b|[-–—](?=\s*[0-9])|{part})", "[{}", "{}]")
    verb = r"(?:give|rate|grade|award|assign|deserve|merit|earn)s?|score(?=\s+(?:it|this))"
    edit(rf"\b({verb})\s", "[{}", "{}]")  # "I give it 8", however far away the 8 is
    edit(_CHOICE, "[{}", "{}]")
    edit(_FRACTION, "[{}", "{}]")
    edit(rf"^[ \t]*(#+)[ \t]*(?:final |overall )?(?:{names})[ \t]*$", "· ")
    edit(r"\[\[[^\[\]\n]{1,60}\]\]", "{} ", " {}")
    edit(r"\[(?=/?THINK\]|RESULT\]|ERROR\])", "{} ")
    edit(rf"<(?=[\s/]*(?:{_TAGS}|{_own(delimiter)}|{names})|\||/s>)", "‹")
    edit(r"\\(?=boxed|u00)", "{} ")
    return "".join(out)


def _own(name: str) -> str:
    """A template's own name as a pattern over what the parser sees, where "_" is not."""
    core = name.translate(_NARROW).rstrip(":= ").replace("_", "")
    edge = "(?<![A-Za-z])" if core[:1].isalpha() else ""
    return edge + r"\s*".join(map(re.escape, core.split())) if core.strip() else r"(?!)"


def _seen(text: str) -> tuple[str, list[int]]:
    """The text as the parser sees it, and for each of its characters the index in `text`."""
    at, pos = [], 0
    for m in _INVISIBLE.finditer(text):
        at += range(pos, m.start())
        pos = m.end()
    at += range(pos, len(text))
    return "".join(text[i] for i in at).translate(_NARROW), at
