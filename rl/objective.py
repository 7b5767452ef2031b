"""The objective: `loss = Σ_terms coef · Σ_tokens weight · term`, composed from losses/ as the config says."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import losses
from rl.batch import MicroBatch
from rl.config import Config

# name → (sum, count): what micro-batches and ranks add up; `metrics/name` is their quotient.
Sums = dict[str, tuple[Tensor, Tensor]]
Objective = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Sums]]


def make_objective(cfg: Config) -> Objective:
    """objective(hidden [M, D], head [V, D], micro) → (loss scalar, sums).

    hidden: the states that predict the trained tokens. The loss is this micro-batch's share of the step's
    loss: add them
    over micro-batches and ranks. Log-probs are at the sampler's temperature, those that tokens were drawn
    under.
    """
    loss_cfg, temperature = cfg.loss, cfg.sampler.temperature
    diverges = cfg.uses_teachers and loss_cfg.distill_form == "divergence"
    steers = cfg.uses_teachers and loss_cfg.distill_form == "advantage"
    kl_form = {"k2": losses.k2, "k3": losses.k3}[loss_cfg.kl_form]

    def objective(hidden: Tensor, head: Tensor, micro: MicroBatch) -> tuple[Tensor, Sums]:
        logits = F.linear(hidden, head).float() if diverges else None
        if logits is None:
            logp, entropy = losses.linear_logp(hidden, head, micro.target, temperature=temperature)
        else:
            logp_all = (logits / temperature).log_softmax(-1)
            logp = logp_all.gather(-1, micro.target[:, None]).squeeze(-1)
            entropy = -(logp_all.exp() * logp_all).sum(-1)

        total = 0.0 * (logp.sum() + hidden.sum())  # an empty micro-batch still has a graph to go back through
        sums: Sums = {}
        mask, weight = micro.mask, micro.weight

        if loss_cfg.policy:
            adv = micro.adv
            if steers and micro.teacher_logp is not None:
                pull, _ = losses.distill_advantage(logp, micro.teacher_logp, mask["distill"])
                adv = adv + loss_cfg.distill * pull
                _mean(sums, "loss/distill", -pull, mask["distill"])
            term, aux = losses.grpo_loss(
                logp, micro.logp_mu, adv, mask["policy"],
                eps_low=loss_cfg.eps_low, eps_high=loss_cfg.eps_high, dual_clip=loss_cfg.dual_clip,
            )  # fmt: skip
            total = total + loss_cfg.policy * (weight["policy"] * term).sum()
            _mean(sums, "loss/policy", term, mask["policy"])
            _mean(sums, "policy/clipped", aux["clipped_low"] + aux["clipped_high"], mask["policy"])

        if cfg.uses_reference:
            assert micro.logp_ref is not None
            term, _ = kl_form(logp, micro.logp_ref, mask["kl"])
            total = total + loss_cfg.kl * (weight["kl"] * term).sum()
            _mean(sums, "loss/kl", term, mask["kl"])

        if diverges and logits is not None and micro.teacher_logp is not None:
            if micro.teacher_ids is None:
                term, _ = losses.full_divergence(
                    logits,
                    micro.teacher_logp,
                    mask["distill"],
                    kind=loss_cfg.distill_kind,
                    temperature=temperature,
                )
            else:
                term, _ = losses.topk_divergence(
                    logits, micro.teacher_ids, micro.teacher_logp, mask["distill"],
                    kind=loss_cfg.distill_kind, temperature=temperature,
                )  # fmt: skip
            total = total + loss_cfg.distill * (weight["distill"] * term).sum()
            _mean(sums, "loss/distill", term, mask["distill"])

        _off_policy(sums, logp.detach(), micro)
        _mean(sums, "policy/entropy", entropy, mask["kl"])
        return total, sums

    return objective


def _mean(sums: Sums, name: str, values: Tensor, mask: Tensor) -> None:
    sums[name] = (torch.where(mask, values.detach(), 0.0).sum(), mask.sum())


def _off_policy(sums: Sums, logp: Tensor, micro: MicroBatch) -> None:
    """How far the samples are from the policy that trains on them. Effective sample size: see `finish`."""
    log_rho = torch.where(micro.mask["kl"], logp - micro.logp_mu, 0.0)
    _, aux = losses.effective_sample_size(log_rho, micro.mask["kl"])
    _mean(sums, "policy/gap_abs", log_rho.abs(), micro.mask["kl"])
    sums["policy/rho"] = (aux["sum_w"], aux["n"])
    sums["policy/rho_squared"] = (aux["sum_w2"], aux["n"])


def finish(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Quotients of the added-up sums; a term that no token took part in is left out, not reported as 0."""
    metrics = {name: total / count for name, (total, count) in sums.items() if count}
    squared = metrics.pop("policy/rho_squared", None)
    if squared:
        metrics["policy/ess"] = metrics["policy/rho"] ** 2 / squared  # (Σw)² / (n Σw²), in (0, 1]
    return metrics


def describe(cfg: Config) -> list[str]:
    """The effective objective in words and formulas, as it is printed at the start."""
    loss = cfg.loss
    lines = [f"minimise  Σ_terms coef · Σ_tokens w · term,  w from global counts ({loss.agg})"]
    if loss.policy:
        low, high = 1 - loss.eps_low, 1 + loss.eps_high
        cap = f", at most {loss.dual_clip:g} |A| where A < 0" if loss.dual_clip else ""
        lines += [
            f"{loss.policy:g} · policy   -min(ρ A, clip(ρ, {low:g}, {high:g}) A){cap}",
            f"ρ = π / μ;  μ = π_prox = the sampler's log-probs at temperature {cfg.sampler.temperature:g}",
        ]
        terms = [f"{w:g} {name}" for name, w in (("judge", cfg.reward.judge), ("rule", cfg.reward.rule)) if w]
        if terms:
            spread = " / (std_group + 1e-6)" if loss.scale == "std" else ""
            lines.append(
                f"A = (r - mean_group){spread};  r = {' + '.join(terms)};  a missing reward is left out"
            )
        if cfg.uses_teachers and loss.distill_form == "advantage":
            lines.append(f"A += {loss.distill:g} (teacher_logp - logp), token by token")
        if cfg.staleness.max_age == 0:
            lines.append("η = 0 and one optimiser step a batch: ρ = 1, the clip never acts")
    if cfg.uses_reference:
        lines.append(f"{loss.kl:g} · kl   {loss.kl_form}(π ‖ the initial policy)")
    if cfg.uses_teachers:
        routes = ", ".join(f"{'|'.join(t.keys)} → {name}" for name, t in cfg.teachers.items())
        support = (
            f"the teacher's {loss.distill_top_k} best and the tail"
            if loss.distill_top_k
            else "the whole vocabulary"
        )
        kind = "KL(π ‖ teacher)" if loss.distill_kind == "reverse" else "KL(teacher ‖ π)"
        if loss.distill_form == "divergence":
            lines.append(f"{loss.distill:g} · distill   {kind} over {support};  {routes}")
        else:
            lines.append(f"teachers: {routes}")
    return lines
