"""trainer.stream: groups are trained as they become ready, and one step is made of them at the end."""

import asyncio
import json
import random
from dataclasses import replace

import pytest

from experiments.genrm_grpo import CONFIG
from rl.check import check
from rl.config import Checkpoint, ConfigError, Staleness
from rl.follow import Group
from rl.harvest import Harvest
from rl.launch import launch
from rl.roles import RoleError
from rl.types import ParseFail, Prompt, SampleMeta, Score, Verdict
from tests.rl.fakes import FakeJudge, FakeSampler, FakeTrainer, finish, make_loop, small


def streaming(**changes):
    cfg = small(**changes)
    return replace(cfg, trainer=replace(cfg.trainer, stream=True))


def events(folder, kind):
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [e["ordinal"] for e in lines if e["kind"] == kind]


@pytest.mark.parametrize("max_age", [0, 1, 2])
@pytest.mark.parametrize("late", ["drop", "wait"])
def test_every_ordinal_is_trained_once_and_no_token_is_older_than_the_bound(tmp_path, max_age, late):
    rng = random.Random(max_age)
    sampler = FakeSampler(delay=lambda call: 0.15 if call % 5 == 0 else 0.01 * rng.random())
    trainer = FakeTrainer(max_age, delay=0.01)  # it asserts the age of every token
    cfg = streaming(steps=12, staleness=Staleness(max_age=max_age, late=late))
    loop = make_loop(tmp_path, cfg, sampler, trainer)
    result = finish(loop)
    trained = events(tmp_path, "train")
    assert result["version"] == 12 and len(trained) == len(set(trained)) == 36 and loop.ledger.balanced
    for version in range(12):  # every step is made of the groups of one batch
        assert sum(n for v, n in trainer.fed if v == version) == 3
    assert len(trainer.fed) > 12 and set(trainer.scales) == {1 / (3 * 2 * 2)}  # groups, samples, tokens
    if late == "wait" or max_age == 0:
        assert not result["dropped"]


def test_at_age_zero_groups_are_trained_before_the_last_of_the_batch_is_there(tmp_path):
    order, fed = [], asyncio.Event()

    class Sampler(FakeSampler):
        async def generate(self, prompt_ids, seeds, request_id):
            if request_id in ("2.0", "5.0", "8.0"):  # the last of each batch
                await fed.wait()
                order.append("last")
            return await super().generate(prompt_ids, seeds, request_id)

    class Trainer(FakeTrainer):
        async def feed(self, errand, *arrays):
            await super().feed(errand, *arrays)
            order.append("feed")
            fed.set()

        async def finish(self, scale):
            fed.clear()
            order.append("finish")
            return await super().finish(scale)

    cfg = streaming(steps=3, staleness=Staleness(max_age=0))
    assert finish(make_loop(tmp_path, cfg, Sampler(), Trainer(0)))["version"] == 3
    steps = " ".join(order).removesuffix(" finish").split(" finish ")
    assert len(steps) == 3
    for step in steps:
        assert step.startswith("feed") and step.endswith("last feed")


def test_what_is_fed_is_neither_offered_again_nor_dropped_while_others_become_too_old():
    cfg = streaming(staleness=Staleness(max_age=1, late="drop"))
    harvest = Harvest(cfg)
    harvest.add(group(0, version=1))
    harvest.add(group(4, version=0))
    parts, stale = harvest.take(2, dict.fromkeys({0, 4, 5, 6, 7}, 1))
    assert [g.ordinal for g in parts] == [0] and stale == (4,) and harvest.lacking == 2
    harvest.drop(4)
    harvest.add(group(6, version=2))
    parts, stale = harvest.take(2, dict.fromkeys({0, 5, 6, 7}, 1))
    assert [g.ordinal for g in parts] == [6] and stale == () and harvest.lacking == 1
    assert harvest.take(2, dict.fromkeys({0, 5, 6, 7}, 1)) == ([], ()) and set(harvest.ready) == {0, 6}
    harvest.add(group(7, version=1))
    harvest.add(group(5, version=1))
    parts, _ = harvest.take(2, dict.fromkeys({0, 5, 6, 7}, 1))
    assert [g.ordinal for g in parts] == [5] and harvest.lacking == 0
    assert [g.ordinal for g in harvest.trained()] == [0, 6, 5]
    assert set(harvest.ready) == {7} and harvest.lacking == 3


def group(ordinal, version):
    meta = SampleMeta(
        text="x", n_tokens=2, finish="stop", version_min=version, version_max=version, engine="sampler-0"
    )
    prompt = Prompt(ids=(1,), text="1", answer="x")
    return Group(
        ordinal=ordinal, prompt=prompt, metas=(meta, meta), tokens=None,
        verdicts=({"judge": Verdict(outcome=Score(1.0))}, {"judge": Verdict(outcome=Score(0.0))}),
        rewards=(1.0, 0.0), truth=(None, None),
    )  # fmt: skip


def test_answers_without_a_reward_are_not_in_the_divisor_of_the_step(tmp_path):
    def verdict(call, i):
        return Verdict(outcome=ParseFail("no_match") if i == 3 else Score(float(i % 2)))

    trainer = FakeTrainer(0)
    cfg = streaming(steps=2, samples=4, staleness=Staleness(max_age=0))
    finish(make_loop(tmp_path, cfg, trainer=trainer, judge=FakeJudge(verdict)))
    assert trainer.scales == [1 / (3 * 3 * 2)] * 2  # groups, answers with a reward, tokens
    for lessons in trainer.lessons:
        assert [lesson.weight["policy"] for lesson in lessons] == [1.0, 1.0, 1.0, 0.0]


def test_what_was_fed_and_not_stepped_on_is_trained_after_a_resume(tmp_path):
    from rl import checkpoint

    class Killed(FakeTrainer):
        async def finish(self, scale):
            if self.version == 5:
                raise RuntimeError("killed")
            return await super().finish(scale)

    cfg = replace(streaming(steps=8), checkpoint=Checkpoint(every=4))
    with pytest.raises(RoleError, match="killed"):
        finish(make_loop(tmp_path, cfg, trainer=Killed(2)))
    found = checkpoint.newest(tmp_path, print)
    assert found is not None
    version, ledger, _ = checkpoint.read(found)
    assert version == 4
    again = make_loop(
        tmp_path, cfg, FakeSampler(version=4), FakeTrainer(2, version=4), version=version, ledger=ledger
    )
    assert finish(again)["trained"] == 24
    assert sum(hi - lo for lo, hi in again.ledger.done) == 24


def test_more_than_one_term_or_a_choice_of_ones_own_is_refused():
    trainer = replace(CONFIG.trainer, stream=True)
    check(replace(CONFIG, trainer=trainer))
    with pytest.raises(ConfigError, match="trainer.stream: loss.policy and loss.kl are means"):
        check(replace(CONFIG, trainer=trainer, loss=replace(CONFIG.loss, kl=0.1)))
    pick = replace(CONFIG.staleness, pick="mine.py:f")
    with pytest.raises(ConfigError, match="trainer.stream .*staleness.pick"):
        check(replace(CONFIG, trainer=trainer, staleness=pick))
    check(replace(CONFIG, staleness=pick))


def test_a_plan_refuses_a_loss_that_looks_at_the_whole_step():
    loss = replace(CONFIG.loss, advantage="batch_std")
    cfg = replace(CONFIG, loss=loss, trainer=replace(CONFIG.trainer, stream=True))
    with pytest.raises(ConfigError, match="^trainer.stream: loss.advantage batch_std .*; set it to False$"):
        launch(cfg, only_plan=True, resume=None)
    assert launch(replace(cfg, loss=CONFIG.loss), only_plan=True, resume=None) == 0
