"""The fused head gives the loss, the gradients and the metrics of the plain one, wherever it may be used."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.genrm_grpo import CONFIG
from rl import forms
from rl.batch import GroupData, GroupTokens, build_micro
from rl.check import check
from rl.config import Correction, Loss, Teacher
from rl.lessons import Rated, make_lessons
from rl.objective import make_objective
from rl.survey import Survey, make_surveys, needed
from rl.terms import separable
from rl.types import Completion, Scores

V, D, G = 19, 12, 4
ATOL = {torch.float32: 2e-6, torch.float64: 1e-12}
BY_SEQUENCE = {"gspo", "gspo_token", "gmpo", "topr", "vespo"}


def config(fix=None, teachers=("a",), **loss):
    loss = {"kl": 0.1, **loss}
    if loss.get("form") == "dro":
        loss["beta"] = 0.1
    if fix is None and loss.get("form") == "reinforce":
        fix = Correction(weight="tis")
    return replace(
        CONFIG, loss=Loss(**loss), correction=fix or Correction(),
        teachers={name: Teacher(keys=(name,)) for name in teachers if loss.get("distill")},
    )  # fmt: skip


FORMS = [config(form=form) for form in forms.POLICY]
KLS = [config(kl_form=form) for form in ("k3", "k1_st", "k3_st", "k3_weighted")]
KINDS = ("reverse", "forward", "skew_reverse", "skew_forward", "jsd", "jsd_gkd")
TOP_K = [config(distill=0.5, distill_top_k=5, distill_kind=kind) for kind in KINDS]
CORRECTIONS = [
    Correction(prox="loglinear", weight="tis"),
    Correction(prox="loglinear", weight="mis", low=0.2, high=3.0),
    Correction(prox="loglinear", weight="icepop", reject="token", keep_low=0.5, keep_high=2.0),
    Correction(reject="m2po", keep_high=0.5),
    Correction(prox="loglinear", weight="tis", normalise=True),
]
DISTILLED = [{}, {"distill": 0.5, "distill_form": "advantage"}, {"distill": 0.5, "distill_top_k": 5}]
SEPARABLE = [
    *[cfg for cfg in FORMS if cfg.loss.form not in BY_SEQUENCE],
    *KLS,
    *TOP_K,
    *[config(fix, **teachers) for fix in CORRECTIONS for teachers in DISTILLED],
    config(distill=0.5, distill_top_k=5, policy=0.0, kl=0.0),
    config(distill=0.5, distill_top_k=5, teachers=("a", "b")),
    config(distill=0.5, distill_top_k=5, distill_mix="sum"),
    config(distill=0.5, distill_form="advantage", teachers=("a", "b"), distill_mix="sum"),
]
COUPLED = [
    *[cfg for cfg in FORMS if cfg.loss.form in BY_SEQUENCE],
    config(Correction(prox="loglinear", weight="mis", level="sequence", high=3.0)),
    *[config(Correction(reject=how, keep_low=0.1, keep_high=0.9)) for how in ("sequence", "geometric", "k3")],
    config(Correction(reject="veto", keep_low=0.1)),
    config(Correction(reject="opsm", keep_high=0.2)),
    config(distill=0.5),
    config(distill=0.5, distill_top_k=5, distill_mix="sum", teachers=("a", "b")),
]


def name_of(cfg):
    loss, fix = cfg.loss, cfg.correction
    taught = f"{loss.distill_form}-{loss.distill_mix}-{loss.distill_kind}-{loss.distill_top_k}"
    return f"{loss.form}-{loss.kl_form}-{taught if loss.distill else 0}-{fix.prox}-{fix.weight}-{fix.reject}"


def micro_of(cfg, bucket):
    """Four groups with missing rewards; each has its teacher, or both, and one has none."""
    rng, groups, rated = np.random.default_rng(0), [], []
    for g in range(4):
        samples, said = [], {name: [] for name in cfg.teachers}
        if cfg.loss.distill_mix == "routed" and len(said) > 1:
            said = {("a", "b")[g % 2]: []}
        if g == 2:
            said = {}
        for _ in range(G):
            n = int(rng.integers(1, 7))
            tokens = rng.integers(0, V, n).astype(np.int32)
            logps = -3 * rng.random(n).astype(np.float32)
            versions = np.full(n, int(rng.integers(1, 4)), np.int32)
            samples.append(Completion(tokens=tokens, logps=logps, versions=versions, finish="stop"))
            for scores in said.values():
                full = torch.tensor(np.log(rng.dirichlet(np.ones(V), n)), dtype=torch.float32)
                best = full.topk(cfg.loss.distill_top_k) if cfg.loss.distill_top_k else None
                scores.append(
                    Scores(
                        logps=full[range(n), tokens].numpy(),
                        top_ids=best.indices.numpy() if best else None,
                        top_logps=best.values.numpy() if best else None,
                        full=None if best or cfg.loss.distill_form == "advantage" else full.numpy(),
                    )
                )
        rewards = tuple(None if rng.random() < 0.2 else float(rng.integers(0, 5)) / 4 for _ in samples)
        lengths = tuple(len(s.tokens) for s in samples)
        rated.append(Rated(n_tokens=lengths, rewards=rewards, teachers=tuple(said)))
        groups.append((GroupTokens(rng.integers(0, V, 3), tuple(samples)), said))
    lessons = make_lessons(rated, cfg.loss, norm_length=8, teachers=dict.fromkeys(cfg.teachers, 1.0))
    reference = [[Scores(logps=s.logps - 0.1) for s in tokens.samples] for tokens, _ in groups]
    data = {
        g: GroupData(tokens=tokens, lessons=own, teachers=said, reference=ref)
        for g, ((tokens, said), own, ref) in enumerate(zip(groups, lessons, reference, strict=True))
    }
    places = [(g, s) for g in range(4) for s in range(G)]
    return build_micro(places, data, torch.device("cpu"), current=3, bucket=bucket)


def evaluated(cfg, micro, dtype, fuse, compile=False):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(micro.target), D, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype) / 3
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    survey = None
    if needed(cfg.loss, cfg.correction):
        logp = (hidden.detach().float() @ head.detach().float().T).log_softmax(-1)
        logps = [logp.gather(-1, micro.target[:, None]).squeeze(-1)]
        (survey,) = make_surveys(logps, [micro], cfg.loss, cfg.correction, 0)
    objective = make_objective(cfg, fuse=fuse, compile=compile)
    loss, sums = objective.loss(hidden, head, micro, survey or Survey())
    loss.backward()
    return loss.detach(), hidden.grad, head.grad, {k: torch.stack([a, b]) for k, (a, b) in sums.items()}


def assert_equal(got, expected, atol):
    for a, b in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b, atol=atol * max(1.0, float(b.abs().max())), rtol=0)
    assert got[3].keys() == expected[3].keys()
    for name, value in expected[3].items():
        torch.testing.assert_close(got[3][name].double(), value.double(), atol=1e-4, rtol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("cfg", SEPARABLE, ids=name_of)
def test_the_fused_objective_is_the_plain_one(cfg, dtype):
    check(cfg)
    assert separable(cfg)
    for bucket in (1, 64):
        micro = micro_of(cfg, bucket)
        expected = evaluated(cfg, micro, dtype, fuse=False)
        assert expected[0].isfinite() and expected[1].abs().max() > 0
        assert_equal(evaluated(cfg, micro, dtype, fuse=True), expected, ATOL[dtype])


@pytest.mark.parametrize("cfg", COUPLED, ids=name_of)
def test_a_loss_that_couples_tokens_or_wants_the_whole_vocabulary_is_not_fused(cfg):
    assert not separable(cfg)
    micro = micro_of(cfg, 1)
    expected = evaluated(cfg, micro, torch.float32, fuse=False)
    assert_equal(evaluated(cfg, micro, torch.float32, fuse=True), expected, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [SEPARABLE[0], TOP_K[0], SEPARABLE[-1]], ids=name_of)
def test_compiled_token_losses_are_the_plain_ones(cfg):
    micro = micro_of(cfg, 64)
    expected = evaluated(cfg, micro, torch.float32, fuse=False)
    assert_equal(evaluated(cfg, micro, torch.float32, fuse=True, compile=True), expected, 2e-6)
