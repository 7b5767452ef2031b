"""Which sample goes to which rank and micro-batch: a pure function of lengths, the same on every machine.

Ranks wait for each other at every micro-batch, so all of these should cost the same. Work is handed out
costliest first, each piece to whoever has the least: the most loaded then has at most the mean and one
largest piece. R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import ceil, inf

Place = tuple[int, int]  # (group, sample) as indices into the batch
Micro = tuple[Place, ...]  # the samples packed into one row; may be empty
Cost = Callable[[int, Sequence[int]], float]  # of a prompt and its answers, from their tokens; in any unit


def n_tokens(prompt: int, answers: Sequence[int]) -> int:
    return prompt + sum(answers)


def bucket(cap: int) -> int:
    """Tokens to whose multiples rows are filled up: whole tiles of 128, about sixteen sizes up to the cap.

    An even split does not fill rows, so half a bucket of each is wasted on average: 3 % of the cap.
    """
    return max(128, cap // 16 // 128 * 128)


def plan_ranks(
    lengths: Sequence[Sequence[int]],
    ranks: int,
    *,
    prompts: Sequence[int] | None = None,
    cost: Cost = n_tokens,
    share_prompt: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """Groups of each rank, balanced by cost; every rank gets one.

    lengths: [groups][samples] tokens of prompt and answer. prompts: [groups], of the prompt alone, for costs
    that tell the two apart. share_prompt: a group computes its prompt once.
    Raises ValueError if there are fewer groups than ranks.
    """
    if len(lengths) < ranks:
        raise ValueError(f"plan_ranks: {len(lengths)} groups cannot feed {ranks} ranks")
    costs = []
    for prompt, group in zip(prompts or [0] * len(lengths), lengths, strict=True):
        answers = [length - prompt for length in group]
        costs.append(cost(prompt, answers) if share_prompt else sum(cost(prompt, [a]) for a in answers))
    mine = _spread(costs, [0] * len(costs), ranks, inf)
    assert mine is not None
    return tuple(tuple(sorted(groups)) for groups in mine)


def plan_micros(
    lengths: Sequence[Sequence[int]],
    owners: Sequence[Sequence[int]],
    cap: int,
    *,
    prompts: Sequence[int] | None = None,
    cost: Cost = n_tokens,
    share_prompt: bool = False,
) -> tuple[tuple[Micro, ...], ...]:
    """Micro-batches of each rank, none above `cap` tokens, as many on every rank: the fewest that are found.

    A rank's work is spread evenly over them, costliest first, so that the ranks' m-th cost the same: with
    full ones and a small rest they would wait for each other. Empty is only what a rank has nothing left
    for. With share_prompt a group is not torn apart unless it is above the cap. Arguments as plan_ranks.
    Raises ValueError for a sample longer than cap.
    """
    prompts = prompts or [0] * len(lengths)

    def measure(piece: Micro, by: Cost) -> float:
        g = piece[0][0]  # the samples of a piece are of one group
        return by(prompts[g], [lengths[g][s] - prompts[g] for _, s in piece])

    def spread(pieces: Sequence[Micro], n: int) -> tuple[Micro, ...] | None:
        costs, sizes = [measure(p, cost) for p in pieces], [measure(p, n_tokens) for p in pieces]
        bins = _spread(costs, sizes, n, cap) or _first_fit(sizes, n, cap)
        if bins is None:
            return None
        bins.sort(key=lambda b: -sum(costs[i] for i in b))
        return tuple(tuple(sorted(place for i in b for place in pieces[i])) for b in bins)

    def tear(g: int) -> list[Micro]:
        for s, length in enumerate(lengths[g]):
            if length > cap:
                raise ValueError(
                    f"plan_micros: sample {s} of group {g} has {length} tokens, above the cap of {cap}: "
                    "raise trainer.micro_tokens or shorten the samples"
                )
        if not share_prompt:
            return [((g, s),) for s in range(len(lengths[g]))]
        answers = [length - prompts[g] for length in lengths[g]]
        parts = next(p for n in count(1) if (p := _spread(answers, answers, n, cap - prompts[g])) is not None)
        return [tuple((g, s) for s in sorted(part)) for part in parts]

    pieces = [[piece for g in groups for piece in tear(g)] for groups in owners]
    fewest = max(ceil(sum(measure(p, n_tokens) for p in own) / cap) for own in pieces)
    for n in count(max(1, fewest)):
        micros = [m for own in pieces if (m := spread(own, n)) is not None]
        if len(micros) == len(pieces):
            return tuple(micros)
    raise AssertionError("alone, every piece fits")


def _spread(costs: Sequence[float], sizes: Sequence[float], n: int, cap: float) -> list[list[int]] | None:
    """Indices in n bins, the costliest first to the cheapest bin that has room; None if one finds no room."""
    bins: list[list[int]] = [[] for _ in range(n)]
    room = [cap] * n
    cheapest = [(0.0, b) for b in range(n)]  # a heap
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []
        while cheapest and room[cheapest[0][1]] < sizes[i]:
            full.append(heappop(cheapest))
        if not cheapest:
            return None
        load, b = cheapest[0]
        heapreplace(cheapest, (load + costs[i], b))
        bins[b].append(i)
        room[b] -= sizes[i]
        for entry in full:
            heappush(cheapest, entry)
    return bins


def _first_fit(sizes: Sequence[float], n: int, cap: float) -> list[list[int]] | None:
    """Indices in bins filled one after another, largest first: uneven, but tight. None unless it takes n."""
    bins: list[list[int]] = []
    room: list[float] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        b = next((b for b, free in enumerate(room) if sizes[i] <= free), len(bins))
        if b == len(bins):
            bins.append([])
            room.append(cap)
        bins[b].append(i)
        room[b] -= sizes[i]
    return bins if len(bins) == n else None
