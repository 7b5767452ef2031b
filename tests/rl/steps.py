"""Steps of a tiny model over made-up groups, whole or split: for tests of what a split must not change."""

from dataclasses import replace

import numpy as np
import torch

from experiments.genrm_grpo import CONFIG
from models.config import ModelConfig
from models.transformer import Transformer
from rl import forms
from rl.batch import GroupData, GroupTokens, build_micro
from rl.config import Correction, Loss, Teacher
from rl.lessons import Rated, make_lessons
from rl.objective import make_objective
from rl.packing import plan_micros, plan_ranks
from rl.step import TrainState, make_optimizer, train_step
from rl.types import Completion, Scores

MODEL = ModelConfig(
    family="llama", vocab_size=19, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48,
    max_len=64, tie_embeddings=True, eos_ids=(0,), pad_id=1,
)  # fmt: skip
EVERYTHING = replace(
    CONFIG,
    loss=Loss(kl=0.1, distill=0.5, agg="seq_mean_token_mean"),
    teachers={"t": Teacher(keys=("",))},
)
FORMS = [{"form": form} for form in forms.POLICY if form not in ("dro", "reinforce")] + [
    {"form": "dro", "beta": 0.1},
    {"form": "gspo", "eps_low": 0.1, "eps_high": 0.2},
    {"kl_form": "k3_weighted"},
    {"kl_form": "k1_st"},
    {"distill_kind": "jsd"},
    {"distill_kind": "skew_forward"},
]
CORRECTIONS = [
    Correction(prox="loglinear", weight="tis"),
    Correction(prox="loglinear", weight="mis", level="sequence", high=3.0),
    Correction(prox="loglinear", weight="icepop", reject="geometric", keep_low=0.9, keep_high=1.1),
    Correction(reject="sequence", keep_low=0.5, keep_high=2.0),
    Correction(reject="k3", keep_high=0.05),
    Correction(reject="veto", keep_low=0.1),
    Correction(reject="opsm", keep_high=0.2),
    Correction(reject="m2po", keep_high=0.5),
    Correction(prox="loglinear", weight="tis", level="sequence", normalise=True),
]
RTOL = 2e-5  # of the largest gradient entry, float32: only the order of sums differs


def make_groups(n_groups=6, seed=0):
    """Groups of unequal lengths, with missing rewards, one without a teacher, and one-sample ages."""
    rng = np.random.default_rng(seed)
    groups, rated = [], []
    for g in range(n_groups):
        samples, teacher = [], []
        for _ in range(4):
            n = int(rng.integers(1, 9))
            samples.append(
                Completion(
                    tokens=rng.integers(0, 19, n).astype(np.int32),
                    logps=-3 * rng.random(n).astype(np.float32),
                    versions=np.full(n, int(rng.integers(1, 4)), np.int32), finish="stop",
                )
            )  # fmt: skip
            full = np.log(rng.dirichlet(np.ones(19), n)).astype(np.float32)
            teacher.append(Scores(logps=full[:, 0], full=full))
        rewards = [None if rng.random() < 0.2 else float(rng.integers(0, 6)) / 5 for _ in samples]
        taught = g != 2
        rated.append(
            Rated(
                n_tokens=tuple(len(s.tokens) for s in samples),
                rewards=tuple(rewards),
                teachers=("t",) if taught else (),
            )
        )
        groups.append(
            (
                GroupTokens(rng.integers(0, 19, int(rng.integers(2, 7))), tuple(samples)),
                {"t": teacher} if taught else {},
            )
        )
    lessons = make_lessons(rated, EVERYTHING.loss, norm_length=8, teachers={"t": 1.0})
    reference = [[Scores(logps=s.logps - 0.1) for s in tokens.samples] for tokens, _ in groups]
    return [
        GroupData(tokens=t, lessons=x, teachers=teach, reference=r)
        for (t, teach), x, r in zip(groups, lessons, reference, strict=True)
    ]


def fresh_model():
    model = Transformer(MODEL)
    model.init_weights(torch.Generator().manual_seed(5))
    return model


def gradients(micros, config=EVERYTHING):
    """Of the whole step, in one process. No clipping, so that .grad is the gradient itself."""
    cfg = replace(config.trainer, clip_grad=0.0)
    model = fresh_model()
    state = TrainState(model=model, optimizer=make_optimizer(model, cfg), version=0)
    _, metrics = train_step(state, micros, make_objective(config), cfg)
    return {n: p.grad.clone() for n, p in model.named_parameters()}, metrics


def whole(groups):
    places = [(g, s) for g in range(len(groups)) for s in range(4)]
    return [build_micro(places, dict(enumerate(groups)), torch.device("cpu"), current=3)]


def split(groups, ranks, cap, rank=0, reverse=False):
    lengths = [[len(d.tokens.prompt_ids) + len(s.tokens) for s in d.tokens.samples] for d in groups]
    owners = plan_ranks(lengths, ranks)
    micros = plan_micros(lengths, owners, cap)[rank]
    mine = {g: groups[g] for g in owners[rank]}
    return [build_micro(m[::-1] if reverse else m, mine, torch.device("cpu"), current=3) for m in micros]


def assert_same(a, b):
    for name in a:
        scale = a[name].abs().max()
        assert (a[name] - b[name]).abs().max() <= RTOL * scale, name


FUSED = replace(EVERYTHING, loss=replace(EVERYTHING.loss, distill=0.0), correction=Correction(weight="tis"))
FUSED = replace(FUSED, loss=replace(FUSED.loss, form="reinforce"))
SURVEYED = replace(
    EVERYTHING,
    loss=replace(EVERYTHING.loss, form="kl_cov", cov_ratio=0.3),
    correction=Correction(prox="loglinear", weight="tis", normalise=True, reject="m2po", keep_high=0.5),
)
