"""Whether a judge's template, form and numbers can work together, found out before anything starts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import losses
from losses.genrm_prompt import FIELDS
from rl.config import Judge, Scalar
from rl.judges.reading import bounds, read
from rl.types import Ask, Reply, Score

_FIELD = re.compile(r"(\\[A-Za-z]+)?\{([A-Za-z_]\w*)\}")
_WORDS = ("Verdict: {}", "<answer>{}</answer>", "<verdict>{}</verdict>", "[[{}]]")
# One verdict of each format with the best score; of those that a template may choose from, several.
_BEST = {
    "label": ("{name} {hi}",),
    "json": ('{{"{name}": {hi}}}',),
    "tag": ("<{name}>{hi}</{name}>",),
    "boxed": ("\\boxed{{{hi}}}",),
    "yes_no": tuple(words.format("Yes") for words in _WORDS),
    "rubric": tuple(words.format("Yes") for words in _WORDS),
    "pairwise": tuple(words.format("A") for words in _WORDS),
}


def check_template(cfg: Judge | Scalar, has_answers: bool) -> list[str]:
    """What cannot work in a judge's or scalar judge's config, one message each; empty: nothing found.

    `has_answers`: every prompt has the answer that {reference} stands for. The parser is tried on verdicts of
    the declared format, so a label that it cannot find, or a delimiter that hides the verdict, is a fault.
    """
    if isinstance(cfg, Scalar):
        rules = [] if cfg.chat else _fields("scalar", cfg.template, {"candidate"}, has_answers)
        return [message for bad, message in rules if bad]
    faults = [message for bad, message in _rules(cfg, has_answers) if bad]
    return faults or _unreadable(cfg)


def _rules(cfg: Judge, has_answers: bool) -> Iterable[tuple[bool, str]]:
    needs = {"pairwise": {"first", "second"}, "rubric": {"candidate", "criterion"}}
    wanted = needs.get(cfg.format, {"candidate"}) | ({"nonce"} if cfg.nonce else set())
    form = f"judge.format {cfg.format}"
    yield from _fields("judge", cfg.template, wanted, has_answers)
    yield (
        cfg.nonce and cfg.format != "tag",
        f"judge.nonce needs a tag to carry it, and {form} has none: set judge.format tag",
    )
    yield (
        cfg.delimiter is not None and not re.fullmatch(r"[A-Za-z]\w*", cfg.delimiter),
        f"judge.delimiter is the name of a tag: letters, digits, underscores; got {cfg.delimiter!r}",
    )
    yield (
        not (math.isfinite(cfg.lo) and math.isfinite(cfg.hi) and cfg.lo < cfg.hi),
        f"judge.lo must be below judge.hi, both finite, got {cfg.lo} and {cfg.hi}",
    )
    yield cfg.votes < 1, f"judge.votes must be >= 1, got {cfg.votes}"
    yield (
        cfg.votes > 1 and cfg.format == "logprob",
        "judge.format logprob samples nothing, so its votes would all be the same: set judge.votes 1",
    )
    yield (
        cfg.votes > 1 and cfg.temperature == 0,
        "judge.temperature 0 makes all votes the same: raise it, or set judge.votes 1",
    )
    yield (
        cfg.vote == "majority" and cfg.format not in ("yes_no", "rubric"),
        f"judge.vote majority is for yes and no, and {form} has other scores: use mean or median",
    )
    yield from _rubric_rules(cfg)
    yield from _logprob_rules(cfg)
    yield cfg.opponents < 0, f"judge.opponents must be >= 0, got {cfg.opponents}; 0 is all"
    yield (
        cfg.opponents > 0 and cfg.format != "pairwise",
        f"judge.opponents has no effect with {form}: set it to 0, or judge.format pairwise",
    )


def _fields(section: str, template: str, needed: set[str], has_answers: bool) -> Iterable[tuple[bool, str]]:
    r"""A word in braces is a field. Behind a LaTeX command, \boxed{score}, only where it names one."""
    known = needed | {"problem", "reference"}
    found = [(latex, name) for latex, name in _FIELD.findall(template)]
    used = {name for _, name in found}
    unknown = {name for latex, name in found if name not in known and (not latex or name in FIELDS)}
    for name in sorted(needed - used):
        yield True, f"{section}.template must contain {{{name}}}"
    for name in sorted(unknown):
        yield (
            True,
            (
                f"{section}.template has {{{name}}}, which is no field here: use "
                f"{', '.join(f'{{{field}}}' for field in sorted(known))}"
            ),
        )
    yield (
        "reference" in used and not has_answers,
        f"{section}.template asks for {{reference}}, and not every prompt of the data has an answer",
    )


def _rubric_rules(cfg: Judge) -> Iterable[tuple[bool, str]]:
    n, points = len(cfg.criteria), cfg.points or (1.0,) * len(cfg.criteria)
    if cfg.format != "rubric":
        yield (
            bool(cfg.criteria or cfg.points),
            f"judge.criteria and points have no effect with judge.format {cfg.format}: set it to rubric",
        )
        return
    yield not n, "judge.format rubric needs judge.criteria"
    yield any(not c.strip() for c in cfg.criteria), "judge.criteria has an empty criterion"
    yield len(points) != n, f"judge.points has {len(points)} numbers for {n} criteria"
    yield any(not math.isfinite(p) for p in points), f"judge.points must be finite, got {points}"
    yield (
        n > 0 and not any(p > 0 for p in points),
        f"judge.points needs one above 0: with {points} every answer has 0",
    )


def _logprob_rules(cfg: Judge) -> Iterable[tuple[bool, str]]:
    if cfg.format != "logprob":
        return
    n, m = len(cfg.labels), len(cfg.values)
    yield n < 2, f"judge.labels needs two or more, got {cfg.labels}: one label has always its value"
    yield n != m, f"judge.values has {m} numbers for {n} labels"
    outside = [value for value in cfg.values if not cfg.lo <= value <= cfg.hi]
    yield bool(outside), f"judge.values lie on the scale {cfg.lo}..{cfg.hi} (judge.lo, hi), got {outside}"
    yield not 0 < cfg.coverage <= 1, f"judge.coverage is a probability in (0, 1], got {cfg.coverage}"
    try:  # of a server only text comes back: there no label may begin another
        losses.label_logps({}, cfg.labels, whole=not cfg.urls)
    except ValueError as error:
        yield True, f"judge.labels: {error}"


def _unreadable(cfg: Judge) -> list[str]:
    """Verdicts of the declared format that the parser does not read."""
    if cfg.format == "logprob":
        return []
    nonce = "0f1e2d3c" if cfg.nonce else ""
    name, hi = cfg.label + f"_{nonce}" * cfg.nonce, f"{bounds(cfg)[1]:f}".rstrip("0").rstrip(".")
    faults = []
    for form in _BEST[cfg.format]:
        example = form.format(name=name, hi=hi) if cfg.format in ("label", "json", "tag", "boxed") else form
        try:
            said = read(cfg, Ask(text="", about=(0,), seed=0, nonce=nonce), Reply(text=example))
        except ValueError as error:
            faults.append(f"judge.label {cfg.label!r}: {error}")
            continue
        if not isinstance(said.outcome, Score):
            faults.append(
                f"judge.format {cfg.format} cannot read {example!r}: choose another judge.label "
                f"({cfg.label!r}) or judge.delimiter ({cfg.delimiter!r})"
            )
    return faults
