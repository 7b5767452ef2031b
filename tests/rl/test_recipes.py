"""The experiments for real GPUs: they are whole configs, and fit on the hosts that they are for."""

from dataclasses import replace
from importlib import import_module

import pytest

from rl.check import check
from rl.config import ConfigError
from rl.intake import check_templates, read_data
from rl.made.models import is_made
from rl.plan import Node, make_plan

GPUS = {"smollm2_arith": 1, "smollm2_arith_judge": 1, "smollm2_async": 1, "opd_smollm2": 1,
        "genrm_grpo_seed": 2}  # fmt: skip


def config(name):
    return import_module(f"experiments.{name}").CONFIG


@pytest.mark.parametrize("name", GPUS)
def test_it_is_sound_and_every_actor_has_a_seat(name):
    cfg = config(name)
    check(cfg)
    check_templates(cfg, has_answers=True)
    assert cfg.name == name
    plan = make_plan(cfg, [Node("host", 16.0, float(GPUS[name]))])
    engines = [seat for seat in plan.seats if seat.role not in ("rule",)]
    assert all(seat.gpus > 0 for seat in engines), "something was left to the CPU"


@pytest.mark.parametrize("name", ["smollm2_arith", "smollm2_arith_judge", "opd_smollm2"])
def test_nothing_that_is_held_out_is_trained_on(name):
    cfg = config(name)
    train, held_out = read_data(cfg)
    assert len(train) == 20_000 and len(held_out) == 512
    assert {row.text for row in train}.isdisjoint(row.text for row in held_out)
    assert {row.key for row in train} == {row.key for row in held_out} == {"addition", "subtraction"}


def test_the_teachers_serve_every_key():
    served = {key for teacher in config("opd_smollm2").teachers.values() for key in teacher.keys}
    assert served == set(config("opd_smollm2").data.arithmetic)


def test_the_seed_recipe_is_verls():
    cfg = config("genrm_grpo_seed")
    assert cfg.trainer.steps * cfg.trainer.prompts == 3200
    assert (cfg.sampler.samples, cfg.sampler.max_tokens, cfg.trainer.lr) == (4, 512, 1e-6)
    assert is_made(cfg.policy.model) and is_made(cfg.judge.model)


def test_asynchronous_and_synchronous_differ_in_the_bound_alone_and_fit_both_gpus_together():
    cfg = config("smollm2_async")
    assert cfg.loss.zero_signal == "keep" and cfg.trainer.final_lr == 1.0 and cfg.staleness.max_age == 2
    both = replace(cfg, sampler=replace(cfg.sampler, replicas=2),
                   trainer=replace(cfg.trainer, ranks=2, gpus=0.6))  # fmt: skip
    plan = make_plan(both, [Node("host", 16.0, 2.0)])
    assert [seat.gpus for seat in plan.of("trainer")] == [0.6, 0.6]
    assert [seat.gpus for seat in plan.of("sampler")] == [0.4, 0.4]


@pytest.mark.parametrize("wrong", [{"largest": 8}, {"largest": 12, "arithmetic": ()}])
def test_a_largest_number_below_what_is_held_out_or_without_arithmetic_is_refused(wrong):
    cfg = config("smollm2_arith")
    with pytest.raises(ConfigError, match="data.largest"):
        check(replace(cfg, data=replace(cfg.data, **wrong)))
