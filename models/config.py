"""Sizes of a Llama-shaped network in one frozen dataclass, to and from Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Family = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_KEYS = {"linear": {"factor"},
             "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}}
# Options of Hugging Face that change the maths, and the one value that is implemented.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One network of the family: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    family: Family = "llama"
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None  # {"rope_type": "linear" | "llama3", "factor": ..., ...}
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    max_len: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.family not in get_args(Family):
            raise ValueError(f"ModelConfig: family must be one of {get_args(Family)}, got {self.family!r}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"ModelConfig: n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}")
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig: head_dim must be even for rotary positions, got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ValueError(f"ModelConfig: dtype must be one of {DTYPES}, got {self.dtype!r}")
        if self.qk_norm != (self.family == "qwen3"):
            raise ValueError(f"ModelConfig: qk_norm={self.qk_norm} but {self.family}: only qwen3 has it")
        if self.qkv_bias != (self.family == "qwen2"):
            raise ValueError(f"ModelConfig: qkv_bias={self.qkv_bias} but {self.family}: only qwen2 has it")
        if self.rope_scaling is not None:
            kind = self.rope_scaling.get("rope_type")
            if kind not in ROPE_KEYS:
                raise ValueError(f"ModelConfig: rope_scaling knows {sorted(ROPE_KEYS)}, got {kind!r}")
            if missing := ROPE_KEYS[kind] - self.rope_scaling.keys():
                raise ValueError(f"ModelConfig: rope_scaling {kind!r} needs {sorted(missing)}")

    @property
    def n_params(self) -> int:
        d, h = self.d_model, self.head_dim
        q, kv = self.n_heads * h, self.n_kv_heads * h
        attention = 2 * d * q + 2 * d * kv + (q + 2 * kv) * self.qkv_bias + 2 * h * self.qk_norm
        block = attention + 3 * d * self.d_ff + 2 * d
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * block + d


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the mapping in a config.json of LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM.

    Raises ValueError for another architecture and for options that change the maths and are not implemented.
    """
    family = hf.get("model_type")
    if family not in ARCHITECTURE:
        raise ValueError(f"from_hf: model_type must be one of {sorted(ARCHITECTURE)}, got {family!r}")
    for key, only in FIXED.items():
        if hf.get(key, only) != only:
            raise ValueError(f"from_hf: {key}={hf[key]!r} is not supported, only {only!r}")
    # transformers 5 keeps theta and scaling in one mapping
    scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    theta = scaling.pop("rope_theta", None) or hf.get("rope_theta", 10_000.0)
    n_heads = hf["num_attention_heads"]
    eos = hf.get("eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=hf["vocab_size"],
        d_model=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=hf.get("num_key_value_heads") or n_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // n_heads,
        d_ff=hf["intermediate_size"],
        rope_theta=float(theta),
        rope_scaling=None if scaling.get("rope_type", "default") == "default" else scaling,
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        tie_embeddings=hf.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_len=hf.get("max_position_embeddings", 2048),
        bos_id=hf.get("bos_token_id"),
        eos_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        pad_id=hf.get("pad_token_id"),
        dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
    )


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The config.json that transformers and vLLM open; `from_hf(to_hf(cfg)) == cfg`."""
    scaling = dict(cfg.rope_scaling) if cfg.rope_scaling else None
    eos = cfg.eos_ids[0] if len(cfg.eos_ids) == 1 else list(cfg.eos_ids) or None
    return {
        "architectures": [ARCHITECTURE[cfg.family]],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_len,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,  # transformers 4; version 5 reads rope_parameters
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": cfg.rope_theta},
        "tie_word_embeddings": cfg.tie_embeddings,
        **FIXED,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": cfg.bos_id,
        "eos_token_id": eos,
        "pad_token_id": cfg.pad_id,
        "dtype": cfg.dtype,
    }
