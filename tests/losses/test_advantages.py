"""Advantages against naive loops over plain floats, and the edge cases on which public code has failed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import losses

F64 = torch.float64
REWARD = torch.tensor(
    [
        [1.0, 0.0, 0.25, 0.5],
        [0.0, 0.0, 0.0, 1.0],
        [0.3, 0.3, 0.3, 0.3],
        [2.0, -1.0, 0.5, 0.1],
        [0.7, 0.7, 0.1, 9.0],
    ],
    dtype=F64,
)
VALID = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 0, 0]]).bool()


def lengths(reward: Tensor) -> Tensor:
    return torch.arange(reward.numel()).reshape(reward.shape) * 7 % 10 + 1


N_TOKENS = lengths(REWARD)


def std(x: list[float], ddof: int = 1) -> float:
    mean = sum(x) / len(x)
    return math.sqrt(sum((v - mean) ** 2 for v in x) / (len(x) - ddof))


def grpo(r: list[float], n: list[int], batch: list[float]) -> list[float]:
    return [(x - statistics.fmean(r)) / (std(r) + 1e-6) for x in r]


def loo(scaled: bool) -> Callable[..., list[float]]:
    def naive(r: list[float], n: list[int], batch: list[float]) -> list[float]:
        out = []
        for i, x in enumerate(r):
            others = r[:i] + r[i + 1 :]
            adv = x - statistics.fmean(others)
            out.append(adv / (std(others) + 1e-6) if scaled and len(set(others)) > 1 else adv)
        return out

    return naive


def opo(r: list[float], n: list[int], batch: list[float]) -> list[float]:
    return [x - sum(a * b for a, b in zip(r, n, strict=True)) / sum(n) for x in r]


def maxrl(r: list[float], n: list[int], batch: list[float]) -> list[float]:
    mean = statistics.fmean(r)
    return [(x - mean) / mean if mean > 0 else 0.0 for x in r]


def best(r: list[float], n: list[int], batch: list[float]) -> list[float]:
    first, second = sorted(r, reverse=True)[:2]
    return [(first - second) / (std(r) + 1e-6) if x == first else 0.0 for x in r]


Naive = Callable[[list[float], list[int], list[float]], list[float]]
GROUPED: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]], Naive]] = {
    "grpo": (lambda r, v: losses.group_advantages(r, v), grpo),
    "grpo_ddof0": (
        lambda r, v: losses.group_advantages(r, v, ddof=0, eps=1e-4),
        lambda r, n, b: [(x - statistics.fmean(r)) / (std(r, 0) + 1e-4) for x in r],
    ),
    "dr_grpo": (
        lambda r, v: losses.group_advantages(r, v, scale="none"),
        lambda r, n, b: [x - statistics.fmean(r) for x in r],
    ),
    "batch_std": (
        lambda r, v: losses.batch_std_advantages(r, v),
        lambda r, n, b: [(x - statistics.fmean(r)) / (std(b) + 1e-6) for x in r],
    ),
    "rloo": (lambda r, v: losses.rloo_advantages(r, v), loo(False)),
    "rloo_std": (lambda r, v: losses.rloo_advantages(r, v, scale="std"), loo(True)),
    "opo": (lambda r, v: losses.opo_advantages(r, lengths(r), v), opo),
    "maxrl": (lambda r, v: losses.maxrl_advantages(r, v), maxrl),
    "best_of_group": (lambda r, v: losses.best_of_group_advantages(r, v), best),
    "shrunk_noiseless": (lambda r, v: losses.shrunk_advantages(r, torch.zeros_like(r), v), grpo),
}
grouped = pytest.mark.parametrize("name", GROUPED)


@grouped
def test_advantages_are_those_of_a_naive_loop_over_the_valid_samples(name: str) -> None:
    fn, naive = GROUPED[name]
    adv, aux = fn(REWARD, VALID)
    batch = REWARD[VALID].tolist()
    for p in range(REWARD.shape[0]):
        kept = VALID[p].nonzero().flatten().tolist()
        r, n = REWARD[p, kept].tolist(), N_TOKENS[p, kept].tolist()
        alive = len(r) >= 2 and len(set(r)) > 1
        want = naive(r, n, batch) if alive else [0.0] * len(r)
        torch.testing.assert_close(adv[p, kept].tolist(), want, rtol=1e-9, atol=1e-12)
        assert not adv[p, ~VALID[p]].any()
    assert aux["n_valid"].tolist() == VALID.sum(1).tolist()
    assert aux["signal"].tolist()[:4] == [True, True, False, False]


ALL: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]] = {
    **{name: fn for name, (fn, _) in GROUPED.items()},
    "gpg": lambda r, v: losses.gpg_advantages(r, v),
    "gpg_nonzero": lambda r, v: losses.gpg_advantages(r, v, count="nonzero"),
    "remax": lambda r, v: losses.remax_advantages(r, torch.full_like(r[:, 0], 0.3), v),
    "reinforce_pp_baseline": lambda r, v: losses.reinforce_pp_baseline_advantages(
        r, torch.full_like(r, 3), v
    ),
    "passk": lambda r, v: losses.passk_advantages(r, v, k=2),
    "shrunk": lambda r, v: losses.shrunk_advantages(r, torch.full_like(r, 0.001), v),
    "gdpo": lambda r, v: losses.gdpo_advantages(torch.stack([r, r.square()]), torch.stack([v, v])),
}
every = pytest.mark.parametrize("name", ALL)


@every
def test_what_an_invalid_sample_holds_matters_to_nobody(name: str) -> None:
    want, want_aux = ALL[name](REWARD, VALID)
    for bad in (5.0, math.nan, math.inf, -math.inf):
        reward = torch.where(VALID, REWARD, bad)
        adv, aux = ALL[name](reward, VALID)
        assert torch.equal(adv, want) and not adv[~VALID].any()
        assert all(torch.equal(aux[k], want_aux[k]) for k in aux)
        assert torch.equal(reward.isnan(), torch.where(VALID, REWARD, bad).isnan())


@every
def test_equal_rewards_single_samples_and_missing_groups_give_exactly_zero_and_are_counted(name: str) -> None:
    reward = torch.tensor(
        [[0.1] * 7, [0.35] * 7, [1 / 3] * 7, [1e4] * 7, [0.3] * 7, [0.3] * 7], dtype=torch.float32
    )
    if name == "remax":
        reward[:] = torch.tensor(0.3)
    valid = torch.ones_like(reward, dtype=torch.bool)
    valid[4, 1:], valid[5] = False, False
    reward[0, 6], valid[0, 6] = 9.0, False  # what is equal, is so among the valid ones
    reward[1, 6], valid[1, 6] = -9.0, False
    adv, aux = ALL[name](reward, valid)
    assert not adv.any() and not aux["signal"].any()
    assert aux["n_valid"].tolist() == [6, 6, 7, 7, 1, 0]


@every
def test_a_valid_reward_that_is_not_finite_is_refused(name: str) -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or infinite"):
            ALL[name](torch.tensor([[0.0, bad, 1.0, 1.0]]), torch.ones(1, 4, dtype=torch.bool))


@every
def test_advantages_keep_their_arguments_and_compile_to_one_graph(name: str) -> None:
    reward, valid = REWARD.clone(), VALID.clone()
    want, want_aux = ALL[name](reward, valid)
    assert torch.equal(reward, REWARD) and torch.equal(valid, VALID)
    torch._dynamo.reset()
    adv, aux = torch.compile(ALL[name], fullgraph=True, backend="eager")(reward, valid)
    torch.testing.assert_close(adv, want)
    torch.testing.assert_close(aux, want_aux)


@pytest.mark.parametrize("name", [name for name in ALL if name != "opo"])  # its test lengths go by position
def test_groups_and_samples_have_no_order(name: str) -> None:
    rows, columns = torch.tensor([3, 0, 4, 2, 1]), torch.tensor([2, 3, 0, 1])
    adv, _ = ALL[name](REWARD, VALID)
    moved, _ = ALL[name](REWARD[rows][:, columns], VALID[rows][:, columns])
    torch.testing.assert_close(moved, adv[rows][:, columns])


OF_DIFFERENCES = [n for n in ALL if n not in ("maxrl", "passk", "gdpo", "remax", "gpg_nonzero")]


@pytest.mark.parametrize("name", OF_DIFFERENCES)
def test_float32_rewards_far_from_zero_keep_their_differences(name: str) -> None:
    """E[x^2] - E[x]^2 of 1e4 and 1e4 + 1 is 0 in float32; centred first, only the mean's rounding is left."""
    far = torch.tensor([[1e4, 1e4 + 1, 1e4 + 1, 1e4]])
    near = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    valid = torch.ones_like(near, dtype=torch.bool)
    torch.testing.assert_close(ALL[name](far, valid)[0], ALL[name](near, valid)[0], rtol=2e-3, atol=2e-3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]), min_size=5, max_size=5), min_size=1, max_size=4
    ),
    st.data(),
)
def test_grpo_groups_sum_to_zero_have_unit_deviation_or_are_exactly_zero(
    rows: list[list[float]], data: Any
) -> None:
    reward = torch.tensor(rows)
    valid = torch.tensor(
        data.draw(
            st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=len(rows), max_size=len(rows))
        )
    )
    adv, aux = losses.group_advantages(reward, valid)
    assert adv.isfinite().all() and not adv[~valid].any()
    for p in range(len(rows)):
        mine = adv[p, valid[p]].double()
        if aux["signal"][p]:
            assert abs(float(mine.sum())) < 1e-5 and abs(float(mine.std()) - 1) < 1e-4
        else:
            assert not mine.any()


def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_one() -> None:
    centred, _ = losses.group_advantages(REWARD, VALID, scale="none")
    n = VALID.sum(1, keepdim=True).double()
    torch.testing.assert_close(losses.rloo_advantages(REWARD, VALID)[0], centred * n / (n - 1).clamp(min=1))


def test_gpg_scales_by_samples_with_signal_or_by_rewards_that_are_not_zero() -> None:
    reward = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert losses.gpg_advantages(reward)[0].tolist() == [[1.0, -1.0], [0.0, 0.0]]  # 4 / 2
    torch.testing.assert_close(
        losses.gpg_advantages(reward, count="nonzero")[0][0], torch.tensor([2 / 3, -2 / 3])
    )


def test_maxrl_does_not_turn_signs_round_when_the_mean_is_negative() -> None:
    adv, aux = losses.maxrl_advantages(torch.tensor([[-1.0, 0.5], [1.0, 0.0]]))
    assert adv.tolist() == [[0.0, 0.0], [1.0, -1.0]] and aux["signal"].tolist() == [False, True]


def test_remax_works_with_a_single_sample() -> None:
    adv, aux = losses.remax_advantages(torch.tensor([[1.0], [0.25]]), torch.tensor([0.25, 0.25]))
    assert adv.tolist() == [[0.75], [0.0]] and aux["signal"].tolist() == [True, False]


def test_reinforce_pp_baseline_is_the_whitening_of_centred_rewards_on_every_token() -> None:
    adv, _ = losses.reinforce_pp_baseline_advantages(REWARD, N_TOKENS, VALID)
    centred, aux = losses.group_advantages(REWARD, VALID, scale="none")
    kept, alive = VALID.flatten(), aux["signal"].repeat_interleave(4)
    tokens = centred.flatten()[kept].repeat_interleave(N_TOKENS.flatten()[kept])
    white = losses.whiten(tokens, torch.ones_like(tokens, dtype=torch.bool))
    want = white[N_TOKENS.flatten()[kept].cumsum(0) - 1]
    torch.testing.assert_close(adv.flatten()[kept], torch.where(alive[kept], want, 0.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: losses.group_advantages(torch.zeros(4)),
        lambda: losses.group_advantages(torch.zeros(2, 2), torch.ones(2, 2)),
        lambda: losses.group_advantages(torch.zeros(2, 2), scale="batch"),  # pyright: ignore[reportArgumentType]
        lambda: losses.rloo_advantages(torch.zeros(2, 2), scale="batch"),  # pyright: ignore[reportArgumentType]
        lambda: losses.gdpo_advantages(torch.zeros(2, 2, 2), weights=[1.0]),
        lambda: losses.best_of_group_advantages(torch.zeros(2, 1)),
        lambda: losses.keep_groups(torch.zeros(3)),
        lambda: losses.returns_to_go(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool)),
        lambda: losses.shrunk_advantages(torch.zeros(2, 2), torch.zeros(2, 3)),
    ],
)
def test_shapes_and_names_that_do_not_fit_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError):
        call()


def test_a_nan_that_a_compiled_call_cannot_refuse_spoils_its_group_and_no_other() -> None:
    reward = torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 1.0]])
    torch._dynamo.reset()
    adv, _ = torch.compile(losses.group_advantages, fullgraph=True, backend="eager")(reward)
    assert adv[0].isnan().all() and adv[1].isfinite().all()
