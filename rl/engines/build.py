"""From the config of an engine to the engine."""

from __future__ import annotations

from pathlib import Path

from rl.config.engine import Engine as EngineConfig
from rl.engines.base import Engine
from rl.engines.classifier import Classifier
from rl.engines.make import Bundle, make_classifier, make_engine
from rl.engines.vllm_args import VllmOptions

VLLM_WHOLE = 0.9  # of a GPU that nobody shares: the rest is for what vLLM does not count


def options(cfg: EngineConfig) -> VllmOptions:
    return VllmOptions(
        tensor_parallel=cfg.tensor_parallel,
        memory=cfg.gpus if 0 < cfg.gpus < 1 else VLLM_WHOLE,
        cache_bytes=int(cfg.cache_gb * 1e9) or None,
        compile=cfg.compile,
    )


def device(cfg: EngineConfig) -> str:
    return "cuda" if cfg.gpus else "cpu"


def build(bundle: Bundle, cfg: EngineConfig, *, slots: int, version: int = 0) -> Engine:
    """See `make_engine`."""
    return make_engine(
        bundle, slots=slots, version=version, kind=cfg.kind, options=options(cfg), device=device(cfg)
    )


def build_classifier(
    model: Bundle | str | Path, cfg: EngineConfig, *, slots: int, chat: bool
) -> Classifier:  # fmt: skip
    """See `make_classifier`."""
    return make_classifier(
        model, slots=slots, chat=chat, kind=cfg.kind, options=options(cfg), device=device(cfg)
    )
