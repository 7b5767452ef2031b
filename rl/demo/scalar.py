"""How the demo's scalar judge is trained: it must do in one look what the generative one may write down.

Told only how many positions are right, it finds neither the places to compare nor the count within a minute.
So the layers before the last also learn to know, at each of the candidate's positions, the right character
and whether it stands there; the last one has then only to count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.transformer import Transformer, rope_frequencies, rope_tables
from rl.demo import critic
from rl.demo.codec import CHARS, PAD
from rl.demo.fit import BATCH, Check, Example, causal, descend, make_model
from rl.demo.specs import ScalarSpec
from rl.demo.tasks import Split, answer_of, draw, is_correct

DIGIT = 0.2  # weight of knowing the right character
EXACT = 0.93  # of its scores, to the nearest point, before its training ends
FULL_FROM = 1 - 0.5 / critic.FULL  # half-way between all right and one wrong


def make_scalar(spec: ScalarSpec, report: Callable[[int, str], None]) -> tuple[Transformer, dict[str, float]]:
    """Problem and answer → score / FULL, as the number of the last token."""
    rng = random.Random(f"scalar/{spec.seed}")
    model = make_model(spec.size, spec.seed, head="score")
    seen = _cases(spec, random.Random(1), 512, "held_out")
    good = 0

    def check() -> Check:
        nonlocal good
        now = _measure(model, seen)
        good = good + 1 if now["verdict"] >= spec.accuracy and now["exact_score"] >= EXACT else 0
        note = f"verdicts {now['verdict']:.3f}, scores {now['exact_score']:.3f}"
        return Check(good >= 3, settle=now["exact_score"] > 0.8, note=note)

    steps = descend(model, lambda: _loss(model, _cases(spec, rng, BATCH, "train")), check, steps=spec.steps,
                    every=25, progress=report)  # fmt: skip
    return model, {"steps": steps, **_measure(model, _cases(spec, random.Random(2), 1024, "held_out"))}


def _cases(spec: ScalarSpec, rng: random.Random, n: int, split: Split) -> list[Example]:
    """Problems and answers to them."""
    texts = [draw(rng.choice(spec.tasks), rng, split)[0] for _ in range(n)]
    return [(text, critic.draw_candidate(text, rng)) for text in texts]


def _read(model: Transformer, cases: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [B, L, D] after the layer before the last and after the last, and the last places [B]."""
    rows = [CHARS.encode(critic.judge_prompt(*case)) for case in cases]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    cos, sin = rope_tables(torch.arange(longest), rope_frequencies(model.cfg))
    before = after = model.model.embed_tokens(ids)
    for layer, block in enumerate(model.model.layers):
        before, after = after, block(after, cos, sin, causal, layer)
    return model.model.norm(before), model.model.norm(after), torch.tensor([len(row) - 1 for row in rows])


def _loss(model: Transformer, cases: Sequence[Example]) -> Tensor:
    before, after, last = _read(model, cases)
    places, right, match = [], [], []
    for i, (text, candidate) in enumerate(cases):
        for j, (digit, said) in enumerate(zip(answer_of(text), candidate, strict=False)):
            places.append((i, len(f"j{text}") + j))
            right.append(CHARS.encode(digit)[0])
            match.append(float(digit == said))
    row, column = torch.tensor(places).T
    at = before[row, column]
    wanted = torch.tensor([critic.score(*case) / critic.FULL for case in cases])
    return (
        F.mse_loss(model.score(after[torch.arange(len(cases)), last]), wanted)
        + F.mse_loss(model.score(at), torch.tensor(match))
        + DIGIT * F.cross_entropy(F.linear(at, model.model.embed_tokens.weight), torch.tensor(right))
    )


@torch.no_grad()
def _measure(model: Transformer, cases: Sequence[Example]) -> dict[str, float]:
    """Against the ground truth. auc: how often a right answer has a higher score than a wrong one."""
    _, after, last = _read(model, cases)
    said = model.score(after[torch.arange(len(cases)), last])
    truth = torch.tensor([is_correct(*case) for case in cases])
    graded = torch.tensor([critic.score(*case) for case in cases])
    full = said > FULL_FROM
    return {
        "auc": (said[truth][:, None] > said[~truth]).float().mean().item(),
        "verdict": (full == truth).float().mean().item(),
        "false_positive": full[~truth].float().mean().item(),
        "exact_score": ((critic.FULL * said).round() == graded).float().mean().item(),
    }
