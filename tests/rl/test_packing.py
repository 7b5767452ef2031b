import random

import pytest

from rl.packing import plan_micros, plan_ranks


def pack(lengths, ranks=1, cap=32):
    owners = plan_ranks(lengths, ranks)
    return owners, plan_micros(lengths, owners, cap)


def test_every_sample_is_placed_exactly_once_below_the_cap_and_every_rank_has_as_many_micro_batches():
    rng = random.Random(0)
    for ranks in (1, 2, 3):
        lengths = [[rng.randint(1, 32) for _ in range(rng.randint(1, 6))] for _ in range(11)]
        owners, micros = pack(lengths, ranks)
        placed = [place for rank in micros for micro in rank for place in micro]
        assert sorted(placed) == [(g, s) for g, group in enumerate(lengths) for s in range(len(group))]
        assert all(sum(lengths[g][s] for g, s in micro) <= 32 for rank in micros for micro in rank)
        assert len({len(rank) for rank in micros}) == 1
        assert all(g in owners[r] for r, rank in enumerate(micros) for micro in rank for g, _ in micro)


def test_o023_a_sample_of_the_cap_fits_and_a_longer_one_is_refused():
    assert pack([[32]])[1] == ((((0, 0),),),)
    with pytest.raises(ValueError, match="33 tokens, above the cap of 32"):
        pack([[33]])
    bins = pack([[20, 13, 11, 10]])[1][0]
    assert sorted(place for b in bins for place in b) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_o024_a_rank_with_less_work_gets_empty_micro_batches():
    lengths = [[30, 30, 30], [5]]
    micros = plan_micros(lengths, ((0,), (1,)), 32)
    assert [len(rank) for rank in micros] == [3, 3] and micros[1][1:] == ((), ())


def test_every_rank_gets_a_group():
    owners = plan_ranks([[100], [1], [1]], 3)
    assert sorted(map(len, owners)) == [1, 1, 1]
    with pytest.raises(ValueError, match="cannot feed"):
        plan_ranks([[1]], 2)
