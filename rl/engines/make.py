"""From a model folder to a running engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from models.config import ARCHITECTURE, ModelConfig
from models.tokenizer import Tokenizer, load_tokenizer
from models.weights import as_array, load_folder
from rl.engines.base import Engine
from rl.engines.classifier import Classifier, EngineClassifier, HFClassifier
from rl.engines.vllm_args import VllmOptions
from rl.sync import probe_ids

Kind = Literal["torch", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A model as it travels to an actor: by value (models.weights.as_array), so that other machines need not
    see the folder."""

    cfg: ModelConfig
    weights: Mapping[str, np.ndarray]
    tokenizer: Tokenizer
    folder: str


def load_bundle(folder: str | Path) -> Bundle:
    """Reads a Hugging Face folder. Raises FileNotFoundError or ValueError naming what is wrong with it."""
    cfg, state = load_folder(folder)
    weights = {name: as_array(tensor) for name, tensor in state.items()}
    return Bundle(cfg=cfg, weights=weights, tokenizer=load_tokenizer(folder), folder=str(folder))


def load_scalar(folder: str | Path) -> Bundle | str:
    """A scalar judge as it travels: the bundle, or of an architecture that models/ does not have the folder
    itself, which the judge's machine must see.

    Raises FileNotFoundError or ValueError naming what is wrong with it.
    """
    named = json.loads((Path(folder) / "config.json").read_text()).get("architectures") or [""]
    return load_bundle(folder) if named[0] in ARCHITECTURE.values() else str(folder)


def make_engine(
    bundle: Bundle,
    *,
    slots: int,
    version: int = 0,
    kind: Kind = "torch",
    options: VllmOptions | None = None,
    device: str = "cpu",
) -> Engine:
    """The built-in engine or vLLM, which takes `options`, over the bundle's model.

    Raises ValueError where that has no logits of tokens.
    """
    if bundle.cfg.head != "lm":
        raise ValueError(f"make_engine: {bundle.folder} is a scalar judge, expected a language model")
    return _engine(bundle, slots, version, kind, options, device)


def make_classifier(
    model: Bundle | str | Path,
    *,
    slots: int,
    chat: bool = False,
    kind: Kind = "torch",
    options: VllmOptions | None = None,
    device: str = "cpu",
) -> Classifier:
    """A scalar judge over a bundle or a folder. `slots`: rows at a time, where it is not ours that runs.

    Raises ValueError for a language model, and for `chat` where our tokenizer has no template.
    """
    model = model if isinstance(model, Bundle) else load_scalar(model)
    if isinstance(model, str):
        return HFClassifier(model, rows=slots, device=device)
    if model.cfg.head != "score":
        raise ValueError(
            f"make_classifier: {model.folder} is a language model, expected a scalar judge: a "
            f"folder of {ARCHITECTURE[model.cfg.family, 'score']} with one label"
        )
    if chat and model.tokenizer.template is None:
        raise ValueError(
            f"make_classifier: {model.folder} has no chat template: set scalar.chat to false, or put a "
            "chat_template.jinja into it"
        )
    slots = 1 if kind == "torch" else slots  # it samples nothing
    return EngineClassifier(_engine(model, slots, 0, kind, options, device), model.cfg, model.tokenizer)


def _engine(
    bundle: Bundle, slots: int, version: int, kind: Kind, options: VllmOptions | None, device: str
) -> Engine:  # fmt: skip
    if kind == "vllm":
        from rl.engines.vllm import VllmEngine

        return VllmEngine(
            bundle.cfg,
            bundle.weights,
            version=version,
            max_slots=slots,
            probe_ids=probe_ids(bundle.cfg.vocab_size),
            options=options,
        )
    from rl.engines.torch import TorchEngine

    return TorchEngine(
        bundle.cfg,
        bundle.weights,
        version=version,
        max_slots=slots,
        probe_ids=probe_ids(bundle.cfg.vocab_size),
        device=device,
    )
