"""Alignment by bytes keeps the chain rule; ULD sees how sure the teacher is, not of what."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from losses.cross_tokenizer import align_bytes, cross_tokenizer_advantage, span_logp, uld_divergence


def cut(text: bytes, places: set[int]) -> list[bytes]:
    ends = [0, *sorted(p for p in places if 0 < p < len(text)), len(text)]
    return [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def test_spans_are_the_shortest_that_both_cut_out() -> None:
    student, teacher = [b"un", b"believ", b"able", b"!"], [b"unb", b"eliev", b"ab", b"le", b"!"]
    assert align_bytes(student, teacher) == ([0, 0, 1, 2], [0, 0, 1, 1, 2], 3)


def test_half_characters_and_empty_tokens_are_tokens() -> None:
    smile = "🙂".encode()
    assert align_bytes([smile[:1], smile[1:], b""], [smile, b"", b""]) == ([0, 0, 0], [0, 0, 0], 1)
    assert align_bytes([b"", b"a"], [b"a"]) == ([0, 0], [0], 1)
    assert align_bytes([b"a", b"\x00end"], [b"a", b"\x00end"]) == ([0, 1], [0, 1], 2)


@pytest.mark.parametrize(
    ("student", "teacher"), [([b"abc"], [b"abd"]), ([b"ab"], [b"abc"]), ([b"a"], [b" a"])]
)
def test_other_bytes_are_an_error_with_their_offset(student: list[bytes], teacher: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"from byte \d on"):
        align_bytes(student, teacher)


@settings(max_examples=60, deadline=None)
@given(
    st.binary(min_size=1, max_size=30), st.sets(st.integers(1, 29)), st.sets(st.integers(1, 29)), st.data()
)
def test_spans_spell_the_same_bytes_and_log_probs_add_up(
    text: bytes, places: set[int], other: set[int], data: st.DataObject
) -> None:
    student, teacher = cut(text, places), cut(text, other)
    spans, teacher_spans, n = align_bytes(student, teacher)
    for i in range(n):
        told = [
            b"".join(x for x, s in zip(*side, strict=True) if s == i)
            for side in ((student, spans), (teacher, teacher_spans))
        ]
        assert told[0] == told[1] != b""
    assert n == 1 + len({p for p in places & other if p < len(text)})
    logp = torch.tensor(data.draw(st.lists(st.floats(-9, 0), min_size=len(student), max_size=len(student))))
    total = span_logp(logp.double(), torch.tensor(spans), n).sum()
    assert total.item() == pytest.approx(logp.double().sum().item())


def test_models_that_agree_on_bytes_have_no_gap_whatever_their_tokens() -> None:
    text = b"reverse kl"
    byte_logp = -torch.arange(1, len(text) + 1).double() / 7
    sides = cut(text, {2, 5, 6}), cut(text, {3, 5, 9})
    logp, teacher = (torch.stack([x.sum() for x in byte_logp.split([len(t) for t in s])]) for s in sides)
    spans, teacher_spans, n = align_bytes(*sides)
    adv, aux = cross_tokenizer_advantage(
        logp,
        teacher,
        torch.tensor(spans),
        torch.tensor(teacher_spans),
        torch.ones(len(spans), dtype=torch.bool),
        n_spans=n,
    )
    torch.testing.assert_close(adv, torch.zeros_like(adv))
    teacher[0] -= 1.0
    adv, aux = cross_tokenizer_advantage(
        logp,
        teacher,
        torch.tensor(spans),
        torch.tensor(teacher_spans),
        torch.ones(len(spans), dtype=torch.bool),
        n_spans=n,
    )
    assert adv.tolist() == pytest.approx([-1.0, -1.0, 0.0, 0.0]) and aux["kl"].sum().item() == pytest.approx(
        1.0
    )


def test_the_expected_gradient_is_that_of_the_kl_between_texts() -> None:
    """Texts aa, ab, b: the student has a token for each, the teacher spells them with a and b."""
    z = torch.tensor([0.4, -0.3, 0.2], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.6, 0.4], dtype=torch.float64).log()  # p(a), p(b), after a too
    text_logp = torch.stack([2 * teacher[0], teacher.sum(), teacher[1]])
    logp = z.log_softmax(-1)
    kl = (logp.exp() * (logp - text_logp)).sum()
    loss = z.new_zeros(())
    for i, (token, spelt) in enumerate([(b"aa", [b"a", b"a"]), (b"ab", [b"a", b"b"]), (b"b", [b"b"])]):
        spans, teacher_spans, n = align_bytes([token], spelt)
        t_logp = torch.stack([teacher[0 if x == b"a" else 1] for x in spelt])
        adv, _ = cross_tokenizer_advantage(
            logp[i : i + 1],
            t_logp,
            torch.tensor(spans),
            torch.tensor(teacher_spans),
            torch.tensor([True]),
            n_spans=n,
        )
        loss = loss - (logp[i].detach().exp() * adv * logp[i]).sum()
    got = torch.autograd.grad(loss, z, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(kl, z))


def test_a_span_masked_in_part_is_left_out_even_if_it_is_nan() -> None:
    logp, teacher = torch.tensor([-1.0, math.nan, -2.0]), torch.tensor([math.nan, -1.0])
    span, teacher_span = torch.tensor([0, 0, 1]), torch.tensor([0, 1])
    mask = torch.tensor([True, False, True])
    run = torch.compile(cross_tokenizer_advantage, fullgraph=True, backend="aot_eager")
    for fn in (cross_tokenizer_advantage, run):
        adv, aux = fn(logp, teacher, span, teacher_span, mask, n_spans=2)
        assert adv.tolist() == [0.0, 0.0, 1.0] and aux["kl"].tolist() == [0.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="span"):
        cross_tokenizer_advantage(logp, teacher, span[:2], teacher_span, mask, n_spans=2)


def test_uld_is_the_distance_of_sorted_probabilities_and_blind_to_names() -> None:
    s = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
    t = torch.tensor([[0.1, 0.1, 0.2, 0.6]], dtype=torch.float64).log()
    on = torch.tensor([True])
    loss, aux = uld_divergence(s, t, on)
    assert loss.item() == pytest.approx(0.1 + 0.0 + 0.0 + 0.1) and aux["teacher_top"].item() == pytest.approx(
        0.6
    )
    torch.testing.assert_close(uld_divergence(s[:, [2, 0, 1]], t[:, [3, 1, 0, 2]], on)[0], loss)
    torch.testing.assert_close(uld_divergence(t, s, on)[0], loss)
    assert uld_divergence(s, torch.cat([s.flip(-1), torch.full((1, 2), -math.inf)], -1), on)[0].item() < 1e-12
    torch.testing.assert_close(uld_divergence(3 * s, t, on, temperature=3.0)[0], loss)


def test_uld_gradients_masks_and_compiles() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(3, 6, generator=g, dtype=torch.float64)
    t = torch.randn(3, 4, generator=g, dtype=torch.float64).log_softmax(-1)
    mask = torch.tensor([True, False, True])
    z[1], t[1] = math.nan, -math.inf
    z.requires_grad_()
    loss, _ = uld_divergence(z, t, mask)
    (grad,) = torch.autograd.grad(loss.sum(), z)
    assert loss[1] == 0 and not grad[1].any() and grad.isfinite().all()
    compiled = torch.compile(uld_divergence, fullgraph=True, backend="aot_eager")(z, t, mask)[0]
    torch.testing.assert_close(compiled, loss)
    good = z.detach()[::2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: uld_divergence(z, t[::2], mask[::2])[0], good)
    low, _ = uld_divergence(good.bfloat16(), t[::2].bfloat16(), mask[::2])
    exact, _ = uld_divergence(good.bfloat16().double(), t[::2].bfloat16().double(), mask[::2])
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="temperature"):
        uld_divergence(good, t[::2], mask[::2], temperature=0.0)
