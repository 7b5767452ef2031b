"""Sizes of a Llama-shaped network in one frozen dataclass, to and from Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Family = Literal["llama", "qwen2", "qwen3"]
Head = Literal["lm", "score"]
ARCHITECTURE: Mapping[tuple[Family, Head], str] = {
    ("llama", "lm"): "LlamaForCausalLM",
    ("qwen2", "lm"): "Qwen2ForCausalLM",
    ("qwen3", "lm"): "Qwen3ForCausalLM",
    ("llama", "score"): "LlamaForSequenceClassification",
    ("qwen2", "score"): "Qwen2ForSequenceClassification",
    ("qwen3", "score"): "Qwen3ForSequenceClassification",
}
ROPE_KEYS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
# Options of Hugging Face that change the maths, and the one value that is implemented.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One network of the family: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    family: Family = "llama"
    head: Head = "lm"  # score: one number from a hidden state, and no logits of tokens
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
        if self.head not in get_args(Head):
            raise ValueError(f"ModelConfig: head must be one of {get_args(Head)}, got {self.head!r}")
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
                raise ValueError(
                    f"ModelConfig: rope_scaling {kind!r} is not implemented, only {sorted(ROPE_KEYS)}; "
                    "a config without it keeps the positions of the training"
                )
            if missing := ROPE_KEYS[kind] - self.rope_scaling.keys():
                raise ValueError(f"ModelConfig: rope_scaling {kind!r} needs {sorted(missing)}")

    @property
    def n_params(self) -> int:
        d, h = self.d_model, self.head_dim
        q, kv = self.n_heads * h, self.n_kv_heads * h
        attention = 2 * d * q + 2 * d * kv + (q + 2 * kv) * self.qkv_bias + 2 * h * self.qk_norm
        block = attention + 3 * d * self.d_ff + 2 * d
        head = d if self.head == "score" else 0 if self.tie_embeddings else self.vocab_size * d
        return self.vocab_size * d + self.n_layers * block + d + head


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the mapping in a config.json of one of the architectures above; with none named it is a causal LM.

    Raises ValueError for another architecture, for a classifier with other than one label, and for options
    that change the maths and are not implemented.
    """
    head = _head(hf)
    family: Family = hf["model_type"]
    if missing := [key for key in NEEDED if key not in hf]:
        raise ValueError(f"from_hf: the config has no {', '.join(missing)}")
    for key, only in FIXED.items():
        if hf.get(key, only) != only:
            raise ValueError(f"from_hf: {key}={hf[key]!r} is not supported, only {only!r}")
    if quantised := hf.get("quantization_config"):
        method = quantised.get("quant_method")
        raise ValueError(f"from_hf: the weights are quantised ({method}): use the model's unquantised folder")
    # transformers 5 keeps theta and scaling in one mapping
    scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    theta = scaling.pop("rope_theta", None) or hf.get("rope_theta", 10_000.0)
    turned = scaling.pop("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if turned not in (None, 1.0):
        raise ValueError(f"from_hf: partial_rotary_factor={turned!r} is not supported, only 1.0")
    n_heads = hf["num_attention_heads"]
    eos = hf.get("eos_token_id")
    return ModelConfig(
        family=family,
        head=head,
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


def _head(hf: Mapping[str, Any]) -> Head:
    family: Any = hf.get("model_type")
    if family not in get_args(Family):
        raise ValueError(f"from_hf: model_type must be one of {get_args(Family)}, got {family!r}")
    head_of = {ARCHITECTURE[family, head]: head for head in get_args(Head)}
    (named, *_) = hf.get("architectures") or [ARCHITECTURE[family, "lm"]]
    if named not in head_of:
        raise ValueError(f"from_hf: architecture must be one of {sorted(head_of)}, got {named!r}")
    head = head_of[named]
    n_labels = len(hf.get("id2label") or ()) or hf.get("num_labels", 2)  # transformers leaves out its default
    if head == "score" and n_labels != 1:
        raise ValueError(f"from_hf: {named} must have one label, whose logit is the score; got {n_labels}")
    return head


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The config.json that transformers and vLLM open; `from_hf(to_hf(cfg)) == cfg`."""
    scaling = dict(cfg.rope_scaling) if cfg.rope_scaling else None
    eos = cfg.eos_ids[0] if len(cfg.eos_ids) == 1 else list(cfg.eos_ids) or None
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if cfg.head == "score" else {}
    return {
        "architectures": [ARCHITECTURE[cfg.family, cfg.head]],
        "model_type": cfg.family,
        **labels,
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
