"""η = 0 is exactly synchronous training: the same weights, bit for bit, as a plain loop without any of the
machinery."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.config import ModelConfig
from models.tokenizer import char_tokenizer
from models.transformer import Transformer
from rl.actors.rollout import Rollout
from rl.actors.trainer import TrainerRank
from rl.batch import GroupData, GroupTokens, build_micro
from rl.config import Staleness
from rl.engines.make import Bundle, make_engine
from rl.lessons import Rated, make_lessons
from rl.objective import make_objective
from rl.packing import plan_micros, plan_ranks
from rl.roles import Local, Pool, Roles, TrainerGroup
from rl.seeds import fold_in
from rl.step import TrainState, make_optimizer, train_step
from rl.sync import SyncError
from rl.types import Prompt, SamplingParams, Score, Verdict
from tests.rl.fakes import finish, make_loop, small

LETTERS = "abcdefghijklmnop"
STEPS = 6


def tiny_bundle() -> Bundle:
    tokenizer = char_tokenizer(LETTERS)
    cfg = ModelConfig(
        family="llama", vocab_size=tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=4, n_kv_heads=4,
        head_dim=8, d_ff=48, max_len=32, tie_embeddings=True,
        eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id,
    )  # fmt: skip
    model = Transformer(cfg)
    model.init_weights(torch.Generator().manual_seed(1))
    weights = {n: p.detach().numpy().copy() for n, p in model.state_dict().items()}
    return Bundle(cfg=cfg, weights=weights, tokenizer=tokenizer, folder="")


def score(text: str) -> float:
    """Share of early letters: something that a random model already gets a bit of."""
    return sum(c in "abcdef" for c in text) / 8


class TextJudge:
    async def start(self) -> None: ...

    async def rate(self, prompt, texts, seeds):
        await asyncio.sleep(0.001 * (seeds[0] % 7))  # groups come back in another order than they were asked
        return [Verdict(outcome=Score(score(t))) for t in texts]

    async def stats(self):
        from tests.rl.fakes import FakeSampler

        return await FakeSampler().stats()


def config():
    cfg = small(steps=STEPS, prompts=4, samples=4, staleness=Staleness(max_age=0))
    return replace(cfg, trainer=replace(cfg.trainer, lr=1e-2, micro_tokens=64))


def plain(cfg, bundle, prompts) -> dict[str, torch.Tensor]:
    """Sample a batch, judge it, step; again. No loop, no ledger, no FSDP."""

    async def sample_batch(version: int, weights) -> list[tuple[tuple[int, ...], GroupTokens]]:
        engine = make_engine(replace(bundle, weights=weights), slots=cfg.sampler.slots, version=version)
        await engine.start()
        params, groups = SamplingParams(temperature=1.0, max_tokens=cfg.sampler.max_tokens), []
        for i in range(cfg.trainer.prompts):
            ordinal = version * cfg.trainer.prompts + i
            seeds = [fold_in(cfg.seed, "sample", ordinal, 0, g) for g in range(cfg.sampler.samples)]
            found = {}
            async for g, sample in engine.generate(
                prompts[ordinal], params=params, seeds=seeds, request_id="r"
            ):
                found[g] = sample
            groups.append(
                (
                    prompts[ordinal],
                    GroupTokens(np.array(prompts[ordinal]), tuple(found[g] for g in range(len(seeds)))),
                )
            )
        await engine.stop()
        return groups

    model = Transformer(bundle.cfg)
    model.load_state_dict({n: torch.from_numpy(w.copy()) for n, w in bundle.weights.items()})
    state = TrainState(model=model, optimizer=make_optimizer(model, cfg.trainer), version=0)
    objective = make_objective(cfg)
    for version in range(STEPS):
        weights = {n: p.detach().numpy().copy() for n, p in model.state_dict().items()}
        groups = asyncio.run(sample_batch(version, weights))
        rated = [
            Rated(
                n_tokens=tuple(len(s.tokens) for s in tokens.samples),
                rewards=tuple(score(bundle.tokenizer.decode(s.tokens.tolist())) for s in tokens.samples),
            )
            for _, tokens in groups
        ]
        lessons = make_lessons(rated, cfg.loss, norm_length=cfg.sampler.max_tokens)
        data = {
            i: GroupData(tokens=t, lessons=x)
            for i, ((_, t), x) in enumerate(zip(groups, lessons, strict=True))
        }
        lengths = [[len(p) + len(s.tokens) for s in t.samples] for p, t in groups]
        (micros,) = plan_micros(lengths, plan_ranks(lengths, 1), cfg.trainer.micro_tokens)
        state, _ = train_step(
            state,
            [build_micro(m, data, torch.device("cpu"), current=version) for m in micros],
            objective,
            cfg.trainer,
        )
    return {n: p.detach().clone() for n, p in model.state_dict().items()}


def asynchronous(
    cfg, bundle, folder, rollout=Rollout, rank=TrainerRank, judge=None
) -> tuple[dict[str, torch.Tensor], list[tuple[int, ...]]]:
    trainer = rank(bundle, cfg, rank=0)
    params = SamplingParams(temperature=1.0, max_tokens=cfg.sampler.max_tokens)
    roles = Roles(
        trainer=TrainerGroup([Local("trainer-0", trainer)]),
        sampler=Pool([Local("sampler-0", rollout(bundle, params, cfg.sampler.slots, name="sampler-0"))]),
        producers={"judge": judge or TextJudge()},
    )
    letters = [
        Prompt(ids=tuple(bundle.tokenizer.encode(LETTERS[i : i + 3])), text=str(i), answer="x")
        for i in range(10)
    ]
    loop = make_loop(folder, cfg, roles=roles, prompts=letters)
    try:
        finish(loop, 120)
    finally:
        trainer.stop()
    weights = {n: p.full_tensor().detach().clone() for n, p in trainer.state.model.state_dict().items()}
    return weights, [loop.stream[i].ids for i in range(cfg.trainer.steps * cfg.trainer.prompts)]


def test_eta_zero_gives_the_weights_of_a_plain_loop_bit_for_bit(tmp_path):
    cfg, bundle = config(), tiny_bundle()
    weights, prompts = asynchronous(cfg, bundle, tmp_path)
    expected = plain(cfg, bundle, prompts)
    moved = max((expected[n] - torch.from_numpy(bundle.weights[n])).abs().max() for n in expected)
    assert moved > 1e-3, "the run must have learnt something for equality to mean anything"
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name


def test_a_stream_at_eta_zero_gives_the_weights_of_a_plain_loop(tmp_path):
    """The last group of each batch is judged only when a part of it was trained."""
    fed, calls = asyncio.Event(), []

    class Feeding(TrainerRank):
        def feed(self, errand, *arrays):
            super().feed(errand, *arrays)
            calls.append(len(errand.groups))
            fed.set()

        def finish(self, scale):
            fed.clear()
            return super().finish(scale)

    class Holding(TextJudge):
        groups = 0

        async def rate(self, prompt, texts, seeds):
            self.groups += len(texts) > 1  # held-out problems have one answer
            if len(texts) > 1 and self.groups % cfg.trainer.prompts == 0:
                await fed.wait()
            return await super().rate(prompt, texts, seeds)

    cfg, bundle = config(), tiny_bundle()
    # Adam's first step divides rounding errors by their own size: 1e-5 is asked of a smaller lr
    cfg = replace(cfg, trainer=replace(cfg.trainer, lr=1e-3))
    stream = replace(cfg, trainer=replace(cfg.trainer, stream=True))
    (tmp_path / "stream").mkdir(), (tmp_path / "whole").mkdir()
    weights, prompts = asynchronous(stream, bundle, tmp_path / "stream", rank=Feeding, judge=Holding())
    assert len(calls) >= 2 * STEPS and sum(calls) == STEPS * cfg.trainer.prompts
    expected = plain(cfg, bundle, prompts)
    moved = max((expected[n] - torch.from_numpy(bundle.weights[n])).abs().max() for n in expected)
    assert moved > 1e-3
    for name in expected:
        assert torch.allclose(weights[name], expected[name], rtol=0, atol=1e-5), name
    asynchronous(cfg, bundle, tmp_path / "whole")  # Adam would forgive a wrong scale, these do not
    for ours, theirs in zip(*(metrics(tmp_path / name) for name in ("stream", "whole")), strict=True):
        for name in ("train/grad_norm", "loss/total", "loss/policy", "policy/entropy", "policy/ess"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
        assert theirs["train/grad_norm"] > 0.01


def metrics(folder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Corrupting(Rollout):
    """Loses one element of one tensor on the way, from a version on."""

    async def update(self, version, weights, mode):
        if version >= 2:
            name = "model.layers.1.mlp.up_proj.weight"
            weights = {**weights, name: weights[name].copy()}
            weights[name][3, 5] += 1e-3
        return await super().update(version, weights, mode)


def test_after_every_sync_the_engine_is_the_trainer_and_a_corrupted_tensor_stops_the_run_by_name(tmp_path):
    cfg, bundle = config(), tiny_bundle()
    verified = []

    class Watching(Rollout):
        async def update(self, version, weights, mode):
            report = await super().update(version, weights, mode)
            verified.append((report.version, dict(report.checksums), report.probe))
            return report

    (tmp_path / "sound").mkdir(), (tmp_path / "corrupt").mkdir()
    asynchronous(cfg, bundle, tmp_path / "sound", Watching)  # rl.sync.verify raises at any difference
    assert [version for version, _, _ in verified] == list(range(STEPS + 1))
    assert (
        len({probe for _, _, probe in verified})
        == len({tuple(c.values()) for _, c, _ in verified})
        == STEPS + 1
    )
    with pytest.raises(
        SyncError, match=r"sampler-0 .* version 2 .* 1 of \d+ tensors: model.layers.1.mlp.up_proj.weight"
    ):
        asynchronous(cfg, bundle, tmp_path / "corrupt", Corrupting)
    steps = (tmp_path / "corrupt" / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2  # within one step of the sync that failed
