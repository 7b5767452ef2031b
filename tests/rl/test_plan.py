from dataclasses import replace

import pytest

from experiments.genrm_opd import CONFIG as GENOPD
from experiments.opd import CONFIG as OPD
from experiments.rule_grpo import CONFIG as RULE
from rl.plan import Node, PlanError, describe, make_plan, replicas

LAPTOP = [Node("laptop", 2.0)]


def test_only_what_the_config_uses_gets_a_seat():
    assert replicas(RULE) == {"trainer": 1, "sampler": 1, "rule": 1}
    assert replicas(OPD) == {"trainer": 1, "sampler": 1, "teacher/reverser": 1, "teacher/sorter": 1}
    assert set(replicas(GENOPD)) == {"trainer", "sampler", "judge", "teacher/reverser", "teacher/sorter"}


def test_o028_no_reference_is_started_for_a_kl_coefficient_of_zero():
    assert "reference" not in replicas(RULE)
    assert replicas(replace(RULE, loss=replace(RULE.loss, kl=0.01)))["reference"] == 1


def test_cores_are_shared_evenly_and_never_promised_twice():
    plan = make_plan(GENOPD, LAPTOP)
    assert len({seat.cpus for seat in plan.seats}) == 1 and sum(s.cpus for s in plan.seats) <= 2.0
    assert all(s.cpus == 1.0 for s in make_plan(RULE, [Node("big", 64.0)]).seats)


def test_every_seat_fits_on_one_node():
    plan = make_plan(RULE, [Node("a", 1.0), Node("b", 1.0)])
    assert plan.seats[0].cpus == 0.5  # three seats on two nodes of one core: two on one of them


def test_o087_what_does_not_fit_is_refused_with_what_is_there_and_what_is_wanted():
    crowd = replace(RULE, sampler=replace(RULE.sampler, replicas=100))
    with pytest.raises(PlanError, match=r"102 actors \(1 trainer, 100 sampler, 1 rule\) on 2 cores"):
        make_plan(crowd, LAPTOP)
    with pytest.raises(PlanError, match=r"wants 2 GPUs \(trainer.ranks\), the cluster has 0"):
        make_plan(replace(RULE, trainer=replace(RULE.trainer, device="cuda", ranks=2)), LAPTOP)
    with pytest.raises(PlanError, match="no CPU"):
        make_plan(RULE, [])


def test_names_are_unique_and_the_description_names_every_role():
    plan = make_plan(GENOPD, LAPTOP)
    assert len({s.name for s in plan.seats}) == len(plan.seats)
    text = "\n".join(describe(GENOPD, plan))
    assert all(role in text for role in replicas(GENOPD)) and "η = 2" in text
