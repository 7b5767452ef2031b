"""The controller: prompt → sample → outcome → advantage → batch → step → version, all at the same time.

One asyncio loop. Every admitted group is followed by one coroutine (rl/follow.py); one trains (`_train`); new
weights travel in one of their own (`_sync`). Tokens never pass through here, only what is said about them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rl import admission, errand, lessons
from rl.config import Config
from rl.data.prompts import Stream
from rl.delivery import Delivery
from rl.display import Display
from rl.follow import Group, follow, outcomes
from rl.harvest import Harvest
from rl.judges.health import Watch
from rl.ledger import Event, Kind, Ledger, Reason, apply
from rl.log import RunLog
from rl.monitor import Monitor
from rl.packing import Cost, n_tokens
from rl.proctor import Proctor
from rl.roles import Roles
from rl.saving import Saving
from rl.types import InfraFail, Prompt

WATCH_S = 0.2  # seconds between looks at the pools


@dataclass(slots=True)
class Loop:
    cfg: Config
    roles: Roles
    stream: Stream
    held_out: Sequence[Prompt]
    log: RunLog
    show: Display
    version: int = 0  # the trainer's
    ledger: Ledger = field(default_factory=Ledger)
    before: dict[str, float] | None = None  # held-out results at version 0; a resumed run brings them along
    canaries: list[str] = field(default_factory=list)  # the first held-out answers at version 0, likewise
    watched: dict[str, Any] = field(default_factory=dict)  # what a resumed run knows of its judges
    data: str = ""  # fingerprint of the prompts
    pick: Callable[..., Sequence[int]] | None = None  # staleness.pick
    cost: Cost = n_tokens  # of training a prompt and its answers
    stop: bool = False  # set from outside: finish the step, save, end
    held: str = ""  # why no new group is admitted just now
    tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    followers: set[asyncio.Task[None]] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    harvest: Harvest = field(init=False)
    delivery: Delivery = field(init=False)
    monitor: Monitor = field(init=False)
    proctor: Proctor = field(init=False)
    saving: Saving = field(init=False)

    def __post_init__(self) -> None:
        cfg = self.cfg
        bounded = {"judge": True, "scalar": cfg.scalar.activation == "sigmoid"}
        watches = {n: Watch(cfg.health, n, bounded[n]) for n in self.roles.judges}
        self.monitor = Monitor(self.roles, watches)
        self.harvest = Harvest(cfg, self.pick)
        self.delivery = Delivery(cfg, self.roles.trainer, self.roles.sampler)
        self.saving = Saving(cfg, self.roles.trainer, self.log.folder, self.monitor)
        for name, state in self.watched.items():
            watches[name] = Watch.from_dict(state, cfg.health, name=name, bounded=bounded[name])
        self.proctor = Proctor(
            cfg, self.roles, self.held_out, self.monitor, self.log, self.show, self.canaries
        )

    # ── the run ───────────────────────────────────────────────────────────────────────────────────

    async def run(self, resume: str | None = None) -> dict[str, Any]:
        """Everything from starting the actors to the summary's numbers."""
        try:
            return await self._run(resume)
        except ExceptionGroup as group:
            await self.saving.settled()
            raise _first(group) from None

    async def _run(self, resume: str | None) -> dict[str, Any]:
        first = self.version
        await self._bring_up(resume)
        if self.before is None:
            self.before = await self.proctor.begin()
        self.monitor.begin()
        async with self.tasks:
            poll = self.tasks.create_task(self.monitor.poll(self.cfg.deadlines.sync))
            watch = self.tasks.create_task(self._watch())
            for ordinal in self.ledger.live:  # of a resumed run: what was under way starts again
                self._apply(self._event("drop", ordinal, reason="infra", again=True))
            self._admit()
            await self._train()
            await self.proctor.end()
            for task in (poll, watch, *self.followers):
                task.cancel()
        after, _ = await self.proctor.evaluate()
        reached = {"version": self.version, "steps": self.version - first}
        return {"before": self.before, "after": after, **reached, **self.monitor.totals(self.ledger)}

    async def _bring_up(self, resume: str | None) -> None:
        """All actors start at the same time; then every engine proves that it holds the trainer's weights."""
        wait, trainer = self.cfg.deadlines, self.roles.trainer

        async def start_trainer() -> None:
            self.delivery.address = await trainer.ranks[0].call("rendezvous")
            how = await trainer.call("start", lambda rank: self.delivery.address, deadline=wait.start)
            self.show.note(f"trainer: {how}")
            if resume is not None:
                await trainer.call("load", lambda rank: (resume, self.version), deadline=wait.train)

        began, took = time.monotonic(), dict[str, float]()

        async def up(name: str, starting: Awaitable[Any]) -> None:
            await starting
            took[name] = time.monotonic() - began

        async with asyncio.TaskGroup() as tasks:
            for name, pool in (self.roles.engines() | dict(self.roles.raters)).items():
                tasks.create_task(up(name, pool.all("start", deadline=wait.start)))
            tasks.create_task(up("trainer", start_trainer()))
        self.show.note("up after " + ", ".join(f"{s:.0f} s {name}" for name, s in took.items()))
        await self.delivery.publish()
        await self.delivery.deliver()

    async def _watch(self) -> None:
        """While a pool is down, or its queue is full, no new group is admitted."""
        while True:
            for pool in self.roles.pools():
                pool.check()
                while pool.news:
                    self.show.note(pool.news.popleft(), "yellow")
            held = next((pool.trouble for pool in self.roles.pools() if pool.trouble), "")
            if held and not self.held:
                self.show.note(f"no new groups are admitted: {held}", "yellow")
            elif self.held and not held:
                self.show.note("going on: new groups are admitted again", "yellow")
            self.held = held
            self._admit()
            await asyncio.sleep(WATCH_S)

    # ── a group's life ────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        if self.held:
            return
        room = admission.room(
            trained=self.ledger.trained, live=len(self.ledger.live), version=self.delivery.served,
            max_age=self.cfg.staleness.max_age,
            prompts=self.cfg.trainer.prompts,
            steps=self.cfg.trainer.steps,
        )  # fmt: skip
        for _ in range(room):
            ordinal, attempt = self.ledger.upcoming()
            self._mark("issue", ordinal)
            follower = self.tasks.create_task(self._follow(ordinal, attempt))
            self.followers.add(follower)
            follower.add_done_callback(self.followers.discard)

    async def _follow(self, ordinal: int, attempt: int) -> None:
        """One group from its prompt to being ready, or dropped."""
        mark = partial(self._mark, ordinal=ordinal)
        group = await follow(
            self.cfg, self.roles, self.stream[ordinal], ordinal, attempt, mark, self.delivery.proven
        )
        if isinstance(group, Group):
            self._settle(group)
        else:
            self._drop(ordinal, group, again=True)

    def _settle(self, group: Group) -> None:
        """Ready, or dropped because nothing can be learnt from it."""
        self.monitor.saw(group)
        calls = (call for of in group.verdicts for v in of.values() for call in v.calls)
        self.log.calls(self.version, group.ordinal, calls)
        loss, taught = self.cfg.loss, bool(group.teachers)
        if self.cfg.uses_reward and not taught:
            if all(r is None for r in group.rewards):
                said = [o for of in group.verdicts for o in outcomes(of).values()]
                unanswered = bool(said) and all(isinstance(o, InfraFail) for o in said)
                return self._drop(group.ordinal, "infra" if unanswered else "judge", again=unanswered)
            _, signal = lessons.advantages([group.rated], loss)
            if loss.zero_signal == "drop" and not signal[0]:
                return self._drop(group.ordinal, "zero_signal", again=False)
        self._mark("ready", group.ordinal)
        self.harvest.add(group)

    def _mark(self, kind: Kind, ordinal: int) -> None:
        self._apply(self._event(kind, ordinal))

    def _drop(self, ordinal: int, reason: Reason, *, again: bool) -> None:
        """Give the admission back. `again`: issue the prompt once more, if it has attempts left."""
        again = again and self.ledger.live[ordinal].attempt + 1 < self.cfg.staleness.attempts
        self._apply(self._event("drop", ordinal, reason=reason, again=again))
        self.monitor.dropped(self.harvest.drop(ordinal))
        self._admit()

    def _event(self, kind: Kind, ordinal: int, **more: Any) -> Event:
        version = self.delivery.served if kind == "issue" else self.version
        return Event(kind=kind, ordinal=ordinal, at=time.monotonic() - self.began, version=version, **more)

    def _apply(self, event: Event) -> None:
        self.ledger = apply(self.ledger, event)
        assert self.ledger.balanced, self.ledger
        self.log.event(event)

    # ── training ──────────────────────────────────────────────────────────────────────────────────

    async def _train(self) -> None:
        cfg, synced = self.cfg, None
        while self.version < cfg.trainer.steps and not self.stop:
            metrics = await self._step()
            self.version += 1
            groups = self.harvest.trained()
            for group in groups:
                self._mark("train", group.ordinal)
            if synced is not None:
                await synced
            with self.monitor.training():
                await self.delivery.publish()
            synced = self.tasks.create_task(self._sync())
            await self._cut_hopeless()
            values = self.monitor.step(
                groups, metrics, self.version - 1, self.ledger, len(self.harvest.ready), cfg.loss
            )
            self.log.metrics(self.version, values)
            self.log.samples(self.monitor.examples(groups, self.version))
            self.proctor.stepped(self.version, self.tasks)
            self.show.step(self.version, values)
            last = self.version == cfg.trainer.steps or self.stop
            if cfg.checkpoint.every and (self.version % cfg.checkpoint.every == 0 or last):
                await self._save()
        if synced is not None:
            await synced
        await self.saving.ended()

    async def _step(self) -> dict[str, float]:
        """Gather a batch and step on it; with trainer.stream, train its groups while the others come."""
        cfg, harvest = self.cfg, self.harvest
        if not cfg.trainer.stream:
            return await self._ask("step", errand.pack(cfg, await self._gather(), self.cost))
        while harvest.lacking:
            part = await self._gather()
            await self._ask("feed", errand.pack(cfg, part, self.cost, last=not harvest.lacking))
        count = lessons.count([group.rated for group in harvest.taken], cfg.loss)
        return await self._ask("finish", [(1 / max(1, count),)] * cfg.trainer.ranks)

    async def _gather(self) -> list[Group]:
        """What is trained next, as soon as it can be; groups too old for it are dropped and issued again."""
        harvest, idle = self.harvest, self.proctor.validation.idle
        while True:
            under = {ordinal: live.version for ordinal, live in self.ledger.live.items()}
            groups, stale = harvest.take(self.version, under)
            for ordinal in stale:
                self._drop(ordinal, "stale", again=True)
            if groups:
                return groups
            harvest.check(self.ledger.dropped, self.monitor.last_failure)
            harvest.changed.clear()
            with self.monitor.waiting():
                idle.set()
                await harvest.changed.wait()
                idle.clear()

    async def _ask(self, method: str, each: Sequence[Sequence[Any]]) -> Any:
        """Have the trainer's ranks do it, each with its own arguments."""
        with self.monitor.training():
            return await self.roles.trainer.call(method, each.__getitem__, deadline=self.cfg.deadlines.train)

    async def _sync(self) -> None:
        """What is published reaches the samplers, while training goes on."""
        due = self.proctor.validation.due(self.version)
        published = await self.delivery.deliver(by_value=due)
        self.monitor.aside |= self.delivery.metrics
        self._admit()
        if due:
            self.proctor.served(*published, self.tasks)

    async def _cut_hopeless(self) -> None:
        """End running groups that would be too old to train: they began before the bound."""
        oldest = self.version - self.cfg.staleness.max_age
        for ordinal, live in self.ledger.live.items():
            if live.state == "dispatch" and live.version < oldest:
                await self.roles.sampler.each(
                    "abort", f"{ordinal}.{live.attempt}", deadline=self.cfg.deadlines.sync
                )

    async def _save(self) -> None:
        """A checkpoint of this moment; it is written while training goes on."""
        await self.saving.ended()
        extra = {
            "events": self.log.events,
            "before": self.before,
            "canaries": self.proctor.canaries,
            "data": self.data,
            "watched": {name: watch.to_dict() for name, watch in self.monitor.watches.items()},
        }
        await self.saving.save(self.version, self.ledger, extra, self.tasks)


def _first(group: BaseExceptionGroup) -> BaseException:
    """The fault that ended the run; the others are its echo."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
