"""A judge that goes away in the middle of a run: nothing is trained on missing rewards."""

import asyncio
import json
from dataclasses import dataclass, field, replace

import pytest

from rl.config import Dispatch
from rl.judges.desk import Judging
from rl.pool import Pool
from rl.replica import PoolDown
from rl.roles import Local
from rl.types import Reply
from tests.rl.fakes import FakeSampler, FakeTrainer, finish, make_loop, make_roles, small

QUICK = Dispatch(attempt=0.2, attempts=2, breaker=2, rest=0.05, patience=0.6)


@dataclass
class Actor:
    """Scores 0, 5, 0, 5, ...; from its `dies`-th call on it is dead, and can be started `back` s later."""

    dies: int = 10**9
    back: float = 10**9
    calls: int = 0
    starts: int = 0
    died_at: float | None = None
    failed: int = 0
    seen: list[str] = field(default_factory=list)

    def dead(self) -> bool:
        if self.calls >= self.dies and self.died_at is None:
            self.died_at = asyncio.get_running_loop().time()
        return self.died_at is not None and asyncio.get_running_loop().time() < self.died_at + self.back

    async def start(self):
        if self.dead():
            raise RuntimeError("the actor is dead")
        self.starts += 1

    async def answer(self, asks, seconds):
        self.calls += 1
        await asyncio.sleep(0.001)
        if self.dead():
            self.failed += 1
            raise RuntimeError("the actor is dead")
        self.seen += [ask.text for ask in asks]
        return [Reply(text=f"S:{5 * (ask.about[0] % 2)}", replica="judge-0") for ask in asks]

    async def stats(self):
        return await FakeSampler().stats()


def run(tmp_path, actors, steps=8, dispatch=QUICK, show=None):
    cfg = replace(small(steps=steps), dispatch=dispatch)
    pool = Pool([Local(f"judge-{i}", a) for i, a in enumerate(actors)], name="judge", dispatch=dispatch)
    trainer = FakeTrainer(cfg.staleness.max_age)
    roles = replace(
        make_roles(cfg, trainer=trainer),
        judges={"judge": pool},
        producers={"judge": Judging(pool, cfg.judge, dispatch, deadline=cfg.deadlines.judge)},
    )
    loop = make_loop(tmp_path, cfg, roles=roles)
    return loop, trainer


def screen(loop) -> str:
    return loop.show.console.file.getvalue()


def test_while_every_judge_is_down_nothing_is_admitted_and_the_run_goes_on_when_one_is_back(tmp_path):
    actor = Actor(dies=10, back=0.4)
    loop, trainer = run(tmp_path, [actor])
    result = finish(loop)
    assert result["version"] == 8 and actor.starts >= 2  # at first, and once it was back
    said = screen(loop)
    assert "no new groups are admitted: no replica of judge answers (judge-0" in said
    assert said.index("no new groups are admitted") < said.index("going on")
    rewards = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row.get("reward/missing", 0.0) == 0.0 for row in rewards)
    assert len(trainer.lessons) == 8 * 3 and all(
        lesson.adv != 0 for group in trainer.lessons for lesson in group
    )


def test_a_judge_that_stays_away_ends_the_run_by_name_after_the_configured_patience(tmp_path):
    loop, trainer = run(tmp_path, [Actor(dies=10)])
    with pytest.raises(PoolDown, match=r"judge: none of 1 replicas .*patience 0\.6.*is dead"):
        finish(loop)
    assert all(lesson.adv != 0 for group in trainer.lessons for lesson in group)


def test_one_of_two_judges_may_die_and_the_other_does_the_work(tmp_path):
    dies, stays = Actor(dies=5), Actor()
    loop, trainer = run(tmp_path, [dies, stays])
    assert finish(loop)["version"] == 8
    assert "no new groups" not in screen(loop)
    assert len(trainer.lessons) == 8 * 3 and stays.calls > dies.calls
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert {call["outcome"] for call in calls} == {"score"} and max(call["attempts"] for call in calls) >= 2


def test_a_full_queue_pauses_admission(tmp_path):
    slow = replace(QUICK, in_flight=2, queue=2, attempt=5.0)
    loop, _ = run(tmp_path, [Actor()], dispatch=slow)
    assert finish(loop)["version"] == 8
