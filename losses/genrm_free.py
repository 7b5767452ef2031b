r"""Read a score where no form was declared: `parse(text, format=free, lo=…, hi=…)`, with `parse` of genrm.py.

The first of these that the reply has; of several on one level the last:

1. a JSON object with one of the usual keys at its top;
2. a label of one of many languages (Score: 7, the overall rating is 7, 最终评分：7, Note : 15/20, [RESULT] 7,
   | Overall | 6 |) or a tag, <score>7</score>; then [[7]]; then \boxed{7}, often the candidate's own;
3. a first or last line that is only a number;
4. a sentence that gives one: "I would rate this a 7 out of 10", "a solid 8/10" at the end.

Criteria without an overall score, praise, and what another says of a score give no score. Prefer a declared
form: this one has more ways to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEYS = ("score", "overall_score", "final_score", "total_score", "overall", "final", "rating", "grade")
TAGS = r"(?:(?:final|overall)_)?(?:score|rating|grade)"

_NUM = r"[0-9]+(?:[.,][0-9]+)?"
_OF = rf"(?:{_NUM}\s*(?:/|out\s+of)\s*{_NUM})"
_WORD = (
    r"(?:scores?|rating|grade|verdict|overall|(?:gesamt)?(?:bewertung|punktzahl|wertung)|punteggio|voto|nota"
    r"|puntuación|puntaje|calificación|pontuação|оценка|評価|评价|評点|スコア|点数|得点|採点|总分|總分|评分|評分"
    r"|打分|得分|分数|점수|평점|النتيجة)"
)
_ARTICLE = r"(?:(?:la|le|ma|il|mi|meine|die|итоговая|общая|моя)\s+)?"
_SCALED = r"\s*(?:(?:\(([^()\n]{0,40})\)|(out\s+of\s+[0-9.]+))\s*)?"  # "Score (1-10):", "Score out of 10:"
LABELS = (
    rf"(?<![A-Za-z'’]){_ARTICLE}(?:"
    rf"{_WORD}(?:\s+(?:finale?|globale?|total|for\s+(?:this|the)\s+\w+))?{_SCALED}"
    rf"(?:[:=|]|(?<=\s)(?:is|at|est|ist|es)\b:?|(?<=\s)(?:[-–—]\s*)?(?={_OF}))"
    # Everyday words: only before a fraction of the scale.
    rf"|(?:note|total|final|points?|marks?|overall)(?:\s*(?:finale?|globale?))?\s*[:=|,](?=\s*{_OF}))"
    rf"|\[RESULT\]\s*:?|^[ \t]*#{{1,6}}[ \t]*(?:final |overall )?{_WORD}[ \t]*(?=\n)"
)
SENTENCES = (
    r"^[^\n]*\b(?:(?:give|rate|grade|award|assign|deserve|merit|earn)s?|score(?=\s+(?:it|this)))\s+"
    r"(?:(?:(?:this|the)\s+[a-z]+|it|this|that|them)\s+)?(?:as\s+)?(?:an?\s+)?"
    rf"(?:(?:final\s+|overall\s+)?(?:score|rating|grade|mark)\s+(?:of|at)\s+)?(?:an?\s+)?(?={_NUM})"
    rf"|^[^\n]*\ba\s+(?:[a-z]+\s+)?(?={_OF}[^\w/]*\Z)|\A(?={_OF})"
)


def free(read: Callable[..., list[tuple[int, int, Any]]]) -> list[tuple[int, int, Any]]:
    """A reader for `genrm.parse`: the verdicts that compete, as (rank, position, judgement)."""
    if verdicts := read("json", KEYS):
        return verdicts
    named = [*read("label", LABELS), *read("tag", TAGS)]
    brackets = [(rank and 3, *rest) for rank, *rest in read("bracket")]
    boxes = [(rank and 2, *rest) for rank, *rest in read("boxed")]
    marked = [*named, *brackets, *boxes]
    if any(rank > 0 for rank, *_ in marked):
        return marked
    return read("line") or read("label", SENTENCES) or marked
