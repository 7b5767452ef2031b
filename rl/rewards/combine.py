"""Rules, and how the outcomes of several producers become one reward or none. Pure functions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rl.rewards.gsm8k import gsm8k
from rl.rewards.gym import reasoning_gym
from rl.types import Abstain, InfraFail, Outcome, ParseFail, Prompt, Score, Verdict

Rule = Callable[[Prompt, str], Outcome]


def exact(prompt: Prompt, text: str) -> Outcome:
    """1 if the text is the prompt's answer, surrounding white space aside, else 0. Abstains without an
    answer."""
    if prompt.answer is None:
        return Abstain("the prompt has no answer")
    return Score(float(text.strip() == prompt.answer.strip()))


RULES: Mapping[str, Rule] = {"exact": exact, "gsm8k": gsm8k, "reasoning_gym": reasoning_gym}
SLOW = ("reasoning_gym",)  # they wait for another process
UNANSWERED = ("reasoning_gym",)  # they also rate prompts without an answer


async def truths(name: str, prompt: Prompt, texts: Sequence[str]) -> list[float | None]:
    """What the rule says of each text, None where it cannot; the event loop goes on meanwhile."""
    rule = RULES[name]
    if name in SLOW:
        said = [await asyncio.to_thread(rule, prompt, text) for text in texts]
    else:
        said = [rule(prompt, text) for text in texts]
    return [outcome.value if isinstance(outcome, Score) else None for outcome in said]


def combine(outcomes: Mapping[str, Outcome], weights: Mapping[str, float]) -> float | None:
    """Σ weight · score over the terms that scored, or None: a missing reward.

    A term that abstains does not serve this prompt and is left out of the sum. A term that failed makes
    the whole
    reward missing: a part of the sum would rank the sample against group-mates that got the whole.
    """
    scored = [weights[name] * o.value for name, o in outcomes.items() if isinstance(o, Score)]
    failed = any(isinstance(o, ParseFail | InfraFail) for o in outcomes.values())
    return sum(scored) if scored and not failed else None


def noise(said: Sequence[Mapping[str, Verdict]], weights: Mapping[str, float]) -> tuple[float, ...]:
    """Of a group, the variance of each sample's reward: Σ weight² · variance over what voted on it.

    Where all votes but one could not be read nobody knows how far they are apart: it counts as the noisiest
    of the group by the same producer.
    """

    def of(name: str, verdict: Verdict) -> float:
        if verdict.noise is not None or not isinstance(verdict.outcome, Score):
            return verdict.noise or 0.0
        return max((v.noise or 0.0 for verdicts in said if (v := verdicts.get(name))), default=0.0)

    return tuple(sum(weights[name] ** 2 * of(name, v) for name, v in verdicts.items()) for verdicts in said)


def kinds(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Outcomes counted by kind: score, abstain, parse_fail/<status>, infra_fail."""
    return Counter(_kind(o) for o in outcomes)


def _kind(outcome: Outcome) -> str:
    match outcome:
        case Score():
            return "score"
        case Abstain():
            return "abstain"
        case ParseFail(status=status):
            return f"parse_fail/{status}"
        case InfraFail():
            return "infra_fail"
