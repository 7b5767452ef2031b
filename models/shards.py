"""Which part of every weight one rank of a tensor-parallel engine holds, and under which fused names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import ModelConfig
from models.weights import expected_shapes

# Engines stack weights that read the same input: one matmul in the place of three or two.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PARTS = {part: whole for whole, parts in FUSED.items() for part in parts}


def _split(name: str) -> tuple[str, str, str]:
    """model.layers.0.self_attn.q_proj.weight -> (model.layers.0.self_attn., q_proj, .weight)"""
    *path, module, leaf = name.split(".")
    return "".join(f"{p}." for p in path), module, f".{leaf}"


def fuse(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names -> the engine's: q, k, v become rows of one qkv_proj, gate and up of one gate_up_proj."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        head, module, leaf = _split(name)
        whole = PARTS.get(module)
        if whole is None:
            out[name] = tensor
        elif module == FUSED[whole][0]:
            out[head + whole + leaf] = torch.cat([state[head + part + leaf] for part in FUSED[whole]])
    return out


def unfuse(fused: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The engine's names -> ours, as views: what is written to them is written to the engine's tensors.

    `shapes` are those of our tensors. Rows beyond (a vocabulary is padded) stay out. Raises ValueError where
    a tensor is missing or has another shape.
    """
    out: dict[str, Tensor] = {}
    used: dict[str, int] = {}  # rows of each fused tensor
    for name, shape in shapes.items():
        head, module, leaf = _split(name)
        whole = head + PARTS.get(module, module) + leaf
        if whole not in fused:
            raise ValueError(f"unfuse: the engine has no tensor {whole}, which should hold {name}")
        start = used.get(whole, 0)
        view = fused[whole][start : start + shape[0]]
        if tuple(view.shape) != tuple(shape):
            raise ValueError(f"unfuse: {name} is {tuple(view.shape)} of {whole}, expected {tuple(shape)}")
        used[whole] = start + shape[0]
        out[name] = view
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """start:stop along `axis` of a tensor of shape `whole`; `counted` by one of the ranks that hold it."""

    whole: tuple[int, ...]
    axis: int = 0
    start: int
    stop: int
    counted: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stop - self.start if i == self.axis else n for i, n in enumerate(self.whole))

    def of(self, tensor: Tensor) -> Tensor:
        """The view of the whole tensor that this rank holds."""
        return tensor.narrow(self.axis, self.start, self.stop - self.start)


VOCAB_PAD = 64  # the engine rounds a vocabulary up to a multiple of this before it is split


def pieces(cfg: ModelConfig, rank: int = 0, size: int = 1) -> dict[str, Piece]:
    """What rank `rank` of `size` holds of every parameter: heads and hidden channels are dealt out evenly,
    vocabulary rows after padding, and norms, score heads and, with fewer of them than ranks, key-value heads
    are held by several.

    Megatron's column and row parallel layers: "Megatron-LM", Shoeybi et al. 2019. Raises ValueError where
    heads or channels do not divide.
    """
    if cfg.n_heads % size or cfg.d_ff % size or max(cfg.n_kv_heads, size) % min(cfg.n_kv_heads, size):
        raise ValueError(
            f"pieces: {cfg.n_heads} heads, {cfg.n_kv_heads} key-value heads and d_ff={cfg.d_ff} "
            f"cannot be dealt to {size} ranks"
        )
    copies = max(1, size // cfg.n_kv_heads)  # ranks that hold the same key-value head
    rows = -(-cfg.vocab_size // VOCAB_PAD) * VOCAB_PAD // size
    out = {}
    for name, whole in expected_shapes(cfg).items():
        module = _split(name)[1]
        axis, place, places, counted = 0, rank, size, True
        if module in ("k_proj", "v_proj"):
            place, places, counted = rank // copies, size // copies, rank % copies == 0
        elif module in ("o_proj", "down_proj"):
            axis = 1
        elif module in ("embed_tokens", "lm_head"):
            start, stop = (min(rows * i, cfg.vocab_size) for i in (rank, rank + 1))
            out[name] = Piece(whole=whole, start=start, stop=stop)
            continue
        elif module not in PARTS:
            place, places, counted = 0, 1, rank == 0
        n = whole[axis] // places
        out[name] = Piece(whole=whole, axis=axis, start=place * n, stop=place * n + n, counted=counted)
    return out
