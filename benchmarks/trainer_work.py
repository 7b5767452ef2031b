"""What benchmarks/trainer.py times: one rank's training step, ours or that of transformers and FSDP2."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from experiments.genrm_grpo import CONFIG
from models.attention import choose_attention
from models.config import ModelConfig, to_hf
from models.exchange import Way
from models.parallelise import Recompute, parallelise
from models.replica import replica_of
from models.transformer import Transformer
from models.zero import Zero
from rl.batch import GroupData, GroupTokens, MicroBatch, build_micro
from rl.config import Loss, Trainer
from rl.lessons import Lesson
from rl.made.noise import SHAPES
from rl.objective import make_objective
from rl.step import TrainState, make_optimizer, train_step
from rl.types import Completion

SIZES = {
    "tiny": ModelConfig(family="qwen2", qkv_bias=True, vocab_size=512, d_model=64, n_layers=2, n_heads=4,
                        n_kv_heads=2, head_dim=16, d_ff=128, rope_theta=1e6),
    **SHAPES,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    size: str
    tokens: int  # a step, of each rank
    length: int  # of each packed sequence
    micros: int = 1  # micro-batches that the tokens come in
    device: str
    ranks: int = 1
    gpu: int = 0  # of a row of one rank
    seconds: float
    attention: str = "auto"
    recompute: Recompute = "none"
    full_blocks: int = 0
    compile: bool = True
    keep_gathered: bool | None = None
    shard: bool | None = None
    join: bool | None = None
    overlap: bool = True
    exchange: Way = "auto"
    offload: bool = False
    fuse: bool = True
    baseline: bool = False
    profile: bool = False
    inductor: tuple[str, ...] = ()

    @property
    def cfg(self) -> ModelConfig:
        return SIZES[self.size]


def step_flops(cfg: ModelConfig, tokens: int, length: int) -> float:
    """6 · params · tokens + 6 · layers · N · H · Σ length²: forward, and backward twice as much, of matmuls
    (params without embeddings that are no head), and of causal attention over length² / 2 pairs."""
    params = cfg.n_params - (0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model)
    return 6.0 * params * tokens + 6.0 * cfg.n_layers * cfg.n_heads * cfg.head_dim * tokens * length


def work(rank: int, row: Row, port: int, path: str) -> None:
    """One rank: builds, warms up, times, and rank 0 writes a dict of what came out."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    cuda = row.device == "cuda"
    if cuda and row.ranks == 1:  # before CUDA is up
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[row.gpu] if seen else str(row.gpu)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    for setting in row.inductor:
        name, value = setting.split("=")
        setattr(inductor, name, {"True": True, "False": False}.get(value, value))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, world_size=row.ranks)
    mesh = DeviceMesh(device.type, list(range(row.ranks)))
    torch.manual_seed(rank)
    step, model, attention = (baseline if row.baseline else ours)(row, mesh, device)
    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    n = max(3, int(row.seconds / _slowest(_timed(step), device)))  # all ranks must make as many
    times = _intervals(step, n)
    replica = replica_of(model)
    outside = replica.exchange.outside if isinstance(replica, Zero) else 0
    peak = (torch.cuda.max_memory_allocated() + outside) / 2**30 if cuda else float("nan")
    if row.profile and rank == 0:
        _profile(step)
    elif row.profile:
        step()
        step()
    if rank == 0:
        found = {"ms": 1e3 * median(times), "first": first, "peak": peak}
        torch.save({**found, "attention": attention, "whole": replica is not None}, path)
    dist.barrier()
    dist.destroy_process_group()


def ours(row: Row, mesh: DeviceMesh, device: torch.device) -> tuple[Callable[[], Any], nn.Module, str]:
    dtype = "bfloat16" if device.type == "cuda" or row.shard is False else "float32"
    attention = choose_attention(row.attention, device, getattr(torch, dtype))
    model = Transformer(row.cfg, device=device, dtype=torch.float32)
    model.init_weights()
    parallelise(
        model, mesh, compile=row.compile, param_dtype=dtype, recompute=row.recompute,
        full_blocks=row.full_blocks, offload=row.offload, keep_gathered=row.keep_gathered,
        shard=row.shard, join=row.join, overlap=row.overlap, exchange=row.exchange,
    )  # fmt: skip
    trainer = Trainer(lr=1e-6, warmup=0, offload=row.offload)
    config = replace(CONFIG, trainer=trainer, loss=Loss())
    objective = make_objective(config, compile=row.compile, fuse=row.fuse)
    state = TrainState(model=model, optimizer=make_optimizer(model, trainer), version=0, attention=attention)
    share = row.tokens // row.micros
    micros = [packed(row, share, device, seed) for seed in range(row.micros)]
    box = [state]

    def step() -> dict[str, float]:
        box[0], metrics = train_step(box[0], micros, objective, trainer)
        return metrics

    return step, model, attention


def packed(row: Row, tokens: int, device: torch.device, seed: int) -> MicroBatch:
    """Sequences of a one-token prompt and an answer, all of it trained."""
    n, rng = row.length - 1, np.random.default_rng(seed)
    count = tokens // row.length
    samples = tuple(
        Completion(
            tokens=rng.integers(0, row.cfg.vocab_size, n).astype(np.int32),
            logps=np.full(n, -np.log(row.cfg.vocab_size), np.float32),
            versions=np.zeros(n, np.int32), finish="length",
        )
        for _ in range(count)
    )  # fmt: skip
    weight = {"policy": 1 / (count * n * row.micros), "kl": 1 / (count * n * row.micros)}
    lessons = [Lesson(adv=float(rng.normal()), weight=weight) for _ in samples]
    data = {0: GroupData(tokens=GroupTokens(np.zeros(1, np.int32), samples), lessons=lessons)}
    return build_micro([(0, s) for s in range(count)], data, device, current=0, bucket=128)


def baseline(row: Row, mesh: DeviceMesh, device: torch.device) -> tuple[Callable[[], Any], nn.Module, str]:
    """transformers' model as it comes, its own cross-entropy over full logits (less than a policy loss),
    FSDP2 per layer, bf16 over float32 masters, fused AdamW, clipping. Equal lengths need no packing."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM  # type: ignore[import-not-found]

    cuda = device.type == "cuda"
    sizes = {k: v for k, v in to_hf(row.cfg).items() if k not in ("dtype", "rope_scaling", "rope_parameters")}
    config = AutoConfig.for_model(**{**sizes, "use_cache": False})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if cuda else torch.float32, reduce_dtype=torch.float32
    )
    for layer in model.model.layers:
        if row.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=cuda)
    ids = torch.randint(row.cfg.vocab_size, (row.tokens // row.length, row.length), device=device)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step, model, "sdpa"


def _timed(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()  # ends with the host's wait for the metrics, of which the last is the norm, before the optimiser
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _intervals(step: Callable[[], Any], n: int) -> list[float]:
    """From the end of each step on the host to that of the next, which is prepared while the optimiser of the
    one before still runs, as in training."""
    step()
    marks = [time.perf_counter()]
    for _ in range(n):
        step()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in zip(marks, marks[1:], strict=False)]


def _slowest(seconds: float, device: torch.device) -> float:
    worst = torch.tensor(seconds, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


KINDS = {  # the first that is found in a kernel's name
    "attention": ("flash", "fmha", "sm90_kernel_cutlass_kernel_flash", "attn"),
    "head's rows": ("_rows_kernel", "_scale_kernel"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitK"),
    "collectives": ("nccl",),
    "optimiser": ("FusedAdam", "fused_adam"),
    "foreach: norm, clip, casts": ("multi_tensor",),
    "inductor": ("triton_",),
    "copies": ("Memcpy", "Memset", "copy", "cat", "split"),
}


def _profile(step: Callable[[], Any], top: int = 30) -> None:
    """Kernels of one step by time, by kind and one by one, and how long no kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    cuda = torch.cuda.is_available()
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    step()
    with profile(activities=activities) as recorded:
        seconds = _timed(step)
    spans: list[tuple[float, float, str]] = []
    by_kernel: dict[str, list[float]] = {}
    for event in recorded.events() or ():
        if str(event.device_type).endswith("CUDA" if cuda else "CPU") and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end, event.name))
            by_kernel.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    spans.sort()
    busy, until, last = 0.0, spans[0][0], "the start"
    gaps: list[tuple[float, str, str]] = []
    for start, end, name in spans:
        if start > until:
            gaps.append(((start - until) / 1e3, last, name))
        busy += max(0.0, end - max(start, until)) / 1e3
        if end > until:
            until, last = end, name
    by_kind: dict[str, float] = {}
    for name, times in by_kernel.items():
        kind = next((k for k, marks in KINDS.items() if any(m in name for m in marks)), "other")
        by_kind[kind] = by_kind.get(kind, 0.0) + sum(times)
    print(f"  profile: step {1e3 * seconds:.1f} ms, some kernel runs for {busy:.1f} ms", flush=True)
    for kind, ms in sorted(by_kind.items(), key=lambda x: -x[1]):
        print(f"    {kind:30s} {ms:9.2f} ms")
    for name, times in sorted(by_kernel.items(), key=lambda x: -sum(x[1]))[:top]:
        print(f"    {sum(times):9.2f} ms {len(times):5d} x {name[:130]}")
    print(f"  no kernel for {sum(g[0] for g in gaps):.1f} ms in {len(gaps)} gaps; the longest:", flush=True)
    for ms, before, after in sorted(gaps, reverse=True)[:8]:
        print(f"    {ms:9.2f} ms {before[:50]} | {after[:50]}")
