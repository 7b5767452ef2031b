"""Teachers with another tokenizer: aligned by bytes, so that both sides speak of the same text; or by ULD."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def align_bytes(student: Sequence[bytes], teacher: Sequence[bytes]) -> tuple[list[int], list[int], int]:
    """The spans of text that whole tokens of both sides cover, as short as possible.

    A span ends where a token ends on both sides. student, teacher: the bytes of each token of one text. Give
    special tokens that correspond the same made-up bytes. A token of no bytes belongs to the span before it.
    Returns (span of each student token, span of each teacher token, number of spans).
    Raises ValueError, with the offset, if the two do not spell the same bytes.
    """
    text, teacher_text = b"".join(student), b"".join(teacher)
    if text != teacher_text:
        pairs = zip(text, teacher_text, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(teacher_text)))
        raise ValueError(
            f"align_bytes: student and teacher must spell the same bytes, but from byte {at} on they read "
            f"{text[at : at + 12]!r} and {teacher_text[at : at + 12]!r}"
        )
    ends, teacher_ends = list(accumulate(map(len, student))), list(accumulate(map(len, teacher)))
    common = sorted(set(ends) & set(teacher_ends) - {0}) or [0]
    spans, teacher_spans = ([bisect_left(common, end) for end in side] for side in (ends, teacher_ends))
    return spans, teacher_spans, len(common)


def span_logp(logp: Tensor, span: Tensor, n_spans: int) -> Tensor:
    """Log-prob of each span's text, given all before it: the sum over its tokens, by the chain rule.

    logp: [T]. span: [T] int64, from `align_bytes`; counted on from row to row of a batch. Returns [n_spans].
    """
    logp = logp.to(torch.promote_types(logp.dtype, torch.float32))
    return logp.new_zeros(n_spans).index_add(0, span, logp)


def cross_tokenizer_advantage(
    logp: Tensor, teacher_logp: Tensor, span: Tensor, teacher_span: Tensor, mask: Tensor, *, n_spans: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sampled reverse KL between spans of text as an advantage of the student's tokens, without gradient.

    A_t = -(sum_{s in span of t} log S(a_s) - sum_{u in span of t} log T(b_u))

    Every token of a span answers for all of it, so that E[sum_t A_t ∇log S(a_t)] is the gradient of -KL
    over spans. The same text could be tokenized in other ways; their mass is left out on both sides.

    Args:
      logp: [T]. teacher_logp: [T'], of the teacher's own tokens. span, teacher_span: see `span_logp`.
      mask: [T] bool. A span that is masked in part is left out.
    Returns: adv [T], 0 off-mask; aux: kl, the span's difference in equal parts on its tokens, so that it sums
      up to sum log S - sum log T.
    Raises ValueError for shapes that do not fit.
    """
    if logp.shape != span.shape or logp.shape != mask.shape or teacher_logp.shape != teacher_span.shape:
        raise ValueError(
            "cross_tokenizer_advantage: want logp, span, mask [T] and teacher_logp, teacher_span [T'], got "
            f"{[tuple(x.shape) for x in (logp, span, mask, teacher_logp, teacher_span)]}"
        )
    size = span_logp(torch.ones_like(logp, dtype=torch.float32), span, n_spans)
    whole = (span_logp(mask.float(), span, n_spans) == size)[span]
    gap = span_logp(torch.where(mask, logp.detach(), 0.0), span, n_spans)
    gap = gap - span_logp(teacher_logp.detach(), teacher_span, n_spans)
    adv = torch.where(whole, -gap[span], 0.0)
    return adv, {"kl": -adv / size[span]}


def uld_divergence(
    student_logits: Tensor, teacher_logp: Tensor, mask: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Universal logit distillation: L1 between sorted probabilities of two vocabularies, where aligned.

    L = sum_i |S_(i) - T_(i)|,  S_(1) >= S_(2) >= …, the shorter list continued with 0

    It knows how sure the teacher is, not of what: any renaming of tokens gives the same loss. In [0, 2].

    student_logits: [..., V]; S = softmax(student_logits / temperature). teacher_logp: [..., V'], log-probs
    at the temperature wanted. mask: [...] bool. Returns loss, 0 off-mask; aux: top and teacher_top, the
    largest probabilities. Raises ValueError for temperature <= 0 or leading shapes that differ.
    See "Towards Cross-Tokenizer Distillation: the Universal Logit Distillation Loss" (arXiv:2402.12030).
    """
    if temperature <= 0 or student_logits.shape[:-1] != teacher_logp.shape[:-1]:
        raise ValueError(
            "uld_divergence: want student_logits [..., V], teacher_logp [..., V'] and temperature > 0, got "
            f"{tuple(student_logits.shape)}, {tuple(teacher_logp.shape)} and {temperature}"
        )
    on, wide = mask.unsqueeze(-1), torch.promote_types(student_logits.dtype, torch.float32)
    s = (torch.where(on, student_logits, 0.0).to(wide) / temperature).softmax(-1)
    t = torch.where(on, teacher_logp.detach(), 0.0).to(wide).exp()
    s, t = (x.sort(dim=-1, descending=True).values for x in (s, t))
    width = max(s.shape[-1], t.shape[-1])
    s, t = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (s, t))
    aux = {"top": s[..., 0].detach(), "teacher_top": t[..., 0]}
    loss = torch.where(mask, (s - t).abs().sum(-1), 0.0)
    return loss, {k: torch.where(mask, x, 0.0) for k, x in aux.items()}
