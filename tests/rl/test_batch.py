"""Packed tensors: every trained token keeps its own values, wherever its sequence lies in the row."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from losses import linear_logp
from rl.batch import GroupData, GroupTokens, build_micro
from rl.config import Correction
from rl.lessons import Lesson
from rl.packing import plan_micros
from rl.step import attend_packed
from rl.types import Completion, Scores
from tests.rl.steps import (
    CORRECTIONS,
    EVERYTHING,
    FORMS,
    SURVEYED,
    assert_same,
    fresh_model,
    gradients,
    make_groups,
)

CPU = torch.device("cpu")


def group(prompt, answers, teacher=None):
    samples = tuple(
        Completion(
            tokens=np.array(a, np.int32),
            logps=np.array([-0.1 * t for t in a], np.float32),
            versions=np.arange(len(a), dtype=np.int32),
            finish="stop",
        )
        for a in answers
    )
    lessons = [
        Lesson(adv=float(i), weight={"policy": 0.5, "kl": 0.25}, distill={"t": 0.125})
        for i in range(len(samples))
    ]
    return GroupData(
        tokens=GroupTokens(np.array(prompt), samples),
        lessons=lessons,
        teachers={"t": teacher} if teacher else {},
    )


def test_o037_each_answer_token_gets_its_own_values_whatever_the_length_of_its_prompt():
    teacher = [Scores(logps=np.array([0.1, 0.2, 0.3], np.float32))]
    groups = {0: group([1, 2], [[3, 4, 5]], teacher), 1: group([1, 2, 3, 4, 5], [[6, 7, 8]], teacher)}
    micro = build_micro([(0, 0), (1, 0)], groups, CPU, current=3)
    assert micro.teachers["t"].logp.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.1, 0.2, 0.3])
    assert micro.target.tolist() == [3, 4, 5, 6, 7, 8]
    assert (
        micro.ids[micro.select + 1].tolist() == micro.target.tolist()
    )  # the state before predicts the token
    assert micro.logp_mu.tolist() == pytest.approx([-0.3, -0.4, -0.5, -0.6, -0.7, -0.8])
    assert micro.version.tolist() == [0, 1, 2, 0, 1, 2] and micro.row.tolist() == [0, 0, 0, 1, 1, 1]


@torch.no_grad()
def answer_logps(places, groups):
    model, micro = fresh_model(), build_micro(places, groups, CPU, current=0)
    hidden = model(micro.ids, micro.layout.positions, attend_packed(micro.layout))
    logp, _ = linear_logp(hidden[micro.select], model.head, micro.target)
    return logp, micro.row


def test_o022_log_probs_do_not_depend_on_where_the_sequence_lies():
    groups = {0: group([3, 9, 2], [[5, 6], [7, 8, 9, 10]]), 1: group([4] * 17, [[1, 2, 3], [11]])}
    alone, _ = answer_logps([(0, 1)], groups)
    for places in ([(0, 1), (1, 0)], [(1, 0), (0, 1)], [(1, 1), (0, 0), (1, 0), (0, 1)]):
        packed, row = answer_logps(places, groups)
        assert torch.allclose(packed[row == places.index((0, 1))], alone, atol=1e-5)


def test_a_teacher_has_rows_for_the_tokens_that_it_taught_and_no_others():
    full = [Scores(logps=np.zeros(2, np.float32), full=np.zeros((2, 19), np.float32))]
    groups = {0: group([1], [[2, 3]], full), 1: group([1], [[4]])}
    micro = build_micro([(0, 0), (1, 0)], groups, CPU, current=0)
    (taught,) = micro.teachers.values()
    assert taught.rows is not None and taught.rows.shape == (2, 19) and taught.at.tolist() == [0, 1]
    assert not build_micro([(1, 0)], groups, CPU, current=0).teachers


# ── A prompt for all answers of its group ─────────────────────────────────────────────────────────


RAGGED = {
    0: group([3, 9, 2, 2], [[5, 6], [7, 8, 9, 10, 1, 4], [11]]),
    1: group([4] * 7, [[1, 2, 3], [12, 13]]),
    2: group([8], [[14, 15, 16]]),
}
EVERYONE = [(g, s) for g, data in RAGGED.items() for s in range(len(data.tokens.samples))]


def logits_and_gradients(places, groups, **how):
    """Logits [M, V] of the predictions, and the gradient of a function that weighs all of them."""
    model, micro = fresh_model(), build_micro(places, groups, CPU, current=0, **how)
    hidden = model(micro.ids, micro.layout.positions, attend_packed(micro.layout))
    n = sum(len(groups[g].tokens.samples[s].tokens) for g, s in places)
    logits = model.logits(hidden[micro.select])[:n]
    (
        logits.log_softmax(-1) * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    ).sum().backward()
    return logits.detach(), [p.grad for p in model.parameters()], micro


@pytest.mark.parametrize("places", [EVERYONE, EVERYONE[1:-2], [(1, 1), (1, 0), (0, 2), (0, 0)]], ids=len)
@pytest.mark.parametrize("bucket", [1, 16])
def test_shared_prompts_have_the_logits_and_gradients_of_prompts_written_out(places, bucket):
    expected, gradient, plain = logits_and_gradients(places, RAGGED)
    got, shared_gradient, shared = logits_and_gradients(places, RAGGED, share_prompt=True, bucket=bucket)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    for a, b in zip(shared_gradient, gradient, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    repeated = {g: sum(h == g for h, _ in places) - 1 for g, _ in places}
    saved = sum(n * len(RAGGED[g].tokens.prompt_ids) for g, n in repeated.items())
    if bucket == 1:
        assert len(shared.ids) == len(plain.ids) - saved
    n = len(expected)
    for name in ("target", "row", "logp_mu", "version", "adv"):
        assert getattr(shared, name)[:n].equal(getattr(plain, name)), name


def test_a_step_of_shared_prompts_has_the_gradient_and_metrics_of_one_that_writes_them_out():
    groups = dict(enumerate(make_groups(6)))
    prompts = [len(data.tokens.prompt_ids) for data in groups.values()]
    lengths = [
        [p + len(s.tokens) for s in d.tokens.samples] for p, d in zip(prompts, groups.values(), strict=True)
    ]
    (planned,) = plan_micros(lengths, [list(groups)], 24, prompts=prompts, share_prompt=True)
    micros = [build_micro(places, groups, CPU, current=3, share_prompt=True) for places in planned]
    assert len(micros) > 2 and all(len(micro.ids) <= 24 for micro in micros)
    assert any(micro.layout.keys is not None for micro in micros)
    everyone = [(g, s) for g in groups for s in range(4)]
    expected, metrics = gradients([build_micro(everyone, groups, CPU, current=3)])
    got, shared_metrics = gradients(micros)
    assert_same(expected, got)
    assert shared_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


# ── Few shapes ────────────────────────────────────────────────────────────────────────────────────


COMPOSITIONS = [
    EVERYTHING,
    SURVEYED,
    replace(EVERYTHING, loss=replace(EVERYTHING.loss, distill_form="advantage")),
]
COMPOSITIONS += [replace(EVERYTHING, loss=replace(EVERYTHING.loss, **values)) for values in FORMS]
COMPOSITIONS += [replace(EVERYTHING, correction=correction) for correction in CORRECTIONS]
COMPOSITIONS += [
    replace(EVERYTHING, correction=Correction(weight="tis"), loss=replace(EVERYTHING.loss, form="reinforce"))
]


@pytest.mark.parametrize("bucket, share", [(128, False), (16, True)])
@pytest.mark.parametrize(
    "config",
    [c for c in COMPOSITIONS if c.loss.form != "clip_cov"],  # which draws a number for every token
    ids=lambda c: (
        f"{c.loss.form}-{c.loss.kl_form}-{c.loss.distill_form}-{c.correction.weight}-{c.correction.reject}"
    ),
)
def test_padding_and_shared_prompts_change_no_metric_and_no_gradient(config, bucket, share):
    groups = dict(enumerate(make_groups(4)))  # group 2 has no teacher
    places = [(g, s) for g in groups for s in range(4)]
    plain = build_micro(places, groups, CPU, current=3)
    padded = build_micro(places, groups, CPU, current=3, bucket=bucket, share_prompt=share)
    (taught,) = padded.teachers.values()
    assert len(padded.target) > len(plain.target) and not taught.mask.all()
    assert (len(taught.at) == len(padded.target)) == (bucket == 128)  # with and without a gather
    (expected, metrics), (got, padded_metrics) = gradients([plain], config), gradients([padded], config)
    assert_same(expected, got)
    assert padded_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_shapes_depend_on_the_bucket_and_not_on_the_samples():
    groups = dict(enumerate(make_groups(6)))
    places = [(g, s) for g in groups for s in range(4)]
    shapes = set()
    for n in range(len(places) + 1):
        micro = build_micro(places[:n], groups, CPU, current=3, bucket=64)
        columns = [micro.select, micro.target, micro.row, micro.logp_mu, micro.version, micro.adv]
        columns += [*micro.weight.values(), *micro.mask.values()]
        assert {len(c) for c in columns} == {micro.n_rows}
        assert len(micro.ids) == len(micro.layout.positions) == micro.layout.cu_q[-1]
        shapes.add((len(micro.ids), micro.n_rows, *(len(t.at) for t in micro.teachers.values())))
    assert all(size % 64 == 0 for shape in shapes for size in shape) and len(shapes) <= 10


def test_an_empty_micro_batch_has_two_segments_and_trains_nothing():
    groups = {0: group([1, 2], [[3, 4]])}
    micro = build_micro([], groups, CPU, current=0, bucket=64)
    assert micro.layout.cu_q.tolist() == [0, 32, 64] and micro.layout.max_q == micro.layout.max_k == 32
    assert len(micro.ids) == len(micro.target) == 64
    assert not any(x.any() for x in (*micro.weight.values(), *micro.mask.values()))
    assert build_micro([], groups, CPU, current=0).layout.cu_q.tolist() == [0, 1]


@pytest.mark.parametrize("bucket", [1, 4, 8, 32])
def test_as_many_taught_tokens_as_trained_ones_are_all_of_them(bucket):
    teacher = [Scores(logps=np.array([-1.0, -2.0, -3.0], np.float32))]
    groups = {0: group([1, 2], [[3, 4]]), 1: group([1], [[6, 7, 8]], teacher)}
    micro = build_micro([(0, 0), (1, 0)], groups, CPU, current=0, bucket=bucket)
    (taught,) = micro.teachers.values()
    if len(taught.at) == len(micro.target):
        assert taught.at.tolist() == list(range(len(micro.target)))
    assert taught.at[taught.mask].tolist() == [2, 3, 4]
    assert taught.logp[taught.mask].tolist() == [-1.0, -2.0, -3.0]
    assert not taught.weight[~taught.mask].any()


def test_o036_a_sample_with_other_than_one_log_prob_a_token_is_an_error():
    data = group([1, 2], [[3, 4]])
    (sample,) = data.tokens.samples
    cut = replace(
        data, tokens=GroupTokens(data.tokens.prompt_ids, (replace(sample, logps=sample.logps[:1]),))
    )
    with pytest.raises(ValueError, match="2 tokens but the sampler sent 1"):
        build_micro([(0, 0)], {0: cut}, CPU, current=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_many_batches_made_one_after_another_are_those_of_the_host():

    def long(i: int) -> GroupData:
        teacher = [Scores(logps=np.full(n, float(i), np.float32)) for n in (2999 + i, 3995)]
        return group(range(i, i + 2000), [range(1, 3000 + i), range(5, 4000)], teacher)

    groups = {i: long(i) for i in range(20)}
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 4096  # the copies below wait for this, while their sources are given back
    there = [build_micro([(i, 0), (i, 1)], groups, torch.device("cuda"), current=i) for i in groups]
    for i, micro in enumerate(there):
        here = build_micro([(i, 0), (i, 1)], groups, CPU, current=i)
        for name in ("ids", "select", "target", "row", "logp_mu", "version", "current", "adv"):
            assert torch.equal(getattr(micro, name).cpu(), getattr(here, name)), (i, name)
        for name in here.weight:
            assert torch.equal(micro.weight[name].cpu(), here.weight[name]), (i, name)
        assert torch.equal(micro.teachers["t"].logp.cpu(), here.teachers["t"].logp), i
