"""From sampled groups to packed tensors: one axis [T] of tokens in, one axis [M] of trained tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.attention import Layout, make_layout
from rl.lessons import TERMS, Lesson
from rl.packing import Place
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
    teacher: Sequence[Scores] | None = None
    reference: Sequence[Scores] | None = None


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
    teacher_logp: Tensor | None  # [M] of the token, [M, K] of the teacher's best, or [M, V]
    teacher_ids: Tensor | None  # [M, K]


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

    def scores(which: str, field: str, dtype: torch.dtype) -> Tensor | None:
        said = [getattr(d, which) for d in groups.values()]
        known = next((getattr(s[0], field) for s in said if s), None)
        if known is None:
            return None
        rows = [
            np.zeros((n, *known.shape[1:]), known.dtype)
            if getattr(d, which) is None  # masked: it has no teacher
            else _same_length(getattr(getattr(d, which)[s], field), n, which)
            for d, (_, s), n in zip(data, places, n_new, strict=True)
        ]
        return tensor(rows, dtype, (0, *known.shape[1:]))

    weight = {t: spread([lesson.weight[t] for lesson in lessons]) for t in TERMS}
    teacher_ids = scores("teacher", "top_ids", torch.int64)
    teacher_logp = scores("teacher", "top_logps" if teacher_ids is not None else "full", torch.float32)
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
        logp_ref=scores("reference", "logps", torch.float32),
        teacher_logp=scores("teacher", "logps", torch.float32) if teacher_logp is None else teacher_logp,
        teacher_ids=teacher_ids,
    )


def _same_length(values: np.ndarray, n: int, which: str) -> np.ndarray:
    if len(values) != n:
        raise ValueError(f"build_micro: a sample has {n} tokens but its {which} sent {len(values)} values")
    return values
