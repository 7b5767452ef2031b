from dataclasses import replace

import pytest

from experiments.genrm_grpo import CONFIG as GENRM
from models.tokenizer import byte_tokenizer
from models.transformer import Transformer
from models.weights import load_folder, save_folder
from rl.config import ConfigError, Judge
from rl.made import noise
from rl.made.judge import Recipe, train_judge
from rl.made.models import is_made, make
from tests.rl.made.test_noise import SMALL

ASKS = Judge(template="{problem} Answer: {candidate} Right?", format="yes_no")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_random_model_is_made_once(monkeypatch):
    monkeypatch.setitem(noise.SHAPES, "small", SMALL)
    built = make("random-small", GENRM)
    before = (built.folder / "model.safetensors").stat().st_mtime_ns
    again = make("random-small", GENRM)
    assert again == built and (again.folder / "model.safetensors").stat().st_mtime_ns == before
    assert load_folder(built.folder)[0].n_params == built.numbers["parameters"] == SMALL.n_params
    assert [p.name for p in built.folder.parent.iterdir()] == [built.folder.name]


def test_names_are_told_apart_and_unknown_ones_are_refused():
    assert is_made("random-3B") and is_made("arithmetic-judge")
    assert not any(map(is_made, ("demo", "smollm2", "Qwen/Qwen2.5-0.5B", "a/random-3B")))
    with pytest.raises(ConfigError, match="random-4B: the shapes are random-0.5B, random-1.5B"):
        make("random-4B", GENRM)
    with pytest.raises(ConfigError, match="there are none"):
        make("arithmetic-judge", GENRM)


def test_the_judge_of_another_template_or_of_other_tasks_is_another_model():
    recipe = Recipe(judge=ASKS, tasks=("addition",))
    assert recipe.key() == replace(recipe, judge=replace(ASKS, slots=7, max_tokens=9)).key()
    assert recipe.key() != replace(recipe, judge=replace(ASKS, template="{problem}{candidate}")).key()
    assert recipe.key() != replace(recipe, tasks=("subtraction",)).key()


def test_a_judge_is_trained_measured_and_written_as_a_folder_of_its_base(tmp_path):
    tokenizer, losses = byte_tokenizer(), []
    cfg = replace(SMALL, n_layers=1, d_model=64, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=128,
                  vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)  # fmt: skip
    base = Transformer(cfg)
    base.init_weights()
    save_folder(tmp_path / "base", base, cfg, tokenizer)
    recipe = Recipe(judge=ASKS, tasks=("addition",), steps=60, batch=16, lr=3e-3)
    numbers = train_judge(
        recipe, tmp_path / "base", tmp_path / "judge", lambda step, loss: losses.append(loss)
    )
    assert losses[-1] < 0.5 * losses[0]  # the form of a verdict is learned first
    assert set(numbers) == {"exact", "exact_right", "exact_wrong"}
    assert all(0 <= value <= 1 for value in numbers.values())
    assert load_folder(tmp_path / "judge")[0] == load_folder(tmp_path / "base")[0]
