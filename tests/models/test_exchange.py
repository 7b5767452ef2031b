"""Rows that ranks on GPUs hand each other, in messages or into memory. On CPUs: test_zero.py."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from models.exchange import Exchange, Messages, Way, Writes, make_exchange
from models.replica import summed
from models.shared import Shared, Unreachable, _take_off
from models.zero import Zero
from tests.ranks import spawn

STEPS = 20


def _model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(96, 96, device=device) for _ in range(6)))


def _backward(model: nn.Module, step: int, rank: int, device: str) -> None:
    data = torch.randn(64, 96, generator=torch.Generator().manual_seed(2 * step + rank))
    model(data.to(device).bfloat16()).float().square().mean().backward()


def _trained(rank: int, exchange: Way, device: str = "cuda") -> list[torch.Tensor]:
    """The working weights after some steps of gradient descent, the ranks on different data."""
    model, mesh = _model(device), DeviceMesh(device, [0, 1])
    zero = Zero(model, torch.bfloat16, mesh=mesh, units=[*model], exchange=exchange, message=1)
    for step in range(STEPS):
        zero.micro(exchange=True)
        _backward(model, step, rank, device)
        for i, unit in enumerate(zero.gradients()):
            for held in unit:
                assert isinstance(held.master, DTensor)
                local = held.master.to_local().detach()
                local -= 0.1 * summed(held.grads)
                held.working.copy_(local)
            zero.written(i)
        zero.stepped()
    return [w.detach().clone() for w in zero.working]


def _alone(device: str) -> list[torch.Tensor]:
    """The same by one process that has the data of both."""
    masters = [p.detach() for p in _model(device).parameters()]
    model = _model(device).bfloat16()
    for step in range(STEPS):
        grads = []
        for rank in range(2):
            _backward(model, step, rank, device)
            grads.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for master, p, *pieces in zip(masters, model.parameters(), *grads, strict=True):
            master -= 0.1 * summed([g for g in pieces if g is not None])
            p.data.copy_(master)
    return [p.detach() for p in model.parameters()]


def _process(rank: int, folder: str, masked: bool) -> None:
    if masked:  # as Ray does
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    torch.cuda.set_device(0 if masked else rank)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2)
    expected, found = _trained(rank, "messages"), _trained(rank, "memory")
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    assert isinstance(_made("auto", "cuda"), Writes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.shared._home", lambda: rank)
        made = _made("auto", "cuda")
    assert isinstance(made, Messages) and "not on one machine" in made.said
    assert len({tuple(w.flatten()[:4].tolist()) for w in found}) > 1
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("masked", [False, True], ids=["all GPUs seen", "only its own"])
def test_both_ways_train_alike_on_two_gpus(tmp_path: Path, masked: bool) -> None:
    mp.spawn(_process, (str(tmp_path), masked), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]


def _made(way: Way, device: str) -> Exchange:
    assert dist.group.WORLD is not None
    return make_exchange([nn.Parameter(torch.zeros(4, 4, device=device))], dist.group.WORLD, way)


def _apart(rank: int, ranks: int, folder: str) -> None:
    for way, expected in (("auto", Messages), ("messages", Messages), ("memory", Writes)):
        assert isinstance(_made(way, "cpu"), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.shared._home", lambda: rank // 2)
        with pytest.raises(Unreachable, match="not on one machine"):
            _made("memory", "cpu")
    with pytest.MonkeyPatch.context() as patch:

        def empty(shared: Shared, size: int) -> list[torch.Tensor]:
            if rank == 1:
                raise RuntimeError("no way\nto there")
            return []

        patch.setattr(Shared, "empty", empty)
        with pytest.raises(Unreachable, match="^no way$"):
            _made("memory", "cpu")


def test_all_ranks_are_told_when_one_cannot_be_reached(tmp_path: Path) -> None:
    spawn(3, tmp_path, _apart)


def test_what_the_allocator_does_not_see_is_taken_off_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [0.5]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: shares[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda x, device: shares.append(x))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000)
    )
    _take_off(200, torch.device("cuda"))
    _take_off(400, torch.device("cuda"))
    assert shares == [0.5, pytest.approx(0.3), 0.0]
    shares.append(1.0)
    _take_off(200, torch.device("cuda"))
    assert shares[-1] == 1.0


def _beside(rank: int, folder: str, device: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found = _trained(rank, "memory", device)
    assert all(torch.equal(f, e) for f, e in zip(found, _alone(device), strict=True))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_that_write_into_each_others_memory_on_one_device_train_as_one_process(
    tmp_path: Path, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    mp.spawn(_beside, (str(tmp_path), device), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
