"""The engine interface: what a rollout, judge or teacher actor needs of whatever runs its model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from rl.types import Completion, SamplingParams, Scores
from rl.wire.parcel import Parcel, Place

PauseMode = Literal["keep", "recompute", "wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """An engine's proof of the weights that it holds: compared with the trainer's by `rl.sync.verify`.

    `checksums` maps parameter names to `models.weights.checksum`; `probe` are the log-probs [T - 1] of the
    probe tokens.
    """

    version: int
    checksums: Mapping[str, int]
    probe: tuple[float, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)  # of an update: receive, pause, commit, prove


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since start: tokens, seconds of work and of life; and what is running now.

    `kv_use` is the used fraction of the cache of keys and values, `preemptions` count samples that lost
    theirs to others and had to compute it anew, where an engine has those. `slots`: samples that it runs at a
    time at most, as things are now; 0 where it does not say.
    """

    version: int
    running: int
    waiting: int
    sampled_tokens: int
    prompt_tokens: int
    busy_s: float
    wall_s: float
    kv_use: float = 0.0
    preemptions: int = 0
    slots: int = 0


class Engine(Protocol):
    """Token ids in, token ids out. Every constructor is cheap; `start` brings the model up."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def generate(
        self, prompt_ids: Sequence[int], *, params: SamplingParams, seeds: Sequence[int], request_id: str
    ) -> AsyncIterator[tuple[int, Completion]]:
        """Yields (index, completion) for each of len(seeds) samples as it finishes. The prompt is computed
        once.

        A sample is a function of (weights, prompt, params, its seed) alone, whoever shares its batch.
        Raises ValueError where prompt plus max_tokens exceeds the model's length.
        """
        ...

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        top_k: int = 0,
        full: bool = False,
        temperature: float = 1.0,
    ) -> list[Scores]:
        """Log-probs of sequences[i][starts[i]:], each given all tokens before it."""
        ...

    async def likely(self, ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Log-probs [len(tokens)] float32 of each of these as the token after `ids`, at temperature 1."""
        ...

    async def classify(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The score head's number, raw, of the last token of each sequence.

        Raises ValueError for a sequence that is empty or too long, and where the model has no score head.
        """
        ...

    async def place(self) -> Place:
        """Where the weights lie: what decides how new ones get there."""
        ...

    async def update(self, version: int, weights: Parcel, *, mode: PauseMode = "keep") -> UpdateReport:
        """Take new weights between two decoding steps and prove it. They are received while it generates.

        keep: running samples go on over the KV cache of the old weights; recompute: their KV is computed
        anew;
        wait: they finish first and nothing new starts meanwhile.
        """
        ...

    async def pause(self, mode: PauseMode = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_id: str | None = None) -> int:
        """End a request (or all) now; its samples are yielded with finish "abort". Returns how many
        samples."""
        ...

    async def report(self) -> UpdateReport: ...

    def stats(self) -> EngineStats: ...
