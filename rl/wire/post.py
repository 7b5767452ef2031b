"""The trainer's end: one version's weights in one piece, and their ways out while training goes on."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from models.checksum import checksums
from models.config import ModelConfig
from models.delta import Delta, diff
from models.transformer import Transformer
from models.weights import as_array
from rl.sync import PROBE_ATOL, Manifest, probe_ids
from rl.wire.flat import buckets, dtype_of, offsets, views
from rl.wire.gather import Rows
from rl.wire.group import Group
from rl.wire.inbox import gpu_of
from rl.wire.parcel import Broadcast, Mapped, Place
from rl.wire.probe import probe_logps


class Post:
    """Of rank 0. `pack` is the only moment that the trainer stands still for; all the rest may run in other
    threads beside its next step, up to the next `pack`."""

    def __init__(self, cfg: ModelConfig, device: torch.device, *, delta: bool = False) -> None:
        self.cfg, self.device, self.version = cfg, device, -1
        self.buffer = torch.empty(offsets(cfg)[1], dtype=dtype_of(cfg), device=device)
        self.views = views(self.buffer, cfg)
        self.before = torch.empty_like(self.buffer) if delta else None  # the version before
        self.version_before = -1
        self.groups: dict[str, Group] = {}
        self.model = Transformer(cfg, device="meta").requires_grad_(False)
        self.model.load_state_dict(self.views, assign=True)  # no memory of its own
        self.aside = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def pack(self, version: int, tensors: Iterable[Mapping[Rows, Tensor]]) -> None:
        """Copy the weights, rounded as the engines hold them. Raises ValueError where rows are missing."""
        if self.before is not None:
            self.before.copy_(self.buffer)
            self.version_before = self.version
        left = {name: len(view) for name, view in self.views.items()}
        for part in tensors:
            for name, start, stop in part:
                left[name] -= stop - start
            places = [self.views[name][start:stop] for name, start, stop in part]
            torch._foreach_copy_(places, list(part.values()))
        missing = sorted(name for name, rows in left.items() if rows)
        if missing:
            raise ValueError(f"Post.pack: {len(missing)} parameters are not whole: {', '.join(missing[:5])}")
        self.version = version
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def place(self) -> Place:
        return Place((gpu_of(self.device),) if self.device.type == "cuda" else ())

    def manifest(self) -> Manifest:
        """What must be true of an engine that holds these weights."""
        with torch.cuda.stream(self.aside):
            return Manifest(
                version=self.version,
                checksums=checksums(self.views),
                probe=probe_logps(self.model, probe_ids(self.cfg.vocab_size)),
                atol=PROBE_ATOL[self.cfg.dtype],
            )

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights by value."""
        with torch.cuda.stream(self.aside):
            return {name: as_array(tensor).copy() for name, tensor in self.views.items()}

    def delta(self) -> Delta | None:
        """What has changed since the version before; None where there is none."""
        if self.before is None or self.version_before < 0:
            return None
        with torch.cuda.stream(self.aside):
            return diff(views(self.before, self.cfg), self.views, self.version_before, self.version)

    def mapped(self) -> Mapped:
        """The weights where they lie, also those of later versions."""
        return Mapped(gpu=gpu_of(self.device), handle=pickle.dumps(reduce_tensor(self.buffer)))

    def send(self, address: Broadcast) -> None:
        """Broadcast to the engine that got this address. Raises GroupError where it does not take part."""
        engine = address.key.split("/")[0]
        known = self.groups.pop(engine, None)
        if known is not None and known.address != address:
            known.close()
            known = None
        own = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # of several at a time
        with torch.cuda.stream(own):
            group = known or Group(address, 0, self.device)
            for start, stop in buckets(self.cfg):
                group.broadcast(self.buffer[start:stop])
            group.finish()
        self.groups[engine] = group
