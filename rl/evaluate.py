"""Held-out problems: one sampled answer each, the truth by rule, and what judges say of the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean

from rl.config import Config
from rl.rewards.combine import truths
from rl.rewards.producers import Producer
from rl.seeds import fold_in
from rl.types import Prompt, SampleMeta, Score, Verdict

Answer = Callable[[int, Prompt, int], Awaitable[SampleMeta]]  # (which, prompt, seed) → its answer
JUDGES = ("judge", "scalar")


async def evaluate(
    cfg: Config, producers: Mapping[str, Producer], prompts: Sequence[Prompt], answer: Answer, at_a_time: int
) -> tuple[dict[str, float], list[str]]:
    """(means over the prompts, the answers). The means: `truth` (share of right answers; of each key if there
    are several), and `judge` and `scalar` (mean score over the answers that they could score).

    The same seeds every time, so two calls differ by the weights alone. What nobody could say is left out.
    at_a_time: prompts between their first token and their verdict.
    """
    gate = asyncio.Semaphore(max(1, at_a_time))
    judges = {name: producers[name] for name in JUDGES if name in producers}

    async def one(i: int, prompt: Prompt) -> tuple[SampleMeta, dict[str, Verdict]]:
        seed = fold_in(cfg.seed, "held out", i)
        async with gate:
            meta = await answer(i, prompt, seed)
            said = await asyncio.gather(*(j.rate(prompt, [meta.text], [seed]) for j in judges.values()))
        return meta, {name: verdicts[0] for name, verdicts in zip(judges, said, strict=True)}

    answers = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    right: dict[str, list[float]] = {}
    for prompt, (meta, _) in zip(prompts, answers, strict=True):
        (truth,) = await truths(cfg.reward.rule_name, prompt, [meta.text])
        if truth is not None:
            right.setdefault(prompt.key, []).append(truth)
    result: dict[str, float] = {"prompts": len(answers)}
    if right:
        result["truth"] = fmean(value for values in right.values() for value in values)
    if len(right) > 1:
        result |= {f"truth {key}": fmean(values) for key, values in sorted(right.items())}
    for name in judges:
        scores = [v.outcome.value for _, said in answers if isinstance((v := said[name]).outcome, Score)]
        if scores:
            result[name] = fmean(scores)
    return result, [meta.text for meta, _ in answers]
