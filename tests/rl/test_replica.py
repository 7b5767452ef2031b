"""One rank that holds both precisions trains as FSDP2 on one rank does; their checkpoints are of one kind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from experiments.genrm_grpo import CONFIG
from models.parallelise import parallelise, reshard
from models.replica import Replica, replica_of
from rl.objective import make_objective
from rl.step import TrainState, make_optimizer, train_step
from rl.wire.probe import probe_logps
from tests.rl.steps import FUSED, fresh_model, make_groups, split

CFG = replace(CONFIG.trainer, lr=1e-2, clip_grad=0.05, weight_decay=0.1)


def state_of(ranks: int, **how) -> TrainState:
    model = parallelise(fresh_model(), DeviceMesh("cpu", list(range(ranks))), **how)
    return TrainState(model=model, optimizer=make_optimizer(model, CFG), version=0)


def train(state: TrainState, steps: int, cap: int, rank: int = 0, ranks: int = 1) -> tuple[TrainState, list]:
    seen, objective = [], make_objective(FUSED)
    for _ in range(steps):
        micros = split(make_groups(4, seed=state.version), ranks, cap, rank=rank)
        state, metrics = train_step(state, micros, objective, CFG)
        seen.append(metrics)
    return state, seen


def whole(state: TrainState) -> dict[str, torch.Tensor]:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    moments: Any = optimizer["state"]
    flat = {**model, **{f"{n}/{k}": v for n, state in moments.items() for k, v in state.items()}}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in flat.items()}


def alone(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/alone", 1), rank=0, world_size=1)


@pytest.fixture
def one_rank(tmp_path):
    alone(tmp_path)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("cap", [1000, 40], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_moments_and_metrics_are_those_of_fsdp(one_rank, dtype, cap):
    found = {}
    for shard in (True, False):
        state = state_of(1, compile=False, param_dtype=dtype, shard=shard)
        assert (replica_of(state.model) is not None) == (not shard and dtype == "bfloat16")
        state, metrics = train(state, 3, cap)
        found[shard] = whole(state), metrics
    (expected, theirs), (got, ours) = found[True], found[False]
    assert got.keys() == expected.keys() and "model.embed_tokens.weight/exp_avg" in got
    assert got.keys() >= fresh_model().state_dict().keys()
    assert all(v.dtype == torch.float32 for v in got.values())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert any((got[n] - p).abs().max() > 0.01 for n, p in fresh_model().state_dict().items())
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-5) and a["train/grad_norm"] > CFG.clip_grad


def seen(model):
    logps = probe_logps(model, range(7))
    reshard(model)  # back to the masters
    return logps


def test_the_forward_sees_every_write_to_the_masters_rounded(one_rank):
    state = state_of(1, compile=False, param_dtype="bfloat16")
    model = state.model

    def expected():
        other = fresh_model()
        other.load_state_dict(model.state_dict())
        return probe_logps(other.to(torch.bfloat16), range(7))

    assert seen(model) == expected()
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    assert seen(model) == expected()
    state, _ = train(state, 1, 1000)
    assert seen(model) == expected()
    model.load_state_dict(fresh_model().state_dict())
    assert seen(model) == expected()


def test_parameters_are_masters_at_rest_and_working_weights_in_between(one_rank):
    model = state_of(1, compile=False, param_dtype="bfloat16").model
    names = list(model.state_dict())
    model(torch.arange(3), torch.arange(3), lambda layer, q, k, v: q)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.head.dtype == torch.bfloat16
    reshard(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32} and list(model.state_dict()) == names


def test_gradients_of_several_micro_batches_add_up_in_float32():
    model = torch.nn.Linear(1, 1, bias=False)
    held = Replica(model, torch.bfloat16)
    for share in (1.0, 2.0**-9, 2.0**-9):  # in bfloat16 1 + 2^-9 = 1
        held.work()
        model(torch.full((1, 1), share, dtype=torch.bfloat16)).sum().backward()
    ((weight,),) = held.gradients()
    (grad,) = weight.grads
    assert grad.item() == 1 + 2.0**-8 and grad.dtype == torch.float32
    assert held.working[0].grad is None


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/two", 2), rank=rank, world_size=2)
    state = state_of(2, compile=False, param_dtype="bfloat16")
    load(state, f"{folder}/from_one")
    loaded = whole(state)
    state, _ = train(replace(state, version=2), 1, 1000, rank, 2)
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/from_two")
    stepped = whole(state)
    if rank == 0:
        torch.save((loaded, stepped), f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def load(state: TrainState, path: str) -> None:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def test_checkpoints_go_from_one_rank_to_two_and_back(tmp_path):
    alone(tmp_path)
    state, _ = train(state_of(1, compile=False, param_dtype="bfloat16"), 2, 1000)
    saved = whole(state)
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "from_one")
    on, _ = train(state, 1, 1000)
    alone_on = whole(on)
    dist.destroy_process_group()
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    loaded, stepped = torch.load(tmp_path / "result")
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    # ranks round their own gradients to bfloat16
    for name in fresh_model().state_dict():
        torch.testing.assert_close(stepped[name], alone_on[name], rtol=0.02, atol=2e-3, msg=name)
    (tmp_path / "alone").unlink(missing_ok=True)
    alone(tmp_path)
    back = state_of(1, compile=False, param_dtype="bfloat16")
    load(back, str(tmp_path / "from_two"))
    torch.testing.assert_close(whole(back), stepped, rtol=0, atol=0)
    dist.destroy_process_group()


@pytest.mark.slow
def test_compiled_blocks_and_the_compiled_step_make_graphs_once(one_rank):
    how = {"compile": True, "join": True, "recompute": "selective", "full_blocks": 1}
    states = [state_of(1, param_dtype="bfloat16", **h) for h in ({"compile": False}, how)]
    (plain, _), (state, metrics) = [train(s, 4, 1000) for s in states]
    # lengths differ: shapes become dynamic at the second step
    assert [m["compile/recompiles"] > 0 for m in metrics][2:] == [False, False]
    for name, value in whole(plain).items():
        if "/" not in name:
            torch.testing.assert_close(whole(state)[name], value, rtol=0.05, atol=0.02, msg=name)
