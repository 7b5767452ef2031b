"""The controller under delays, failures and lies of those it works with."""

import json
import random
from dataclasses import replace

import pytest

from rl.config import Checkpoint, Deadlines, Staleness
from rl.harvest import NothingToTrain, PickError
from rl.ledger import Event, Ledger, apply
from rl.roles import RoleError
from rl.sync import SyncError
from rl.types import InfraFail, ParseFail, Prompt, Score, Verdict
from tests.rl.fakes import FakeJudge, FakeSampler, FakeTrainer, finish, make_loop, make_roles, small


def slow_sampler(seed=0):
    """Most groups are quick, every fifth takes longer than several steps."""
    rng = random.Random(seed)
    return FakeSampler(delay=lambda call: 0.15 if call % 5 == 0 else 0.01 * rng.random())


@pytest.mark.parametrize("max_age", [0, 1, 2])
@pytest.mark.parametrize("late", ["drop", "wait"])
def test_with_delays_no_token_older_than_the_bound_is_trained(tmp_path, max_age, late):
    cfg = small(steps=12, staleness=Staleness(max_age=max_age, late=late))
    trainer = FakeTrainer(max_age, delay=0.01)  # it asserts the age of every token
    loop = make_loop(tmp_path, cfg, slow_sampler(), trainer)
    result = finish(loop)
    assert result["version"] == 12 and result["trained"] == 36 and loop.ledger.balanced
    if late == "wait" or max_age == 0:
        assert not result["dropped"]  # nobody was overtaken


def test_what_was_too_old_is_counted_and_issued_again_until_it_is_trained(tmp_path):
    cfg = small(steps=12, staleness=Staleness(max_age=1, late="drop"))
    loop = make_loop(tmp_path, cfg, slow_sampler(), FakeTrainer(1, delay=0.01))
    result = finish(loop)
    assert result["dropped"]["stale"] >= 1
    assert result["issued"] == result["trained"] + sum(result["dropped"].values()) + len(loop.ledger.live)
    again = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    dropped = {e["ordinal"] for e in again if e["kind"] == "drop"}
    trained = [e["ordinal"] for e in again if e["kind"] == "train"]
    assert len(trained) == len(set(trained)) and dropped & set(trained), (
        "a dropped prompt came back and was trained"
    )


def test_the_log_of_events_folds_to_a_balanced_ledger_after_every_step(tmp_path):
    loop = make_loop(tmp_path, small(steps=5), slow_sampler())
    finish(loop)
    ledger, steps = Ledger(), 0
    for line in (tmp_path / "ledger.jsonl").read_text().splitlines():
        event = Event(**json.loads(line))
        ledger = apply(ledger, event)
        assert ledger.balanced
        steps += event.kind == "train"
    assert ledger == loop.ledger and steps == 15


def test_sampling_goes_on_while_the_trainer_trains(tmp_path):
    sampler, seen = FakeSampler(delay=lambda call: 0.02 * (call % 7)), []

    class Watching(FakeTrainer):
        async def step(self, errand, *arrays):
            before = sampler.finished
            metrics = await super().step(errand, *arrays)
            seen.append(sampler.finished - before)
            return metrics

    finish(make_loop(tmp_path, small(steps=6), sampler, Watching(2, delay=0.03), FakeJudge(delay=0.005)))
    assert sum(seen) > 0


def test_a_run_that_filters_everything_ends_with_a_message(tmp_path):
    judge = FakeJudge(lambda call, i: Verdict(outcome=Score(1.0)))
    base = small(deadlines=Deadlines(patience=40))
    cfg = replace(base, loss=replace(base.loss, zero_signal="drop"))
    with pytest.raises(NothingToTrain, match=r"4\d groups in a row.*zero_signal.*rewards are all equal"):
        finish(make_loop(tmp_path, cfg, judge=judge))


def test_constant_rewards_are_trained_with_zero_advantage_where_the_config_says_so(tmp_path):
    trainer = FakeTrainer(2)
    finish(
        make_loop(
            tmp_path,
            small(steps=2),
            trainer=trainer,
            judge=FakeJudge(lambda c, i: Verdict(outcome=Score(1.0))),
        )
    )
    assert {lesson.adv for group in trainer.lessons for lesson in group} == {0.0}


def broken(call, i):
    """Of four answers: one cannot be parsed, one finds no judge, the others score 1 and 0."""
    outcomes = [Score(1.0), ParseFail("no_match"), Score(0.0), InfraFail("timeout")]
    return Verdict(outcome=outcomes[i % 4])


def test_failed_judgements_change_neither_group_mates_nor_the_reward_mean_and_are_counted_by_kind(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with_failures, without = FakeTrainer(2), FakeTrainer(2)
    finish(
        make_loop(tmp_path / "a", small(steps=2, samples=4), trainer=with_failures, judge=FakeJudge(broken))
    )
    clean = FakeJudge(lambda call, i: Verdict(outcome=Score(1.0 - i)))
    finish(make_loop(tmp_path / "b", small(steps=2, samples=2), trainer=without, judge=clean))
    for full, reduced in zip(with_failures.lessons, without.lessons, strict=True):
        assert [full[0].adv, full[2].adv] == [reduced[0].adv, reduced[1].adv]
        assert full[1].adv == full[3].adv == full[1].weight["policy"] == full[3].weight["policy"] == 0.0
    first = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["reward/mean"] == 0.5 and first["reward/missing"] == 0.5
    assert first["judge/parse_fail/no_match_count"] == first["judge/infra_fail_count"] > 0


def test_a_judge_that_never_answers_is_asked_again_and_ends_the_run_with_a_message(tmp_path):
    judge = FakeJudge(lambda call, i: Verdict(outcome=InfraFail("connection refused")))
    with pytest.raises(NothingToTrain, match="infra.*the judge does not answer"):
        finish(make_loop(tmp_path, small(deadlines=Deadlines(patience=30)), judge=judge))


def test_a_judge_that_cannot_be_read_ends_the_run_with_a_message(tmp_path):
    judge = FakeJudge(lambda call, i: Verdict(outcome=ParseFail("no_match")))
    with pytest.raises(NothingToTrain, match=r"judge.*no judgement could be read"):
        finish(make_loop(tmp_path, small(deadlines=Deadlines(patience=30)), judge=judge))


def test_a_corrupted_tensor_stops_the_run_within_one_step_and_is_named(tmp_path):
    trainer = FakeTrainer(2)
    with pytest.raises(SyncError, match="sampler-0 holds other weights than version 3 .*: a"):
        finish(make_loop(tmp_path, small(steps=9), FakeSampler(corrupt_at=3), trainer))
    assert 3 not in trainer.sampled  # nothing that the wrong weights made was trained
    assert trainer.version <= 4


def test_a_replica_that_fails_or_hangs_is_named(tmp_path):
    class Dying(FakeSampler):
        async def generate(self, *args):
            if self.calls > 8:
                raise RuntimeError("out of memory")
            return await super().generate(*args)

    with pytest.raises(RoleError, match=r"sampler-0\.generate failed: out of memory"):
        finish(make_loop(tmp_path, small(), Dying()))
    with pytest.raises(RoleError, match=r"judge-0\.rate gave no answer within 0\.1 s"):
        finish(make_loop(tmp_path, small(deadlines=Deadlines(judge=0.1)), judge=FakeJudge(delay=60)))


def test_a_run_of_more_steps_than_prompts_goes_round_again(tmp_path):
    result = finish(make_loop(tmp_path, small(steps=10)))  # 30 groups of 10 prompts
    assert result["trained"] == 30


def test_o082_a_resumed_ledger_trains_what_was_under_way_exactly_once(tmp_path):
    from rl import checkpoint

    cfg = replace(small(steps=8), checkpoint=Checkpoint(every=4))
    loop = make_loop(tmp_path, replace(cfg, trainer=replace(cfg.trainer, steps=4)), slow_sampler())
    finish(loop)
    version, ledger, extra = checkpoint.read(checkpoint.newest(tmp_path, print))
    assert version == 4 and extra["events"] <= loop.log.events
    again = make_loop(
        tmp_path, cfg, FakeSampler(version=4), FakeTrainer(2, version=4), version=version, ledger=ledger
    )
    result = finish(again)
    assert result["trained"] == 24 and again.ledger.balanced
    trained = sorted(o for lo, hi in again.ledger.done for o in range(lo, hi))
    assert len(trained) == len(set(trained))


@pytest.mark.parametrize(("rule", "truth"), [("exact", 0.0), ("gsm8k", 1.0)])
def test_truth_is_told_by_the_rule_of_the_config_before_during_and_after(tmp_path, rule, truth):
    cfg = small(steps=2)
    cfg = replace(cfg, reward=replace(cfg.reward, rule_name=rule))
    solved = [Prompt(ids=(i,), text=str(i), answer="3 + 4 = 7\n#### 7") for i in range(10)]
    loop = make_loop(tmp_path, cfg, FakeSampler(text="so 7"), prompts=solved)
    result = finish(loop)
    assert result["before"]["truth"] == result["after"]["truth"] == truth
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["truth/accuracy"] for line in lines] == [truth, truth]


def test_a_choice_of_ones_own_makes_the_batches_and_one_that_is_none_ends_the_run_by_name(tmp_path):
    """V1's custom sampler: here the newest of those that are ready."""
    seen = []

    def newest(ready, version, prompts):
        seen.append([r.ordinal for r in ready])
        assert all(r.version_min >= version - 2 and r.reward == 0.5 for r in ready)
        return [r.ordinal for r in ready][-prompts:]

    for name in "abc":
        (tmp_path / name).mkdir()
    loop = make_loop(tmp_path / "a", small(steps=4), pick=newest)
    assert finish(loop)["version"] == 4
    events = [json.loads(line) for line in (tmp_path / "a" / "ledger.jsonl").read_text().splitlines()]
    taken = [e["ordinal"] for e in events if e["kind"] == "train"]
    assert taken[:3] == sorted(seen[0])[-3:] and len(set(taken)) == 4 * 3

    with pytest.raises(PickError, match="expected 3 different ordinals"):
        finish(make_loop(tmp_path / "b", small(steps=4), pick=lambda ready, version, prompts: [0, 0, 0]))
    with pytest.raises(PickError, match="ZeroDivisionError"):
        finish(make_loop(tmp_path / "c", small(steps=4), pick=lambda *_: 1 / 0))


def test_o062_the_ramp_of_the_functions_weights_follows_the_version_also_after_a_resume(tmp_path):
    cfg = small(steps=8)
    cfg = replace(cfg, reward=replace(cfg.reward, judge=0.0, fn=("f.py:f",), ramp=10))
    assert [cfg.reward.weights_at(v)["fn/0"] for v in (0, 6, 9, 20)] == pytest.approx([0.1, 0.7, 1.0, 1.0])

    def rewards(version, steps):
        """Mean reward of each step of a run that begins at a version, as a resumed one does."""
        roles = make_roles(cfg, trainer=FakeTrainer(2, version=version), sampler=FakeSampler(version=version))
        roles = replace(roles, judges={}, producers={"fn/0": roles.producers["judge"]})
        folder = tmp_path / str(version)
        folder.mkdir()
        run = replace(cfg, trainer=replace(cfg.trainer, steps=steps))
        finish(make_loop(folder, run, roles=roles, version=version))
        return [
            json.loads(line)["reward/mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]

    assert rewards(0, 8) == pytest.approx([0.05 * (v + 1) for v in range(8)])
    assert rewards(6, 8) == pytest.approx([0.35, 0.4])  # step 7 has 0.7 of the weight
