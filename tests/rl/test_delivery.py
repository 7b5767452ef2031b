"""New weights to several samplers of which some fail: what may be trained, who stays, who comes back."""

import asyncio
from dataclasses import dataclass, replace

import pytest

from rl.config import Dispatch
from rl.delivery import Delivery
from rl.pool import SIMPLE
from rl.replica import PoolDown, RoleError
from rl.roles import Local, Pool, TrainerGroup
from rl.types import SampleMeta
from tests.rl.fakes import FakeSampler, FakeTrainer, finish, make_loop, make_roles, small

LEAVING = replace(SIMPLE, attempts=3, breaker=1, rest=0.02, patience=1.0)


@dataclass
class Restarting(FakeSampler):
    """Raises at the updates named; a start makes it well, with the first weights."""

    fail_at: frozenset[int] = frozenset()
    starts: int = 0
    dead: bool = False

    async def start(self) -> None:
        self.starts += 1
        if self.starts > 1:
            self.version, self.corrupt_at, self.dead = 0, -1, False

    async def update(self, version, weights, mode):
        if version in self.fail_at:
            self.fail_at, self.dead = self.fail_at - {version}, True
        if self.dead:
            raise RuntimeError("out of memory")
        return await super().update(version, weights, mode)

    async def generate(self, prompt_ids, seeds, request_id):
        if self.dead:
            raise RuntimeError("dead")
        return await super().generate(prompt_ids, seeds, request_id)


def loop_of(tmp_path, samplers, trainer, steps=12, dispatch: Dispatch = LEAVING):
    cfg = small(steps=steps)
    roles = make_roles(cfg, trainer=trainer)
    pool = Pool([Local(s.name, s) for s in samplers], name="sampler", dispatch=dispatch)
    return make_loop(tmp_path, cfg, roles=replace(roles, sampler=pool))


def pair(**second):
    slow = dict(delay=lambda call: 0.02)
    return [Restarting(name="sampler-0", **slow), Restarting(name="sampler-1", **slow, **second)]


def test_a_sampler_that_lost_a_tensor_leaves_the_run_and_its_samples_are_not_trained(tmp_path):
    samplers, trainer = pair(corrupt_at=3), FakeTrainer(2, delay=0.01)
    loop = loop_of(tmp_path, samplers, trainer, steps=60, dispatch=replace(LEAVING, rest=30.0))
    result = finish(loop)
    assert result["version"] == 60 and samplers[1].starts == 1
    assert loop.delivery.proved == {"sampler-0": 60}
    told = loop.show.console.file.getvalue()
    assert "sampler-1 left the run: sampler-1 holds other weights than version 3" in " ".join(told.split())


def test_a_sampler_whose_update_fails_comes_back_with_the_newest_weights(tmp_path):
    samplers, trainer = pair(fail_at=frozenset({2})), FakeTrainer(2, delay=0.02)
    loop = loop_of(tmp_path, samplers, trainer, steps=30)
    assert finish(loop)["version"] == 30
    assert samplers[1].starts >= 2
    assert loop.delivery.proved["sampler-1"] == loop.delivery.proved["sampler-0"] == 30
    assert samplers[1].version == 30 and samplers[1].calls > 3


def test_the_only_sampler_may_die_and_the_run_waits_for_it(tmp_path):
    only, trainer = Restarting(name="sampler-0", fail_at=frozenset({4})), FakeTrainer(2)
    loop = loop_of(tmp_path, [only], trainer)
    assert finish(loop)["version"] == 12
    assert only.starts == 2 and loop.delivery.served == 12


def test_samplers_that_never_come_back_end_the_run_by_name(tmp_path):
    @dataclass
    class Gone(Restarting):
        async def start(self) -> None:
            if self.dead:
                raise RuntimeError("no such device")

    gone = Gone(name="sampler-0", fail_at=frozenset({2}))
    dispatch = replace(LEAVING, patience=0.2)
    with pytest.raises(PoolDown, match="sampler: none of 1 replicas .* no such device"):
        finish(loop_of(tmp_path, [gone], FakeTrainer(2), dispatch=dispatch))


def test_training_goes_on_while_weights_travel_but_nothing_unproved_is_trained(tmp_path):
    """An update that takes longer than a step: the trainer takes its next step meanwhile."""

    @dataclass
    class Slow(FakeSampler):
        async def update(self, version, weights, mode):
            report = await super().update(version, weights, mode)  # it samples with them from here on
            await asyncio.sleep(0.1 if version else 0.0)
            proved.append(version)
            return report

    proved: list[int] = []

    @dataclass
    class Watching(FakeTrainer):
        async def step(self, errand, *arrays):
            used = {int(v) for group in arrays for s in group.samples for v in s.versions}
            assert max(used) <= proved[-1], "trained before its weights were proved"
            overlapped.append(self.version > proved[-1])
            return await super().step(errand, *arrays)

    overlapped: list[bool] = []
    cfg = small(steps=8)
    finish(make_loop(tmp_path, cfg, Slow(), Watching(2)))
    assert any(overlapped)


def test_a_sampler_that_comes_back_between_publishing_and_delivery_gets_the_published_version():
    async def main():
        trainer, sampler = FakeTrainer(2), FakeSampler()
        pool = Pool([Local("sampler-0", sampler)], name="sampler", dispatch=LEAVING)
        delivery = Delivery(small(), TrainerGroup([Local("trainer-0", trainer)]), pool)
        await delivery.publish()
        await delivery.deliver()
        trainer.version = 1
        await delivery.publish()
        assert await delivery._readmit(pool.handles[0])
        assert delivery.proved == {"sampler-0": 1} and sampler.version == 1

    asyncio.run(main())


def test_the_proof_is_waited_for_and_its_failure_is_told_to_those_who_wait():
    async def main():
        trainer = TrainerGroup([Local("trainer-0", FakeTrainer(2))])
        pool = Pool([Local("sampler-0", FakeSampler())], name="sampler", dispatch=LEAVING)
        delivery = Delivery(small(), trainer, pool)
        await delivery.publish()
        await delivery.deliver()
        new = SampleMeta(text="", n_tokens=1, finish="stop", version_min=0, version_max=1, engine="sampler-0")
        assert await delivery.proven([replace(new, version_max=0)])
        waiting = asyncio.create_task(delivery.proven([new]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        delivery._expel(pool.handles[0], RoleError("gone"))
        assert await asyncio.wait_for(waiting, 1) is False

    asyncio.run(main())
