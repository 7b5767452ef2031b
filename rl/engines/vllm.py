"""vLLM behind the engine interface: our names, seeds and versions on its AsyncLLM."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from models.checksum import add_checksums
from models.config import ModelConfig
from models.delta import Delta, digest
from models.weights import Weights, as_tensor, check_state
from rl.engines.base import EngineStats, PauseMode, UpdateReport
from rl.engines.request import check_head, check_mode, check_request
from rl.engines.vllm_args import HOLDING, VllmOptions, sampling
from rl.engines.vllm_core import Core
from rl.engines.vllm_outputs import completion, top_scores
from rl.engines.vllm_room import Room, asked
from rl.engines.vllm_samples import Sample, Tally, Turns
from rl.engines.vllm_scores import Scorer
from rl.types import Completion, SamplingParams, Scores
from rl.wire.parcel import Parcel, Place

NOTHING = Completion(
    tokens=np.zeros(0, np.int32),
    logps=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    finish="abort",
)


class VllmEngine:
    """`rl.engines.base.Engine` over vLLM, whose scheduler and workers are processes of their own.

    `state` are the weights by name, or the folder that holds them; none: random ones, until the first update.
    Samples beyond `max_slots`, or beyond what vLLM's cache has room for (rl/engines/vllm_room.py), wait here,
    in the order of their arrival. The same seed draws the same tokens, but for rounding by the batch's size.
    If a process of vLLM dies, every waiting caller gets a RuntimeError, and so does every later call.

    "Efficient Memory Management for Large Language Model Serving with PagedAttention", Kwon et al. 2023.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        state: Mapping[str, object] | str | Path,
        *,
        version: int = 0,
        max_slots: int = 256,
        max_len: int | None = None,
        probe_ids: Sequence[int] = (),
        options: VllmOptions | None = None,
    ) -> None:
        self.cfg, self.max_len, self.max_slots = cfg, max_len or cfg.max_len, max_slots
        self._state: Weights | str = str(state) if isinstance(state, str | Path) else cast(Weights, state)
        self._probe_ids = list(probe_ids)
        self._turns = Turns(max_slots)
        self._tally = Tally(version, self._turns, self._begin_anew)
        self._core = Core(cfg, max_slots, self.max_len, options or VllmOptions())
        self._names = (f"viva-{i}" for i in itertools.count())
        self._samples: set[Sample] = set()  # under way, or waiting for their turn
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = ""  # digest of the weights, as last reported
        self._paused = False
        self._asked, self._asked_since, self._busy = 0, 0.0, 0.0

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Bring vLLM up: some seconds on a CPU, a minute or two on CUDA. Raises what vLLM raises."""
        self._began = time.perf_counter()
        self._scorer = Scorer(
            self.cfg, self.max_len, self.max_slots, lambda ids, p: self._ask(next(self._names), ids, p)
        )
        self._updating, self._still, self._unpaused = asyncio.Lock(), asyncio.Lock(), asyncio.Event()
        self._unpaused.set()
        await self._core.start(self._state, self._tally)
        self._tally.alone(self._core.llm)
        cache = self._core.llm.vllm_config.cache_config
        self._turns.room = Room(
            slots=self.max_slots, blocks=cache.num_gpu_blocks or 0, block=cache.block_size or 1
        )
        del self._state
        gc.collect()
        gc.freeze()  # else Python goes through all of torch and vLLM again and again, for 0.4 s each time

    async def stop(self) -> None:
        """Abort what runs and end vLLM's processes; every later call raises RuntimeError."""
        if self._core.error is None:
            await self.abort()
            while self._samples:  # what was aborted is still on its way to its callers
                await asyncio.sleep(0.001)
        gc.unfreeze()
        await self._core.stop()

    # ── Samples ───────────────────────────────────────────────────────────────────────────────────

    async def generate(
        self, prompt_ids: Sequence[int], *, params: SamplingParams, seeds: Sequence[int], request_id: str
    ) -> AsyncIterator[tuple[int, Completion]]:
        self._core.check()
        check_head("generate", self.cfg, "lm")
        check_request(prompt_ids, params, vocab_size=self.cfg.vocab_size, max_len=self.max_len)
        samples = [Sample(request=request_id, index=i, seed=seed % 2**63) for i, seed in enumerate(seeds)]
        self._samples.update(samples)
        self._turns.room = asked(self._turns.room, len(prompt_ids) + params.max_tokens)
        with self._at_work():
            tasks = [asyncio.create_task(self._sample(list(prompt_ids), params, x)) for x in samples]
            try:
                for done in asyncio.as_completed(tasks):
                    yield await done
            finally:  # of a caller that has gone, the rest
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, ids: list[int], params: SamplingParams, sample: Sample) -> tuple[int, Completion]:
        try:
            if not await self._core.guard(lambda _: self._turns.wait(sample)):
                return sample.index, NOTHING
            try:
                finish = await self._ask_until_current(ids, params, sample)
            finally:
                self._turns.release()
        finally:
            self._samples.discard(sample)
        return sample.index, completion(sample, finish, greedy=params.temperature == 0)

    async def _ask_until_current(self, ids: list[int], params: SamplingParams, sample: Sample) -> str | None:
        wanted = sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=sample.seed,
            max_tokens=params.max_tokens,
            stop_token_ids=[*self.cfg.eos_ids, *params.stop_ids],
            logprobs=0,
            extra_args={HOLDING: True},
        )
        while True:
            sample.begin(next(self._names), self._tally.epochs.now.salt)
            self._tally.live[sample.name] = sample
            try:
                output = await self._ask(sample.name, ids, wanted, sample)
            finally:
                del self._tally.live[sample.name]
            if not (sample.outdated and sample.wanted):
                return output.outputs[0].finish_reason

    async def _ask(self, name: str, ids: list[int], params: Any, sample: Sample | None = None) -> Any:
        prompt = {"prompt_token_ids": ids, "cache_salt": self._tally.epochs.now.salt}
        output = await self._core.ask(name, prompt, params, lambda: sample is None or sample.wanted)
        self._tally.prompt_tokens += len(ids) - (getattr(output, "num_cached_tokens", None) or 0)
        return output

    def _begin_anew(self, sample: Sample) -> None:
        task = asyncio.create_task(self._core.abort([sample.name]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abort(self, request_id: str | None = None) -> int:
        self._core.check()
        cut = [s for s in self._samples if s.wanted and request_id in (None, s.request)]
        for sample in cut:
            sample.wanted = False
            self._turns.cut(sample)
        await self._core.abort([s.name for s in cut if s.name])
        return len(cut)

    # ── Scores ────────────────────────────────────────────────────────────────────────────────────

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        top_k: int = 0,
        full: bool = False,
        temperature: float = 1.0,
    ) -> list[Scores]:
        """As the interface says. vLLM tells log-probs of a prompt at temperature 1: another one, and `full`,
        of more than one token need the whole vocabulary at every position of the sequence.

        Raises ValueError where that is more than 2^24 numbers for one sequence.
        """
        self._core.check()
        with self._at_work():
            return await self._scorer.score(
                sequences, starts, top_k=top_k, full=full, temperature=temperature
            )

    async def likely(self, ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        self._core.check()
        with self._at_work():
            return await self._scorer.likely(ids, tokens)

    async def classify(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        self._core.check()
        with self._at_work():
            return await self._scorer.classify(sequences)

    # ── Weights ───────────────────────────────────────────────────────────────────────────────────

    async def place(self) -> Place:
        gpus = await self._core.rpc("viva_gpu")
        return Place(tuple(gpu for gpu in gpus if gpu), ranks=len(gpus))

    async def update(self, version: int, weights: Parcel, *, mode: PauseMode = "keep") -> UpdateReport:
        """As the interface says. vLLM stands still for one copy from memory to memory; the weights are
        received before that, and proven after it. An update whose caller goes away is finished all the same.

        "wait" waits for `resume` where the engine is paused, and so does the report, whose probe vLLM must
        run. Raises ValueError where names, shapes or types do not fit; then nothing has changed.
        """
        self._core.check()
        check_mode("update", mode)
        if isinstance(weights, Mapping):
            weights = self._checked(cast(Weights, weights))
        elif isinstance(weights, Delta) and weights.before != self._held:
            raise ValueError(f"VllmEngine: the delta is of version {weights.base}, which it does not hold")
        task = asyncio.create_task(self._update(version, weights, mode))
        return await asyncio.shield(task)

    def _checked(self, weights: Weights) -> dict[str, Tensor]:
        new = {name: as_tensor(w) for name, w in weights.items()}
        check_state(self.cfg, {name: tuple(w.shape) for name, w in new.items()}, where="VllmEngine")
        for name, w in new.items():
            if not w.is_floating_point():
                raise ValueError(f"VllmEngine: {name} is {w.dtype}, expected floating-point numbers")
        return new

    async def _update(self, version: int, weights: Parcel, mode: PauseMode) -> UpdateReport:
        async with self._updating:
            if mode == "wait":
                await self._core.guard(lambda _: self._unpaused.wait())
            began = time.perf_counter()
            await self._core.stage(weights)
            async with self._still:
                received = time.perf_counter()
                await self._core.pause("wait" if mode == "wait" else "keep", clear_cache=mode != "keep")
                paused = time.perf_counter()
                await self._core.rpc("viva_commit")
                self._tally.epochs.begin(time.monotonic(), version, keep=mode == "keep")
                if not self._paused:
                    await self._core.resume()
                resumed = time.perf_counter()
            report = await self._report()
            seconds = {"receive": received - began, "pause": paused - received, "commit": resumed - paused}
            return replace(report, seconds={**seconds, "prove": time.perf_counter() - resumed})

    async def report(self) -> UpdateReport:
        """As the interface says; of a paused engine after `resume`."""
        self._core.check()
        async with self._updating:
            return await self._report()

    async def _report(self) -> UpdateReport:
        sums = add_checksums(await self._core.background("_viva_checksums"))
        self._held = digest(sums)
        probe: tuple[float, ...] = ()
        if len(self._probe_ids) > 1 and self.cfg.head == "lm":
            output = await self._scorer.prompt(self._probe_ids, 0)
            probe = tuple(top_scores(output.prompt_logprobs, len(self._probe_ids) - 1, 0).logps.tolist())
        version = self._tally.epochs.now.version
        return UpdateReport(version=version, checksums=sums, probe=probe)

    # ── Pause ─────────────────────────────────────────────────────────────────────────────────────

    async def pause(self, mode: PauseMode = "keep") -> None:
        """As the interface says: keep: now; wait: when running samples have finished; recompute: now, and
        `resume` computes the keys and values of running samples anew."""
        self._core.check()
        check_mode("pause", mode)
        async with self._still:
            self._paused = True
            self._unpaused.clear()
            await self._core.pause("wait" if mode == "wait" else "keep", clear_cache=mode == "recompute")
            if mode == "recompute":
                self._tally.epochs.emptied = time.monotonic()
        await asyncio.sleep(0.02)  # the last step's outputs are on their way

    async def resume(self) -> None:
        self._core.check()
        async with self._still:
            self._paused = False
            self._unpaused.set()
            await self._core.resume()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        now = time.perf_counter()
        self._asked_since = self._asked_since if self._asked else now
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1
            if not self._asked:
                self._busy += time.perf_counter() - self._asked_since

    def stats(self) -> EngineStats:
        """`busy_s` is time with anything asked."""
        self._core.check()
        now = time.perf_counter()
        running = sum(bool(sample.spans) for sample in self._samples)
        return EngineStats(
            version=self._tally.epochs.now.version,
            running=running,
            waiting=len(self._samples) - running,
            sampled_tokens=self._tally.sampled_tokens,
            prompt_tokens=self._tally.prompt_tokens,
            busy_s=self._busy + (now - self._asked_since if self._asked else 0.0),
            wall_s=now - self._began,
            kv_use=self._tally.kv_use,
            preemptions=self._tally.preemptions,
            slots=self._turns.room.limit,
        )
