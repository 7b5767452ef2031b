"""A rehearsal: gradients of made-up groups, so that a trainer has compiled what it will meet before it does.

Compiling takes seconds, and while the trainer stands still the bound on staleness stops the samplers. So
while the engines start every rank makes forward and backward at all lengths that its rows can have, multiples
of a bucket, with all that the config brings. The first two micro-batches differ in every length: from then on
the compiler takes them as variable. The second is the largest, so that what memory lacks shows here and not
hours later. Weights, moments and the version stay as they are, to the bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
import torch
from torch import Tensor

from models.checksum import has_triton
from models.replica import replica_of
from rl import adamw
from rl.batch import GroupData, GroupTokens, MicroBatch
from rl.config import Config
from rl.lessons import TERMS, Lesson
from rl.objective import Objective
from rl.packing import Place, bucket
from rl.step import TrainState, abandon, compiled_graphs, gradient
from rl.teaching import MIXED, MIXTURE, teachers_of
from rl.types import Completion, Scores

Build = Callable[[Sequence[Place], Mapping[int, GroupData]], MicroBatch]


@dataclass(frozen=True, slots=True)
class Part:
    """A group, or some of its samples: how many tokens its prompt and its answers have, and who teaches."""

    prompt: int
    answers: tuple[int, ...]
    teachers: tuple[str, ...] = ()


Scene = tuple[Part, ...]  # a micro-batch


def rehearse(
    state: TrainState, objective: Objective, cfg: Config, build: Build, prompts: Sequence[int], vocab: int,
    beside: int = 0,
) -> tuple[int, float]:  # fmt: skip
    """Play all scenes; all ranks must. Returns how many graphs were compiled, and in how many seconds.

    prompts: lengths of the run's prompts, in tokens. beside: bytes on the device that a real step will find
    taken and this one does not, as the optimiser's moments. Raises RuntimeError naming the micro-batch that
    failed.
    """
    began, before = time.monotonic(), compiled_graphs()
    device = next(state.model.parameters()).device
    played = scenes(cfg, prompts)
    largest = max(played, key=n_tokens)
    several = _several(cfg, median_low(prompts)) if prompts else cfg.trainer.stream
    for scene in played:
        micro = build(_places(scene), made_up(cfg, scene, vocab, state.version))
        full = scene is largest
        try:
            held = torch.empty(beside if full else 0, dtype=torch.uint8, device=device)
            gradient(state, [micro, micro] if full and several else [micro], objective)
        except RuntimeError as error:
            advice = "lower trainer.micro_tokens, raise trainer.gpus or set trainer.recompute: "
            raise RuntimeError(
                f"rehearsal: a micro-batch of {len(micro.ids)} tokens, {len(micro.target)} of them trained, "
                f"failed: {advice if isinstance(error, torch.OutOfMemoryError) else ''}{error}"
            ) from error
        del held
        abandon(state)
    warm_optimizer(state, cfg.trainer.ranks)
    return compiled_graphs() - before, time.monotonic() - began


def scenes(cfg: Config, prompts: Sequence[int]) -> list[Scene]:
    """What a rank may have in a row: every multiple of the bucket up to the largest, each way of sharing
    prompts, and each cast of teachers."""
    t, s, answer = cfg.trainer, cfg.sampler, cfg.sampler.max_tokens
    size, per = bucket(t.micro_tokens), s.samples if t.share_prompt else 1
    room = max(1, t.micro_tokens - answer)  # a longer prompt fits into no row
    known = [min(n, room) for n in prompts] or [min(answer, room)]
    short, usual, most = min(known), median_low(known), _most(cfg, max(known))
    sizes = [*range(size, most, size), most]
    all_casts = casts(cfg)
    ensemble = all_casts[0]

    def row(tokens: int, who: Sequence[tuple[str, ...]] = ensemble, *, per: int = per) -> Scene:
        # More prompts than a rank gets would train more tokens than it ever does: then they are longer.
        own = (-(-t.prompts // t.ranks) + (t.ranks > 1)) * (s.samples // per)
        return cast(fill(tokens, max(usual, tokens // own - per * answer), answer, per), who)

    first = fill(max(2, sizes[0] // 2), short, -(-answer // 2), per)
    played = [cast(first, ensemble), row(most)]
    if t.share_prompt:  # of a group torn apart, or with one answer that counts, a row shares nothing
        played += [row(sizes[0], per=1), row(most, per=1)]
    played += [row(tokens) for tokens in sizes[-2::-1]]
    few = sorted({sizes[0], sizes[len(sizes) // 2], most})
    for who in all_casts[1:]:
        played += [row(tokens, who) for tokens in few]
    if len(ensemble) > 1:
        played += [_led(row(tokens, [who]), ensemble, size) for who in ensemble for tokens in few[:2]]
    return [*played, ()] if t.ranks > 1 else played  # a rank may have nothing left


def _group(cfg: Config, prompt: int) -> int:
    """Tokens of a whole group, at most."""
    s = cfg.sampler
    return s.samples * s.max_tokens + prompt * (1 if cfg.trainer.share_prompt else s.samples)


def _most(cfg: Config, prompt: int) -> int:
    """Tokens of the fullest row: the most loaded rank has the mean and one group more, at most."""
    t, group = cfg.trainer, _group(cfg, prompt)
    return min(t.micro_tokens, -(-t.prompts * group // t.ranks) + (group if t.ranks > 1 else 0))


def _several(cfg: Config, prompt: int) -> bool:
    """Whether full steps have more than one micro-batch: then sums of gradients are held too."""
    t = cfg.trainer
    return t.stream or t.prompts * _group(cfg, prompt) > t.micro_tokens * t.ranks


def fill(tokens: int, prompt: int, answer: int, per: int) -> Scene:
    """Parts of `per` answers and of `tokens` tokens together, or one less; the last may be shorter."""
    parts: list[Part] = []
    while tokens > 1:
        asked = min(prompt, tokens - 1)
        left = min(tokens - asked, per * answer)
        n = min(per, left)
        parts.append(Part(asked, tuple(left // n + (i < left % n) for i in range(n))))
        tokens -= asked + left
    return tuple(parts)


def casts(cfg: Config) -> list[list[tuple[str, ...]]]:
    """Who may teach in a row: those that a key's prompts have, of all keys; and of each key alone."""
    if not cfg.uses_teachers:
        return [[()]]
    keys = sorted({key for teacher in cfg.teachers.values() for key in teacher.keys} | {""})
    found = sorted({names for key in keys if (names := teachers_of(cfg, key))})
    return [found, *([names] for names in found if len(found) > 1)]


def cast(parts: Scene, who: Sequence[tuple[str, ...]]) -> Scene:
    return tuple(Part(p.prompt, p.answers, who[i % len(who)]) for i, p in enumerate(parts))


def _led(scene: Scene, ensemble: Sequence[tuple[str, ...]], size: int) -> Scene:
    """With one token from each of the others: the leader's tokens fill as many buckets as all."""
    others = tuple(Part(1, (1,), who) for who in ensemble if who != scene[0].teachers)
    taught = sum(sum(part.answers) for part in scene)
    more = (Part(1, (len(others),), scene[0].teachers),) if -taught % size < len(others) else ()
    return (*scene, *more, *others)


def n_tokens(scene: Scene) -> int:
    return sum(part.prompt + sum(part.answers) for part in scene)


def _places(scene: Scene) -> list[Place]:
    return [(g, s) for g, part in enumerate(scene) for s in range(len(part.answers))]


def made_up(cfg: Config, scene: Scene, vocab: int, version: int) -> dict[int, GroupData]:
    """Groups of these lengths, with all that samplers, teachers and the reference send."""

    def group(part: Part) -> GroupData:
        names = (MIXTURE,) * (cfg.loss.distill_mix in MIXED and bool(part.teachers)) + part.teachers
        samples = tuple(
            Completion(tokens=np.zeros(n, np.int32), logps=np.full(n, -1.0, np.float32),
                       versions=np.full(n, version, np.int32), finish="length")
            for n in part.answers
        )  # fmt: skip
        lesson = Lesson(adv=1.0, weight=dict.fromkeys(TERMS, 1.0), distill=dict.fromkeys(names, 1.0))
        return GroupData(
            tokens=GroupTokens(np.zeros(part.prompt, np.int32), samples),
            lessons=[lesson] * len(samples),
            teachers={name: [_said(cfg, name, n, vocab) for n in part.answers] for name in names},
            reference=[_logps(n) for n in part.answers] if cfg.uses_reference else None,
        )

    return {g: group(part) for g, part in enumerate(scene)}


def _said(cfg: Config, name: str, n: int, vocab: int) -> Scores:
    """What a teacher sends of n tokens, or what comes of several that are mixed."""
    loss = cfg.loss
    if loss.distill_form != "divergence" or (loss.distill_mix in MIXED and name != MIXTURE):
        return _logps(n)
    k = loss.distill_top_k or vocab
    rows = np.broadcast_to(np.float32(-math.log(vocab)), (n, k))  # of one number: no memory yet
    if not loss.distill_top_k:
        return Scores(logps=_logps(n).logps, full=rows)
    ids = np.broadcast_to(np.arange(k, dtype=np.int32), (n, k))
    return Scores(logps=_logps(n).logps, top_ids=ids, top_logps=rows)


def _logps(n: int) -> Scores:
    return Scores(logps=np.full(n, -1.0, np.float32))


@torch.no_grad()
def warm_optimizer(state: TrainState, ranks: int) -> None:
    """Compile the kernels of rl/adamw.py for each kind of gradient, of one micro-batch or sums of several,
    one or as many as ranks, of any alignment: on tensors of their own."""
    replica, optimizer = replica_of(state.model), state.optimizer
    if replica is None:
        return
    device, dtype = replica.working[0].device, replica.working[0].dtype
    triton = has_triton(device)
    norms, step = (adamw.norms_triton, adamw.step_triton) if triton else (adamw.norms_torch, adamw.step_torch)
    (group,) = optimizer.param_groups

    def zeros(size: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=of, device=device)

    for size in (adamw.BLOCK, adamw.BLOCK - 1):
        for n, of in sorted({(n, of) for n in (1, ranks) for of in (dtype, torch.float32)}, key=str):
            grads = tuple(zeros(size, of) for _ in range(n))
            slot = adamw.Slot(zeros(size), zeros(size), zeros(size), zeros(size, dtype), grads)
            norms([grads])
            step([slot], torch.ones(4, device=device), group["betas"], group["eps"])
