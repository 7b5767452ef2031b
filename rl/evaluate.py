"""Held-out problems: one sampled answer each, the truth by rule, and what the judge says of the same
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from rl.config import Config
from rl.rewards import RULES
from rl.roles import Roles
from rl.seeds import fold_in
from rl.types import Outcome, Prompt, Score, Verdict


async def evaluate(cfg: Config, roles: Roles, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Means over the prompts: `truth` (share of right answers; of each key if there are several) and
    `judge` (mean
    normalised score over the answers that it could score). The same seeds every time, so two calls differ
    by the
    weights alone. What nobody could say is left out.
    """
    answers = await asyncio.gather(*(_answer(cfg, roles, i, prompt) for i, prompt in enumerate(prompts)))
    right: dict[str, list[float]] = {}
    for prompt, (truth, _) in zip(prompts, answers, strict=True):
        if isinstance(truth, Score):
            right.setdefault(prompt.key, []).append(truth.value)
    judged = [v.outcome.value for _, v in answers if v is not None and isinstance(v.outcome, Score)]
    result: dict[str, float] = {"prompts": len(answers)}
    if right:
        result["truth"] = fmean(value for values in right.values() for value in values)
    if len(right) > 1:
        result |= {f"truth {key}": fmean(values) for key, values in sorted(right.items())}
    if judged:
        result["judge"] = fmean(judged)
    return result


async def _answer(cfg: Config, roles: Roles, i: int, prompt: Prompt) -> tuple[Outcome, Verdict | None]:
    seed, wait = fold_in(cfg.seed, "held out", i), cfg.deadlines
    metas, _ = await roles.sampler.call(
        "generate", prompt.ids, [seed], f"held-out-{i}", deadline=wait.generate, returns=2
    )
    text, verdict = metas[0].text, None
    if roles.judge is not None:
        (verdict,) = await roles.judge.call("judge", prompt, [text], [seed], deadline=wait.judge)
    return RULES[cfg.reward.rule_name](prompt, text), verdict
