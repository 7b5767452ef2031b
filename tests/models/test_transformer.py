import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from models.attention import make_layout, packed_attention
from models.config import ModelConfig
from models.transformer import Transformer, rope_frequencies, rope_tables, rotate

BASE = ModelConfig(vocab_size=23, d_model=24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=4, d_ff=40)
CONFIGS = {
    "llama": BASE,
    "llama untied": replace(BASE, tie_embeddings=False),
    "llama all heads": replace(BASE, n_kv_heads=6),
    "qwen2 bias": replace(BASE, family="qwen2", qkv_bias=True),
    "qwen3 qk_norm": replace(BASE, family="qwen3", qk_norm=True),
}


def build(cfg: ModelConfig) -> Transformer:
    model = Transformer(cfg)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():  # so that no bias is 0 and no norm weight is 1
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model


def naive_logits(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    """One sequence, float64, loops over heads and positions, written from the equations."""
    cfg, w = model.cfg, {name: p.detach().double() for name, p in model.state_dict().items()}

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * weight

    def rope(x, pos):
        half = cfg.head_dim // 2
        z = torch.complex(x[:half], x[half:])
        turn = pos * cfg.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        z = z * torch.polar(torch.ones_like(turn), turn)
        return torch.cat((z.real, z.imag))

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(cfg.n_layers):

        def p(name, layer=layer):
            return w[f"model.layers.{layer}.{name}"]

        y = norm(x, p("input_layernorm.weight"))
        q, k, v = (y @ p(f"self_attn.{n}_proj.weight").T for n in "qkv")
        if cfg.qkv_bias:
            q, k, v = (x + p(f"self_attn.{n}_proj.bias") for n, x in zip("qkv", (q, k, v), strict=True))
        heads = []
        for n in range(cfg.n_heads):
            h, g = cfg.head_dim, n // (cfg.n_heads // cfg.n_kv_heads)
            qn, kn, vn = q[:, n * h : n * h + h], k[:, g * h : g * h + h], v[:, g * h : g * h + h]
            if cfg.qk_norm:
                qn, kn = norm(qn, p("self_attn.q_norm.weight")), norm(kn, p("self_attn.k_norm.weight"))
            qn = torch.stack([rope(row, t) for t, row in enumerate(qn)])
            kn = torch.stack([rope(row, t) for t, row in enumerate(kn)])
            rows = [
                torch.softmax(kn[: t + 1] @ qn[t] / math.sqrt(h), 0) @ vn[: t + 1] for t in range(len(ids))
            ]
            heads.append(torch.stack(rows))
        x = x + torch.cat(heads, -1) @ p("self_attn.o_proj.weight").T
        y = norm(x, p("post_attention_layernorm.weight"))
        gate = y @ p("mlp.gate_proj.weight").T
        x = x + (gate * torch.sigmoid(gate) * (y @ p("mlp.up_proj.weight").T)) @ p("mlp.down_proj.weight").T
    head = w["model.embed_tokens.weight" if cfg.tie_embeddings else "lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T


def packed_logits(model, ids, layout):
    hidden = model(ids, layout.positions, lambda layer, q, k, v: packed_attention(q, k, v, layout))
    return model.logits(hidden)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_padded_equals_one_by_one_equals_naive(name):
    model = build(CONFIGS[name])
    rows = [torch.randint(0, BASE.vocab_size, (n,)) for n in (5, 1, 9, 2)]
    layout = make_layout([len(r) for r in rows], total=24)
    packed = packed_logits(model, F.pad(torch.cat(rows), (0, 24 - 17)), layout).split([5, 1, 9, 2, 7])

    def causal(layer, q, k, v):  # [B, L, heads, H]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    padded = model.logits(model(padded, torch.arange(9).expand(4, 9), causal))
    for i, row in enumerate(rows):
        alone = packed_logits(model, row, make_layout([len(row)]))
        torch.testing.assert_close(packed[i], alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(padded[i, : len(row)], alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.double(), naive_logits(model, row), atol=1e-5, rtol=0)


def test_gradients_do_not_depend_on_packing():
    model = build(CONFIGS["qwen3 qk_norm"])
    rows = [torch.randint(0, BASE.vocab_size, (n,)) for n in (5, 3, 9)]

    def gradient(order, total):
        model.zero_grad()
        ids = torch.cat([rows[i] for i in order])
        layout = make_layout([len(rows[i]) for i in order], total=total)
        packed_logits(model, F.pad(ids, (0, total - 17)), layout)[:17].logsumexp(-1).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for a, b in zip(gradient([0, 1, 2], 17), gradient([2, 0, 1], 32), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_rotation_depends_on_the_distance_only():
    freq = rope_frequencies(BASE)
    q, k = torch.randn(2, 1, BASE.head_dim)

    def dot(i, j):
        tables = [rope_tables(torch.tensor(t), freq) for t in (i, j)]
        return (rotate(q, *tables[0]) * rotate(k, *tables[1])).sum()

    torch.testing.assert_close(dot(0, 3), dot(7, 10))
    torch.testing.assert_close(dot(0, 3), dot(40, 43))
    assert abs(dot(0, 3) - dot(0, 4)) > 1e-3


def test_rope_scaling_stretches_long_wavelengths_and_keeps_short_ones():
    plain = rope_frequencies(replace(BASE, head_dim=64))
    linear = rope_frequencies(replace(BASE, head_dim=64, rope_scaling={"rope_type": "linear", "factor": 4.0}))
    torch.testing.assert_close(linear, plain / 4)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    llama3 = rope_frequencies(replace(BASE, head_dim=64, rope_scaling=scaling))
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(llama3[wavelength < 512 / 4], plain[wavelength < 512 / 4])
    torch.testing.assert_close(llama3[wavelength > 512], plain[wavelength > 512] / 8)
    between = (wavelength > 512 / 4) & (wavelength < 512)
    assert between.any()
    assert ((llama3 < plain) & (llama3 > plain / 8))[between].all()


def test_head_is_the_embedding_only_when_tied():
    tied, untied = build(CONFIGS["llama"]), build(CONFIGS["llama untied"])
    assert tied.head is tied.model.embed_tokens.weight and "lm_head.weight" not in tied.state_dict()
    assert untied.lm_head is not None and untied.head is untied.lm_head.weight


def test_init_is_a_function_of_the_generator_alone():
    a, b = (Transformer(BASE) for _ in range(2))
    a.init_weights(torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    b.init_weights(torch.Generator().manual_seed(5))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in a.parameters())
