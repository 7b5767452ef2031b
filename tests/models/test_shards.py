from dataclasses import replace

import pytest
import torch

from models.checksum import add_checksums, checksums, piece_checksums
from models.config import ModelConfig
from models.shards import FUSED, fuse, pieces, unfuse
from models.transformer import Transformer
from models.weights import expected_shapes

LLAMA = ModelConfig(vocab_size=70, d_model=16, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=4, d_ff=24)
FAMILIES = [
    LLAMA,
    replace(LLAMA, family="qwen2", qkv_bias=True, tie_embeddings=False),
    replace(LLAMA, family="qwen3", qk_norm=True, dtype="bfloat16"),
    replace(LLAMA, head="score", n_kv_heads=8),
]


def build(cfg: ModelConfig) -> dict[str, torch.Tensor]:
    model = Transformer(cfg)
    generator = torch.Generator().manual_seed(0)
    return {name: p.normal_(generator=generator) for name, p in model.state_dict().items()}


@pytest.mark.parametrize("cfg", FAMILIES)
def test_unfuse_undoes_fuse(cfg):
    state = build(cfg)
    fused = fuse(state)
    parts = {part for parts in FUSED.values() for part in parts}
    assert not any(name.split(".")[-2] in parts for name in fused)
    assert sum(t.numel() for t in fused.values()) == sum(t.numel() for t in state.values())
    back = unfuse(fused, expected_shapes(cfg))
    assert list(back) == list(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_what_is_written_to_an_unfused_tensor_is_written_to_the_engine_s():
    fused = fuse(build(LLAMA))
    unfuse(fused, expected_shapes(LLAMA))["model.layers.1.self_attn.v_proj.weight"].fill_(7.0)
    whole = fused["model.layers.1.self_attn.qkv_proj.weight"]
    assert (whole[-8:] == 7).all() and not (whole[:-8] == 7).any()


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda f: f.pop("model.norm.weight"), "no tensor model.norm.weight"),
        (lambda f: f.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight"),
        (lambda f: f.update({"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(40, 16)}), "up_proj"),
    ],
)
def test_an_engine_with_other_tensors_is_refused(change, says):
    fused = fuse(build(LLAMA))
    change(fused)
    with pytest.raises(ValueError, match=says):
        unfuse(fused, expected_shapes(LLAMA))


@pytest.mark.parametrize("cfg", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_pieces_of_all_ranks_cover_every_tensor_and_their_checksums_add_up(cfg, size):
    state = build(cfg)
    seen = {name: torch.zeros(t.shape, dtype=torch.int64) for name, t in state.items()}
    shares = []
    for rank in range(size):
        held = pieces(cfg, rank, size)
        for name, piece in held.items():
            assert tuple(piece.of(state[name]).shape) == piece.shape
            piece.of(seen[name]).add_(int(piece.counted))
        shares.append(piece_checksums({n: piece.of(state[n]) for n, piece in held.items()}, held))
    assert all((count == 1).all() for count in seen.values())
    assert add_checksums(shares) == checksums(state)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_s_attention_heads_belong_together(size):
    """Each rank has whole heads of q, and the key-value heads that those read."""
    for rank in range(size):
        held = pieces(LLAMA, rank, size)
        q, kv = (held[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
        heads = range(q.start // 4, q.stop // 4)
        read = {head // (LLAMA.n_heads // LLAMA.n_kv_heads) for head in heads}
        assert read == set(range(kv.start // 4, kv.stop // 4))
        assert held["model.layers.0.self_attn.o_proj.weight"].start == q.start


def test_a_padded_vocabulary_is_dealt_out_as_the_engine_does():
    """70 words are 128 rows: 64 of each of two ranks, and the last four are 32 of which two hold words."""
    rows = {
        size: [
            (p.start, p.stop)
            for p in (pieces(LLAMA, r, size)["model.embed_tokens.weight"] for r in range(size))
        ]
        for size in (1, 2, 4)
    }
    assert rows == {1: [(0, 70)], 2: [(0, 64), (64, 70)], 4: [(0, 32), (32, 64), (64, 70), (70, 70)]}


@pytest.mark.parametrize("size", [3, 16])
def test_heads_that_cannot_be_dealt_out_are_refused(size):
    with pytest.raises(ValueError, match="cannot be dealt"):
        pieces(LLAMA, 0, size)
