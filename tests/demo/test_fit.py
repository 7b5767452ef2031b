import random
from collections.abc import Callable

import pytest
import torch

from rl.demo import recipes
from rl.demo.fit import (
    EOS,
    PAD,
    Check,
    answer_probability,
    causal,
    encode,
    fit,
    make_batch,
    make_model,
    sample,
)
from rl.demo.recipes import make
from rl.demo.specs import JudgeSpec, PolicySpec, Size, Spec, TeacherSpec
from rl.demo.tasks import is_correct, make_prompts, split_of

SMALL = Size(d_model=16, n_layers=2, n_heads=2, head_dim=8, d_ff=24)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_batch_asks_for_what_is_written_and_the_end_of_text_and_nothing_else() -> None:
    ids, mask = make_batch([("r1=", "2"), ("s=", "345")])
    assert ids.tolist() == [[*encode("r1=2"), EOS, PAD], [*encode("s=345"), EOS]]
    assert ids[:, 1:][mask].tolist() == [*encode("2"), EOS, *encode("345"), EOS]


def test_probability_of_an_answer_is_the_frequency_of_sampling_it() -> None:
    model = make_model(SMALL, 0)
    examples = [("r1=", "2"), ("r1=", "34"), ("r1=", "34")]
    check = Check(done=False, settle=False, note="")
    fit(model, lambda n: examples, lambda: check, steps=80, every=80, progress=lambda step, note: None)
    texts = sample(model, ["r1="] * 2000, max_tokens=4, temperature=1.0, generator=generator())
    for answer, about in (("2", 1 / 3), ("34", 2 / 3)):
        p = answer_probability(model, [("r1=", answer)])
        assert p == pytest.approx(about, abs=0.15)  # it learned
        assert texts.count(answer) / 2000 == pytest.approx(p, abs=4 * (p * (1 - p) / 2000) ** 0.5)


def test_cached_sampling_of_ragged_prompts_equals_recomputing_every_prefix() -> None:
    model = make_model(SMALL, 1)
    prompts = ["r12345=", "s1=", "a", "jr52814=41825?"]
    written = sample(model, prompts, max_tokens=6, temperature=1e-6, generator=generator())
    for prompt, text in zip(prompts, written, strict=True):
        ids = encode(prompt)
        for _ in range(6):
            hidden = model(torch.tensor([ids]), torch.arange(len(ids)), causal)
            ids.append(int(model.logits(hidden[0, -1]).argmax()))
            if ids[-1] == EOS:
                break
        tail = ids[len(prompt) :]
        assert encode(text) == [token for token in tail if token != EOS and token != PAD]


def _examples(spec: Spec, n: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    drawn: list[tuple[str, str]] = []

    def look(model: object, draw: Callable[[int], list[tuple[str, str]]], *_: object, **__: object) -> int:
        drawn.extend(draw(n))
        return 0

    monkeypatch.setattr(recipes, "fit", look)
    make(spec, lambda fraction, note: None)
    return drawn


@pytest.mark.parametrize(
    "spec",
    [PolicySpec(tasks=("reverse", "sort", "add"), size=SMALL), TeacherSpec(tasks=("sort",), size=SMALL),
     JudgeSpec(tasks=("reverse", "add"), size=SMALL)],
)  # fmt: skip
def test_no_model_learns_from_a_held_out_problem(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = [read for read, _ in _examples(spec, 1500, monkeypatch)]
    problems = {read.removeprefix("j").partition("=")[0] + "=" for read in reads}
    assert len(problems) > 500
    assert {split_of(text) for text in problems} == {"train"}


@pytest.mark.parametrize(
    "spec, share", [(PolicySpec(size=SMALL), 0.5), (TeacherSpec(tasks=("reverse",), size=SMALL), 1)]
)
def test_half_of_a_policys_targets_are_wrong_and_none_of_a_teachers(
    spec: Spec, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = _examples(spec, 2000, monkeypatch)
    right = sum(is_correct(read, written) for read, written in examples) / len(examples)
    assert right == pytest.approx(share, abs=0.05)


def test_a_model_is_a_function_of_its_spec() -> None:
    spec = JudgeSpec(steps=3, size=SMALL)
    (first, numbers), (second, again) = (make(spec, lambda fraction, note: None) for _ in range(2))
    assert numbers == again
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def test_training_leaves_the_global_generators_alone() -> None:
    before, state = torch.get_rng_state(), random.getstate()
    make(PolicySpec(steps=2, size=SMALL), lambda fraction, note: None)
    assert torch.equal(before, torch.get_rng_state()) and state == random.getstate()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_warm_policy_is_right_now_and_then(seed: int) -> None:
    _, numbers = make(PolicySpec(tasks=("reverse", "sort"), seed=seed), lambda fraction, note: None)
    assert 0.15 < numbers["accuracy/reverse"] < 0.6
    assert 0.15 < numbers["accuracy/sort"] < 0.6


@pytest.mark.slow
def test_the_judge_of_reversal_agrees_with_the_truth_on_held_out_problems() -> None:
    model, numbers = make(JudgeSpec(), lambda fraction, note: None)
    assert numbers["verdict"] >= 0.99 and numbers["parsed"] >= 0.99 and numbers["false_positive"] <= 0.01
    answers = make_prompts(("reverse",), 4, 0, "held_out")
    asked = [f"j{text}{answer}?" for text, answer, _ in answers]
    said = sample(model, asked, max_tokens=28, temperature=0.01, generator=generator())
    assert [text[-3:] for text in said] == ["S:5"] * 4
