"""Several teachers in one objective: what each mode computes, and what it must not depend on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import losses
from experiments.opd import CONFIG as OPD
from rl.batch import GroupData, GroupTokens, build_micro, combine
from rl.config import Correction, Loss, Teacher
from rl.lessons import Rated, make_lessons
from rl.objective import make_objective
from rl.step import TrainState, attend_packed, make_optimizer, train_step
from rl.survey import Survey
from rl.types import Completion, Scores
from tests.rl.test_step import assert_same, fresh_model, gradients, split, whole

CPU = torch.device("cpu")
V, G = 19, 4
WEIGHT = {"a": 3.0, "b": 1.0}
MIXES = ["routed", "sum", "arithmetic", "geometric"]
ROUTED = [("a",), ("b",), ("b",), ("a",)]
BOTH = [("a", "b")] * len(ROUTED)


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


# ── What each mode computes ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mix", "top_k"), [*((mix, 0) for mix in MIXES), ("routed", 4), ("sum", 4)])
@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_value_and_gradient_are_those_of_the_equation(mix, kind, top_k):
    cfg = config(distill_mix=mix, distill_kind=kind, distill_top_k=top_k)
    raw = batch(replace(cfg, loss=replace(cfg.loss, distill_mix="sum")), served(cfg))
    (micro,) = whole(raw)  # every teacher's own rows
    model = fresh_model()
    logits = logits_of(model, micro)
    each = {}
    for name, t in micro.teachers.items():
        on = torch.ones_like(t.at, dtype=torch.bool)
        if t.ids is None:
            each[name], _ = losses.full_divergence(logits[t.at], t.rows, on, kind=kind)
        else:
            each[name], _ = losses.topk_divergence(logits[t.at], t.ids, t.rows, on, kind=kind)
    if mix in ("routed", "sum"):
        expected = (3 * each["a"].mean() + each["b"].mean()) / 4
        if mix == "sum":
            same = losses.average_teachers(torch.stack([each["a"], each["b"]]), [3.0, 1.0]).mean()
            torch.testing.assert_close(same, expected)
    else:
        rows = torch.stack([micro.teachers[k].rows for k in ("a", "b")])
        mixed = losses.mix_teachers(rows, [3.0, 1.0], kind=mix)
        every = torch.ones(len(logits), dtype=torch.bool)
        expected = losses.full_divergence(logits, mixed, every, kind=kind)[0].mean()
    (0.5 * expected).backward()
    got, metrics = gradients(whole(batch(cfg)), cfg)
    assert metrics["loss/total"] == pytest.approx(0.5 * expected.item(), rel=1e-5)
    assert_same({n: p.grad for n, p in model.named_parameters()}, got)
    if mix in ("routed", "sum"):
        for name in each:
            assert metrics[f"loss/distill/{name}"] == pytest.approx(each[name].mean().item(), rel=1e-5)
    else:
        assert metrics["loss/distill/mixture"] == metrics["loss/distill"]
        gap = logits.log_softmax(-1).gather(-1, micro.target[:, None])[:, 0] - micro.teachers["a"].logp
        assert metrics["loss/distill/a"] == pytest.approx(gap.mean().item(), rel=1e-4)


def enumerated(cfg, student=False):
    """One prefix and every token of the vocabulary after it: an expectation over the sampled token is a sum
    with weights S(a). Returns that micro-batch, and one with the prefix alone."""
    model = fresh_model()
    prompt, tokens = np.array([3, 7, 11]), np.arange(V)
    with torch.no_grad():
        prefix = build_micro([(0, 0)], {0: one(cfg, prompt, tokens[:1], {})}, CPU, current=0)
        log_s = logits_of(model, prefix)[0].log_softmax(-1)
    names = ("a",) if cfg.loss.distill_mix == "routed" else ("a", "b")
    log_t = {
        k: log_s.numpy() if student else np.log(np.random.default_rng(ord(k)).dirichlet(np.ones(V)))
        for k in names
    }
    alone = build_micro([(0, 0)], {0: one(cfg, prompt, tokens[:1], log_t)}, CPU, current=0)
    micro = build_micro([(0, i) for i in range(V)], {0: one(cfg, prompt, tokens, log_t)}, CPU, current=0)
    s = log_s.exp()
    drawn = {k: replace(t, weight=s * t.weight * V) for k, t in micro.teachers.items()}
    everyone = replace(micro, weight={**micro.weight, "policy": s}, teachers=drawn, logp_mu=log_s)
    return everyone, replace(alone, logp_mu=log_s[:1])


def one(cfg, prompt, tokens, log_t):
    samples = tuple(
        Completion(tokens=np.array([a], np.int32), logps=np.zeros(1, np.float32),
                   versions=np.zeros(1, np.int32), finish="stop")
        for a in tokens
    )  # fmt: skip
    said = {k: [scores_of(cfg, t[None], s.tokens) for s in samples] for k, t in log_t.items()}
    rated = Rated(n_tokens=(1,) * len(samples), rewards=(None,) * len(samples), teachers=tuple(log_t))
    (lessons,) = make_lessons([rated], cfg.loss, norm_length=8, teachers={"a": 3.0, "b": 1.0})
    mixed = combine(cfg.loss.distill_mix, {"a": 3.0, "b": 1.0}, said)
    return GroupData(tokens=GroupTokens(prompt, samples), lessons=lessons, teachers=mixed)


@pytest.mark.parametrize("mix", MIXES)
def test_o038_the_expected_gradient_of_the_advantage_form_is_that_of_the_reverse_kl(mix):
    sampled = config(distill_mix=mix, distill_form="advantage")
    exact = config(distill_mix=mix)
    everyone, _ = enumerated(sampled)
    _, alone = enumerated(exact)
    got, _ = gradients([everyone], sampled)
    expected, _ = gradients([alone], exact)
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    assert_same(expected, got)


@pytest.mark.parametrize(
    ("mix", "kind"),
    [*((mix, "reverse") for mix in MIXES)]
    + [("routed", kind) for kind in ("forward", "skew_reverse", "skew_forward", "jsd", "jsd_gkd")],
)
def test_a_teacher_that_is_the_student_gives_no_gradient(mix, kind):
    cfg = config(distill_mix=mix, distill_kind=kind)
    other, _ = gradients([enumerated(cfg)[1]], cfg)
    same, metrics = gradients([enumerated(cfg, student=True)[1]], cfg)
    assert abs(metrics["loss/distill"]) < 1e-6
    scale = max(g.abs().max() for g in other.values())
    assert max(g.abs().max() for g in same.values()) < 1e-5 * scale


@pytest.mark.parametrize("mix", ["routed", "sum"])
def test_a_teacher_that_is_the_student_gives_no_gradient_by_its_best_tokens_and_the_tail(mix):
    cfg = config(distill_mix=mix, distill_top_k=4)
    other, _ = gradients([enumerated(cfg)[1]], cfg)
    same, _ = gradients([enumerated(cfg, student=True)[1]], cfg)
    scale = max(g.abs().max() for g in other.values())
    assert max(g.abs().max() for g in same.values()) < 1e-4 * scale


@pytest.mark.parametrize("mix", MIXES)
def test_a_teacher_that_is_the_student_gives_no_expected_gradient_from_sampled_tokens(mix):
    cfg = config(distill_mix=mix, distill_form="advantage")
    other, _ = gradients([enumerated(cfg)[0]], cfg)
    same, _ = gradients([enumerated(cfg, student=True)[0]], cfg)
    scale = max(g.abs().max() for g in other.values())
    assert max(g.abs().max() for g in same.values()) < 1e-5 * scale


# ── What it must not depend on ────────────────────────────────────────────────────────────────────


def trained(cfg, groups, steps=2):
    model = fresh_model()
    state = TrainState(model=model, optimizer=make_optimizer(model, cfg.trainer), version=0)
    for _ in range(steps):
        state, _ = train_step(state, split(groups, 1, 120), make_objective(cfg), cfg.trainer)
    return model.state_dict()


@pytest.mark.parametrize("form", ["divergence", "advantage"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_coefficient_of_zero_is_pure_grpo_bit_for_bit(mix, form):
    cfg = config(distill=0.0, policy=1.0, distill_mix=mix, distill_form=form)
    pure = trained(replace(cfg, teachers={}), batch(cfg, [()] * len(ROUTED), rewards=True))
    silent = trained(cfg, batch(cfg, rewards=True))
    taught = replace(cfg, loss=replace(cfg.loss, distill=0.5))
    loud = trained(taught, batch(taught, rewards=True))
    assert all(torch.equal(pure[n], silent[n]) for n in pure)
    assert any(not torch.equal(pure[n], loud[n]) for n in pure)


@pytest.mark.parametrize("form", ["divergence", "advantage"])
def test_removing_one_teachers_prompts_changes_nothing_for_the_others(form):
    cfg = config(distill_form=form)
    everyone = batch(cfg)
    only = {k: batch(cfg, [names if names == (k,) else None for names in ROUTED]) for k in ("a", "b")}
    left = [x.distill for g in everyone for x in g.lessons if "a" in x.distill]
    assert left == [x.distill for g in only["a"] for x in g.lessons]
    total, metrics = gradients(whole(everyone), cfg)
    part, alone = zip(*(gradients(whole(only[k]), cfg) for k in ("a", "b")), strict=True)
    assert_same({n: part[0][n] + part[1][n] for n in total}, total)
    for k, of in zip(("a", "b"), alone, strict=True):
        assert of[f"loss/distill/{k}"] == pytest.approx(metrics[f"loss/distill/{k}"], rel=1e-5)


CASES = [
    {"distill_mix": mix, "distill_form": form} for mix in MIXES for form in ("divergence", "advantage")
] + [{"distill_mix": mix, "distill_top_k": 4} for mix in ("routed", "sum")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_micro_batches_and_ranks_do_not_change_the_gradient(case):
    cfg = config(policy=1.0, **case)
    groups = batch(cfg, rewards=True)
    expected, metrics = gradients(whole(groups), cfg)
    got, split_metrics = gradients(split(groups, 1, 60, reverse=True), cfg)
    assert_same(expected, got)
    for name, value in metrics.items():
        assert split_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    ranks = [gradients(split(groups, 2, 100, rank=rank), cfg)[0] for rank in (0, 1)]
    assert_same(expected, {n: ranks[0][n] + ranks[1][n] for n in expected})


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_the_order_of_the_teachers_is_irrelevant_to_the_bit(case):
    cfg = config(**case)
    turned = config(weight=dict(reversed(WEIGHT.items())), **case)
    expected, metrics = gradients(whole(batch(cfg)), cfg)
    got, turned_metrics = gradients(whole(batch(turned, [n[::-1] for n in served(cfg)])), turned)
    assert metrics == turned_metrics and all(torch.equal(expected[n], got[n]) for n in expected)


def test_nan_from_one_teacher_is_not_in_another_ones_rows():
    cfg = config()

    def broken(name, samples, rng):
        said = said_of(cfg, samples, rng)
        return [replace(s, full=s.full * np.nan) for s in said] if name == "b" else said

    _, metrics = gradients(whole(batch(cfg)), cfg)
    _, with_nan = gradients(whole(batch(cfg, scores=broken)), cfg)
    assert with_nan["loss/distill/a"] == metrics["loss/distill/a"] and np.isnan(with_nan["loss/distill/b"])


def test_a_teacher_that_excludes_the_sampled_token_is_outvoted_in_an_arithmetic_mixture():
    cfg = config(distill_mix="arithmetic", distill_form="advantage")

    def excluding(name, samples, rng):
        said = said_of(cfg, samples, rng)
        return [replace(s, logps=s.logps - np.float32(np.inf)) for s in said] if name == "b" else said

    got, metrics = gradients(whole(batch(cfg, scores=excluding)), cfg)
    assert all(g.isfinite().all() for g in got.values()) and metrics["loss/distill/b"] == np.inf


def test_weights_of_teachers_are_relative_and_scale_their_own_terms():
    one_to_one, metrics = gradients(whole(batch(c := config({"a": 1.0, "b": 1.0}))), c)
    doubled, _ = gradients(whole(batch(c := config({"a": 2.0, "b": 2.0}))), c)
    assert_same(one_to_one, doubled)
    _, three = gradients(whole(batch(c := config())), c)
    a, b = metrics["loss/distill/a"], metrics["loss/distill/b"]
    assert metrics["loss/total"] == pytest.approx(0.5 * (a + b) / 2, rel=1e-5)
    assert three["loss/total"] == pytest.approx(0.5 * (3 * a + b) / 4, rel=1e-5)


# ── Staleness: what is rejected and what is weighted ──────────────────────────────────────────────


def shifted(groups, by):
    """Log-probs of the sampler = the student's own + by(g, s), so that every ratio is known."""
    (micro,) = whole(groups)
    with torch.no_grad():
        logp = logits_of(fresh_model(), micro).log_softmax(-1).gather(-1, micro.target[:, None])[:, 0]
    own = iter(logp.split(torch.bincount(micro.row).tolist()))
    return [
        replace(data, tokens=replace(data.tokens, samples=tuple(
            replace(sample, logps=next(own).numpy() + np.float32(by(g, s)))
            for s, sample in enumerate(data.tokens.samples)
        )))
        for g, data in enumerate(groups)
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_a_rejected_token_is_a_zero_that_counts_whatever_the_teachers_say_of_it(case):
    fix = Correction(reject="token", keep_low=0.5, keep_high=2.0)
    cfg = config(fix=fix, **case)
    stale = lambda g, s: 5.0 if s == 1 else 0.0  # noqa: E731

    def broken(name, samples, rng):
        said = said_of(cfg, samples, rng)
        bad = {f: getattr(said[1], f) * np.float32(np.nan) for f in ("logps", "top_logps", "full")
               if getattr(said[1], f) is not None}  # fmt: skip
        return [said[0], replace(said[1], **bad), *said[2:]]

    groups = shifted(batch(cfg), stale)
    expected, metrics = gradients(whole(groups), cfg)
    with_nan, _ = gradients(whole(shifted(batch(cfg, scores=broken), stale)), cfg)
    assert all(torch.equal(expected[n], with_nan[n]) for n in expected)
    n = [[len(s.tokens) for s in g.tokens.samples] for g in groups]
    assert metrics["correction/rejected"] == pytest.approx(sum(x[1] for x in n) / sum(map(sum, n)))
    rest = [(g, s) for g in range(len(groups)) for s in range(G) if s != 1]
    without = build_micro(rest, dict(enumerate(groups)), CPU, current=3)  # the same weights, fewer tokens
    assert_same(gradients([without], replace(cfg, correction=Correction()))[0], expected)


@pytest.mark.parametrize("mix", MIXES)
def test_the_importance_weight_reaches_the_advantage_form_and_leaves_an_exact_divergence_alone(mix):
    fix, half = Correction(weight="tis"), float(np.log(2.0))  # sampled twice as often as now: weight 1/2
    for form, factor in (("advantage", 0.5), ("divergence", 1.0)):
        cfg = config(distill_mix=mix, distill_form=form, form="reinforce")
        groups = batch(cfg)
        plain, _ = gradients(whole(shifted(groups, lambda g, s: half)), cfg)
        weighted, _ = gradients(whole(shifted(groups, lambda g, s: half)), replace(cfg, correction=fix))
        assert_same({n: factor * g for n, g in plain.items()}, weighted)


# ── Errors and public cases ───────────────────────────────────────────────────────────────────────


def test_o035_distillation_is_no_no_op_and_a_teacher_without_rows_is_an_error():
    cfg = config(policy=1.0)
    _, on = gradients(whole(batch(cfg, rewards=True)), cfg)
    off_cfg = replace(cfg, loss=replace(cfg.loss, distill=0.0))
    _, off = gradients(whole(batch(off_cfg, rewards=True)), off_cfg)
    assert on["loss/total"] != off["loss/total"] and "loss/distill" in on and "loss/distill" not in off

    def bare(name, samples, rng):
        return [Scores(logps=s.logps) for s in said_of(cfg, samples, rng)]

    with pytest.raises(ValueError, match="wants rows"):
        gradients(whole(batch(cfg, scores=bare)), cfg)
    with pytest.raises(ValueError, match=r"\['c'\] have no weight"):
        batch(cfg, [("c",)])


def test_o041_the_loss_does_not_depend_on_how_often_a_row_is_there():
    cfg = config(distill=1.0)
    once = one(cfg, np.array([3, 7, 11]), np.arange(4), {"a": np.log(np.full(V, 1 / V))})
    thrice = one(cfg, np.array([3, 7, 11]), np.tile(np.arange(4), 3), {"a": np.log(np.full(V, 1 / V))})
    values = [
        gradients([build_micro([(0, s) for s in range(n)], {0: data}, CPU, current=0)], cfg)[1]["loss/total"]
        for data, n in ((once, 4), (thrice, 12))
    ]
    assert values[0] > 0 and values[0] == pytest.approx(values[1], rel=1e-5)


def test_teachers_of_one_mixture_must_score_the_same_tokens():
    short = [Scores(logps=np.zeros(2, np.float32))], [Scores(logps=np.zeros(3, np.float32))]
    with pytest.raises(ValueError, match=r"teachers sent \[\(2,\), \(3,\)\]"):
        combine("arithmetic", WEIGHT, {"a": short[0], "b": short[1]})


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("fuse", [False, True])
def test_the_loss_is_one_graph(case, fuse, monkeypatch):
    cfg = config(**case)
    (micro,) = whole(batch(cfg))
    model, graphs = fresh_model(), []
    hidden = model(micro.ids, micro.layout.positions, attend_packed(micro.layout))[micro.select].detach()
    expected, _ = make_objective(cfg, fuse=fuse).loss(hidden, model.head, micro, Survey())

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    def compiled(function, **how):
        return torch_compile(function, **{**how, "fullgraph": True, "backend": counted})

    torch._dynamo.reset()
    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compiled)
    got, _ = make_objective(cfg, fuse=fuse, compile=True).loss(hidden, model.head, micro, Survey())
    torch.testing.assert_close(got, expected)
    assert len(graphs) == 1
