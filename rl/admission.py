"""Who may start, and which groups make the next batch. Pure functions: staleness is decided here and
nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from operator import index
from typing import Literal


def room(*, trained: int, live: int, version: int, max_age: int, prompts: int, steps: int) -> int:
    """How many more groups may be admitted: `trained + live < (η + v + 1) · B`, and no more than the run
    can train.

    Args (counts of groups): trained, live (admitted and neither trained nor dropped); version v that every
    engine
    serves; max_age η; prompts B per step; steps of the whole run.

    A group admitted under v has fewer than (η + v + 1) · B groups before it, so it is due at version v + η
    at the
    latest: it can only be too old by being overtaken. (AReaL, arXiv 2505.24298, eq. 3.)
    """
    bound = (max_age + version + 1) * prompts
    return max(0, min(bound, steps * prompts) - trained - live)


@dataclass(frozen=True, slots=True)
class Ready:
    """A group that could be trained: its ordinal, the oldest version among its tokens, and what a choice of
    one's own may go by."""

    ordinal: int
    version_min: int
    key: str = ""  # of its prompt
    reward: float | None = None  # mean over the samples that have one


@dataclass(frozen=True, slots=True)
class Formed:
    take: tuple[int, ...]  # ordinals of the batch, ascending; empty: not yet
    stale: tuple[int, ...]  # ordinals that have become too old


def form_batch(
    ready: Sequence[Ready],
    unready: Collection[int],
    *,
    version: int,
    max_age: int,
    prompts: int,
    late: Literal["drop", "wait"],
) -> Formed:
    """The B oldest groups that are young enough, by ordinal; those too old are named, never trained.

    age = version − version_min must lie in [0, η]. `unready` are the admitted ordinals still on their way:
    with late="wait" none of them may be overtaken, with "drop" the batch is made of whatever is ready. Raises
    ValueError for a group from the future: a version that the trainer has not made.
    """
    fresh, stale = _by_age(ready, version, max_age)
    take = fresh[:prompts]
    overtaken = late == "wait" and take and any(o < take[-1] for o in (*unready, *stale))
    return Formed(take if len(take) == prompts and not overtaken else (), stale)


def form_part(
    ready: Sequence[Ready],
    unready: Collection[int],
    *,
    version: int,
    max_age: int,
    lacking: int,
    ranks: int,
    late: Literal["drop", "wait"],
) -> Formed:
    """What can be trained of a batch that still lacks so many groups: the oldest that are young enough.

    As `form_batch` otherwise, but late="wait" takes what lies before the first ordinal under way. No part is
    smaller than `ranks`, and neither is what it leaves lacking, unless that is nothing: every rank needs a
    group each time.
    """
    fresh, stale = _by_age(ready, version, max_age)
    if late == "wait":
        first = min((*unready, *stale), default=inf)
        fresh = tuple(o for o in fresh if o < first)
    n = min(len(fresh), lacking)
    if 0 < lacking - n < ranks:
        n = lacking - ranks
    return Formed(fresh[:n] if n >= ranks else (), stale)


def _by_age(ready: Sequence[Ready], version: int, max_age: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ordinals, ascending, of the groups that are young enough, and of those too old."""
    for group in ready:
        if group.version_min > version:
            raise ValueError(
                f"admission: group {group.ordinal} was sampled under version {group.version_min}, "
                f"but the trainer is at {version}"
            )
    fresh = tuple(sorted(g.ordinal for g in ready if version - g.version_min <= max_age))
    stale = tuple(sorted(g.ordinal for g in ready if version - g.version_min > max_age))
    return fresh, stale


def checked_pick(chosen: Iterable[int], ready: Sequence[Ready], prompts: int) -> tuple[int, ...]:
    """What a user's `pick(ready, version, prompts)` returned, in ascending order: exactly B ordinals of those
    that are ready, each once. Raises ValueError naming what came back otherwise."""
    try:
        ordinals = [index(ordinal) for ordinal in chosen]
    except TypeError:
        raise ValueError(f"staleness.pick: expected {prompts} ordinals, got {chosen!r}") from None
    known = {group.ordinal for group in ready}
    faults = {
        "twice": sorted({o for o in ordinals if ordinals.count(o) > 1}),
        "not ready": sorted(set(ordinals) - known),
    }
    told = [f"{name}: {found}" for name, found in faults.items() if found]
    if len(ordinals) != prompts or told:
        raise ValueError(
            f"staleness.pick: expected {prompts} different ordinals of the {len(known)} groups that are "
            f"ready, got {len(ordinals)}: {ordinals}" + "".join(f"; {fault}" for fault in told)
        )
    return tuple(sorted(ordinals))
