"""The built-in engine: asyncio around a decoder in a thread of its own, so that the loop is never blocked."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import numpy as np
import torch

from models.config import ModelConfig
from models.delta import Delta, apply
from models.weights import Weights
from rl.engines.base import EngineStats, PauseMode, UpdateReport
from rl.engines.decoder import Decoder
from rl.engines.request import (
    Finished,
    Request,
    check_head,
    check_ids,
    check_mode,
    check_request,
    check_scores,
)
from rl.types import Completion, SamplingParams, Scores
from rl.wire.inbox import Inbox, gpu_of
from rl.wire.parcel import Broadcast, Mapped, Parcel, Place

R = TypeVar("R")


class TorchEngine:
    """`rl.engines.base.Engine` for our Transformer on CPU or CUDA.

    On CPU the tokens and log-probs of a sample are the same bits whoever runs beside it; on CUDA they agree
    up to rounding. Samples beyond `max_slots` wait in the order of their arrival. Deadlines are the caller's.
    If a step raises, every waiting caller gets a RuntimeError from it, and so does every later call.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        state: Mapping[str, object],
        *,
        version: int = 0,
        max_slots: int = 256,
        max_len: int | None = None,
        block: int = 32,
        device: str = "cpu",
        probe_ids: Sequence[int] = (),
        threads: int = 1,
    ) -> None:
        self.cfg = cfg
        self.max_len = max_len or cfg.max_len
        self._device, self._slots = torch.device(device), max_slots
        self._wire = Inbox(cfg, self._device)
        self._build = partial(
            Decoder,
            cfg,
            cast(Weights, state),
            version=version,
            max_slots=max_slots,
            max_len=self.max_len,
            block=block,
            device=device,
            probe_ids=probe_ids,
            threads=threads,
        )
        self._inbox: list[Request] = []  # arrived, not yet seen by the decoder
        self._outbox: dict[Request, asyncio.Queue[tuple[int, Completion] | None]] = {}
        self._paused = self._stale = self._stepping = self._stopping = False
        self._holds = 0  # callers that want running samples to finish and no others to start
        self._error: BaseException | None = RuntimeError("not started")
        self._task: asyncio.Task[None] | None = None
        self._busy = 0.0

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Build the model and its cache. Raises ValueError where the weights do not fit the config."""
        self._began = time.perf_counter()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()
        self._decoder = await self._submit(self._build)
        del self._build
        self._error = None
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Abort what runs and end the thread; every later call raises RuntimeError."""
        if self._task is None:
            return
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
                raise RuntimeError("stopped")
            await self._step()

    async def _step(self) -> None:
        arrived, self._inbox = self._inbox, []
        admit = not self._holds
        self._stepping = True
        finished = await self._call(lambda decoder: decoder.step(arrived, admit))
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

    async def _call(self, function: Callable[[Decoder], R]) -> R:
        """Run in the decoder's thread, between two steps."""
        self._check()
        return await self._submit(partial(function, self._decoder))

    def _submit(self, function: Callable[[], R]) -> asyncio.Future[R]:
        def timed() -> R:
            began = time.perf_counter()
            with torch.inference_mode():
                result = function()
            self._busy += time.perf_counter() - began
            return result

        return asyncio.get_running_loop().run_in_executor(self._pool, timed)

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

    # ── The interface ─────────────────────────────────────────────────────────────────────────────

    async def generate(
        self, prompt_ids: Sequence[int], *, params: SamplingParams, seeds: Sequence[int], request_id: str
    ) -> AsyncIterator[tuple[int, Completion]]:
        self._check()
        check_head("generate", self.cfg, "lm")
        check_request(prompt_ids, params, vocab_size=self.cfg.vocab_size, max_len=self.max_len)
        waiting = deque((i, (seed + 2**63) % 2**64 - 2**63) for i, seed in enumerate(seeds))  # int64 wraps
        request = Request(id=request_id, prompt=tuple(prompt_ids), params=params, waiting=waiting)
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
                gone = self._submit(partial(self._decoder.abort, arrived, lambda other: other is request))
                gone.add_done_callback(lambda _: self._notify())

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        top_k: int = 0,
        full: bool = False,
        temperature: float = 1.0,
    ) -> list[Scores]:
        """As the interface says; the first token of a sequence has no context, so starts are at least 1."""
        self._check()
        check_head("score", self.cfg, "lm")
        check_scores(
            sequences, starts, top_k, temperature, vocab_size=self.cfg.vocab_size, max_len=self.max_len
        )
        return await self._call(
            lambda decoder: decoder.score(sequences, starts, top_k=top_k, full=full, temperature=temperature)
        )

    async def likely(self, ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        check_ids("likely", tokens, vocab_size=self.cfg.vocab_size, max_len=len(tokens))
        [scores] = await self.score([[*ids, tokens[0]]], [len(ids)], full=True)
        assert scores.full is not None
        return scores.full[0, list(tokens)]

    async def classify(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        self._check()
        check_head("classify", self.cfg, "score")
        for ids in sequences:
            check_ids("classify", ids, vocab_size=self.cfg.vocab_size, max_len=self.max_len)
        return await self._call(lambda decoder: decoder.classify(sequences))

    async def place(self) -> Place:
        return Place((gpu_of(self._device),) if self._device.type == "cuda" else ())

    async def update(self, version: int, weights: Parcel, *, mode: PauseMode = "keep") -> UpdateReport:
        """As the interface says. Weights are copied, and cast to the model's dtype.

        "wait" waits for running samples, so for `resume` too where the engine is paused. Raises ValueError
        where names or shapes do not fit; then nothing has changed.
        """
        self._check()
        check_mode("update", mode)
        async with self._updating:
            began = time.perf_counter()
            new = weights if isinstance(weights, Mapping) else await asyncio.to_thread(self._receive, weights)
            received = time.perf_counter()

            def load(decoder: Decoder) -> UpdateReport:
                return decoder.load(version, cast(Weights, new), recompute=mode == "recompute")

            if mode != "wait":
                report = await self._call(load)
            else:
                async with self._drained():
                    report = await self._call(load)
            seconds = {"receive": received - began, "commit": time.perf_counter() - received}
            return replace(report, seconds=seconds)

    def _receive(self, parcel: Delta | Broadcast | Mapped) -> Weights:
        with torch.inference_mode():
            if isinstance(parcel, Delta):
                new = {name: tensor.clone() for name, tensor in self._decoder.model.state_dict().items()}
                apply(new, parcel)
                return new
            new = {n: tensor.clone() for bucket in self._wire.receive(parcel) for n, tensor in bucket.items()}
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return new

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding until `resume`.

        keep: now; wait: when running samples have finished; recompute: now, and `resume` computes the keys
        and values of running samples anew.
        """
        self._check()
        check_mode("pause", mode)
        if mode == "wait":
            async with self._drained():
                self._paused = True
        self._paused = True
        self._stale |= mode == "recompute"
        await self._until(lambda: not self._stepping)

    async def resume(self) -> None:
        self._check()
        if self._stale:
            await self._call(lambda decoder: decoder.recompute())
        self._paused = self._stale = False
        self._notify()

    async def abort(self, request_id: str | None = None) -> int:
        arrived, self._inbox = self._inbox, []
        finished = await self._call(
            lambda decoder: decoder.abort(arrived, lambda request: request_id in (None, request.id))
        )
        self._deliver(finished)
        self._notify()
        return len(finished)

    async def report(self) -> UpdateReport:
        return await self._call(lambda decoder: decoder.report())

    def stats(self) -> EngineStats:
        self._check()
        decoder = self._decoder
        return EngineStats(
            version=decoder.version,
            running=len(decoder.owner),
            waiting=sum(len(request.waiting) for request in [*self._inbox, *decoder.waiting]),
            sampled_tokens=decoder.sampled_tokens,
            prompt_tokens=decoder.prompt_tokens,
            busy_s=self._busy,
            wall_s=time.perf_counter() - self._began,
            slots=self._slots,
        )
