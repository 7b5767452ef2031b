"""From rewards to what every sample teaches: its advantage, and its weight in each term of the loss.

This is the one place where anything is averaged: weights come from the counts of the whole optimiser step,
so that micro-batches and ranks only ever add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

import torch

from losses import row_weight
from rl import forms
from rl.config import Loss
from rl.teaching import MIXED, MIXTURE

TERMS = ("policy", "kl")
# loss.agg → what it divides by that only the whole step knows.
DIVISOR = {
    "token_mean": "total_tokens", "seq_mean_token_sum": "total_rows", "seq_mean_token_mean": "total_rows",
    "constant": "total_rows", "prompt_mean": "total_groups",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One sample. `weight[term]` is that of each of its tokens; 0 where the sample takes no part in the
    term. `distill[teacher]` likewise, of the teachers that it has, or of their MIXTURE."""

    adv: float
    weight: Mapping[str, float]
    distill: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """One group: lengths and rewards of its G samples. A missing reward is None, never a number."""

    n_tokens: tuple[int, ...]
    rewards: tuple[float | None, ...]
    noise: tuple[float, ...] = ()  # variance of each reward as a measurement; none: they are exact
    teachers: tuple[str, ...] = ()  # of its prompt
    weight: float = 1.0  # of its prompt: a factor of each term, which leaves the counts as they are


def advantages(groups: Sequence[Rated], loss: Loss) -> tuple[list[list[float]], list[bool]]:
    """Advantage of every sample [P][G] and whether each group has any signal [P]."""
    reward = torch.tensor([[0.0 if r is None else r for r in g.rewards] for g in groups], dtype=torch.float64)
    valid = torch.tensor([[r is not None for r in g.rewards] for g in groups])
    n_tokens = torch.tensor([g.n_tokens for g in groups])
    noise = torch.tensor([g.noise or (0.0,) * len(g.rewards) for g in groups], dtype=torch.float64)
    adv, aux = forms.advantage(loss, reward, valid, n_tokens, noise)
    return adv.tolist(), aux["signal"].tolist()


def make_lessons(
    groups: Sequence[Rated],
    loss: Loss,
    *,
    norm_length: int,
    teachers: Mapping[str, float] | None = None,
    counted: bool = True,
) -> list[list[Lesson]]:
    """Lessons [P][G] of the groups of one optimiser step.

    Counted in the policy term: samples with a reward (a group without signal counts, with advantage 0),
    and taught ones where the teacher acts through the advantage; in kl: all. Distillation, with the weights
    w_k of `teachers`, the mean by loss.agg, and D_k the divergence from teacher k:

    routed, sum            Σ_k w_k mean_k(D_k) / Σ_k w_k    mean_k over the tokens that k taught: what one
                                                            teacher is asked changes nothing for the others
    arithmetic, geometric  mean(D), D from the mixture of the prompt's teachers, over all taught tokens

    Σ_k w_k is over all teachers of the run, also one that no prompt of this step has.
    `norm_length`: the L of agg="constant", in tokens. `counted`: whether these are all groups of the step; if
    not, every weight is still to be divided by the step's `count`. Raises ValueError for a teacher without
    weight.
    """
    adv, _ = advantages(groups, loss)
    keep = {"policy": _in_policy(groups, loss), "kl": [[True] * len(g.rewards) for g in groups]}
    weight = {term: _weights(groups, keep[term], loss, norm_length, counted) for term in TERMS}
    distill = _distill(groups, loss, norm_length, teachers or {}, counted)
    return [
        [
            Lesson(
                adv=adv[p][i],
                weight={t: g.weight * weight[t][p][i] for t in TERMS},
                distill={
                    k: g.weight * w[p][i] for k, w in distill.items() if k in g.teachers or k == MIXTURE
                },
            )
            for i in range(len(g.n_tokens))
        ]
        for p, g in enumerate(groups)
    ]


def count(groups: Sequence[Rated], loss: Loss) -> int:
    """The divisor that weights made with counted=False lack: tokens, samples or groups of the whole step, by
    loss.agg, in its one term, which is the policy's or else the distillation's."""
    taught = [[bool(g.teachers)] * len(g.rewards) for g in groups]
    keep = _in_policy(groups, loss) if loss.policy else taught
    return _totals(_n_kept(groups, keep))[DIVISOR[loss.agg]]


def _in_policy(groups: Sequence[Rated], loss: Loss) -> list[list[bool]]:
    steered = loss.distill != 0 and loss.distill_form == "advantage"
    return [[r is not None or (steered and bool(g.teachers)) for r in g.rewards] for g in groups]


def _distill(
    groups: Sequence[Rated], loss: Loss, norm_length: int, teachers: Mapping[str, float], counted: bool
) -> dict[str, list[list[float]]]:
    """Teacher, or MIXTURE → weight [P][G] of each of the samples' tokens."""
    asked = {name for g in groups for name in g.teachers}
    if asked - teachers.keys():
        raise ValueError(f"make_lessons: {sorted(asked - teachers.keys())} have no weight in {teachers}")

    def mean(names: set[str]) -> list[list[float]]:
        keep = [[not names.isdisjoint(g.teachers)] * len(g.rewards) for g in groups]
        return _weights(groups, keep, loss, norm_length, counted)

    if loss.distill_mix in MIXED:
        return {MIXTURE: mean(asked)} if asked else {}
    total = fsum(teachers.values())
    return {
        name: [[teachers[name] / total * w for w in row] for row in mean({name})] for name in sorted(asked)
    }


def _weights(
    groups: Sequence[Rated], keep: Sequence[Sequence[bool]], loss: Loss, norm_length: int, counted: bool
) -> list[list[float]]:
    n = _n_kept(groups, keep)
    weight = row_weight(
        n.flatten(),
        agg=loss.agg,
        group_tokens=n.sum(1, keepdim=True).expand_as(n).flatten(),
        norm_length=norm_length,
        **(_totals(n) if counted else dict.fromkeys(DIVISOR.values(), 1)),
    )
    return weight.view_as(n).tolist()


def _n_kept(groups: Sequence[Rated], keep: Sequence[Sequence[bool]]) -> torch.Tensor:
    """[P, G] tokens of the samples that are kept, 0 of the others."""
    return torch.tensor(
        [[m * k for m, k in zip(g.n_tokens, ks, strict=True)] for g, ks in zip(groups, keep, strict=True)]
    )


def _totals(n: torch.Tensor) -> dict[str, int]:
    return {
        "total_tokens": int(n.sum()),
        "total_rows": int((n > 0).sum()),
        "total_groups": int((n.sum(1) > 0).sum()),
    }
