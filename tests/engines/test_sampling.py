import pytest
import torch

from rl.engines.sampling import kept, sample, uniform

V = 11


def draw(logits, u, temperature=1.0, top_p=1.0, top_k=0, filtered=True):
    rows = len(u)
    return sample(
        logits.expand(rows, -1),
        u,
        temperature=torch.full((rows,), temperature, dtype=torch.float64),
        top_p=torch.full((rows,), top_p, dtype=torch.float64),
        top_k=torch.full((rows,), top_k),
        filtered=filtered,
    )


def naive(logits, temperature, top_p, top_k):
    """The distribution by hand, in plain Python."""
    weight = [float((x / temperature).exp()) for x in logits.double()]
    ranked = sorted(range(len(weight)), key=lambda i: -weight[i])[: top_k or len(weight)]
    mass, keep = 0.0, []
    for i in ranked:
        if mass < top_p * sum(weight[j] for j in ranked):
            keep.append(i)
        mass += weight[i]
    total = sum(weight[j] for j in keep)
    return torch.tensor([weight[i] / total if i in keep else 0.0 for i in range(len(weight))])


@pytest.mark.parametrize(
    "temperature, top_p, top_k",
    [
        (1.0, 1.0, 0),
        (0.7, 1.0, 0),
        (1.3, 0.8, 0),
        (1.0, 1.0, 4),
        (0.9, 0.7, 5),
        (1.0, 0.01, 0),
        (1.0, 1.0, 1),
    ],
)
def test_draws_follow_the_filtered_distribution_and_logp_is_its_log(temperature, top_p, top_k):
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 1.5
    n = 20_000
    u = uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64))
    token, logp = draw(logits, u, temperature, top_p, top_k)
    p = naive(logits, temperature, top_p, top_k)
    torch.testing.assert_close(logp, p[token].log(), atol=1e-5, rtol=0)
    seen = torch.bincount(token, minlength=V)
    assert (seen[p == 0] == 0).all()
    support = p > 0
    chi2 = ((seen - n * p)[support] ** 2 / (n * p)[support]).sum()
    assert chi2 < 35  # 10 degrees of freedom: 1 in 10,000


def test_uniform_is_uniform_in_seed_and_in_count_and_independent():
    n = 20_000
    count = torch.arange(n)
    by_seed = uniform(count, torch.zeros_like(count))
    by_count = uniform(torch.full_like(count, 7), count)
    next_seed = uniform(torch.full_like(count, 8), count)
    for u in (by_seed, by_count):
        chi2 = ((torch.histc(u, 64, 0, 1) - n / 64) ** 2 / (n / 64)).sum()
        assert chi2 < 115  # 63 degrees of freedom: 1 in 10,000
        assert 0 <= u.min() and u.max() < 1
    for a, b in ((by_count[1:], by_count[:-1]), (by_count, next_seed), (by_seed[1:], by_seed[:-1])):
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 0.03  # 4 standard deviations


def test_uniform_agrees_with_python_integers():
    mask = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for seed, count in ((0, 0), (5, 3), (-1, 1), (2**63 - 1, 100), (-(2**63), 7)):
        expected = (mix((mix(seed & mask) + count * 0x9E3779B97F4A7C15) & mask) >> 11) / 2**53
        assert uniform(torch.tensor([seed]), torch.tensor([count])).item() == expected


def test_the_filter_of_one_row_changes_no_bit_of_another():
    logits = torch.randn(64, V)
    u = uniform(torch.arange(64), torch.arange(64))
    ones, zeros = torch.ones(64, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)
    plain = sample(logits, u, temperature=ones, top_p=ones, top_k=zeros, filtered=False)
    top_p = torch.where(torch.arange(64) < 32, 0.5, ones)
    mixed = sample(logits, u, temperature=ones, top_p=top_p, top_k=zeros, filtered=True)
    for a, b in zip(plain, mixed, strict=True):
        assert torch.equal(a[32:], b[32:])
    assert not torch.equal(plain[1][:32], mixed[1][:32])


def test_temperature_zero_takes_the_most_likely_token_with_logp_zero():
    logits = torch.randn(V)
    token, logp = draw(logits, torch.rand(50, dtype=torch.float64), temperature=0.0)
    assert (token == logits.argmax()).all() and (logp == 0).all()


def test_the_extreme_draws_hit_tokens_of_positive_probability():
    logits = torch.tensor([-1e4, 0.0, 1.0, -1e4])
    token, logp = draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert token.tolist() == [1, 2] and torch.isfinite(logp).all()


def test_ties_at_the_edge_of_top_k_keep_the_lower_ids():
    probs = torch.full((1, 4), 0.25, dtype=torch.float64)
    assert kept(probs, torch.ones(1), torch.tensor([2])).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(FloatingPointError):
        draw(torch.tensor([0.0, bad, 1.0]), torch.tensor([0.5], dtype=torch.float64))
