"""The generative judge's shell: an answer's text in, a verdict with a typed outcome out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import losses
from rl.config import Judge as JudgeConfig
from rl.engines.base import EngineStats
from rl.engines.make import Bundle, make_engine
from rl.types import Completion, InfraFail, Outcome, ParseFail, Prompt, SamplingParams, Score, Verdict


def outcome_of(text: str, finish: str, cfg: JudgeConfig) -> Outcome:
    """What the judge's own text says, on the scale [0, 1]; whatever is not a score within the bounds is a
    ParseFail."""
    read = losses.parse(text, format="label", label=cfg.label, lo=cfg.lo, hi=cfg.hi, finish_reason=finish)
    if read.score is None:
        return ParseFail(read.status, text)
    return Score(losses.normalise(read.score, cfg.lo, cfg.hi))


class Judge:
    def __init__(self, bundle: Bundle, cfg: JudgeConfig) -> None:
        self.engine = make_engine(bundle, slots=cfg.slots)
        self.tokenizer, self.cfg = bundle.tokenizer, cfg
        self.params = SamplingParams(temperature=cfg.temperature, max_tokens=cfg.max_tokens)

    async def start(self) -> None:
        await self.engine.start()

    async def judge(self, prompt: Prompt, texts: Sequence[str], seeds: Sequence[int]) -> list[Verdict]:
        """One verdict per answer; a failure concerns its own answer only."""
        return await asyncio.gather(*(self._one(prompt, t, s) for t, s in zip(texts, seeds, strict=True)))

    async def _one(self, prompt: Prompt, text: str, seed: int) -> Verdict:
        began = time.monotonic()
        try:
            said = await self._ask(prompt, text, seed)
        except (
            ValueError,
            RuntimeError,
        ) as error:  # the one boundary where a judge's failure becomes an outcome
            return Verdict(
                outcome=InfraFail(f"{type(error).__name__}: {error}"), seconds=time.monotonic() - began
            )
        reply = self.tokenizer.decode(said.tokens.tolist())
        return Verdict(
            outcome=outcome_of(reply, said.finish, self.cfg),
            text=reply,
            n_tokens=len(said.tokens),
            seconds=time.monotonic() - began,
        )

    async def _ask(self, prompt: Prompt, text: str, seed: int) -> Completion:
        fields = {"problem": prompt.text, "candidate": text}
        if prompt.answer is not None:
            fields["reference"] = prompt.answer
        cfg = self.cfg
        text = losses.render(
            cfg.template, fields, neutralise=cfg.neutralise, delimiter=cfg.delimiter, verdict=[cfg.label]
        )
        ids = self.tokenizer.encode(text)
        replies = self.engine.generate(ids, params=self.params, seeds=[seed], request_id=f"judge-{seed}")
        return [reply async for _, reply in replies][0]

    async def stats(self) -> EngineStats:
        return self.engine.stats()

    async def stop(self) -> None:
        await self.engine.stop()
