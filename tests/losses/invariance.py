"""A kit that any masked, per-token training loss should pass. Plain torch, no test framework: copy this file.

It checks an *objective*, the share of the step's scalar loss that some rows contribute:

    objective(inputs, mask, totals) -> scalar
      inputs: named tensors [B, T] or [B, T, ...]; `inputs[wrt]` has the gradient, the others are constants
      mask:   [B, T] bool, True on the tokens that train; may have holes, and rows without any
      totals: counts of the WHOLE step, to divide by, instead of counting the rows given

    failures(objective, inputs, mask)  ->  {broken property: what was seen}; empty if all hold

`from_token_loss` makes an objective of a per-token loss and a weight, `example` inputs worth checking with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of the whole optimiser step: kept tokens, and rows with at least one."""

    tokens: int
    rows: int


Objective = Callable[[Inputs, Tensor, Totals], Tensor]
TokenLoss = Callable[[Inputs, Tensor], Tensor]


def count(mask: Tensor) -> Totals:
    return Totals(tokens=int(mask.sum()), rows=int(mask.any(-1).sum()))


def from_token_loss(loss: TokenLoss, weight: Callable[[Tensor, Totals], Tensor] | None = None) -> Objective:
    """sum(weight * loss); the default weight is 1 / totals.tokens on kept tokens."""

    def objective(inputs: Inputs, mask: Tensor, totals: Totals) -> Tensor:
        w = mask / max(totals.tokens, 1) if weight is None else weight(mask, totals)
        return (w * loss(inputs, mask)).sum()

    return objective


def example(seed: int = 0, rows: int = 6, width: int = 9, vocab: int = 5) -> tuple[Inputs, Tensor]:
    """Float64 inputs for policy losses: rows of different lengths, one with a hole and one masked entirely;
    ratios on both sides of usual clips, advantages of both signs and 0; versions 0 to 3, 99 off-mask."""
    g = torch.Generator().manual_seed(seed)
    logits, logits_ref = torch.randn(2, rows, width, vocab, generator=g, dtype=torch.float64)
    logp = logits.log_softmax(-1)[..., 0]
    near = (logp + 0.4 * torch.randn(2, rows, width, generator=g, dtype=torch.float64)).clamp(max=-0.01)
    adv = torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, width).clone()
    adv[0] = 0.0
    length = torch.randint(3, width, (rows,), generator=g)
    mask = torch.arange(width) < length[:, None]
    mask[1, 1] = False
    mask[rows // 2] = False
    tokens = torch.randint(1, vocab, (rows, width), generator=g)
    tokens[~mask] = 0
    tokens[torch.arange(rows), (length - 1).clamp(min=0)] = 0
    inputs = {
        "logp": logp, "logp_mu": near[0], "logp_ref": near[1], "adv": adv,
        "logits": logits, "logits_ref": logits_ref, "tokens": tokens,
        "selected": torch.rand(rows, width, generator=g) < 0.3,
        "version": torch.where(mask, torch.randint(0, 4, (rows, width), generator=g), 99),
    }  # fmt: skip
    return inputs, mask


# ── The properties: each takes (objective, inputs, mask, wrt) and returns what is wrong, or None ────────────


def mask_content(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """What stands off-mask changes no bit of value or gradient, and gets gradient exactly 0."""
    value, grad = _run(objective, inputs, mask, wrt)
    if (grad[~mask] != 0).any():
        return "a gradient reaches tokens off-mask"
    other, other_grad = _run(objective, _fill(inputs, mask, -9.0), mask, wrt)
    if not torch.equal(value, other) or not torch.equal(grad[mask], other_grad[mask]):
        return f"finite values off-mask change the result: {value} became {other}"
    return None


def nan_off_mask(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """NaN and infinities off-mask change no bit, and get gradient 0, not NaN."""
    value, grad = _run(objective, inputs, mask, wrt)
    for bad in (float("nan"), float("inf"), -float("inf")):
        other, other_grad = _run(objective, _fill(inputs, mask, bad), mask, wrt)
        if not torch.equal(value, other) or not torch.equal(grad, other_grad):
            return f"{bad} off-mask leaks into value or gradient: {value} became {other}"
    return None


def padding_amount(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """A wider batch is the same batch."""
    width = mask.shape[1]
    return _differ(
        _run(objective, inputs, mask, wrt),
        _run(objective, {k: _pad(x, 0, 7) for k, x in inputs.items()}, _pad(mask, 0, 7), wrt),
        lambda grad: grad[:, :width],
        "seven more columns of padding",
    )


def padding_side(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """Padding on the left is padding."""
    return _differ(
        _run(objective, inputs, mask, wrt),
        _run(objective, {k: _pad(x, 4, 0) for k, x in inputs.items()}, _pad(mask, 4, 0), wrt),
        lambda grad: grad[:, 4:],
        "padding on the left",
    )


def row_order(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """Rows have no order."""
    want = _run(objective, inputs, mask, wrt)
    for order in (torch.arange(mask.shape[0]).flip(0), torch.arange(mask.shape[0]).roll(1)):
        value, grad = _run(objective, {k: x[order] for k, x in inputs.items()}, mask[order], wrt)
        wrong = _differ(want, (value, grad[order.argsort()]), _same, "another order of the rows")
        if wrong:
            return wrong
    return None


def micro_batch_split(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """Micro-batches of any size add up to the step."""
    rows = mask.shape[0]
    for cuts in ([1] * rows, [rows - 1, 1], [2, rows - 2]):
        wrong = _split(
            objective, inputs, mask, wrt, torch.arange(rows).split(cuts), f"micro-batches of {cuts} rows"
        )
        if wrong:
            return wrong
    return None


def rank_split(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """Ranks with interleaved rows add up to the step, one of them having no rows at all."""
    ranks = [torch.arange(start, mask.shape[0], 3) for start in range(3)] + [torch.arange(0)]
    return _split(objective, inputs, mask, wrt, ranks, "three ranks and one without rows")


def all_masked_row(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """A row without kept tokens adds nothing: with it or without it."""
    kept = torch.cat([torch.arange(mask.shape[0]), torch.arange(1)])
    more = {k: x[kept] for k, x in inputs.items()}
    with_row = torch.cat([mask, torch.zeros_like(mask[:1])])
    return _differ(
        _run(objective, inputs, mask, wrt),
        _run(objective, more, with_row, wrt),
        lambda grad: grad[: mask.shape[0]],
        "a row that is masked entirely",
    )


def all_masked_rank(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """A rank with all rows masked gives 0, with a graph and gradients of 0; so does a step without tokens."""
    nothing = torch.zeros_like(mask)
    for totals in (count(mask), count(nothing)):
        value, grad = _run(objective, inputs, nothing, wrt, totals)
        if value != 0 or (grad != 0).any():
            return f"nothing kept, and yet value {value}, largest gradient {grad.abs().max()}"
    return None


def pad_equals_eos(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """Token ids decide nothing: the last kept token may be the id that pads, or not."""
    if "tokens" not in inputs:
        return None
    distinct = dict(inputs, tokens=torch.where(mask, inputs["tokens"] + 1, -1))
    shared = dict(inputs, tokens=torch.where(mask & ~_last(mask), inputs["tokens"] + 1, 0))
    return _differ(
        _run(objective, distinct, mask, wrt),
        _run(objective, shared, mask, wrt),
        _same,
        "a pad id that is the eos id",
    )


def purity(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """No argument is written to, no global randomness is drawn, two calls agree in every bit."""
    before, mask_before, rng = {k: x.clone() for k, x in inputs.items()}, mask.clone(), torch.get_rng_state()
    value, grad = _run(objective, inputs, mask, wrt)
    again, grad_again = _run(objective, inputs, mask, wrt)
    if not torch.equal(rng, torch.get_rng_state()):
        return "the global random state moved"
    changed = [k for k, x in inputs.items() if not torch.equal(x, before[k])]
    if changed or not torch.equal(mask, mask_before):
        return f"arguments were written to: {changed or 'mask'}"
    if not torch.equal(value, again) or not torch.equal(grad, grad_again):
        return "two calls differ"
    return None


def constants(objective: Objective, inputs: Inputs, mask: Tensor, wrt: str) -> str | None:
    """No gradient flows to sampler, reference or advantage."""
    floats = {k: x.clone().requires_grad_() for k, x in inputs.items() if x.is_floating_point()}
    value = objective({**inputs, **floats}, mask, count(mask))
    grads = torch.autograd.grad(value, list(floats.values()), allow_unused=True)
    leaks = [k for k, g in zip(floats, grads, strict=True) if k != wrt and g is not None and (g != 0).any()]
    return f"a gradient flows to {leaks}" if leaks else None


PROPERTIES = (
    mask_content, nan_off_mask, padding_amount, padding_side, row_order, micro_batch_split, rank_split,
    all_masked_row, all_masked_rank, pad_equals_eos, purity, constants,
)  # fmt: skip


def failures(
    objective: Objective, inputs: Inputs, mask: Tensor, *, wrt: str = "logp", skip: tuple[str, ...] = ()
) -> dict[str, str]:
    """The broken properties and what was seen. An exception counts: a loss must survive these inputs."""
    found: dict[str, str] = {}
    for check in PROPERTIES:
        if check.__name__ in skip:
            continue
        try:
            wrong = check(objective, inputs, mask, wrt)
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError, TypeError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            found[check.__name__] = wrong
    return found


def _run(
    objective: Objective, inputs: Inputs, mask: Tensor, wrt: str, totals: Totals | None = None
) -> tuple[Tensor, Tensor]:
    """Value and gradient; the argument shares its storage with `inputs`, so that writing to it shows."""
    arg = inputs[wrt].detach().requires_grad_()
    value = objective({**inputs, wrt: arg}, mask, count(mask) if totals is None else totals)
    (grad,) = torch.autograd.grad(value, arg)
    return value.detach(), grad


def _split(
    objective: Objective,
    inputs: Inputs,
    mask: Tensor,
    wrt: str,
    parts: list[Tensor] | tuple[Tensor, ...],
    how: str,
) -> str | None:
    totals = count(mask)
    value, grad = torch.zeros((), dtype=torch.float64), torch.zeros_like(inputs[wrt])
    for part in parts:
        v, g = _run(objective, {k: x[part] for k, x in inputs.items()}, mask[part], wrt, totals)
        value, grad = value + v, grad.index_add(0, part, g)
    return _differ(_run(objective, inputs, mask, wrt), (value, grad), _same, how)


def _differ(
    want: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor], back: Callable[[Tensor], Tensor], how: str
) -> str | None:
    """Up to the order of float64 sums."""
    if not torch.allclose(want[0].double(), got[0].double(), rtol=1e-9, atol=1e-12):
        return f"{how}: value {want[0].item()} became {got[0].item()}"
    if not torch.allclose(want[1], back(got[1]), rtol=1e-9, atol=1e-12):
        return f"{how}: gradients differ by {(want[1] - back(got[1])).abs().max().item()}"
    return None


def _same(grad: Tensor) -> Tensor:
    return grad


def _fill(inputs: Inputs, mask: Tensor, value: float) -> Inputs:
    def fill(x: Tensor) -> Tensor:
        kept = mask.reshape(mask.shape + (1,) * (x.ndim - 2))
        return torch.where(kept, x, value).to(x.dtype) if x.is_floating_point() else x

    return {k: fill(x) for k, x in inputs.items()}


def _pad(x: Tensor, left: int, right: int) -> Tensor:
    """Columns of ones (False for bool): log-prob 1 is impossible, so that reading one shows."""
    value = False if x.dtype == torch.bool else 1
    side = [x.new_full((x.shape[0], n, *x.shape[2:]), value) for n in (left, right)]
    return torch.cat([side[0], x, side[1]], dim=1)


def _last(mask: Tensor) -> Tensor:
    after = mask.flip(1).to(torch.int64).cumsum(1).flip(1)
    return mask & (after == 1)
