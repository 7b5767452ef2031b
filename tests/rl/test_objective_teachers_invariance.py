"""Several teachers in one objective: what it must not depend on, and what staleness does to it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.batch import build_micro
from rl.config import Correction
from rl.objective import make_objective
from rl.step import TrainState, make_optimizer, train_step
from tests.rl.steps import assert_same, fresh_model, gradients, split, whole
from tests.rl.taught import CASES, CPU, MIXES, ROUTED, WEIGHT, G, batch, config, logits_of, said_of, served

# ── What it must not depend on ────────────────────────────────────────────────────────────────────


def trained(cfg, groups, steps=2):
    model = fresh_model()
    state = TrainState(model=model, optimizer=make_optimizer(model, cfg.trainer), version=0)
    for _ in range(steps):
        state, _ = train_step(state, split(groups, 1, 120), make_objective(cfg), cfg.trainer)
    return model.state_dict()


@pytest.mark.parametrize("form", ["divergence", "advantage"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_coefficient_of_zero_is_pure_grpo_bit_for_bit(mix, form):
    cfg = config(distill=0.0, policy=1.0, distill_mix=mix, distill_form=form)
    pure = trained(replace(cfg, teachers={}), batch(cfg, [()] * len(ROUTED), rewards=True))
    silent = trained(cfg, batch(cfg, rewards=True))
    taught = replace(cfg, loss=replace(cfg.loss, distill=0.5))
    loud = trained(taught, batch(taught, rewards=True))
    assert all(torch.equal(pure[n], silent[n]) for n in pure)
    assert any(not torch.equal(pure[n], loud[n]) for n in pure)


@pytest.mark.parametrize("form", ["divergence", "advantage"])
def test_removing_one_teachers_prompts_changes_nothing_for_the_others(form):
    cfg = config(distill_form=form)
    everyone = batch(cfg)
    only = {k: batch(cfg, [names if names == (k,) else None for names in ROUTED]) for k in ("a", "b")}
    left = [x.distill for g in everyone for x in g.lessons if "a" in x.distill]
    assert left == [x.distill for g in only["a"] for x in g.lessons]
    total, metrics = gradients(whole(everyone), cfg)
    part, alone = zip(*(gradients(whole(only[k]), cfg) for k in ("a", "b")), strict=True)
    assert_same({n: part[0][n] + part[1][n] for n in total}, total)
    for k, of in zip(("a", "b"), alone, strict=True):
        assert of[f"loss/distill/{k}"] == pytest.approx(metrics[f"loss/distill/{k}"], rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_micro_batches_and_ranks_do_not_change_the_gradient(case):
    cfg = config(policy=1.0, **case)
    groups = batch(cfg, rewards=True)
    expected, metrics = gradients(whole(groups), cfg)
    got, split_metrics = gradients(split(groups, 1, 60, reverse=True), cfg)
    assert_same(expected, got)
    for name, value in metrics.items():
        assert split_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    ranks = [gradients(split(groups, 2, 100, rank=rank), cfg)[0] for rank in (0, 1)]
    assert_same(expected, {n: ranks[0][n] + ranks[1][n] for n in expected})


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_the_order_of_the_teachers_is_irrelevant_to_the_bit(case):
    cfg = config(**case)
    turned = config(weight=dict(reversed(WEIGHT.items())), **case)
    expected, metrics = gradients(whole(batch(cfg)), cfg)
    got, turned_metrics = gradients(whole(batch(turned, [n[::-1] for n in served(cfg)])), turned)
    assert metrics == turned_metrics and all(torch.equal(expected[n], got[n]) for n in expected)


def test_nan_from_one_teacher_is_not_in_another_ones_rows():
    cfg = config()

    def broken(name, samples, rng):
        said = said_of(cfg, samples, rng)
        return [replace(s, full=s.full * np.nan) for s in said] if name == "b" else said

    _, metrics = gradients(whole(batch(cfg)), cfg)
    _, with_nan = gradients(whole(batch(cfg, scores=broken)), cfg)
    assert with_nan["loss/distill/a"] == metrics["loss/distill/a"] and np.isnan(with_nan["loss/distill/b"])


def test_a_teacher_that_excludes_the_sampled_token_is_outvoted_in_an_arithmetic_mixture():
    cfg = config(distill_mix="arithmetic", distill_form="advantage")

    def excluding(name, samples, rng):
        said = said_of(cfg, samples, rng)
        return [replace(s, logps=s.logps - np.float32(np.inf)) for s in said] if name == "b" else said

    got, metrics = gradients(whole(batch(cfg, scores=excluding)), cfg)
    assert all(g.isfinite().all() for g in got.values()) and metrics["loss/distill/b"] == np.inf


def test_weights_of_teachers_are_relative_and_scale_their_own_terms():
    one_to_one, metrics = gradients(whole(batch(c := config({"a": 1.0, "b": 1.0}))), c)
    doubled, _ = gradients(whole(batch(c := config({"a": 2.0, "b": 2.0}))), c)
    assert_same(one_to_one, doubled)
    _, three = gradients(whole(batch(c := config())), c)
    a, b = metrics["loss/distill/a"], metrics["loss/distill/b"]
    assert metrics["loss/total"] == pytest.approx(0.5 * (a + b) / 2, rel=1e-5)
    assert three["loss/total"] == pytest.approx(0.5 * (3 * a + b) / 4, rel=1e-5)


# ── Staleness: what is rejected and what is weighted ──────────────────────────────────────────────


def shifted(groups, by):
    """Log-probs of the sampler = the student's own + by(g, s), so that every ratio is known."""
    (micro,) = whole(groups)
    with torch.no_grad():
        logp = logits_of(fresh_model(), micro).log_softmax(-1).gather(-1, micro.target[:, None])[:, 0]
    own = iter(logp.split(torch.bincount(micro.row).tolist()))
    return [
        replace(data, tokens=replace(data.tokens, samples=tuple(
            replace(sample, logps=next(own).numpy() + np.float32(by(g, s)))
            for s, sample in enumerate(data.tokens.samples)
        )))
        for g, data in enumerate(groups)
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_a_rejected_token_is_a_zero_that_counts_whatever_the_teachers_say_of_it(case):
    fix = Correction(reject="token", keep_low=0.5, keep_high=2.0)
    cfg = config(fix=fix, **case)
    stale = lambda g, s: 5.0 if s == 1 else 0.0  # noqa: E731

    def broken(name, samples, rng):
        said = said_of(cfg, samples, rng)
        bad = {f: getattr(said[1], f) * np.float32(np.nan) for f in ("logps", "top_logps", "full")
               if getattr(said[1], f) is not None}  # fmt: skip
        return [said[0], replace(said[1], **bad), *said[2:]]

    groups = shifted(batch(cfg), stale)
    expected, metrics = gradients(whole(groups), cfg)
    with_nan, _ = gradients(whole(shifted(batch(cfg, scores=broken), stale)), cfg)
    assert all(torch.equal(expected[n], with_nan[n]) for n in expected)
    n = [[len(s.tokens) for s in g.tokens.samples] for g in groups]
    assert metrics["correction/rejected"] == pytest.approx(sum(x[1] for x in n) / sum(map(sum, n)))
    rest = [(g, s) for g in range(len(groups)) for s in range(G) if s != 1]
    without = build_micro(rest, dict(enumerate(groups)), CPU, current=3)  # the same weights, fewer tokens
    assert_same(gradients([without], replace(cfg, correction=Correction()))[0], expected)


@pytest.mark.parametrize("mix", MIXES)
def test_the_importance_weight_reaches_the_advantage_form_and_leaves_an_exact_divergence_alone(mix):
    fix, half = Correction(weight="tis"), float(np.log(2.0))  # sampled twice as often as now: weight 1/2
    for form, factor in (("advantage", 0.5), ("divergence", 1.0)):
        cfg = config(distill_mix=mix, distill_form=form, form="reinforce")
        groups = batch(cfg)
        plain, _ = gradients(whole(shifted(groups, lambda g, s: half)), cfg)
        weighted, _ = gradients(whole(shifted(groups, lambda g, s: half)), replace(cfg, correction=fix))
        assert_same({n: factor * g for n, g in plain.items()}, weighted)
