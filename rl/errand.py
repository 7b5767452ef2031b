"""One optimiser step, or a part of it, as it travels: ready groups → what each rank is handed → what it
unpacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl import lessons, packing, teaching
from rl.batch import GroupData, combine
from rl.config import Config
from rl.follow import Group
from rl.lessons import Lesson
from rl.packing import Cost, Micro


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What one rank does. The groups' arrays follow as arguments of their own, which is how Ray moves them
    from their makers to the rank without the controller."""

    groups: tuple[int, ...]  # of the batch, or its part
    micros: tuple[Micro, ...]
    lessons: tuple[Sequence[Lesson], ...]  # of its groups
    teachers: tuple[tuple[str, ...], ...]  # of each group, in the order of their arrays
    has_reference: bool
    last: bool = True  # of the step


def pack(
    cfg: Config, groups: Sequence[Group], cost: Cost = packing.n_tokens, *, last: bool = True
) -> list[list[Any]]:
    """For each rank its errand, then references to the arrays of its groups.

    cost: see rl/packing.py. last: no other part of the step follows. With trainer.stream the lessons are not
    counted, see rl/lessons.py.
    """
    prompts = [len(g.prompt.ids) for g in groups]
    lengths = [[p + m.n_tokens for m in g.metas] for p, g in zip(prompts, groups, strict=True)]
    how = {"prompts": prompts, "cost": cost, "share_prompt": cfg.trainer.share_prompt}
    owners = packing.plan_ranks(lengths, cfg.trainer.ranks, **how)
    micros = packing.plan_micros(lengths, owners, cfg.trainer.micro_tokens, **how)
    taught = lessons.make_lessons(
        [g.rated for g in groups],
        cfg.loss,
        norm_length=cfg.sampler.max_tokens,
        teachers=teaching.weights(cfg),
        counted=not cfg.trainer.stream,
    )
    return [
        [
            Errand(
                groups=mine,
                micros=micros[rank],
                lessons=tuple(taught[g] for g in mine),
                teachers=tuple(tuple(groups[g].teachers) for g in mine),
                has_reference=cfg.uses_reference,
                last=last,
            ),
            *(array for g in mine for array in _arrays(groups[g])),
        ]
        for rank, mine in enumerate(owners)
    ]


def _arrays(group: Group) -> list[Any]:
    taught = [said.scores for said in group.teachers.values()]
    return [group.tokens, *taught, *([] if group.reference is None else [group.reference])]


def unpack(cfg: Config, errand: Errand, arrays: Sequence[Any]) -> dict[int, GroupData]:
    """The rank's groups, by their place in the batch."""
    left = iter(arrays)
    mix, weight = cfg.loss.distill_mix, teaching.weights(cfg)
    return {
        g: GroupData(
            tokens=next(left),
            lessons=own,
            teachers=combine(mix, weight, {name: next(left) for name in names}),
            reference=next(left) if errand.has_reference else None,
        )
        for g, own, names in zip(errand.groups, errand.lessons, errand.teachers, strict=True)
    }
