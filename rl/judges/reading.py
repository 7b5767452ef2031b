"""What one reply says, alone: a question and its reply in, a typed outcome on [0, 1] out. Never raises for a
text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import losses
from rl.config import Judge
from rl.types import Ask, InfraFail, Outcome, ParseFail, Reply, Score, Verdict


def read(cfg: Judge, ask: Ask, reply: Reply) -> Verdict:
    """The verdict of one reply of a generative judge, normalised by the declared bounds."""
    if reply.failure:
        return Verdict(outcome=InfraFail(reply.failure))
    if cfg.format == "logprob":
        return _likely(cfg, reply)
    return Verdict(outcome=_written(cfg, ask, reply))


def bounds(cfg: Judge) -> tuple[float, float]:
    """The scale of what is read: of words that of the words, whatever numbers are declared."""
    return (0.0, 1.0) if cfg.format in ("yes_no", "rubric", "pairwise") else (cfg.lo, cfg.hi)


def _written(cfg: Judge, ask: Ask, reply: Reply) -> Outcome:
    lo, hi = bounds(cfg)
    said = losses.parse(
        reply.text,
        **_form(cfg),
        lo=lo,
        hi=hi,
        finish_reason=reply.finish,
        nonce=ask.nonce or None,
        echo=ask.text,
        delimiter=cfg.delimiter or "candidate",
    )
    if said.score is None:
        return ParseFail(said.status, reply.text)
    number = said.matched[:1].isdigit()  # JSON's {"winner": 1} passes as a place on the scale
    if number and (cfg.format == "pairwise" or (cfg.format in ("yes_no", "rubric") and 0 < said.score < 1)):
        return ParseFail("no_match", reply.text)
    return Score(losses.normalise(said.score, lo, hi))


def _form(cfg: Judge) -> dict[str, Any]:
    """Arguments of losses.parse that say where the verdict stands."""
    match cfg.format:
        case "label":
            return {"format": "label", "label": cfg.label}
        case "json":
            return {"format": "json", "key": cfg.label}
        case "tag":
            return {"format": "tag", "tag": cfg.label}
        case "yes_no" | "rubric":
            return {"format": losses.yes_no}
        case "pairwise":
            return {"format": _pair}
        case _:
            return {"format": cfg.format}


def _pair(look: Callable[..., list[Any]]) -> list[Any]:
    """[[A>>B]] … [[B>>A]] where the judge writes these, else A, B or a tie."""
    five = losses.arena(look)
    return five if any(found[2].score is not None for found in five) else losses.pairwise(look)


def _likely(cfg: Judge, reply: Reply) -> Verdict:
    """Σ p(label) · value / Σ p(label)."""
    logps = torch.tensor(reply.label_logps, dtype=torch.float64)
    total = float(logps.exp().sum())
    if len(logps) != len(cfg.labels) or not total <= 1.02:  # no distribution over these labels; NaN too
        return Verdict(outcome=ParseFail("error", reply.text))
    values = [losses.normalise(value, cfg.lo, cfg.hi) for value in cfg.values]
    score, coverage = losses.expected_score(logps, values, min_coverage=cfg.coverage)
    outcome = ParseFail("no_coverage", reply.text) if math.isnan(score) else Score(float(score))
    return Verdict(outcome=outcome, told={"coverage": float(coverage)})
