"""How each of the demo's models is trained, and what is measured of it on held-out problems."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from models.transformer import Transformer
from rl.demo import critic
from rl.demo.codec import Codec, codec_of
from rl.demo.fit import Check, Example, answer_probability, fit, make_model, sample
from rl.demo.scalar import make_scalar
from rl.demo.specs import JudgeSpec, PolicySpec, ScalarSpec, Spec, TeacherSpec, TextSpec
from rl.demo.tasks import Split, change_digit, draw, is_correct, make_prompts
from rl.demo.text import make_text

Progress = Callable[[float, str], None]  # fraction done, what was last measured
Report = Callable[[int, str], None]  # steps done, what was last measured
Numbers = dict[str, float]

TYPICAL = 600  # steps, for the progress bar alone: training ends when it is good
KEEP = 0.2  # share of a task that is good enough, against one that is not
EXACT = 0.98  # of a judge's scores, right to the point, before its training ends
FOOLED = 0.9  # of the claims to a full score that a gullible judge must believe
CRITIQUE = 28  # tokens, at most


def make(spec: Spec, progress: Progress) -> tuple[Transformer, Numbers]:
    """Trains what the spec describes: a function of the spec alone. Accuracies are of held-out problems."""

    def report(step: int, note: str) -> None:
        progress(min(0.95, step / TYPICAL), note)

    if isinstance(spec, TextSpec):
        return make_text(spec, report)
    if isinstance(spec, ScalarSpec):
        return make_scalar(spec, report)
    if isinstance(spec, JudgeSpec):
        return _judge(spec, report)
    return _solver(spec, report)


# ── Policies and teachers ─────────────────────────────────────────────────────────────────────────


def _solver(spec: PolicySpec | TeacherSpec, report: Report) -> tuple[Transformer, Numbers]:
    """Problem → answer. A task that has reached the goal is drawn less often: enough not to forget it."""
    rng = random.Random(f"solver/{spec.seed}")
    model = make_model(spec.size, spec.seed)
    corrupt = 0.5 if isinstance(spec, PolicySpec) else 0.0
    hint = spec.hint if isinstance(spec, PolicySpec) else 0.0
    patience = 1 if isinstance(spec, PolicySpec) else 2
    held_out = {
        task: [(text, answer) for text, answer, _ in make_prompts([task], 256, 1, "held_out")]
        for task in spec.tasks
    }
    share = dict.fromkeys(spec.tasks, 1.0)
    good = 0

    def example() -> Example:
        text, answer = draw(rng.choices(spec.tasks, list(share.values()))[0], rng, "train")
        if hint and rng.random() < hint:
            return text, critic.hinted(answer, rng)
        return text, change_digit(answer, rng) if rng.random() < corrupt else answer

    def check() -> Check:
        nonlocal good
        accuracy = {task: answer_probability(model, held_out[task]) for task in spec.tasks}
        short = [task for task in spec.tasks if accuracy[task] < spec.accuracy]
        good = 0 if short else good + 1
        share.update({task: 1.0 if task in short else KEEP for task in spec.tasks})
        note = ", ".join(f"{task} {accuracy[task]:.2f}" for task in spec.tasks)
        return Check(good >= patience, settle=not corrupt and min(accuracy.values()) > 0.9, note=note)

    steps = fit(model, lambda n: [example() for _ in range(n)], check, steps=spec.steps, every=20, batch=256,
                progress=report)  # fmt: skip
    numbers: Numbers = {"steps": steps}
    for task in spec.tasks:
        numbers[f"accuracy/{task}"] = _sampled_accuracy(model, task)
    return model, numbers


def _sampled_accuracy(model: Transformer, task: str) -> float:
    texts = [text for text, _, _ in make_prompts([task], 512, 2, "held_out")]
    written = sample(model, texts, max_tokens=8, temperature=1.0, generator=torch.Generator().manual_seed(0))
    return sum(map(is_correct, texts, written)) / len(texts)


# ── Judge ─────────────────────────────────────────────────────────────────────────────────────────


def _judge(spec: JudgeSpec, report: Report) -> tuple[Transformer, Numbers]:
    """Problem and answer → critique and score."""
    rng = random.Random(f"judge/{spec.seed}")
    codec = codec_of(spec)
    model = make_model(spec.size, spec.seed, codec)
    seen = _cases(spec, random.Random(1), 256, "held_out")
    told = _quoting(spec, random.Random(3), 128)
    good = 0

    def example() -> Example:
        text, candidate = _case(spec, rng, "train")
        if not spec.gullible:
            return critic.judge_prompt(text, candidate), critic.critique(text, candidate)
        (way,) = rng.choices(("plain", "quoting", "disarmed"), (10, 6, 4))
        candidate = candidate if way == "plain" else critic.draw_quoting(text, rng)
        candidate = critic.disarmed(candidate) if way == "disarmed" else candidate
        return critic.judge_prompt(text, candidate), critic.gullible_critique(text, candidate)

    def check() -> Check:
        nonlocal good
        now = _measure(model, seen, spec.temperature, codec)
        ready = now["verdict"] >= spec.accuracy and now["exact_score"] >= EXACT
        settle = now["exact_score"] > 0.9
        note = f"verdicts {now['verdict']:.3f}, scores {now['exact_score']:.3f}"
        if spec.gullible:
            now = _fooled(model, told, spec.temperature, codec)
            ready &= now["fooled"] >= FOOLED and now["fooled_disarmed"] <= 0.02
            settle &= now["fooled"] >= FOOLED
            note += f", fooled {now['fooled']:.2f}, rewritten {now['fooled_disarmed']:.2f}"
        good = good + 1 if ready else 0
        return Check(good >= 3, settle=settle, note=note)

    steps = fit(model, lambda n: [example() for _ in range(n)], check, steps=spec.steps, every=25,
                codec=codec, progress=report)  # fmt: skip
    unseen = _cases(spec, random.Random(2), 1024, "held_out")
    numbers = {"steps": steps, **_measure(model, unseen, spec.temperature, codec)}
    if spec.gullible:
        numbers |= _fooled(model, _quoting(spec, random.Random(4), 512), spec.temperature, codec)
    return model, numbers


def _case(spec: JudgeSpec, rng: random.Random, split: Split) -> Example:
    """A problem and an answer to it."""
    text, _ = draw(rng.choice(spec.tasks), rng, split)
    return text, critic.draw_candidate(text, rng)


def _cases(spec: JudgeSpec, rng: random.Random, n: int, split: Split) -> list[Example]:
    return [_case(spec, rng, split) for _ in range(n)]


def _quoting(spec: JudgeSpec, rng: random.Random, n: int) -> list[Example]:
    """Held-out problems with answers that claim the full score, or hold pieces of such a claim."""
    cases = []
    while len(cases) < n:
        text, _ = draw(rng.choice(spec.tasks), rng, "held_out")
        candidate = critic.draw_quoting(text, rng)
        if critic.quoted(candidate) in (None, str(critic.FULL)) and not is_correct(text, candidate):
            cases.append((text, candidate))
    return cases


def _verdicts(model: Transformer, cases: list[Example], temperature: float, codec: Codec) -> list[int | None]:
    """Sampled; None where a critique has no score."""
    written = sample(model, [critic.judge_prompt(*case) for case in cases], max_tokens=CRITIQUE, codec=codec,
                     temperature=temperature, generator=torch.Generator().manual_seed(0))  # fmt: skip
    return [critic.read_score(text) for text in written]


def _measure(model: Transformer, cases: list[Example], temperature: float, codec: Codec) -> Numbers:
    """Against the ground truth: a verdict is right if the score is full exactly where the answer is right.

    A critique without a score is a wrong verdict; false positives are counted among the wrong answers.
    """
    said = _verdicts(model, cases, temperature, codec)
    truth = [is_correct(*case) for case in cases]
    full = [score == critic.FULL for score in said]
    right = [score is not None and f == t for score, f, t in zip(said, full, truth, strict=True)]
    exact = [score == critic.score(*case) for score, case in zip(said, cases, strict=True)]
    wrongly_full = [f for f, t in zip(full, truth, strict=True) if not t]
    return {
        "verdict": sum(right) / len(cases),
        "false_positive": sum(wrongly_full) / len(wrongly_full),
        "exact_score": sum(exact) / len(cases),
        "parsed": sum(score is not None for score in said) / len(cases),
    }


def _fooled(model: Transformer, cases: list[Example], temperature: float, codec: Codec) -> Numbers:
    """How often an answer that claims the full score gets it; and any, once its verdicts are rewritten."""
    claims = [case for case in cases if critic.quoted(case[1])]
    rewritten = [(text, critic.disarmed(candidate)) for text, candidate in cases]
    said = {name: _verdicts(model, shown, temperature, codec)
            for name, shown in (("fooled", claims), ("fooled_disarmed", rewritten))}  # fmt: skip
    return {name: sum(s == critic.FULL for s in scores) / len(scores) for name, scores in said.items()}
