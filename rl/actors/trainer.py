"""One trainer rank's shell: packed batch → optimiser step → new version. Plain and blocking: it has no
event loop."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from models.weights import as_array, as_tensor, checksums, save_folder
from rl.actors.net import interface_of, node_address
from rl.actors.rollout import Rollout, Snapshot
from rl.batch import build_micro
from rl.config import Config
from rl.engines.base import UpdateReport
from rl.engines.make import Bundle
from rl.errand import Errand, unpack
from rl.objective import make_objective
from rl.step import TrainState, make_optimizer, probe_logps, train_step
from rl.sync import PROBE_ATOL, Manifest, probe_ids
from rl.types import SampleMeta, SamplingParams


class TrainerRank:
    def __init__(self, bundle: Bundle, cfg: Config, rank: int, version: int = 0) -> None:
        self.bundle, self.cfg, self.rank, self.version = bundle, cfg, rank, version
        self.store: dist.Store | None = None
        s = cfg.sampler
        params = SamplingParams(temperature=s.temperature, max_tokens=s.max_tokens)
        self.snapshot = Snapshot(Rollout(bundle, params, s.slots))

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
        model.load_state_dict({n: as_tensor(w) for n, w in self.bundle.weights.items()})
        mesh = DeviceMesh(self.device.type, list(range(cfg.ranks)))
        compiled = use_cuda if cfg.compile is None else cfg.compile
        own = self.bundle.cfg.dtype if use_cuda else "float32"
        dtype = own if cfg.dtype == "auto" else cfg.dtype
        parallelise(model, mesh, compile=compiled, param_dtype=dtype)
        self.state = TrainState(model=model, optimizer=make_optimizer(model, cfg), version=self.version)
        objective = make_objective(self.cfg)
        self.objective = replace(objective, loss=torch.compile(objective.loss)) if compiled else objective

    def step(self, errand: Errand, *arrays: Any) -> dict[str, float]:
        """One optimiser step on this rank's share. `arrays`: tokens, then each teacher's and the reference's
        scores, per group."""
        groups = unpack(self.cfg, errand, arrays)
        version = self.state.version
        micros = [build_micro(places, groups, self.device, current=version) for places in errand.micros]
        self.state, metrics = train_step(self.state, micros, self.objective, self.cfg.trainer)
        return metrics

    def publish(self) -> tuple[Manifest | None, dict[str, np.ndarray] | None]:
        """The full weights, rounded as the engines hold them, and what must be true of them. All ranks
        gather; rank 0 returns."""
        dtype = getattr(torch, self.bundle.cfg.dtype)
        full = {name: tensor.to(dtype) for name, tensor in self._gather().items()}
        probe = probe_logps(self.state.model, probe_ids(self.bundle.cfg.vocab_size))
        if self.rank:
            return None, None
        manifest = Manifest(
            version=self.state.version,
            checksums=checksums(full),
            probe=probe,
            atol=PROBE_ATOL[self.bundle.cfg.dtype],
        )
        return manifest, {name: as_array(tensor).copy() for name, tensor in full.items()}

    def hold(self, version: int, weights: Mapping[str, np.ndarray]) -> UpdateReport:
        """Keep published weights, for `answer`, while training goes on."""
        return self.snapshot.hold(version, weights)

    def answer(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[SampleMeta]:
        """Validation in the trainer's spare time: a sample for each (prompt ids, seed)."""
        return self.snapshot.answer(asked)

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
