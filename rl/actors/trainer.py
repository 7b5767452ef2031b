"""One trainer rank's shell: packed batch → optimiser step → new version. Plain and blocking: it has no
event loop.

What is said of published weights, their way out, and what is written of checkpoints run beside the next
step, in Ray's group of threads `WIRE`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from models.attention import choose_attention
from models.config import ModelConfig
from models.delta import Delta
from models.memory import training_bytes
from models.parallelise import parallelise, reshard
from models.replica import own_part, replica_of
from models.transformer import Transformer
from models.weights import as_tensor, save_folder
from models.zero import Zero
from rl.actors.net import interface_of, node_address
from rl.actors.rollout import Rollout, Snapshot
from rl.batch import GroupData, MicroBatch, build_micro
from rl.config import Config
from rl.engines.base import UpdateReport
from rl.engines.make import Bundle
from rl.errand import Errand, unpack
from rl.objective import make_objective
from rl.packing import Place as Sample
from rl.packing import bucket
from rl.rehearsal import rehearse
from rl.staging import Staging, read, read_weights
from rl.step import Pending, TrainState, accumulate, begin, finish, make_optimizer, train_step
from rl.sync import Manifest
from rl.types import SampleMeta, SamplingParams
from rl.wire.gather import gather
from rl.wire.parcel import Broadcast, Mapped, Place
from rl.wire.post import Post

WIRE = "wire"


def room(cfg: Config, model: ModelConfig, gpu: float) -> str:
    """What a step takes of its share of a GPU of so many bytes, for a person."""
    t, batch = cfg.trainer, cfg.trainer.prompts * cfg.sampler.samples * cfg.sampler.max_tokens
    need = training_bytes(
        model, t.micro_tokens, recompute=t.recompute, full_blocks=t.full_blocks, ranks=t.ranks,
        several=t.stream or batch > t.micro_tokens * t.ranks,
    )  # fmt: skip
    share = gpu * min(1.0, t.gpus)
    said = f", about {need / 2**30:.0f} of {share / 2**30:.0f} GiB for {t.micro_tokens:,} tokens"
    advice = ": lower trainer.micro_tokens, raise trainer.gpus or set trainer.recompute"
    return said + (advice if need > share else "")


class TrainerRank:
    def __init__(
        self, bundle: Bundle, cfg: Config, rank: int, version: int = 0, prompts: Sequence[int] = ()
    ) -> None:
        """prompts: lengths of the run's prompts, for the rehearsal."""
        self.bundle, self.cfg, self.rank, self.version = bundle, cfg, rank, version
        self.prompts = prompts
        self.pending: Pending | None = None  # of a step that comes in parts
        self.store: dist.Store | None = None
        self.post: Post | None = None  # rank 0's
        s = cfg.sampler
        params = SamplingParams(temperature=s.temperature, max_tokens=s.max_tokens)
        self.snapshot = Snapshot(Rollout(bundle, params, s.slots))

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0 opens the meeting point on its node's own address; the port is whatever is free."""
        host = node_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def start(self, host: str, port: int) -> str:
        """Bring the model up; how it will train, for a person."""
        cfg = self.cfg.trainer
        torch.set_num_threads(cfg.threads)
        use_cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if use_cuda else "cpu")
        if use_cuda and cfg.gpus < 1:  # or the roles beside it run out of memory first
            torch.cuda.set_per_process_memory_fraction(cfg.gpus)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(node_address()))
        store = self.store or dist.TCPStore(host, port, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"  # objects travel beside the device's work
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=cfg.ranks,
            timeout=timedelta(seconds=self.cfg.deadlines.train),
        )  # fmt: skip
        model = Transformer(self.bundle.cfg, device=self.device, dtype=torch.float32)
        model.load_state_dict({n: as_tensor(w) for n, w in self.bundle.weights.items()})
        mesh = DeviceMesh(self.device.type, list(range(cfg.ranks)))
        self.staging = Staging(self.device, self.cfg.deadlines.train)
        self.compiled = use_cuda if cfg.compile is None else cfg.compile
        own = self.bundle.cfg.dtype if use_cuda else "float32"
        dtype = own if cfg.dtype == "auto" else cfg.dtype
        attention = choose_attention(cfg.attention, self.device, getattr(torch, dtype))
        parallelise(
            model,
            mesh,
            compile=self.compiled,
            param_dtype=dtype,
            recompute=cfg.recompute,
            full_blocks=cfg.full_blocks,
            offload=cfg.offload,
            keep_gathered=cfg.keep_gathered,
            shard=cfg.shard,
            exchange=cfg.exchange,
        )
        optimizer = make_optimizer(model, cfg)
        self.state = TrainState(model=model, optimizer=optimizer, version=self.version, attention=attention)
        self.objective = make_objective(self.cfg, compile=self.compiled)
        how = f"{self.device.type}, {dtype}, attention by {attention}"
        if cfg.offload:
            how += f", AdamW on the host with {cfg.threads} thread(s) of trainer.threads"
        replica = replica_of(model)
        if isinstance(replica, Zero):
            how += f", ranks exchange {replica.exchange.said}"
        if use_cuda and replica is not None:
            how += room(self.cfg, self.bundle.cfg, torch.cuda.get_device_properties().total_memory)
        return how + (self._rehearse() if self.compiled else "")

    def _rehearse(self) -> str:
        """Compile what the run will need, and say so; all ranks must."""
        # Beyond the limit a block ends the run, and a loss goes on uncompiled.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        graphs, seconds = rehearse(
            self.state, self.objective, self.cfg, self._build, self.prompts,
            self.bundle.cfg.vocab_size, self._taken_later() if self.device.type == "cuda" else 0,
        )  # fmt: skip
        return f", {graphs} graphs compiled in {seconds:.0f} s"

    def _taken_later(self) -> int:
        """Bytes of what the first step and the first publication bring: two moments, the packed weights."""
        masters = self.state.optimizer.param_groups[0]["params"]
        local = sum(own_part(p).numel() for p in masters)
        copies = (1 + self.cfg.sync.delta) * (self.rank == 0)
        packed = copies * self.bundle.cfg.n_params * getattr(torch, self.bundle.cfg.dtype).itemsize
        return packed + (0 if self.cfg.trainer.offload else 8 * local)

    def step(self, errand: Errand, *arrays: Any) -> dict[str, float]:
        """One optimiser step on this rank's share. `arrays`: tokens, then each teacher's and the reference's
        scores, per group."""
        micros = self._micros(errand, arrays)
        self.state, metrics = train_step(self.state, micros, self.objective, self.cfg.trainer)
        return metrics

    def feed(self, errand: Errand, *arrays: Any) -> None:
        """The gradient of a part of a step is added to that of the parts before. Ends when the device is
        done: what comes meanwhile makes a larger part."""
        micros = self._micros(errand, arrays)
        pending = self.pending or begin(self.state)
        for i, micro in enumerate(micros):
            sync = errand.last and i == len(micros) - 1
            pending = accumulate(pending, micro, self.objective, sync=sync)
        self.pending = pending
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def finish(self, scale: float) -> dict[str, float]:
        """Step by what was fed, times `scale`."""
        if self.pending is None:
            raise RuntimeError("finish: nothing was fed")
        self.state, metrics = finish(self.pending, self.cfg.trainer, scale=scale)
        self.pending = None
        return metrics

    def _micros(self, errand: Errand, arrays: Sequence[Any]) -> list[MicroBatch]:
        groups = unpack(self.cfg, errand, arrays)
        return [self._build(places, groups) for places in errand.micros]

    def _build(self, places: Sequence[Sample], groups: Mapping[int, GroupData]) -> MicroBatch:
        cfg = self.cfg.trainer
        return build_micro(
            places,
            groups,
            self.device,
            current=self.state.version,
            bucket=bucket(cfg.micro_tokens) if self.compiled else 1,
            share_prompt=cfg.share_prompt,
        )

    def publish(self) -> None:
        """Pack the weights as they are now. All ranks send theirs, in the engines' dtype; rank 0 has them."""
        cfg = self.bundle.cfg
        if self.rank == 0 and self.post is None:
            self.post = Post(cfg, self.device, delta=self.cfg.sync.delta)
        parts = gather(self._parameters(), getattr(torch, cfg.dtype))
        if self.post is not None:
            self.post.pack(self.state.version, parts)
        else:
            deque(parts, maxlen=0)

    @ray.method(concurrency_group=WIRE)
    def place(self) -> Place:
        return self._published.place()

    @ray.method(concurrency_group=WIRE)
    def manifest(self) -> Manifest:
        """What must be true of an engine that holds the published weights."""
        return self._published.manifest()

    @ray.method(concurrency_group=WIRE)
    def arrays(self) -> tuple[int, dict[str, np.ndarray]]:
        """Their bytes, and the published weights by value."""
        arrays = self._published.arrays()
        return sum(a.nbytes for a in arrays.values()), arrays

    @ray.method(concurrency_group=WIRE)
    def delta(self) -> tuple[int | None, Delta | None]:
        """Its bytes, and what has changed since the version before; None: there was none."""
        delta = self._published.delta()
        return None if delta is None else delta.nbytes, delta

    @ray.method(concurrency_group=WIRE)
    def mapped(self) -> Mapped:
        return self._published.mapped()

    @ray.method(concurrency_group=WIRE)
    def send(self, address: Broadcast) -> None:
        self._published.send(address)

    @property
    def _published(self) -> Post:
        if self.post is None:
            raise RuntimeError("nothing is published")
        return self.post

    def hold(self, version: int, weights: Mapping[str, np.ndarray]) -> UpdateReport:
        """Keep published weights, for `answer`, while training goes on."""
        return self.snapshot.hold(version, weights)

    def answer(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[SampleMeta]:
        """Validation in the trainer's spare time: a sample for each (prompt ids, seed)."""
        return self.snapshot.answer(asked)

    def _parameters(self) -> dict[str, torch.Tensor]:
        reshard(self.state.model)
        return dict(self.state.model.named_parameters())

    def stage(self) -> None:
        """Copy this rank's shards of model and optimiser to the host's memory, for `write`."""
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer)
        self.staging.stage({"model": model, "optimizer": optimizer})

    @ray.method(concurrency_group=WIRE)
    def write(self, path: str) -> None:
        """What was staged, into path/trainer."""
        self.staging.write(Path(path))
        # What this rank wrote must be seen where the checkpoint is sealed.
        (Path(path) / f"rank_{self.rank}").touch()

    @ray.method(concurrency_group=WIRE)
    def write_policy(self, path: str) -> None:
        """Rank 0, after all have written: their master weights into path/policy, a Hugging Face folder."""
        if self.rank == 0:
            whole = read_weights(Path(path), self.bundle.cfg)
            save_folder(Path(path) / "policy", whole, self.bundle.cfg, self.bundle.tokenizer)

    def load(self, path: str, version: int) -> None:
        """Model and optimiser from a checkpoint, also one of another number of ranks."""
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer)
        read(Path(path), {"model": model, "optimizer": optimizer})
        set_state_dict(
            self.state.model, self.state.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self.state = replace(self.state, version=version)

    def stop(self) -> None:
        if dist.is_initialized():
            self.staging.close()
            dist.destroy_process_group()
