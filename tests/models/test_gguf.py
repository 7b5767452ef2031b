"""GGUF files, written here by hand, as models."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.config import ModelConfig
from models.from_gguf import from_gguf
from models.gguf import read_gguf
from models.transformer import Transformer

U8, I8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 4, 5, 6, 7, 8, 9, 10
CFG = ModelConfig(
    vocab_size=267, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96, max_len=128,
    rope_theta=1e5, norm_eps=1e-5, bos_id=1, eos_ids=(2,), pad_id=2, dtype="bfloat16",
)  # fmt: skip
RNG = np.random.default_rng(0)


def text(s: str) -> bytes:
    return struct.pack("<Q", len(s.encode())) + s.encode()


def value(x) -> bytes:
    """Its kind, and itself."""
    if isinstance(x, list):
        items = [value(item) for item in x]
        return (
            struct.pack("<I", ARRAY)
            + items[0][:4]
            + struct.pack("<Q", len(x))
            + b"".join(i[4:] for i in items)
        )
    if isinstance(x, str):
        return struct.pack("<I", STRING) + text(x)
    kind, form = {bool: (BOOL, "?"), int: (U32, "I"), float: (F32, "f")}[type(x)]
    return struct.pack(f"<I{form}", kind, x)


def write(path, fields, tensors, version=3, align=32):
    """tensors: name → (kind, shape with rows first, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    out += b"".join(text(name) + value(x) for name, x in fields.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % align)
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += raw
    path.write_bytes(out + bytes(-len(out) % align) + data)
    return path


def half(x: float) -> bytes:
    return struct.pack("<e", x)


def nibbles(q: list[int]) -> bytes:
    return bytes(q[i] | q[i + 16] << 4 for i in range(16))


def as_f32(t: torch.Tensor):
    return 0, tuple(t.shape), t.float().numpy().tobytes()


@pytest.mark.parametrize("align", [32, 64])
def test_every_quantisation_gives_the_numbers_of_its_formula(tmp_path, align):
    d, m = [0.5, -0.25], [1.5, -3.0]
    q4, q8 = RNG.integers(0, 16, (2, 32)).tolist(), RNG.integers(-128, 128, (2, 32)).tolist()
    plain = RNG.normal(size=(3, 4)).astype("f4")
    path = write(
        tmp_path / "m.gguf",
        {"general.alignment": align},
        {
            "f32": (0, (3, 4), plain.tobytes()),
            "f16": (1, (3, 4), plain.astype("f2").tobytes()),
            "q4_0": (2, (1, 64), b"".join(half(d[b]) + nibbles(q4[b]) for b in (0, 1))),
            "q4_1": (3, (2, 32), b"".join(half(d[b]) + half(m[b]) + nibbles(q4[b]) for b in (0, 1))),
            "q8_0": (8, (64,), b"".join(half(d[b]) + struct.pack("32b", *q8[b]) for b in (0, 1))),
        },
        align=align,
    )
    file = read_gguf(path)
    expected = {
        "f32": plain,
        "f16": plain.astype("f2"),
        "q4_0": [[d[b] * (q - 8) for b in (0, 1) for q in q4[b]]],
        "q4_1": [[d[b] * q + m[b] for q in q4[b]] for b in (0, 1)],
        "q8_0": [d[b] * q for b in (0, 1) for q in q8[b]],
    }
    for name, numbers in expected.items():
        found = file.tensor(name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, np.array(numbers, dtype="f4"))


def test_fields_of_every_kind_come_back(tmp_path):
    fields = {
        "a": "é",
        "b": 7,
        "c": 0.5,
        "d": True,
        "e": ["x", "", "人"],
        "f": [1, 2],
        "g": [[1, 2], [3]],
        "h": [True],
    }
    assert read_gguf(write(tmp_path / "m.gguf", fields, {})).fields == fields


@pytest.mark.parametrize("cut", [3, 20, 60, -1])
def test_a_file_cut_off_is_refused(tmp_path, cut):
    path = write(tmp_path / "m.gguf", {"a": "b"}, {"t": as_f32(torch.ones(2, 32))})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="ends too early|ends before its tensor t"):
        read_gguf(path)


def test_other_files_versions_and_quantisations_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4" + bytes(30))
    with pytest.raises(ValueError, match="no GGUF file"):
        read_gguf(path)
    with pytest.raises(ValueError, match="no GGUF file of version 2 or 3"):
        read_gguf(write(path, {}, {}, version=1))
    with pytest.raises(ValueError, match="w of .* quantisation of number 14"):
        read_gguf(write(path, {}, {"w": (14, (1, 256), bytes(210))}))


# ── A network and its tokenizer ───────────────────────────────────────────────────────────────────


def build(cfg: ModelConfig) -> dict[str, torch.Tensor]:
    model = Transformer(cfg, dtype=torch.bfloat16).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    return {name: p.normal_(generator=generator) for name, p in model.state_dict().items()}


def their_name(name: str) -> str:
    for ours, theirs in {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "model.layers.": "blk.", "self_attn.o_proj": "attn_output", "self_attn.": "attn_", "mlp.": "ffn_",
        "_proj": "", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }.items():  # fmt: skip
        name = name.replace(ours, theirs)
    return name


def neighbours(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows i and i + H/2 of each head become rows 2i and 2i + 1."""
    heads = weight.split(head_dim)
    order = [i + half for i in range(head_dim // 2) for half in (0, head_dim // 2)]
    return torch.cat([head[order] for head in heads])


def tokenizer_fields() -> dict:
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unseen = iter(range(256, 512))
    symbols = [chr(b if b in visible else next(unseen)) for b in range(256)]
    tokens = [
        "<|end|>",
        "<|im_start|>",
        "<|im_end|>",
        *symbols,
        "ĠĠ",
        "Ġa",
        "an",
        "Ġan",
        "12",
        "Ġ1",
        "</think>",
        "é",
    ]
    control = [3] * 3 + [1] * (len(tokens) - 3)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": control,
        "tokenizer.ggml.merges": ["Ġ Ġ", "Ġ a", "a n", "Ġa n", "1 2", "Ġ 1"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>"
        "{{ unk_token }}{% endfor %}",
    }


def llama_file(path, cfg=CFG, **changes):
    fields = {
        "general.architecture": "llama",
        "llama.block_count": cfg.n_layers,
        "llama.context_length": cfg.max_len,
        "llama.embedding_length": cfg.d_model,
        "llama.feed_forward_length": cfg.d_ff,
        "llama.attention.head_count": cfg.n_heads,
        "llama.attention.head_count_kv": cfg.n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": cfg.norm_eps,
        "llama.rope.freq_base": cfg.rope_theta,
        "llama.rope.dimension_count": cfg.head_dim,
        **tokenizer_fields(),
        **changes,
    }
    tensors = {}
    for name, p in build(cfg).items():
        turned = ("q_proj", "k_proj")
        p = neighbours(p, cfg.head_dim) if any(part in name for part in turned) else p
        tensors[their_name(name)] = as_f32(p)
    return write(path, fields, tensors)


@pytest.mark.parametrize("cfg", [CFG, replace(CFG, tie_embeddings=False)], ids=["tied", "untied"])
def test_config_and_weights_of_a_llama_come_back(tmp_path, cfg):
    found, state, _ = from_gguf(llama_file(tmp_path / "m.gguf", cfg))
    assert found == cfg
    expected = build(cfg)
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_the_tokenizer_takes_digits_alone_and_keeps_special_tokens_and_template(tmp_path):
    _, _, tokenizer = from_gguf(llama_file(tmp_path / "m.gguf"))
    tokens = tokenizer_fields()["tokenizer.ggml.tokens"]

    def spelled(ids):
        return [tokens[i] for i in ids]

    assert spelled(tokenizer.encode("an an12  1")) == ["an", "Ġan", "1", "2", "ĠĠ", "1"]
    assert spelled(tokenizer.chat([{"role": "user", "content": "an"}])) == [
        "<|im_start|>",
        "an",
        "<|im_end|>",
        "<|end|>",
    ]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2,), 2)
    assert tokenizer.first_ids == ()
    for text in ("é 人 \t\n x12", "<|im_end|>", " "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"tokenizer.ggml.model": "llama"}, r"\('llama', 'smollm'\)"),
        ({"tokenizer.ggml.pre": "qwen2"}, "qwen2"),
        ({"llama.rope.scaling.type": "yarn"}, "rescaled RoPE"),
        ({"llama.rope.dimension_count": 8}, "turns 8 channels of a head, expected all 16"),
        ({"llama.block_count": 3}, "missing model.layers.2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, changes, names):
    with pytest.raises(ValueError, match=names):
        from_gguf(llama_file(tmp_path / "m.gguf", **changes))
