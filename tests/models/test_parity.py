"""Our networks, folders and tokenizers against transformers' own, in both directions."""

import json
from dataclasses import replace

import pytest
import torch

from models.attention import make_layout, packed_attention
from models.config import ModelConfig, to_hf
from models.tokenizer import load_tokenizer
from models.transformer import Transformer
from models.weights import load_folder, save_folder
from rl.engines.make import load_bundle
from tests.models.test_chat import CHATML, byte_level, user

hf = pytest.importorskip("transformers")

LENGTHS = (40, 1, 7, 23)  # beyond the length that the scaled positions were trained on
SCALING = {
    "plain": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
FAMILIES = ["Llama", "Qwen2", "Qwen3"]
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def theirs(family: str, *, tied: bool = False, scaling: str = "plain", vocab: int = 31):
    """A small network of transformers in which no bias is 0, no norm weight 1."""
    rope = {"rope_type": "default", "rope_theta": 5e3} | SCALING[scaling]
    head_dim = {} if family == "Qwen2" else {"head_dim": 10}  # not hidden_size / heads
    config = getattr(hf, f"{family}Config")(
        **SIZES, **head_dim, vocab_size=vocab, tie_word_embeddings=tied, rope_parameters=rope
    )
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        scale = 0.1 if p.ndim == 1 else p.shape[1] ** -0.5 if "proj" in name else 1.0
        p.add_(torch.randn(p.shape), alpha=scale)
    return model


def some_rows(vocab: int = 31) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in LENGTHS]


def our_logits(model: Transformer, rows: list[torch.Tensor], total: int | None = None) -> list[torch.Tensor]:
    """Of all rows in one packed row."""
    layout = make_layout([len(row) for row in rows], total=total)
    ids = torch.cat([*rows, torch.zeros(len(layout.positions) - sum(map(len, rows)), dtype=torch.long)])
    hidden = model(ids, layout.positions, lambda _, q, k, v: packed_attention(q, k, v, layout))
    return list(model.logits(hidden)[: sum(map(len, rows))].split([len(row) for row in rows]))


def their_logits(model, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [model(input_ids=row[None]).logits[0] for row in rows]


def build(path, dtype=torch.float32) -> Transformer:
    cfg, state = load_folder(path)
    model = Transformer(cfg, dtype=dtype).requires_grad_(False)
    model.load_state_dict(state)
    return model


def worst(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("scaling", SCALING)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_gives_its_logits(family, tied, scaling, tmp_path):
    model, rows = theirs(family, tied=tied, scaling=scaling), some_rows()
    expected = their_logits(model, rows)
    assert max(float(x.abs().max()) for x in expected) > 1
    model.save_pretrained(tmp_path)
    ours = build(tmp_path)
    assert ours.cfg.tie_embeddings == tied and ours.cfg.n_kv_heads == 2
    assert (ours.cfg.rope_scaling is None) == (scaling == "plain")
    packed = our_logits(ours, rows, total=80)
    alone = [our_logits(ours, [row])[0] for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    in_batch = model(input_ids=padded, attention_mask=mask.long()).logits
    assert worst(packed, expected) < 1e-4
    assert worst(alone, expected) < 1e-4
    assert worst(packed, [logits[: len(row)] for logits, row in zip(in_batch, rows, strict=True)]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_positions_change_the_logits(family, tmp_path):
    """What the comparisons above could not see if both sides ignored it."""
    rows = some_rows()
    plain = their_logits(theirs(family), rows)
    assert all(
        worst(plain, their_logits(theirs(family, scaling=s), rows)) > 1e-2 for s in ("linear", "llama3")
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_we_are_as_near_to_float32_as_transformers(family, tmp_path):
    """Tolerance: 2^-5 of the largest logit, and of the mean error 1.25 times that of transformers."""
    model, rows = theirs(family, scaling="llama3"), some_rows()
    exact = torch.cat(their_logits(model, rows))
    model.save_pretrained(tmp_path)
    ours = torch.cat(our_logits(build(tmp_path, torch.bfloat16), rows)).float()
    half = torch.cat(their_logits(model.bfloat16(), rows)).float()
    assert (ours - half).abs().max() < 2**-5 * exact.abs().max()
    assert (ours - exact).abs().mean() < 1.25 * (half - exact).abs().mean()


@pytest.mark.parametrize("scaling", SCALING)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_folder_gives_our_logits_in_transformers(family, tied, scaling, tmp_path):
    theirs(family, tied=tied, scaling=scaling).save_pretrained(tmp_path / "theirs")
    model, rows = build(tmp_path / "theirs"), some_rows()
    save_folder(tmp_path / "ours", model, model.cfg, shard_bytes=6000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    opened = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").requires_grad_(False)
    assert worst(their_logits(opened, rows), our_logits(model, rows)) < 1e-4


def test_shards_of_transformers_are_read(tmp_path):
    model, rows = theirs("Qwen3"), some_rows()
    model.save_pretrained(tmp_path, max_shard_size="6KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert worst(our_logits(build(tmp_path), rows), their_logits(model, rows)) < 1e-4


def test_positions_that_are_not_implemented_are_refused(tmp_path):
    config = hf.Qwen3Config(**SIZES, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="rope_scaling 'yarn' is not implemented"):
        load_folder(tmp_path)


@pytest.fixture(params=FAMILIES)
def published(request, tmp_path):
    """A folder as it comes from a hub: transformers' own files, and one that nobody here reads."""
    backend = byte_level()
    said = dict(bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|eot|>", model_max_length=64,
                chat_template=CHATML)  # fmt: skip
    if request.param == "Qwen2":  # transformers gives every qwen2 folder Qwen's way to cut text into words
        parts = json.loads(backend.to_str())["model"]
        tokens = {t.content: i for i, t in backend.get_added_tokens_decoder().items()}
        merges = [tuple(merge) for merge in parts["merges"]]
        tokenizer = hf.Qwen2Tokenizer(vocab=parts["vocab"] | tokens, merges=merges, unk_token=None, **said)
        tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    else:
        tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, **said)
    folder = tmp_path / "published"
    tokenizer.save_pretrained(folder)
    model = theirs(request.param, tied=True, vocab=backend.get_vocab_size() + 3)  # rows of padding
    ids = {name: backend.token_to_id(f"<|{name}|>") for name in ("bos", "im_end", "eot")}
    model.config.eos_token_id, model.config.bos_token_id = ids["im_end"], ids["bos"]
    model.generation_config = hf.GenerationConfig(
        eos_token_id=[ids["im_end"], ids["eot"]], do_sample=True, temperature=0.7, top_k=20
    )
    model.save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "LICENSE").write_text("Apache-2.0\r\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    return folder


def test_a_trained_policy_opens_in_transformers_as_its_source_did(published, tmp_path):
    bundle = load_bundle(published)
    weights = {name: torch.from_numpy(w) + 0.01 for name, w in bundle.weights.items()}
    save_folder(tmp_path / "policy", weights, bundle.cfg, bundle.tokenizer)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "policy").requires_grad_(False)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "policy")
    source = hf.AutoTokenizer.from_pretrained(published)
    for messages in (user("What is 12 + 30?"), [{"role": "system", "content": "Count."}, *user("é 42")]):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == source.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == load_tokenizer(tmp_path / "policy").chat(messages)
        expected = our_logits(build(tmp_path / "policy"), [torch.tensor(ids)])
        assert worst(their_logits(model, [torch.tensor(ids)]), expected) < 1e-4
    assert model.generation_config.eos_token_id == list(bundle.cfg.eos_ids)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (source.eos_token, source.pad_token)
    assert tokenizer.model_max_length == 64


def test_what_a_folder_has_beside_its_weights_is_kept_to_the_byte(published, tmp_path):
    bundle = load_bundle(published)
    weights = {name: torch.from_numpy(w) for name, w in bundle.weights.items()}
    save_folder(tmp_path / "policy", weights, bundle.cfg, bundle.tokenizer)
    files = {path.relative_to(published) for path in published.rglob("*") if path.is_file()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"} <= set(
        map(str, files)
    )
    for file in files - {path for path in files if path.name in ("config.json", "model.safetensors")}:
        assert (tmp_path / "policy" / file).read_bytes() == (published / file).read_bytes(), file
    assert files == {
        p.relative_to(tmp_path / "policy") for p in (tmp_path / "policy").rglob("*") if p.is_file()
    }


def test_a_sampler_stops_where_the_generation_config_says(published):
    cfg = load_folder(published)[0]
    special = load_tokenizer(published)
    assert cfg.eos_ids == tuple(special.encode("<|im_end|><|eot|>", parse_special=True))
    (published / "generation_config.json").write_text(json.dumps({"temperature": 0.7}))
    assert load_folder(published)[0].eos_ids == cfg.eos_ids[:1]


@pytest.mark.parametrize("family", FAMILIES)
def test_our_config_is_read_by_transformers_as_it_was_meant(family, tmp_path):
    cfg = ModelConfig(
        family=family.lower(), vocab_size=9, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4,
        d_ff=8, qkv_bias=family == "Qwen2", qk_norm=family == "Qwen3", max_len=99, norm_eps=1e-5,
        rope_theta=7e4, bos_id=1, eos_ids=(2, 3), pad_id=4,
    )  # fmt: skip
    for scaled in (cfg, replace(cfg, rope_scaling=SCALING["llama3"])):
        (tmp_path / "config.json").write_text(json.dumps(to_hf(scaled)))
        config = hf.AutoConfig.from_pretrained(tmp_path)
        said = {"rope_type": "default", **(scaled.rope_scaling or {}), "rope_theta": 7e4}
        assert said.items() <= dict(config.rope_parameters).items()
        assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 99)
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, [2, 3], 4)
