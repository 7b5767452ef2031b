"""How vLLM is started and asked: every choice in one place, for its versions 0.25 to 0.32, CPU and CUDA."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from models.config import ModelConfig
from models.shards import pieces

BLOCK = {"cpu": 32, "cuda": 16}  # tokens per block of the cache; on a CPU 32 is the least that is fast
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of others vLLM dies at the first step
SPARE = 1  # slots beside those of the samples, for the probe
HOLDING = "viva_holding"  # of a request whose tokens vllm_scheduler keeps back until there are
HOLD = 16  # of them
WHOLE = 0.9  # of a GPU at most: the rest is for what vLLM does not count, as NCCL's buffers
LEAST_CACHE = 1e9  # bytes of keys and values: with less an engine on a GPU would hardly do anything at a time

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """What the machine allows: of a GPU `memory`, the fraction that this engine may take of each of its
    `tensor_parallel` GPUs, with what an update brings where it `updates`; of a CPU `threads`.

    `device`: None is what the installed vLLM was built for. `cache_bytes` of keys and values are on a CPU by
    default what all slots can fill, on a GPU what is left. With `memory` below WHOLE others are taken to be
    on the GPU.
    """

    device: Device | None = None
    tensor_parallel: int = 1
    memory: float = WHOLE
    updates: bool = True  # new weights come, as many bytes again, and lie beside the old ones for a while
    cache_bytes: int | None = None
    threads: int = 1
    compile: bool = True  # CUDA only: torch.compile and captured graphs, about a minute at start
    tokens_per_step: int = 8192  # of prompts: as many rows of logits, where their log-probs are asked for


def find_device(wanted: Device | None) -> Device:
    """Where the installed vLLM runs: it is built for one. Raises ValueError where another is wanted.

    Found without importing vLLM, which reads some of `environment` as it is imported.
    """
    found = _version("vllm") or f"{_version('vllm-cpu') or ''}+cpu"
    if found == "+cpu":
        raise ValueError("VllmEngine: vLLM is not installed: requirements-gpu.txt, or -vllm-cpu.txt, has it")
    built: Device = "cpu" if "cpu" in found else "cuda"  # vLLM itself tells them apart by that
    if wanted == "cpu" and built == "cuda":
        raise ValueError(
            f"VllmEngine: gpus is 0, but the installed vLLM {found} is the CUDA build, which cannot run on a "
            "CPU: give the engine gpus, set its kind to torch, or install requirements-vllm-cpu.txt instead"
        )
    if wanted == "cuda" and built == "cpu":
        raise ValueError(
            f"VllmEngine: gpus is above 0, but the installed vLLM {found} is the CPU build: set the engine's "
            "gpus to 0, or install requirements-gpu.txt instead"
        )
    return built


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def weight_bytes(cfg: ModelConfig, tensor_parallel: int) -> int:
    """Of the weights of the rank that holds most."""
    itemsize = 4 if cfg.dtype == "float32" else 2
    return itemsize * sum(math.prod(p.shape) for p in pieces(cfg, 0, tensor_parallel).values())


def scratch_bytes(cfg: ModelConfig, slots: int, options: VllmOptions) -> int:
    """About what vLLM takes of a GPU beside weights and cache: CUDA itself, graphs and buffers; what a block
    computes of one step's prompts; logits in three precisions of all slots, or of the 1024 tokens at a time
    whose log-probs are told."""
    block = options.tokens_per_step * 2 * (8 * cfg.d_model + 3 * cfg.d_ff)
    return int(3e9) + block + 10 * max(slots + SPARE, 1024) * cfg.vocab_size


def gpu_memory(cfg: ModelConfig, options: VllmOptions, total: int, slots: int) -> dict[str, Any]:
    """vLLM's arguments about the memory of a GPU of `total` bytes.

    The fraction that it may take is memory - staged / total, as it does not know of the weights that an
    update stages. It measures what is left for its cache, but takes for its own whatever grows on the GPU
    meanwhile: where others start beside it the cache is computed here, as no neighbour changes it.

    Raises ValueError where the share does not hold the cache that is asked for, 1 GB at least.
    """
    weights, scratch = weight_bytes(cfg, options.tensor_parallel), scratch_bytes(cfg, slots, options)
    staged = weights if options.updates else 0
    cache = options.cache_bytes or LEAST_CACHE
    left = options.memory * total - weights - staged - scratch
    if cache > left:
        beside = f" + {staged / 1e9:.3g} GB of new ones at an update" if staged else ""
        raise ValueError(
            f"VllmEngine: {options.memory:.3g} of a GPU of {total / 1e9:.0f} GB is too little for "
            f"{weights / 1e9:.3g} GB of weights{beside} + {scratch / 1e9:.3g} GB to compute with + "
            f"{cache / 1e9:.3g} GB of keys and values: raise the engine's gpus or tensor_parallel"
        )
    alone = options.memory >= WHOLE and options.cache_bytes is None
    measured = {} if alone else {"kv_cache_memory_bytes": options.cache_bytes or int(left)}
    return {"gpu_memory_utilization": options.memory - staged / total, **measured}


def environment(device: str, options: VllmOptions, dtype: str = "bfloat16") -> dict[str, str]:
    """Variables that are read instead of arguments; ones that are set already win."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads can hang
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if device == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else two engines sit on the same core
        env["OMP_NUM_THREADS"] = str(options.threads)
    elif importlib.util.find_spec("flashinfer") is None:
        env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if dtype == "float32":  # else Triton multiplies it as TF32: log-probs off by 3e-3 nats, with this by 1e-5
        env["TRITON_F32_DEFAULT"] = "ieee"
    return {name: value for name, value in env.items() if name not in os.environ}


def cache_bytes(cfg: ModelConfig, slots: int, max_len: int) -> int:
    """Of keys and values of all slots at their full length, and of the block that vLLM sets aside."""
    block = BLOCK["cpu"]
    itemsize = 4 if cfg.dtype == "float32" else 2
    blocks = (slots + SPARE) * -(-max_len // block) + 2
    return blocks * block * 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * itemsize


def engine_args(
    cfg: ModelConfig,
    folder: str,
    device: str,
    slots: int,
    max_len: int,
    options: VllmOptions,
    *,
    total: int = 0,
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. total: bytes of a GPU, where that is the device.

    Raises ValueError for a model that vLLM cannot run there.
    """
    if device == "cpu" and cfg.head_dim not in CPU_HEADS:
        raise ValueError(f"VllmEngine: heads of {cfg.head_dim}, but on a CPU vLLM runs those of {CPU_HEADS}")
    length = max_len + 1  # vLLM always samples one token more, also of a sequence that is only to be scored
    args: dict[str, Any] = {
        "model": folder,
        "runner": "generate" if cfg.head == "lm" else "pooling",
        "skip_tokenizer_init": True,
        "dtype": cfg.dtype,
        "seed": 0,
        "max_model_len": length,
        "hf_overrides": {"max_position_embeddings": max(length, cfg.max_len)},
        "max_num_seqs": slots + SPARE,
        "max_num_batched_tokens": min(max(options.tokens_per_step, length), length * (slots + SPARE)),
        "tensor_parallel_size": options.tensor_parallel,
        # never "ray", which vLLM chooses by itself inside of a placement group
        "distributed_executor_backend": "uni" if device == "cuda" and options.tensor_parallel == 1 else "mp",
        "block_size": BLOCK[device],
        "enable_prefix_caching": cfg.head == "lm",
        "enforce_eager": device == "cpu" or not options.compile,
        "generation_config": "vllm",  # else a file beside the model changes how it samples
        "worker_extension_cls": "rl.engines.vllm_worker.Extension",
        "disable_log_stats": True,  # Tally sees them
        "enable_log_requests": False,
    }
    if cfg.head == "lm":
        args["async_scheduling"] = device == "cuda"
        args["scheduler_cls"] = f"rl.engines.vllm_scheduler.{'Async' * (device == 'cuda')}HoldingScheduler"
        args["logprobs_mode"] = "processed_logprobs"  # after temperature, top-k and top-p
        args["max_logprobs"] = -1
    if device == "cuda":
        return args | gpu_memory(cfg, options, total, slots)
    args["enable_chunked_prefill"] = False  # of a prompt cut in two vLLM rewinds its seed: not on a CPU
    args["gpu_memory_utilization"] = options.memory
    args["kv_cache_memory_bytes"] = options.cache_bytes or cache_bytes(cfg, slots, length)
    return args


def sampling(**params: Any) -> Any:
    """vLLM's SamplingParams: the whole answer at once, token ids only, ended by nothing but what is named."""
    from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
        RequestOutputKind,
        SamplingParams,
    )

    fixed = {"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(**fixed, **params, flat_logprobs=True)


def classifying() -> Any:
    """vLLM's PoolingParams for the number of a score head as it is, with no sigmoid after it."""
    from vllm.pooling_params import PoolingParams  # pyright: ignore[reportMissingImports]

    return PoolingParams(task="classify", use_activation=False)
