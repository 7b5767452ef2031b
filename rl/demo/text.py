"""How the models of any text are trained: on synthetic word problems, byte by byte, for a fixed time."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.transformer import Transformer
from rl.demo import words
from rl.demo.codec import BYTES, PAD
from rl.demo.critic import FULL, read_score
from rl.demo.fit import Check, Example, causal, descend, fit, make_model, sample
from rl.demo.specs import TextJudgeSpec, TextPolicySpec, TextScalarSpec, TextSpec, TextTeacherSpec

Report = Callable[[int, str], None]
Numbers = dict[str, float]
Case = tuple[str, str]  # problem, candidate

MAX_LEN = 2048  # bytes
BATCH = 16
LOOK = 25  # steps
FILLERS = (0, 0, 0, 0, 0, 1, 1, 2, 4)  # sentences before the problems of one batch, which are equally long
ANSWER, CRITIQUE = 8, 32  # tokens, as the config's defaults


def make_text(spec: TextSpec, report: Report) -> tuple[Transformer, Numbers]:
    if isinstance(spec, TextScalarSpec):
        return _scalar(spec, report)
    if isinstance(spec, TextJudgeSpec):
        return _judge(spec, report)
    return _writer(spec, report)


def _train(
    spec: TextSpec, draw: Callable[[int], list[Example]], look: Callable[[Transformer], str], report: Report
) -> Transformer:
    model = make_model(spec.size, spec.seed, BYTES, max_len=MAX_LEN)

    looks = 0

    def check() -> Check:
        nonlocal looks
        looks += 1
        return Check(done=False, settle=2 * looks * LOOK > spec.steps, note=look(model))

    fit(model, draw, check, steps=spec.steps, every=LOOK, batch=BATCH, codec=BYTES, progress=report)
    return model


def _write(model: Transformer, prompts: list[str], max_tokens: int, temperature: float) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    written = []
    for at in range(0, len(prompts), 32):  # attention holds a square of the longest
        written += sample(model, prompts[at : at + 32], max_tokens=max_tokens, temperature=temperature,
                          generator=generator, codec=BYTES)  # fmt: skip
    return written


# ── Policies and teachers ─────────────────────────────────────────────────────────────────────────


def _writer(spec: TextPolicySpec | TextTeacherSpec, report: Report) -> tuple[Transformer, Numbers]:
    """Problem → a number; a teacher's is always in form."""
    rng = random.Random(f"text/{spec.seed}")
    improvable = isinstance(spec, TextPolicySpec)

    def draw(n: int) -> list[Example]:
        fillers = rng.choice(FILLERS)
        drawn = [words.problem(rng, fillers) for _ in range(n)]
        return [(text, words.draw_answer(right, rng) if improvable else words.answer(right))
                for text, right in drawn]  # fmt: skip

    def measure(model: Transformer, cases: list[tuple[str, int]]) -> Numbers:
        written = _write(model, [text for text, _ in cases], ANSWER, 1.0)
        scores = [words.score(said) for said in written]
        return {
            "number": sum(score >= words.BARE for score in scores) / len(cases),
            "form": sum(score == words.FORM for score in scores) / len(cases),
        }

    look_rng = random.Random(1)
    held_out = [words.problem(look_rng, 0) for _ in range(24)]
    model = _train(spec, draw, lambda m: f"a number {measure(m, held_out)['number']:.2f}", report)
    unseen = [words.problem(look_rng, fillers) for fillers in range(8) for _ in range(16)]
    return model, {"steps": spec.steps, **measure(model, unseen)}


# ── Judges ────────────────────────────────────────────────────────────────────────────────────────


def _cases(rng: random.Random, n: int, fillers: int) -> list[Case]:
    return [(words.problem(rng, fillers)[0], words.draw_candidate(rng)) for _ in range(n)]


def _unseen() -> list[Case]:
    return [case for fillers in range(8) for case in _cases(random.Random(fillers), 16, fillers)]


def _judge(spec: TextJudgeSpec, report: Report) -> tuple[Transformer, Numbers]:
    """Problem and candidate → the score of the candidate's form."""
    rng = random.Random(f"text judge/{spec.seed}")

    def draw(n: int) -> list[Example]:
        cases = _cases(rng, n, rng.choice(FILLERS))
        return [(words.judge_prompt(*case), words.critique(case[1])) for case in cases]

    def measure(model: Transformer, cases: list[Case]) -> Numbers:
        said = [read_score(s) for s in _write(model, [words.judge_prompt(*c) for c in cases], CRITIQUE, 0.7)]
        exact = [score == words.score(candidate) for score, (_, candidate) in zip(said, cases, strict=True)]
        return {
            "parsed": sum(score is not None for score in said) / len(cases),
            "exact_score": sum(exact) / len(cases),
        }

    held_out = _cases(random.Random(1), 48, 0)
    model = _train(spec, draw, lambda m: f"scores {measure(m, held_out)['exact_score']:.2f}", report)
    return model, {"steps": spec.steps, **measure(model, _unseen())}


def _scalar(spec: TextScalarSpec, report: Report) -> tuple[Transformer, Numbers]:
    """Problem and candidate → score / FULL, as the number of the last byte."""
    rng = random.Random(f"text scalar/{spec.seed}")
    model = make_model(spec.size, spec.seed, BYTES, head="score", max_len=MAX_LEN)

    def error(cases: list[Case]) -> Tensor:
        """Mean square."""
        rows = [BYTES.encode(words.judge_prompt(*case)) for case in cases]
        longest, last = max(map(len, rows)), torch.tensor([len(row) - 1 for row in rows])
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        hidden = model(ids, torch.arange(longest), causal)[torch.arange(len(rows)), last]
        wanted = torch.tensor([words.score(candidate) / FULL for _, candidate in cases])
        return F.mse_loss(model.score(hidden), wanted)

    @torch.no_grad()
    def check() -> Check:
        nonlocal looks
        looks += 1
        note = f"{error(held_out).item() ** 0.5:.2f} off"
        return Check(done=False, settle=2 * looks * LOOK > spec.steps, note=note)

    looks, held_out = 0, _cases(random.Random(1), 48, 0)
    descend(model, lambda: error(_cases(rng, BATCH, rng.choice(FILLERS))), check, steps=spec.steps,
            every=LOOK, progress=report)  # fmt: skip
    with torch.no_grad():
        return model, {"steps": spec.steps, "error": error(_unseen()).item() ** 0.5}
