"""Several teachers in one objective: what each mode computes, and which mistakes it does not repeat."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import losses
from rl.batch import GroupData, GroupTokens, build_micro, combine
from rl.lessons import Rated, make_lessons
from rl.objective import make_objective
from rl.step import attend_packed
from rl.survey import Survey
from rl.types import Completion, Scores
from tests.rl.steps import assert_same, fresh_model, gradients, whole
from tests.rl.taught import CASES, CPU, MIXES, WEIGHT, V, batch, config, logits_of, said_of, scores_of, served

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
