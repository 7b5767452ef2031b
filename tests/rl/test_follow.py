"""A sample that cannot be trained, from the engine to the gradient: its mates lose nothing by it."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from losses import shrunk_advantages
from rl import errand
from rl.actors.rollout import Rollout
from rl.actors.teacher import Teacher
from rl.batch import build_micro
from rl.config import Loss, Staleness
from rl.follow import Broken, Group, follow
from rl.roles import Local, Pool, Roles, TrainerGroup
from rl.types import Abstain, Call, Completion, Prompt, SamplingParams, Score, Verdict
from tests.rl.fakes import FakeJudge, FakeSampler, FakeTrainer, finish, make_loop, small
from tests.rl.steps import EVERYTHING, assert_same, gradients
from tests.rl.test_synchronous import tiny_bundle

CPU = torch.device("cpu")


def sampled(n, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 7, n)
    return [
        Completion(
            tokens=rng.integers(0, 16, size).astype(np.int32),
            logps=-rng.random(size).astype(np.float32),
            versions=np.full(size, 5, np.int32),
            finish="stop",
        )
        for size in sizes
    ]


class Sends:
    """An engine whose samples are these; None: it does not come."""

    def __init__(self, samples):
        self.samples = samples

    async def generate(self, prompt_ids, *, params, seeds, request_id):
        for i, sample in enumerate(self.samples):
            if sample is not None:
                yield i, sample


class Counts:
    """A judge of the letters' sum; it reports a call about each answer."""

    async def rate(self, prompt, texts, seeds):
        self.texts = texts
        scores = [Score(sum(map(ord, text)) % 97 / 97) for text in texts]
        return [Verdict(outcome=score, calls=(call(i),)) for i, score in enumerate(scores)]


def call(i):
    return Call(producer="judge", prompt="", about=(i,), part="", text="", finish="stop", outcome="score",
                score=0.0, n_prompt=0, n_tokens=1, seconds=0.0, replica="", attempts=1)  # fmt: skip


KL = replace(EVERYTHING, teachers={}, loss=Loss(kl=0.1, agg="seq_mean_token_mean"))


def followed(samples):
    """The group that these samples become, with rewards and the log-probs of a reference; and its judge."""
    bundle, judge = tiny_bundle(), Counts()
    rollout = Rollout(bundle, SamplingParams(), slots=16, name="sampler-0")
    rollout._engine = cast(Any, Sends(samples))
    reference = Teacher(bundle, slots=16, temperature=1.0)
    roles = Roles(
        trainer=TrainerGroup([]),
        sampler=Pool([Local("sampler-0", rollout)]),
        producers={"judge": judge},
        reference=Pool([Local("reference-0", reference)]),
    )

    async def proven(metas):
        return all(meta.version_max == 5 for meta in metas)

    async def main():
        await reference.start()
        prompt = Prompt(ids=(1, 2, 3), text="abc", answer="x")
        group = await follow(config_of(samples), roles, prompt, 0, 0, lambda kind: None, proven)
        await reference.stop()
        return group

    torch.set_num_threads(1)
    return asyncio.run(main()), judge


def config_of(samples):
    return replace(KL, sampler=replace(KL.sampler, samples=len(samples)))


def trained(samples, **how):
    """(gradients, metrics) of the step on the group that these samples become, and the group."""
    group, _ = followed(samples)
    assert isinstance(group, Group)
    cfg = config_of(samples)
    ((order, *arrays),) = errand.pack(cfg, [group])
    groups = errand.unpack(cfg, order, arrays)
    micros = [build_micro(places, groups, CPU, current=5, **how) for places in order.micros]
    return *gradients(micros, cfg), group


FAULTS = {
    "did not send it": lambda s: None,
    "0 tokens, 0 logps, 0 versions": lambda s: replace(
        s, tokens=s.tokens[:0], logps=s.logps[:0], versions=s.versions[:0]
    ),
    "tokens are float32": lambda s: replace(s, tokens=s.tokens.astype(np.float32)),
    "tokens are int32 .1, ": lambda s: replace(s, tokens=s.tokens[None]),
    "logps are object": lambda s: replace(s, logps=s.logps.astype(object)),
    "1 logps": lambda s: replace(s, logps=s.logps[:1]),
    "1 versions": lambda s: replace(s, versions=s.versions[:1]),
    "not all of its logps are finite": lambda s: replace(s, logps=s.logps * np.nan),
    "among the .* of the vocabulary": lambda s: replace(s, tokens=s.tokens + 1000),
}


@pytest.mark.parametrize("share_prompt", [False, True])
@pytest.mark.parametrize("why", FAULTS)
def test_o086_of_sixteen_samples_the_one_that_is_broken_is_left_out_and_fifteen_are_trained(
    why, share_prompt
):
    samples = sampled(16)
    expected, metrics, sound = trained(samples[:7] + samples[8:], share_prompt=share_prompt)
    got, broken_metrics, group = trained(
        [*samples[:7], FAULTS[why](samples[7]), *samples[8:]], share_prompt=share_prompt
    )
    assert_same(expected, got)
    assert broken_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert group.rewards[7] is None and group.truth[7] is None and group.version_min == sound.version_min == 5
    assert group.rewards[:7] + group.rewards[8:] == sound.rewards and None not in sound.rewards
    (meta,) = (meta for meta in group.metas if isinstance(meta, Broken))
    assert meta is group.metas[7] and meta.n_tokens == 0
    assert group.verdicts[7] == {"judge": Verdict(outcome=Abstain(meta.fault))}
    assert re.search(why, meta.fault)


def test_o086_nobody_is_asked_about_a_broken_sample_and_calls_keep_their_answers():
    samples = sampled(4)
    group, judge = followed([samples[0], None, *samples[2:]])
    assert isinstance(group, Group)
    assert judge.texts == [m.text for i, m in enumerate(group.metas) if i != 1]
    assert [call.about for of in group.verdicts for call in of["judge"].calls] == [(0,), (2,), (3,)]


def test_o086_a_group_of_which_nothing_can_be_trained_is_invalid():
    assert followed([None] * 4)[0] == "invalid"


class Breaks(FakeSampler):
    """One sample of each group is broken; of the first group, at its first attempt, all are."""

    async def generate(self, prompt_ids, seeds, request_id):
        metas, group = await super().generate(prompt_ids, seeds, request_id)
        broken = [Broken(text="", n_tokens=0, finish="stop", version_min=m.version_min,
                         version_max=m.version_max, engine=m.engine, fault="it has 0 tokens")
                  for m in metas]  # fmt: skip
        return (broken if request_id == "0.0" else [*metas[:-1], broken[-1]]), group


def test_o086_a_run_goes_on_with_the_others_and_counts_what_was_broken(tmp_path):
    trainer = FakeTrainer(2)
    result = finish(make_loop(tmp_path, small(steps=3, samples=4), Breaks(), trainer))
    assert result["version"] == 3 and result["trained"] == 9 and result["dropped"] == {"invalid": 1}
    for lessons in trainer.lessons:
        assert [lesson.weight["policy"] > 0 for lesson in lessons] == [True, True, True, False]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        assert logged["reward/missing"] == 0.25 and logged["dropped/invalid"] == 1
        assert logged["samples/broken"] == 3
    counted = result["judge_outcomes"]["judge"]  # no failure of the judge's
    assert counted.keys() == {"score", "abstain"} and counted["score"] == 3 * counted["abstain"] > 0


def test_what_the_votes_of_a_judge_disagree_on_reaches_the_lesson(tmp_path):
    def verdict(call, i):
        return Verdict(outcome=Score(float(i % 2)), noise=0.1 * i)

    cfg = small(steps=1, samples=4, staleness=Staleness(max_age=0))
    cfg = replace(cfg, loss=Loss(advantage="shrunk"))
    trainer = FakeTrainer(0)
    finish(make_loop(tmp_path, cfg, trainer=trainer, judge=FakeJudge(verdict)))
    weight = cfg.reward.weights["judge"]
    rewards, noise = [weight * r for r in (0.0, 1.0, 0.0, 1.0)], [weight**2 * 0.1 * i for i in range(4)]
    expected, _ = shrunk_advantages(torch.tensor([rewards]).double(), torch.tensor([noise]).double())
    for group in range(0, len(trainer.lessons[0]), 4):
        got = [lesson.adv for lesson in trainer.lessons[0][group : group + 4]]
        assert got == pytest.approx(expected[0].tolist()) and len(set(map(abs, got))) > 1
