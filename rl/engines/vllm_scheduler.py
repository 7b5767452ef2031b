"""vLLM's scheduler for hundreds of samples at a time: a token that changes nothing costs next to nothing.

vLLM looks at every sample in every step: are there blocks for its next token, has it ended, what to tell the
caller. That is some 30 µs of Python a sample and step, over its processes, where a small model needs 10 µs of
the GPU. But of 16 steps 14 need no block, and nobody waits for the single tokens of a sample. So here

    update_from_output   appends a token that does not end its sample and keeps it, with its log-prob and the
                         time; `HOLD` of them go out together. All other tokens are vLLM's, as ever
    allocate_slots       is not asked where the next token lies inside of a block that the sample has

Only requests that say so (vllm_args.HOLDING) are treated like this. Runs in vLLM's core process.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs  # pyright: ignore[reportMissingImports]
from vllm.v1.outputs import LogprobsLists  # pyright: ignore[reportMissingImports]
from vllm.v1.request import Request, RequestStatus  # pyright: ignore[reportMissingImports]

from rl.engines.vllm_args import HOLD, HOLDING


@dataclass(slots=True)
class Held:
    """A sample, and its tokens that have not been told yet."""

    request: Any
    stops: frozenset[int]
    last: int  # tokens, prompt included, with which it ends
    begun: bool = False
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def take(self) -> tuple[list[int], LogprobsLists]:
        """What is held, as vLLM's: in the place of the ranks are the times at which tokens were there."""
        tokens = self.tokens
        told = LogprobsLists(
            np.empty((0, 1), np.int32),
            np.asarray(self.logps, np.float32)[:, None],
            np.asarray(self.times, np.float64),
        )
        self.tokens, self.logps, self.times = [], [], []
        return tokens, told


class Holding:
    """Mixed into a scheduler of vLLM's, synchronous or asynchronous."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._held: dict[str, Held] = {}
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        self._block = self.block_size  # type: ignore[attr-defined]
        self._caches = isinstance(
            self, AsyncScheduler
        )  # else allocate_slots tells the prefix cache of blocks
        if manager.num_kv_cache_groups == 1:
            self._allocate, self._none = manager.allocate_slots, manager.empty_kv_cache_blocks
            manager.allocate_slots = self._allocate_slots

    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[misc]
        params = request.sampling_params
        if params is not None and HOLDING in (params.extra_args or ()):
            stops = frozenset(params.stop_token_ids or ()) | {params.eos_token_id}
            last = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)  # type: ignore[attr-defined]
            self._held[request.request_id] = Held(request, stops, last)

    def _free_request(self, request: Request, *args: Any, **how: Any) -> Any:
        self._held.pop(request.request_id, None)
        return super()._free_request(request, *args, **how)  # type: ignore[misc]

    def _allocate_slots(self, request: Request, n: int, *args: Any, **how: Any) -> Any:
        place = request.num_computed_tokens % self._block
        if n == 1 and 0 < place < self._block - 1 and request.request_id in self._held:
            if request.status == RequestStatus.RUNNING:
                return self._none
        return self._allocate(request, n, *args, **how)

    def update_from_output(self, scheduled: Any, output: Any) -> dict[int, EngineCoreOutputs]:
        now, held_of = time.monotonic(), self._held
        mine: dict[str, Held] = {}  # of whose tokens something is to be told
        others: dict[str, int] = {}
        tokens, at = output.sampled_token_ids, output.req_id_to_index
        logps = output.logprobs.logprobs[:, 0].tolist() if held_of and output.logprobs else None
        for name, n in scheduled.num_scheduled_tokens.items():
            held = held_of.get(name)
            if held is None:
                others[name] = n
            elif logps is None or not self._plain(held, new := tokens[row := at[name]], n):
                others[name] = n
                mine[name] = held
            else:
                held.tokens.append(new[0])
                held.logps.append(logps[row])
                held.times.append(now)
                if len(held.tokens) >= HOLD:
                    mine[name] = held
        if len(others) < len(scheduled.num_scheduled_tokens):
            scheduled = copy.copy(scheduled)
            scheduled.num_scheduled_tokens = others
        outputs = super().update_from_output(scheduled, output)  # type: ignore[misc]
        return self._tell(outputs, mine, now)

    def _plain(self, held: Held, new: list[int], n: int) -> bool:
        """Append the token, if that is all there is to do."""
        request = held.request
        whole = request._all_token_ids
        length = len(whole) + 1
        if (
            len(new) != 1
            or new[0] in held.stops
            or length >= held.last
            or not held.begun
            or request.status != RequestStatus.RUNNING
            or request.events
            or getattr(request, "num_stale_output_tokens", 0)  # from vLLM 0.26 on; before that
            or getattr(request, "async_tokens_to_discard", 0)
        ):
            return False
        request._output_token_ids.append(new[0])
        whole.append(new[0])
        place = length % self._block
        if place == 0:
            request.update_block_hashes()
        if hasattr(request, "num_in_flight_tokens"):
            request.num_in_flight_tokens -= n
        if self._caches:
            request.num_output_placeholders -= 1
            if place == 1:
                computed = request.num_computed_tokens - request.num_output_placeholders
                self.kv_cache_manager.cache_blocks(request, computed)  # type: ignore[attr-defined]
        return True

    def _tell(
        self, outputs: dict[int, EngineCoreOutputs], mine: dict[str, Held], now: float
    ) -> dict[int, EngineCoreOutputs]:
        """The outputs of this step, with what was held before the tokens of each."""
        for sent in outputs.values():
            for out in sent.outputs:
                held = mine.pop(out.request_id, None)
                if held is not None:
                    held.begun = True
                    held.tokens += out.new_token_ids
                    held.logps += [] if out.new_logprobs is None else out.new_logprobs.logprobs[:, 0].tolist()
                    held.times += [now] * len(out.new_token_ids)
                    out.new_token_ids, out.new_logprobs = held.take()
        for name, held in mine.items():
            if len(held.tokens) >= HOLD:
                tokens, told = held.take()
                sent = outputs.setdefault(held.request.client_index, EngineCoreOutputs(outputs=[]))
                sent.outputs.append(
                    EngineCoreOutput(request_id=name, new_token_ids=tokens, new_logprobs=told)
                )
        return outputs


class HoldingScheduler(Holding, Scheduler):
    pass


class AsyncHoldingScheduler(Holding, AsyncScheduler):
    pass
