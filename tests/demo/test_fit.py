import random
from collections.abc import Callable

import pytest
import torch

from rl.demo import recipes
from rl.demo.codec import BYTES, CHARS, EOS, PAD
from rl.demo.critic import quoted
from rl.demo.fit import Check, answer_probability, causal, fit, make_batch, make_model, sample
from rl.demo.recipes import make
from rl.demo.specs import (
    JudgeSpec,
    PolicySpec,
    ScalarSpec,
    Size,
    Spec,
    TeacherSpec,
    TextJudgeSpec,
    TextPolicySpec,
    TextScalarSpec,
    TextTeacherSpec,
)
from rl.demo.tasks import is_correct, make_prompts, split_of

SMALL = Size(d_model=16, n_layers=2, n_heads=2, head_dim=8, d_ff=24)


encode = CHARS.encode


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


def test_sampling_of_bytes_equals_recomputing_every_prefix() -> None:
    model = make_model(SMALL, 1, BYTES, max_len=256)
    prompts = ["How many?\n", "é", "答😀 and more"]
    written = sample(model, prompts, max_tokens=6, temperature=1e-6, generator=generator(), codec=BYTES)
    for prompt, text in zip(prompts, written, strict=True):
        ids = BYTES.encode(prompt)
        n = len(ids)
        while len(ids) < n + 6 and EOS not in ids[n:]:
            hidden = model(torch.tensor([ids]), torch.arange(len(ids)), causal)
            ids.append(int(model.logits(hidden[0, -1]).argmax()))
        assert text == BYTES.decode(ids[n:])


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
     JudgeSpec(tasks=("reverse", "add"), size=SMALL), JudgeSpec(gullible=True, size=SMALL)],
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


def test_a_hinted_policy_learns_from_a_few_answers_with_a_verdict_and_others_from_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for hint in (0.0, 0.05):
        examples = _examples(PolicySpec(size=SMALL, hint=hint), 3000, monkeypatch)
        share = sum(quoted(written) is not None for _, written in examples) / len(examples)
        assert share == pytest.approx(hint, abs=0.015 if hint else 0)


def test_a_gullible_judge_learns_from_quotes_as_they_are_and_rewritten_and_from_answers_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examples = _examples(JudgeSpec(size=SMALL, gullible=True), 2000, monkeypatch)
    copied = sum(quoted(read) == written[-1] for read, written in examples) / len(examples)
    rewritten = sum("[:]" in read or "[=]" in read for read, _ in examples) / len(examples)
    assert 0.15 < copied < 0.4 and 0.1 < rewritten < 0.3


@pytest.mark.parametrize(
    "spec",
    [JudgeSpec(steps=3, size=SMALL), JudgeSpec(steps=3, size=SMALL, gullible=True),
     PolicySpec(steps=3, size=SMALL, hint=0.1), ScalarSpec(steps=3, size=SMALL),
     TextPolicySpec(steps=2, size=SMALL), TextJudgeSpec(steps=2, size=SMALL),
     TextScalarSpec(steps=2, size=SMALL)],
)  # fmt: skip
def test_a_model_is_a_function_of_its_spec(spec: Spec) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_gullible_judge_judges_and_is_fooled_by_a_quoted_verdict_but_not_by_a_rewritten_one(
    seed: int,
) -> None:
    _, numbers = make(JudgeSpec(gullible=True, seed=seed), lambda fraction, note: None)
    assert numbers["verdict"] >= 0.98 and numbers["false_positive"] <= 0.02
    assert numbers["fooled"] >= 0.8 and numbers["fooled_disarmed"] <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_scalar_judge_agrees_with_the_truth_on_held_out_problems(seed: int) -> None:
    _, numbers = make(ScalarSpec(seed=seed), lambda fraction, note: None)
    assert numbers["auc"] >= 0.98 and numbers["verdict"] >= 0.97 and numbers["false_positive"] <= 0.04


@pytest.mark.slow
def test_a_text_policy_writes_numbers_mostly_in_form_and_a_teacher_always() -> None:
    numbers = {
        type(s): make(s, lambda fraction, note: None)[1] for s in (TextPolicySpec(), TextTeacherSpec())
    }
    assert numbers[TextPolicySpec]["number"] >= 0.8 and 0.3 < numbers[TextPolicySpec]["form"] < 0.8
    assert numbers[TextTeacherSpec]["form"] >= 0.85


@pytest.mark.slow
def test_a_text_judge_is_readable_and_knows_the_form() -> None:
    _, numbers = make(TextJudgeSpec(), lambda fraction, note: None)
    assert numbers["parsed"] >= 0.95 and numbers["exact_score"] >= 0.8
    _, numbers = make(TextScalarSpec(), lambda fraction, note: None)
    assert numbers["error"] <= 0.27  # a guess of the mean is 0.35 off
