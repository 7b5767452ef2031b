"""The objective: `loss = Σ_terms coef · Σ_tokens weight · term`, composed from losses/ as the config says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import losses
from rl import forms
from rl.batch import MicroBatch
from rl.config import Config
from rl.survey import Survey, make_surveys, needed

# name → (sum, count): what micro-batches and ranks add up; `metrics/name` is their quotient.
Sums = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Objective:
    """loss(hidden [M, D], head [V, D], micro, survey) → (scalar, sums).

    hidden: the states that predict the trained tokens. The scalar is this micro-batch's share of the step's
    loss: add them over micro-batches and ranks. Log-probs are at the temperature that tokens were drawn at.
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
            if steers and micro.teacher_logp is not None:
                pull, _ = losses.distill_advantage(logp, micro.teacher_logp, mask["distill"])
                adv = adv + loss_cfg.distill * pull
                _mean(sums, "loss/distill", -pull, mask["distill"])
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

        if logits is not None and micro.teacher_logp is not None:
            kind = {
                "kind": loss_cfg.distill_kind,
                "beta": loss_cfg.distill_beta,
                "alpha": loss_cfg.distill_alpha,
                "temperature": temperature,
            }
            if micro.teacher_ids is None:
                term, _ = losses.full_divergence(logits, micro.teacher_logp, mask["distill"], **kind)
            else:
                term, _ = losses.topk_divergence(
                    logits, micro.teacher_ids, micro.teacher_logp, mask["distill"], **kind
                )
            term = torch.where(kept, term, 0.0)
            total = total + loss_cfg.distill * (weight["distill"] * term).sum()
            _mean(sums, "loss/distill", term, mask["distill"])

        _off_policy(sums, logp.detach(), micro)
        _mean(sums, "policy/entropy", entropy, mask["kl"])
        return total, sums

    def survey_step(logps: Sequence[Tensor], micros: Sequence[MicroBatch], seed: int) -> list[Survey]:
        return make_surveys(logps, micros, loss_cfg, fix, seed)

    return Objective(objective, survey_step if needed(loss_cfg, fix) else None, temperature)


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
            lines.append(f"A += {loss.distill:g} (teacher_logp - logp), token by token")
        if cfg.staleness.max_age == 0:
            lines.append("η = 0 and one optimiser step a batch: ρ = 1, no clip ever acts")
    if fix.reject != "none":
        bounds = f"{fix.keep_low}, {fix.keep_high}"
        lines.append(f"rejected by {fix.reject} ({bounds}): 0 in policy and distill, still counted")
    if cfg.uses_reference:
        lines.append(f"{loss.kl:g} · kl   {loss.kl_form}(π ‖ the initial policy)")
    if cfg.uses_teachers:
        routes = ", ".join(f"{'|'.join(t.keys)} → {name}" for name, t in cfg.teachers.items())
        support = (
            f"the teacher's {loss.distill_top_k} best and the tail"
            if loss.distill_top_k
            else "the whole vocabulary"
        )
        kinds = {"reverse": "KL(π ‖ teacher)", "forward": "KL(teacher ‖ π)"}
        if loss.distill_form == "divergence":
            kind = kinds.get(loss.distill_kind, loss.distill_kind)
            lines.append(f"{loss.distill:g} · distill   {kind} over {support};  {routes}")
        else:
            lines.append(f"teachers: {routes}")
    return lines


def _equation(cfg: Config) -> str:
    if cfg.loss.form != "grpo":
        return ""
    n = forms.numbers(cfg.loss)
    return f"   -min(ρ A, clip(ρ, {1 - n['eps_low']:g}, {1 + n['eps_high']:g}) A)"
