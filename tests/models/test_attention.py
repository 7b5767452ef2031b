import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention import attention_backend, make_layout, packed_attention

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def masked_attention(q, k, v, lengths):
    """The whole [T, T] mask, float64."""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (row[:, None] == row[None, :]).tril()
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    score = torch.einsum("inh,jnh->nij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("nij,jnh->inh", score.masked_fill(~mask, -torch.inf).softmax(-1), v)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_packed_attention_equals_the_block_causal_mask(lengths, heads):
    n, k = heads
    generator = torch.Generator().manual_seed(sum(lengths))
    q, key, v = (torch.randn(sum(lengths), h, 8, generator=generator) for h in (n, k, k))
    o = packed_attention(q, key, v, make_layout(lengths))
    torch.testing.assert_close(o.double(), masked_attention(q, key, v, lengths), atol=1e-5, rtol=0)


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, extra=st.integers(0, 40))
def test_layout_holds_every_token_once_and_pads_with_sequences_no_longer_than_the_longest(lengths, extra):
    total = sum(lengths) + extra
    layout = make_layout(lengths, total=total)
    sizes = layout.cu_seqlens.diff().tolist()
    assert sizes[: len(lengths)] == lengths and sum(sizes) == total
    assert max(sizes) == layout.max_len == max(lengths)
    assert layout.padded.flatten()[layout.packed].tolist() == list(range(total))
    assert layout.positions.tolist() == [t for n in sizes for t in range(n)]


def test_gradient_reaches_only_earlier_tokens_of_the_same_sequence():
    q, k, v = (torch.randn(10, 2, 8, requires_grad=True) for _ in range(3))
    packed_attention(q, k, v, make_layout([4, 6]))[6].sum().backward()
    assert v.grad is not None
    assert v.grad.abs().sum((1, 2)).ne(0).tolist() == [False] * 4 + [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    "lengths, total, names",
    [([], None, "at least one"), ([3, 0], None, "at least one"), ([3, 4], 6, "7 tokens")],
)
def test_impossible_layouts_are_refused(lengths, total, names):
    with pytest.raises(ValueError, match=names):
        make_layout(lengths, total=total)


def test_cpu_pads():
    assert attention_backend("cpu", torch.bfloat16) == "padded"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_varlen_equals_the_block_causal_mask():
    lengths = [5, 17, 1, 40]
    q, k, v = (torch.randn(63, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    assert attention_backend(q.device, q.dtype) == "varlen"
    o = packed_attention(q, k, v, make_layout(lengths, "cuda"))
    expected = masked_attention(q.cpu(), k.cpu(), v.cpu(), lengths)
    torch.testing.assert_close(o.double().cpu(), expected, atol=2e-2, rtol=0)
