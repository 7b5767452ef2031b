"""Ranks with whole working weights train as FSDP2's do, and as one rank that has all their micro-batches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from models.parallelise import parallelise, reshard
from models.replica import replica_of
from models.transformer import Transformer
from models.zero import Zero
from rl import adamw
from rl.objective import make_objective
from rl.step import TrainState, accumulate, begin, finish, make_optimizer, train_step
from rl.wire.gather import gather
from rl.wire.probe import probe_logps
from tests.ranks import spawn
from tests.rl.steps import EVERYTHING, FUSED, MODEL, make_groups, split
from tests.rl.test_replica import CFG, alone, load, whole

# Sums of the same bfloat16 gradients in float32: only their order, and AdamW's, may differ.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}


def fresh(tied: bool = True, seed: int = 5) -> Transformer:
    model = Transformer(replace(MODEL, tie_embeddings=tied))
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def state_of(model: Transformer, ranks: int, shard: bool | None, **how: Any) -> TrainState:
    mesh = DeviceMesh("cpu", list(range(ranks)))
    parallelise(model, mesh, shard=shard, param_dtype="bfloat16", **{"compile": False, **how})
    assert isinstance(replica_of(model), Zero) == (ranks > 1 and not shard)
    return TrainState(model=model, optimizer=make_optimizer(model, CFG), version=0)


def micros_of(version: int, ranks: int, cap: int, rank: int) -> list:
    return split(make_groups(5, seed=version), ranks, cap, rank=rank)


def train(state: TrainState, steps: int, cap: int, rank: int, ranks: int, config=FUSED) -> Any:
    seen, objective = [], make_objective(config)
    for _ in range(steps):
        state, metrics = train_step(state, micros_of(state.version, ranks, cap, rank), objective, CFG)
        seen.append(metrics)
    return state, seen


def _both(rank: int, ranks: int, folder: str, tied: bool, cap: int, config: Any) -> Any:
    found = []
    for shard in (None, True):
        state, seen = train(state_of(fresh(tied), ranks, shard, message=1), 3, cap, rank, ranks, config)
        found.append((whole(state), seen))
    ways: list[dict[str, Any]] = [
        {"overlap": False, "message": 1}, {}, {"exchange": "memory"}, {"exchange": "memory", "overlap": False}
    ]  # fmt: skip
    for other in ways:  # {}: one message for all
        again, _ = train(state_of(fresh(tied), ranks, None, **other), 3, cap, rank, ranks, config)
        torch.testing.assert_close(whole(again), found[0][0], rtol=0, atol=0)
    return found


@pytest.mark.parametrize(
    ("ranks", "tied", "cap", "config"),
    [(2, True, 1000, FUSED), (2, False, 40, FUSED), (3, True, 40, EVERYTHING), (3, False, 1000, FUSED)],
    ids=["2-one", "2-untied-several", "3-plain-several", "3-untied-one"],
)
def test_weights_moments_and_metrics_are_those_of_fsdp_and_of_one_rank(tmp_path, ranks, tied, cap, config):
    """19 tokens, and the 16 rows of keys over three: uneven."""
    (got, ours), (expected, theirs) = spawn(ranks, tmp_path, _both, tied, cap, config)
    alone(tmp_path)
    state, seen, objective = state_of(fresh(tied), 1, None), [], make_objective(config)
    for version in range(3):
        micros = [m for rank in range(ranks) for m in micros_of(version, ranks, cap, rank)]
        assert len(micros) >= ranks * (1 if cap == 1000 else 2)
        state, metrics = train_step(state, micros, objective, CFG)
        seen.append(metrics)
    one = whole(state)
    dist.destroy_process_group()
    assert got.keys() == expected.keys() == one.keys() and ("lm_head.weight" in got) != tied
    for name, value in got.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[name], **CLOSE, msg=name)
        torch.testing.assert_close(value, one[name], **CLOSE, msg=name)
    assert any((got[n] - p).abs().max() > 0.01 for n, p in fresh(tied).state_dict().items())
    for ours_now, theirs_now, alone_now in zip(ours, theirs, seen, strict=True):
        assert ours_now == pytest.approx(theirs_now, rel=1e-5, abs=1e-7)
        assert ours_now == pytest.approx(alone_now, rel=1e-5, abs=1e-7)
        assert ours_now["train/grad_norm"] > CFG.clip_grad


def save(state: TrainState, path: str) -> None:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def _to_fsdp_and_back(rank: int, ranks: int, folder: str) -> Any:
    state, _ = train(state_of(fresh(), ranks, None), 2, 1000, rank, ranks)
    save(state, f"{folder}/zero")
    saved = whole(state)
    sharded = state_of(fresh(seed=1), ranks, True)
    load(sharded, f"{folder}/zero")
    torch.testing.assert_close(whole(sharded), saved, rtol=0, atol=0)
    sharded, _ = train(replace(sharded, version=2), 1, 1000, rank, ranks)
    save(sharded, f"{folder}/fsdp")
    back = state_of(fresh(seed=2), ranks, None)
    load(back, f"{folder}/fsdp")
    torch.testing.assert_close(whole(back), whole(sharded), rtol=0, atol=0)
    state, _ = train(state, 1, 1000, rank, ranks)
    torch.testing.assert_close(whole(state), whole(sharded), **CLOSE)
    state, _ = train(state, 1, 1000, rank, ranks)
    back, _ = train(replace(back, version=3), 1, 1000, rank, ranks)  # by the weights that were loaded
    torch.testing.assert_close(whole(back), whole(state), **CLOSE)
    return saved


def _loaded(rank: int, ranks: int, folder: str) -> Any:
    state = state_of(fresh(seed=1), ranks, None)
    load(state, f"{folder}/zero")
    return whole(state)


def test_checkpoints_go_to_fsdp_and_back_and_to_other_numbers_of_ranks(tmp_path):
    saved = spawn(2, tmp_path, _to_fsdp_and_back)
    torch.testing.assert_close(spawn(3, tmp_path, _loaded), saved, rtol=0, atol=0)
    alone(tmp_path)
    torch.testing.assert_close(_loaded(0, 1, str(tmp_path)), saved, rtol=0, atol=0)
    dist.destroy_process_group()


def _streamed(rank: int, ranks: int, folder: str, exchange: str) -> Any:
    objective = make_objective(FUSED)

    def run(syncs: Callable[[int], list[bool]] | None) -> dict[str, torch.Tensor]:
        state = state_of(fresh(), ranks, None, exchange=exchange)
        for version in range(2):
            micros = micros_of(version, ranks, 40, rank)
            assert len(micros) >= 3
            if syncs is None:
                state, _ = train_step(state, micros, objective, CFG)
                continue
            pending = begin(state)
            for micro, sync in zip(micros, syncs(len(micros)), strict=True):
                pending = accumulate(pending, micro, objective, sync=sync)
            state, _ = finish(pending, CFG)
        return whole(state)

    expected = run(None)
    ways = {
        "each": lambda n: [True] * n,
        "all but the first": lambda n: [False] + [True] * (n - 1),
        "first and last": lambda n: [True] + [False] * (n - 2) + [True],
    }
    for name, way in ways.items():
        torch.testing.assert_close(run(way), expected, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")
    with pytest.raises(ValueError, match="sync=False"):
        run(lambda n: [True] * (n - 1) + [False])


@pytest.mark.parametrize("exchange", ["messages", "memory"])
def test_micro_batches_may_exchange_each_or_some_and_the_last_one_must(tmp_path, exchange):
    spawn(2, tmp_path, _streamed, exchange)


def _one_step(rank: int, ranks: int, folder: str) -> Any:
    state, (metrics,) = train(state_of(fresh(), ranks, None), 1, 1000, rank, ranks)
    return whole(state), metrics


def _refused(rank: int, ranks: int, folder: str) -> Any:
    state = state_of(fresh(), ranks, None)
    pending = begin(state)
    for micro in micros_of(0, ranks, 1000, rank):
        pending = accumulate(pending, micro, make_objective(FUSED), sync=False)
    zero = replica_of(state.model)
    assert isinstance(zero, Zero)
    with pytest.raises(ValueError, match="must be one that exchanges"):
        zero.gradients()
    reshard(state.model)
    state, metrics = train_step(state, micros_of(0, ranks, 1000, rank), make_objective(FUSED), CFG)
    return whole(state), metrics


def test_a_step_that_was_given_up_leaves_nothing_to_the_next(tmp_path):
    found, metrics = spawn(2, tmp_path, _refused)
    expected, theirs = spawn(2, tmp_path, _one_step)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert metrics["train/grad_norm"] == theirs["train/grad_norm"]


def _written(rank: int, ranks: int, folder: str) -> Any:
    state = state_of(fresh(seed=rank), ranks, None)  # the ranks begin with different weights
    model = state.model

    def check() -> None:
        """All ranks compute with the masters rounded, and they are what is published."""
        masters = {n: p.full_tensor().detach() for n, p in model.named_parameters() if isinstance(p, DTensor)}
        other = fresh()
        other.load_state_dict(masters)
        assert probe_logps(model, range(7)) == probe_logps(other.to(torch.bfloat16), range(7))
        working = {n: p.detach().clone() for n, p in model.named_parameters()}
        assert {p.dtype for p in working.values()} == {torch.bfloat16} == {model.head.dtype}
        reshard(model)
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
        published = {n: torch.full_like(p, torch.nan) for n, p in working.items()}
        for part in gather(dict(model.named_parameters()), torch.bfloat16, limit=200):
            for (name, first, last), rows in part.items():
                published[name][first:last] = rows
        for name, p in masters.items():
            assert torch.equal(working[name], p.bfloat16())
            assert rank or torch.equal(published[name], p.bfloat16())

    check()
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    check()
    train(state, 1, 1000, rank, ranks)
    check()
    full, _ = get_state_dict(model, state.optimizer)
    model.load_state_dict({n: p * 2 for n, p in full.items() if isinstance(p, torch.Tensor)})
    check()


def test_the_forward_and_the_published_weights_are_the_masters_rounded_after_every_write(tmp_path):
    spawn(3, tmp_path, _written)


def _turns(rank: int, ranks: int, folder: str) -> None:
    model = nn.Sequential(nn.Linear(10, 4, bias=False), nn.Linear(12, 3, bias=False))  # rows 2, 2, 0; 1, 1, 1
    mesh = DeviceMesh("cpu", list(range(ranks)))
    zero = Zero(model, torch.bfloat16, mesh=mesh, units=[*model], message=1)
    zero.micro(exchange=True)
    zero.work()
    torch.stack([p.sum() for p in model.parameters()]).sum().backward()
    told = []

    def written(i: int) -> None:
        told.append(i)
        zero.written(i)

    adamw.step(torch.optim.AdamW(zero.masters), zero.gradients(), torch.ones(()), written=written)
    zero.stepped()
    assert told == [1, 0]


def test_what_is_stepped_first_is_the_largest_on_all_ranks_alike(tmp_path):
    spawn(3, tmp_path, _turns)


def _compiled(rank: int, ranks: int, folder: str) -> Any:
    how = {"compile": True, "join": True, "recompute": "selective", "full_blocks": 1}
    plain, _ = train(state_of(fresh(), ranks, None), 4, 1000, rank, ranks)
    state, seen = train(state_of(fresh(), ranks, None, **how), 4, 1000, rank, ranks)
    return whole(plain), whole(state), [m["compile/recompiles"] for m in seen]


@pytest.mark.slow
def test_compiled_blocks_and_the_compiled_step_make_graphs_once(tmp_path):
    plain, got, graphs = spawn(2, tmp_path, _compiled)
    assert graphs[0] > 0 and graphs[2:] == [0, 0]  # lengths differ: shapes become dynamic at the second step
    for name, value in plain.items():
        if "/" not in name:
            torch.testing.assert_close(got[name], value, rtol=0.05, atol=0.02, msg=name)
