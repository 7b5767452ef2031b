"""Packed rows: a segment sees what it continues and its own past, and costs nothing that a copy would not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.layout import make_layout, padded_attention


@st.composite
def trees(draw):
    """Lengths, and for each segment an earlier one that it continues, or None."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    after = [draw(st.sampled_from([None, *range(i)])) for i in range(len(lengths))]
    return lengths, after


def sequences(lengths, after):
    """For each segment the row's tokens of the whole sequence that ends with it."""
    own = torch.arange(sum(lengths)).split(lengths)
    whole = []
    for tokens, before in zip(own, after, strict=True):
        whole.append(tokens if before is None else torch.cat((whole[before], tokens)))
    return whole


def alone(q, k, v, lengths, after):
    """Each whole sequence by itself with the full causal mask, float64; then its last segment's part."""
    outputs = []
    for n, tokens in zip(lengths, sequences(lengths, after), strict=True):
        group = q.shape[1] // k.shape[1]
        qs, ks, vs = (x[tokens].double() for x in (q, k, v))
        ks, vs = (x.repeat_interleave(group, 1) for x in (ks, vs))
        score = torch.einsum("inh,jnh->nij", qs, ks) / q.shape[-1] ** 0.5
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        outputs.append(
            torch.einsum("nij,jnh->inh", score.masked_fill(~mask, -torch.inf).softmax(-1), vs)[-n:]
        )
    return torch.cat(outputs)


def random_qkv(total, heads=(4, 2), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(total, n, 8, generator=generator, requires_grad=True) for n in (heads[0], *heads[1:] * 2)
    ]


@settings(max_examples=40, deadline=None)
@given(tree=trees(), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]), extra=st.integers(0, 9))
def test_attention_and_its_gradient_are_those_of_every_sequence_written_out(tree, heads, extra):
    lengths, after = tree
    used = sum(lengths)
    q, k, v = random_qkv(used + extra, heads)
    o = padded_attention(q, k, v, make_layout(lengths, after=after, total=used + extra))
    expected = alone(q, k, v, lengths, after)
    torch.testing.assert_close(o[:used].double(), expected, atol=1e-5, rtol=0)
    assert o.isfinite().all()
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((o[:used] * weight).sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad((expected * weight).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(tree=trees(), extra=st.integers(0, 30))
def test_layout_says_where_queries_and_keys_lie(tree, extra):
    lengths, after = tree
    total = sum(lengths) + extra
    layout = make_layout(lengths, after=after, total=total)
    sizes = layout.cu_q.diff().tolist()
    assert sizes[: len(lengths)] == lengths and sum(sizes) == total
    assert max(sizes) == layout.max_q == max(lengths)
    assert layout.padded.flatten()[layout.packed].tolist() == list(range(total))
    n_keys = layout.cu_k.diff().tolist()
    assert layout.max_k == max(n_keys) and layout.padded_k.shape == (len(sizes), layout.max_k)
    keys = torch.arange(total) if layout.keys is None else layout.keys
    parts = keys.split(n_keys)
    for i, tokens in enumerate(sequences(lengths, after)):
        assert parts[i].tolist() == tokens.tolist() == layout.padded_k[i, : len(tokens)].tolist()
        own = slice(int(layout.cu_q[i]), int(layout.cu_q[i + 1]))
        assert layout.positions[own].tolist() == list(range(len(tokens) - lengths[i], len(tokens)))
    assert (layout.keys is None) == (after == [None] * len(after))


def test_no_answer_sees_another_and_the_prompt_sees_none():
    q, k, v = random_qkv(9)
    o = padded_attention(q, k, v, make_layout([3, 2, 4], after=[None, 0, 0]))
    seen = []
    for part in (slice(0, 3), slice(3, 5), slice(5, 9)):
        (grad,) = torch.autograd.grad(o[part].sum(), v, retain_graph=True)
        seen.append(grad.abs().sum((1, 2)).ne(0).tolist())
    assert seen == [[True] * 3 + [False] * 6, [True] * 5 + [False] * 4, [True] * 3 + [False] * 2 + [True] * 4]


@pytest.mark.parametrize(
    "lengths, after, total, names",
    [
        ([], None, None, "at least one"),
        ([3, 0], None, None, "at least one"),
        ([3, 4], None, 6, "7 tokens"),
        ([3, 4], [None], None, "an earlier one"),
        ([3, 4], [None, 1], None, "an earlier one"),
        ([3, 4], [None, -1], None, "an earlier one"),
    ],
)
def test_impossible_layouts_are_refused(lengths, after, total, names):
    with pytest.raises(ValueError, match=names):
        make_layout(lengths, after=after, total=total)
