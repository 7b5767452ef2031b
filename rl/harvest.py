"""Groups that are ready, and which of them are trained next: a whole batch, or as much of it as is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rl import admission
from rl.config import Config
from rl.follow import Group

# Reason of a drop → what to do if nothing else happens.
HINTS = {
    "zero_signal": "every group's rewards are all equal: take easier or harder prompts, more samples, "
    "another reward, or loss.zero_signal keep",
    "judge": "no judgement could be read: look at samples.jsonl, judge.label and judge.max_tokens",
    "infra": "the judge does not answer",
    "invalid": "the sampler's answers cannot be trained: see the faults in rl/actors/rollout.py",
    "stale": "samples are too old once they are ready: raise staleness.max_age or lower trainer.prompts",
}


class NothingToTrain(RuntimeError):
    """Groups keep being dropped and none becomes ready: the run ends and says why."""


class PickError(RuntimeError):
    """The user's choice of a batch failed, or is none."""


@dataclass(slots=True)
class Harvest:
    cfg: Config
    pick: Callable[..., Sequence[int]] | None = None  # staleness.pick
    ready: dict[int, Group] = field(default_factory=dict)  # also what is taken, until it is trained
    taken: list[Group] = field(default_factory=list)  # by the step under way
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    barren: int = 0  # groups dropped since the last one became ready

    @property
    def lacking(self) -> int:
        """How many groups the step under way still needs."""
        return self.cfg.trainer.prompts - len(self.taken)

    def add(self, group: Group) -> None:
        self.ready[group.ordinal] = group
        self.barren = 0
        self.changed.set()

    def drop(self, ordinal: int) -> Group | None:
        """A group that was admitted will not come, or goes; returned if it was ready."""
        self.barren += 1
        self.changed.set()
        return self.ready.pop(ordinal, None)

    def take(self, version: int, live: Mapping[int, int]) -> tuple[list[Group], tuple[int, ...]]:
        """Groups for the step from `version`, none if they do not suffice yet, with the rewards as weighted
        then; and ordinals of those too old. live: all that are admitted, ordinal → version at admission."""
        cfg, taken = self.cfg, {group.ordinal for group in self.taken}
        offered = [group.ready for ordinal, group in self.ready.items() if ordinal not in taken]
        unready = {ordinal: under for ordinal, under in live.items() if ordinal not in self.ready}
        formed = admission.form(
            offered, unready, version=version, max_age=cfg.staleness.max_age, late=cfg.staleness.late,
            prompts=cfg.trainer.prompts, lacking=self.lacking,
            least=cfg.trainer.ranks if cfg.trainer.stream else cfg.trainer.prompts,
        )  # fmt: skip
        weights = cfg.reward.weights_at(version)
        groups = [self.ready[o].rewarded(weights) for o in self._chosen(formed, offered, version)]
        self.taken += groups
        return groups, formed.stale

    def trained(self) -> list[Group]:
        """The step is done: its groups leave."""
        groups, self.taken = self.taken, []
        for group in groups:
            del self.ready[group.ordinal]
        return groups

    def check(self, dropped: Mapping[str, int], last_failure: str) -> None:
        """Raises NothingToTrain where patience is at its end. dropped: reason → groups so far."""
        if self.barren < self.cfg.deadlines.patience:
            return
        counts = ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items()))
        likely = max(dropped, key=lambda reason: dropped[reason])
        last = f"; the last failure: {last_failure}" if likely in ("infra", "judge") else ""
        raise NothingToTrain(
            f"{self.barren} groups in a row were dropped and none could be trained "
            f"(dropped so far: {counts}). {HINTS.get(likely, '')}{last}"
        )

    def _chosen(
        self, formed: admission.Formed, ready: Sequence[admission.Ready], version: int
    ) -> Sequence[int]:
        """The oldest, or what the user's own function takes of those that are young enough."""
        if self.pick is None or not formed.take:
            return formed.take
        fresh = [r for r in ready if r.ordinal not in formed.stale]
        prompts = self.cfg.trainer.prompts
        try:
            return admission.checked_pick(self.pick(fresh, version, prompts), fresh, prompts)
        except Exception as error:  # whatever the user's function raises
            raise PickError(f"{self.cfg.staleness.pick}: {type(error).__name__}: {error}") from error
