"""Shards of several ranks arrive at rank 0 as what the whole was: uneven rows, few rows, bfloat16."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from rl.wire.gather import gather

SHAPES = {"a": (7, 3), "b": (1, 5), "c": (4,), "d": (9, 2, 2)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def work(rank: int, ranks: int, port: int, limit: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    expected = {name: p.detach().clone() for name, p in Model().named_parameters()}
    model = Model()
    fully_shard(model, mesh=DeviceMesh("cpu", list(range(ranks))))
    for dtype in (torch.float32, torch.bfloat16):
        found = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in SHAPES.items()}
        seen = {name: 0 for name in SHAPES}
        for part in gather(dict(model.named_parameters()), dtype, limit):
            for (name, start, stop), tensor in part.items():
                found[name][start:stop] = tensor
                seen[name] += stop - start
        if rank:
            assert not any(seen.values())
            continue
        assert seen == {name: shape[0] for name, shape in SHAPES.items()}
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor.to(dtype)), (name, dtype)
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "limit"), [(2, 1 << 20), (3, 40), (2, 1)])
def test_every_row_of_every_parameter_arrives_once(ranks, limit):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, (ranks, port, limit), nprocs=ranks)  # type: ignore[attr-defined]


def test_one_rank_hands_out_what_it_has_without_a_copy():
    parameters = dict(Model().named_parameters())
    (part,) = gather(parameters, torch.bfloat16)
    for (name, start, stop), tensor in part.items():
        assert (start, stop) == (0, SHAPES[name][0])
        assert tensor.data_ptr() == parameters[name].data_ptr()
