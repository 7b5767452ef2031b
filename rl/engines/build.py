"""From the config of an engine to the engine."""

from __future__ import annotations

from pathlib import Path

from rl.config.engine import Engine as EngineConfig
from rl.engines.base import Engine
from rl.engines.classifier import Classifier
from rl.engines.make import Bundle, make_classifier, make_engine
from rl.engines.vllm_args import WHOLE, VllmOptions


def options(cfg: EngineConfig, *, updates: bool) -> VllmOptions:
    return VllmOptions(
        device="cuda" if cfg.gpus else "cpu",
        tensor_parallel=cfg.tensor_parallel,
        memory=min(cfg.gpus or 1, WHOLE),
        updates=updates,
        cache_bytes=int(cfg.cache_gb * 1e9) or None,
        compile=cfg.compile,
    )


def device(cfg: EngineConfig) -> str:
    return "cuda" if cfg.gpus else "cpu"


def build(
    bundle: Bundle, cfg: EngineConfig, *, slots: int, version: int = 0, updates: bool = True
) -> Engine:  # fmt: skip
    """See `make_engine`. updates: it will get new weights, for which vLLM leaves memory beside its own."""
    return make_engine(
        bundle,
        slots=slots,
        version=version,
        kind=cfg.kind,
        options=options(cfg, updates=updates),
        device=device(cfg),
    )


def build_classifier(
    model: Bundle | str | Path, cfg: EngineConfig, *, slots: int, chat: bool
) -> Classifier:  # fmt: skip
    """See `make_classifier`. Its weights stay as they are."""
    return make_classifier(
        model,
        slots=slots,
        chat=chat,
        kind=cfg.kind,
        options=options(cfg, updates=False),
        device=device(cfg),
    )
