"""Scores and scalar judgements: what is asked of vLLM for them, and what its answers say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from models.config import ModelConfig
from rl.engines.request import check_head, check_ids, check_scores
from rl.engines.vllm_args import classifying, sampling
from rl.engines.vllm_outputs import full_scores, next_scores, no_scores, top_scores
from rl.types import Scores

AT_MOST = 128  # tokens that vLLM looks up beside the sampled one
SCORES_AT_ONCE = 1 << 24  # log-probs of one sequence: they pass through lists of Python numbers


class Scorer:
    """ask(token ids, vLLM's params) → the finished output; at most `at_once` of them are asked for."""

    def __init__(
        self, cfg: ModelConfig, max_len: int, at_once: int, ask: Callable[[list[int], Any], Awaitable[Any]]
    ) -> None:
        self.cfg, self.max_len, self._ask = cfg, max_len, ask
        self._turns = asyncio.Semaphore(at_once)

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        top_k: int,
        full: bool,
        temperature: float,
    ) -> list[Scores]:
        """See VllmEngine.score."""
        check_head("score", self.cfg, "lm")
        size = self.cfg.vocab_size
        check_scores(sequences, starts, top_k, temperature, vocab_size=size, max_len=self.max_len)
        for ids, start in zip(sequences, starts, strict=True):
            if (full or temperature != 1) and len(ids) - start > 1 and len(ids) * size > SCORES_AT_ONCE:
                raise ValueError(
                    f"score: full={full} at temperature {temperature:g} of {len(ids)} tokens times "
                    f"{size} words is more than {SCORES_AT_ONCE} log-probs: use top_k at temperature 1"
                )
        return await _all(
            [
                self._score(list(ids), start, top_k, full, temperature)
                for ids, start in zip(sequences, starts, strict=True)
            ]
        )

    async def _score(self, ids: list[int], start: int, top_k: int, full: bool, temperature: float) -> Scores:
        if start == len(ids):
            return no_scores(self.cfg.vocab_size, top_k, full)
        whole, targets = full or temperature != 1, ids[start:]
        async with self._turns:
            if len(targets) == 1:
                return await self._next(ids[:-1], targets, top_k, full, temperature)
            found = (await self.prompt(ids, -1 if whole else top_k)).prompt_logprobs
        if whole:
            return full_scores(found, targets, top_k, full, temperature)
        return top_scores(found, len(targets), top_k)

    async def _next(
        self, ids: list[int], targets: list[int], top_k: int, full: bool, temperature: float
    ) -> Scores:
        """Of one token after `ids`. The K best are enough where it is one of them, as labels often are."""
        if top_k and not full and temperature == 1:
            scores = next_scores(await self._after(ids, top_k), targets[0], top_k)
            if scores is not None:
                return scores
        return full_scores(await self._after(ids, -1), targets, top_k, full, temperature)

    async def likely(self, ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """See the engine's interface. Raises ValueError for more than 128 tokens: vLLM tells no more."""
        check_head("likely", self.cfg, "lm")
        check_ids("likely", ids, vocab_size=self.cfg.vocab_size, max_len=self.max_len)
        check_ids("likely", tokens, vocab_size=self.cfg.vocab_size, max_len=AT_MOST)
        async with self._turns:
            flat = await self._after(list(ids), len(set(tokens)), logprob_token_ids=sorted(set(tokens)))
        found = dict(zip(flat.token_ids, flat.logprobs, strict=True))
        return np.asarray([found[token] for token in tokens], np.float32)

    async def _after(self, ids: list[int], k: int, **more: Any) -> Any:
        output = await self._ask(ids, sampling(max_tokens=1, temperature=1.0, logprobs=k, **more))
        return output.outputs[0].logprobs

    async def prompt(self, ids: list[int], k: int) -> Any:
        """The output whose `prompt_logprobs` are those of the tokens and of the k best; -1: of all."""
        return await self._ask(ids, sampling(max_tokens=1, temperature=0.0, prompt_logprobs=k))

    async def classify(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        check_head("classify", self.cfg, "score")
        for ids in sequences:
            check_ids("classify", ids, vocab_size=self.cfg.vocab_size, max_len=self.max_len)
        return await _all([self._classify(list(ids)) for ids in sequences])

    async def _classify(self, ids: list[int]) -> float:
        async with self._turns:
            output = await self._ask(ids, classifying())
        return float(output.outputs.data[0])


async def _all(calls: Sequence[Any]) -> list[Any]:
    """Their results, once all have ended; raises the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
