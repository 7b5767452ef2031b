"""Which sample goes to which rank and micro-batch: a pure function of lengths, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

Place = tuple[int, int]  # (group, sample) as indices into the batch
Micro = tuple[Place, ...]  # the samples packed into one row; may be empty


def plan_ranks(lengths: Sequence[Sequence[int]], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Groups of each rank, balanced by tokens (longest first, to the least loaded rank); every rank gets one.

    Args:
      lengths: [groups][samples] tokens of prompt and answer.
    Raises ValueError if there are fewer groups than ranks.
    """
    if len(lengths) < ranks:
        raise ValueError(f"plan_ranks: {len(lengths)} groups cannot feed {ranks} ranks")
    totals = [sum(group) for group in lengths]
    load = [0] * ranks
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for i, group in enumerate(sorted(range(len(totals)), key=lambda g: (-totals[g], g))):
        rank = i if i < ranks else min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += totals[group]
        mine[rank].append(group)
    return tuple(tuple(sorted(groups)) for groups in mine)


def plan_micros(
    lengths: Sequence[Sequence[int]], owners: Sequence[Sequence[int]], cap: int
) -> tuple[tuple[Micro, ...], ...]:
    """Micro-batches of each rank, none above `cap` tokens, and as many on every rank (the last ones may be
    empty).

    First-fit decreasing, then each micro-batch in the order of the batch. Every sample is placed exactly
    once.
    Raises ValueError for a sample longer than cap.
    """
    packed = [_first_fit(lengths, groups, cap) for groups in owners]
    rounds = max(len(micros) for micros in packed)
    return tuple(tuple([*micros, *[()] * (rounds - len(micros))]) for micros in packed)


def _first_fit(lengths: Sequence[Sequence[int]], groups: Sequence[int], cap: int) -> list[Micro]:
    places = [(g, s) for g in groups for s in range(len(lengths[g]))]
    bins: list[list[Place]] = []
    room: list[int] = []
    for g, s in sorted(places, key=lambda p: (-lengths[p[0]][p[1]], p)):
        need = lengths[g][s]
        if need > cap:
            raise ValueError(
                f"plan_micros: sample {s} of group {g} has {need} tokens, above the cap of {cap}: "
                "raise trainer.micro_tokens or shorten the samples"
            )
        for i, free in enumerate(room):
            if need <= free:
                bins[i].append((g, s))
                room[i] -= need
                break
        else:
            bins.append([(g, s)])
            room.append(cap - need)
    return [tuple(sorted(b)) for b in bins]
