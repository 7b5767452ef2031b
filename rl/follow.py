"""One group of samples: from its prompt to everything that judge, rule and teachers say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from rl.admission import Ready
from rl.config import Config
from rl.ledger import Kind, Reason
from rl.lessons import Rated
from rl.rewards.combine import combine, noise, truths
from rl.roles import Pool, Roles
from rl.seeds import fold_in
from rl.teaching import Said, teachers_of
from rl.types import Abstain, Outcome, Prompt, SampleMeta, Score, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(SampleMeta):
    """A sample that cannot be trained, in the place of one without tokens. Nobody is asked about it: it has
    no reward and no weight in any term, and its mates are as they would be without it."""

    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt's samples with all that was said of them. `tokens`, `reference` and what teachers said are
    references."""

    ordinal: int
    prompt: Prompt
    metas: Sequence[SampleMeta]
    verdicts: Sequence[Mapping[str, Verdict]]  # producer → what it says, for each sample
    rewards: tuple[float | None, ...]
    noise: tuple[float, ...] = ()  # variance of each reward; none: all 0
    truth: Sequence[float | None]  # by the rule, which no judge sees; for the metrics
    tokens: Any
    teachers: Mapping[str, Said] = field(default_factory=dict)
    reference: Any = None

    def rewarded(self, weights: Mapping[str, float]) -> Group:
        """The group with its rewards under other weights of the producers."""
        rewards = tuple(combine(outcomes(of), weights) for of in self.verdicts)
        return replace(self, rewards=rewards, noise=noise(self.verdicts, weights))

    @property
    def version_min(self) -> int:
        return min(m.version_min for m in self.metas)

    @property
    def ready(self) -> Ready:
        rewards = [r for r in self.rewards if r is not None]
        return Ready(self.ordinal, self.version_min, self.prompt.key, fmean(rewards) if rewards else None)

    @property
    def rated(self) -> Rated:
        return Rated(
            n_tokens=tuple(m.n_tokens for m in self.metas),
            rewards=self.rewards,
            noise=self.noise,
            weight=self.prompt.weight,
            teachers=tuple(self.teachers),
        )


async def follow(
    cfg: Config,
    roles: Roles,
    prompt: Prompt,
    ordinal: int,
    attempt: int,
    mark: Callable[[Kind], None],
    proven: Callable[[Sequence[SampleMeta]], Awaitable[bool]],
) -> Group | Reason:
    """The finished group, or why there is none: it was aborted as too old, no sample of it can be trained, or
    its sampler could not prove its weights. `mark` is told of every stage that it passes.

    Judging and teaching happen at the same time. Seeds are functions of (seed, ordinal, attempt, index).
    """
    seeds = [fold_in(cfg.seed, "sample", ordinal, attempt, i) for i in range(cfg.sampler.samples)]
    mark("dispatch")
    metas, tokens = await roles.sampler.call(
        "generate", prompt.ids, seeds, f"{ordinal}.{attempt}", deadline=cfg.deadlines.generate, returns=2
    )
    if any(meta.finish == "abort" for meta in metas):
        return "stale"
    if all(isinstance(meta, Broken) for meta in metas):
        return "invalid"
    if not await proven(metas):
        return "infra"
    mark("generate")
    verdicts, teachers, reference = await asyncio.gather(
        _rate(roles, prompt, metas, seeds, mark),
        _teach(cfg, roles, prompt, tokens, mark),
        _score(cfg, roles.reference, tokens),
    )
    return Group(
        ordinal=ordinal,
        prompt=prompt,
        metas=metas,
        verdicts=verdicts,
        truth=await _truth(cfg, prompt, metas, verdicts),
        rewards=tuple(combine(outcomes(of), cfg.reward.weights) for of in verdicts),
        noise=noise(verdicts, cfg.reward.weights),
        tokens=tokens,
        teachers=teachers,
        reference=reference,
    )


async def _truth(
    cfg: Config, prompt: Prompt, metas: Sequence[SampleMeta], verdicts: Sequence[Mapping[str, Verdict]]
) -> Sequence[float | None]:
    if not cfg.reward.rule:
        found = await truths(cfg.reward.rule_name, prompt, [meta.text for meta in metas])
        return [None if isinstance(m, Broken) else truth for m, truth in zip(metas, found, strict=True)]
    said = [of["rule"].outcome for of in verdicts]
    return [outcome.value if isinstance(outcome, Score) else None for outcome in said]


def outcomes(verdicts: Mapping[str, Verdict]) -> dict[str, Outcome]:
    return {name: verdict.outcome for name, verdict in verdicts.items()}


async def _rate(
    roles: Roles,
    prompt: Prompt,
    metas: Sequence[SampleMeta],
    seeds: list[int],
    mark: Callable[[Kind], None],
) -> list[dict[str, Verdict]]:
    """All producers at the same time: for each sample, what each of them says."""
    nobody = {i: Verdict(outcome=Abstain(m.fault)) for i, m in enumerate(metas) if isinstance(m, Broken)}
    places = [i for i in range(len(metas)) if i not in nobody]
    texts, own = [metas[i].text for i in places], [fold_in(seeds[i], "judge") for i in places]
    by_producer = await asyncio.gather(*(p.rate(prompt, texts, own) for p in roles.producers.values()))
    if roles.producers:
        mark("score")
    said = {
        name: nobody | {i: _placed(verdict, places) for i, verdict in zip(places, verdicts, strict=True)}
        for name, verdicts in zip(roles.producers, by_producer, strict=True)
    }
    return [{name: of[i] for name, of in said.items()} for i in range(len(metas))]


def _placed(verdict: Verdict, places: Sequence[int]) -> Verdict:
    """With calls about the group's samples: its producer counted those that it was shown."""
    calls = (replace(call, about=tuple(places[i] for i in call.about)) for call in verdict.calls)
    return replace(verdict, calls=tuple(calls))


async def _teach(
    cfg: Config, roles: Roles, prompt: Prompt, tokens: Any, mark: Callable[[Kind], None]
) -> dict[str, Said]:
    """Teacher → what it says, of all teachers that the prompt's key has, asked at the same time."""
    if not roles.teachers:
        return {}
    names = teachers_of(cfg, prompt.key)
    said = await asyncio.gather(*(_hear(cfg, roles.teachers[name], tokens) for name in names))
    mark("teach")
    return dict(zip(names, said, strict=True))


async def _hear(cfg: Config, pool: Pool, tokens: Any) -> Said:
    said, scores = await pool.call("teach", tokens, deadline=cfg.deadlines.teach, returns=2)
    return replace(said, scores=scores)


async def _score(cfg: Config, pool: Pool | None, tokens: Any) -> Any:
    """A reference to the pool's log-probs of the group's tokens."""
    if pool is None:
        return None
    _, scores = await pool.call("teach", tokens, deadline=cfg.deadlines.teach, returns=2)
    return scores
