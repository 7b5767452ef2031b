"""From sampled groups to packed tensors: one axis [T] of tokens in, one axis [M] of trained tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from losses import mix_sampled, mix_teachers
from models.layout import Layout, make_layout, to_device
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
    """What one teacher says of the R tokens that it was asked about, of the M that are trained.

    R may hold padding, and is M only where `at` is 0 … M - 1.
    """

    at: Tensor  # [R] int64, index into M, ascending
    mask: Tensor  # [R] bool, False in padding
    weight: Tensor  # [R] float32, of each token in the distillation; 0 where it is only reported
    logp: Tensor  # [R] of the token itself
    rows: Tensor | None  # [R, V] over the vocabulary, or [R, K] of the teacher's best
    ids: Tensor | None  # [R, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """T packed tokens and M predictions that are trained; both may end in padding, masked and of weight 0."""

    ids: Tensor  # [T] int64
    layout: Layout
    select: Tensor  # [M] index into T of the hidden state that predicts each trained token; may repeat
    target: Tensor  # [M] int64
    row: Tensor  # [M] int64, the sample of each trained token
    n_rows: int  # above every `row`
    logp_mu: Tensor  # [M] under the sampler
    version: Tensor  # [M] that sampled it
    current: Tensor  # scalar: the version that is about to take its step
    adv: Tensor  # [M]
    weight: Mapping[str, Tensor]  # term → [M] float32
    mask: Mapping[str, Tensor]  # term → [M] bool, where weight > 0
    logp_ref: Tensor | None  # [M] under the frozen reference
    teachers: Mapping[str, Taught]  # by name, sorted; those that taught none of the tokens are left out


def build_micro(
    places: Sequence[Place],
    groups: Mapping[int, GroupData],
    device: torch.device,
    *,
    current: int,
    bucket: int = 1,
    share_prompt: bool = False,
) -> MicroBatch:
    """The tensors of one micro-batch: sample s of group g for each (g, s).

    bucket: T and M are filled up to multiples of it, so that compiled code meets few shapes.
    share_prompt: samples of a group that stand side by side have one prompt in the row, before their answers.
    Without any place it holds tokens that are not trained, so that every rank makes the same passes. A sample
    without tokens takes none.
    Raises ValueError where the sampler, a teacher or the reference sent other than one value a token.
    """
    places = [(g, s) for g, s in places if len(groups[g].tokens.samples[s].tokens)]
    data = [groups[g] for g, _ in places]
    samples = [d.tokens.samples[s] for d, (_, s) in zip(data, places, strict=True)]
    lessons = [d.lessons[s] for d, (_, s) in zip(data, places, strict=True)]
    n_new = [len(s.tokens) for s in samples]
    ids, select, lengths, after = _pack(places, groups, share_prompt)
    _check_lengths([s.logps for s in samples], n_new, "the sampler")
    _check_lengths([s.versions for s in samples], n_new, "the sampler")
    n_tokens, n_trained = _fill(sum(lengths), bucket), _fill(sum(n_new), bucket)

    def column(rows: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:  # [M]
        return _column(rows, dtype, n_trained, device)

    def spread(values: Sequence[float]) -> Tensor:  # one value a sample → one a trained token
        return column([np.repeat(np.asarray(values, np.float64), n_new)], torch.float32)

    def reference() -> Tensor | None:
        if any(d.reference is None for d in groups.values()):
            return None
        said = [(d.reference or ())[s].logps for d, (_, s) in zip(data, places, strict=True)]
        _check_lengths(said, n_new, "the reference")
        return column(said, torch.float32)

    starts = np.cumsum([0, *n_new])

    def taught(name: str) -> Taught:
        mine = [i for i, d in enumerate(data) if name in d.teachers]
        said = [data[i].teachers[name][places[i][1]] for i in mine]
        at = np.concatenate([starts[i] + np.arange(n_new[i]) for i in mine])
        size = _fill(len(at), bucket)
        # As many as are trained must be those that are trained: then nothing needs to be gathered.
        slots = at if size == n_trained else np.arange(len(at))

        def asked(rows: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:  # [R]
            return _column(rows, dtype, size, device, slots)

        def scores(of: str, dtype: torch.dtype) -> Tensor | None:
            rows = [getattr(score, of) for score in said]
            if any(row is None for row in rows):
                return None
            _check_lengths(rows, [n_new[i] for i in mine], f"teacher {name}")
            return asked(rows, dtype)

        ids, logp = scores("top_ids", torch.int64), scores("logps", torch.float32)
        assert logp is not None
        return Taught(
            at=torch.arange(size, device=device) if size == n_trained else asked([at], torch.int64),
            mask=asked([np.ones(len(at))], torch.bool),
            weight=asked([np.full(n_new[i], lessons[i].distill.get(name, 0.0)) for i in mine], torch.float32),
            logp=logp,
            rows=scores("full" if ids is None else "top_logps", torch.float32),
            ids=ids,
        )

    weight = {t: spread([lesson.weight[t] for lesson in lessons]) for t in TERMS}
    return MicroBatch(
        ids=_column(ids, torch.int64, n_tokens, device),
        # Of an empty row two segments: for one, or for single tokens, the compiler makes a graph of its own.
        layout=make_layout(lengths or [max(1, bucket // 2)], device, after=after or None, total=n_tokens),
        select=column(select, torch.int64),
        target=column([s.tokens for s in samples], torch.int64),
        row=column([np.repeat(np.arange(len(samples)), n_new)], torch.int64),
        n_rows=max(n_trained, len(samples)),  # not the exact number: compiled code would meet many
        logp_mu=column([s.logps for s in samples], torch.float32),
        version=column([s.versions for s in samples], torch.int64),
        current=torch.full((), current, device=device),  # filled there: nothing is copied
        adv=spread([lesson.adv for lesson in lessons]),
        weight=weight,
        mask={t: w > 0 for t, w in weight.items()},
        logp_ref=reference(),
        teachers={name: taught(name) for name in sorted({name for d in data for name in d.teachers})},
    )


def _pack(
    places: Sequence[Place], groups: Mapping[int, GroupData], share_prompt: bool
) -> tuple[list[np.ndarray], list[np.ndarray], list[int], list[int | None]]:
    """Ids of the row, for each sample the indices of the states that predict its answer, and the segments of
    the row: their lengths and what they continue."""
    ids: list[np.ndarray] = []
    select: list[np.ndarray] = []
    lengths: list[int] = []
    after: list[int | None] = []
    used = 0
    for _, run in groupby(places, key=lambda place: place[0] if share_prompt else place):
        taken = list(run)
        tokens = groups[taken[0][0]].tokens
        answers = [tokens.samples[s].tokens for _, s in taken]
        ids += [tokens.prompt_ids, *answers]
        if len(answers) == 1:
            lengths.append(len(tokens.prompt_ids) + len(answers[0]))
            after.append(None)
        else:
            prompt = len(lengths)
            lengths += [len(tokens.prompt_ids), *map(len, answers)]
            after += [None, *[prompt] * len(answers)]
        # The state at position t predicts token t + 1: the answer's first token is predicted by the prompt's
        # last, the others by the token before.
        last = used + len(tokens.prompt_ids) - 1
        used = last + 1
        for answer in answers:
            select.append(np.r_[last, used : used + len(answer) - 1][: len(answer)])
            used += len(answer)
    return ids, select, lengths, after


def _column(
    rows: Sequence[np.ndarray],
    dtype: torch.dtype,
    size: int,
    device: torch.device,
    slots: np.ndarray | None = None,
) -> Tensor:
    """Rows end to end, followed by zeros up to `size`; or the values at their slots, and zeros elsewhere."""
    joined = torch.as_tensor(np.concatenate(rows) if rows else np.zeros(0))
    out = torch.zeros(size, *joined.shape[1:], dtype=dtype)
    out[np.arange(len(joined)) if slots is None else slots] = joined.to(dtype)
    return to_device(out, device)


def _fill(n: int, bucket: int) -> int:
    """The multiple of `bucket` that holds n, at least one."""
    return max(1, -(-n // bucket)) * bucket


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
