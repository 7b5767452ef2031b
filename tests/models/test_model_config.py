from dataclasses import replace

import pytest

from models.config import ModelConfig, from_hf, to_hf
from models.transformer import Transformer

BASE = ModelConfig(vocab_size=19, d_model=24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=4, d_ff=40)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = [
    replace(BASE, eos_ids=(1,), pad_id=0),
    replace(BASE, tie_embeddings=False, rope_scaling=LLAMA3, rope_theta=5e5, eos_ids=(1, 2), bos_id=3),
    replace(BASE, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    replace(BASE, family="qwen2", qkv_bias=True, dtype="bfloat16"),
    replace(BASE, family="qwen3", qk_norm=True, norm_eps=1e-5, max_len=99),
]


@pytest.mark.parametrize("cfg", CONFIGS)
def test_hugging_face_round_trip_is_the_identity(cfg):
    assert from_hf(to_hf(cfg)) == cfg


@pytest.mark.parametrize("cfg", CONFIGS)
def test_n_params_counts_the_module(cfg):
    assert cfg.n_params == sum(p.numel() for p in Transformer(cfg, device="meta").parameters())


def test_reads_the_published_llama_3_config():
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    cfg = from_hf(hf)
    assert cfg.n_params == 1_235_814_400
    assert cfg.eos_ids == (128001, 128008, 128009)
    assert (cfg.rope_theta, cfg.dtype) == (500000.0, "bfloat16")


def test_old_and_new_spelling_of_rope_are_the_same():
    hf = to_hf(CONFIGS[1])
    old = {k: v for k, v in hf.items() if k not in ("rope_parameters", "dtype")}
    scaling = {("type" if k == "rope_type" else k): v for k, v in hf["rope_scaling"].items()}
    old |= {"torch_dtype": "float32", "rope_scaling": scaling}
    new = {k: v for k, v in hf.items() if k not in ("rope_theta", "rope_scaling")}
    assert from_hf(old) == from_hf(new) == CONFIGS[1]


@pytest.mark.parametrize(
    "change, names",
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not implemented"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.25}, "rotary_factor=0.25"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"model_type": "mamba"}, "mamba"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 4}, "n_kv_heads=4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, names):
    with pytest.raises(ValueError, match=names):
        from_hf({**to_hf(CONFIGS[0]), **change})


def test_sizes_that_the_config_lacks_are_named():
    hf = to_hf(CONFIGS[0])
    del hf["hidden_size"], hf["vocab_size"]
    with pytest.raises(ValueError, match="has no vocab_size, hidden_size"):
        from_hf(hf)
