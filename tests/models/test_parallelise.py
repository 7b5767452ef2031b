from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from models.attention import make_layout, packed_attention
from models.config import ModelConfig
from models.parallelise import parallelise
from models.transformer import Transformer
from models.weights import clean_state, load_folder, save_folder

MICRO_BATCHES = 2


def build(tied: bool) -> Transformer:
    cfg = ModelConfig(
        vocab_size=31,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        d_ff=64,
        tie_embeddings=tied,
    )
    model = Transformer(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def loss(model: Transformer, micro_batch: int) -> torch.Tensor:
    """Sum over tokens / global count, the head used outside of forward as the fused losses do."""
    ids = torch.randint(0, 31, (24,), generator=torch.Generator().manual_seed(micro_batch))
    layout = make_layout([3 + micro_batch, 5, 2], total=24)
    hidden = model(ids, layout.positions, lambda layer, q, k, v: packed_attention(q, k, v, layout))
    logp = F.linear(hidden, model.head).log_softmax(-1)
    return -logp[:-1].gather(-1, ids[1:, None]).sum() / 48


def steps(model: Transformer, micro_batches: range) -> dict[str, torch.Tensor]:
    """Gradients of the second of two optimiser steps: stale gathered weights would show."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimiser.zero_grad()
        for i in micro_batches:
            loss(model, i).backward()
        optimiser.step()
    return clean_state({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def worker(rank: int, ranks: int, folder: str, compile: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for tied in (True, False):
        model = parallelise(build(tied), mesh, compile=compile)
        gradients = steps(model, range(rank, MICRO_BATCHES, ranks))
        state = clean_state(model.state_dict())
        if rank == 0:
            torch.save(gradients, f"{folder}/gradients_{tied}.pt")
            save_folder(f"{folder}/model_{tied}", state, model.cfg)
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "ranks, compile",
    [
        (1, False),
        (2, False),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_sharded_gradients_and_weights_equal_the_single_process_ones(tmp_path: Path, ranks, compile):
    mp.spawn(worker, (ranks, str(tmp_path), compile), nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
    for tied in (True, False):
        model = build(tied)
        expected = steps(model, range(MICRO_BATCHES))
        gradients = torch.load(tmp_path / f"gradients_{tied}.pt")
        assert gradients.keys() == expected.keys()
        assert ("lm_head.weight" in gradients) != tied
        for name, g in expected.items():
            torch.testing.assert_close(gradients[name], g, atol=1e-6, rtol=1e-5)
        _, state = load_folder(tmp_path / f"model_{tied}")
        for name, p in model.state_dict().items():
            torch.testing.assert_close(state[name], p, atol=1e-6, rtol=1e-5)
