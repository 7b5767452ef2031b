"""From sampled groups to packed tensors: one axis [T] of tokens in, one axis [M] of trained tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from losses import mix_sampled, mix_teachers
from models.attention import Layout, make_layout
from rl.lessons import TERMS, Lesson
from rl.packing import Place
from rl.teaching import MIXED, MIXTURE
from rl.types import Completion, Scores


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """What the sampler puts into the object store for one group."""

    prompt_ids: np.ndarray  # [P] int32
    samples: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupData:
    """All that a trainer rank needs of one group: its tokens, what each teaches, and what teachers said
    (per sample)."""

    tokens: GroupTokens
    lessons: Sequence[Lesson]
    teachers: Mapping[str, Sequence[Scores]] = field(default_factory=dict)  # as `combine` gives them
    reference: Sequence[Scores] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What one teacher says of the R tokens that it was asked about, of the M that are trained."""

    at: Tensor  # [R] int64, index into M, ascending
    weight: Tensor  # [R] float32, of each token in the distillation; 0 where it is only reported
    logp: Tensor  # [R] of the token itself
    rows: Tensor | None  # [R, V] over the vocabulary, or [R, K] of the teacher's best
    ids: Tensor | None  # [R, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """T packed tokens in S sequences, of which M are predictions that are trained."""

    ids: Tensor  # [T] int64
    layout: Layout
    select: Tensor  # [M] index into T of the hidden state that predicts each trained token
    target: Tensor  # [M] int64
    row: Tensor  # [M] int64, the sequence of each trained token
    n_rows: int
    logp_mu: Tensor  # [M] under the sampler
    version: Tensor  # [M] that sampled it
    current: Tensor  # scalar: the version that is about to take its step
    adv: Tensor  # [M]
    weight: Mapping[str, Tensor]  # term → [M] float32
    mask: Mapping[str, Tensor]  # term → [M] bool, where weight > 0
    logp_ref: Tensor | None  # [M] under the frozen reference
    teachers: Mapping[str, Taught]  # by name, sorted; those that taught none of the tokens are left out


def build_micro(
    places: Sequence[Place], groups: Mapping[int, GroupData], device: torch.device, *, current: int
) -> MicroBatch:
    """The tensors of one micro-batch: sample s of group g for each (g, s).

    Without any place it holds a single token that is not trained, so that every rank makes the same passes.
    Raises ValueError where a teacher's or reference's length is not the sample's.
    """
    data = [groups[g] for g, _ in places]
    samples = [d.tokens.samples[s] for d, (_, s) in zip(data, places, strict=True)]
    lessons = [d.lessons[s] for d, (_, s) in zip(data, places, strict=True)]
    prompt = [len(d.tokens.prompt_ids) for d in data]
    n_new = [len(s.tokens) for s in samples]
    ids = [np.concatenate([d.tokens.prompt_ids, s.tokens]) for d, s in zip(data, samples, strict=True)]
    lengths = [len(i) for i in ids] or [1]
    offsets = np.cumsum([0, *lengths[:-1]])

    def tensor(rows: Sequence[np.ndarray], dtype: torch.dtype, shape: tuple[int, ...] = (0,)) -> Tensor:
        joined = np.concatenate(rows) if rows else np.zeros(shape)
        return torch.as_tensor(joined).to(device=device, dtype=dtype)

    def spread(values: Sequence[float]) -> Tensor:  # one value a sample → one a trained token
        return tensor([np.repeat(np.asarray(values, np.float64), n_new)], torch.float32)

    def reference() -> Tensor | None:
        if any(d.reference is None for d in groups.values()):
            return None
        said = [(d.reference or ())[s].logps for d, (_, s) in zip(data, places, strict=True)]
        _check_lengths(said, n_new, "the reference")
        return tensor(said, torch.float32)

    starts = np.cumsum([0, *n_new])

    def taught(name: str) -> Taught:
        mine = [i for i, d in enumerate(data) if name in d.teachers]
        said = [data[i].teachers[name][places[i][1]] for i in mine]

        def column(of: str, dtype: torch.dtype) -> Tensor | None:
            rows = [getattr(scores, of) for scores in said]
            if any(row is None for row in rows):
                return None
            _check_lengths(rows, [n_new[i] for i in mine], f"teacher {name}")
            return tensor(rows, dtype)

        weight = [np.full(n_new[i], lessons[i].distill.get(name, 0.0)) for i in mine]
        ids, logp = column("top_ids", torch.int64), column("logps", torch.float32)
        assert logp is not None
        return Taught(
            at=tensor([starts[i] + np.arange(n_new[i]) for i in mine], torch.int64),
            weight=tensor(weight, torch.float32),
            logp=logp,
            rows=column("full" if ids is None else "top_logps", torch.float32),
            ids=ids,
        )

    weight = {t: spread([lesson.weight[t] for lesson in lessons]) for t in TERMS}
    return MicroBatch(
        ids=tensor(ids, torch.int64) if ids else torch.zeros(1, dtype=torch.int64, device=device),
        layout=make_layout(lengths, device),
        # The state at position t predicts token t + 1: the answer's first token is predicted by the
        # prompt's last.
        select=tensor(
            [o + p - 1 + np.arange(n) for o, p, n in zip(offsets, prompt, n_new, strict=False)], torch.int64
        ),
        target=tensor([s.tokens for s in samples], torch.int64),
        row=tensor([np.repeat(np.arange(len(samples)), n_new)], torch.int64),
        n_rows=len(lengths),
        logp_mu=tensor([s.logps for s in samples], torch.float32),
        version=tensor([s.versions for s in samples], torch.int64),
        current=torch.tensor(current, device=device),
        adv=spread([lesson.adv for lesson in lessons]),
        weight=weight,
        mask={t: w > 0 for t, w in weight.items()},
        logp_ref=reference(),
        teachers={name: taught(name) for name in sorted({name for d in data for name in d.teachers})},
    )


def _check_lengths(rows: Sequence[np.ndarray], n_tokens: Sequence[int], who: str) -> None:
    for row, n in zip(rows, n_tokens, strict=True):
        if len(row) != n:
            raise ValueError(f"build_micro: a sample has {n} tokens but {who} sent {len(row)} values")


def combine(
    mix: str, weight: Mapping[str, float], said: Mapping[str, Sequence[Scores]]
) -> Mapping[str, Sequence[Scores]]:
    """What the trainer takes from the teachers of one group, per sample: each alone (routed, sum), or their
    MIXTURE, an arithmetic or geometric one, and each teacher's log-probs of the tokens to report.

    weight: teacher → share in the mixture, brought to sum 1 over the teachers of this group.
    """
    if mix not in MIXED or not said:
        return said
    names = sorted(said)
    share = [weight[name] for name in names]
    mixed = [_mixed(mix, share, told) for told in zip(*(said[name] for name in names), strict=True)]
    return {MIXTURE: mixed, **{name: [Scores(logps=s.logps) for s in said[name]] for name in names}}


def _mixed(mix: Any, share: Sequence[float], told: Sequence[Scores]) -> Scores:
    """The mixture's log-probs of one sample. Of sampled tokens the geometric one lacks its normaliser."""

    def stack(rows: Sequence[np.ndarray]) -> Tensor:
        if len({row.shape for row in rows}) > 1:
            raise ValueError(f"combine: teachers sent {[row.shape for row in rows]} values for one sample")
        return torch.from_numpy(np.stack(rows))

    whole = [s.full for s in told if s.full is not None]
    full = mix_teachers(stack(whole), share, kind=mix).numpy() if whole else None
    return Scores(logps=mix_sampled(stack([s.logps for s in told]), share, kind=mix).numpy(), full=full)
