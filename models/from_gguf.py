"""A Llama that llama.cpp keeps in a GGUF file, as our config, Hugging Face's weights and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from einops import rearrange
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from models.chat import ChatTemplate
from models.config import ModelConfig
from models.gguf import Gguf, read_gguf
from models.tokenizer import Tokenizer
from models.weights import check_state, expected_shapes

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # kind of a special token


def from_gguf(path: str | Path) -> tuple[ModelConfig, dict[str, Tensor], Tokenizer]:
    """Config, weights and tokenizer; the weights rounded to bfloat16, far below what quantisation lost.

    Raises ValueError for another architecture or tokenizer than SmolLM's, and for a rescaled RoPE.
    """
    file = read_gguf(path)
    cfg = _config(file)
    state = {}
    for name in file.tensors:
        *block, module, leaf = name.split(".")  # blk.0.attn_q.weight
        prefix = f"model.layers.{block[1]}." if block else ""
        tensor = torch.from_numpy(file.tensor(name))
        if module in ("attn_q", "attn_k"):
            tensor = _unpermute(tensor, cfg.head_dim)
        state[f"{prefix}{NAMES.get(module, module)}.{leaf}"] = tensor.bfloat16()
    check_state(cfg, {name: tuple(t.shape) for name, t in state.items()}, where=f"from_gguf {path}")
    return cfg, {name: state[name] for name in expected_shapes(cfg)}, _tokenizer(file.fields)


def _unpermute(weight: Tensor, head_dim: int) -> Tensor:
    """llama.cpp turns channels (2i, 2i + 1) of a head by one angle, Hugging Face (i, i + H/2)."""
    return rearrange(weight, "(n h two) d -> (n two h) d", h=head_dim // 2, two=2)


def _config(file: Gguf) -> ModelConfig:
    if (kind := file.fields.get("general.architecture")) != "llama":
        raise ValueError(f"from_gguf: expected the architecture llama, got {kind!r}")

    def of(key: str) -> Any:
        return file.fields[f"llama.{key}"]

    head_dim = of("embedding_length") // of("attention.head_count")
    if "rope_freqs.weight" in file.tensors or file.fields.get("llama.rope.scaling.type", "none") != "none":
        raise ValueError("from_gguf: a rescaled RoPE is not supported")
    if (turned := of("rope.dimension_count")) != head_dim:
        raise ValueError(f"from_gguf: RoPE turns {turned} channels of a head, expected all {head_dim}")
    ids = {key: file.fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "padding")}
    return ModelConfig(
        vocab_size=len(file.fields["tokenizer.ggml.tokens"]),
        d_model=of("embedding_length"),
        n_layers=of("block_count"),
        n_heads=of("attention.head_count"),
        n_kv_heads=of("attention.head_count_kv"),
        head_dim=head_dim,
        d_ff=of("feed_forward_length"),
        rope_theta=of("rope.freq_base"),
        norm_eps=float(str(np.float32(of("attention.layer_norm_rms_epsilon")))),
        tie_embeddings="output.weight" not in file.tensors,
        max_len=of("context_length"),
        bos_id=ids["bos"],
        eos_ids=() if ids["eos"] is None else (ids["eos"],),
        pad_id=ids["padding"],
        dtype="bfloat16",
    )


def _tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE that takes every digit alone, as SmolLM was trained."""
    said = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if said != ("gpt2", "smollm"):
        raise ValueError(f"from_gguf: expected a tokenizer ('gpt2', 'smollm'), got {said}")
    tokens = fields["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {"eos": "eos", "bos": "bos", "pad": "padding", "unk": "unknown"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    spelled = {name: tokens[id] for name, id in ids.items() if id is not None}
    unk = {"unk_token": spelled.pop("unk")} if "unk" in spelled else {}
    source = fields.get("tokenizer.chat_template")
    return Tokenizer(backend, **spelled, template=None if source is None else ChatTemplate(source, unk))
