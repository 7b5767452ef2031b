"""The proximal policy without another forward pass: between sampler and policy, by the token's age."""

from __future__ import annotations

import torch
from torch import Tensor


def loglinear_prox(
    logp: Tensor, logp_mu: Tensor, version: Tensor, mask: Tensor, *, current: int | Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-linear interpolation of the policy of one optimiser step ago.

    logp_prox = logp_mu + alpha (logp - logp_mu),   alpha = (v - 1 - v_mu) / (v - v_mu),  0 where v_mu = v

    v = current, the trainer's version; v_mu = version [...] int, that of the weights that sampled the token.
    A token of age 1 has the sampler as its proximal policy, an old one is anchored near the policy itself.
    logp, logp_mu, version, mask: one shape. Returns a constant, 0 off-mask; aux: alpha, age = v - v_mu.
    Raises ValueError for shapes that do not fit and, in eager code, for a kept token from the future.
    See "A-3PO" (arXiv:2512.06547).
    """
    if mask.dtype != torch.bool or not logp.shape == logp_mu.shape == version.shape == mask.shape:
        raise ValueError(
            "loglinear_prox: want logp, logp_mu, version and a bool mask of one shape, got "
            f"{tuple(logp.shape)}, {tuple(logp_mu.shape)}, {tuple(version.shape)} and "
            f"{mask.dtype} {tuple(mask.shape)}"
        )
    wide = torch.promote_types(logp.dtype, torch.float32)
    logp, logp_mu = (torch.where(mask, x.detach(), 0.0).to(wide) for x in (logp, logp_mu))
    age = torch.where(mask, current - version, 0)
    if not torch.compiler.is_compiling() and bool((age < 0).any()):
        raise ValueError(f"loglinear_prox: a token has a version above the trainer's, {current}")
    alpha = ((age - 1) / age.clamp(min=1)).clamp(0.0, 1.0).to(wide)
    return logp_mu + alpha * (logp - logp_mu), {"alpha": alpha, "age": age.to(wide)}
