from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config as caches
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import make_layout, packed_attention
from models.config import ModelConfig
from models.parallelise import _key_caches, _recompute, parallelise, reshard, sync_gradients
from models.transformer import Transformer, rope_frequencies, rope_tables
from models.weights import clean_state, load_folder, save_folder

MICRO_BATCHES = 4


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
    return -logp[:-1].gather(-1, ids[1:, None]).sum() / 96


def steps(model: Transformer, micro_batches: range, every: bool = True) -> dict[str, torch.Tensor]:
    """Gradients of the second of two optimiser steps: stale gathered weights would show. every: ranks reduce
    theirs after each micro-batch, not only after the last one."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimiser.zero_grad()
        for i in micro_batches:
            sync_gradients(model, every or i == micro_batches[-1])
            loss(model, i).backward()
        reshard(model)
        optimiser.step()
    return clean_state({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def worker(rank: int, ranks: int, folder: str, every: bool, how: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for tied in (True, False):
        model = parallelise(build(tied), mesh, **how)
        gradients = steps(model, range(rank, MICRO_BATCHES, ranks), every)
        state = clean_state(model.state_dict())
        if rank == 0:
            torch.save(gradients, f"{folder}/gradients_{tied}.pt")
            save_folder(f"{folder}/model_{tied}", state, model.cfg)
        dist.barrier()
    dist.destroy_process_group()


COMPILED = {"compile": True}
EAGER = {"compile": False}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "ranks, every, how",
    [
        (1, False, EAGER),
        (1, False, {**EAGER, "shard": False, "join": True}),
        (2, True, {**EAGER, "join": True, "recompute": "selective"}),
        (2, True, EAGER),
        (2, False, {**EAGER, "keep_gathered": False, "recompute": "selective"}),
        (2, False, {**EAGER, "recompute": "selective", "full_blocks": 1}),
        (2, True, {**EAGER, "recompute": "full", "keep_gathered": False}),
        pytest.param(2, False, COMPILED, marks=SLOW),
        pytest.param(2, False, {**COMPILED, "recompute": "selective", "full_blocks": 1}, marks=SLOW),
    ],
)
def test_sharded_gradients_and_weights_equal_the_single_process_ones(
    tmp_path: Path, ranks: int, every: bool, how: dict[str, Any]
) -> None:
    mp.spawn(worker, (ranks, str(tmp_path), every, how), nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
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


def backward_of(how: Any) -> list[str]:
    """The operations that run in the backward pass of one block."""
    model, seen = build(True), []
    _recompute(model.model.layers[0], how)
    layout = make_layout([5, 3])
    x = torch.randn(8, 32, requires_grad=True)
    cos, sin = rope_tables(layout.positions, rope_frequencies(model.cfg))

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name().partition(".")[0])
            return func(*args, **(kwargs or {}))

    out = model.model.layers[0](x, cos, sin, lambda _, q, k, v: packed_attention(q, k, v, layout), 0)
    with Count():
        out.sum().backward()
    return seen


def test_selective_recomputes_norms_and_no_matmul_and_full_recomputes_all():
    ran = {how: backward_of(how) for how in ("none", "selective", "full")}
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    matmuls = {how: seen.count("aten::mm") for how, seen in ran.items()}
    assert matmuls["selective"] == matmuls["none"] < matmuls["full"]
    assert [ran[how].count("aten::rsqrt") for how in ("none", "selective", "full")] == [0, 2, 2]
    assert [ran[how].count(attention) for how in ("none", "selective", "full")] == [0, 0, 1]


@SLOW
def test_graphs_that_were_compiled_of_another_source_are_not_taken_from_the_disk(tmp_path: Path) -> None:
    source = tmp_path / "attention.py"

    def taken(text: str) -> int:
        source.write_text(text)
        _key_caches(source)
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda x: (x.sin() * 2).sum())(torch.ones(3, requires_grad=True)).backward()
        return counters["aot_autograd"]["autograd_cache_hit"]

    with fresh_cache(), caches.patch(cache_key_tag="mine"):
        assert [taken("one"), taken("one"), taken("two")] == [0, 1, 0]
        first, *rest = caches.cache_key_tag.split()
        assert first == "mine" and rest[::2] == ["attention", "attention"]
