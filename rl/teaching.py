"""Which teachers a prompt has, how they share the engines, and what is reported of them. No tensors here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean
from typing import Any

from rl.config import Config

MIXTURE = "mixture"  # the one teacher that several are mixed into; no teacher may have this name
MIXED = ("arithmetic", "geometric")  # loss.distill_mix: the teachers become one distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the controller knows of one teacher's answer about one group."""

    n_tokens: int  # of all samples of the group
    seconds: float  # from the question's arrival at the engine to its scores
    ahead: int  # groups that this engine already had when the question came
    scores: Any = None  # a reference to what the trainer gets


def teachers_of(cfg: Config, key: str) -> tuple[str, ...]:
    """Names of the teachers that a prompt with this key is sent to, sorted. Empty: nobody serves the key.

    routed: the one that has the key. Otherwise all that have it, and those that name no keys at all.
    """
    routed = cfg.loss.distill_mix == "routed"
    return tuple(sorted(n for n, t in cfg.teachers.items() if key in t.keys or not (routed or t.keys)))


def weights(cfg: Config) -> dict[str, float]:
    """Teacher → its weight, in the order of the names: no sum depends on the order in the config."""
    return {name: cfg.teachers[name].weight for name in sorted(cfg.teachers)}


def split(n: int, load: Mapping[str, float]) -> dict[str, int]:
    """n engines for teachers with these loads: by largest remainder, at least one each.

    Who would get less than one gets one, and the others share what is left. Equal remainders: by name.
    Raises ValueError for fewer engines than teachers.
    """
    if n < len(load):
        raise ValueError(f"split: {len(load)} teachers ({', '.join(sorted(load))}) need one each, got {n}")
    total = fsum(load.values())
    quota = {k: n * load[k] / total if total else n / len(load) for k in sorted(load)}
    few = [k for k in quota if quota[k] < 1]
    if few:
        others = {k: load[k] for k in quota if k not in few}
        return {**dict.fromkeys(few, 1), **split(n - len(few), others)}
    count = {k: int(q) for k, q in quota.items()}
    for k in sorted(quota, key=lambda k: (count[k] - quota[k], k))[: n - sum(count.values())]:
        count[k] += 1
    return count


def metrics(groups: Sequence[Mapping[str, Said]]) -> dict[str, float]:
    """Of each teacher over the groups of a step: tokens that it scored, their share of all scored tokens,
    mean seconds of an answer, and mean number of groups that it found before it in the queue."""
    values: dict[str, float] = {}
    total = sum(said.n_tokens for group in groups for said in group.values())
    for name in sorted(set().union(*groups)):
        heard = [group[name] for group in groups if name in group]
        tokens = sum(said.n_tokens for said in heard)
        values |= {
            f"teacher/{name}/tokens": tokens,
            f"teacher/{name}/share": tokens / total if total else 0.0,
            f"teacher/{name}/latency_s": fmean(said.seconds for said in heard),
            f"teacher/{name}/queue": fmean(said.ahead for said in heard),
        }
    return values
