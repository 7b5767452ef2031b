"""The objective: `loss = Σ_terms coef · Σ_tokens weight · term`, composed from losses/ as the config says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import losses
from rl import forms, teaching
from rl.batch import MicroBatch, Taught
from rl.config import Config, Loss
from rl.survey import Survey, make_surveys, needed
from rl.teaching import MIXED, MIXTURE

# name → (sum, count): what micro-batches and ranks add up; `metrics/name` is their quotient.
Sums = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Objective:
    """loss(hidden [M, D], head [V, D], micro, survey) → (scalar, sums).

    hidden: the states that predict the trained tokens. The scalar is this micro-batch's share of the step's
    loss: add them over micro-batches and ranks. Log-probs are at the temperature that tokens were drawn at.
    Distillation is one term per teacher, or one from their mixture; the weights, rl/lessons.py, say the rest.
    survey(logps, micros, seed), where one is needed, looks at the whole step first (rl/survey.py).
    """

    loss: Callable[[Tensor, Tensor, MicroBatch, Survey], tuple[Tensor, Sums]]
    survey: Callable[[Sequence[Tensor], Sequence[MicroBatch], int], list[Survey]] | None
    temperature: float


def make_objective(cfg: Config) -> Objective:
    """Raises ConfigError for a number that the chosen loss does not take."""
    loss_cfg, fix, temperature = cfg.loss, cfg.correction, cfg.sampler.temperature
    diverges = cfg.uses_teachers and loss_cfg.distill_form == "divergence"
    steers = cfg.uses_teachers and loss_cfg.distill_form == "advantage"
    policy = forms.policy(loss_cfg)

    def objective(hidden: Tensor, head: Tensor, micro: MicroBatch, survey: Survey) -> tuple[Tensor, Sums]:
        logits = F.linear(hidden, head).float() if diverges else None
        if logits is None:
            logp, entropy = losses.linear_logp(hidden, head, micro.target, temperature=temperature)
        else:
            logp_all = (logits / temperature).log_softmax(-1)
            logp = logp_all.gather(-1, micro.target[:, None]).squeeze(-1)
            entropy = -(logp_all.exp() * logp_all).sum(-1)

        total = 0.0 * (logp.sum() + hidden.sum())  # an empty micro-batch still has a graph to go back through
        sums: Sums = {}
        mask, weight, mu, rows = micro.mask, micro.weight, micro.logp_mu, (micro.row, micro.n_rows)
        prox = mu
        if fix.prox == "loglinear":
            prox, _ = losses.loglinear_prox(logp, mu, micro.version, mask["kl"], current=micro.current)
        log_rho = (prox if fix.prox == "loglinear" else logp.detach()) - mu
        kept = forms.keep(fix, log_rho, logp, mu, micro.adv, mask["kl"], *rows)
        if survey.keep is not None:
            kept = kept & survey.keep
        if fix.reject != "none":
            _mean(sums, "correction/rejected", (~kept).float(), mask["kl"])

        if loss_cfg.policy:
            adv = micro.adv
            for name, taught in micro.teachers.items() if steers else ():
                on = kept[taught.at]
                pull, _ = losses.distill_advantage(logp[taught.at], taught.logp, on)
                if _has_term(loss_cfg, name):
                    # weighted as this teacher's term, although the policy term has another count
                    scale = torch.where(on, taught.weight / weight["policy"][taught.at], 0.0)
                    adv = adv.index_add(0, taught.at, loss_cfg.distill * scale * pull)
                _distilled(sums, loss_cfg, name, taught, -pull)
            term, aux = policy(logp, prox, adv, mask["policy"], *rows, survey.selected)
            correction = forms.weigh(fix, log_rho, mask["policy"], *rows)
            if correction is not None:
                if survey.mean_weight is not None:
                    correction, _ = losses.normalise_weight(
                        correction, mask["policy"], mean=survey.mean_weight
                    )
                term = correction * term
                _mean(sums, "correction/weight", correction, mask["policy"])
            term = torch.where(kept, term, 0.0)
            total = total + loss_cfg.policy * (weight["policy"] * term).sum()
            _mean(sums, "loss/policy", term, mask["policy"])
            clipped = [value for name, value in aux.items() if name.startswith("clipped")]
            if clipped:
                _mean(sums, "policy/clipped", torch.stack(clipped).amax(0), mask["policy"])

        if cfg.uses_reference:
            assert micro.logp_ref is not None
            if loss_cfg.kl_form == "k3_weighted":
                term, _ = losses.k3_weighted(logp, micro.logp_ref, mu, mask["kl"])
            else:
                term, _ = forms.KL[loss_cfg.kl_form](logp, micro.logp_ref, mask["kl"])
            total = total + loss_cfg.kl * (weight["kl"] * term).sum()
            _mean(sums, "loss/kl", term, mask["kl"])

        for name, taught in micro.teachers.items() if logits is not None else ():
            assert logits is not None
            term = logp.detach()[taught.at] - taught.logp
            if _has_term(loss_cfg, name):
                mine = logits if len(taught.at) == len(logits) else logits[taught.at]
                # what is rejected is masked before the divergence: 0 · NaN would reach the gradient
                term = _divergence(loss_cfg, mine, taught, kept[taught.at], temperature)
                total = total + loss_cfg.distill * (taught.weight * term).sum()
            _distilled(sums, loss_cfg, name, taught, term)

        _off_policy(sums, logp.detach(), micro)
        _mean(sums, "policy/entropy", entropy, mask["kl"])
        return total, sums

    def survey_step(logps: Sequence[Tensor], micros: Sequence[MicroBatch], seed: int) -> list[Survey]:
        return make_surveys(logps, micros, loss_cfg, fix, seed)

    return Objective(objective, survey_step if needed(loss_cfg, fix) else None, temperature)


def _divergence(cfg: Loss, logits: Tensor, taught: Taught, kept: Tensor, temperature: float) -> Tensor:
    """[R] from one teacher or the mixture, 0 where the token is rejected."""
    if taught.rows is None:
        raise ValueError(
            "objective: a teacher sent log-probs of the tokens alone, and a divergence wants rows"
        )
    how: dict[str, Any] = {"kind": cfg.distill_kind, "beta": cfg.distill_beta, "alpha": cfg.distill_alpha}
    on = kept & (taught.weight > 0)
    if taught.ids is None:
        return losses.full_divergence(logits, taught.rows, on, temperature=temperature, **how)[0]
    return losses.topk_divergence(logits, taught.ids, taught.rows, on, temperature=temperature, **how)[0]


def _has_term(cfg: Loss, name: str) -> bool:
    return cfg.distill_mix not in MIXED or name == MIXTURE


def _distilled(sums: Sums, cfg: Loss, name: str, taught: Taught, values: Tensor) -> None:
    """loss/distill: the mean over all taught tokens; loss/distill/<name>: over those of this teacher, and in
    a mixture, where it has no term of its own, of log π - log T_name at the sampled token."""
    _mean(sums, f"loss/distill/{name}", values, torch.ones_like(taught.at, dtype=torch.bool))
    if _has_term(cfg, name):
        total, count = sums[f"loss/distill/{name}"]
        before = sums.get("loss/distill", (torch.zeros_like(total), torch.zeros_like(count)))
        sums["loss/distill"] = (before[0] + total, before[1] + count)


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
    """The effective objective in formulas, as it is printed at the start. Raises as make_objective."""
    loss, fix = cfg.loss, cfg.correction
    lines = [f"minimise  Σ_terms coef · Σ_tokens w · term,  w from global counts ({loss.agg})"]
    if loss.policy:
        chosen = ", ".join(
            f"{name} {value:g}" for name, value in forms.numbers(loss).items() if value is not None
        )
        lines.append(
            f"{loss.policy:g} · policy   {loss.form}{f' ({chosen})' if chosen else ''}{_equation(cfg)}"
        )
        mu = f"μ = the sampler's log-probs at temperature {cfg.sampler.temperature:g}"
        if fix.prox == "sampler":
            lines.append(f"ρ = π / π_prox;  π_prox = {mu}")
        else:
            lines.append(
                f"ρ = π / π_prox;  π_prox = last step's policy, log-linear in the token's age;  {mu}"
            )
        if fix.weight != "none":
            ratio = "π_prox / μ" if fix.prox == "loglinear" else "π / μ"
            mean = ", divided by its mean" if fix.normalise else ""
            lines.append(f"weight = {fix.weight}({ratio}) by {fix.level}{mean}, a constant")
        called = {f"fn/{i}": spec.rpartition("/")[2] for i, spec in enumerate(cfg.reward.fn)}
        terms = [f"{weight:g} {called.get(name, name)}" for name, weight in cfg.reward.weights.items()]
        if terms:
            measured = {"grpo": "(r - mean_group) / (std_group + 1e-6)", "dr_grpo": "r - mean_group"}
            against = measured.get(loss.advantage, loss.advantage)
            lines.append(f"A = {against};  r = {' + '.join(terms)};  a missing reward is left out")
        if cfg.uses_teachers and loss.distill_form == "advantage":
            lines += _distill_equations(cfg)
        if cfg.staleness.max_age == 0:
            lines.append("η = 0 and one optimiser step a batch: ρ = 1, no clip ever acts")
    if fix.reject != "none":
        bounds = f"{fix.keep_low}, {fix.keep_high}"
        lines.append(f"rejected by {fix.reject} ({bounds}): 0 in policy and distill, still counted")
    if cfg.uses_reference:
        lines.append(f"{loss.kl:g} · kl   {loss.kl_form}(π ‖ the initial policy)")
    if cfg.uses_teachers:
        if loss.distill_form == "divergence":
            lines += _distill_equations(cfg)
        weight = teaching.weights(cfg)
        served = (f"{'|'.join(cfg.teachers[k].keys) or 'all'} → {k} (w {w:g})" for k, w in weight.items())
        lines.append(f"teachers: {', '.join(served)}")
    return lines


def _distill_equations(cfg: Config) -> list[str]:
    """The term, or what is added to the advantage, and T where the teachers are mixed."""
    loss = cfg.loss
    mixed = loss.distill_mix in MIXED
    teacher = "T" if mixed else "T_k"
    if loss.distill_form == "advantage":
        if mixed:
            lines = [f"A += {loss.distill:g} (N / N_T) (log T - log π), token by token;  N_T: taught tokens"]
        else:
            lines = [
                f"A += {loss.distill:g} Σ_k (w_k / Σ_k w_k) (N / N_k) (log T_k - log π), token by token;  "
                "N_k: tokens that k taught"
            ]
        lines.append("N: tokens of the policy term, so that each teacher counts by its own tokens")
    else:
        best = f"{teacher}'s {loss.distill_top_k} best and the tail"
        over = best if loss.distill_top_k else "the whole vocabulary"
        names = {"reverse": f"KL(π ‖ {teacher})", "forward": f"KL({teacher} ‖ π)"}
        term = names.get(loss.distill_kind, f"{loss.distill_kind}(π, {teacher})")
        mean = f"mean({term})" if mixed else f"Σ_k w_k mean_k({term}) / Σ_k w_k"
        lines = [f"{loss.distill:g} · distill   {mean} over {over}"]
        if not mixed:
            lines.append("mean_k: over the tokens that teacher k taught, by their own count")
    if mixed:
        mixture = {"arithmetic": "Σ_k w_k T_k / Σ_k w_k", "geometric": "Π_k T_k^(w_k / Σ_k w_k) / Z"}
        lines.append(f"T = {mixture[loss.distill_mix]}, over the teachers of the prompt")
    return lines


def _equation(cfg: Config) -> str:
    if cfg.loss.form != "grpo":
        return ""
    n = forms.numbers(cfg.loss)
    return f"   -min(ρ A, clip(ρ, {1 - n['eps_low']:g}, {1 + n['eps_high']:g}) A)"
