import numpy as np
import pytest

from rl.admission import Ready, checked_pick, form, room


def admit(**changes):
    return room(
        **{"trained": 0, "live": 0, "version": 0, "max_age": 2, "prompts": 4, "steps": 100, **changes}
    )


def test_room_is_eta_plus_version_plus_one_batches():
    assert admit() == 12
    assert admit(version=3, trained=12, live=8) == 4
    assert admit(live=12) == 0 and admit(live=13) == 0


def test_eta_zero_admits_exactly_one_batch_per_version():
    assert admit(max_age=0) == 4
    assert admit(max_age=0, trained=4, live=0, version=0) == 0  # the weights of step 1 are not served yet
    assert admit(max_age=0, trained=4, live=0, version=1) == 4


def test_no_more_is_admitted_than_the_run_can_train():
    assert admit(version=98, trained=392, live=4, steps=100) == 4


def batch(ready, unready=(), **changes):
    """A whole one, under version 7. unready: ordinals admitted under 7, or ordinal → version."""
    how = {"version": 7, "max_age": 2, "prompts": 2, "late": "drop", **changes}
    under = unready if isinstance(unready, dict) else dict.fromkeys(unready, 7)
    return form(ready, under, **{"lacking": how["prompts"], "least": how["prompts"], **how})


def test_o066_age_between_zero_and_eta_is_trained_older_is_dropped_future_is_an_error():
    formed = batch([Ready(i, v) for i, v in enumerate([4, 5, 6, 7])], prompts=3)
    assert formed.take == (1, 2, 3) and formed.stale == (0,)
    with pytest.raises(ValueError, match="version 8"):
        batch([Ready(0, 8)])


def test_oldest_version_first_and_of_one_version_the_oldest_prompt():
    assert batch([Ready(9, 7), Ready(3, 7), Ready(5, 7)]).take == (3, 5)
    assert batch([Ready(3, 7), Ready(9, 5), Ready(5, 7)]).take == (3, 9)  # 3 was issued once more


def test_no_batch_before_it_is_full():
    assert batch([Ready(0, 7)]).take == ()


def test_late_wait_waits_for_those_who_would_be_too_old_and_for_nobody_else():
    ready = [Ready(1, 7), Ready(2, 7)]
    assert batch(ready, {0: 5}, late="drop").take == (1, 2)
    assert batch(ready, {0: 5}, late="wait").take == ()
    assert batch(ready, {0: 6}, late="wait").take == (1, 2)  # it has the next step, too
    assert batch([*ready, Ready(0, 5)], late="wait").take == (0, 1)
    assert batch([*ready, Ready(0, 4)], late="wait") == batch([*ready, Ready(0, 4)])  # lost already
    assert batch(ready, {0: 4}, late="wait").take == (1, 2)


def test_late_wait_keeps_the_places_of_later_steps_too():
    ready, three = [Ready(1, 7), Ready(2, 7)], {0: 6, 3: 6, 4: 6}  # due next step, which has two places
    assert batch(ready, three, late="wait").take == ()
    assert batch([Ready(0, 6), *ready], {3: 6, 4: 6}, late="wait").take == (0, 1)
    assert batch(ready, {0: 6, 3: 6}, late="wait").take == (1, 2)


def test_o097_filtered_groups_give_their_admission_back_and_a_step_waits_for_a_full_batch():
    live, informative = 8, [Ready(i, 0) for i in range(8) if i not in (1, 4, 6)]
    assert admit(max_age=0, prompts=8, live=live) == 0
    live -= 3  # zero variance, dropped
    assert admit(max_age=0, prompts=8, live=live) == 3
    assert batch(informative, version=0, max_age=0, prompts=8).take == ()
    refilled = [*informative, *(Ready(i, 0) for i in (8, 9, 10))]
    assert batch(refilled, version=0, max_age=0, prompts=8).take == (0, 2, 3, 5, 7, 8, 9, 10)


def part(ready, unready=(), **changes):
    return batch(ready, unready, **{"prompts": 6, "lacking": 6, "least": 1, **changes})


def test_a_part_is_the_oldest_that_are_young_enough_and_no_more_than_the_batch_lacks():
    ready = [Ready(9, 7), Ready(3, 6), Ready(5, 4), Ready(4, 7)]
    assert part(ready) == batch(ready, prompts=3)
    assert part(ready).take == (3, 4, 9) and part(ready).stale == (5,)
    assert part(ready, lacking=2).take == (3, 4) and part([]).take == ()
    with pytest.raises(ValueError, match="version 8"):
        part([Ready(0, 8)])


def test_a_part_with_late_wait_leaves_a_place_to_each_who_would_be_too_old():
    ready = [Ready(1, 7), Ready(2, 7), Ready(4, 6)]
    assert part(ready, {0: 5}, late="wait", lacking=2).take == (4,)
    assert part(ready, {0: 5}, late="wait", lacking=1).take == ()
    assert part(ready, {0: 5}, late="wait", lacking=3, least=2).take == ()  # each rank needs one
    assert part(ready, {0: 5}, lacking=2).take == (1, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_part_gives_each_rank_a_group_and_the_batch_is_filled_whatever_comes_when(ranks):
    for whole in range(ranks, 12):
        for arriving in range(1, whole + 1):
            lacking, ready, parts = whole, 0, []
            while lacking:
                ready = min(lacking, ready + arriving)
                take = part([Ready(i, 7) for i in range(ready)], lacking=lacking, least=ranks).take
                assert take or ready < lacking, "all there and nothing taken"
                parts += [len(take)] if take else []
                lacking, ready = lacking - len(take), ready - len(take)
            assert min(parts) >= ranks and sum(parts) == whole


@pytest.mark.parametrize("ranks", [None, 1, 2])  # None: whole batches
@pytest.mark.parametrize("max_age", [0, 1, 2, 5])
def test_late_wait_loses_nobody_and_ends_whatever_takes_how_long(max_age, ranks):
    """Groups take any time; some are filtered when they are ready; weights are served a while later."""
    for seed in range(20):
        rng = np.random.default_rng([seed, max_age])
        prompts, steps = int(rng.integers(2, 6)), 12
        least, tail = ranks or prompts, rng.choice([1.0, 20.0])
        version = served = trained = issued = clock = 0
        under, done, held, waits = {}, {}, set(), 0  # ordinal → version, → when; what the step has
        while version < steps:
            room_left = room(trained=trained, live=len(under), version=served, max_age=max_age,
                             prompts=prompts, steps=steps)  # fmt: skip
            for ordinal in range(issued, issued + room_left):
                under[ordinal], done[ordinal] = served, clock + rng.exponential(tail)
            issued += room_left
            ready = {o for o in under if done[o] <= clock}
            for ordinal in [o for o in ready - held if done[o] > clock - 1 and rng.random() < 0.1]:
                under.pop(ordinal)  # filtered: another comes in its place
                ready.remove(ordinal)
            offered, unready = ready - held, {o: u for o, u in under.items() if o not in ready}
            formed = form(
                [Ready(o, under[o]) for o in offered], unready, version=version, max_age=max_age,
                prompts=prompts, lacking=prompts - len(held), least=least, late="wait",
            )  # fmt: skip
            assert not formed.stale and all(version - u <= max_age for u in under.values())
            held |= set(formed.take)
            clock, waits = clock + 1, 0 if formed.take else waits + 1
            assert waits < 50 * tail, "nothing is trained any more"
            if len(held) == prompts:
                for ordinal in held:
                    under.pop(ordinal)
                held, trained, version = set(), trained + prompts, version + 1
            served = min(version, served + int(rng.integers(0, 2)))


READY = [Ready(3, 7), Ready(5, 7, key="sort", reward=0.5), Ready(9, 6)]


@pytest.mark.parametrize("chosen", [[9, 3], (3, 9), {9, 3}, np.array([9, 3]), iter([9, 3])])
def test_a_pick_is_any_iterable_of_ordinals(chosen):
    assert checked_pick(chosen, READY, 2) == (3, 9)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([3, 3], r"got 2: \[3, 3\]; twice: \[3\]"),
        ([3, 4], r"2 different ordinals of the 3 groups .*got 2: \[3, 4\]; not ready: \[4\]"),
        ([3], r"got 1: \[3\]$"),
        ([3, 5, 9], r"got 3: \[3, 5, 9\]$"),
        ([], r"got 0: \[\]$"),
        (None, "expected 2 ordinals, got None"),
        (["3", "5"], r"expected 2 ordinals, got \['3', '5'\]"),
        ([3.0, 5.0], r"expected 2 ordinals, got \[3\.0, 5\.0\]"),
        ([Ready(3, 7), Ready(5, 7)], "expected 2 ordinals, got"),
    ],
)
def test_a_pick_of_anything_else_is_refused_and_named(chosen, message):
    with pytest.raises(ValueError, match=r"staleness\.pick: .*" + message):
        checked_pick(chosen, READY, 2)
