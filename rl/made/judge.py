"""SmolLM2 fine-tuned to judge answers to data.arithmetic, asked in the words of judge.template.

It writes what is right, what the answer says, and the verdict: "3 + 4 = 7, the answer is 8. Verdict: No".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from models.tokenizer import Tokenizer, load_tokenizer
from models.transformer import Transformer
from models.weights import load_folder, save_folder
from rl.config import Judge
from rl.data.rows_arithmetic import DIGIT
from rl.judges.questions import questions
from rl.made.fine_tune import Example, fine_tune, reproduced
from rl.made.judged import Judged, draw

MEASURED = 512  # judged answers that it was not trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    judge: Judge  # whose questions it will be asked
    tasks: tuple[str, ...]
    largest: int = DIGIT
    seed: int = 0
    steps: int = 300
    batch: int = 64
    lr: float = 1e-4

    def key(self) -> dict[str, object]:
        """What the model depends on: of the judge only how it asks."""
        asks = {name: getattr(self.judge, name) for name in ("template", "chat", "delimiter", "neutralise")}
        return asks | {name: value for name, value in asdict(self).items() if name != "judge"}


def train_judge(
    recipe: Recipe, base: Path, folder: Path, progress: Callable[[int, float], None] = lambda step, loss: None
) -> dict[str, float]:
    """Write the fine-tuned model of `base` into `folder`. Returns what was measured on new answers: the
    share about which it writes, greedily, exactly what it should, of all, of right and of wrong ones."""
    cfg, state = load_folder(base)
    tokenizer = load_tokenizer(base)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Transformer(cfg, device=device, dtype=torch.float32)
    model.load_state_dict(state)
    rng = random.Random(f"{recipe.seed}/train")

    def examples(n: int) -> list[Example]:
        judged = (draw(recipe.tasks, rng, recipe.largest) for _ in range(n))
        return [as_example(recipe.judge, one, tokenizer) for one in judged]

    fine_tune(model, examples, steps=recipe.steps, batch=recipe.batch, lr=recipe.lr, progress=progress)
    numbers = measure(model, recipe, tokenizer)
    own = getattr(torch, cfg.dtype)
    save_folder(folder, {name: t.to(own) for name, t in model.state_dict().items()}, cfg, tokenizer)
    return numbers


def measure(model: Transformer, recipe: Recipe, tokenizer: Tokenizer) -> dict[str, float]:
    rng = random.Random(f"{recipe.seed}/measure")
    judged = [draw(recipe.tasks, rng, recipe.largest) for _ in range(MEASURED)]
    exact = reproduced(model, [as_example(recipe.judge, one, tokenizer) for one in judged])
    of: dict[str, Sequence[bool]] = {
        "exact": exact,
        "exact_right": [e for e, one in zip(exact, judged, strict=True) if one.right],
        "exact_wrong": [e for e, one in zip(exact, judged, strict=True) if not one.right],
    }
    return {name: sum(found) / len(found) for name, found in of.items()}


def as_example(judge: Judge, judged: Judged, tokenizer: Tokenizer) -> Example:
    """What the judge reads, as it will be asked, and what it should write."""
    (ask,) = questions(judge, judged.problem, [judged.candidate], [0])
    if judge.chat:
        read = tokenizer.chat([{"role": "user", "content": ask.text}])
    else:
        read = [*tokenizer.first_ids, *tokenizer.encode(ask.text)]
    return read, [*tokenizer.encode(judged.verdict), *tokenizer.eos_ids]
