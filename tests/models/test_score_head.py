"""Sequence classifiers: their folders load into our Transformer, and its scores are transformers' logits."""

import json
from dataclasses import replace

import pytest
import torch

from models.attention import make_layout, packed_attention
from models.config import ModelConfig, from_hf, to_hf
from models.transformer import Transformer
from models.weights import load_folder, save_folder

LLAMA = ModelConfig(
    head="score", vocab_size=19, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=40,
    max_len=64, pad_id=0,
)  # fmt: skip
CONFIGS = {
    "llama": replace(LLAMA, tie_embeddings=False),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=8),
}


def build(cfg: ModelConfig, seed: int = 0) -> Transformer:
    model = Transformer(cfg).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    for p in model.parameters():  # so that no bias is 0 and no norm weight is 1
        p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model


def hidden_states(model: Transformer, ids: list[int]) -> torch.Tensor:
    layout = make_layout([len(ids)])
    return model(torch.tensor(ids), layout.positions, lambda _, q, k, v: packed_attention(q, k, v, layout))


def some_ids(n: int, seed: int) -> list[int]:
    return torch.randint(1, 19, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_config_and_folder_round_trip(cfg, tmp_path):
    model = build(cfg)
    assert from_hf(to_hf(cfg)) == cfg
    assert cfg.n_params == sum(p.numel() for p in model.parameters())
    save_folder(tmp_path, model, cfg)
    loaded, state = load_folder(tmp_path)
    assert loaded == cfg
    assert state["score.weight"].shape == (1, 24) and not any("lm_head" in name for name in state)
    assert all(torch.equal(state[name], p) for name, p in model.state_dict().items())


def test_the_score_is_the_heads_product_with_each_hidden_state():
    model = build(LLAMA)
    hidden = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))
    scores = model.score(hidden)
    assert scores.shape == (3, 5)
    torch.testing.assert_close(scores, hidden @ model.state_dict()["score.weight"][0])
    torch.testing.assert_close(model.logits(hidden)[..., 0], scores)


def test_scores_of_a_half_precision_model_are_float32():
    model = Transformer(LLAMA, dtype=torch.bfloat16).requires_grad_(False)
    model.load_state_dict(build(LLAMA).state_dict())
    hidden = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = hidden.double() @ model.state_dict()["score.weight"][0].double()
    torch.testing.assert_close(model.score(hidden).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "got 2"),
        ({"id2label": None}, "got 2"),  # what transformers leaves out is its default
        ({"id2label": None, "num_labels": 5}, "got 5"),
    ],
)
def test_more_than_one_label_is_refused_with_their_number(change, got):
    with pytest.raises(ValueError, match=f"one label.*{got}"):
        from_hf(to_hf(LLAMA) | change)


def test_one_label_may_be_given_as_a_number():
    hf = {key: value for key, value in to_hf(LLAMA).items() if "label" not in key}
    assert from_hf(hf | {"num_labels": 1}) == LLAMA


def test_another_architecture_of_the_family_is_refused_and_none_is_a_language_model():
    with pytest.raises(ValueError, match="LlamaForTokenClassification"):
        from_hf(to_hf(LLAMA) | {"architectures": ["LlamaForTokenClassification"]})
    assert from_hf(to_hf(LLAMA) | {"architectures": None}).head == "lm"


def test_a_head_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="head must be one of"):
        replace(LLAMA, head="value")


def test_a_folder_without_its_score_head_is_refused(tmp_path):
    lm = replace(LLAMA, head="lm")
    save_folder(tmp_path, build(lm), lm)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(LLAMA)))
    with pytest.raises(ValueError, match="missing score.weight"):
        load_folder(tmp_path)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_our_folder_gives_the_same_logits_in_transformers(cfg, tmp_path):
    hf = pytest.importorskip("transformers")
    model = build(cfg)
    save_folder(tmp_path, model, cfg)
    theirs = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert theirs.config.num_labels == 1
    for n in (1, 7, 30):
        ids = some_ids(n, n)
        with torch.no_grad():
            expected = theirs(input_ids=torch.tensor([ids])).logits[0, 0]
        ours = model.score(hidden_states(model, ids))[-1]
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_folder_of_transformers_gives_the_same_logits_here(family, tmp_path):
    hf = pytest.importorskip("transformers")
    config = getattr(hf, f"{family}Config")(
        vocab_size=19,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
        rope_theta=5e4,
        num_labels=1,
    )
    torch.manual_seed(0)
    theirs = getattr(hf, f"{family}ForSequenceClassification")(config).eval()
    theirs.save_pretrained(tmp_path)
    cfg, state = load_folder(tmp_path)
    model = Transformer(cfg).requires_grad_(False)
    model.load_state_dict(state)
    for n in (1, 7, 30):
        ids = some_ids(n, n)
        with torch.no_grad():
            expected = theirs(input_ids=torch.tensor([ids])).logits[0, 0]
        ours = model.score(hidden_states(model, ids))[-1]
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
