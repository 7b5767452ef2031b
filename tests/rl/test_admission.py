import numpy as np
import pytest

from rl.admission import Ready, checked_pick, form_batch, form_part, room


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


def form(ready, unready=(), **changes):
    return form_batch(ready, unready, **{"version": 7, "max_age": 2, "prompts": 2, "late": "drop", **changes})


def test_o066_age_between_zero_and_eta_is_trained_older_is_dropped_future_is_an_error():
    formed = form([Ready(i, v) for i, v in enumerate([4, 5, 6, 7])], prompts=3)
    assert formed.take == (1, 2, 3) and formed.stale == (0,)
    with pytest.raises(ValueError, match="version 8"):
        form([Ready(0, 8)])


def test_oldest_prompts_first():
    assert form([Ready(9, 7), Ready(3, 7), Ready(5, 7)]).take == (3, 5)


def test_no_batch_before_it_is_full():
    assert form([Ready(0, 7)]).take == ()


def test_late_wait_overtakes_nobody():
    ready = [Ready(1, 7), Ready(2, 7)]
    assert form(ready, unready={0}).take == (1, 2)
    assert form(ready, unready={0}, late="wait").take == ()
    assert form(ready, unready={3}, late="wait").take == (1, 2)
    assert form([Ready(0, 1), *ready], late="wait") == form_batch(
        [Ready(0, 1), *ready], (), version=7, max_age=2, prompts=2, late="wait"
    )
    assert form([Ready(0, 1), *ready], late="wait").take == ()  # the stale one returns first


def test_o097_filtered_groups_give_their_admission_back_and_a_step_waits_for_a_full_batch():
    live, informative = 8, [Ready(i, 0) for i in range(8) if i not in (1, 4, 6)]
    assert admit(max_age=0, prompts=8, live=live) == 0
    live -= 3  # zero variance, dropped
    assert admit(max_age=0, prompts=8, live=live) == 3
    assert form_batch(informative, (), version=0, max_age=0, prompts=8, late="drop").take == ()
    refilled = [*informative, *(Ready(i, 0) for i in (8, 9, 10))]
    assert form_batch(refilled, (), version=0, max_age=0, prompts=8, late="drop").take == (
        0, 2, 3, 5, 7, 8, 9, 10
    )  # fmt: skip


def part(ready, unready=(), **changes):
    how = {"version": 7, "max_age": 2, "lacking": 6, "ranks": 1, "late": "drop", **changes}
    return form_part(ready, unready, **how)


def test_a_part_is_the_oldest_that_are_young_enough_and_no_more_than_the_batch_lacks():
    ready = [Ready(9, 7), Ready(3, 6), Ready(5, 4), Ready(4, 7)]
    assert part(ready) == form_batch(ready, (), version=7, max_age=2, prompts=3, late="drop")
    assert part(ready).take == (3, 4, 9) and part(ready).stale == (5,)
    assert part(ready, lacking=2).take == (3, 4) and part([]).take == ()
    with pytest.raises(ValueError, match="version 8"):
        part([Ready(0, 8)])


def test_a_part_with_late_wait_ends_before_the_first_that_is_under_way():
    ready = [Ready(1, 7), Ready(2, 7), Ready(4, 7)]
    assert part(ready, {3, 5}, late="wait").take == (1, 2)
    assert part(ready, {0}, late="wait").take == () and part(ready, {0}).take == (1, 2, 4)
    assert part([*ready, Ready(0, 1)], late="wait").take == ()  # the stale one returns first


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_part_gives_each_rank_a_group_and_the_batch_is_filled_whatever_comes_when(ranks):
    for batch in range(ranks, 12):
        for arriving in range(1, batch + 1):
            lacking, ready, parts = batch, 0, []
            while lacking:
                ready = min(lacking, ready + arriving)
                take = part([Ready(i, 7) for i in range(ready)], lacking=lacking, ranks=ranks).take
                assert take or ready < lacking, "all there and nothing taken"
                parts += [len(take)] if take else []
                lacking, ready = lacking - len(take), ready - len(take)
            assert min(parts) >= ranks and sum(parts) == batch


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
