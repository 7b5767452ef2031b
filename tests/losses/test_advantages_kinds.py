"""Token returns, pass@k, several rewards, noise-aware shrinkage and DAPO's rules."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

import losses

F64 = torch.float64


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "reward", [[1, 0, 0, 1, 0], [0.3, 0.9, 0.9, 0.1, 0.5], [-1.0, -2.0, -3.0, -4.0, 5.0]]
)
def test_pkpo_rewards_are_the_mean_over_subsets_of_their_maximum(reward: list[float], k: int) -> None:
    n = len(reward)
    want = []
    for i in range(n):
        subsets = [s for s in itertools.combinations(range(n), k) if i in s]
        want.append(k / n * statistics.fmean(max(reward[j] for j in s) for s in subsets))
    padded = torch.tensor([[math.nan, *reward]], dtype=F64)
    got, aux = losses.pkpo_rewards(padded, ~padded.isnan(), k=k)
    torch.testing.assert_close(got[0].tolist(), [0.0, *want])
    assert aux["signal"].all()


def test_pkpo_needs_k_valid_answers() -> None:
    valid = torch.tensor([[True, True, False, False], [True] * 4])
    got, aux = losses.pkpo_rewards(torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]]), valid, k=3)
    assert not got[0].any() and got[1].any() and aux["signal"].tolist() == [False, True]
    with pytest.raises(ValueError, match="1 <= k <= G"):
        losses.pkpo_rewards(torch.zeros(1, 4), k=5)


@pytest.mark.parametrize(("right", "k"), [(1, 2), (2, 2), (3, 2), (1, 4), (4, 3)])
def test_passk_advantages_average_those_of_all_groups_of_k(right: int, k: int) -> None:
    n = 6
    reward = [1.0] * right + [0.0] * (n - right)
    passes = {s: float(any(reward[i] for i in s)) for s in itertools.combinations(range(n), k)}
    mean, sigma = statistics.fmean(passes.values()), statistics.pstdev(passes.values())
    want = [
        statistics.fmean((v - mean) / sigma for s, v in passes.items() if i in s) if sigma else 0.0
        for i in range(n)
    ]
    got, aux = losses.passk_advantages(torch.tensor([reward], dtype=F64), k=k)
    torch.testing.assert_close(got[0].tolist(), want)
    assert bool(aux["signal"][0]) == (sigma > 0)


def test_a_tie_for_the_best_of_a_group_teaches_nothing() -> None:
    adv, aux = losses.best_of_group_advantages(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.5, 0.0]]), scale=False)
    assert adv.tolist() == [[0.0, 0.0, 0.0], [0.5, 0.0, 0.0]] and aux["signal"].tolist() == [False, True]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_are_those_of_a_backward_loop_padded_and_packed(gamma: float) -> None:
    g = torch.Generator().manual_seed(0)
    reward = torch.randn(4, 11, generator=g, dtype=F64)
    mask = torch.rand(4, 11, generator=g) < 0.8
    want = torch.zeros_like(reward)
    for i in range(4):
        running = 0.0
        for t in range(10, -1, -1):
            if mask[i, t]:
                running = reward[i, t] + gamma * running
                want[i, t] = running
    torch.testing.assert_close(
        losses.returns_to_go(torch.where(mask, reward, math.nan), mask, gamma=gamma), want
    )
    row = torch.arange(4).repeat_interleave(11)
    packed = losses.returns_to_go(reward.flatten(), mask.flatten(), gamma=gamma, row=row)
    torch.testing.assert_close(packed, want.flatten())


def test_discounted_returns_of_long_answers_do_not_overflow() -> None:
    reward = torch.ones(1, 20_000)
    got = losses.returns_to_go(reward, torch.ones(1, 20_000, dtype=torch.bool), gamma=0.9)
    torch.testing.assert_close(got[0, 0], torch.tensor(10.0))


def test_whitened_tokens_have_mean_zero_and_unbiased_variance_one_and_equal_ones_are_exactly_zero() -> None:
    g = torch.Generator().manual_seed(0)
    x, mask = torch.randn(5, 7, generator=g, dtype=F64) * 3 + 2, torch.rand(5, 7, generator=g) < 0.6
    white = losses.whiten(torch.where(mask, x, math.nan), mask)
    torch.testing.assert_close(white[mask], (x[mask] - x[mask].mean()) / (x[mask].var() + 1e-8).sqrt())
    assert not white[~mask].any()
    assert not losses.whiten(torch.full((3, 3), 0.1), torch.ones(3, 3, dtype=torch.bool)).any()
    assert not losses.whiten(x, torch.zeros_like(mask)).any() and losses.whiten(x[:0], mask[:0]).shape == (
        0,
        7,
    )


def test_returns_are_undiscounted_unless_asked() -> None:
    reward, mask = torch.tensor([[0.0, 1.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert losses.returns_to_go(reward, mask).tolist() == [[3.0, 3.0, 2.0]]
    assert losses.reinforce_pp_advantages(reward, mask)[1]["returns"].tolist() == [[3.0, 3.0, 2.0]]


def test_reinforce_pp_is_the_whitened_return() -> None:
    reward, mask = (
        torch.tensor([[0.0, 0.0, 1.0], [0.0, -1.0, 9.0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
    )
    adv, aux = losses.reinforce_pp_advantages(reward, mask, gamma=0.5)
    assert aux["returns"].tolist() == [[0.25, 0.5, 1.0], [-0.5, -1.0, 0.0]]
    torch.testing.assert_close(adv, losses.whiten(aux["returns"], mask))
    compiled = torch.compile(losses.reinforce_pp_advantages, fullgraph=True, backend="eager")(
        reward, mask, gamma=0.5
    )
    torch.testing.assert_close(compiled[0], adv)


def test_gdpo_normalises_apart_then_adds_then_normalises_the_batch() -> None:
    g = torch.Generator().manual_seed(0)
    reward = torch.randn(2, 3, 4, generator=g, dtype=F64) * torch.tensor([1.0, 100.0])[:, None, None]
    adv, aux = losses.gdpo_advantages(reward, weights=[1.0, 0.5])
    each = [losses.group_advantages(r)[0] for r in reward]
    total = each[0] + 0.5 * each[1]
    torch.testing.assert_close(aux["per_reward"], torch.stack(each))
    torch.testing.assert_close(adv, (total - total.mean()) / (total.std() + 1e-6))


def test_gdpo_tells_apart_mixes_that_their_sum_does_not() -> None:
    easy, hard = torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    adv, _ = losses.gdpo_advantages(torch.stack([easy, 100 * hard]))
    plain, _ = losses.group_advantages(easy + 100 * hard)
    assert float(plain[0, 1] - plain[0, 2]) < 0.05 < float(adv[0, 1] - adv[0, 2])


def test_shrinkage_is_none_without_noise_total_in_pure_noise_and_stronger_where_noisier() -> None:
    reward = torch.tensor([[0.2, 0.6, 0.4, 0.8]])
    plain, _ = losses.group_advantages(reward)
    torch.testing.assert_close(losses.shrunk_advantages(reward, torch.zeros(1, 4))[0], plain)
    adv, aux = losses.shrunk_advantages(reward, torch.full((1, 4), 1.0))
    assert not adv.any() and not aux["signal"].any()
    v = torch.tensor([[0.0, 0.0, 0.0, 0.04]])
    adv, aux = losses.shrunk_advantages(reward, v)
    tau2 = float(reward.var()) - 0.01
    torch.testing.assert_close(aux["reliability"][0], torch.tensor([1, 1, 1, tau2 / (tau2 + 0.04)]))
    torch.testing.assert_close(adv, aux["reliability"] * plain)
    with pytest.raises(ValueError, match="variance"):
        losses.shrunk_advantages(reward, -v)


def test_shrinkage_recovers_true_advantages_better_than_plain_ones() -> None:
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(400, 8, generator=g)
    noise_var = torch.where(torch.rand(400, 8, generator=g) < 0.5, 0.05, 4.0)
    judged = truth + noise_var.sqrt() * torch.randn(400, 8, generator=g)
    target = truth - truth.mean(1, keepdim=True)
    error = [
        float((adv * judged.std(1, keepdim=True) - target).square().mean())
        for adv in (losses.group_advantages(judged)[0], losses.shrunk_advantages(judged, noise_var)[0])
    ]
    assert error[1] < 0.6 * error[0]


def test_dynamic_sampling_keeps_mixed_groups_of_the_unshaped_metric() -> None:
    nan = math.nan
    kept = [[1.0, 0.0, 1.0], [1.0, nan, 0.0]]
    dropped = [[1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [1.0, nan, nan], [nan, 1.0, 1.0], [-1.0, nan, -1.0]]
    metric = torch.tensor(kept + dropped)
    assert losses.keep_groups(metric, ~metric.isnan()).tolist() == [True] * 2 + [False] * 5


def test_overlong_penalty_is_linear_in_the_buffer_and_floored() -> None:
    lengths = torch.tensor([0, 80, 85, 90, 100, 101, 10_000])
    got = losses.overlong_penalty(lengths, max_tokens=100, buffer=20)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]))
    with pytest.raises(ValueError, match="buffer"):
        losses.overlong_penalty(lengths, max_tokens=100, buffer=0)
