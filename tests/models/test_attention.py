import copy
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_fw_bw_and_get_code

from models.attention import attention_backend, choose_attention, make_layout, packed_attention
from models.config import ModelConfig
from models.parallelise import _join
from models.transformer import Attention, rope_frequencies, rope_tables

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
    assert choose_attention("auto", "cpu", torch.bfloat16) == "padded"


@pytest.mark.parametrize(
    "asked, names",
    [("fa4", "wants CUDA"), ("varlen", "not cpu and float32"), ("sdpa", "want auto or one of")],
)
def test_an_attention_that_cannot_run_is_refused_with_the_reason(asked, names):
    with pytest.raises(ValueError, match=names):
        choose_attention(asked, "cpu", torch.float32)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("models.attention._installed", lambda module: False)
    assert choose_attention("auto", "cuda", torch.bfloat16) == "varlen"
    with pytest.raises(ValueError, match="flash-attn-4"):
        choose_attention("fa4", "cuda", torch.bfloat16)
    with pytest.raises(ValueError, match="flash-attn; ask for auto"):
        choose_attention("flash", "cuda", torch.bfloat16)


CUDA = ["varlen", "flash", "fa4"] if torch.cuda.is_available() else []


@pytest.mark.parametrize("backend", CUDA)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("shared", [False, True])
def test_kernels_equal_the_padded_batch_with_their_gradients(backend, size, shared):
    try:
        choose_attention(backend, "cuda", torch.bfloat16)
    except ValueError as why:
        pytest.skip(str(why))
    lengths, after = [5, 17, 1, 300], [None, 0, 0, None] if shared else None
    q, k, v = (torch.randn(323, n, size, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    own = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().cpu().double().requires_grad_() for x in own]
    o = packed_attention(*own, make_layout(lengths, "cuda", after=after), backend)
    expected = packed_attention(*exact, make_layout(lengths, after=after), "padded")
    torch.testing.assert_close(o.double().cpu(), expected, atol=2e-2, rtol=0)
    o.float().square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(own, exact, strict=True):
        assert (x.grad.cpu().double() - y.grad).norm() < 2e-2 * y.grad.norm()


def scores(q, k):
    """[N, n, m] of n queries and m keys that end together."""
    score = torch.einsum("inh,jnh->nij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    hidden = torch.ones(len(q), len(k)).triu(1 + len(k) - len(q)).bool()
    return (score / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)


def installed_fa4(monkeypatch):
    """A module in place of FlashAttention 4, with the two functions that are called, on the CPU."""

    def lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        n, m = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert max(n) <= max_seqlen_q and max(m) <= max_seqlen_k
        return n, m

    def forward(q, k, v, *, causal, return_lse, **cu):
        assert causal and return_lse
        n, m = lengths(**cu)
        parts = [scores(*x) for x in zip(q.split(n), k.split(m), strict=True)]
        o = [
            torch.einsum("nij,jnh->inh", s.softmax(-1), x.repeat_interleave(len(s) // x.shape[1], 1))
            for s, x in zip(parts, v.split(m), strict=True)
        ]
        return torch.cat(o), torch.cat([s.logsumexp(-1) for s in parts], 1), None, None, None

    def backward(q, k, v, o, do, lse, *, causal, dq, dk, dv, **cu):
        """FlashAttention's equations, from the saved output and log-sum-exp, into dq, dk, dv."""
        assert causal
        into = dq, dk, dv
        n, m = lengths(**cu)
        parts = (q.split(n), k.split(m), v.split(m), o.split(n), do.split(n), lse.split(n, 1))
        grads = []
        for q, k, v, o, do, lse in zip(*parts, strict=True):
            group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
            p = (scores(q, k) - lse[..., None]).exp()
            dp = torch.einsum("inh,jnh->nij", do, v.repeat_interleave(group, 1))
            ds = scale * p * (dp - (do * o).sum(-1).T[..., None])
            dq = torch.einsum("nij,jnh->inh", ds, k.repeat_interleave(group, 1))
            dk, dv = torch.einsum("nij,inh->jnh", ds, q), torch.einsum("nij,inh->jnh", p, do)
            grads.append((dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))))
        for there, x in zip(into, zip(*grads, strict=True), strict=True):
            there.copy_(torch.cat(x))

    interface: Any = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)


@pytest.mark.parametrize("compiled", [False, True])
def test_fa4_is_one_operation_in_the_graph_with_its_own_backward(monkeypatch, compiled):
    installed_fa4(monkeypatch)
    torch._dynamo.reset()

    def attend(q, k, v, layout):
        return packed_attention(2 * q, k, v, layout, "fa4").square()

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    rows = [([4, 6], None), ([3, 1, 6], None), ([2, 8, 3, 9], None), ([4, 3, 5, 2], [None, 0, 0, None])]
    for lengths, after in rows:
        own = [torch.randn(sum(lengths), n, 8).requires_grad_() for n in (4, 2, 2)]
        exact = [x.detach().clone().requires_grad_() for x in own]
        layout = make_layout(lengths, after=after)
        got = run(*own, layout)
        expected = packed_attention(2 * exact[0], exact[1], exact[2], layout, "padded").square()
        torch.testing.assert_close(got, expected)
        weight = torch.randn_like(got)
        grads = (torch.autograd.grad(y, x, weight) for y, x in ((got, own), (expected, exact)))
        for g, e in zip(*grads, strict=True):
            torch.testing.assert_close(g, e, atol=5e-5, rtol=1e-5)  # float32, gradients up to 30


@pytest.mark.parametrize("after", [None, [None, 0, 0]])
def test_one_graph_of_fa4_serves_rows_of_any_length(monkeypatch, after):
    installed_fa4(monkeypatch)
    torch._dynamo.reset()
    attend = torch.compile(partial(packed_attention, backend="fa4"), fullgraph=True, backend="aot_eager")
    before, graphs = counters["stats"]["unique_graphs"], []
    for n in (3, 5, 8, 13, 21):
        lengths = [n, 2 * n, n + 1]
        q, k, v = (torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2, 2))
        attend(q, k, v, make_layout(lengths, after=after)).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs[0] == 1 and graphs[1:] == [2] * 4  # from the second row on lengths are known to vary


@pytest.mark.slow
def test_joined_projections_get_fa4s_gradients_from_one_tensor_and_put_none_together(monkeypatch):
    installed_fa4(monkeypatch)
    torch._dynamo.reset()
    torch.manual_seed(0)
    cfg = ModelConfig(family="qwen2", qkv_bias=True, vocab_size=8, d_model=32, n_layers=1, n_heads=4,
                      n_kv_heads=2, head_dim=8, d_ff=8)  # fmt: skip
    attention, layout = Attention(cfg), make_layout([4, 6])
    joined = copy.deepcopy(attention)
    _join(joined)
    x, (cos, sin) = torch.randn(10, 32), rope_tables(layout.positions, rope_frequencies(cfg))

    def attend(layer, q, k, v):
        return packed_attention(q, k, v, layout, "fa4")

    compiled = torch.compile(joined, fullgraph=True)
    with config.patch(force_disable_caches=True):  # their keys do not see an operation's backward
        got, codes = run_fw_bw_and_get_code(lambda: compiled(x, cos, sin, attend, 0))
    expected = attention(x, cos, sin, attend, 0)
    expected.sum().backward()
    torch.testing.assert_close(got, expected)
    for (name, p), q in zip(attention.named_parameters(), joined.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    _, calls = codes[-1].split("def call(")
    lines = [line for line in calls.splitlines() if not line.strip().startswith("#")]
    assert sum("= torch.ops.viva.fa4_backward_joined" in line for line in lines) == 1
    assert not any("# alias" in line for line in lines), "gradients are written side by side once more"
