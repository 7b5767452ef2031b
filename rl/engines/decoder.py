"""The built-in engine without asyncio: slots, prefill, decoding steps, scoring and weights."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.checksum import checksums
from models.config import ModelConfig
from models.transformer import Transformer
from models.weights import Weights, as_tensor, check_state
from rl.engines.base import UpdateReport
from rl.engines.kv import KVCache, prefill
from rl.engines.request import Finished, Prefilled, Request
from rl.engines.sampling import sample, uniform
from rl.engines.scoring import TOKENS_AT_ONCE, classify, score
from rl.engines.shapes import bucket_of, by_bucket, fix_shapes, head_logits, stack
from rl.types import Completion, Finish, Scores


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
        self.cfg, self.version, self.max_len, self.block, self.device = cfg, version, max_len, block, device
        self.probe_ids = tuple(probe_ids)
        self.model = fix_shapes(Transformer(cfg, device=device))
        self._copy(weights)
        self.cache = KVCache(cfg, max_slots, device, self.model.head.dtype)
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

    # ── Sampling ──────────────────────────────────────────────────────────────────────────────────

    def step(self, arrived: Sequence[Request], admit: bool) -> list[Finished]:
        """Give free slots to waiting samples, one token to every running one; returns those that finished."""
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
        self._prefill([r for r in dict.fromkeys(request for request, _, _ in taken) if r.prefix is None])
        by_prefix: dict[Prefilled, list[tuple[int, int]]] = defaultdict(list)
        for request, index, seed in taken:
            slot = self.free.pop()
            self.owner[slot] = request, index
            self.seed[slot] = seed
            assert request.prefix is not None
            prefilled, row = request.prefix
            by_prefix[prefilled].append((slot, row))
        for request, _, _ in taken:
            if not request.waiting:
                request.prefix = None
        slots, logits = [], []
        for prefilled, pairs in by_prefix.items():
            at, rows = torch.tensor(pairs).unbind(1)
            there = rows.to(self.device)
            self.cache.write(at, [kv[there] for kv in prefilled.kv])
            self.ids[at, : prefilled.ids.shape[1]] = prefilled.ids[rows]
            slots.append(at)
            logits.append(prefilled.logits[there])
        at = torch.cat(slots)
        self._set_params(at)
        return self._append(at, torch.cat(logits))

    def _prefill(self, requests: list[Request]) -> None:
        lengths = [len(request.prompt) for request in requests]
        self.prompt_tokens += sum(lengths)
        for length, rows in by_bucket(self.buckets[lengths]):
            for chunk in rows.split(max(1, TOKENS_AT_ONCE // length)):
                part = [requests[i] for i in chunk.tolist()]
                ids = stack([request.prompt for request in part], length)
                hidden, kv = prefill(self.model, ids, keep=True)
                last = hidden[torch.arange(len(part)), torch.tensor([len(r.prompt) - 1 for r in part])]
                prefilled = Prefilled(ids=ids, kv=kv, logits=head_logits(self.model, last, self.block))
                for row, request in enumerate(part):
                    request.prefix = prefilled, row

    def _set_params(self, slots: Tensor) -> None:
        requests = [self.owner[slot][0] for slot in slots.tolist()]
        params = [request.params for request in requests]
        self.start[slots] = self.size[slots] = torch.tensor([len(request.prompt) for request in requests])
        self.limit[slots] = torch.tensor([p.max_tokens for p in params])
        self.temperature[slots] = torch.tensor([p.temperature for p in params], dtype=torch.float64)
        self.top_p[slots] = torch.tensor([p.top_p for p in params], dtype=torch.float64)
        self.top_k[slots] = torch.tensor([p.top_k for p in params])
        stops = [self.cfg.eos_ids + tuple(p.stop_ids) for p in params]
        width = max(self.stops.shape[1], *(len(s) for s in stops))
        self.stops = F.pad(self.stops, (0, width - self.stops.shape[1]), value=-1)
        self.stops[slots] = torch.tensor([[*s, *[-1] * (width - len(s))] for s in stops])

    def _decode(self) -> list[Finished]:
        running = torch.tensor(sorted(self.owner))
        groups = by_bucket(self.buckets[self.size[running]])
        running = torch.cat([running[rows] for _, rows in groups])
        slots = self._padded(running, self.dummy)
        counts = [len(rows) for _, rows in groups]
        counts[-1] += len(slots) - len(running)  # the dummies
        at = self.size[slots] - 1
        attend = self.cache.decode(slots, at, [length for length, _ in groups], counts)
        ids, positions = (x.view(-1, self.block).to(self.device) for x in (self.ids[slots, at], at))
        hidden = self.model(ids, positions, attend).flatten(0, 1)
        return self._append(running, head_logits(self.model, hidden, self.block)[: len(running)])

    def _padded(self, x: Tensor, value: float = 0) -> Tensor:
        """x [R, ...] with rows of `value` up to a multiple of the block."""
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % self.block), value=value)

    def _append(self, slots: Tensor, logits: Tensor) -> list[Finished]:
        """Draw the next token of each slot [R] from logits [R, V] and take out what is finished."""
        rows = self._padded(slots, self.dummy)
        u = uniform(self.seed[rows], self.size[rows] - self.start[rows])
        top_p, top_k = self.top_p[rows], self.top_k[rows]
        filtered = bool(((top_p < 1) | (top_k > 0)).any())
        u, temperature, top_p, top_k = (x.to(self.device) for x in (u, self.temperature[rows], top_p, top_k))
        token, logp = (
            x[: len(slots)].cpu()
            for x in sample(
                self._padded(logits), u, temperature=temperature, top_p=top_p, top_k=top_k, filtered=filtered
            )
        )
        at = self.size[slots]
        self.ids[slots, at] = token
        self.logps[slots, at] = logp
        self.versions[slots, at] = self.version
        self.size[slots] = at + 1
        self.sampled_tokens += len(slots)
        stopped = (token[:, None] == self.stops[slots]).any(1)
        done = stopped | (at + 1 - self.start[slots] >= self.limit[slots])
        ended: list[Finish] = ["stop" if stop else "length" for stop in stopped[done].tolist()]
        return self._leave(slots[done], ended)

    def _leave(self, slots: Tensor, finishes: Sequence[Finish]) -> list[Finished]:
        tokens = self.ids[slots].numpy().astype(np.int32)
        logps, versions = self.logps[slots].numpy(), self.versions[slots].numpy()
        starts, sizes = self.start[slots].tolist(), self.size[slots].tolist()
        out = []
        for i, slot in enumerate(slots.tolist()):
            own = slice(starts[i], sizes[i])
            out.append(
                (
                    *self.owner.pop(slot),
                    Completion(
                        tokens=tokens[i, own].copy(),
                        logps=logps[i, own].copy(),
                        versions=versions[i, own].copy(),
                        finish=finishes[i],
                    ),
                )
            )
            self.free.append(slot)
        return out

    def abort(self, arrived: Sequence[Request], which: Callable[[Request], bool]) -> list[Finished]:
        """End the running and the waiting samples of some requests."""
        self.waiting.extend(arrived)
        slots = torch.tensor([slot for slot, (r, _) in self.owner.items() if which(r)], dtype=torch.int64)
        cut: list[Finish] = ["abort"] * len(slots)
        finished = self._leave(slots, cut)
        nothing = Completion(
            tokens=np.zeros(0, np.int32),
            logps=np.zeros(0, np.float32),
            versions=np.zeros(0, np.int32),
            finish="abort",
        )
        finished += [(r, index, nothing) for r in self.waiting if which(r) for index, _ in r.waiting]
        self.waiting = deque(r for r in self.waiting if not which(r))
        return finished

    # ── Weights and scores ────────────────────────────────────────────────────────────────────────

    def load(self, version: int, weights: Weights, recompute: bool) -> UpdateReport:
        """Copy the weights in place; running samples keep their old keys and values unless `recompute`.

        Raises ValueError where names or shapes do not fit; then nothing has changed.
        """
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
            if not w.is_floating_point():
                raise ValueError(f"TorchEngine: {name} is {w.dtype}, expected floating-point numbers")
        for name, w in new.items():
            own[name].copy_(w)

    def recompute(self) -> None:
        """Compute the keys and values of running samples anew under the weights of now."""
        running = torch.tensor(sorted(self.owner), dtype=torch.int64)
        for length, rows in by_bucket(self.buckets[self.size[running] - 1]):
            for chunk in rows.split(max(1, TOKENS_AT_ONCE // length)):
                slots = running[chunk]
                _, kv = prefill(self.model, self.ids[slots, :length], keep=True)
                self.cache.write(slots, kv)

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int], **how: Any) -> list[Scores]:
        self.prompt_tokens += sum(len(s) for s in sequences)
        return score(self.model, sequences, starts, block=self.block, max_len=self.max_len, **how)

    def classify(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        self.prompt_tokens += sum(len(s) for s in sequences)
        return classify(self.model, sequences, max_len=self.max_len)

    def report(self) -> UpdateReport:
        probe: tuple[float, ...] = ()
        if len(self.probe_ids) > 1 and self.cfg.head == "lm":
            scores = score(self.model, [self.probe_ids], [1], block=self.block, max_len=self.max_len)
            probe = tuple(scores[0].logps.tolist())
        return UpdateReport(version=self.version, checksums=checksums(self.model.state_dict()), probe=probe)
