"""Teachers around the objective: who is asked, what is sent and reported, and whose vocabulary fits."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.opd import CONFIG as OPD
from models.attention import make_layout
from models.config import ModelConfig
from models.tokenizer import char_tokenizer
from models.transformer import Transformer
from rl.actors.teacher import Teacher as TeacherActor
from rl.batch import GroupTokens
from rl.check import check
from rl.config import ConfigError, Loss, Teacher
from rl.engines.make import Bundle
from rl.errand import Errand, unpack
from rl.follow import follow
from rl.lessons import Rated, make_lessons
from rl.objective import describe
from rl.roles import Local, Pool, Roles, TrainerGroup
from rl.sources import same_vocabulary
from rl.step import attend_packed
from rl.teaching import MIXTURE, Said, metrics, split, teachers_of, weights
from rl.types import Completion, Prompt, Scores
from tests.rl.fakes import FakeSampler, FakeTrainer

LETTERS = "abcdefghijklm"


def config(mix="routed", teachers=None, **loss):
    teachers = teachers or {"a": Teacher(keys=("x",), weight=3.0), "b": Teacher(keys=("y", "z"))}
    return replace(OPD, teachers=teachers, loss=replace(OPD.loss, distill_mix=mix, **loss))


# ── Who is asked ──────────────────────────────────────────────────────────────────────────────────


def test_routed_prompts_have_the_teacher_of_their_key_and_mixtures_all_that_serve_it():
    cfg = config()
    assert [teachers_of(cfg, key) for key in ("x", "z", "w")] == [("a",), ("b",), ()]
    everywhere = {"b": Teacher(), "a": Teacher(keys=("x",)), "c": Teacher(keys=("y", "x"))}
    for mix in ("arithmetic", "geometric", "sum"):
        cfg = config(mix, everywhere)
        assert teachers_of(cfg, "x") == ("a", "b", "c") and teachers_of(cfg, "y") == ("b", "c")
        assert teachers_of(cfg, "w") == ("b",)
    assert list(weights(config(teachers={"b": Teacher(), "a": Teacher()}))) == ["a", "b"]


class FakeTeacher:
    def __init__(self, value, delay=0.0):
        self.value, self.delay, self.asked = value, delay, 0

    async def teach(self, group):
        self.asked += 1
        await asyncio.sleep(self.delay)
        n = [len(s.tokens) for s in group.samples]
        said = [Scores(logps=np.full(k, self.value, np.float32)) for k in n]
        return Said(n_tokens=sum(n), seconds=self.delay, ahead=self.asked - 1), said


async def sure(metas):
    return True


def followed(cfg, key):
    actors = {"a": FakeTeacher(-1.0, delay=0.02), "b": FakeTeacher(-2.0)}
    roles = Roles(
        trainer=TrainerGroup([Local("trainer-0", FakeTrainer(0))]),
        sampler=Pool([Local("sampler-0", FakeSampler())]),
        teachers={name: Pool([Local(f"teacher/{name}-0", actor)]) for name, actor in actors.items()},
    )
    marks = []
    group = asyncio.run(follow(cfg, roles, Prompt(ids=(1,), text="", key=key), 0, 0, marks.append, sure))
    assert group is not None and marks.count("teach") == 1
    return group, actors


def test_a_group_is_sent_to_its_own_teachers_only_and_brings_their_cost_back():
    group, actors = followed(config(), "y")
    assert (actors["a"].asked, actors["b"].asked) == (0, 1)
    assert group.rated.teachers == ("b",)
    said = group.teachers["b"]
    assert said.n_tokens == 2 * len(group.metas) and said.scores[0].logps.tolist() == [-2.0, -2.0]
    group, actors = followed(config("sum", {"a": Teacher(), "b": Teacher()}), "y")
    assert (actors["a"].asked, actors["b"].asked) == (1, 1)
    assert group.rated.teachers == ("a", "b") and group.teachers["a"].seconds == 0.02


def test_metrics_are_of_each_teacher_and_shares_add_up():
    def said(n, seconds, ahead):
        return Said(n_tokens=n, seconds=seconds, ahead=ahead)

    values = metrics([{"a": said(30, 0.2, 0)}, {"a": said(10, 0.4, 3), "b": said(40, 1.0, 2)}, {}])
    assert values == pytest.approx(
        {
            "teacher/a/tokens": 40, "teacher/a/share": 0.5,
            "teacher/a/latency_s": 0.3, "teacher/a/queue": 1.5,
            "teacher/b/tokens": 40, "teacher/b/share": 0.5,
            "teacher/b/latency_s": 1.0, "teacher/b/queue": 2.0,
        }
    )  # fmt: skip
    assert metrics([]) == {} == metrics([{}])


# ── The pool, split ───────────────────────────────────────────────────────────────────────────────


def test_engines_are_split_by_largest_remainder_and_everyone_has_one():
    assert split(7, {"a": 0.5, "b": 0.3, "c": 0.2}) == {"a": 4, "b": 2, "c": 1}
    assert split(10, {"a": 0.7, "b": 0.3}) == {"a": 7, "b": 3}
    assert split(4, {"a": 99, "b": 1}) == {"a": 3, "b": 1} == split(4, {"a": 1, "b": 0})
    assert split(5, {"b": 1, "a": 1}) == {"a": 3, "b": 2}  # a tie: by name
    assert split(3, {"a": 0, "b": 0}) == {"a": 2, "b": 1}
    for n in range(4, 30):
        parts = split(n, {"a": 5.3, "b": 0.01, "c": 2.2, "d": 1.1})
        assert sum(parts.values()) == n and min(parts.values()) >= 1, parts
    with pytest.raises(ValueError, match=r"3 teachers \(a, b, c\) need one each, got 2"):
        split(2, {"c": 1, "a": 1, "b": 1})


# ── Weights ───────────────────────────────────────────────────────────────────────────────────────


def rated(teachers, n=(2, 4)):
    return Rated(n_tokens=n, rewards=(None,) * len(n), teachers=teachers)


@pytest.mark.parametrize(
    "agg", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant", "prompt_mean"]
)
def test_each_teacher_has_its_own_count_in_every_aggregation(agg):
    loss = Loss(distill=1.0, agg=agg)
    others = [rated(("b",), (7, 9)), rated(()), rated(("b",), (1, 1))]
    with_b = make_lessons([rated(("a",)), *others], loss, norm_length=8, teachers={"a": 3.0, "b": 1.0})
    alone = make_lessons([rated(("a",))], loss, norm_length=8, teachers={"a": 3.0, "b": 1.0})
    assert [x.distill for x in with_b[0]] == [x.distill for x in alone[0]]
    assert all(not x.distill for x in with_b[2])
    if agg != "seq_mean_token_sum" and agg != "constant":  # whose weights do not add up to 1
        assert sum(n * x.distill["a"] for n, x in zip((2, 4), with_b[0], strict=True)) == pytest.approx(0.75)


def test_a_mixture_is_one_teacher_with_one_count_and_its_name_is_its_own():
    loss = Loss(distill=1.0, distill_mix="arithmetic")
    groups = [rated(("a", "b")), rated(("b",), (6, 8)), rated(())]
    lessons = make_lessons(groups, loss, norm_length=8, teachers={"a": 3.0, "b": 1.0})
    assert all(x.distill == {MIXTURE: pytest.approx(1 / 20)} for group in lessons[:2] for x in group)
    assert all(not x.distill.get(MIXTURE) for x in lessons[2])


# ── What is sent, and whose vocabulary ────────────────────────────────────────────────────────────


def bundle(padding=0, tokenizer=None, tied=True, seed=0):
    """Padding rows get large logits: whoever leaves them in, sees it."""
    tokenizer = tokenizer or char_tokenizer(LETTERS)
    cfg = ModelConfig(
        family="llama", vocab_size=tokenizer.vocab_size + padding, d_model=32, n_layers=1, n_heads=2,
        n_kv_heads=2, head_dim=16, d_ff=32, max_len=32, tie_embeddings=tied,
        eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id,
    )  # fmt: skip
    model = Transformer(cfg)
    model.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.head[tokenizer.vocab_size :] *= 50
    state = {n: p.detach().numpy().copy() for n, p in model.state_dict().items()}
    return Bundle(cfg=cfg, weights=state, tokenizer=tokenizer, folder=f"model with {cfg.vocab_size} logits")


def group():
    samples = [[3, 4, 5], [6], [7, 8, 9, 10]]
    return GroupTokens(
        np.array([5, 6], np.int32),
        tuple(
            Completion(tokens=np.array(t, np.int32), logps=np.zeros(len(t), np.float32),
                       versions=np.zeros(len(t), np.int32), finish="stop")
            for t in samples
        ),
    )  # fmt: skip


def taught(which, **how):
    async def run():
        teacher = TeacherActor(which, 8, how.pop("temperature", 1.0), **how)
        await teacher.start()
        await teacher.start()  # as a pool does after failures
        try:
            return await asyncio.gather(teacher.teach(group()), teacher.teach(group()))
        finally:
            await teacher.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_o031_a_teachers_padding_rows_have_no_probability(tied, temperature):
    padded, policy = bundle(padding=5, tied=tied), bundle()
    fitted = same_vocabulary("teacher/a", padded, policy)
    assert fitted.cfg.vocab_size == policy.cfg.vocab_size
    n = policy.cfg.vocab_size
    model = Transformer(padded.cfg)
    model.load_state_dict({k: torch.from_numpy(w.copy()) for k, w in padded.weights.items()})
    (_, full), _ = taught(fitted, temperature=temperature, full=True)
    (_, top), _ = taught(fitted, temperature=temperature, top_k=4)
    (_, sampled), _ = taught(fitted, temperature=temperature)
    for i, sample in enumerate(group().samples):
        ids = torch.tensor([5, 6, *sample.tokens.tolist()])
        layout = make_layout([len(ids)], ids.device)
        with torch.no_grad():
            logits = model.logits(model(ids, layout.positions, attend_packed(layout)))[1:-1]
        assert logits[:, n:].abs().max() > logits[:, :n].abs().max()
        expected = (logits[:, :n] / temperature).log_softmax(-1)
        own = expected.gather(-1, ids[2:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(full[i].full), expected, rtol=1e-4, atol=1e-4)
        best = expected.topk(4, dim=-1)
        assert top[i].top_ids.tolist() == best.indices.tolist()
        np.testing.assert_allclose(top[i].top_logps, best.values, rtol=1e-4, atol=1e-4)
        for scores in (full, top, sampled):
            np.testing.assert_allclose(scores[i].logps, own, rtol=1e-4, atol=1e-4)


def test_what_a_teacher_tells_the_controller():
    (first, scores), (second, _) = taught(bundle())
    assert first.n_tokens == 8 == sum(len(s.logps) for s in scores) and first.scores is None
    assert (first.ahead, second.ahead) == (0, 1) and 0 < first.seconds < 60


def test_a_vocabulary_that_does_not_fit_is_refused_naming_both():
    policy = bundle()
    both = r"teacher/a \(model with \d+ logits\) and the policy \(model with 15 logits\)"
    wider = bundle(padding=3)
    with pytest.raises(ConfigError, match=both.replace("15", "18") + ".* 15 and 18 logits for 15 tokens"):
        same_vocabulary("teacher/a", policy, wider)  # the teacher is the narrow one
    with pytest.raises(ConfigError, match=both + ".* other vocabularies, of 14 and 15 tokens"):
        same_vocabulary("teacher/a", bundle(tokenizer=char_tokenizer(LETTERS[:-1])), policy)
    with pytest.raises(ConfigError, match=both + ".* other vocabularies"):
        same_vocabulary("teacher/a", bundle(tokenizer=char_tokenizer(LETTERS[::-1])), policy)
    with pytest.raises(ConfigError, match=both + ".* other special tokens: .*<end>.*<eos>"):
        same_vocabulary("teacher/a", bundle(tokenizer=char_tokenizer(LETTERS, eos="<end>")), policy)
    assert same_vocabulary("teacher/a", same := bundle(seed=1), policy) is same


# ── On the trainer ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mix", ["routed", "sum", "arithmetic", "geometric"])
def test_a_rank_takes_the_arrays_apart_as_the_controller_put_them_together(mix):
    cfg = config(mix, {"a": Teacher(keys=("x",), weight=3.0), "b": Teacher(keys=("y",))})
    names = [("a",), ("b",)] if mix == "routed" else [("a", "b"), ("b",)]
    value = {"a": -1.0, "b": -2.0}

    def said(name):
        return [Scores(logps=np.full(len(s.tokens), value[name], np.float32)) for s in group().samples]

    rates = [rated(n, (3, 1, 4)) for n in names]
    lessons = make_lessons(rates, cfg.loss, norm_length=8, teachers=weights(cfg))
    arrays = [x for n in names for x in (group(), *(said(name) for name in n))]
    errand = Errand(
        groups=(4, 2), micros=(), lessons=tuple(lessons), teachers=tuple(names), has_reference=False
    )
    groups = unpack(cfg, errand, arrays)
    first = {name: scores[0].logps[0] for name, scores in groups[4].teachers.items()}
    second = {name: scores[0].logps[0] for name, scores in groups[2].teachers.items()}
    if mix in ("routed", "sum"):
        assert first == {name: value[name] for name in names[0]} and second == {"b": -2.0}
        return
    mixed = np.log(0.75 * np.exp(-1) + 0.25 * np.exp(-2)) if mix == "arithmetic" else -1.25
    assert first == {MIXTURE: pytest.approx(mixed), "a": -1.0, "b": -2.0}
    assert second == {MIXTURE: pytest.approx(-2.0), "b": -2.0}


# ── What the run prints ───────────────────────────────────────────────────────────────────────────


PULLED = {"distill_form": "advantage", "policy": 1.0}


@pytest.mark.parametrize(
    ("mix", "loss", "expected"),
    [
        (
            "routed",
            {},
            ["Σ_k w_k mean_k(KL(π ‖ T_k)) / Σ_k w_k over the whole", "x → a (w 3), y|z → b (w 1)"],
        ),
        ("sum", {"distill_top_k": 4}, ["mean_k(KL(π ‖ T_k)) / Σ_k w_k over T_k's 4 best and the tail"]),
        ("arithmetic", {"distill_kind": "forward"}, ["mean(KL(T ‖ π)) over", "T = Σ_k w_k T_k / Σ_k w_k"]),
        ("geometric", {"distill_kind": "jsd"}, ["mean(jsd(π, T)) over", "T = Π_k T_k^(w_k / Σ_k w_k) / Z"]),
        ("routed", PULLED, ["A += 1 Σ_k (w_k / Σ_k w_k) (N / N_k) (log T_k - log π)"]),
        ("geometric", PULLED, ["A += 1 (N / N_T) (log T - log π)", "T = Π_k"]),
    ],
)
def test_the_effective_formula_is_printed(mix, loss, expected):
    cfg = config(mix, **loss)
    check(cfg)
    text = "\n".join(describe(cfg))
    assert all(part in text for part in expected), text
