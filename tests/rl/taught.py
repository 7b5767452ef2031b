"""Groups of answers and what several teachers say of them, for each way of combining teachers."""

from dataclasses import replace

import numpy as np
import torch

from experiments.opd import CONFIG as OPD
from rl.batch import GroupData, GroupTokens, combine
from rl.config import Correction, Loss, Teacher
from rl.lessons import Rated, make_lessons
from rl.step import attend_packed
from rl.types import Completion, Scores

CPU = torch.device("cpu")
V, G = 19, 4
WEIGHT = {"a": 3.0, "b": 1.0}
MIXES = ["routed", "sum", "arithmetic", "geometric"]
ROUTED = [("a",), ("b",), ("b",), ("a",)]
BOTH = [("a", "b")] * len(ROUTED)
CASES = [
    {"distill_mix": mix, "distill_form": form} for mix in MIXES for form in ("divergence", "advantage")
] + [{"distill_mix": mix, "distill_top_k": 4} for mix in ("routed", "sum")]


def config(weight=None, fix=None, **loss):
    teachers = {k: Teacher(keys=(k,), weight=w) for k, w in (weight or WEIGHT).items()}
    loss = {"policy": 0.0, "distill": 0.5, **loss}
    if loss.get("distill_form") == "advantage":
        loss["policy"] = 1.0
    return replace(OPD, teachers=teachers, loss=Loss(**loss), correction=fix or Correction())


def served(cfg):
    return ROUTED if cfg.loss.distill_mix == "routed" else BOTH


def batch(cfg, teachers=None, rewards=False, seed=0, scores=None):
    """Groups of unequal lengths; what lies in a group depends on its own index alone. teachers: of each
    group, None where it is left out. scores(name, samples, rng) → what a teacher says."""
    groups, rated = [], []
    weight = {name: t.weight for name, t in cfg.teachers.items()}
    for g, names in enumerate(teachers if teachers is not None else served(cfg)):
        rng = np.random.default_rng((seed, g))
        samples = []
        for _ in range(G):
            n = int(rng.integers(1, 7))
            samples.append(
                Completion(
                    tokens=rng.integers(0, V, n).astype(np.int32),
                    logps=-3 * rng.random(n).astype(np.float32),
                    versions=np.full(n, int(rng.integers(1, 4)), np.int32), finish="stop",
                )
            )  # fmt: skip
        prompt, said = rng.integers(0, V, int(rng.integers(2, 6))), {}
        for name in names or ():
            own = np.random.default_rng((seed, g, ord(name)))
            said[name] = scores(name, samples, own) if scores else said_of(cfg, samples, own)
        if names is not None:
            score = tuple(float(x) for x in rng.integers(0, 5, G)) if rewards else (None,) * G
            rated.append(Rated(n_tokens=tuple(len(s.tokens) for s in samples), rewards=score, teachers=names))
            groups.append((GroupTokens(prompt, tuple(samples)), said))
    lessons = make_lessons(rated, cfg.loss, norm_length=8, teachers=weight)
    return [
        GroupData(tokens=t, lessons=x, teachers=combine(cfg.loss.distill_mix, weight, said))
        for (t, said), x in zip(groups, lessons, strict=True)
    ]


def said_of(cfg, samples, rng):
    return [scores_of(cfg, np.log(rng.dirichlet(np.ones(V), len(s.tokens))), s.tokens) for s in samples]


def scores_of(cfg, logp, tokens):
    """What an engine would send of these log-probs [T, V]."""
    logp, k = torch.as_tensor(np.asarray(logp, np.float32)), cfg.loss.distill_top_k
    top = logp.topk(k, dim=-1) if k else None
    full = cfg.loss.distill_form == "divergence" and not k
    return Scores(
        logps=logp.gather(-1, torch.as_tensor(tokens, dtype=torch.int64)[:, None])[:, 0].numpy(),
        top_ids=top.indices.numpy() if top else None,
        top_logps=top.values.numpy() if top else None,
        full=logp.numpy() if full else None,
    )


def logits_of(model, micro):
    hidden = model(micro.ids, micro.layout.positions, attend_packed(micro.layout))
    return model.logits(hidden[micro.select]).float()
