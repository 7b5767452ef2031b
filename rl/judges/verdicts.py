"""What a judge says of each answer of a group: questions and replies in, one verdict per answer out. Pure.

Only a Score is a reward, 0.0 included. Whatever else a judge writes, or does not, is a missing reward with a
reason, never a number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import losses
from rl.config import Judge, Scalar
from rl.judges.pairwise import missing, win_shares
from rl.judges.questions import criteria, topic
from rl.judges.reading import read
from rl.rewards.combine import kinds
from rl.types import Ask, Call, InfraFail, Outcome, ParseFail, Reply, Score, Verdict


def verdicts(
    cfg: Judge, asks: Sequence[Ask], replies: Sequence[Reply], n: int, *, producer: str = "judge"
) -> list[Verdict]:
    """One verdict per answer of a group of n, from `questions` and their replies in the same order.

    Votes on one question: cfg.vote over those that could be read, one is enough; `noise` s²/votes, the
    variance of their mean; a majority of as many yes as no is 1/2. Rubric: `losses.rubric`, missing where one
    criterion is. Pairwise: rl/judges/pairwise.py. What is missing is a ParseFail with the most common status,
    or an InfraFail where nothing came back at all.

    Raises ValueError where an answer of a pointwise judge has no question, never for a text.
    """
    said = [read(cfg, ask, reply) for ask, reply in zip(asks, replies, strict=True)]
    votes: dict[tuple[tuple[int, ...], str], list[Verdict]] = {}
    for ask, verdict in zip(asks, said, strict=True):
        votes.setdefault((ask.about, topic(ask)), []).append(verdict)
    settled = {question: _vote(cfg, of_one) for question, of_one in votes.items()}
    match cfg.format:
        case "pairwise":
            judged = win_shares({(i, j): verdict for ((i, j), _), verdict in settled.items()}, n)
        case "rubric":
            judged = [_checklist(cfg, _of(settled, i)) for i in range(n)]
        case _:
            judged = [_of(settled, i)[""] for i in range(n)]
    return _with_calls(judged, asks, replies, [verdict.outcome for verdict in said], producer)


def scalar_verdicts(
    cfg: Scalar, asks: Sequence[Ask], replies: Sequence[Reply], n: int, *, producer: str = "scalar"
) -> list[Verdict]:
    """One verdict per answer from a scalar judge's logits: the logit itself, on the model's own scale, or
    1/(1 + exp(−logit))."""
    said = [_activated(cfg, reply) for reply in replies]
    of = {ask.about[0]: Verdict(outcome=outcome) for ask, outcome in zip(asks, said, strict=True)}
    if absent := set(range(n)) - of.keys():
        raise ValueError(f"scalar_verdicts: no question about answers {sorted(absent)} of {n}")
    return _with_calls([of[i] for i in range(n)], asks, replies, said, producer)


def _activated(cfg: Scalar, reply: Reply) -> Outcome:
    if reply.failure:
        return InfraFail(reply.failure)
    if reply.score is None:
        return ParseFail("empty", reply.text)
    if not math.isfinite(reply.score):
        return ParseFail("non_finite", str(reply.score))
    return Score(0.5 + 0.5 * math.tanh(reply.score / 2) if cfg.activation == "sigmoid" else reply.score)


def _of(settled: Mapping[tuple[tuple[int, ...], str], Verdict], i: int) -> dict[str, Verdict]:
    """Topic → verdict, of the questions about answer i."""
    found = {topic: verdict for (about, topic), verdict in settled.items() if about == (i,)}
    if not found:
        raise ValueError(f"verdicts: no question about answer {i}; every answer of the group needs one")
    return found


def _vote(cfg: Judge, votes: Sequence[Verdict]) -> Verdict:
    if len(votes) == 1:
        return votes[0]
    scores = [v.outcome.value for v in votes if isinstance(v.outcome, Score)]
    result, told = losses.vote(scores, how=cfg.vote, tie=0.5), {"votes": len(scores)}
    if result.score is None:
        return Verdict(outcome=missing(votes), told=told)
    return Verdict(outcome=Score(result.score), noise=result.noise, told=told)


def _checklist(cfg: Judge, said: Mapping[str, Verdict]) -> Verdict:
    """Σ points · met / Σ positive points; its noise Σ points² · noise / (Σ positive points)²."""
    names = criteria(cfg)
    points = dict(zip(names, cfg.points or (1.0,) * len(names), strict=True))
    met = {c: v.outcome.value for c, v in said.items() if isinstance(v.outcome, Score)}
    total = losses.rubric({c: met.get(c) for c in said}, points)
    if total is None:
        return Verdict(outcome=missing(list(said.values())), told=met)
    noises = [points[c] ** 2 * noise for c in names if (noise := said[c].noise) is not None]
    positive = sum(p for p in points.values() if p > 0)
    noise = sum(noises) / positive**2 if len(noises) == len(names) else None
    return Verdict(outcome=Score(total), noise=noise, told=met)


# ── The record ──────────────────────────────────────────────────────────────────────────────────────────────


def _with_calls(
    judged: Sequence[Verdict],
    asks: Sequence[Ask],
    replies: Sequence[Reply],
    outcomes: Sequence[Outcome],
    producer: str,
) -> list[Verdict]:
    """Each call in the verdict of the first answer that it is about."""
    calls: list[list[Call]] = [[] for _ in judged]
    for ask, reply, outcome in zip(asks, replies, outcomes, strict=True):
        calls[ask.about[0]].append(_call(ask, reply, outcome, producer))
    return [replace(verdict, calls=tuple(own)) for verdict, own in zip(judged, calls, strict=True)]


def _call(ask: Ask, reply: Reply, outcome: Outcome, producer: str) -> Call:
    (kind,) = kinds([outcome])
    read_by_judge = (ask.text + ask.said).encode("utf-8", "surrogatepass")
    return Call(
        producer=producer,
        prompt=hashlib.sha256(read_by_judge).hexdigest()[:16],
        about=ask.about,
        part=ask.part,
        text=reply.failure or reply.text,
        finish="" if reply.failure else reply.finish,
        outcome=kind,
        score=outcome.value if isinstance(outcome, Score) else None,
        n_prompt=reply.n_prompt,
        n_tokens=reply.n_tokens,
        seconds=reply.seconds,
        replica=reply.replica,
        attempts=reply.attempts,
    )
