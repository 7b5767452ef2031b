"""How many samples vLLM may have at a time: as many as its cache of keys and values has room for.

A sample takes one block of the cache after another until it ends. Where none is left, vLLM throws away what
its newest sample has and computes it anew later. So many samples that all fit at their full length (prompt
and max_tokens) can always run; most end before that, so that more fit, and how many is found by trying:

    limit = clip(max(sure, tried), 1, slots),    sure = blocks / blocks of the longest sample asked for
    turnover with somebody waiting:  tried ← min(limit + slots / STEPS, limit · FULL / peak), if that is more
    a sample lost its cache:         tried ← CUT · limit

A turnover is `limit` samples that ended: about all that ran at the last look. `peak` is the largest use of
the cache in it; now says little, as samples that began together are all short, and later all long.

"Congestion Avoidance and Control", Jacobson 1988, whose window this is: turnovers for round trips.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

STEPS = 8  # turnovers from nothing to all slots; `peak`, not small steps, keeps from doing too much
FULL = 0.95  # of the cache at its peak: the next turnover's samples may be a little longer
CUT = 0.85  # a loss shows that some did not fit, rarely more; below `sure` no cut goes
SET_ASIDE = 2  # blocks: vLLM's own, and the probe's


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    slots: int
    blocks: int = 0  # of the cache; 0: not known, then only a loss says that it is full
    block: int = 1  # tokens of a block
    need: int = 0  # blocks of the longest sample asked for
    tried: int = 0
    peak: float = 0.0  # since the last look
    ended: int = 0  # samples, since the last look
    settling: bool = False  # after a cut: losses that come to light now are older than it

    @property
    def sure(self) -> int:
        return (self.blocks - SET_ASIDE) // self.need if self.need and self.blocks else self.slots

    @property
    def limit(self) -> int:
        return min(max(1, self.sure, self.tried), self.slots)


def asked(room: Room, tokens: int) -> Room:
    """Somebody asks for samples of up to so many tokens, their prompt's among them."""
    return replace(room, need=max(room.need, -(-tokens // room.block)))


def step(room: Room, *, kv_use: float, lost: int, ended: int, full: bool) -> Room:
    """The room after one step of vLLM's scheduler.

    kv_use: used fraction of the cache. lost, ended: samples since the step before that lost their cache, or
    ended. full: all turns are taken and somebody waits.
    """
    limit = room.limit
    if lost and not room.settling:
        return replace(room, tried=max(1, int(CUT * limit)), peak=0.0, ended=0, settling=True)
    room = replace(room, peak=max(room.peak, kv_use), ended=room.ended + ended)
    if room.ended < limit:
        return room
    tried = limit
    if full and not room.settling:
        fits = int(limit * FULL / room.peak) if room.peak else room.slots
        tried = max(limit, min(limit + max(1, room.slots // STEPS), fits))
    return replace(room, tried=tried, peak=kv_use, ended=0, settling=False)
