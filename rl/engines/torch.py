"""The built-in engine: asyncio around a decoder that runs in a thread of its own, so the loop is never blocked."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import torch

from models.config import ModelConfig
from models.weights import Weights
from rl.engines.base import EngineStats, PauseMode, UpdateReport
from rl.engines.decoder import Decoder, Finished, Request
from rl.types import Completion, SamplingParams, Scores

R = TypeVar("R")


class TorchEngine:
    """`rl.engines.base.Engine` for our Transformer on CPU or CUDA.

    Tokens and log-probs of a sample are the same bits whoever runs beside it. Requests beyond `max_slots` running
    samples wait in the order of their arrival. Deadlines are the caller's. If a step raises, every waiting caller
    gets its error, and so does every later call.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        state: Mapping[str, object],
        *,
        version: int = 0,
        max_slots: int = 256,
        max_len: int | None = None,
        block: int = 64,
        device: str = "cpu",
        probe_ids: Sequence[int] = (),
        threads: int = 1,
    ) -> None:
        self.cfg = cfg
        self.max_len = max_len or cfg.max_len
        self._state: Mapping[str, object] | None = state
        self._options: dict[str, Any] = {
            "version": version, "max_slots": max_slots, "max_len": self.max_len, "block": block,
            "device": device, "probe_ids": tuple(probe_ids), "threads": threads,
        }
        self._inbox: list[Request] = []  # arrived, not yet seen by the decoder
        self._outbox: dict[Request, asyncio.Queue[tuple[int, Completion] | None]] = {}
        self._paused = self._stale = self._stepping = self._stopping = False
        self._holds = 0  # who wants running samples to finish and no others to start
        self._error: BaseException | None = None
        self._busy = 0.0

    # ── Life ────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Build the model and its cache. Raises ValueError where the weights do not fit the config."""
        self._began = time.perf_counter()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()
        self._decoder = await self._call(lambda: Decoder(self.cfg, cast(Weights, self._state), **self._options))
        self._state = None
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Abort what runs and end the thread; every later call raises RuntimeError."""
        if self._error is None:
            await self.abort()
        self._stopping = True
        self._notify()
        await asyncio.wait([self._task])
        self._pool.shutdown()

    async def _run(self) -> None:
        while True:
            await self._until(lambda: self._stopping or self._has_work())
            if self._stopping:
                raise RuntimeError("TorchEngine: stopped")
            arrived, self._inbox = self._inbox, []
            admit = not self._holds
            self._stepping = True
            finished = await self._call(lambda: self._decoder.step(arrived, admit))  # noqa: B023 (awaited here)
            self._stepping = False
            self._deliver(finished)
            self._notify()

    def _has_work(self) -> bool:
        waits = bool(self._inbox or self._decoder.waiting) and not self._holds
        return not self._paused and (waits or bool(self._decoder.owner))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._stepping = False
        for queue in self._outbox.values():
            queue.put_nowait(None)
        self._notify()

    def _check(self) -> None:
        if self._error is not None:  # not raised itself: its traceback would grow with every caller
            raise RuntimeError(f"TorchEngine: {self._error!r}") from self._error

    async def _call(self, function: Callable[[], R]) -> R:
        """Run in the decoder's thread, between two steps."""
        self._check()

        def timed() -> R:
            began = time.perf_counter()
            with torch.inference_mode():
                result = function()
            self._busy += time.perf_counter() - began
            return result

        return await asyncio.get_running_loop().run_in_executor(self._pool, timed)

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._check()
            await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _deliver(self, finished: Sequence[Finished]) -> None:
        for request, index, completion in finished:
            if request in self._outbox:  # else its caller has gone
                self._outbox[request].put_nowait((index, completion))

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Inside, nothing runs: running samples have finished and waiting ones do not start."""
        self._holds += 1
        try:
            await self._until(lambda: not self._stepping and not self._decoder.owner)
            yield
        finally:
            self._holds -= 1
            self._notify()

    # ── The interface ───────────────────────────────────────────────────────────────────────────────────────

    async def generate(
        self, prompt_ids: Sequence[int], *, params: SamplingParams, seeds: Sequence[int], request_id: str
    ) -> AsyncIterator[tuple[int, Completion]]:
        self._check()
        check_request(prompt_ids, params, vocab_size=self.cfg.vocab_size, max_len=self.max_len)
        wrapped = deque((i, (seed + 2**63) % 2**64 - 2**63) for i, seed in enumerate(seeds))
        request = Request(id=request_id, prompt=tuple(prompt_ids), params=params, waiting=wrapped)
        queue = self._outbox[request] = asyncio.Queue()
        left = len(seeds)
        if left:
            self._inbox.append(request)
            self._notify()
        try:
            while left:
                item = await queue.get()
                if item is None:
                    self._check()
                else:
                    left -= 1
                    yield item
        finally:
            del self._outbox[request]
            if left and self._error is None:  # the caller has gone: give its slots back
                arrived, self._inbox = self._inbox, []
                self._pool.submit(self._decoder.abort, arrived, lambda other: other is request)

    async def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, top_k: int = 0, full: bool = False,
        temperature: float = 1.0,
    ) -> list[Scores]:
        """As the interface says; the first token of a sequence has no context, so starts are at least 1."""
        self._check()
        if len(sequences) != len(starts):
            raise ValueError(f"score: {len(sequences)} sequences but {len(starts)} starts")
        if temperature <= 0 or not 0 <= top_k <= self.cfg.vocab_size:
            raise ValueError(f"score: temperature={temperature} must be > 0, top_k={top_k} within the vocabulary")
        for ids, start in zip(sequences, starts, strict=True):
            check_ids("score", ids, vocab_size=self.cfg.vocab_size, max_len=self.max_len)
            if not 1 <= start <= len(ids):
                raise ValueError(f"score: start must be from 1 to {len(ids)} tokens, got {start}")
        return await self._call(lambda: self._decoder.score(sequences, starts, top_k, full, temperature))

    async def update(
        self, version: int, weights: Mapping[str, object], *, mode: PauseMode = "keep"
    ) -> UpdateReport:
        """As the interface says. Weights are copied. Raises ValueError where names, shapes or dtypes do not fit;
        then nothing has changed."""
        new = cast(Weights, weights)
        async with self._updating:
            if mode == "wait":
                async with self._drained():
                    return await self._call(lambda: self._decoder.load(version, new, False))
            return await self._call(lambda: self._decoder.load(version, new, mode == "recompute"))

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding until `resume`: now, or with "wait" when running samples have finished. With "recompute"
        the keys and values of running samples are computed anew at `resume`."""
        self._check()
        if mode == "wait":
            async with self._drained():
                self._paused = True
        self._paused = True
        self._stale |= mode == "recompute"
        await self._until(lambda: not self._stepping)

    async def resume(self) -> None:
        if self._stale:
            await self._call(self._decoder.recompute)
        self._check()
        self._paused = self._stale = False
        self._notify()

    async def abort(self, request_id: str | None = None) -> int:
        arrived, self._inbox = self._inbox, []
        finished = await self._call(
            lambda: self._decoder.abort(arrived, lambda request: request_id in (None, request.id)))
        self._deliver(finished)
        self._notify()
        return len(finished)

    async def report(self) -> UpdateReport:
        return await self._call(self._decoder.report)

    def stats(self) -> EngineStats:
        decoder = self._decoder
        return EngineStats(
            version=decoder.version,
            running=len(decoder.owner),
            waiting=sum(len(r.waiting) for r in [*self._inbox, *decoder.waiting]),
            sampled_tokens=decoder.sampled_tokens,
            prompt_tokens=decoder.prompt_tokens,
            busy_s=self._busy,
            wall_s=time.perf_counter() - self._began,
        )


def check_ids(function: str, ids: Sequence[int], *, vocab_size: int, max_len: int) -> None:
    if not 1 <= len(ids) <= max_len:
        raise ValueError(f"{function}: expected 1 to {max_len} token ids, got {len(ids)}")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"{function}: token ids must be in [0, {vocab_size}), got {min(ids)} to {max(ids)}")


def check_request(ids: Sequence[int], params: SamplingParams, *, vocab_size: int, max_len: int) -> None:
    """Raise ValueError where a sample of this prompt cannot be drawn."""
    check_ids("generate", ids, vocab_size=vocab_size, max_len=max_len)
    if params.max_tokens < 1 or len(ids) + params.max_tokens > max_len:
        raise ValueError(f"generate: {len(ids)} prompt tokens and max_tokens={params.max_tokens} (at least 1) "
                         f"exceed the model's length of {max_len}")
    if params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0:
        raise ValueError(f"generate: expected temperature >= 0, 0 < top_p <= 1 and top_k >= 0, got {params}")
