"""The rehearsal: afterwards nothing is compiled any more, and nothing has changed."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from experiments.genrm_grpo import CONFIG
from models.parallelise import parallelise
from rl import teaching
from rl.actors.trainer import TrainerRank
from rl.batch import GroupTokens, build_micro
from rl.config import Correction, Loss, Teacher
from rl.errand import Errand
from rl.lessons import Rated, make_lessons
from rl.objective import make_objective
from rl.packing import bucket, plan_micros
from rl.rehearsal import fill, made_up, n_tokens, rehearse, rows, teacher_sets
from rl.step import TrainState, make_optimizer, train_step
from rl.types import Completion, Scores
from tests.ranks import spawn
from tests.rl.steps import EVERYTHING, MODEL, fresh_model, make_groups, split
from tests.rl.test_synchronous import tiny_bundle

TWO = {name: Teacher(keys=(name,)) for name in "ab"}
BOTH = {name: Teacher() for name in "ab"}
PROMPTS = (3, 9, 20)


def config(micro_tokens=1024, share_prompt=False, stream=False, teachers=None, fix=None, **loss):
    trainer = replace(
        CONFIG.trainer, steps=9, prompts=12, compile=True, micro_tokens=micro_tokens, stream=stream,
        share_prompt=share_prompt,
    )  # fmt: skip
    sampler = replace(CONFIG.sampler, samples=4, max_tokens=8)
    changes = {"loss": Loss(**loss), "correction": fix or Correction(), "teachers": teachers or {}}
    return replace(CONFIG, trainer=trainer, sampler=sampler, **changes)


def started(cfg):
    torch._dynamo.reset()
    rank = TrainerRank(tiny_bundle(), cfg, rank=0, version=2, prompts=PROMPTS)
    return rank, rank.start(*rank.rendezvous())


def errand(cfg, vocab, n_groups, longest, seed, empty=0):
    """A step of random groups, as the controller hands it out; with an odd seed all but one have one key.
    empty: micro-batches without a sample."""
    rng, loss = np.random.default_rng(seed), cfg.loss
    keys = sorted({key for teacher in cfg.teachers.values() for key in teacher.keys} or {""})
    arrays, rated, lengths, prompts = [], [], [], []
    for _ in range(n_groups):
        prompt = int(rng.integers(PROMPTS[0], PROMPTS[-1]))
        key = keys[-1 if rated else 0] if seed % 2 else keys[rng.integers(len(keys))]
        counts = rng.integers(1, longest + 1, cfg.sampler.samples).tolist()
        samples = tuple(
            Completion(tokens=rng.integers(0, vocab, n).astype(np.int32), finish="stop",
                       logps=-rng.random(n).astype(np.float32), versions=np.full(n, 2, np.int32))
            for n in counts
        )  # fmt: skip
        names = teaching.teachers_of(cfg, key) if cfg.uses_teachers else ()
        arrays.append(GroupTokens(rng.integers(0, vocab, prompt).astype(np.int32), samples))
        arrays += [[said(loss, rng, n, vocab) for n in counts] for _ in names]
        arrays += [[said(Loss(), rng, n, vocab) for n in counts]] if cfg.uses_reference else []
        rewards = tuple(float(x) for x in rng.random(len(counts)))
        rated.append(Rated(n_tokens=tuple(counts), rewards=rewards, teachers=names))
        lengths.append([prompt + n for n in counts])
        prompts.append(prompt)
    lessons = make_lessons(
        rated, loss, norm_length=8, teachers=teaching.weights(cfg), counted=not cfg.trainer.stream
    )
    (micros,) = plan_micros(
        lengths, [range(n_groups)], cfg.trainer.micro_tokens, prompts=prompts,
        share_prompt=cfg.trainer.share_prompt,
    )  # fmt: skip
    work = Errand(
        groups=tuple(range(n_groups)), micros=(*micros, *[()] * empty), lessons=tuple(lessons),
        teachers=tuple(r.teachers for r in rated), has_reference=cfg.uses_reference,
    )  # fmt: skip
    return work, arrays


def said(loss, rng, n, vocab):
    logp = np.log(rng.dirichlet(np.ones(vocab), n)).astype(np.float32)
    if not loss.distill or loss.distill_form == "advantage":
        return Scores(logps=logp[:, 0])
    if not loss.distill_top_k:
        return Scores(logps=logp[:, 0], full=logp)
    ids = np.argsort(-logp, axis=-1)[:, : loss.distill_top_k].astype(np.int32)
    return Scores(logps=logp[:, 0], top_ids=ids, top_logps=np.take_along_axis(logp, ids, -1))


CASES = {
    "grpo": config(),
    "shared prompts, reference": config(share_prompt=True, kl=0.1),
    "a teacher's whole rows": config(distill=0.5, teachers={"t": Teacher(keys=("",))}),
    "two teachers, sampled": config(distill=0.5, distill_form="advantage", teachers=TWO),
    "two teachers' whole rows": config(distill=0.5, teachers=TWO),
    "by sequence": config(form="gspo"),
    "survey": config(form="kl_cov", cov_ratio=0.3, share_prompt=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("cfg", CASES.values(), ids=CASES.keys())
def test_steps_of_any_lengths_compile_nothing_after_a_rehearsal(cfg):
    rank, how = started(cfg)
    vocab = rank.bundle.cfg.vocab_size
    try:
        assert "graphs compiled in" in how and ", 0 graphs" not in how
        seen = set()
        for seed, (n_groups, longest) in enumerate([(12, 8), (12, 8), (2, 3), (5, 8), (12, 2), (1, 1)]):
            work, arrays = errand(cfg, vocab, n_groups, longest, seed)
            for micro in rank._micros(work, arrays):
                seen.add((len(micro.ids), len(micro.target), micro.layout.max_q, len(micro.layout.cu_q)))
            metrics = rank.step(work, *arrays)
            assert metrics["compile/recompiles"] == 0, (n_groups, longest)
        for lengths in zip(*seen, strict=True):
            assert len(set(lengths)) > 1
    finally:
        rank.stop()


@pytest.mark.slow
def test_a_step_that_comes_in_parts_and_several_micro_batches_compile_nothing_either():
    cfg = config(micro_tokens=256, stream=True)
    rank, _ = started(cfg)
    vocab = rank.bundle.cfg.vocab_size
    try:
        for seed in (1, 2):
            work, arrays = errand(cfg, vocab, 6, 8, seed)
            assert len(work.micros) > 1
            rank.feed(replace(work, last=False), *arrays)
            work, arrays = errand(cfg, vocab, 1, 4, seed)
            rank.feed(work, *arrays)
            assert rank.finish(0.1)["compile/recompiles"] == 0
    finally:
        rank.stop()


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"form": "kl_cov"}, {"fix": Correction(reject="m2po")}])
def test_a_look_at_the_whole_step_compiles_nothing_where_steps_grow(how):
    cfg = config(**how)
    rank, _ = started(cfg)
    try:
        for seed, (n_groups, longest, micros) in enumerate([(4, 3, 1), (24, 8, 2), (4, 4, 1)]):
            work, arrays = errand(cfg, rank.bundle.cfg.vocab_size, n_groups, longest, seed)
            assert len(work.micros) == micros
            assert rank.step(work, *arrays)["compile/recompiles"] == 0
    finally:
        rank.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "shared prompts, reference", "by sequence", "survey"])
def test_several_micro_batches_and_an_empty_one_compile_nothing_either(name):
    cfg = replace(CASES[name], trainer=replace(CASES[name].trainer, micro_tokens=256))
    rank, _ = started(cfg)
    try:
        work, arrays = errand(cfg, rank.bundle.cfg.vocab_size, 12, 8, 0, empty=1)
        assert len(work.micros) > 2 and not work.micros[-1]
        assert rank.step(work, *arrays)["compile/recompiles"] == 0
    finally:
        rank.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a teacher's whole rows", "two teachers, sampled"])
def test_a_rank_of_several_rehearses_a_row_without_any_teacher(name):
    cfg = CASES[name]
    rank, _ = started(cfg)
    vocab, two = rank.bundle.cfg.vocab_size, replace(cfg, trainer=replace(cfg.trainer, ranks=2))
    try:
        graphs, _ = rehearse(rank.state, rank.objective, two, rank._build, PROMPTS, vocab)
        assert graphs > 0
        work, arrays = errand(cfg, vocab, 5, 8, 0, empty=1)
        assert rank.step(work, *arrays)["compile/recompiles"] == 0
    finally:
        rank.stop()


def test_weights_optimizer_version_and_randomness_are_those_of_before():
    cfg = config(form="kl_cov", cov_ratio=0.3)
    rank, _ = started(replace(cfg, trainer=replace(cfg.trainer, compile=False)))
    vocab, wanted = rank.bundle.cfg.vocab_size, tiny_bundle().weights
    try:
        rank.step(*_flat(errand(cfg, vocab, 3, 8, 0)))  # moments that could be lost
        before = _everything(rank)
        random, version = torch.get_rng_state(), rank.state.version
        rehearse(rank.state, rank.objective, cfg, rank._build, PROMPTS, vocab)
        assert rank.state.version == version == 3 and torch.equal(torch.get_rng_state(), random)
        after = _everything(rank)
        assert before.keys() == after.keys() and len(after) > 2 * len(wanted)
        for name, value in before.items():
            assert torch.equal(value, after[name]), name
        assert all(p.grad is None for p in rank.state.model.parameters())
    finally:
        rank.stop()


def _flat(step):
    return step[0], *step[1]


def _everything(rank):
    optimizer = rank.state.optimizer.state_dict()["state"]
    moments = {f"{i}/{k}": v for i, s in optimizer.items() for k, v in s.items()}
    found = {**rank.state.model.state_dict(), **moments}
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in found.items()}


def _stepped(rank, ranks, folder, param_dtype, rehearsed):
    model = parallelise(
        fresh_model(), DeviceMesh("cpu", list(range(ranks))), compile=False, param_dtype=param_dtype
    )
    trainer = replace(EVERYTHING.trainer, ranks=ranks, prompts=8, micro_tokens=256, stream=True)
    sampler = replace(EVERYTHING.sampler, samples=4, max_tokens=8)
    cfg = replace(EVERYTHING, trainer=trainer, sampler=sampler)
    state = TrainState(model=model, optimizer=make_optimizer(model, trainer), version=3)
    objective = make_objective(cfg)

    def build(places, groups):
        return build_micro(places, groups, torch.device("cpu"), current=3, bucket=bucket(256))

    if rehearsed:
        graphs, _ = rehearse(state, objective, cfg, build, PROMPTS, MODEL.vocab_size)
        assert graphs == 0
    for _ in range(2):
        state, metrics = train_step(state, split(make_groups(5), ranks, 40, rank=rank), objective, trainer)
    weights = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    return weights | {name: torch.tensor(value) for name, value in metrics.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_step_as_without_a_rehearsal(tmp_path, dtype):
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    expected = spawn(2, tmp_path / "without", _stepped, dtype, False)
    got = spawn(2, tmp_path / "with", _stepped, dtype, True)
    assert expected.keys() == got.keys() and "train/grad_norm" in got
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name


def test_a_trainer_that_does_not_compile_rehearses_nothing(monkeypatch):
    monkeypatch.setattr("rl.actors.trainer.rehearse", lambda *_: pytest.fail("it rehearsed"))
    cfg = config()
    rank, how = started(replace(cfg, trainer=replace(cfg.trainer, compile=None, device="cpu")))
    rank.stop()
    assert "graphs" not in how


def test_a_rehearsal_that_fails_says_at_which_size():
    cfg = config()
    rank, _ = started(replace(cfg, trainer=replace(cfg.trainer, compile=False)))

    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    broken = replace_objective(rank.objective, full)
    try:
        with pytest.raises(RuntimeError, match=r"rehearsal: .* tokens, .* trained, failed: lower trainer"):
            rehearse(rank.state, broken, cfg, rank._build, PROMPTS, 16)
    finally:
        rank.stop()


def replace_objective(objective, loss):
    return type(objective)(loss, objective.survey, objective.temperature)


def test_rows_have_all_sizes_the_largest_second_and_none_beyond_the_cap():
    for cfg in (config(2048), config(2048, share_prompt=True), config(2048, distill=0.5, teachers=TWO)):
        cfg = replace(cfg, trainer=replace(cfg.trainer, prompts=99))
        size, found = bucket(2048), [n_tokens(row) for row in rows(cfg, PROMPTS)]
        assert {-(-n // size) for n in found} == set(range(1, 2048 // size + 1))
        assert max(found) == found[1] <= 2048 and found[0] <= size


def test_a_row_is_not_made_fuller_than_the_batch_can_make_it():
    cfg = config(micro_tokens=40_960)
    most = 12 * 4 * (PROMPTS[-1] + 8)
    assert most - 1 <= max(map(n_tokens, rows(cfg, PROMPTS))) <= most
    trained = [sum(sum(group.answers) for group in row) for row in rows(cfg, PROMPTS)]
    assert max(trained) <= 12 * 4 * 8


@pytest.mark.parametrize("tokens", [2, 3, 17, 128, 1000])
@pytest.mark.parametrize("per", [1, 4])
def test_what_is_filled_has_so_many_tokens_and_no_answer_is_too_long(tokens, per):
    groups = fill(tokens, 9, 8, per)
    assert tokens - 1 <= n_tokens(groups) <= tokens
    assert all(1 <= n <= 8 for group in groups for n in group.answers)
    assert all(1 <= group.prompt <= 9 and 1 <= len(group.answers) <= per for group in groups)


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_any_of_the_teachers_meet_in_rows_and_each_with_nearly_all_tokens(names):
    teachers = {name: Teacher(keys=(name,)) for name in names}
    cfg = config(distill=0.5, teachers=teachers)
    assert teacher_sets(cfg) == [(name,) for name in names]
    size, met = bucket(cfg.trainer.micro_tokens), set()
    for row in rows(cfg, PROMPTS):
        tokens = [sum(sum(g.answers) for g in row if g.teachers == (name,)) for name in names]
        whole = [n > 0 and -(-n // size) == -(-sum(tokens) // size) for n in tokens]
        met.add((tuple(n > 0 for n in tokens), tuple(whole)))
    some = [on for on in product((True, False), repeat=len(names)) if any(on)]
    assert {on for on, _ in met} == set(some)
    for on in some:  # of those who meet none, any one or all have as many buckets as all
        alone = [tuple(i == j for j in range(len(names))) for i in range(len(names)) if on[i]]
        assert {(on, of) for of in (*alone, on)} <= met
        assert sum(on) == 1 or (on, (False,) * len(names)) in met


def test_of_many_teachers_all_meet_or_one_is_alone():
    assert teacher_sets(config()) == [()]
    assert teacher_sets(config(distill=0.5, distill_mix="arithmetic", teachers=BOTH)) == [("a", "b")]
    cfg = config(distill=0.5, teachers={name: Teacher(keys=(name,)) for name in "abcde"})
    assert {len({group.teachers for group in row}) for row in rows(cfg, PROMPTS)} == {1, 5}


def test_teachers_send_what_the_config_has_them_send():
    for loss, kinds in (
        ({}, (True, False)),
        ({"distill_top_k": 3}, (False, True)),
        ({"distill_form": "advantage"}, (False, False)),
    ):
        cfg = config(distill=0.5, teachers=TWO, **loss)
        _, groups = made_up(cfg, rows(cfg, PROMPTS)[0], 19, 5)
        (scores, *_) = groups[0].teachers["a"]
        assert (scores.full is not None, scores.top_ids is not None) == kinds
    mixed = config(distill=0.5, distill_mix="geometric", teachers=BOTH)
    teachers = made_up(mixed, rows(mixed, PROMPTS)[0], 19, 5)[1][0].teachers
    assert teachers.keys() == {"mixture", "a", "b"}
    assert teachers["mixture"][0].full is not None and teachers["a"][0].full is None
