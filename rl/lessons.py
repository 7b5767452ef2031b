"""From rewards to what every sample teaches: its advantage, and its weight in each term of the loss.

This is the one place where anything is averaged: weights come from the counts of the whole optimiser step,
so that
micro-batches and ranks only ever add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from losses import row_weight
from rl import forms
from rl.config import Loss

TERMS = ("policy", "kl", "distill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One sample. `weight[term]` is that of each of its tokens; 0 where the sample takes no part in the
    term."""

    adv: float
    weight: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """One group: lengths and rewards of its G samples. A missing reward is None, never a number."""

    n_tokens: tuple[int, ...]
    rewards: tuple[float | None, ...]
    taught: bool  # its prompt has a teacher


def advantages(groups: Sequence[Rated], loss: Loss) -> tuple[list[list[float]], list[bool]]:
    """Advantage of every sample [P][G] and whether each group has any signal [P]."""
    reward = torch.tensor([[0.0 if r is None else r for r in g.rewards] for g in groups], dtype=torch.float64)
    valid = torch.tensor([[r is not None for r in g.rewards] for g in groups])
    n_tokens = torch.tensor([g.n_tokens for g in groups])
    adv, aux = forms.advantage(loss, reward, valid, n_tokens)
    return adv.tolist(), aux["signal"].tolist()


def make_lessons(groups: Sequence[Rated], loss: Loss, *, norm_length: int) -> list[list[Lesson]]:
    """Lessons [P][G] of the groups of one optimiser step.

    Counted in the policy term: samples with a reward (a group without signal counts, with advantage 0),
    and taught ones
    where the teacher acts through the advantage; in kl: all; in distill: the samples of taught groups.
    `norm_length`: the L of agg="constant", in tokens.
    """
    adv, _ = advantages(groups, loss)
    steered = loss.distill != 0 and loss.distill_form == "advantage"
    keep = {
        "policy": [[r is not None or (steered and g.taught) for r in g.rewards] for g in groups],
        "kl": [[True] * len(g.rewards) for g in groups],
        "distill": [[g.taught] * len(g.rewards) for g in groups],
    }
    weight = {term: _weights(groups, keep[term], loss, norm_length) for term in TERMS}
    return [
        [Lesson(adv=adv[p][i], weight={t: weight[t][p][i] for t in TERMS}) for i in range(len(g.n_tokens))]
        for p, g in enumerate(groups)
    ]


def _weights(
    groups: Sequence[Rated], keep: Sequence[Sequence[bool]], loss: Loss, norm_length: int
) -> list[list[float]]:
    n = torch.tensor(
        [[m * k for m, k in zip(g.n_tokens, ks, strict=True)] for g, ks in zip(groups, keep, strict=True)]
    )
    weight = row_weight(
        n.flatten(),
        agg=loss.agg,
        total_tokens=int(n.sum()),
        total_rows=int((n > 0).sum()),
        group_tokens=n.sum(1, keepdim=True).expand_as(n).flatten(),
        total_groups=int((n.sum(1) > 0).sum()),
        norm_length=norm_length,
    )
    return weight.view_as(n).tolist()
