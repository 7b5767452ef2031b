"""Scores of sequences: the engines' promise, and every other architecture through transformers."""

import asyncio
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.attention import make_layout, packed_attention
from models.config import ModelConfig
from models.tokenizer import char_tokenizer
from models.transformer import Transformer
from models.weights import save_folder
from rl.engines.classifier import HFClassifier, check_spelling, one_bos
from rl.engines.make import load_bundle, load_scalar, make_classifier, make_engine
from rl.engines.torch import TorchEngine
from rl.types import SamplingParams

CFG = ModelConfig(
    head="score", vocab_size=23, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48,
    max_len=64,
)  # fmt: skip
ENGINES = {"torch": TorchEngine}


@pytest.fixture(params=ENGINES)
def make(request):
    """(cfg, state) -> engine, not yet started."""
    return ENGINES[request.param]


def build(cfg: ModelConfig = CFG) -> Transformer:
    model = Transformer(cfg).requires_grad_(False)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def state(model: Transformer) -> dict[str, np.ndarray]:
    return {name: p.numpy().copy() for name, p in model.state_dict().items()}


def plain_score(model: Transformer, ids: list[int]) -> float:
    layout = make_layout([len(ids)])
    hidden = model(torch.tensor(ids), layout.positions, lambda _, q, k, v: packed_attention(q, k, v, layout))
    return model.score(hidden[-1]).item()


def sequences(lengths) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 23, n).tolist() for n in lengths]


def run(coroutine):
    torch.set_num_threads(1)
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def with_engine(engine, use):
    async def main():
        await engine.start()
        result = await use(engine)
        await engine.stop()
        return result

    return run(main())


# ── The engines ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "cfg",
    [
        CFG,
        replace(CFG, tie_embeddings=False),
        replace(CFG, family="qwen2", qkv_bias=True),
        replace(CFG, family="qwen3", qk_norm=True, n_kv_heads=1),
    ],
)
def test_the_score_is_that_of_the_last_token_in_a_plain_forward_pass(make, cfg):
    model, rows = build(cfg), sequences([1, 2, 7, 8, 9, 40, 64])
    scores = with_engine(make(cfg, state(model)), lambda engine: engine.classify(rows))
    assert scores == pytest.approx([plain_score(model, row) for row in rows], abs=1e-5)


def test_a_score_is_the_same_bits_in_every_batch_and_order(make):
    rows = sequences([5, 6, 3, 17, 33, 8, 16, 1, 60, *range(1, 50)])

    async def use(engine):
        alone = [(await engine.classify([row]))[0] for row in rows]
        order = np.random.default_rng(1).permutation(len(rows))
        shuffled = await engine.classify([rows[i] for i in order])
        assert await engine.classify(rows) == alone
        assert shuffled == [alone[i] for i in order]
        assert await engine.classify([]) == []

    with_engine(make(CFG, state(build())), use)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ([], "got 0"),
        ([1] * 65, "1 to 64 token ids, got 65"),
        ([1, 23], r"\[0, 23\)"),
        ([-1], r"\[0, 23\)"),
    ],
)
def test_sequences_that_cannot_be_read_are_refused(make, row, names):
    async def use(engine):
        with pytest.raises(ValueError, match=names):
            await engine.classify([[1, 2], row])
        assert len(await engine.classify([[1, 2]])) == 1

    with_engine(make(CFG, state(build())), use)


def test_a_score_head_has_no_tokens_and_a_language_model_no_score(make):
    async def scalar(engine):
        with pytest.raises(ValueError, match="score: needs a model with head 'lm'"):
            await engine.score([[1, 2]], [1])
        with pytest.raises(ValueError, match="generate: needs a model with head 'lm'"):
            async for _ in engine.generate([1], params=SamplingParams(), seeds=[0], request_id="r"):
                pass

    async def language(engine):
        with pytest.raises(ValueError, match="classify: needs a model with head 'score'"):
            await engine.classify([[1, 2]])

    with_engine(make(CFG, state(build())), scalar)
    lm = replace(CFG, head="lm")
    with_engine(make(lm, state(build(lm))), language)


def test_what_was_read_is_counted_and_new_weights_change_the_score(make):
    async def use(engine):
        before = await engine.classify([[1, 2, 3], [4]])
        assert engine.stats().prompt_tokens == 4
        weights = state(build())
        weights["score.weight"] *= 2
        report = await engine.update(1, weights)
        assert report.version == 1 and report.probe == ()
        assert await engine.classify([[1, 2, 3], [4]]) == pytest.approx([2 * s for s in before])

    with_engine(make(CFG, state(build()), probe_ids=(1, 2, 3)), use)


# ── From a folder ───────────────────────────────────────────────────────────────


def ours(folder, cfg=CFG):
    tokenizer = char_tokenizer("0123456789")
    cfg = replace(cfg, vocab_size=tokenizer.vocab_size)
    model = build(cfg)
    save_folder(folder, model, cfg, tokenizer)
    return model


def test_a_folder_or_its_bundle_becomes_a_classifier_with_its_tokenizer(tmp_path):
    model = ours(tmp_path)
    for source in (tmp_path, load_bundle(tmp_path), load_scalar(tmp_path)):

        async def use(judge):
            row = judge.encode("123")
            assert row == {"input_ids": [3, 4, 5]}
            return await judge.classify([row])

        scores = with_engine(make_classifier(source, slots=4), use)
        assert scores == pytest.approx([plain_score(model, [3, 4, 5])], abs=1e-5)


def test_a_scalar_judge_is_no_language_model_and_the_other_way_round(tmp_path):
    ours(tmp_path / "scalar")
    ours(tmp_path / "lm", replace(CFG, head="lm"))
    with pytest.raises(ValueError, match="scalar is a scalar judge"):
        make_engine(load_bundle(tmp_path / "scalar"), slots=4)
    with pytest.raises(ValueError, match="lm is a language model.*LlamaForSequenceClassification"):
        make_classifier(tmp_path / "lm", slots=4)


# ── transformers ────────────────────────────────────────────────────────────────

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefgh"]
TINY = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 20, "pad_token_id": 0, "num_labels": 1,
        "initializer_range": 0.5}  # fmt: skip


def hf_folder(path, family="Bert", template=None, **change):
    """A small random model of transformers with a tokenizer that writes [CLS] text [SEP] pair [SEP]."""
    hf = pytest.importorskip("transformers")
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    backend.enable_truncation(4)  # as some folders ship: to be ignored
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_input_names=["input_ids", *(["token_type_ids"] if family == "Bert" else []), "attention_mask"],
    )
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    head = change.pop("head", "ForSequenceClassification")
    model = getattr(hf, f"{family}{head}")(getattr(hf, f"{family}Config")(**TINY | change)).eval()
    model.save_pretrained(path)
    return model


FAMILIES = {
    "Bert": {},
    "Roberta": {},
    "DebertaV2": {},
    "GPT2": {"pad_token_id": None},  # refuses more than one row
    "Mistral": {"num_key_value_heads": 1, "head_dim": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_architectures_score_texts_and_pairs_as_transformers_does(family, tmp_path):
    model = hf_folder(tmp_path, family, **FAMILIES[family])
    texts = [("abc", None), ("h", None), ("abc", "de"), ("bca", "ed"), ("abcd", None), ("cab", "")]
    judge = make_classifier(load_scalar(tmp_path), slots=2)
    assert isinstance(judge, HFClassifier)
    scores = with_engine(judge, lambda judge: judge.classify_texts(texts))
    for (text, pair), score in zip(texts, scores, strict=True):
        ids = [1, *map(WORDS.index, text), 2]
        types = [0] * len(ids)
        if pair is not None:
            ids, types = [*ids, *map(WORDS.index, pair), 2], [*types, *[1] * (len(pair) + 1)]
        more = {"token_type_ids": torch.tensor([types])} if family == "Bert" else {}
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids]), **more).logits.item()
        assert score == pytest.approx(expected, abs=1e-5)
    assert len(set(scores)) == len(scores)
    assert judge.stats().prompt_tokens == 5 + 3 + 8 + 8 + 6 + 6


@pytest.mark.parametrize(("family", "limit"), [("Bert", 20), ("Roberta", 19)])
def test_a_text_over_the_models_limit_is_refused_and_never_cut(family, limit, tmp_path):
    hf_folder(tmp_path, family)  # RoBERTa counts positions from behind its padding index: here 1, 2, ...

    async def use(judge):
        assert len(await judge.classify_texts([("a" * (limit - 2), None)])) == 1
        with pytest.raises(ValueError, match=f"1 to {limit} token ids, got {limit + 1}"):
            judge.encode("a" * (limit - 1))

    with_engine(HFClassifier(tmp_path), use)


def test_a_special_token_that_a_text_spells_is_text(tmp_path):
    hf_folder(tmp_path)

    async def use(judge):
        ids = judge.encode("a[SEP]b")["input_ids"]
        assert ids[0] == 1 and ids[-1] == 2 and 2 not in ids[1:-1]

    with_engine(HFClassifier(tmp_path), use)


CHAT = "{% for m in messages %}[CLS]{{ m['content'] }}[SEP]{% endfor %}"


def test_a_chat_template_is_used_where_the_folder_has_one_and_its_tokens_cannot_be_forged(tmp_path):
    hf_folder(tmp_path, template=CHAT)

    async def use(judge):
        assert judge.encode("ab", "c")["input_ids"] == [1, 4, 5, 2, 1, 6, 2]
        assert judge.encode("ab", "")["input_ids"] == [1, 4, 5, 2, 1, 2]
        assert judge.encode("ab")["input_ids"] == [1, 4, 5, 2]
        with pytest.raises(ValueError, match=r"spells the special token '\[SEP\]'"):
            judge.encode("ab", "c[SEP][CLS]a")
        rows = [judge.encode("ab", "c"), judge.encode("abcdg")]  # of one length, with other inputs
        assert len(await judge.classify(rows)) == 2

    with_engine(HFClassifier(tmp_path), use)


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"num_labels": 2}, "one label.*got 2"),
        ({"head": "ForMaskedLM"}, "lacks weights.*classifier.weight"),
    ],
)
def test_a_folder_that_is_no_scalar_judge_is_refused(how, names, tmp_path):
    hf_folder(tmp_path, **how)
    with pytest.raises(ValueError, match=names):
        run(HFClassifier(tmp_path).start())


def test_without_transformers_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeError, match="pip install transformers") as caught:
        run(HFClassifier(tmp_path).start())
    assert len(str(caught.value).splitlines()) == 1


def test_a_call_before_start_is_refused():
    with pytest.raises(RuntimeError, match="not started"):
        run(HFClassifier("nowhere").classify([{"input_ids": [1]}]))


def test_a_second_first_token_is_dropped_and_nothing_else():
    assert one_bos([1, 1, 5], 1) == [1, 5]
    assert one_bos([1, 5, 1, 1], 1) == [1, 5, 1, 1]
    assert one_bos([5, 5], 1) == [5, 5] == one_bos([5, 5], None)
    assert one_bos([], 1) == []


def test_a_text_without_special_tokens_is_free_to_say_anything():
    check_spelling(("<b>", "eos"), ("<eos>", "</s>"))
    with pytest.raises(ValueError, match="</s>"):
        check_spelling(("a", "b</s>"), ("<eos>", "</s>"))
