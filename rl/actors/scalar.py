"""The scalar judge's shell: questions in, raw logits out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rl.config import Scalar
from rl.engines.base import EngineStats
from rl.engines.build import build_classifier
from rl.engines.classifier import Classifier, Row
from rl.engines.make import Bundle
from rl.types import Ask, Reply


def read(classifier: Classifier, ask: Ask, chat: bool) -> Row | str:
    """What the model reads, or why it cannot. With `chat` an empty answer is an empty message."""
    try:
        return classifier.encode(ask.text, ask.said if chat or ask.said else None)
    except ValueError as error:
        return str(error)


def replies(rows: Sequence[Row | str], scores: Sequence[float], replica: str, seconds: float) -> list[Reply]:
    """One reply per row; `scores` are those of the rows that could be read, in their order."""
    left = iter(scores)
    return [_reply(row, left, replica, seconds) for row in rows]


def _reply(row: Row | str, left: Iterator[float], replica: str, seconds: float) -> Reply:
    if isinstance(row, str):
        return Reply(failure=f"question: {row}", again=False, replica=replica, seconds=seconds)
    score, n = next(left), len(row["input_ids"])
    return Reply(score=score, n_prompt=n, replica=replica, seconds=seconds)


class ScalarJudge:
    """`model`: a bundle with a score head, or the folder of any sequence-classification model."""

    def __init__(self, model: Bundle | str | Path, cfg: Scalar, name: str = "scalar") -> None:
        self.cfg, self.name = cfg, name
        self._make = partial(build_classifier, model, cfg.engine, slots=cfg.slots, chat=cfg.chat)
        self._starting = asyncio.Lock()
        self.classifier: Classifier | None = None

    async def start(self) -> None:
        async with self._starting:
            if self.classifier is None:
                classifier = await asyncio.to_thread(self._make)
                await classifier.start()
                self.classifier = classifier
                del self._make  # and the bundle's weights

    async def answer(self, asks: Sequence[Ask], seconds: float = math.inf) -> list[Reply]:
        """One reply per question: a question that the model cannot read fails alone and for good.

        Raises RuntimeError where the model itself fails. A forward pass does not stop after `seconds`: the
        caller's own deadline does.
        """
        classifier, began = self._started, time.monotonic()
        rows = [read(classifier, ask, self.cfg.chat) for ask in asks]
        scores = await classifier.classify([row for row in rows if not isinstance(row, str)])
        return replies(rows, scores, self.name, time.monotonic() - began)

    async def stats(self) -> EngineStats:
        return self._started.stats()

    async def stop(self) -> None:
        if self.classifier is not None:
            await self.classifier.stop()

    @property
    def _started(self) -> Classifier:
        if self.classifier is None:
            raise RuntimeError(f"{self.name}: not started")
        return self.classifier
