"""Samples on their way through vLLM: whose turn it is, and which weights made each of their tokens."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl.engines.vllm_room import Room, step


@dataclass(eq=False, kw_only=True)
class Sample:
    request: str
    index: int
    seed: int
    name: str = ""  # vLLM's; no other sample has it
    salt: str = ""  # of the prefix cache: what was computed under another is not reused
    tokens: list[int] = field(default_factory=list)
    logps: list[np.ndarray] = field(default_factory=list)  # of the tokens, in parts
    spans: list[list[int]] = field(default_factory=list)  # [version, tokens], in order
    turn: asyncio.Future[bool] | None = None
    wanted: bool = True
    outdated: bool = False  # what it has is thrown away, and it begins anew

    def begin(self, name: str, salt: str) -> None:
        self.name, self.salt, self.outdated = name, salt, False
        self.tokens, self.logps, self.spans = [], [], []


class Turns:
    """As many samples at a time as there is room for, in the order of their arrival: those of one prompt
    start one after another, so that most find its keys and values in the cache.

    vLLM could queue them itself, but then those that wait would be bound to the weights of their arrival.
    Where the room shrinks, what runs goes on, and nothing starts until enough has ended.
    """

    def __init__(self, slots: int) -> None:
        self.room = Room(slots=slots)
        self.taken = 0
        self.ended = 0  # since the last step
        self.queue: deque[asyncio.Future[bool]] = deque()

    async def wait(self, sample: Sample) -> bool:
        """Until it is this sample's turn, which `release` ends; False: it was cut before that."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        sample.turn = turn
        self.queue.append(turn)
        self._next()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.release()
            raise

    def release(self) -> None:
        self.taken -= 1
        self.ended += 1
        self._next()

    def step(self, kv_use: float, lost: int) -> None:
        """See `rl.engines.vllm_room.step`."""
        full = bool(self.queue) and self.taken >= self.room.limit
        self.room = step(self.room, kv_use=kv_use, lost=lost, ended=self.ended, full=full)
        self.ended = 0
        self._next()

    def _next(self) -> None:
        while self.queue and (self.queue[0].done() or self.taken < self.room.limit):
            turn = self.queue.popleft()
            if not turn.done():  # else its sample was cut, or its caller has gone
                self.taken += 1
                turn.set_result(True)

    def cut(self, sample: Sample) -> None:
        if sample.turn is not None and not sample.turn.done():
            sample.turn.set_result(False)


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
        self.emptied = float("-inf")  # when the cache was last

    @property
    def now(self) -> Epoch:
        return self.past[-1]

    def begin(self, since: float, version: int, *, keep: bool) -> None:
        """keep: what is cached stays, out of reach of new prompts, as older weights computed it."""
        salt = str(int(self.now.salt) + 1) if keep else self.now.salt
        self.emptied = self.emptied if keep else since
        self.past.append(Epoch(since=since, version=version, salt=salt))
        del self.past[:-64]  # outputs are late by seconds, not by 64 updates

    def at(self, time: float) -> Epoch:
        return self.past[max(0, bisect_right(self.past, time, key=lambda epoch: epoch.since) - 1)]


class Tally:
    """Takes the tokens of samples as they come from vLLM's core, some at a time; see vllm_scheduler.py."""

    def __init__(self, version: int, turns: Turns, outdated: Callable[[Sample], None]) -> None:
        self.epochs = Epochs(version)
        self.turns = turns
        self.live: dict[str, Sample] = {}  # that vLLM has, by their names
        self.outdated = outdated
        self.sampled_tokens = self.prompt_tokens = self.preemptions = 0
        self.kv_use = 0.0
        self._lost = 0  # preemptions since the last step

    def attach(self, output_processor: Any) -> None:
        """vLLM tells the time of an output to its output processor alone, and nobody its weights (0.25). Of a
        sample, that sees the first and the last output, without tokens; of all else, everything."""
        process, states = output_processor.process_outputs, output_processor.request_states
        live = self.live

        def process_outputs(outputs: Sequence[Any], time: float, *args: Any, **kwargs: Any) -> Any:
            passed = []
            for output in outputs:
                state = states.get(output.request_id)
                sample = None if state is None else live.get(state.external_req_id)
                if sample is None:
                    passed.append(output)
                    continue
                begins = not sample.tokens
                if output.events:
                    self._look(output.events)
                if output.new_token_ids:
                    self._take(sample, output)
                if begins or output.finish_reason is not None:
                    passed.append(output)
            return process(passed, time, *args, **kwargs)

        output_processor.process_outputs = process_outputs

    def _take(self, sample: Sample, output: Any) -> None:
        tokens, told = output.new_token_ids, output.new_logprobs
        sample.tokens += tokens
        sample.logps.append(told.logprobs[:, 0])
        times = told.sampled_token_ranks  # the scheduler's, see Held.take
        first, last = self.epochs.at(times[0]), self.epochs.at(times[-1])
        if first is last:
            self._count(sample, len(tokens), last)
        else:
            for at in times:
                self._count(sample, 1, self.epochs.at(at))
        output.new_token_ids, output.new_logprobs = [], None

    def _count(self, sample: Sample, n: int, epoch: Epoch) -> None:
        spans = sample.spans
        if not spans and epoch.salt != sample.salt and not sample.outdated:
            # It was with vLLM during an update that kept the cache: older weights may have read its prompt.
            sample.outdated = True
            self.outdated(sample)
        if not sample.outdated:
            self.sampled_tokens += n
        if spans and spans[-1][0] == epoch.version:
            spans[-1][1] += n
        else:
            spans.append([epoch.version, n])

    def _look(self, events: Sequence[Any]) -> None:
        """vLLM tells of a preemption with the sample's next token; and where the cache is emptied, it calls
        that a preemption of all."""
        for event in events:
            if event.type.name == "PREEMPTED" and event.timestamp > self.epochs.emptied:
                self.preemptions += 1
                self._lost += 1

    # As one of vLLM's loggers of statistics

    @staticmethod
    def alone(llm: Any) -> None:
        """Take vLLM's own statistics of each token away, with Prometheus' histograms of them: some 5 µs each.
        What its scheduler says still comes. To be called before the first request."""
        llm.log_stats = llm.output_processor.log_stats = False
        del llm.logger_manager.stat_loggers[1:]

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.kv_use = float(scheduler_stats.kv_cache_usage)
            self.turns.step(self.kv_use, self._lost)
            self._lost = 0

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...
