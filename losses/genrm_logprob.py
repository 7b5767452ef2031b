"""A score from the probabilities that a judge gives to its labels: no sampling noise, and one prefill.

    p(label) = Σ over its spellings of exp(logp)        coverage = Σ p        score = Σ value · p / coverage

Low coverage means that the judge was about to say something else, and then the score means nothing. See
"Generative Verifiers: Reward Modeling as Next-Token Prediction" (2408.15240) for p(Yes), and "G-Eval: NLG
Evaluation using GPT-4 with Better Human Alignment" (2303.16634) for the expectation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def expected_score(
    label_logp: Tensor, values: Sequence[float], *, min_coverage: float = 0.5
) -> tuple[Tensor, Tensor]:
    """(score [...], coverage [...]) from the log-probabilities of L labels [..., L] and the labels' values.

    label_logp in nats, under the full vocabulary; −inf for a label that is not there. The score is on the
    scale of the values, between the least and the greatest, and NaN (missing: refuse it) where
    coverage < min_coverage. For yes/no the values are (1, 0): score = p(yes)/(p(yes) + p(no)).

    Raises ValueError for shapes that differ, min_coverage outside (0, 1] and, in eager code,
    log-probabilities that are NaN or sum to more than 1.
    """
    if label_logp.ndim < 1 or label_logp.shape[-1] != len(values) or not len(values):
        raise ValueError(f"expected_score: {len(values)} values for label_logp of {tuple(label_logp.shape)}")
    if not 0 < min_coverage <= 1:
        raise ValueError(f"expected_score: min_coverage must lie in (0, 1], got {min_coverage}")
    logp = label_logp.to(torch.promote_types(label_logp.dtype, torch.float32))
    coverage = logp.exp().sum(-1)
    # NaN fails too; log-probabilities in bf16 may sum to a little over 1.
    if not torch.compiler.is_compiling() and not bool((coverage <= 1.02).all()):
        raise ValueError("expected_score: label_logp must be log-probabilities: no NaN, a sum of at most 1")
    enough = coverage >= min_coverage
    safe = torch.where(enough.unsqueeze(-1), logp, 0.0)
    score = safe.softmax(-1) @ torch.tensor(values, dtype=logp.dtype, device=logp.device)
    score = score.clamp(min(values), max(values))  # rounding only
    return torch.where(enough, score, torch.nan), coverage


def _spelled(label: str) -> str:
    """What tokens have in common that spell one label: " Yes", "yes" and "▁YES" are "yes"."""
    return label.replace("▁", " ").replace("Ġ", " ").strip().casefold()


def label_logps(top: Mapping[str, float], labels: Sequence[str], *, whole: bool = False) -> Tensor:
    """[L] log-probabilities of the labels, spellings summed, from a server's top tokens (text → log-prob).

    −inf for a label that is not among them. A label that begins another ("1" and "10") is refused: most
    tokenizers write 10 as two tokens, so p("1") holds both. `whole=True` says that each label is known to be
    one token, as `label_ids` finds out.

    Raises ValueError for labels with one spelling, or that begin each other.
    """
    names = [_spelled(label) for label in labels]
    if len(set(names)) < len(names):
        raise ValueError(f"label_logps: labels with one spelling in {list(labels)}")
    for name in names:
        longer = [other for other in names if other != name and other.startswith(name)]
        if longer and not whole:
            raise ValueError(
                f"label_logps: {name!r} begins {longer}: p({name!r}) would hold both; see `whole`"
            )
    p = {name: 0.0 for name in names}
    for token, logp in top.items():
        if _spelled(token) in p:
            p[_spelled(token)] += math.exp(logp)
    return torch.tensor([math.log(p[name]) if p[name] > 0 else -math.inf for name in names])


def label_ids(encode: Callable[[str], Sequence[int]], labels: Sequence[str]) -> list[list[int]]:
    """For each label the token ids of its spellings (as it is, with a space before it, lower, capitalised).

    Spellings of several tokens are left out. Raises ValueError for a label that no single token writes, or
    for one token that writes two labels.
    """
    ids = []
    for label in labels:
        forms = dict.fromkeys(
            f for word in (label, label.lower(), label.capitalize()) for f in (word, f" {word}")
        )
        single = [tuple(encode(form)) for form in forms]
        ids.append(sorted({tokens[0] for tokens in single if len(tokens) == 1}))
        if not ids[-1]:
            raise ValueError(f"label_ids: no single token writes {label!r}; choose labels of one token")
    every = [i for of_label in ids for i in of_label]
    if len(set(every)) < len(every):
        raise ValueError(f"label_ids: one token writes two of {list(labels)}")
    return ids
