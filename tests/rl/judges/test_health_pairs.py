"""A judge of pairs that prefers a place, and ones that must raise nothing."""

import random

import pytest

from rl.judges.health import measure
from tests.rl.judges.test_health import call, names, raised, seen


def pairwise(rng, group, prefers, samples=4, both=True):
    """A group whose answers meet each other; each call stands with the first answer that it is about."""
    quality, calls = [rng.random() for _ in range(samples)], [[] for _ in range(samples)]
    for i in range(samples):
        for j in range(i + 1, samples):
            orders = [(i, j), (j, i)] if both else [(i, j) if rng.random() < 0.5 else (j, i)]
            for first, second in orders:
                wins = quality[first] > quality[second] or rng.random() < prefers
                calls[first].append(call((first, second), float(wins)))
    return [seen(quality[i], group, calls=tuple(calls[i])) for i in range(samples)]


@pytest.mark.parametrize("both", [True, False])
def test_a_judge_that_prefers_the_first_place(both):
    rng = random.Random(0)
    judged = [s for g in range(60) for s in pairwise(rng, g, prefers=0.8, both=both)]
    (alarm,) = raised(judged)
    assert alarm.name == "position" and "prefers the first place" in alarm.message
    metrics = measure(judged)
    assert metrics["judge/first_place"] == pytest.approx(0.9, abs=0.05)
    assert ("judge/swap_agreement" in metrics) == both
    if both:
        assert metrics["judge/swap_agreement"] == pytest.approx(0.2, abs=0.1)


def test_a_judge_that_prefers_the_second_place():
    judged = [seen(0.5, g, calls=(call((0, 1), 0.2), call((1, 0), 0.4))) for g in range(64)]
    (alarm,) = raised(judged)
    assert "prefers the second place" in alarm.message and "wins 0%" in alarm.message


@pytest.mark.parametrize("both", [True, False])
def test_a_pairwise_judge_without_preference_raises_nothing_over_fifty_seeds(both):
    for seed in range(50):
        rng = random.Random(seed)
        judged = [s for g in range(20) for s in pairwise(rng, g, prefers=0.1, both=both)]
        assert "position" not in names(raised(judged)), seed


def test_the_two_orders_agree_if_they_name_the_same_winner():
    def agreement(*calls):
        return measure([seen(0.5, calls=calls)]).get("judge/swap_agreement")

    assert agreement(call((0, 1), 0.9), call((1, 0), 0.4)) == 1.0  # 0 wins twice
    assert agreement(call((0, 1), 0.9), call((1, 0), 0.9)) == 0.0  # whoever is first
    assert agreement(call((0, 1), 0.5), call((1, 0), 0.5)) == 1.0  # twice a tie
    assert agreement(call((0, 1), 0.5), call((1, 0), 0.9)) == 0.0
    assert agreement(call((0, 1), 0.9)) is None
    assert agreement(call((0, 1), 0.9), call((1, 0), None, outcome="no_match")) is None
    votes = call((0, 1), 1.0, part="0"), call((0, 1), 0.4, part="1"), call((1, 0), 0.0, part="0")
    assert agreement(*votes) == 1.0  # by the mean of the votes


def test_orders_of_different_groups_are_not_compared():
    here, there = seen(0.5, 0, calls=(call((0, 1), 0.9),)), seen(0.5, 1, calls=(call((1, 0), 0.9),))
    assert "judge/swap_agreement" not in measure([here, there])
