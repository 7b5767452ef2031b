"""A rehearsal: gradients of made-up groups, so that a trainer has compiled what it will meet before it does.

Compiling takes seconds, and while the trainer stands still the bound on staleness stops the samplers. So
while the engines start every rank makes forward and backward of rows of all lengths that it may have,
multiples of a bucket, with all that the config brings. The first two rows differ in every length: from then
on the compiler takes them as variable. The second is the largest, so that what memory lacks shows here and
not hours later. Weights, moments and the version stay as they are, to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log
from statistics import median_low

import numpy as np
import torch

from models.replica import replica_of
from rl import adamw
from rl.batch import GroupData, GroupTokens, MicroBatch
from rl.config import Config
from rl.lessons import TERMS, Lesson
from rl.objective import Objective
from rl.packing import Place, bucket
from rl.step import TrainState, abandon, compiled_graphs, gradient
from rl.teaching import MIXED, MIXTURE, teachers_of
from rl.terms import diverges, has_term
from rl.types import Completion, Scores

Build = Callable[[Sequence[Place], Mapping[int, GroupData]], MicroBatch]


@dataclass(frozen=True, slots=True)
class Group:
    """A group, or some of its samples: tokens of its prompt and of each answer, and who teaches it."""

    prompt: int
    answers: tuple[int, ...]
    teachers: tuple[str, ...] = ()


Row = tuple[Group, ...]  # of a micro-batch
MEET = 3  # up to so many, any of the teachers meet in a row; of more all of them, or one alone


def rehearse(
    state: TrainState, objective: Objective, cfg: Config, build: Build, prompts: Sequence[int], vocab: int,
    beside: int = 0,
) -> tuple[int, float]:  # fmt: skip
    """Make the gradients of all `rows`; all ranks must. Returns how many graphs were compiled, and in how
    many seconds.

    prompts: lengths of the run's prompts, in tokens. beside: bytes on the device that a real step will find
    taken and this one does not, as the optimiser's moments. Raises RuntimeError naming the row that failed.
    """
    began, before = time.monotonic(), compiled_graphs()
    device, t = next(state.model.parameters()).device, cfg.trainer
    prompts = prompts or [cfg.sampler.max_tokens]
    several = t.stream or t.prompts * group_tokens(cfg, median_low(prompts)) > t.micro_tokens * t.ranks
    for i, row in enumerate(rows(cfg, prompts)):
        micro, largest = build(*made_up(cfg, row, vocab, state.version)), i == 1
        try:
            held = torch.empty(beside if largest else 0, dtype=torch.uint8, device=device)
            # of several micro-batches the sum of gradients is held too
            gradient(state, [micro, micro] if largest and several else [micro], objective)
        except RuntimeError as error:
            advice = "lower trainer.micro_tokens, raise trainer.gpus or set trainer.recompute: "
            raise RuntimeError(
                f"rehearsal: a micro-batch of {len(micro.ids)} tokens, {len(micro.target)} of them trained, "
                f"failed: {advice if isinstance(error, torch.OutOfMemoryError) else ''}{error}"
            ) from error
        del held
        abandon(state)
    if (replica := replica_of(state.model)) is not None:
        adamw.warm(state.optimizer, replica.working[0], t.ranks)
    return compiled_graphs() - before, time.monotonic() - began


def rows(cfg: Config, prompts: Sequence[int]) -> list[Row]:
    """Every multiple of the bucket up to the fullest row, and few of them for each way of sharing prompts and
    for whichever teachers (MEET) meet in a row."""
    t, answer = cfg.trainer, cfg.sampler.max_tokens
    size, samples = bucket(t.micro_tokens), cfg.sampler.samples if t.share_prompt else 1
    n_groups = -(-t.prompts // t.ranks) + (t.ranks > 1)  # of a rank, at most
    usual, most = median_low(prompts), min(t.micro_tokens, n_groups * group_tokens(cfg, max(prompts)))
    sizes = [most, *range(size, most, size)]
    few = sorted({min(sizes), sizes[len(sizes) // 2], most})
    teachers = teacher_sets(cfg)

    def row(tokens: int, by: Sequence[tuple[str, ...]] = teachers, samples: int = samples) -> Row:
        # More groups than a rank has would train more tokens than it ever does: then prompts are longer.
        own = n_groups * cfg.sampler.samples // samples
        return taught(fill(tokens, max(usual, tokens // own - samples * answer), answer, samples), by)

    def mostly(tokens: int, who: tuple[str, ...], by: Sequence[tuple[str, ...]]) -> Row:
        others = tuple(Group(1, (1,), them) for them in by if them != who)
        return (*row(tokens - n_tokens(others), [who]), *others)

    half = fill(max(2, min(sizes) // 2), -(-usual // 2), -(-answer // 2), samples)
    found = [taught(half, teachers), *map(row, sizes)]
    if t.share_prompt:  # of a group torn apart, or with one answer that counts, a row shares nothing
        found += [row(tokens, samples=1) for tokens in few]
    # whoever meets has a graph, and has another one where the tokens of one fill as many buckets as all
    n = len(teachers)
    for k in range(1, n + 1) if n <= MEET else (1, n):
        for by in combinations(teachers, k):
            found += [row(tokens, by) for tokens in few if k < n]
            found += [mostly(tokens, who, by) for who in by for tokens in few if k > 1]
    if t.ranks > 1 and cfg.uses_teachers:  # a rank may have nothing left, so none of them
        found.append(())
    return found


def group_tokens(cfg: Config, prompt: int) -> int:
    """Of a whole group, at most."""
    n = cfg.sampler.samples
    return n * cfg.sampler.max_tokens + prompt * (1 if cfg.trainer.share_prompt else n)


def teacher_sets(cfg: Config) -> list[tuple[str, ...]]:
    """Who teaches the prompts of a key, for each key; nobody, once, where there are no teachers."""
    keys = {key for teacher in cfg.teachers.values() for key in teacher.keys} | {""}
    return sorted({teachers_of(cfg, key) for key in keys if cfg.uses_teachers} - {()}) or [()]


def fill(tokens: int, prompt: int, answer: int, samples: int) -> Row:
    """Groups of so many samples, and of `tokens` tokens together, or one less; the last may be shorter."""
    groups: list[Group] = []
    while tokens > 1:
        asked = min(prompt, tokens - 1)
        new = min(tokens - asked, samples * answer)
        n = min(samples, new)
        groups.append(Group(asked, tuple(new // n + (i < new % n) for i in range(n))))
        tokens -= asked + new
    return tuple(groups)


def taught(row: Row, by: Sequence[tuple[str, ...]]) -> Row:
    """Its groups, by these in turn."""
    return tuple(replace(group, teachers=by[i % len(by)]) for i, group in enumerate(row))


def n_tokens(row: Row) -> int:
    return sum(group.prompt + sum(group.answers) for group in row)


def made_up(cfg: Config, row: Row, vocab: int, version: int) -> tuple[list[Place], dict[int, GroupData]]:
    """All samples of groups of these lengths, and all that samplers, teachers and the reference send."""
    loss = cfg.loss

    def sent(n: int, by: str = "") -> Scores:
        logps, k = np.full(n, -1.0, np.float32), loss.distill_top_k
        if not (by and diverges(cfg) and has_term(loss, by)):
            return Scores(logps=logps)
        rows = np.broadcast_to(np.float32(-log(vocab)), (n, k or vocab))  # one number: no memory
        if not k:
            return Scores(logps=logps, full=rows)
        ids = np.broadcast_to(np.arange(k, dtype=np.int32), (n, k))
        return Scores(logps=logps, top_ids=ids, top_logps=rows)

    def group(of: Group) -> GroupData:
        names = (MIXTURE, *of.teachers) if of.teachers and loss.distill_mix in MIXED else of.teachers
        samples = tuple(
            Completion(tokens=np.zeros(n, np.int32), logps=np.full(n, -1.0, np.float32),
                       versions=np.full(n, version, np.int32), finish="length")
            for n in of.answers
        )  # fmt: skip
        lesson = Lesson(adv=1.0, weight=dict.fromkeys(TERMS, 1.0), distill=dict.fromkeys(names, 1.0))
        return GroupData(
            tokens=GroupTokens(np.zeros(of.prompt, np.int32), samples),
            lessons=[lesson] * len(samples),
            teachers={name: [sent(n, name) for n in of.answers] for name in names},
            reference=[sent(n) for n in of.answers] if cfg.uses_reference else None,
        )

    places = [(g, s) for g, of in enumerate(row) for s in range(len(of.answers))]
    return places, {g: group(of) for g, of in enumerate(row)}
