"""Ranks and micro-batches: everything is placed once, nothing is too long, and all finish together."""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import ModelConfig
from models.flops import forward_flops
from rl.packing import bucket, n_tokens, plan_micros, plan_ranks

QWEN_05B = ModelConfig(
    family="qwen2", vocab_size=151_936, d_model=896, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64,
    d_ff=4864, qkv_bias=True,
)  # fmt: skip
FLOPS = partial(forward_flops, QWEN_05B)
CAP = 32


def steep(prompt, answers):  # attention far above the matmuls
    return n_tokens(prompt, answers) + 5.0 * (prompt**2 / 2 + sum(prompt * a + a * a / 2 for a in answers))


COSTS = [n_tokens, FLOPS, steep]
LENGTHS = st.lists(st.lists(st.integers(2, CAP), min_size=1, max_size=6), min_size=3, max_size=12)


def pack(lengths, ranks=1, cap=CAP, **how):
    owners = plan_ranks(lengths, ranks, **how)
    return owners, plan_micros(lengths, owners, cap, **how)


def costs_of(lengths, prompts, cost, micro, share):
    """Of one micro-batch, by tokens and by cost, as build_micro packs it."""
    if not share:
        parts = [(prompts[g], [lengths[g][s] - prompts[g]]) for g, s in micro]
    else:
        parts = [
            (prompts[g], [lengths[h][s] - prompts[g] for h, s in micro if h == g])
            for g in sorted({g for g, _ in micro})
        ]
    return sum(n_tokens(*p) for p in parts), sum(cost(*p) for p in parts)


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS, ranks=st.integers(1, 3), cost=st.sampled_from(COSTS), share=st.booleans(),
    prompt=st.integers(0, 2),
)  # fmt: skip
def test_every_sample_is_placed_once_below_the_cap_and_no_rank_has_more_micro_batches(
    lengths, ranks, cost, share, prompt
):
    prompts = [min(prompt, min(group)) for group in lengths]
    how = {"prompts": prompts, "cost": cost, "share_prompt": share}
    owners, micros = pack(lengths, ranks, **how)
    placed = [place for rank in micros for micro in rank for place in micro]
    assert sorted(placed) == [(g, s) for g, group in enumerate(lengths) for s in range(len(group))]
    assert all(g in owners[r] for r, rank in enumerate(micros) for micro in rank for g, _ in micro)
    assert len({len(rank) for rank in micros}) == 1
    for mine, rank in zip(owners, micros, strict=True):
        measured = [costs_of(lengths, prompts, cost, micro, share) for micro in rank]
        assert all(tokens <= CAP for tokens, _ in measured)
        if not share:  # where a group stays together there may be less to place
            assert all(rank) or sum(len(lengths[g]) for g in mine) < len(rank)
            assert [c for _, c in measured] == sorted((c for _, c in measured), reverse=True)
        assert all(list(micro) == sorted(micro) for micro in rank)
    assert pack(lengths, ranks, **how) == (owners, micros)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 3), cost=st.sampled_from(COSTS))
def test_no_rank_costs_more_than_the_mean_and_one_group(lengths, ranks, cost):
    groups = [sum(cost(0, [n]) for n in group) for group in lengths]
    load = [sum(groups[g] for g in mine) for mine in plan_ranks(lengths, ranks, cost=cost)]
    assert max(load) <= sum(load) / ranks + (1 - 1 / ranks) * max(groups) * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS)
def test_micro_batches_are_as_few_as_first_fits_and_none_has_more_than_the_mean_and_one_sample(lengths):
    owners, (micros,) = pack(lengths)
    bins: list[int] = []
    for n in sorted((n for group in lengths for n in group), reverse=True):
        fits = [b for b, used in enumerate(bins) if used + n <= CAP]
        if fits:
            bins[fits[0]] += n
        else:
            bins.append(n)
    assert len(micros) <= len(bins)
    load = [sum(lengths[g][s] for g, s in micro) for micro in micros]
    assert max(load) <= sum(load) / len(load) + max(n for group in lengths for n in group)


def test_a_small_rest_is_spread_out():
    (micros,) = pack([[10, 10, 10, 10]])[1]
    assert sorted(map(len, micros)) == [2, 2]


@pytest.mark.parametrize("share", [False, True])
def test_long_tailed_batches_finish_together(share):
    """128 groups of 8, log-normal answers up to 8,192, on 8 ranks of 16,384: worst over mean cost."""
    rng = random.Random(0)
    prompts = [rng.randint(50, 400) for _ in range(128)]
    lengths = [[p + min(8192, int(rng.lognormvariate(6.5, 1))) for _ in range(8)] for p in prompts]
    how = {"prompts": prompts, "cost": FLOPS, "share_prompt": share}
    owners, micros = pack(lengths, 8, 16384, **how)
    cost = [[costs_of(lengths, prompts, FLOPS, micro, share)[1] for micro in rank] for rank in micros]
    ranks = [sum(rank) for rank in cost]
    assert max(ranks) <= 1.02 * sum(ranks) / 8
    # ranks wait for each other at every micro-batch
    waiting = sum(max(rank[m] for rank in cost) for m in range(len(cost[0])))
    assert waiting <= (1.1 if share else 1.03) * sum(ranks) / 8


def test_balance_by_attention_differs_from_balance_by_tokens():
    lengths = [[16], [4, 4, 4, 4], [8, 8], [2] * 8]
    assert plan_ranks(lengths, 2) == ((0, 2), (1, 3))  # 32 tokens each
    owners = plan_ranks(lengths, 2, cost=lambda p, answers: sum(a * a for a in answers))
    assert owners == ((0,), (1, 2, 3))  # 256 against 64 + 128 + 32


def test_a_shared_prompt_is_counted_once():
    lengths = [[20, 20, 20]]
    assert len(pack(lengths, prompts=[16])[1][0]) == 3
    assert pack(lengths, prompts=[16], share_prompt=True)[1] == ((((0, 0), (0, 1), (0, 2)),),)
    (torn,) = pack([[30, 30, 30]], prompts=[16], share_prompt=True)[1]
    assert sorted(map(len, torn)) == [1, 1, 1]
    groups, prompts = [[30] * 4, [32] * 2, [32]], [28, 0, 0]
    assert plan_ranks(groups, 2, prompts=prompts) == ((0,), (1, 2))  # 120, 64, 32 tokens
    assert plan_ranks(groups, 2, prompts=prompts, share_prompt=True) == ((1,), (0, 2))  # 36, 64, 32


def test_o023_a_sample_of_the_cap_fits_and_a_longer_one_is_refused():
    assert pack([[32]])[1] == ((((0, 0),),),)
    for share in (False, True):
        with pytest.raises(ValueError, match="33 tokens, above the cap of 32"):
            pack([[33]], share_prompt=share)
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


def test_rows_come_in_few_sizes():
    assert bucket(8192) == 512 and bucket(16384) == 1024 and bucket(100) == 128
    assert all(bucket(cap) % 128 == 0 and cap / bucket(cap) < 32 for cap in range(1, 40_000, 37))


def test_flops_are_those_of_the_matmuls_and_of_causal_attention():
    d, q, kv, layers = 896, 14 * 64, 2 * 64, 24
    weights = layers * (2 * d * q + 2 * d * kv + 3 * d * 4864)
    assert FLOPS(10, []) == 2 * weights * 10 + 2 * layers * q * 10**2
    one = FLOPS(10, [4])
    assert one == 2 * weights * 14 + 2 * d * 151_936 * 4 + 2 * layers * q * 14**2
    # n answers to a shared prompt save n - 1 times the prompt by itself
    assert 3 * one - FLOPS(10, [4, 4, 4]) == 2 * FLOPS(10, [])
