"""Against the naive definitions, with ties."""

import math
import random
from itertools import combinations, product
from statistics import fmean, stdev

import pytest

from rl.judges import stats

try:
    from scipy import stats as scipy_stats
except ModuleNotFoundError:
    scipy_stats = None


def draws(seed, n=30, levels=6):
    """Scores with many ties, labels that lean on them, and ties between the two ends of the scale."""
    rng = random.Random(seed)
    scores = [rng.randrange(levels) / (levels - 1) for _ in range(n)]
    return scores, [rng.random() < 0.2 + 0.6 * s for s in scores]


def naive_rank(values, x):
    return sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2


def naive_pearson(x, y):
    mx, my = fmean(x), fmean(y)
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def naive_auc(scores, right):
    pairs = product(
        [s for s, r in zip(scores, right, strict=True) if r],
        [s for s, r in zip(scores, right, strict=True) if not r],
    )
    return fmean(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)


@pytest.mark.parametrize("seed", range(10))
def test_spearman_is_pearson_of_mean_ranks(seed):
    scores, right = draws(seed)
    lengths = [random.Random(i + seed).randrange(9) for i in range(len(scores))]
    assert stats.ranks(scores) == [naive_rank(scores, x) for x in scores]
    naive = naive_pearson([naive_rank(scores, x) for x in scores], [naive_rank(lengths, x) for x in lengths])
    assert stats.spearman(scores, lengths) == pytest.approx(naive, abs=1e-12)
    if scipy_stats is not None:
        assert naive == pytest.approx(float(scipy_stats.spearmanr(scores, lengths).statistic))


def test_without_spread_there_is_no_correlation_and_without_both_kinds_no_auc():
    assert stats.spearman([1, 1, 1], [1, 2, 3]) is None and stats.spearman([1, 2], [0.5, 0.5]) is None
    assert stats.spearman([5], [1]) is None
    assert stats.auc([0.1, 0.9], [True, True]) is None and stats.auc([0.1], [False]) is None


@pytest.mark.parametrize("seed", range(10))
def test_auc_counts_pairs_with_half_for_ties(seed):
    scores, right = draws(seed)
    assert stats.auc(scores, right) == pytest.approx(naive_auc(scores, right), abs=1e-12)
    assert stats.auc([0.5] * 4, [True, False, True, False]) == 0.5
    assert stats.auc([0.0, 1.0], [False, True]) == 1.0 and stats.auc([0.0, 1.0], [True, False]) == 0.0


def test_auc_error_is_hanley_and_mcneils():
    a, p, n = 0.8, 40, 60
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    variance = (a * (1 - a) + (p - 1) * (q1 - a * a) + (n - 1) * (q2 - a * a)) / (p * n)
    assert stats.auc_error(a, p, n) == pytest.approx(math.sqrt(variance))
    low, high = stats.auc_interval(0.8, 4000, 6000)  # of many answers: the usual interval
    assert (low, high) == pytest.approx((0.8 - 1.96 * 0.00453, 0.8 + 1.96 * 0.00453), abs=1e-3)


def test_a_perfect_auc_of_few_answers_is_not_certain():
    low, high = stats.auc_interval(1.0, 5, 5)
    assert 0.5 < low < 0.9 and high == 1.0
    assert stats.auc_interval(0.0, 5, 5)[0] == 0.0 and stats.auc_interval(0.0, 5, 5)[1] > 0.1
    assert stats.auc_interval(1.0, 2000, 2000)[0] > 0.99


def test_the_interval_covers_the_true_auc_in_95_of_100_samples():
    rng, truth, hit = random.Random(0), 0.8413, 0  # P(N(√2, 1) > N(0, 1)) = Φ(1)
    for _ in range(300):
        right = [i < 20 for i in range(50)]
        scores = [rng.gauss(math.sqrt(2) * r, 1) for r in right]
        low, high = stats.auc_interval(stats.auc(scores, right), 20, 30)
        hit += low <= truth <= high
    assert 0.91 < hit / 300 < 0.99


@pytest.mark.parametrize("seed", range(5))
def test_calibration_error_is_the_weighted_gap_of_ten_bins(seed):
    scores, right = draws(seed, n=80, levels=41)
    naive = 0.0
    for i in range(10):
        here = [
            (s, r)
            for s, r in zip(scores, right, strict=True)
            if i / 10 <= s < (i + 1) / 10 or (i == 9 and s == 1)
        ]
        if here:
            naive += len(here) / 80 * abs(fmean(s for s, _ in here) - fmean(r for _, r in here))
    table = stats.reliability(scores, right)
    assert stats.calibration_error(table) == pytest.approx(naive, abs=1e-12)
    assert sum(b.n for b in table) == 80 and all(b.lo <= b.score <= b.hi for b in table)


def test_bins_begin_at_their_decimal():
    assert [stats.bin_of(i / 10, 10) for i in range(11)] == [*range(10), 9]
    assert stats.bin_of(0.7 - 1e-12, 10) == 6


@pytest.mark.parametrize("seed", range(10))
def test_the_best_threshold_is_the_best_of_all(seed):
    scores, right = draws(seed, n=12, levels=4)
    cuts = [-1.0, *(sum(pair) / 2 for pair in combinations(sorted(set(scores)), 2)), 2.0]
    threshold, found = stats.best_threshold(scores, right)
    assert found == pytest.approx(max(stats.accuracy(scores, right, cut) for cut in cuts))
    assert stats.accuracy(scores, right, threshold) == pytest.approx(found)


def test_the_best_threshold_of_a_perfect_and_of_a_useless_judge():
    assert stats.best_threshold([0.0, 1.0, 1.0], [False, True, True]) == (0.5, 1.0)
    threshold, found = stats.best_threshold([0.2, 0.9, 0.9], [False, False, False])
    assert threshold > 0.9 and found == 1.0
    neighbours = [0.5, math.nextafter(0.5, 1)]  # nothing lies between them
    assert stats.best_threshold(neighbours, [False, True]) == (neighbours[1], 1.0)


def test_quantiles_are_values_of_the_sample():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [stats.quantile(values, q) for q in (0.0, 0.2, 0.5, 0.95, 1.0)] == [1.0, 1.0, 3.0, 5.0, 5.0]


def test_t_quantiles_are_the_tables():
    for freedom, quantile in ((5, 3.365), (7, 2.998), (10, 2.764), (30, 2.457), (1000, 2.330)):
        assert stats.t_quantile(freedom) == pytest.approx(quantile, rel=0.02)


def test_the_margin_is_that_of_independent_values_where_each_is_a_cluster():
    values = [random.Random(i).gauss(0, 1) for i in range(100)]
    found = stats.estimate([[x] for x in values], values=64, least=8)
    assert found.mean == pytest.approx(fmean(values))
    assert found.margin == pytest.approx(stats.t_quantile(99) * stdev(values) / 10)


def test_equal_values_in_a_cluster_count_once():
    values = [random.Random(i).gauss(0, 1) for i in range(20)]
    one = stats.estimate([[x] for x in values], values=8, least=8)
    ten = stats.estimate([[x] * 10 for x in values], values=8, least=8)
    assert ten.mean == pytest.approx(one.mean) and ten.margin == pytest.approx(one.margin)


def test_too_little_has_a_mean_and_no_margin():
    assert stats.estimate([[], []], values=1, least=1) is None
    assert stats.estimate([[1.0]] * 63, values=64, least=8) == stats.Estimate(1.0, None)
    assert stats.estimate([[1.0] * 20] * 7, values=64, least=8) == stats.Estimate(1.0, None)
    assert stats.estimate([[1.0] * 8] * 8, values=64, least=8) == stats.Estimate(1.0, 0.0)


def test_a_share_of_all_is_not_certain():
    found = stats.estimate([[1.0] * 8] * 8, values=64, least=8, share=True)
    assert found.mean == 1.0 and 0.03 < found.margin < 0.1


@pytest.mark.parametrize(
    ("alpha", "beta", "missed"),
    [(2, 2, 0.025), (4, 1, 0.05)],  # of skewed groups the margin is somewhat short
)
def test_the_margin_of_a_share_holds_in_99_of_100_samples(alpha, beta, missed):
    rng, beyond = random.Random(1), 0
    for _ in range(500):
        groups = []
        for _ in range(40):  # answers of a group resemble each other
            p = rng.betavariate(alpha, beta)
            groups.append([float(rng.random() < p) for _ in range(8)])
        found = stats.estimate(groups, values=64, least=8, share=True)
        beyond += found.mean - found.margin > alpha / (alpha + beta)
    assert beyond / 500 < missed
