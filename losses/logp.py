"""Log-probs of sampled tokens from logits, under the distribution that they were sampled from.

Policy, sampler and reference must agree on temperature and on the allowed set, or the ratio on-policy is not
1. The fused way from hidden states, without the logits, is linear_logp.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logp(
    logits: Tensor, target: Tensor, *, temperature: float = 1.0, allowed: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-prob of each target, in nats.

    logp = z_target - logsumexp(z),   z = logits / temperature,  -inf where not allowed

    logits [..., V] in any float type, computed in float32 or better; target [...] int64 in [0, V), always.
    allowed: bool [..., V], the sampler's top-p or top-k set (`nucleus`); None allows all. A target outside it
    has logp -inf: it cannot have been sampled. aux: entropy of the same distribution, nats.
    Raises ValueError for shapes that do not fit, or temperature <= 0.
    """
    if temperature <= 0.0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"token_logp: want logits [..., V], target [...] and temperature > 0, got {tuple(logits.shape)}, "
            f"{tuple(target.shape)} and {temperature}"
        )
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if allowed is not None:
        z = torch.where(allowed, z, -torch.inf)
    logp = z.log_softmax(-1)
    p, finite = logp.detach().exp(), torch.where(logp.detach() > -torch.inf, logp.detach(), 0.0)
    entropy = -(p * finite).sum(-1)
    return logp.gather(-1, target.unsqueeze(-1)).squeeze(-1), {"entropy": entropy}


def nucleus(logits: Tensor, *, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """The top-p set: the fewest most likely tokens whose probabilities add up to top_p or more.

    logits [..., V] -> bool [..., V]. Ties are broken by index. Raises ValueError unless 0 < top_p <= 1 and
    temperature > 0. See "The Curious Case of Neural Text Degeneration" (arXiv:1904.09751).
    """
    if temperature <= 0.0 or not 0.0 < top_p <= 1.0:
        raise ValueError(f"nucleus: want temperature > 0 and 0 < top_p <= 1, got {temperature} and {top_p}")
    z = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    p, order = z.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = p.cumsum(-1) - p
    return torch.zeros_like(z, dtype=torch.bool).scatter(-1, order, (before < top_p) | (top_p == 1.0))
