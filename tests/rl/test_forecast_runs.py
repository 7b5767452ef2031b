"""What a run measured of its stages, and what the plan of the next one makes of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.genrm_grpo import CONFIG as GENRM
from rl.config import to_dict
from rl.forecast import forecast, has_times, measured, newest, trainer_seconds
from rl.monitor import Monitor
from rl.plan import Node, describe, make_plan
from rl.summary import beside

SUMMARY = {  # of a judge that is always busy, 40 steps of 2 s
    "steps": 40, "wall_s": 80.0, "issued": 1280, "trained": 1280, "age_mean": 1.9, "trainer_waited_s": 36.0,
    "stage_s": {"generate": 0.5, "judge": 3.5, "teach": 0.0, "train_queue": 1.0},
    "idle": {"sampler": 0.75, "judge": 0.0, "trainer": 0.5}, "replicas": {"sampler": 1, "judge": 1},
    "sync_s": {"publish": 0.1, "deliver": 0.2},
}  # fmt: skip


def test_a_runs_own_service_times_predict_its_step_time_and_idle_shares():
    s = measured(SUMMARY, GENRM)  # 1,280 groups: 80 s / 1280 at the judge, 20 s / 1280 at the sampler
    judge = s.examiners[0]
    assert judge.rate == pytest.approx(16.0) and s.sampler.rate == pytest.approx(64.0)
    assert judge.alone_s == pytest.approx(256 / 8 / 16)  # 3.5 s are more than its slots hold: the rest waits
    assert s.sampler.alone_s == pytest.approx(0.5)
    assert (s.train_s, s.between_s) == pytest.approx((1.0 - 0.1, 0.1))
    f = forecast(s, prompts=32, max_age=2)
    assert f.bottleneck == "judge" and f.step_s == pytest.approx(2.0)
    assert f.idle == pytest.approx({"sampler": 0.75, "judge": 0.0, "trainer": 0.5, "sync": 0.85})
    rows = {what: told for what, *told in beside(SUMMARY, GENRM)}
    assert rows["seconds per step"][1] == "2.000" and rows["mean age"] == [f"{f.age_over(40):.2f}", "1.90"]
    assert {"sampler idle", "judge idle", "trainer idle"} <= rows.keys()


def test_dropped_groups_are_work_of_the_engines_too():
    s = measured({**SUMMARY, "issued": 2560}, GENRM)
    assert s.kept == 0.5 and s.examiners[0].rate == pytest.approx(32.0)
    assert forecast(s, prompts=32, max_age=2).step_s == pytest.approx(2.0)


@pytest.mark.parametrize("lacking", [{"steps": 0}, {"trained": 0}, {"idle": {"trainer": 0.5}}])
def test_a_run_too_short_to_look_at_its_engines_has_no_service_times(lacking):
    assert has_times(SUMMARY) and not has_times({**SUMMARY, **lacking})
    with pytest.raises(ValueError, match="measured: no service times"):
        measured({**SUMMARY, **lacking}, GENRM)


def lines_of(seconds):
    """Metrics of steps that take so long each, and on which the trainer works all the time but 1 s."""
    at, worked, lines = 1000.0, 0.0, []
    for step_s in seconds:
        at, worked = at + step_s, worked + step_s - 1.0
        lines.append({"time": at, "throughput/step_s": step_s, "idle/trainer": 1 - worked / (at - 1000.0)})
    return lines


def test_the_trainers_seconds_leave_the_first_steps_compilation_out():
    assert trainer_seconds(lines_of([18.0, 3.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert trainer_seconds(lines_of([18.0])) == pytest.approx(17.0)  # nothing else is known
    s = measured(SUMMARY, GENRM, trainer_s=0.4)
    assert s.train_s == pytest.approx(0.4 - 0.1) and s.between_s == pytest.approx(0.1)


def test_engines_that_were_never_full_are_known_by_the_share_of_their_slots():
    s = measured(SUMMARY, GENRM)  # 256 slots of 8 answers a group; 32 groups at the judge at all times
    assert s.examiners[0].full == pytest.approx(1.0)
    assert s.sampler.full == pytest.approx(0.5 * 64 / 32)  # Little: 64 groups/s, half a second each
    s = measured({**SUMMARY, "stage_s": {**SUMMARY["stage_s"], "generate": 0.1}}, GENRM)
    assert s.sampler.full == pytest.approx(0.1 * 64 / 32)


def written(folder, cfg, summary):
    folder.mkdir(parents=True)
    lines = lines_of([20.0] + [2.0] * 39)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps(to_dict(cfg)))
    (folder / "summary.json").write_text(json.dumps(summary))


def test_the_plan_predicts_from_the_newest_run_of_the_same_models_and_batch(tmp_path):
    cfg = replace(GENRM, log=replace(GENRM.log, dir=str(tmp_path)))
    two = replace(cfg, judge=replace(cfg.judge, replicas=2))
    nodes = [Node("laptop", 8.0)]
    assert "nothing is measured yet" in describe(cfg, make_plan(cfg, nodes))[-1]
    written(tmp_path / f"{cfg.name}-1", cfg, SUMMARY)
    other = replace(cfg, trainer=replace(cfg.trainer, prompts=64))
    written(tmp_path / f"{cfg.name}-2", other, SUMMARY)
    written(tmp_path / f"{cfg.name}-3", cfg, {**SUMMARY, "steps": 0})
    found = newest(cfg)
    assert found is not None and found[0] == f"{cfg.name}-1"
    text = "\n".join(describe(cfg, make_plan(cfg, nodes)))
    assert f"assumes: the rates of {cfg.name}-1 (40 steps), on hardware like its own" in text
    assert "2.00 s a step, 250 in 502 s: judge is the slowest (16 groups/s)" in text
    assert "lower bounds" not in text
    text = "\n".join(describe(two, make_plan(two, nodes)))
    # sampler 0.5, judge 2.0, trainer 1.0, delivery 0.2: a third of it is more than the trainer's 1.1 s
    assert (
        "1.23 s a step, 250 in 311 s: trainer is the slowest (29.1 groups/s), but a batch takes 3.70 s"
        in text
    )
    assert "trainer never waits from 108 groups under way on: η >= 3" in text


def test_a_run_is_alike_whatever_its_length_and_bound_but_not_on_other_shares_or_data(tmp_path):
    cfg = replace(GENRM, log=replace(GENRM.log, dir=str(tmp_path)))
    written(tmp_path / f"{cfg.name}-1", cfg, SUMMARY)
    trainer, engine = cfg.trainer, cfg.judge.engine
    alike = [
        replace(cfg, seed=3, trainer=replace(trainer, steps=9, lr=1.0)),
        replace(cfg, staleness=replace(cfg.staleness, max_age=0)),
        replace(cfg, sampler=replace(cfg.sampler, replicas=3)),
    ]
    unlike = [
        replace(cfg, trainer=replace(trainer, gpus=0.5)),
        replace(cfg, trainer=replace(trainer, stream=True)),
        replace(cfg, judge=replace(cfg.judge, engine=replace(engine, gpus=0.5))),
        replace(cfg, data=replace(cfg.data, arithmetic=("addition",))),
        replace(cfg, staleness=replace(cfg.staleness, late="drop")),
    ]
    assert all(newest(c) is not None for c in alike) and not any(newest(c) for c in unlike)


def test_the_summary_counts_replicas_and_averages_what_the_weights_took():
    engines = {"sampler": SimpleNamespace(handles=[1, 2])}
    monitor = Monitor(SimpleNamespace(engines=lambda: engines))  # type: ignore[arg-type]
    monitor.publish_ms, monitor.deliver_ms = [10.0, 30.0], [100.0, 200.0]
    totals = monitor.totals(SimpleNamespace(seconds={}, trained=0, issued=0, dropped={}))  # type: ignore[arg-type]
    assert totals["replicas"] == {"sampler": 2}
    assert totals["sync_s"] == pytest.approx({"publish": 0.02, "deliver": 0.15})


def test_a_run_of_another_version_of_the_code_is_passed_over(tmp_path):
    cfg = replace(GENRM, log=replace(GENRM.log, dir=str(tmp_path)))
    for i, missing in enumerate(["sync", "data", "judge"]):
        written(tmp_path / f"{cfg.name}-{i}", cfg, SUMMARY)
        told = tmp_path / f"{cfg.name}-{i}" / "config.json"
        had = json.loads(told.read_text())
        told.write_text(json.dumps({name: value for name, value in had.items() if name != missing}))
    written(tmp_path / f"{cfg.name}-3", cfg, SUMMARY)
    (tmp_path / f"{cfg.name}-3" / "config.json").unlink()
    assert newest(cfg) is None
