"""The objective: `loss = Σ_terms coef · Σ_tokens weight · term`, composed from losses/ as the config says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import losses
from rl import forms, teaching
from rl.batch import MicroBatch, Taught
from rl.config import Config, Loss
from rl.survey import Survey, make_surveys, needed
from rl.teaching import MIXED
from rl.terms import Columns, best, columns, diverges, has_term, kind, rows_of, separable, spread, terms

# name → (sum, count): what micro-batches and ranks add up; `metrics/name` is their quotient.
Sums = dict[str, tuple[Tensor, Tensor]]
# What is reported of each token → the mask of those that it is a mean over.
REPORTED = {
    "correction/rejected": "kl", "correction/weight": "policy", "loss/policy": "policy",
    "policy/clipped": "policy", "loss/kl": "kl", "policy/entropy": "kl",
}  # fmt: skip


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


def make_objective(cfg: Config, *, compile: bool = False, fuse: bool = True) -> Objective:
    """compile: all but the fused head's matmuls and kernels. fuse: where a token's loss is its own, the head
    finds the gradient at once, in three matmuls for four, and `backward` may be called once.

    Raises ConfigError for a number that the chosen loss does not take.
    """
    loss_cfg, temperature, policy = cfg.loss, cfg.sampler.temperature, forms.policy(cfg.loss)

    @cache
    def token_loss(names: tuple[str, ...]) -> Any:
        def of_values(*values: Tensor) -> tuple[Tensor, Columns]:
            n = len(values) - len(names)  # first the log-probs
            return terms(cfg, policy, dict(zip(names, values[n:], strict=True)), None, *values[:n])

        with_grad = losses.separable(of_values)
        return torch.compile(with_grad, dynamic=True, fullgraph=True) if compile else with_grad

    def fused(hidden: Tensor, head: Tensor, micro: MicroBatch, survey: Survey) -> tuple[Tensor, Sums]:
        x, ids = columns(cfg, micro, survey), None
        if diverges(cfg):
            taught, ids = best(micro, loss_cfg.distill_top_k)
            x |= taught
        fast = losses.has_triton(hidden.device)
        total, seen = losses.linear_loss(
            hidden, head, micro.target, micro.mask["kl"].float(), token_loss(tuple(x)), *x.values(),
            topk_ids=ids, temperature=temperature,
            rows=losses.rows_triton if fast else None, scale=losses.scale_triton if fast else None,
        )  # fmt: skip
        if diverges(cfg):
            seen |= {f"loss/distill/{name}": seen["loss/distill"] for name in micro.teachers}
        return total, _sums(loss_cfg, micro, {**seen, "policy/entropy": seen["entropy"]})

    def whole(hidden: Tensor, head: Tensor, micro: MicroBatch, survey: Survey) -> tuple[Tensor, Sums]:
        logits = None
        if not diverges(cfg):
            logp, entropy = losses.linear_logp(hidden, head, micro.target, temperature=temperature)
        else:
            logits = F.linear(hidden, head).to(torch.promote_types(hidden.dtype, torch.float32))
            logp_all = (logits / temperature).log_softmax(-1)
            logp = logp_all.gather(-1, micro.target[:, None]).squeeze(-1)
            entropy = -(logp_all.exp() * logp_all).sum(-1)
        x, rows = columns(cfg, micro, survey), (micro.row, micro.n_rows)
        per_token, seen = terms(cfg, policy, x, rows, logp)
        # an empty micro-batch still has a graph to go back through
        total = per_token.sum() + 0.0 * (logp.sum() + hidden.sum())
        for name, taught in micro.teachers.items() if logits is not None else ():
            assert logits is not None
            term = logp.detach()[taught.at] - taught.logp
            if has_term(loss_cfg, name):
                mine = logits if len(taught.at) == len(logits) else logits[taught.at]
                term = _divergence(loss_cfg, mine, taught, seen["kept"][taught.at], temperature)
                total = total + loss_cfg.distill * (taught.weight * term).sum()
            seen[f"loss/distill/{name}"] = spread(micro, taught, term.detach(), 0.0)
        return total, _sums(loss_cfg, micro, {**seen, "logp": logp, "policy/entropy": entropy})

    def survey_step(logps: Sequence[Tensor], micros: Sequence[MicroBatch], seed: int) -> list[Survey]:
        return make_surveys(logps, micros, loss_cfg, cfg.correction, seed)

    loss = fused if fuse and separable(cfg) else torch.compile(whole) if compile else whole
    return Objective(loss, survey_step if needed(loss_cfg, cfg.correction) else None, temperature)


def _divergence(cfg: Loss, logits: Tensor, taught: Taught, kept: Tensor, temperature: float) -> Tensor:
    """[R] from one teacher or the mixture, 0 where the token is rejected."""
    # what is rejected is masked before the divergence: 0 · NaN would reach the gradient
    rows, on = rows_of(taught), kept & taught.mask & (taught.weight > 0)
    if taught.ids is None:
        return losses.full_divergence(logits, rows, on, temperature=temperature, **kind(cfg))[0]
    return losses.topk_divergence(logits, taught.ids, rows, on, temperature=temperature, **kind(cfg))[0]


def _sums(cfg: Loss, micro: MicroBatch, seen: Columns) -> Sums:
    """loss/distill: the mean over all taught tokens; loss/distill/<name>: over those of this teacher, and in
    a mixture, where it has no term of its own, of log π - log T_name at the sampled token."""
    sums: Sums = {}
    for name, mask in REPORTED.items():
        if name in seen:
            _mean(sums, name, seen[name], micro.mask[mask])
    for name, taught in micro.teachers.items():
        if (values := seen.get(f"loss/distill/{name}")) is not None:
            _mean(sums, f"loss/distill/{name}", values[taught.at], taught.mask)
            if has_term(cfg, name):
                total, count = sums[f"loss/distill/{name}"]
                before = sums.get("loss/distill", (torch.zeros_like(total), torch.zeros_like(count)))
                sums["loss/distill"] = (before[0] + total, before[1] + count)
    _off_policy(sums, seen["logp"].detach(), micro)
    return sums


def _mean(sums: Sums, name: str, values: Tensor, mask: Tensor) -> None:
    sums[name] = (torch.where(mask, values.detach(), 0.0).sum(), mask.sum())


def _off_policy(sums: Sums, logp: Tensor, micro: MicroBatch) -> None:
    """How far the samples are from the policy that trains on them. Effective sample size: see `quotients`."""
    log_rho = torch.where(micro.mask["kl"], logp - micro.logp_mu, 0.0)
    _, aux = losses.effective_sample_size(log_rho, micro.mask["kl"])
    _mean(sums, "policy/gap_abs", log_rho.abs(), micro.mask["kl"])
    sums["policy/rho"] = (aux["sum_w"], aux["n"])
    sums["policy/rho_squared"] = (aux["sum_w2"], aux["n"])


def quotients(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
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
            measured = {
                "grpo": "(r - mean_group) / (std_group + 1e-6)",
                "dr_grpo": "r - mean_group",
                "shrunk": "λ (r - mean_group) / (std_group + 1e-6), λ by how far the votes are apart",
            }
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
