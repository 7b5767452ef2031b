"""One trainer rank's shell: packed batch → optimiser step → new version. Plain and blocking: it has no
event loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from models.parallelise import parallelise
from models.transformer import Transformer
from models.weights import checksums, save_folder
from rl.actors.net import interface_of, node_address
from rl.batch import GroupData, build_micro
from rl.config import Config
from rl.engines.make import Bundle
from rl.lessons import Lesson
from rl.objective import make_objective
from rl.packing import Micro
from rl.step import TrainState, make_optimizer, probe_logps, train_step
from rl.sync import Manifest, probe_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What one rank does in a step. `groups`: indices of its groups; the arrays follow as arguments of
    their own."""

    groups: tuple[int, ...]
    micros: tuple[Micro, ...]
    lessons: tuple[Sequence[Lesson], ...]  # of its groups
    has_teacher: tuple[bool, ...]
    has_reference: bool


class TrainerRank:
    def __init__(self, bundle: Bundle, cfg: Config, rank: int, version: int = 0) -> None:
        self.bundle, self.cfg, self.rank, self.version = bundle, cfg, rank, version
        self.store: dist.Store | None = None

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0 opens the meeting point on its node's own address; the port is whatever is free."""
        host = node_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def start(self, host: str, port: int) -> None:
        cfg = self.cfg.trainer
        torch.set_num_threads(cfg.threads)
        use_cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if use_cuda else "cpu")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(node_address()))
        store = self.store or dist.TCPStore(host, port, is_master=False)
        backend = "nccl" if use_cuda else "gloo"
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=cfg.ranks,
            timeout=timedelta(seconds=self.cfg.deadlines.train),
        )  # fmt: skip
        model = Transformer(self.bundle.cfg, device=self.device, dtype=torch.float32)
        model.load_state_dict({n: torch.from_numpy(np.array(w)) for n, w in self.bundle.weights.items()})
        mesh = DeviceMesh(self.device.type, list(range(cfg.ranks)))
        compiled = use_cuda if cfg.compile is None else cfg.compile
        parallelise(model, mesh, compile=compiled)
        self.state = TrainState(model=model, optimizer=make_optimizer(model, cfg), version=self.version)
        objective = make_objective(self.cfg)
        self.objective = replace(objective, loss=torch.compile(objective.loss)) if compiled else objective

    def step(self, errand: Errand, *arrays: Any) -> dict[str, float]:
        """One optimiser step on this rank's share. `arrays`: tokens, then teacher and reference scores,
        per group."""
        groups = self._unpack(errand, list(arrays))
        version = self.state.version
        micros = [build_micro(places, groups, self.device, current=version) for places in errand.micros]
        self.state, metrics = train_step(self.state, micros, self.objective, self.cfg.trainer)
        return metrics

    def _unpack(self, errand: Errand, arrays: list[Any]) -> dict[int, GroupData]:
        groups = {}
        for g, lessons, taught in zip(errand.groups, errand.lessons, errand.has_teacher, strict=True):
            groups[g] = GroupData(
                tokens=arrays.pop(0),
                lessons=lessons,
                teacher=arrays.pop(0) if taught else None,
                reference=arrays.pop(0) if errand.has_reference else None,
            )
        return groups

    def publish(self) -> tuple[Manifest | None, dict[str, np.ndarray] | None]:
        """The full weights and what must be true of them. All ranks gather; rank 0 returns."""
        full = self._gather()
        probe = probe_logps(self.state.model, probe_ids(self.bundle.cfg.vocab_size))
        if self.rank:
            return None, None
        manifest = Manifest(version=self.state.version, checksums=checksums(full), probe=probe)
        return manifest, {name: tensor.cpu().numpy().copy() for name, tensor in full.items()}

    def _gather(self) -> dict[str, torch.Tensor]:
        state = self.state.model.state_dict()
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in state.items()}

    def save(self, path: str) -> None:
        """This rank's shards of model and optimiser into path/trainer; rank 0 adds path/policy, a Hugging
        Face folder."""
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=Path(path) / "trainer")
        (
            Path(path) / f"rank_{self.rank}"
        ).touch()  # what this rank wrote must be seen where the checkpoint is sealed
        full = self._gather()
        if self.rank == 0:
            save_folder(Path(path) / "policy", full, self.bundle.cfg, self.bundle.tokenizer)

    def load(self, path: str, version: int) -> None:
        """Model and optimiser from a checkpoint, also one of another number of ranks."""
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=Path(path) / "trainer")
        set_state_dict(
            self.state.model, self.state.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self.state = TrainState(model=self.state.model, optimizer=self.state.optimizer, version=version)

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
