"""Samples on their way through vLLM: whose turn it is, and which weights made each of their tokens."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, kw_only=True)
class Sample:
    request: str
    index: int
    seed: int
    name: str = ""  # vLLM's; no other sample has it
    salt: str = ""  # of the prefix cache: what was computed under another is not reused
    spans: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens), in order
    wanted: bool = True
    outdated: bool = False  # what it has is thrown away, and it begins anew

    def begin(self, name: str, salt: str) -> None:
        self.name, self.salt, self.spans, self.outdated = name, salt, [], False


class Turns:
    """At most `n` samples at a time, in the order of their arrival.

    vLLM could queue them itself, but then those that wait would be bound to the weights of their arrival.
    """

    def __init__(self, n: int) -> None:
        self.free = n
        self.queue: deque[tuple[Sample, asyncio.Future[bool]]] = deque()

    async def wait(self, sample: Sample) -> bool:
        """Until it is this sample's turn, which `release` ends; False: it was cut before that."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.queue.append((sample, turn))
        self._next()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.release()
            raise

    def release(self) -> None:
        self.free += 1
        self._next()

    def _next(self) -> None:
        while self.queue and (self.free or self.queue[0][1].done()):
            _, turn = self.queue.popleft()
            if not turn.done():  # else its caller has gone
                self.free -= 1
                turn.set_result(True)

    def cut(self, sample: Sample) -> None:
        for other, turn in self.queue:
            if other is sample and not turn.done():
                turn.set_result(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """From `since` on, a moment at which vLLM's scheduler stood still, steps run with these weights."""

    since: float
    version: int
    salt: str


class Epochs:
    """Which weights a step ran with, by the time at which vLLM's core process made its output.

    That time is CLOCK_MONOTONIC's, one clock for all processes of a machine. Weights change while the
    scheduler is paused and no step is under way, so every output is clearly of one side, however late it is
    read here.
    """

    def __init__(self, version: int) -> None:
        self.past = [Epoch(since=float("-inf"), version=version, salt="0")]

    @property
    def now(self) -> Epoch:
        return self.past[-1]

    def begin(self, since: float, version: int, *, keep: bool) -> None:
        """keep: what is cached stays, out of reach of new prompts, as older weights computed it."""
        salt = str(int(self.now.salt) + 1) if keep else self.now.salt
        self.past.append(Epoch(since=since, version=version, salt=salt))
        del self.past[:-64]  # outputs are late by seconds, not by 64 updates

    def at(self, time: float) -> Epoch:
        return self.past[max(0, bisect_right(self.past, time, key=lambda epoch: epoch.since) - 1)]


class Tally:
    """Sees every output as it comes from vLLM's core, before those of one sample are put together."""

    def __init__(self, version: int, outdated: Callable[[Sample], None]) -> None:
        self.epochs = Epochs(version)
        self.live: dict[str, Sample] = {}  # that vLLM has, by their names
        self.outdated = outdated
        self.sampled_tokens = self.prompt_tokens = self.preemptions = 0
        self.kv_use = 0.0

    def attach(self, output_processor: Any) -> None:
        """vLLM tells the time of an output to its output processor alone, and nobody its weights (0.25)."""
        process, states = output_processor.process_outputs, output_processor.request_states

        def process_outputs(outputs: Sequence[Any], time: float, *args: Any, **kwargs: Any) -> Any:
            for output in outputs:
                state = states.get(output.request_id)
                sample = None if state is None else self.live.get(state.external_req_id)
                if sample is not None and output.new_token_ids:
                    self._count(sample, len(output.new_token_ids), self.epochs.at(time))
            return process(outputs, time, *args, **kwargs)

        output_processor.process_outputs = process_outputs

    def _count(self, sample: Sample, n: int, epoch: Epoch) -> None:
        if not sample.spans and epoch.salt != sample.salt and not sample.outdated:
            # It was with vLLM during an update that kept the cache: older weights may have read its prompt.
            sample.outdated = True
            self.outdated(sample)
        if not sample.outdated:
            self.sampled_tokens += n
        if sample.spans and sample.spans[-1][0] == epoch.version:
            n += sample.spans.pop()[1]
        sample.spans.append((epoch.version, n))

    # As one of vLLM's loggers of statistics

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.kv_use = float(scheduler_stats.kv_cache_usage)
        if iteration_stats is not None:
            self.preemptions += int(iteration_stats.num_preempted_reqs)

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...
