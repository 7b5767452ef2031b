"""Names in the config → functions of losses/, bound to the config's numbers. A new loss is one line here.

A number that the config leaves at None is the paper's own, the default in the function's signature; one that
the chosen function does not take is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

import losses
from rl.config import ConfigError, Correction, Loss

Aux = dict[str, Tensor]

POLICY: Mapping[str, Callable[..., tuple[Tensor, Aux]]] = {
    "grpo": losses.grpo_loss,
    "gspo": losses.gspo_loss,
    "gspo_token": losses.gspo_token_loss,
    "gmpo": losses.gmpo_loss,
    "cispo": losses.cispo_loss,
    "aipo": losses.aipo_loss,
    "topr": losses.topr_loss,
    "vespo": losses.vespo_loss,
    "sapo": losses.sapo_loss,
    "dppo_tv": partial(losses.dppo_loss, divergence="tv"),
    "dppo_kl": partial(losses.dppo_loss, divergence="kl"),
    "dro": losses.dro_loss,
    "reinforce": losses.reinforce_loss,
    "clip_cov": losses.clip_cov_loss,
    "kl_cov": losses.kl_cov_loss,
}
SELECTING = {
    "clip_cov": losses.select_clip_cov,
    "kl_cov": losses.select_kl_cov,
}  # once a step, over all of it

ADVANTAGE: Mapping[str, Callable[..., tuple[Tensor, Aux]]] = {
    "grpo": losses.group_advantages,
    "dr_grpo": partial(losses.group_advantages, scale="none"),
    "batch_std": losses.batch_std_advantages,
    "rloo": losses.rloo_advantages,
    "gpg": losses.gpg_advantages,
    "maxrl": losses.maxrl_advantages,
    "passk": losses.passk_advantages,
    "best_of_group": losses.best_of_group_advantages,
    "opo": losses.opo_advantages,
    "reinforce_pp_baseline": losses.reinforce_pp_baseline_advantages,
    "shrunk": losses.shrunk_advantages,
}
BY_LENGTH = ("opo", "reinforce_pp_baseline")  # also want the number of tokens

WEIGHT = {"tis": losses.tis_weight, "mis": losses.mis_weight, "icepop": losses.icepop_weight}
KL = {"k2": losses.k2, "k3": losses.k3, "k1_st": losses.k1_st, "k3_st": losses.k3_st}

NUMBERS = (
    "eps_low", "eps_high", "dual_clip", "cap", "floor", "tau_pos", "tau_neg", "limit_low", "limit_high",
    "beta", "k_pos", "lam_pos", "k_neg", "lam_neg", "coef",
)  # fmt: skip


def taken(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword arguments of a loss with their defaults."""
    return {
        p.name: p.default for p in signature(function).parameters.values() if p.kind is Parameter.KEYWORD_ONLY
    }


def numbers(loss: Loss) -> dict[str, Any]:
    """The numbers that the chosen policy loss runs with. Raises ConfigError for one that it does not take."""
    takes = taken(POLICY[loss.form])
    given = {name: getattr(loss, name) for name in NUMBERS if getattr(loss, name) is not None}
    for name in given:
        if name not in takes:
            known = [n for n in takes if n in NUMBERS]
            raise ConfigError(f"loss.{name} has no meaning for loss.form {loss.form}, which takes {known}")
    chosen = {name: given.get(name, default) for name, default in takes.items() if name in NUMBERS}
    for name, value in chosen.items():
        if value is Parameter.empty:
            raise ConfigError(f"loss.form {loss.form} needs loss.{name}: its paper gives no default")
    return chosen


def policy(loss: Loss) -> Callable[..., tuple[Tensor, Aux]]:
    """policy(logp, logp_prox, adv, mask, row, n_rows, selected) → per-token loss and aux."""
    function, chosen = POLICY[loss.form], numbers(loss)
    rows, selects = "row" in taken(function), loss.form in SELECTING

    def call(logp: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, row: Tensor, n_rows: int,
             selected: Tensor | None) -> tuple[Tensor, Aux]:  # fmt: skip
        more: dict[str, Any] = {"row": row, "n_rows": n_rows} if rows else {}
        return function(logp, logp_prox, adv, mask, *([selected] if selects else []), **chosen, **more)

    return call


def advantage(
    loss: Loss, reward: Tensor, valid: Tensor, n_tokens: Tensor, noise: Tensor
) -> tuple[Tensor, Aux]:
    """Advantages [P, G] of rewards [P, G], of these lengths and variances [P, G]."""
    function = ADVANTAGE[loss.advantage]
    if loss.advantage == "passk":
        return function(reward, valid, k=loss.k)
    if loss.advantage == "shrunk":
        return function(reward, noise, valid)
    return function(reward, n_tokens, valid) if loss.advantage in BY_LENGTH else function(reward, valid)


def weigh(cfg: Correction, log_rho: Tensor, mask: Tensor, row: Tensor, n_rows: int) -> Tensor | None:
    """The importance weight of each token, or None without a correction."""
    if cfg.weight == "none":
        return None
    function = WEIGHT[cfg.weight]
    names = ("floor", "cap") if cfg.weight == "tis" else ("low", "high")
    chosen = {n: v for n, v in zip(names, (cfg.low, cfg.high), strict=True) if v is not None}
    more = {} if cfg.weight == "icepop" else {"level": cfg.level, "row": row, "n_rows": n_rows}
    return function(log_rho, mask, **chosen, **more)[0]


def keep(
    cfg: Correction,
    log_rho: Tensor,
    logp: Tensor,
    logp_mu: Tensor,
    adv: Tensor,
    mask: Tensor,
    row: Tensor,
    n_rows: int,
) -> Tensor:
    """Which tokens are trained at all: bool, inside mask. A rejected token is a zero and stays counted."""
    rows: dict[str, Any] = {"row": row, "n_rows": n_rows}
    match cfg.reject:
        case "none" | "m2po":  # m2po compares all tokens of the step: rl/survey.py
            return mask
        case "token" | "sequence" | "geometric":
            assert cfg.keep_low is not None and cfg.keep_high is not None
            kept, _ = losses.ratio_mask(
                log_rho, mask, level=cfg.reject, low=cfg.keep_low, high=cfg.keep_high, **rows
            )
        case "k3":
            assert cfg.keep_high is not None
            kept, _ = losses.divergence_mask(log_rho, mask, limit=cfg.keep_high, **rows)
        case "veto":
            kept, _ = losses.veto_mask(
                log_rho, mask, **({"floor": cfg.keep_low} if cfg.keep_low else {}), **rows
            )
        case "opsm":
            limit = {} if cfg.keep_high is None else {"limit": cfg.keep_high}
            kept, _ = losses.off_policy_sequence_mask(logp, logp_mu, adv, mask, **limit, **rows)
    return kept


def select(loss: Loss, logp: Tensor, logp_prox: Tensor, adv: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Tokens that Clip-Cov or KL-Cov picks, bool, over the whole step. `seed` is of Clip-Cov's draw."""
    ratio = {} if loss.cov_ratio is None else {"ratio": loss.cov_ratio}
    if loss.form == "kl_cov":
        return losses.select_kl_cov(logp, adv, mask, **ratio)[0]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(logp.shape, generator=generator).to(logp.device)
    clip = {n: v for n, v in (("eps_low", loss.eps_low), ("eps_high", loss.eps_high)) if v is not None}
    return losses.select_clip_cov(logp, logp_prox, adv, mask, noise, **ratio, **clip)[0]
