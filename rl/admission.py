"""Who may start, and which groups make the next batch. Pure functions: staleness is decided here and
nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal


def room(*, trained: int, live: int, version: int, max_age: int, prompts: int, steps: int) -> int:
    """How many more groups may be admitted: `trained + live < (η + v + 1) · B`, and no more than the run
    can train.

    Args (counts of groups): trained, live (admitted and neither trained nor dropped); version v that every
    engine serves; max_age η; prompts B per step; steps of the whole run.

    A group admitted under v has fewer than (η + v + 1) · B groups before it, so it is due at version v + η
    at the latest: it can only be too old by being overtaken. (AReaL, arXiv 2505.24298, eq. 3.)
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


def form(
    ready: Sequence[Ready],
    unready: Mapping[int, int],
    *,
    version: int,
    max_age: int,
    prompts: int,
    lacking: int,
    least: int,
    late: Literal["wait", "drop"],
) -> Formed:
    """What is trained next of a batch of B groups that still lacks some: the oldest that are young enough;
    those too old are named, never trained. Oldest: of the oldest version, and of one version the first.

    Args: ready groups; unready ones, admitted and still on their way: ordinal → the version that they were
    admitted under; version of the trainer; max_age η, so that age = version − version_min lies in [0, η];
    prompts B; lacking groups; least groups that a part may have, and that it may leave lacking, unless that
    is nothing (B: the batch is whole or not there). late: "wait" takes no more than leaves a place in this
    or a later batch to all that would be too old without it; "drop" takes whatever is ready. Raises
    ValueError for a group from the future: a version that the trainer has not made.
    """
    fresh, stale = _by_age(ready, version, max_age)
    n = _in_time(fresh, unready, version, max_age, prompts, lacking) if late == "wait" else len(fresh)
    n = min(n, lacking)
    if 0 < lacking - n < least:
        n = lacking - least
    return Formed(_ordinals(fresh[:n]) if n >= least else (), stale)


def _by_age(ready: Sequence[Ready], version: int, max_age: int) -> tuple[tuple[Ready, ...], tuple[int, ...]]:
    """Groups that are young enough, the oldest first, and the ordinals of those too old."""
    for group in ready:
        if group.version_min > version:
            raise ValueError(
                f"admission: group {group.ordinal} was sampled under version {group.version_min}, "
                f"but the trainer is at {version}"
            )
    fresh = [g for g in ready if version - g.version_min <= max_age]
    stale = [g for g in ready if version - g.version_min > max_age]
    return tuple(sorted(fresh, key=lambda g: (g.version_min, g.ordinal))), _ordinals(stale)


def _in_time(
    fresh: Sequence[Ready], unready: Mapping[int, int], version: int, max_age: int, prompts: int, lacking: int
) -> int:
    """How many of the fresh, from the first, can be trained now while all others still find a place in time:
    earliest deadline first, where this step has the lacking places and each after it B.

    A group sampled under version u is due u + η − version steps after this one. Of the places up to step k as
    many are kept as groups are due by then; one that is due later may have any of the rest.
    """
    due = [u + max_age - version for u in (*(g.version_min for g in fresh), *unready.values())]
    free = [lacking + k * prompts - sum(0 <= d <= k for d in due) for k in range(max_age)]
    for n, group in enumerate(fresh):
        later = range(group.version_min + max_age - version)
        if any(free[k] < 1 for k in later):
            return n
        for k in later:
            free[k] -= 1
    return len(fresh)


def _ordinals(groups: Sequence[Ready]) -> tuple[int, ...]:
    return tuple(sorted(g.ordinal for g in groups))


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
