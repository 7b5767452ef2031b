from dataclasses import replace

import pytest

from experiments.genrm_grpo import CONFIG as GENRM
from experiments.genrm_opd import CONFIG as GENOPD
from experiments.opd import CONFIG as OPD
from experiments.rule_grpo import CONFIG as RULE
from rl.config import Engine, Teacher
from rl.forecast import Service, Stage
from rl.plan import Node, PlanError, assumed, describe, make_plan, replicas, split_teachers

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


def test_ranks_of_the_trainer_never_share_a_gpu():
    two = replace(RULE, trainer=replace(RULE.trainer, ranks=2, gpus=0.5))
    with pytest.raises(PlanError, match=r"trainer.gpus is 0.5 for 2 ranks"):
        make_plan(two, [Node("host", 16.0, 2.0)])
    for fits in (replace(two.trainer, gpus=0.6), replace(two.trainer, ranks=1)):
        make_plan(replace(two, trainer=fits), [Node("host", 16.0, 2.0)])
    assert [s.gpus for s in make_plan(replace(two, trainer=replace(two.trainer, device="cpu")),
                                      [Node("host", 16.0, 2.0)]).of("trainer")] == [0, 0]  # fmt: skip


def test_o087_what_does_not_fit_is_refused_with_what_is_there_and_what_is_wanted():
    crowd = replace(RULE, sampler=replace(RULE.sampler, replicas=100))
    with pytest.raises(PlanError, match=r"102 actors \(1 trainer, 100 sampler, 1 rule\) on 2 cores"):
        make_plan(crowd, LAPTOP)
    with pytest.raises(PlanError, match=r"cannot seat 2 trainer x 1: the nodes have 0"):
        make_plan(replace(RULE, trainer=replace(RULE.trainer, device="cuda", ranks=2)), LAPTOP)
    with pytest.raises(PlanError, match="no CPU"):
        make_plan(RULE, [])


def test_names_are_unique_and_the_description_names_every_role():
    plan = make_plan(GENOPD, LAPTOP)
    assert len({s.name for s in plan.seats}) == len(plan.seats)
    text = "\n".join(describe(GENOPD, plan))
    assert all(role in text for role in replicas(GENOPD)) and "η = 2" in text


def shared(n, **more):
    return replace(OPD, teacher_replicas=n, **more)


def test_one_pool_of_teachers_is_split_by_the_prompts_of_their_keys_and_printed():
    prompts = {"reverse": 900, "sort": 100}
    assert split_teachers(OPD, prompts) == {"reverser": 1, "sorter": 1}  # each one's own number
    assert split_teachers(shared(5)) == {"reverser": 3, "sorter": 2}
    assert split_teachers(shared(5), prompts) == {"reverser": 4, "sorter": 1}
    plan = make_plan(shared(5), [Node("big", 64.0)], prompts=prompts)
    assert len(plan.of("teacher/reverser")) == 4 and len(plan.of("teacher/sorter")) == 1
    text = "\n".join(describe(shared(5), plan))
    assert "teachers   4 reverser, 1 sorter (teacher_replicas 5, split by the prompts of each" in text


def test_in_a_mixture_every_teacher_has_the_prompts_of_all_keys_that_it_serves():
    teachers = {"all": Teacher(), "sorter": Teacher(keys=("sort",))}
    mixed = shared(4, teachers=teachers, loss=replace(OPD.loss, distill_mix="sum"))
    assert split_teachers(mixed, {"reverse": 200, "sort": 100}) == {"all": 3, "sorter": 1}


def test_fewer_engines_than_teachers_are_refused():
    with pytest.raises(PlanError, match=r"teacher_replicas is 1 for 2 teachers \(reverser, sorter\)"):
        make_plan(shared(1), LAPTOP)


def test_shares_lie_on_one_gpu_and_what_does_not_fit_is_refused_with_what_to_change():
    def with_gpus(sampler, judge, trainer, device="auto"):
        return replace(
            GENRM,
            sampler=replace(GENRM.sampler, engine=Engine(gpus=sampler)),
            judge=replace(GENRM.judge, engine=Engine(gpus=judge)),
            trainer=replace(GENRM.trainer, gpus=trainer, device=device),
        )

    one, two = [Node("a", 16.0, 1.0)], [Node("a", 16.0, 2.0)]
    each = {s.role: s.gpus for s in make_plan(with_gpus(0.3, 0.3, 0.4), one).seats}
    assert each == {"trainer": 0.4, "sampler": 0.3, "judge": 0.3}
    each = {s.role: s.gpus for s in make_plan(with_gpus(0.5, 0.5, 1.0), one).seats}
    assert each == {"trainer": 0.0, "sampler": 0.5, "judge": 0.5}  # auto: the engines leave nothing
    with pytest.raises(PlanError, match="1 trainer x 1, 1 sampler x 0.5, 1 judge x 0.5: the nodes have 1"):
        make_plan(with_gpus(0.5, 0.5, 1.0, "cuda"), one)
    with pytest.raises(PlanError, match="cannot seat"):  # 0.7 + 0.7 and 0.6: the sum fits, the shares do not
        make_plan(with_gpus(0.7, 0.7, 0.6, "cuda"), two)
    assert make_plan(with_gpus(0.7, 0.3, 1.0, "cuda"), two)
    assert "1 sampler (1 core, 0.7 GPU)" in describe(GENRM, make_plan(with_gpus(0.7, 0.3, 1.0), two))[0]


def test_the_plan_says_when_groups_are_trained_as_they_arrive():
    streamed = replace(RULE, trainer=replace(RULE.trainer, stream=True))
    said = {
        stream: "\n".join(describe(cfg, make_plan(cfg, LAPTOP)))
        for stream, cfg in ((False, RULE), (True, streamed))
    }
    assert "streamed: groups are trained as they arrive" in said[True] and "streamed" not in said[False]


def test_the_forecast_names_the_shares_that_it_takes_for_granted_and_rates_that_are_lower_bounds():
    def stage(name, full):
        return Stage(name=name, alone_s=1.0, full=full)

    engine = Engine(gpus=0.4)
    cfg = replace(GENRM, judge=replace(GENRM.judge, engine=engine),
                  sampler=replace(GENRM.sampler, engine=Engine(gpus=1.0)),
                  trainer=replace(GENRM.trainer, gpus=0.5, device="cuda"))  # fmt: skip
    service = Service(sampler=stage("sampler", 0.31), examiners=(stage("judge", 1.0),), train_s=1.0)
    line = assumed(make_plan(cfg, [Node("two", 16.0, 2.0)]), service, "genrm_grpo-1", 24)
    assert "the rates of genrm_grpo-1 (24 steps)" in line
    assert "judge and trainer slow each other on shared GPUs as there" in line
    assert "lower bounds where slots were free: sampler (31%) in use" in line
