"""From a model folder to a running engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.config import ModelConfig
from models.tokenizer import Tokenizer, load_tokenizer
from models.weights import load_folder
from rl.engines.base import Engine
from rl.sync import probe_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A model as it travels to an actor: by value, so that other machines need not see the folder."""

    cfg: ModelConfig
    weights: Mapping[str, np.ndarray]
    tokenizer: Tokenizer
    folder: str


def load_bundle(folder: str | Path) -> Bundle:
    """Reads a Hugging Face folder. Raises FileNotFoundError or ValueError naming what is wrong with it."""
    cfg, state = load_folder(folder)
    weights = {name: tensor.float().numpy() for name, tensor in state.items()}
    return Bundle(cfg=cfg, weights=weights, tokenizer=load_tokenizer(folder), folder=str(folder))


def make_engine(bundle: Bundle, *, slots: int, version: int = 0) -> Engine:
    """The built-in engine over the bundle's model."""
    from rl.engines.torch import TorchEngine

    return TorchEngine(
        bundle.cfg,
        bundle.weights,
        version=version,
        max_slots=slots,
        probe_ids=probe_ids(bundle.cfg.vocab_size),
    )
