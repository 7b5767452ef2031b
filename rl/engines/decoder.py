"""Continuous batching, one thread: slots, prefill, decoding steps, scoring and weights of the built-in
engine.

Every sample is computed at shapes that its own length decides: blocks of a fixed number of rows, padded
with dummies,
and attention over a bucket of its own length. So its tokens and log-probs are the same bits whoever runs
beside it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.transformer import Transformer
from models.weights import Weights, as_tensor, check_state, checksums
from rl.engines.base import UpdateReport
from rl.engines.kv import KVCache, prefill
from rl.engines.sampling import sample, uniform
from rl.engines.scoring import score
from rl.engines.shapes import blocks, bucket_of, stack
from rl.types import Completion, Finish, SamplingParams, Scores


@dataclass(eq=False, kw_only=True)
class Prefilled:
    """A block of prompts: keys and values per layer [B, L, 2 K H], logits [B, V] after each prompt's last
    token."""

    ids: Tensor  # [B, L]
    kv: list[Tensor]
    logits: Tensor


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt and its samples that wait for a slot, as (index, seed)."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    waiting: deque[tuple[int, int]]
    prefix: tuple[Prefilled, int] | None = None  # block and row, until every sample has its slot


Finished = tuple[Request, int, Completion]


class Decoder:
    """All state of the engine; not thread-safe. Slot state is on the host, model and cache on the device."""

    def __init__(
        self,
        cfg: ModelConfig,
        weights: Weights,
        *,
        version: int,
        max_slots: int,
        max_len: int,
        block: int,
        device: str,
        probe_ids: Sequence[int],
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)  # holds for the whole process
        self.cfg, self.version, self.max_len, self.block = cfg, version, max_len, block
        self.probe_ids = tuple(probe_ids)
        self.model = Transformer(cfg, device=device).requires_grad_(False)
        self._copy(weights)
        self.cache = KVCache(cfg, max_slots, max_len, device, self.model.head.dtype)
        self.buckets = torch.tensor([bucket_of(max(n, 1), max_len) for n in range(max_len + 1)])
        self.waiting: deque[Request] = deque()
        self.owner: dict[int, tuple[Request, int]] = {}  # slot -> request, index of the sample
        self.free = list(range(max_slots))[::-1]
        self.dummy = rows = max_slots  # the last row belongs to padding
        self.ids = torch.zeros(rows + 1, max_len, dtype=torch.int64)  # prompt, then sampled tokens
        self.logps = torch.zeros(rows + 1, max_len)
        self.versions = torch.zeros(rows + 1, max_len, dtype=torch.int32)
        self.size = torch.ones(rows + 1, dtype=torch.int64)  # tokens in ids; the cache holds one fewer
        self.start = torch.zeros(rows + 1, dtype=torch.int64)  # tokens of the prompt
        self.limit = torch.zeros(rows + 1, dtype=torch.int64)  # most tokens to sample
        self.seed = torch.zeros(rows + 1, dtype=torch.int64)
        self.temperature = torch.ones(rows + 1, dtype=torch.float64)
        self.top_p = torch.ones(rows + 1, dtype=torch.float64)
        self.top_k = torch.zeros(rows + 1, dtype=torch.int64)
        self.stops = torch.full((rows + 1, 1), -1)
        self.sampled_tokens = self.prompt_tokens = 0

    # ── Sampling ────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, arrived: Sequence[Request], admit: bool) -> list[Finished]:
        """Give free slots to waiting samples, then one token to every running sample; what finished
        leaves."""
        self.waiting.extend(arrived)
        finished = self._admit() if admit else []
        if self.owner:
            finished += self._decode()
        return finished

    def _admit(self) -> list[Finished]:
        taken: list[tuple[Request, int, int]] = []
        while self.waiting and len(taken) < len(self.free):
            request = self.waiting[0]
            taken.append((request, *request.waiting.popleft()))
            if not request.waiting:
                self.waiting.popleft()
        if not taken:
            return []
        self._prefill(
            [request for request in dict.fromkeys(r for r, _, _ in taken) if request.prefix is None]
        )
        by_block: dict[Prefilled, list[tuple[int, int]]] = defaultdict(list)
        for request, index, seed in taken:
            slot = self.free.pop()
            self.owner[slot] = request, index
            self.seed[slot] = seed
            assert request.prefix is not None
            block, row = request.prefix
            by_block[block].append((slot, row))
        slots, logits = [], []
        for block, pairs in by_block.items():
            at, rows = torch.tensor(pairs).unbind(1)
            self.cache.write(at, block.kv, rows)
            self.ids[at, : block.ids.shape[1]] = block.ids[rows]
            slots.append(at)
            logits.append(block.logits[rows.to(block.logits.device)])
        for request, _, _ in taken:
            if not request.waiting:
                request.prefix = None
        at = torch.cat(slots)
        self._set_params(at)
        padding = -len(at) % self.block
        return self._append(
            F.pad(at, (0, padding), value=self.dummy), F.pad(torch.cat(logits), (0, 0, 0, padding))
        )

    def _prefill(self, requests: list[Request]) -> None:
        lengths = [len(request.prompt) for request in requests]
        self.prompt_tokens += sum(lengths)
        for length, rows in blocks(self.buckets[lengths], self.block):
            part = [requests[i] for i in rows.tolist()]
            ids = stack([request.prompt for request in part], self.block, length)
            hidden, kv = prefill(self.model, ids, keep=True)
            last = torch.tensor([len(r.prompt) - 1 for r in part] + [0] * (self.block - len(part)))
            block = Prefilled(ids=ids, kv=kv, logits=self.model.logits(hidden[torch.arange(self.block), last]))
            for row, request in enumerate(part):
                request.prefix = block, row

    def _set_params(self, slots: Tensor) -> None:
        requests = [self.owner[slot][0] for slot in slots.tolist()]
        params = [request.params for request in requests]
        self.start[slots] = self.size[slots] = torch.tensor([len(request.prompt) for request in requests])
        self.limit[slots] = torch.tensor([p.max_tokens for p in params])
        self.temperature[slots] = torch.tensor([p.temperature for p in params], dtype=torch.float64)
        self.top_p[slots] = torch.tensor([p.top_p for p in params], dtype=torch.float64)
        self.top_k[slots] = torch.tensor([p.top_k for p in params])
        stops = [self.cfg.eos_ids + p.stop_ids for p in params]
        width = max(self.stops.shape[1], *(len(s) for s in stops))
        self.stops = F.pad(self.stops, (0, width - self.stops.shape[1]), value=-1)
        self.stops[slots] = torch.tensor([[*s, *[-1] * (width - len(s))] for s in stops])

    def _decode(self) -> list[Finished]:
        order, logits = [], []
        for length, slots in self._running_blocks(0):
            at = self.size[slots] - 1
            ids, positions = self.ids[slots, at].to(self.model.head.device), at.to(self.model.head.device)
            hidden = self.model(ids, positions, self.cache.decode(slots, at, length))
            order.append(slots)
            logits.append(self.model.logits(hidden))
        return self._append(torch.cat(order), torch.cat(logits))

    def _append(self, slots: Tensor, logits: Tensor) -> list[Finished]:
        """Draw the next token of each slot from logits [R, V] and take out what is finished."""
        u = uniform(self.seed[slots], self.size[slots] - self.start[slots])
        top_p, top_k = self.top_p[slots], self.top_k[slots]
        filtered = bool(((top_p < 1) | (top_k > 0)).any())
        u, temperature, top_p, top_k = (
            x.to(logits.device) for x in (u, self.temperature[slots], top_p, top_k)
        )
        token, logp = sample(logits, u, temperature=temperature, top_p=top_p, top_k=top_k, filtered=filtered)
        real = slots != self.dummy
        slots, token, logp = slots[real], token.cpu()[real], logp.cpu()[real]
        at = self.size[slots]
        self.ids[slots, at] = token
        self.logps[slots, at] = logp
        self.versions[slots, at] = self.version
        self.size[slots] = at + 1
        self.sampled_tokens += len(slots)
        stopped = (token[:, None] == self.stops[slots]).any(1)
        full = at + 1 - self.start[slots] >= self.limit[slots]
        done = (stopped | full).nonzero()[:, 0]
        return [
            self._leave(slot, "stop" if stop else "length")
            for slot, stop in zip(slots[done].tolist(), stopped[done].tolist(), strict=True)
        ]

    def _leave(self, slot: int, finish: Finish) -> Finished:
        request, index = self.owner.pop(slot)
        self.free.append(slot)
        part = slice(int(self.start[slot]), int(self.size[slot]))
        return (
            request,
            index,
            Completion(
                tokens=self.ids[slot, part].numpy().astype(np.int32),
                logps=self.logps[slot, part].numpy().copy(),
                versions=self.versions[slot, part].numpy().copy(),
                finish=finish,
            ),
        )

    def abort(self, arrived: Sequence[Request], which: Callable[[Request], bool]) -> list[Finished]:
        """End the running and the waiting samples of some requests."""
        self.waiting.extend(arrived)
        finished = [self._leave(slot, "abort") for slot, (request, _) in list(self.owner.items()) if which(request)]
        nothing = Completion(tokens=np.zeros(0, np.int32), logps=np.zeros(0, np.float32),
                             versions=np.zeros(0, np.int32), finish="abort")
        finished += [(r, index, nothing) for r in self.waiting if which(r) for index, _ in r.waiting]
        self.waiting = deque(r for r in self.waiting if not which(r))
        return finished

    def _running_blocks(self, fewer: int) -> Iterator[tuple[int, Tensor]]:
        """Slots of running samples by bucket of their size less `fewer`: (bucket, slots [block], dummies last)."""
        running = torch.tensor(sorted(self.owner), dtype=torch.int64)
        for length, rows in blocks(self.buckets[self.size[running] - fewer], self.block):
            yield length, F.pad(running[rows], (0, self.block - len(rows)), value=self.dummy)

    # ── Weights and scores ──────────────────────────────────────────────────────────────────────────────────

    def load(self, version: int, weights: Weights, recompute: bool) -> UpdateReport:
        """Copy the weights in place; samples that run go on over their old keys and values unless `recompute`."""
        self._copy(weights)
        self.version = version
        for request in self.waiting:
            request.prefix = None
        if recompute:
            self.recompute()
        return self.report()

    def _copy(self, weights: Weights) -> None:
        new = {name: as_tensor(w) for name, w in weights.items()}
        check_state(self.cfg, {name: tuple(w.shape) for name, w in new.items()}, where="TorchEngine")
        own = self.model.state_dict()
        for name, w in new.items():
            if w.dtype != own[name].dtype:
                raise ValueError(f"TorchEngine: {name} is {w.dtype}, expected {own[name].dtype}")
        for name, w in new.items():
            own[name].copy_(w)

    def recompute(self) -> None:
        """Compute the keys and values of running samples anew under the weights of now."""
        for length, slots in self._running_blocks(1):
            _, kv = prefill(self.model, self.ids[slots, :length], keep=True)
            self.cache.write(slots, kv, torch.arange(self.block))

    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], top_k: int, full: bool, temperature: float
    ) -> list[Scores]:
        self.prompt_tokens += sum(len(s) for s in sequences)
        return score(self.model, sequences, starts, block=self.block, max_len=self.max_len,
                     top_k=top_k, full=full, temperature=temperature)

    def report(self) -> UpdateReport:
        probe: tuple[float, ...] = ()
        if len(self.probe_ids) > 1:
            scores = score(self.model, [self.probe_ids], [1], block=self.block, max_len=self.max_len)
            probe = tuple(scores[0].logps.tolist())
        return UpdateReport(version=self.version, checksums=checksums(self.model.state_dict()), probe=probe)
