"""One group of samples: from its prompt to everything that judge, rule and teachers say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.config import Config, route
from rl.ledger import Kind
from rl.lessons import Rated
from rl.rewards import combine
from rl.roles import Pool, Roles
from rl.seeds import fold_in
from rl.types import Outcome, Prompt, SampleMeta, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt's samples with all that was said of them. `tokens`, `teacher`, `reference` are
    references."""

    ordinal: int
    prompt: Prompt
    metas: Sequence[SampleMeta]
    verdicts: Sequence[Verdict]  # of the judge; empty without one
    outcomes: Sequence[dict[str, Outcome]]  # producer → outcome, for each sample
    told: Sequence[dict[str, Any]]  # what functions said beside their score, for each sample
    rewards: tuple[float | None, ...]
    tokens: Any
    teacher: Any = None
    reference: Any = None

    @property
    def version_min(self) -> int:
        return min(m.version_min for m in self.metas)

    @property
    def rated(self) -> Rated:
        return Rated(
            n_tokens=tuple(m.n_tokens for m in self.metas),
            rewards=self.rewards,
            taught=self.teacher is not None,
        )


async def follow(
    cfg: Config, roles: Roles, prompt: Prompt, ordinal: int, attempt: int, mark: Callable[[Kind], None]
) -> Group | None:
    """The finished group, or None if it was aborted on the way. `mark` is told of every stage that it passes.

    Judging and teaching happen at the same time. Seeds are functions of (seed, ordinal, attempt, index).
    """
    seeds = [fold_in(cfg.seed, "sample", ordinal, attempt, i) for i in range(cfg.sampler.samples)]
    mark("dispatch")
    metas, tokens = await roles.sampler.call(
        "generate", prompt.ids, seeds, f"{ordinal}.{attempt}", deadline=cfg.deadlines.generate, returns=2
    )
    if any(meta.finish == "abort" for meta in metas):
        return None
    mark("generate")
    texts = [meta.text for meta in metas]
    (verdicts, outcomes, told), teacher, reference = await asyncio.gather(
        _rate(cfg, roles, prompt, texts, seeds, mark),
        _teach(cfg, roles, prompt, tokens, mark),
        _score(cfg, roles.reference, tokens),
    )
    return Group(
        ordinal=ordinal,
        prompt=prompt,
        metas=metas,
        verdicts=verdicts,
        outcomes=outcomes,
        told=told,
        rewards=tuple(combine(by_producer, cfg.reward.weights) for by_producer in outcomes),
        tokens=tokens,
        teacher=teacher,
        reference=reference,
    )


async def _rate(
    cfg: Config,
    roles: Roles,
    prompt: Prompt,
    texts: list[str],
    seeds: list[int],
    mark: Callable[[Kind], None],
) -> tuple[Sequence[Verdict], list[dict[str, Outcome]], list[dict[str, Any]]]:
    """Judge, rule and functions at the same time: (the judge's verdicts, producer → outcome of each sample,
    what functions told of each sample beside the score)."""
    judge, producers = roles.judge, roles.producers()
    wait = {name: cfg.deadlines.judge if name == "rule" else _longest_queue(cfg) for name in producers}
    own = [fold_in(seed, "judge") for seed in seeds]
    verdicts, rated = await asyncio.gather(
        judge.call("judge", prompt, texts, own, deadline=cfg.deadlines.judge) if judge else _none(),
        asyncio.gather(
            *(p.call("rate", prompt, texts, deadline=wait[name]) for name, p in producers.items())
        ),
    )
    outcomes: list[dict[str, Outcome]] = [{} for _ in texts]
    told: list[dict[str, Any]] = [{} for _ in texts]
    for by_producer, verdict in zip(outcomes, verdicts, strict=False):
        by_producer["judge"] = verdict.outcome
    for name, ratings in zip(producers, rated, strict=True):
        for i, (outcome, metrics) in enumerate(ratings):
            outcomes[i][name] = outcome
            told[i] |= {f"{name}/{key}": value for key, value in metrics.items()}
    if judge or producers:
        mark("score")
    return verdicts, outcomes, told


def _longest_queue(cfg: Config) -> float:
    """Seconds until a function must have answered, if every call before ours takes all its time."""
    calls = (cfg.staleness.max_age + 1) * cfg.trainer.prompts * cfg.sampler.samples
    return cfg.deadlines.judge + cfg.reward.fn_deadline * calls / cfg.reward.fn_workers


async def _none() -> tuple[()]:
    return ()


async def _teach(cfg: Config, roles: Roles, prompt: Prompt, tokens: Any, mark: Callable[[Kind], None]) -> Any:
    if not roles.teachers:
        return None
    scores = await _score(cfg, roles.teachers[route(cfg)[prompt.key]], tokens)
    mark("teach")
    return scores


async def _score(cfg: Config, pool: Pool | None, tokens: Any) -> Any:
    """A reference to the pool's log-probs of the group's tokens."""
    if pool is None:
        return None
    _, scores = await pool.call("teach", tokens, deadline=cfg.deadlines.teach, returns=2)
    return scores
