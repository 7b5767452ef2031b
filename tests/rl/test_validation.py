"""Validation beside training: exactly one version's weights, in its own lane, and training does not wait."""

import json
from dataclasses import replace

import pytest

from rl.config import Validation
from rl.engines.base import UpdateReport
from rl.roles import Local, Pool, TrainerGroup
from rl.sync import SyncError
from rl.types import Prompt, SampleMeta
from tests.rl.fakes import FakeSampler, FakeTrainer, finish, make_loop, make_roles, small

PROMPTS = [Prompt(ids=(i,), text=str(i), answer="v4") for i in range(10)]


class Versioned(FakeSampler):
    """Its answer names the version that sampled it."""

    async def generate(self, prompt_ids, seeds, request_id):
        self.text = f"v{self.version}"
        return await super().generate(prompt_ids, seeds, request_id)


class Rank(FakeTrainer):
    """Also answers held-out prompts from a copy of the weights that it was told to hold."""

    held = -1

    async def hold(self, version, weights):
        self.held = version
        return UpdateReport(version=version, checksums=weights, probe=(0.0,))

    async def answer(self, asked):
        held = {"version_min": self.held, "version_max": self.held}
        meta = SampleMeta(text=f"v{self.held}", n_tokens=1, finish="stop", **held)
        return [meta] * len(asked)


def run(tmp_path, on, validator=None, steps=9, ranks=1, every=4, share=1.0):
    cfg = small(steps=steps, validation=Validation(every=every, on=on, share=share))
    cfg = replace(cfg, trainer=replace(cfg.trainer, ranks=ranks))
    trainers = [Rank(cfg.staleness.max_age, delay=0.001) for _ in range(ranks)]
    roles = replace(
        make_roles(cfg, sampler=FakeSampler(delay=lambda n: 0.02)),
        trainer=TrainerGroup([Local(f"trainer-{i}", t) for i, t in enumerate(trainers)]),
        validator=Pool([Local("validator-0", validator or Versioned())]) if on == "replica" else None,
    )
    loop = make_loop(tmp_path, cfg, roles=roles, prompts=PROMPTS)
    return loop, finish(loop)


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("on", ["replica", "trainer"])
def test_results_carry_the_version_whose_weights_gave_every_answer(tmp_path, on):
    """The right answer is "v4": only version 4 gives it, whatever the trainer has come to meanwhile."""
    _, result = run(tmp_path, on)
    found = {row["validation/version"]: row["validation/truth"] for row in rows(tmp_path)}
    assert found == {4: 1.0, 8: 0.0} and result["version"] == 9
    assert all(row["validation/judge"] >= 0 and row["validation/prompts"] == 2 for row in rows(tmp_path))


def test_every_rank_takes_its_part_of_the_prompts(tmp_path):
    loop, _ = run(tmp_path, "trainer", ranks=2)
    assert [h.target.held for h in loop.roles.trainer.ranks] == [8, 8]
    assert [row["validation/truth"] for row in rows(tmp_path)] == [1.0, 0.0]


def test_training_does_not_wait_and_one_validation_at_a_time(tmp_path):
    """A validator that needs longer than the whole run: the steps go on, and what falls due is skipped."""
    loop, result = run(tmp_path, "replica", Versioned(delay=lambda n: 0.4), every=1)
    assert result["version"] == 9
    assert rows(tmp_path)[0]["validation/version"] == 1 and len(rows(tmp_path)) < 9
    assert loop.proctor.validation.skipped == 9 - len(rows(tmp_path))


def test_the_share_bounds_the_prompts_under_way(tmp_path):
    most = 0

    class Counting(Versioned):
        under_way = 0

        async def generate(self, *args):
            nonlocal most
            self.under_way += 1
            most = max(most, self.under_way)
            result = await super().generate(*args)
            self.under_way -= 1
            return result

    run(tmp_path, "replica", Counting(delay=lambda n: 0.01), share=0.5)
    assert most == 1  # of two prompts


def test_a_validator_whose_weights_differ_is_named_and_its_answers_are_not_reported(tmp_path):
    with pytest.raises(SyncError, match="validator-0"):
        run(tmp_path, "replica", Versioned(corrupt_at=4))
    assert rows(tmp_path) == []
