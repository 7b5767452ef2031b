"""The gradient of a step does not depend on how the batch is split, packed or spread over ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from experiments.genrm_grpo import CONFIG
from rl import forms
from rl.batch import build_micro
from rl.check import check
from rl.config import ConfigError, Correction, Loss, Teacher
from rl.lessons import Rated, make_lessons
from rl.objective import describe, make_objective
from rl.step import (
    TrainState,
    accumulate,
    begin,
    finish,
    learning_rate,
    make_optimizer,
    train_step,
)
from rl.terms import separable, unstreamable
from rl.types import Scores
from tests.rl.steps import (
    CORRECTIONS,
    EVERYTHING,
    FORMS,
    FUSED,
    SURVEYED,
    assert_same,
    fresh_model,
    gradients,
    make_groups,
    split,
    whole,
)


@pytest.mark.parametrize("cap", [16, 40, 1000])
@pytest.mark.parametrize("reverse", [False, True])
def test_micro_batches_and_packing_order_do_not_change_the_gradient(cap, reverse):
    groups = make_groups()
    expected, metrics = gradients(whole(groups))
    got, split_metrics = gradients(split(groups, 1, cap, reverse=reverse))
    assert_same(expected, got)
    for name, value in metrics.items():
        assert split_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "config",
    [replace(EVERYTHING, loss=replace(EVERYTHING.loss, **values)) for values in FORMS]
    + [replace(EVERYTHING, correction=correction) for correction in CORRECTIONS]
    + [
        replace(
            EVERYTHING, correction=Correction(weight="tis"), loss=replace(EVERYTHING.loss, form="reinforce")
        )
    ],
    ids=lambda c: (
        f"{c.loss.form}-{c.loss.kl_form}-{c.loss.distill_kind}-{c.correction.weight}-{c.correction.reject}"
    ),
)
def test_every_composition_runs_and_does_not_depend_on_the_split(config):
    check(config)
    groups = make_groups(4)
    expected, metrics = gradients(whole(groups), config)
    got, split_metrics = gradients(split(groups, 1, 40, reverse=True), config)
    assert all(g.isfinite().all() for g in expected.values())
    assert max(g.abs().max() for g in expected.values()) > 0
    assert_same(expected, got)
    for name, value in metrics.items():
        assert split_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert describe(config)


def test_forms_differ_and_the_default_is_grpo_with_the_papers_clip():
    groups = make_groups(4)
    seen = {}
    for form in ("grpo", "gspo_token", "cispo", "sapo", "vespo", "topr"):
        config = replace(EVERYTHING, loss=replace(EVERYTHING.loss, form=form, kl=0.0, distill=0.0))
        seen[form], _ = gradients(whole(groups), config)
    for a in seen:
        for b in seen:
            if a < b:
                assert any((seen[a][n] - seen[b][n]).abs().max() > 1e-6 for n in seen[a]), (a, b)
    assert forms.numbers(Loss()) == {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": None}


def test_a_number_that_the_loss_does_not_take_is_refused():
    with pytest.raises(ConfigError, match=r"loss\.cap has no meaning for loss\.form grpo.*eps_low"):
        make_objective(replace(CONFIG, loss=Loss(cap=3.0)))
    with pytest.raises(ConfigError, match=r"dro needs loss\.beta"):
        make_objective(replace(CONFIG, loss=Loss(form="dro")))


@pytest.mark.parametrize("advantage", forms.ADVANTAGE)
def test_every_advantage_runs_and_leaves_missing_rewards_out(advantage):
    rated = [
        Rated(n_tokens=(3, 4, 5, 6), rewards=(1.0, 0.0, None, 0.0)),
        Rated(n_tokens=(3, 4, 5, 6), rewards=(0.5, 0.5, 0.5, 0.5)),
    ]
    lessons = make_lessons(rated, Loss(advantage=advantage, k=2), norm_length=8)
    assert lessons[0][2].adv == 0.0 and lessons[0][2].weight["policy"] == 0.0
    assert any(lesson.adv != 0 for lesson in lessons[0])
    if advantage != "reinforce_pp_baseline":  # which subtracts the mean over all tokens
        assert all(lesson.adv == 0 for lesson in lessons[1])


def test_an_empty_micro_batch_adds_nothing():
    groups = make_groups()
    expected, _ = gradients(whole(groups))
    got, _ = gradients(
        [*whole(groups), build_micro([], dict(enumerate(groups)), torch.device("cpu"), current=3)]
    )
    assert_same(expected, got)


def _rank(rank, folder, config):
    from torch.distributed.device_mesh import DeviceMesh

    from models.parallelise import parallelise

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    cfg = replace(config.trainer, clip_grad=0.0)
    model = parallelise(fresh_model(), DeviceMesh("cpu", [0, 1]), compile=False)
    state = TrainState(model=model, optimizer=make_optimizer(model, cfg), version=0)
    groups = make_groups(n_groups=5)  # an odd number: the ranks do not have equal work
    _, metrics = train_step(state, split(groups, 2, 40, rank=rank), make_objective(config), cfg)
    full = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    if rank == 0:
        torch.save((full, metrics), f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("config", [EVERYTHING, FUSED, SURVEYED], ids=["plain", "fused", "surveyed"])
def test_o080_two_ranks_have_the_gradient_its_norm_and_the_metrics_of_one(tmp_path, config):
    expected, metrics = gradients(whole(make_groups(n_groups=5)), config)
    mp.spawn(_rank, args=(str(tmp_path), config), nprocs=2)
    full, rank_metrics = torch.load(tmp_path / "result")
    assert_same(expected, full)
    for name, value in metrics.items():
        assert rank_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def streamed(micros, config, scale=1.0):
    """Of the micro-batches one after another, as `gradients`."""
    cfg = replace(config.trainer, clip_grad=0.0)
    model, objective = fresh_model(), make_objective(config)
    pending = begin(TrainState(model=model, optimizer=make_optimizer(model, cfg), version=0))
    for micro in micros:
        pending = accumulate(pending, micro, objective)
    state, metrics = finish(pending, cfg, scale=scale)
    assert state.version == 1
    return {n: p.grad.clone() for n, p in model.named_parameters()}, metrics


def unnormalised(micro, count):
    """As if nobody had counted the tokens yet."""
    teachers = {k: replace(t, weight=count * t.weight) for k, t in micro.teachers.items()}
    return replace(micro, weight={k: count * w for k, w in micro.weight.items()}, teachers=teachers)


@pytest.mark.parametrize("config", [EVERYTHING, FUSED], ids=["plain", "fused"])
def test_micro_batches_may_stream_in_any_order_and_be_counted_at_the_end(config):
    assert separable(config) == (config is FUSED) and not unstreamable(config)
    micros, count = split(make_groups(), 1, 40), 137.0
    expected, metrics = gradients(micros, config)
    order = torch.randperm(len(micros), generator=torch.Generator().manual_seed(3)).tolist()
    assert len(micros) > 3 and order != sorted(order)
    for own, scale in ((micros, 1.0), ([unnormalised(m, count) for m in micros], 1 / count)):
        got, own_metrics = streamed([own[i] for i in order], config, scale)
        assert_same(expected, got)
        for name, value in metrics.items():
            assert own_metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_scale_comes_before_the_clip():
    micros, cfg = split(make_groups(), 1, 1000), replace(EVERYTHING.trainer, clip_grad=0.01)
    _, metrics = gradients(micros)
    model = fresh_model()
    pending = begin(TrainState(model=model, optimizer=make_optimizer(model, cfg), version=0))
    for micro in micros:
        pending = accumulate(pending, unnormalised(micro, 7.0), make_objective(EVERYTHING))
    _, clipped = finish(pending, cfg, scale=1 / 7.0)
    assert clipped["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3) and metrics["train/grad_norm"] > 0.02


def test_what_needs_the_whole_step_does_not_stream():
    assert "kl_cov" in " ".join(unstreamable(SURVEYED)) and "normalise" in " ".join(unstreamable(SURVEYED))
    over_batch = replace(EVERYTHING, loss=replace(EVERYTHING.loss, advantage="batch_std"))
    assert "batch_std" in unstreamable(over_batch)[0]
    both = replace(EVERYTHING, teachers={k: Teacher(keys=(k,)) for k in "ab"})
    assert "own tokens" in unstreamable(both)[0]
    with pytest.raises(ValueError, match="whole step"):
        streamed(split(make_groups(), 1, 40), SURVEYED)


def test_a_step_whose_gradients_are_not_reduced_is_refused():
    model, cfg = fresh_model(), EVERYTHING.trainer
    pending = begin(TrainState(model=model, optimizer=make_optimizer(model, cfg), version=0))
    (micro,) = whole(make_groups())
    with pytest.raises(ValueError, match="sync=False"):
        finish(accumulate(pending, micro, make_objective(EVERYTHING), sync=False), cfg)


def _compiled(rank, folder):
    from torch.distributed.device_mesh import DeviceMesh

    from models.parallelise import parallelise

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    model = parallelise(fresh_model(), DeviceMesh("cpu", [0]), compile=True)
    objective, cfg = make_objective(FUSED, compile=True), FUSED.trainer
    state, counts = TrainState(model=model, optimizer=make_optimizer(model, cfg), version=3), []
    for seed, n_groups in enumerate((3, 6, 4, 5, 2, 6)):
        data = dict(enumerate(make_groups(n_groups, seed)))
        places = [(g, s) for g in data for s in range(4)]
        micro = build_micro(places, data, torch.device("cpu"), current=3, bucket=128)
        state, metrics = train_step(state, [micro], objective, cfg)
        counts.append(metrics["compile/recompiles"])
    torch.save(counts, f"{folder}/counts")
    dist.destroy_process_group()


@pytest.mark.slow
def test_other_lengths_and_numbers_of_sequences_soon_need_no_new_graph(tmp_path):
    mp.spawn(_compiled, args=(str(tmp_path),), nprocs=1)
    counts = torch.load(tmp_path / "counts")
    assert counts[0] > 0 and sum(counts[1:3]) <= counts[0] and sum(counts[3:]) == 0


def test_learning_rate_is_a_function_of_the_version():
    constant = replace(CONFIG.trainer, lr=1.0, warmup=4, final_lr=1.0, steps=6)
    assert [learning_rate(constant, v) for v in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    decaying = replace(constant, warmup=0, final_lr=0.5)
    assert [learning_rate(decaying, v) for v in range(6)] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])


def test_o036_teacher_and_sample_lengths_that_differ_are_an_error():
    (group,) = make_groups(n_groups=1)
    cut = [Scores(logps=t.logps[:-1], full=t.full[:-1]) for t in group.teachers["t"]]
    with pytest.raises(ValueError, match="teacher t sent"):
        build_micro([(0, 0)], {0: replace(group, teachers={"t": cut})}, torch.device("cpu"), current=3)
