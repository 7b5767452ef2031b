"""A generative judge on our own engine: questions in, replies out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from losses import label_ids
from rl.config import Judge as JudgeConfig
from rl.engines.base import Engine, EngineStats
from rl.engines.build import build
from rl.engines.make import Bundle
from rl.types import Ask, Reply, SamplingParams


class LocalJudge:
    """What goes wrong is told by kind in a reply's failure (rl/judges/desk.py lists them), never raised."""

    def __init__(self, bundle: Bundle, cfg: JudgeConfig) -> None:
        self.bundle, self.cfg = bundle, cfg
        self.params = SamplingParams(temperature=cfg.temperature, max_tokens=cfg.max_tokens)
        self._engine: Engine | None = None
        self._starting = asyncio.Lock()
        self._label_ids: dict[tuple[str, ...], list[list[int]]] = {}

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("not started")
        return self._engine

    async def start(self) -> None:
        """Bring the engine up, unless it runs; one that has failed is replaced."""
        async with self._starting:
            if self._engine is not None:
                try:
                    self._engine.stats()
                    return
                except RuntimeError:  # a step of it raised
                    await self.stop()
            engine = build(self.bundle, self.cfg.engine, slots=self.cfg.slots, updates=False)
            await engine.start()
            self._engine = engine

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()

    async def answer(self, asks: Sequence[Ask], seconds: float) -> list[Reply]:
        """A reply per question, each within `seconds`. Questions of the same text share its prefill, and to a
        greedy judge, who would write the same, they are one."""
        places: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
        for i, ask in enumerate(asks):
            places.setdefault((ask.text, ask.said, ask.labels), []).append(i)
        found = await asyncio.gather(*(self._votes([asks[i] for i in of], seconds) for of in places.values()))
        replies = {i: reply for of, part in zip(places.values(), found, strict=True)
                   for i, reply in zip(of, part, strict=True)}  # fmt: skip
        return [replies[i] for i in range(len(asks))]

    async def _votes(self, asks: Sequence[Ask], seconds: float) -> list[Reply]:
        began, found = time.monotonic(), dict[int, Reply]()
        failure = Reply(failure="engine: it ended without an answer")
        try:
            async with asyncio.timeout(seconds):
                ids = self._encode(asks[0])
                if asks[0].labels:
                    found = dict.fromkeys(range(len(asks)), await self._likely(ids, asks[0].labels))
                elif self.params.temperature == 0:
                    await self._write(ids, [asks[0].seed], found)
                    again = [replace(reply, n_prompt=0, n_tokens=0) for reply in found.values()]
                    found |= {i: reply for reply in again for i in range(1, len(asks))}
                else:
                    await self._write(ids, [ask.seed for ask in asks], found)
        except TimeoutError:
            failure = Reply(failure=f"timeout: the engine had not finished after {seconds:.3g} s")
        except ValueError as error:
            failure = Reply(failure=f"question: {error}", again=False)
        except RuntimeError as error:
            failure = Reply(failure=f"engine: {error}")
        took = time.monotonic() - began
        return [found[i] if i in found else replace(failure, seconds=took) for i in range(len(asks))]

    def _encode(self, ask: Ask) -> list[int]:
        """What the judge reads. Raises ValueError where that and its answer are longer than it can read."""
        tokenizer, limit = self.bundle.tokenizer, self.bundle.cfg.max_len
        if self.cfg.chat:
            ids = tokenizer.chat([{"role": "user", "content": ask.text}])
        else:
            ids = [*tokenizer.first_ids, *tokenizer.encode(ask.text)]
        room = 1 if ask.labels else self.cfg.max_tokens
        if len(ids) + room > limit:
            raise ValueError(
                f"the judge reads {limit} tokens at most: {len(ids)} of the question and {room} for the "
                "answer are too many"
            )
        return ids

    async def _write(self, ids: Sequence[int], seeds: Sequence[int], found: dict[int, Reply]) -> None:
        """Fills `found` as samples finish, so that those in time are kept."""
        began, name = time.monotonic(), f"judge-{seeds[0]}"
        samples = self.engine.generate(ids, params=self.params, seeds=seeds, request_id=name)
        async for i, said in samples:
            found[i] = Reply(
                text=self.bundle.tokenizer.decode(said.tokens.tolist()),
                finish=said.finish,
                n_prompt=len(ids),
                n_tokens=len(said.tokens),
                seconds=time.monotonic() - began,
            )

    async def _likely(self, ids: Sequence[int], labels: tuple[str, ...]) -> Reply:
        """log Σ p(token) over each label's spellings as the token after `ids`, at temperature 1."""
        began = time.monotonic()
        if labels not in self._label_ids:
            self._label_ids[labels] = label_ids(self._spell, labels)
        spellings = self._label_ids[labels]
        tokens = sorted({token for of in spellings for token in of})
        found = dict(zip(tokens, (await self.engine.likely(ids, tokens)).tolist(), strict=True))
        logps = tuple(float(np.logaddexp.reduce([found[i] for i in of])) for of in spellings)
        return Reply(label_logps=logps, n_prompt=len(ids), seconds=time.monotonic() - began)

    def _spell(self, word: str) -> list[int]:
        """No ids for a spelling that the judge's alphabet does not have."""
        try:
            return self.bundle.tokenizer.encode(word)
        except ValueError:
            return []
