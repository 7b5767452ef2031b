from bisect import bisect_right
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rl.forecast import ROUND_TRIP, Service, Stage, forecast


def service(sampler=1.0, judge=1.0, train=1.0, *, at_a_time=(4, 4), **more) -> Service:
    return Service(
        sampler=Stage(name="sampler", alone_s=sampler, at_a_time=at_a_time[0]),
        examiners=(Stage(name="judge", alone_s=judge, at_a_time=at_a_time[1]),),
        train_s=train,
        **more,
    )


# ── By hand, B = 8 ──────────────────────────────────────────────────────────────────────────────────


def test_the_trainer_is_the_bottleneck_and_groups_wait_there_at_the_greatest_age():
    f = forecast(service(1.0, 1.0, 5.0, publish_s=1.0, deliver_s=0.5), prompts=8, max_age=2)
    assert f.bottleneck == "trainer" and f.step_s == 6.0
    assert f.rates == {"sampler": 4.0, "judge": 4.0, "trainer": 8 / 6, "sync": 8 / 1.5}
    assert f.idle == pytest.approx({"sampler": 2 / 3, "judge": 2 / 3, "trainer": 0.0, "sync": 0.75})
    # 1 s and 1 s, 1 s between the first and the last group, 6 s trainer, 0.5 s on the way
    assert f.round_trip_s == pytest.approx(9.5)
    assert f.age == 2.0
    # of 18 s that a batch goes round, it waits 8.5 s for the trainer and is trained for 6 s
    expected = {
        "sampler": 1.5 * 8 / 6,
        "judge": 8 / 6,
        "trainer": (6 + 8.5 + 0.5) * 8 / 6,
        "sync": 0.5 * 8 / 6,
    }
    assert f.under_way == pytest.approx(expected)
    assert f.least_groups == pytest.approx(9.5 * 8 / 6) and f.least_age == 1


def test_the_judge_is_the_bottleneck_and_groups_wait_there_at_the_greatest_age():
    f = forecast(service(1.0, 2.0, 1.0), prompts=8, max_age=2)
    assert f.bottleneck == "judge" and f.step_s == 4.0 and f.age == 2.0
    assert f.round_trip_s == 1 + 2 + 2 + 1
    assert f.under_way["judge"] == pytest.approx((2 + 1 + (12 - 6)) * 2)


def test_the_sampler_is_the_bottleneck_and_what_waits_before_its_first_token_does_not_age():
    f = forecast(service(2.0, 1.0, 1.0), prompts=8, max_age=2)
    assert f.bottleneck == "sampler" and f.step_s == 4.0 and f.round_trip_s == 2 + 2 + 1 + 1
    # waits 6 s for the batches before it, then up to 2 s for its own: the first half sees one version pass
    assert f.age == pytest.approx(2 - 1)
    one = replace(service(4.0, 1.0, 1.0), sampler=Stage(name="sampler", alone_s=0.5))
    # u is uniform on [12 - 6, 12 - 6 + 3.5] s, steps of 4 s: 1 until 8 s, then 2
    assert forecast(one, prompts=8, max_age=2).age == pytest.approx(2 - (2.0 * 1 + 1.5 * 2) / 3.5)


def test_without_staleness_the_times_add_up_and_nobody_is_always_busy():
    f = forecast(service(1.0, 1.0, 5.0, publish_s=1.0, deliver_s=0.5), prompts=8, max_age=0)
    assert f.bottleneck == ROUND_TRIP and f.step_s == f.round_trip_s == 9.5 and f.age == 0.0
    assert f.idle["trainer"] == pytest.approx(1 - 6 / 9.5)


def test_streaming_hides_the_training_of_all_but_the_last_group_behind_its_batch():
    slow = service(1.0, 1.0, 4.0, at_a_time=(1, 8), deliver_s=0.5)  # a group a second: 7 s from first to last
    kept, streamed = (forecast(replace(slow, stream=on), prompts=8, max_age=0) for on in (False, True))
    assert kept.step_s == 1 + 1 + 7 + 4 + 0.5 and streamed.step_s == 1 + 1 + 7 + 4 / 8 + 0.5
    # where training is what takes long, all that it must wait for is the first group
    fast = replace(slow, train_s=20.0, stream=True)
    assert forecast(fast, prompts=8, max_age=0).step_s == 1 + 1 + 20 + 0.5
    assert forecast(fast, prompts=8, max_age=2).step_s == 20.0


def test_dropped_groups_cost_work_and_what_is_not_used_costs_nothing():
    alone = Service(sampler=Stage(name="sampler", alone_s=2.0, at_a_time=4), train_s=1.0, kept=0.5)
    f = forecast(alone, prompts=8, max_age=2)
    assert f.step_s == 8.0 and f.rates["sampler"] == 1.0 and set(f.idle) == {"sampler", "trainer", "sync"}


def test_the_next_weights_wait_until_the_last_ones_are_delivered():
    f = forecast(service(0.1, 0.1, 1.0, publish_s=0.5, deliver_s=3.0), prompts=8, max_age=4)
    assert f.bottleneck == "sync" and f.step_s == 3.5


def test_the_first_steps_are_young_and_wait_for_the_first_batch():
    f = forecast(service(1.0, 1.0, 5.0), prompts=8, max_age=2)
    assert f.age_over(4) == (0 + 1 + 2 + 2) / 4
    assert f.seconds(4) == f.round_trip_s + 3 * 5.0
    assert f.idle_over(4)["trainer"] == pytest.approx(1 - 4 * 5.0 / f.seconds(4))


@pytest.mark.parametrize("bad", [{"prompts": 0}, {"max_age": -1}])
def test_numbers_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="forecast: expected prompts"):
        forecast(service(), **{"prompts": 8, "max_age": 2, **bad})


def test_service_times_that_are_all_zero_are_refused():
    with pytest.raises(ValueError, match="a stage that takes time"):
        forecast(service(0.0, 0.0, 0.0), prompts=8, max_age=2)


# ── For all service times ───────────────────────────────────────────────────────────────────────────

SECONDS = st.floats(0.01, 10.0)
SERVICES = st.builds(
    service, SECONDS, SECONDS, SECONDS, at_a_time=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    publish_s=st.floats(0, 2), deliver_s=st.floats(0, 2), kept=st.floats(0.2, 1.0), stream=st.booleans(),
)  # fmt: skip
B, ETA = st.integers(1, 32), st.integers(0, 5)


@given(SERVICES, B, ETA)
def test_shares_lie_in_their_bounds_and_admission_is_used_up(s, prompts, max_age):
    f = forecast(s, prompts=prompts, max_age=max_age)
    assert all(-1e-9 <= share <= 1 for share in f.idle.values())
    assert -1e-9 <= f.age <= max_age
    assert sum(f.under_way.values()) == pytest.approx((max_age + 1) * prompts)
    if f.bottleneck != ROUND_TRIP:
        assert f.idle[f.bottleneck] == pytest.approx(0.0)


@given(SERVICES, B, ETA)
def test_more_replicas_or_a_looser_bound_never_make_a_step_longer(s, prompts, max_age):
    f = forecast(s, prompts=prompts, max_age=max_age)
    for more in ({"sampler": 2}, {"judge": 3}, {"sampler": 2, "judge": 2}):
        assert forecast(s.at(more), prompts=prompts, max_age=max_age).step_s <= f.step_s + 1e-9
    looser = forecast(s, prompts=prompts, max_age=max_age + 1)
    assert looser.step_s <= f.step_s + 1e-9 and looser.age >= f.age - 1e-6
    assert forecast(replace(s, train_s=s.train_s + 1), prompts=prompts, max_age=max_age).step_s >= f.step_s


@given(SERVICES, B)
def test_the_least_age_is_the_first_at_which_the_slowest_stage_never_waits(s, prompts):
    least = forecast(s, prompts=prompts, max_age=0).least_age
    steps = [forecast(s, prompts=prompts, max_age=age).step_s for age in range(least + 2)]
    assert steps[least] == pytest.approx(steps[least + 1])
    assert all(step > steps[least] * (1 - 1e-9) for step in steps)
    assert least == 0 or steps[least - 1] > steps[least]


# ── Against a simulation ────────────────────────────────────────────────────────────────────────────


def simulate(
    s: Service, *, prompts: int, max_age: int, steps: int, jitter: float = 0.0
) -> tuple[float, float]:
    """(seconds per step, mean age) of the second half of a run: every group from server to server, first come
    first served, batches in order. jitter: service times are uniform within so large a share."""
    random = Random(0)
    free = {st.name: [0.0] * int(st.replicas * st.at_a_time) for st in s.stages}
    served, trainer, delivered = [0.0], 0.0, 0.0  # served[v]: when version v is at the sampler
    ends: list[float] = []
    ages: list[list[int]] = []

    def serve(stage: Stage, at: float) -> tuple[float, float]:
        servers = free[stage.name]
        began = max(at, min(servers))
        ended = began + stage.alone_s * random.uniform(1 - jitter, 1 + jitter)
        servers[servers.index(min(servers))] = ended
        return began, ended

    for k in range(steps):
        sampled = [serve(s.sampler, served[max(0, k - max_age)]) for _ in range(prompts)]
        ages.append([k - (bisect_right(served, began + 1e-9) - 1) for began, _ in sampled])
        ready = [max([e, *(serve(x, e)[1] for x in s.examiners)]) for e in sorted(e for _, e in sampled)]
        parts = sorted(ready) if s.stream else [max(ready)]
        for at in parts:
            trainer = max(trainer, at) + s.train_s / len(parts)
        ends.append(trainer)
        trainer = max(trainer, delivered) + s.publish_s
        delivered = trainer + s.deliver_s
        served.append(delivered)
        trainer += s.between_s
    half = steps // 2
    late = [age for of in ages[half:] for age in of]
    return (ends[-1] - ends[half]) / (steps - 1 - half), sum(late) / len(late)


def pipelines(*at_a_time: int) -> st.SearchStrategy[Service]:
    """Servers divide B, so that a batch leaves no server half used."""
    return st.builds(
        service, SECONDS, SECONDS, SECONDS,
        at_a_time=st.tuples(st.sampled_from(at_a_time), st.sampled_from(at_a_time)),
        publish_s=st.floats(0, 1), deliver_s=st.floats(0, 1), stream=st.booleans(),
    )  # fmt: skip


def against_a_simulation(s: Service, max_age: int, rel: float) -> tuple[float, float]:
    """(mean age, predicted mean age); the seconds of a step agree within `rel`."""
    f = forecast(s, prompts=8, max_age=max_age)
    slowest, second, *_ = sorted(f.rates.values())
    assume(
        second > 1.25 * slowest
    )  # between equals a queue moves from one to the other for hundreds of steps
    step_s, age = simulate(s, prompts=8, max_age=max_age, steps=80)
    assert step_s == pytest.approx(f.step_s, rel=rel)
    return age, f.age


@given(pipelines(1, 8), ETA)
def test_a_simulated_pipeline_takes_the_predicted_time_at_the_predicted_age(s, max_age):
    """Groups come one by one, or all at once."""
    age, predicted = against_a_simulation(s, max_age, rel=0.1)
    assert age == pytest.approx(predicted, abs=0.5)


@example(service(0.25, 2.0, 1.0, at_a_time=(1, 4)), 0)
@example(service(6.0, 1.0, 1.0, at_a_time=(4, 1)), 0)
@given(pipelines(1, 2, 4, 8), ETA)
def test_a_pipeline_whose_groups_come_in_waves_takes_about_the_predicted_time(s, max_age):
    """The model is fluid: servers that begin one after another, or end together, it does not see."""
    against_a_simulation(s, max_age, rel=0.3)


@pytest.mark.parametrize("times", [(1.0, 1.0, 5.0), (1.0, 3.0, 1.0), (3.0, 1.0, 1.0)])
@pytest.mark.parametrize("max_age", [2, 4])
def test_service_times_that_vary_do_not_move_the_bottleneck(times, max_age):
    f = forecast(service(*times), prompts=16, max_age=max_age)
    step_s, age = simulate(service(*times), prompts=16, max_age=max_age, steps=200, jitter=0.5)
    assert step_s == pytest.approx(f.step_s, rel=0.05) and age == pytest.approx(f.age, abs=0.35)
