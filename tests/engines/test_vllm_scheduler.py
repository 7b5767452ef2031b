"""Our scheduler decides what vLLM's own does, step by step, and tells the same tokens, some at a time.

Both see the same requests, aborts and emptied caches; a token is a function of (request, position)."""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
from vllm.utils.hashing import sha256  # pyright: ignore[reportMissingImports]
from vllm.v1.core import kv_cache_utils  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_cache_interface import (  # pyright: ignore[reportMissingImports]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput  # pyright: ignore[reportMissingImports]
from vllm.v1.request import Request, RequestStatus  # pyright: ignore[reportMissingImports]
from vllm.v1.structured_output import StructuredOutputManager  # pyright: ignore[reportMissingImports]

from models.config import ModelConfig, to_hf
from rl.engines.vllm_args import HOLD, HOLDING, VllmOptions, engine_args, sampling
from rl.engines.vllm_scheduler import AsyncHoldingScheduler, HoldingScheduler

CFG = ModelConfig(
    vocab_size=64, d_model=32, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=32, d_ff=32, max_len=256
)
BLOCK, SLOTS, STOP = 4, 6, 63
PAIRS = [(Scheduler, HoldingScheduler), (AsyncScheduler, AsyncHoldingScheduler)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(to_hf(CFG)))
    args = engine_args(CFG, str(folder), "cpu", SLOTS, 255, VllmOptions())
    for ours in ("worker_extension_cls", "scheduler_cls"):
        del args[ours]
    return AsyncEngineArgs(**args).create_engine_config()


def scheduler(cls: type, config: Any, blocks: int) -> Any:
    config.scheduler_config.async_scheduling = issubclass(cls, AsyncScheduler)
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.max_num_batched_tokens = 32
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = BLOCK, blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(config)
    return cls(config, cache, manager, block_size=BLOCK, hash_block_size=BLOCK, log_stats=True)


def request(name: str, prompt: list[int], tokens: int, hold: bool) -> Request:
    kv_cache_utils.init_none_hash(sha256)
    how = {"extra_args": {HOLDING: True}} if hold else {}
    params = sampling(max_tokens=tokens, temperature=1.0, logprobs=0, stop_token_ids=[STOP], **how)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
    )


@dataclass
class Told:
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    preempted: int = 0
    finish: str | None = None


class Drive:
    """Steps as vLLM's core makes them: one batch under way, or two where it is asynchronous."""

    def __init__(self, cls: type, config: Any, blocks: int) -> None:
        self.scheduler = scheduler(cls, config, blocks)
        self.hold = cls.__name__.endswith("HoldingScheduler")
        self.ahead = 2 if issubclass(cls, AsyncScheduler) else 1
        self.under_way: deque[Any] = deque()
        self.told: dict[str, Told] = {}
        self.plans: list[Any] = []

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        self.told[name] = Told()
        self.scheduler.add_request(request(name, prompt, tokens, self.hold))

    def step(self) -> None:
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            self.plans.append(facts(plan))
            self.under_way.appendleft((plan, self.model(plan)))
            if len(self.under_way) < self.ahead and plan.total_num_scheduled_tokens:
                return
        if self.under_way:
            self.update()

    def update(self) -> None:
        for sent in self.scheduler.update_from_output(*self.under_way.pop()).values():
            for out in sent.outputs:
                told = self.told[out.request_id]
                told.tokens += out.new_token_ids
                told.parts.append(len(out.new_token_ids))
                told.preempted += len(out.events or ())
                if out.new_logprobs is not None:
                    told.logps += out.new_logprobs.logprobs[:, 0].tolist()
                    told.times += out.new_logprobs.sampled_token_ranks.tolist()
                told.finish = None if out.finish_reason is None else str(out.finish_reason)

    def model(self, plan: Any) -> ModelRunnerOutput:
        names = list(plan.num_scheduled_tokens)
        tokens, logps = [], []
        for name in names:
            request = self.scheduler.requests[name]
            position = request.num_computed_tokens  # after this step
            tokens.append([] if request.is_prefill_chunk else [draw(name, position)])
            logps.append([-float(position)])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(
                np.zeros((len(names), 1), np.int32),
                np.asarray(logps, np.float32).reshape(-1, 1),
                np.ones(len(names), np.int32),
            ),
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def rest(self) -> None:
        while self.scheduler.has_requests() or self.under_way:
            self.step()


def draw(name: str, position: int) -> int:
    return random.Random(f"{name} {position}").randrange(64)


def facts(plan: Any) -> Any:
    cached = plan.scheduled_cached_reqs
    return (
        dict(plan.num_scheduled_tokens),
        [(new.req_id, new.block_ids, new.num_computed_tokens) for new in plan.scheduled_new_reqs],
        (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens),
        sorted(cached.resumed_req_ids),
        sorted(plan.finished_req_ids),
        sorted(plan.preempted_req_ids or ()),
    )


def script(seed: int, drive: Drive) -> None:
    """Arrivals with shared prompts, aborts, emptied caches."""
    rng = random.Random(seed)
    for i in range(24):
        drive.add(f"{seed}-{i}", [rng.randrange(4)] * rng.randrange(1, 40), rng.randrange(1, 90))
        for _ in range(rng.randrange(12)):
            drive.step()
        names = sorted(drive.scheduler.requests)
        if names and rng.random() < 0.2:
            drive.scheduler.finish_requests([rng.choice(names)], RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.1:
            while drive.under_way:
                drive.update()
            drive.scheduler.reset_prefix_cache(reset_running_requests=True)
    drive.rest()


@pytest.mark.parametrize("theirs, ours", PAIRS)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("blocks", [60, 400])
def test_it_decides_what_vllm_decides_and_tells_the_same(config, theirs, ours, seed, blocks):
    drives = [Drive(cls, config, blocks) for cls in (theirs, ours)]
    for drive in drives:
        script(seed, drive)
    plain, held = drives
    assert plain.plans == held.plans
    for name, told in plain.told.items():
        mine = held.told[name]
        assert (mine.finish, mine.preempted) == (told.finish, told.preempted)
        n = len(mine.tokens)
        assert mine.tokens == told.tokens[:n] and mine.logps == told.logps[:n] and len(mine.times) == n
        if told.finish is not None:
            assert n == len(told.tokens)
        assert len(told.tokens) - n < HOLD  # of those that were aborted
        assert mine.times == sorted(mine.times)


@pytest.mark.parametrize("theirs, ours", PAIRS)
def test_the_cache_was_too_small_in_some_of_these(config, theirs, ours):
    drive = Drive(ours, config, 60)
    script(1, drive)
    assert sum(told.preempted for told in drive.told.values()) > 24  # each is queued and scheduled once
    assert {told.finish for told in drive.told.values()} >= {"stop", "length", None}


@pytest.mark.parametrize("theirs, ours", PAIRS)
def test_tokens_come_hold_at_a_time_after_the_first(config, theirs, ours, monkeypatch):
    monkeypatch.setattr("tests.engines.test_vllm_scheduler.draw", lambda name, position: 1)
    drive = Drive(ours, config, 400)
    drive.add("a", [1, 2, 3], 2 * HOLD + 5)
    drive.rest()
    assert drive.told["a"].parts == [1, HOLD, HOLD, 4] and drive.told["a"].finish == "length"


@pytest.mark.parametrize("theirs, ours", PAIRS)
def test_requests_that_do_not_ask_for_it_are_vllm_s_alone(config, theirs, ours, monkeypatch):
    monkeypatch.setattr("tests.engines.test_vllm_scheduler.draw", lambda name, position: 1)
    drive = Drive(ours, config, 400)
    drive.hold = False
    drive.add("a", [1, 2, 3], 20)
    drive.rest()
    assert drive.told["a"].parts == [1] * 20 and set(drive.told["a"].times) == {1}
