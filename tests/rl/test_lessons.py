from itertools import chain
from typing import Any

import pytest

from rl.config import Loss
from rl.lessons import Rated, advantages, count, make_lessons


def rated(rewards, n=3, taught=False):
    return Rated(n_tokens=(n,) * len(rewards), rewards=tuple(rewards), teachers=("t",) if taught else ())


def test_a_missing_reward_changes_nothing_for_its_group_mates():
    whole, _ = advantages([rated([1.0, 3.0, 2.0])], Loss())
    with_gap, _ = advantages([rated([1.0, 3.0, None, 2.0])], Loss())
    assert [with_gap[0][i] for i in (0, 1, 3)] == whole[0] and with_gap[0][2] == 0.0


def test_a_missing_reward_has_no_weight_in_the_policy_term_and_the_others_share_all():
    (lessons,) = make_lessons([rated([1.0, None, 0.0, 0.0])], Loss(), norm_length=8)
    assert lessons[1].weight["policy"] == 0.0
    assert sum(3 * lesson.weight["policy"] for lesson in lessons) == pytest.approx(1.0)
    assert sum(3 * lesson.weight["kl"] for lesson in lessons) == pytest.approx(1.0)


def test_each_term_has_its_own_count():
    groups = [rated([1.0, 0.0]), rated([None, None], taught=True)]
    lessons = make_lessons(groups, Loss(), norm_length=8, teachers={"t": 1.0})
    assert lessons[0][0].weight["policy"] == pytest.approx(1 / 6) == lessons[1][0].distill["t"]
    assert lessons[1][0].weight["policy"] == 0.0 and not lessons[0][0].distill
    assert lessons[0][0].weight["kl"] == pytest.approx(1 / 12)


def test_a_teacher_that_acts_through_the_advantage_makes_its_samples_part_of_the_policy_term():
    loss = Loss(distill=1.0, distill_form="advantage")
    groups = [rated([1.0, 0.0]), rated([None, None], taught=True)]
    lessons = make_lessons(groups, loss, norm_length=8, teachers={"t": 1.0})
    assert lessons[1][0].weight["policy"] == pytest.approx(1 / 12) and lessons[1][0].adv == 0.0


def test_aggregations_from_global_counts():
    groups = [Rated(n_tokens=(1, 3), rewards=(1.0, 0.0)), rated([0.0, 1.0], n=2)]
    expected = {
        "token_mean": [[1 / 8, 1 / 8], [1 / 8, 1 / 8]],
        "seq_mean_token_sum": [[1 / 4, 1 / 4], [1 / 4, 1 / 4]],
        "seq_mean_token_mean": [[1 / 4, 1 / 12], [1 / 8, 1 / 8]],
        "constant": [[1 / 40, 1 / 40], [1 / 40, 1 / 40]],
        "prompt_mean": [[1 / 8, 1 / 8], [1 / 8, 1 / 8]],
    }
    for agg, weights in expected.items():
        lessons = make_lessons(groups, Loss(agg=agg), norm_length=10)  # type: ignore[arg-type]
        assert [[round(x.weight["policy"], 6) for x in g] for g in lessons] == [
            [round(w, 6) for w in g] for g in weights
        ], agg


def test_o098_a_prompt_of_weight_0_teaches_nothing_and_is_counted():
    both = [
        Rated(n_tokens=(2, 2), rewards=(1.0, 0.0)),
        Rated(n_tokens=(2, 2), rewards=(1.0, 0.0), weight=0.0),
    ]
    first, second = make_lessons(both, Loss(), norm_length=4)
    assert all(w == 0.0 for lesson in second for w in lesson.weight.values())
    assert [lesson.weight["policy"] for lesson in first] == pytest.approx([1 / 8, 1 / 8])  # of all 8 tokens


AGGS: list[Any] = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant", "prompt_mean"]
STEP = [
    Rated(n_tokens=(1, 3), rewards=(1.0, 0.0), teachers=("t",)),
    Rated(n_tokens=(2, 5), rewards=(None, 1.0), weight=0.5),
    Rated(n_tokens=(4, 7), rewards=(None, None), teachers=("t",)),
]


@pytest.mark.parametrize("agg", AGGS)
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"policy": 0.0, "distill": 0.3},
        {"policy": 0.0, "distill": 0.3, "distill_mix": "geometric"},
        {"distill": 0.3, "distill_form": "advantage"},
    ],
    ids=["policy", "distill", "mixture", "advantage"],
)
def test_weights_of_any_parts_divided_by_the_count_are_those_of_the_whole_step(agg, terms):
    loss = Loss(agg=agg, **terms)
    how = {"norm_length": 8, "teachers": {"t": 2.0}}
    whole = make_lessons(STEP, loss, **how)
    parts = [
        lessons for own in (STEP[:1], STEP[1:]) for lessons in make_lessons(own, loss, **how, counted=False)
    ]
    divisor = count(STEP, loss)
    for expected, lesson in zip(chain(*whole), chain(*parts), strict=True):
        assert lesson.adv == expected.adv
        if loss.policy:
            assert lesson.weight["policy"] / divisor == pytest.approx(expected.weight["policy"], rel=1e-6)
        else:
            assert lesson.distill.keys() == expected.distill.keys()
            assert [w / divisor for w in lesson.distill.values()] == pytest.approx(
                [*expected.distill.values()], rel=1e-6
            )
    assert divisor > 1


def test_the_count_is_of_tokens_samples_or_groups_that_count_in_the_term():
    assert [count(STEP, Loss(agg=agg)) for agg in AGGS] == [1 + 3 + 5, 3, 3, 3, 2]
    taught = [count(STEP, Loss(agg=agg, policy=0.0, distill=1.0)) for agg in AGGS]
    assert taught == [1 + 3 + 4 + 7, 4, 4, 4, 2]


def test_rewards_that_votes_disagree_on_are_shrunk_towards_the_groups_mean():
    rewards, noise = (0.0, 1.0, 0.5, 1.0), (0.0, 0.0, 0.2, 0.1)
    group = Rated(n_tokens=(2,) * 4, rewards=rewards, noise=noise)
    (adv,), (signal,) = advantages([group], Loss(advantage="shrunk"))
    var = (0.625**2 + 2 * 0.375**2 + 0.125**2) / 3
    tau2 = var - sum(noise) / 4
    want = [tau2 / (tau2 + v) * (r - 0.625) / (var**0.5 + 1e-6) for r, v in zip(rewards, noise, strict=True)]
    assert signal and adv == pytest.approx(want, rel=1e-6)
    assert advantages([group], Loss())[0][0] == advantages([rated(rewards)], Loss(advantage="shrunk"))[0][0]
