"""A Llama-shaped decoder: pure functions, and thin modules whose parameter names are Hugging Face's."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.config import ModelConfig

# attend(layer, q [..., N, H], k [..., K, H], v [..., K, H]) -> o [..., N, H]: the caller says who sees whom.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x²) + eps), the mean in float32.

    "Root Mean Square Layer Normalization", Zhang & Sennrich 2019.
    """
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope_frequencies(cfg: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Angular frequency per pair of channels [H/2], float32: theta^(-2i/H), stretched by `rope_scaling`."""
    exponent = torch.arange(0, cfg.head_dim, 2, device=device, dtype=torch.float32) / cfg.head_dim
    freq = cfg.rope_theta**-exponent
    scaling = cfg.rope_scaling
    if scaling is None:
        return freq
    if scaling["rope_type"] == "linear":
        return freq / scaling["factor"]
    # llama3: long wavelengths are stretched, short ones kept, with a linear ramp between the two.
    turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * freq + (1 - keep) * freq / scaling["factor"]


def rope_tables(positions: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, cos) and (-sin, sin) [..., 1, H] of position · frequency, float32; the 1 stands for the heads."""
    angle = positions[..., None, None].float() * freq
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + H/2) of x [..., N, H] by their angle. "RoFormer", Su et al. 2021."""
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. "GLU Variants Improve Transformer", Shazeer 2020."""
    return F.silu(gate) * up


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        q, kv = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
        self.q_proj = nn.Linear(cfg.d_model, q, bias=cfg.qkv_bias)
        self.k_proj = nn.Linear(cfg.d_model, kv, bias=cfg.qkv_bias)
        self.v_proj = nn.Linear(cfg.d_model, kv, bias=cfg.qkv_bias)
        self.o_proj = nn.Linear(q, cfg.d_model, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.head_dim = cfg.head_dim

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of x [..., D] queries [..., N, H] and keys [..., K, H], turned by their positions, and values."""
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (rearrange(part, "... (n h) -> ... n h", h=self.head_dim) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        o = attend(layer, *self.heads(x, cos, sin))
        return self.o_proj(rearrange(o, "... n h -> ... (n h)"))


class SwiGLU(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.d_model, cfg.d_ff, bias=False)
        self.up_proj = nn.Linear(cfg.d_model, cfg.d_ff, bias=False)
        self.down_proj = nn.Linear(cfg.d_ff, cfg.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x)): the unit that is compiled and sharded."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(cfg)
        self.mlp = SwiGLU(cfg)
        self.input_layernorm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.d_model, cfg.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything but the head: the `model.` of Hugging Face's names."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)


class ScoreHead(nn.Module):
    """Hidden states [..., D] to one number each [...], float32: Hugging Face's head of sequence classifiers.

    Row by row and no matmul, so that the bits of a number do not depend on how many there are.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, size))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.float() * self.weight[0].float()).sum(-1)


class Transformer(nn.Module):
    """Token ids to hidden states; `head` and `logits` take them to the vocabulary.

    With cfg.head "score" there is no vocabulary at the end: `score` takes hidden states [..., D] to numbers
    [...], and the number of a sequence is that of its last token.

    The state dict is a Hugging Face checkpoint. Parameters hold no values before `init_weights` or
    `load_state_dict`.
    """

    def __init__(
        self, cfg: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.cfg = cfg
        with torch.device("meta"):
            self.model = Trunk(cfg)
            own_head = cfg.head == "lm" and not cfg.tie_embeddings
            self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False) if own_head else None
            if cfg.head == "score":
                self.score = ScoreHead(cfg.d_model)
        self.to(dtype=dtype or getattr(torch, cfg.dtype))
        self.to_empty(device=device or "cpu")

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Matrices N(0, 1/fan_in), those that write to the residual stream smaller by sqrt(2 n_layers)."""
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.ndim == 1:
                p.fill_(1.0)
            else:
                std = p.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= (2 * self.cfg.n_layers) ** -0.5
                p.normal_(0.0, std, generator=generator)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [..., D] after the final norm, of ids [...] at positions [...], any leading shape."""
        x = self.model.embed_tokens(ids)
        cos, sin = rope_tables(positions, rope_frequencies(self.cfg, x.device))
        for layer, block in enumerate(self.model.layers):
            x = block(x, cos, sin, attend, layer)
        return self.model.norm(x)

    @property
    def head(self) -> Tensor:
        """The weight [V, D] from hidden states to logits; of a score head [1, D]."""
        if self.cfg.head == "score":
            return self.score.weight
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]"""
        return F.linear(hidden, self.head)
