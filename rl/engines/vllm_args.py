"""How vLLM is started and asked: every choice in one place, for its versions 0.25 to 0.32, CPU and CUDA."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from models.config import ModelConfig

BLOCK = {"cpu": 32, "cuda": 16}  # tokens per block of the cache; on a CPU 32 is the least that is fast
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of others vLLM dies at the first step
SPARE = 1  # slots beside those of the samples, for the probe


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """What the machine allows: of a GPU `memory`, the fraction that this engine may take of each of its
    `tensor_parallel` GPUs, beside which an update needs as much again as the weights; of a CPU `threads`.

    `cache_bytes` of keys and values are on a CPU by default what all slots can fill, on a GPU what is left.
    """

    tensor_parallel: int = 1
    memory: float = 0.9
    cache_bytes: int | None = None
    threads: int = 1
    compile: bool = True  # CUDA only: torch.compile and captured graphs, about a minute at start
    tokens_per_step: int = 8192  # of prompts: as many rows of logits, where their log-probs are asked for


def environment(device: str, options: VllmOptions) -> dict[str, str]:
    """Variables that vLLM reads instead of arguments; ones that are set already win."""
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
    return {name: value for name, value in env.items() if name not in os.environ}


def cache_bytes(cfg: ModelConfig, slots: int, max_len: int) -> int:
    """Of keys and values of all slots at their full length, and of the block that vLLM sets aside."""
    block = BLOCK["cpu"]
    itemsize = 4 if cfg.dtype == "float32" else 2
    blocks = (slots + SPARE) * -(-max_len // block) + 2
    return blocks * block * 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * itemsize


def engine_args(
    cfg: ModelConfig, folder: str, device: str, slots: int, max_len: int, options: VllmOptions
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. Raises ValueError for a model that vLLM cannot run there."""
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
        "gpu_memory_utilization": options.memory,
        "block_size": BLOCK[device],
        "enable_prefix_caching": cfg.head == "lm",
        "enforce_eager": device == "cpu" or not options.compile,
        "generation_config": "vllm",  # else a file beside the model changes how it samples
        "worker_extension_cls": "rl.engines.vllm_worker.Extension",
        "disable_log_stats": True,  # Tally sees them
        "enable_log_requests": False,
    }
    if cfg.head == "lm":
        args["logprobs_mode"] = "processed_logprobs"  # after temperature, top-k and top-p
        args["max_logprobs"] = -1
    if device == "cpu":
        args["kv_cache_memory_bytes"] = options.cache_bytes or cache_bytes(cfg, slots, length)
    elif options.cache_bytes is not None:
        args["kv_cache_memory_bytes"] = options.cache_bytes
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
