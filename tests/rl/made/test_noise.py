import asyncio
from dataclasses import replace

import pytest
import torch

from experiments.genrm_grpo_seed import CONFIG as SEED
from models.attention import make_layout, packed_attention
from models.tokenizer import load_tokenizer
from models.transformer import Transformer
from models.weights import load_folder
from rl.config import Engine
from rl.engines.make import load_bundle
from rl.judges.local import LocalJudge
from rl.judges.questions import questions
from rl.judges.reading import read
from rl.made.noise import SHAPES, save_random
from rl.types import Prompt, Score

SMALL = replace(SHAPES["0.5B"], vocab_size=4096, d_model=256, n_layers=6, n_heads=4, head_dim=64, d_ff=512)


@pytest.mark.parametrize(
    "name, n", [("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("3B", 3_085_938_688), ("7B", 7_615_616_512)]
)
def test_the_shapes_have_the_published_numbers_of_parameters(name, n):
    assert SHAPES[name].n_params == n


@pytest.mark.parametrize("tied", [True, False])
def test_it_writes_digits_and_never_ends(tmp_path, tied):
    numbers = save_random(replace(SMALL, tie_embeddings=tied), tmp_path)
    cfg, state = load_folder(tmp_path)
    tokenizer, model = load_tokenizer(tmp_path), Transformer(cfg)
    model.load_state_dict(state)
    assert cfg.dtype == "bfloat16" and numbers["parameters"] == cfg.n_params
    digits = [tokenizer.encode(d)[0] for d in "0123456789"]
    for text in ("How good is it, from 1 to 9? ", "Solution: 4711", "Compute 3 + 4."):
        layout = make_layout([len(tokenizer.encode(text))])
        with torch.no_grad():
            hidden = model(
                torch.tensor(tokenizer.encode(text)), layout.positions,
                lambda _, q, k, v, layout=layout: packed_attention(q, k, v, layout),
            )  # fmt: skip
            p = model.logits(hidden[-1]).float().softmax(-1)
        assert p[digits].sum() > 0.2 and p[digits].max() < 0.95 * p[digits].sum()
        assert p[list(cfg.eos_ids)].sum() < 1e-3


def test_the_seed_decides_the_weights(tmp_path):
    states = []
    for i, seed in enumerate((1, 1, 2)):
        save_random(SMALL, tmp_path / str(i), seed)
        states.append(load_folder(tmp_path / str(i))[1]["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_a_vocabulary_with_no_room_for_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="want more than 100"):
        save_random(replace(SMALL, vocab_size=100), tmp_path)


def test_as_a_judge_it_gives_different_answers_different_scores(tmp_path):
    save_random(SMALL, tmp_path)
    cfg = replace(SEED.judge, engine=Engine(), slots=4)
    prompt = Prompt(ids=(1,), text="Compute 3 + 4.", key="", answer="7", extra={})
    asks = questions(cfg, prompt, ["7", "twelve", "3018842", ""], [0, 1, 2, 3])

    async def outcomes():
        judge = LocalJudge(load_bundle(tmp_path), cfg)
        await judge.start()
        replies = await judge.answer(asks, 60.0)
        await judge.stop()
        return [read(cfg, ask, reply).outcome for ask, reply in zip(asks, replies, strict=True)]

    found = asyncio.run(outcomes())
    scores = {outcome.value for outcome in found if isinstance(outcome, Score)}
    assert len(scores) == len(found) == 4, found
