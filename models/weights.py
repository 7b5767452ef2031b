"""Weights to and from Hugging Face safetensors folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from models.config import ModelConfig, from_hf, to_hf
from models.tokenizer import Tokenizer
from models.transformer import Transformer

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
Weights = Mapping[str, Tensor | np.ndarray]
INDEX = "model.safetensors.index.json"
SHARD = 5 << 30  # bytes of one file
NAMED = 5  # faults in one message


def expected_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the model, in the order of its state dict."""
    return {name: tuple(p.shape) for name, p in Transformer(cfg, device="meta").state_dict().items()}


def clean_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain names and whole tensors. Sharded tensors are gathered, so every rank must call it."""
    out = {}
    for name, tensor in state.items():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        gather = getattr(tensor, "full_tensor", None)
        out[name] = (gather() if gather is not None else tensor).detach()
    return out


def check_state(cfg: ModelConfig, shapes: Mapping[str, tuple[int, ...]], *, where: str) -> None:
    """Raise ValueError that names what is missing, unexpected or of another shape than the config says."""
    expected = expected_shapes(cfg)
    problems = [f"missing {name} {expected[name]}" for name in expected.keys() - shapes.keys()]
    problems += [f"unexpected {name} {shapes[name]}" for name in shapes.keys() - expected.keys()]
    problems += [
        f"{name} is {shapes[name]}, expected {expected[name]}"
        for name in expected.keys() & shapes.keys()
        if shapes[name] != expected[name]
    ]
    if problems:
        rest = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        named = "; ".join(sorted(problems)[:NAMED])
        raise ValueError(f"{where}: weights do not fit the config: {named}{rest}")


def save_folder(
    path: str | Path,
    model: nn.Module | Mapping[str, Tensor],
    cfg: ModelConfig,
    tokenizer: Tokenizer | None = None,
    *,
    shard_bytes: int = SHARD,
) -> None:
    """Write config.json, weights and the tokenizer's files, as transformers and vLLM open them.

    The weights become model.safetensors, or above `shard_bytes` several files and their index. What the
    folder held of weights goes.
    """
    state = clean_state(model.state_dict() if isinstance(model, nn.Module) else model)
    if cfg.tie_embeddings:
        state.pop("lm_head.weight", None)
    check_state(cfg, {name: tuple(t.shape) for name, t in state.items()}, where="save_folder")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    for old in path.glob("model*.safetensors*"):  # not written over: somebody may have it mapped
        old.unlink()
    (path / "config.json").write_text(json.dumps(to_hf(cfg), indent=2))
    shards = _shards(state, shard_bytes)
    where = {}
    for i, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        where |= dict.fromkeys(shard, file)
        whole = {name: t.cpu().contiguous() for name, t in shard.items()}
        save_file(whole, path / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": where}
        (path / INDEX).write_text(json.dumps(index, indent=2))
    if tokenizer is not None:
        tokenizer.save(path)


def _shards(state: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """The tensors in their order, as many to a shard as fit."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        size += tensor.nbytes
        if size > limit and shards[-1]:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    return shards


def load_config(path: str | Path) -> ModelConfig:
    """The folder's config.json; what ends a text is what generation_config.json says, if it does.

    Raises FileNotFoundError without the former, ValueError where `from_hf` does.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"load_config: {path} is no model folder: it has no config.json")
    cfg = from_hf(json.loads((path / "config.json").read_text(encoding="utf-8")))
    generation = path / "generation_config.json"
    said = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    eos = said.get("eos_token_id")
    return cfg if eos is None else replace(cfg, eos_ids=(eos,) if isinstance(eos, int) else tuple(eos))


def weight_files(path: str | Path) -> list[Path]:
    """The folder's safetensors files: those that its index names, or the one without an index.

    Raises FileNotFoundError naming the first that is not there.
    """
    path = Path(path)
    index = path / INDEX
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(names):
        if not (path / name).is_file():
            raise FileNotFoundError(f"weight_files: {path} has no {name}; only safetensors files are read")
    return [path / name for name in sorted(names)]


def load_folder(path: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read config and weights of one safetensors file or of shards with their index; dtypes as stored.

    Raises FileNotFoundError without such files, ValueError where names or shapes do not fit the config and
    where a file is damaged.
    """
    path = Path(path)
    cfg = load_config(path)
    state: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as shard:
                state.update({name: shard.get_tensor(name) for name in shard.keys()})
        except SafetensorError as error:
            raise ValueError(f"load_folder: {file} is damaged: {error}") from None
    state = {name: t for name, t in state.items() if not name.endswith("rotary_emb.inv_freq")}
    head = state.get("lm_head.weight")
    if cfg.tie_embeddings and head is not None:
        if not torch.equal(head, state["model.embed_tokens.weight"]):
            raise ValueError(f"load_folder: {path} ties the head, but lm_head.weight differs")
        del state["lm_head.weight"]
    check_state(cfg, {name: tuple(t.shape) for name, t in state.items()}, where=f"load_folder {path}")
    return cfg, {name: state[name] for name in expected_shapes(cfg)}


def as_array(x: Tensor) -> np.ndarray:
    """An array over the tensor's memory, on the CPU. numpy has no bfloat16: its bits go as uint16."""
    x = x.detach().cpu()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def as_tensor(x: Tensor | np.ndarray) -> Tensor:
    """A tensor over the array's memory; read-only arrays are copied, as a tensor could write to them. The
    inverse of `as_array`: uint16 is bfloat16."""
    if isinstance(x, Tensor):
        return x
    tensor = torch.from_numpy(x if x.flags.writeable else x.copy())
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
