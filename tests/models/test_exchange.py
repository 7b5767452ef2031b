"""Rows that ranks on GPUs hand each other, in messages or into memory. On CPUs: test_zero.py."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from models.replica import summed
from models.zero import Zero


def _trained(rank: int, direct: bool) -> list[torch.Tensor]:
    """The working weights after some steps of gradient descent, the ranks on different data."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, device="cuda") for _ in range(6)))
    zero = Zero(
        model, torch.bfloat16, mesh=DeviceMesh("cuda", [0, 1]), units=[*model], direct=direct, message=1
    )
    for step in range(20):
        data = torch.randn(64, 96, generator=torch.Generator().manual_seed(2 * step + rank))
        zero.micro(exchange=True)
        model(data.cuda().bfloat16()).float().square().mean().backward()
        for i, unit in enumerate(zero.gradients()):
            for held in unit:
                assert isinstance(held.master, DTensor)
                local = held.master.to_local().detach()
                local -= 0.1 * summed(held.grads)
                held.working.copy_(local)
            zero.written(i)
        zero.stepped()
    return [w.detach().clone() for w in zero.working]


def _process(rank: int, folder: str, masked: bool) -> None:
    if masked:  # as Ray does
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    torch.cuda.set_device(0 if masked else rank)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=2)
    expected, found = _trained(rank, direct=False), _trained(rank, direct=True)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    assert len({tuple(w.flatten()[:4].tolist()) for w in found}) > 1
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("masked", [False, True], ids=["all GPUs seen", "only its own"])
def test_both_ways_train_alike_on_two_gpus(tmp_path: Path, masked: bool) -> None:
    mp.spawn(_process, (str(tmp_path), masked), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
