"""Weights between processes: what arrives is what was packed, to the bit, and nobody waits for the dead."""

import asyncio
import multiprocessing as mp
import socket
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models.checksum import checksums
from models.config import ModelConfig
from models.parallelise import parallelise
from models.transformer import Transformer
from models.weights import as_array
from rl.engines.torch import TorchEngine
from rl.sync import probe_ids
from rl.types import Completion, SamplingParams
from rl.wire.flat import buckets, offsets, views
from rl.wire.gather import Rows, gather
from rl.wire.group import Group, GroupError
from rl.wire.inbox import Inbox
from rl.wire.parcel import Broadcast, Mapped, Place, choose
from rl.wire.post import Post
from rl.wire.probe import probe_logps

CPU = torch.device("cpu")
CFG = ModelConfig(
    vocab_size=23, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, dtype="bfloat16"
)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    model = Transformer(CFG, dtype=torch.float32).requires_grad_(False)
    model.init_weights(torch.Generator().manual_seed(seed))
    return dict(model.state_dict())


def whole(state: dict[str, torch.Tensor]) -> list[dict[Rows, torch.Tensor]]:
    return [{(name, 0, len(tensor)): tensor for name, tensor in state.items()}]


def open_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def address(
    store: dist.TCPStore, key: str = "sampler-0/0", size: int = 2, seconds: float = 60.0
) -> Broadcast:
    return Broadcast(host="127.0.0.1", port=store.port, key=key, size=size, seconds=seconds)


# ── One piece of memory ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limit", [1, 700, 1 << 30])
def test_buckets_hold_every_tensor_whole_and_once(limit):
    spans, total = buckets(CFG, limit), offsets(CFG)[1]
    assert spans[0][0] == 0 and spans[-1][1] == total
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    buffer = torch.arange(total)
    seen = [name for start, stop in spans for name in views(buffer[start:stop], CFG, start)]
    assert sorted(seen) == sorted(views(buffer, CFG)) and len(set(seen)) == len(seen)
    assert len(spans) == (1 if limit == 1 << 30 else len(spans)) and (limit > 1 or len(spans) == len(seen))


def test_what_is_packed_is_rounded_once_and_described_as_the_engines_must_hold_it():
    post, state = Post(CFG, CPU), weights()
    post.pack(3, whole(state))
    manifest = post.manifest()
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    assert manifest.version == 3 and manifest.checksums == checksums(rounded)
    model = Transformer(CFG).requires_grad_(False)
    model.load_state_dict(rounded)
    assert manifest.probe == probe_logps(model, probe_ids(CFG.vocab_size))
    post.pack(4, whole(weights(1)))
    assert post.manifest().checksums != manifest.checksums and post.manifest().version == 4


@pytest.mark.parametrize("tied", [True, False])
def test_o070_what_a_compiled_and_sharded_model_sends_has_plain_names_and_is_whole(tied):
    cfg = replace(CFG, tie_embeddings=tied)
    model = Transformer(cfg, dtype=torch.float32)
    model.init_weights(torch.Generator().manual_seed(0))
    rounded = {name: p.detach().to(torch.bfloat16) for name, p in model.state_dict().items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallelise(model, init_device_mesh("cpu", (1,)), compile=True)
        (sent,) = gather(dict(model.named_parameters()), torch.bfloat16)
        assert [name for name, _, _ in sent] == list(rounded)
        post = Post(cfg, CPU)
        post.pack(0, [sent])
        assert post.manifest().checksums == checksums(rounded)
        with pytest.raises(KeyError, match="_orig_mod"):
            post.pack(1, [{(f"_orig_mod.{name}", a, b): x for (name, a, b), x in sent.items()}])
    finally:
        dist.destroy_process_group()


def test_weights_that_are_not_whole_are_not_published():
    post, state = Post(CFG, CPU), weights()
    post.pack(3, whole(state))
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match="1 parameters are not whole: model.norm.weight"):
        post.pack(4, whole(state))
    assert post.version == 3


# ── Between processes ─────────────────────────────────────────────────────────────────────────────────


def received(inbox: Inbox, where: Broadcast) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in inbox.receive(where) for name, tensor in bucket.items()}


def engine_process(where: Broadcast, rank: int, versions: int, pipe) -> None:
    torch.set_num_threads(1)
    inbox = Inbox(CFG, CPU, rank)
    for _ in range(versions):
        pipe.send(checksums(received(inbox, where)))


def test_every_process_of_an_engine_receives_every_version_to_the_bit():
    store, context = open_store(), mp.get_context("spawn")
    where = address(store, size=3)
    pipes, children = [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        child = context.Process(target=engine_process, args=(where, rank, 3, theirs), daemon=True)
        child.start()
        pipes.append(mine)
        children.append(child)
    post = Post(CFG, CPU)
    for version in range(3):
        post.pack(version, whole(weights(version)))
        post.send(where)
        for pipe in pipes:
            assert pipe.poll(60)
            assert pipe.recv() == post.manifest().checksums
    for child in children:
        child.join(20)
        assert child.exitcode == 0


async def greedy_of_each(
    limits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Completion, dict[str, int]]]:
    """What an engine says, and what it holds, after weights in buckets of each limit; before them others."""
    store, found = open_store(), []
    post = Post(CFG, CPU)
    first = {name: as_array(tensor.to(torch.bfloat16)) for name, tensor in weights(9).items()}
    for i, limit in enumerate(limits):
        for module in ("rl.wire.post", "rl.wire.inbox"):
            monkeypatch.setattr(f"{module}.buckets", partial(buckets, limit=limit))
        engine = TorchEngine(CFG, first, max_slots=2, probe_ids=probe_ids(CFG.vocab_size))
        await engine.start()
        post.pack(1, whole(weights(1)))
        where = address(store, key=f"sampler-{i}/0")
        _, report = await asyncio.gather(asyncio.to_thread(post.send, where), engine.update(1, where))
        greedy = SamplingParams(temperature=0.0, max_tokens=20)
        async for _, said in engine.generate((3, 1, 4), params=greedy, seeds=(0,), request_id="r"):
            found.append((said, report.checksums))
        await engine.stop()
    assert all(sums == post.manifest().checksums for _, sums in found)
    return found


def test_o071_the_size_of_the_buckets_changes_no_bit_and_no_greedy_token(monkeypatch):
    limits = (1, 1 << 11, 1 << 30)
    assert [len(buckets(CFG, limit)) for limit in limits] == [20, 4, 1]
    said, *others = asyncio.run(asyncio.wait_for(greedy_of_each(limits, monkeypatch), 60))
    for other in others:
        assert other[1] == said[1]
        assert (other[0].tokens.tolist(), other[0].logps.tobytes()) == (
            said[0].tokens.tolist(),
            said[0].logps.tobytes(),
        )


def test_a_receiver_that_never_comes_is_named_at_the_deadline_and_the_next_group_works():
    store, post = open_store(), Post(CFG, CPU)
    post.pack(0, whole(weights()))
    began = time.monotonic()
    with pytest.raises(GroupError, match="sampler-0/0: the 2 ranks did not meet"):
        post.send(address(store, seconds=0.5))
    assert time.monotonic() - began < 5
    again = address(store, key="sampler-0/1")
    got: dict[str, torch.Tensor] = {}

    def receive() -> None:
        got.update(received(Inbox(CFG, CPU), again))

    thread = threading.Thread(target=receive)
    thread.start()
    post.send(again)
    thread.join(20)
    assert checksums(got) == post.manifest().checksums


def dying_process(where: Broadcast) -> None:
    Group(where, 1, CPU)  # joins, and is gone before anything is sent


def test_a_receiver_that_died_fails_the_send_and_not_the_sender():
    store, context = open_store(), mp.get_context("spawn")
    where, post = address(store, seconds=30.0), Post(CFG, CPU)
    post.pack(0, whole(weights()))
    child = context.Process(target=dying_process, args=(where,), daemon=True)
    child.start()
    group = Group(where, 0, CPU)
    child.join(30)
    post.groups["sampler-0"] = group
    with pytest.raises(GroupError, match="sampler-0/0"):
        for _ in range(20):  # what fits into a socket's buffer is sent to the dead, too
            post.send(where)


def test_no_store_is_one_clear_error():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    where = Broadcast(host="127.0.0.1", port=port, key="sampler-0/0", size=2, seconds=0.5)
    with pytest.raises(GroupError, match="did not meet"):
        next(Inbox(CFG, CPU).receive(where))


def test_memory_of_another_gpu_is_refused():
    with pytest.raises(ValueError, match="the weights lie on GPU-1, this engine on the CPU"):
        next(Inbox(CFG, CPU).receive(Mapped(gpu="GPU-1", handle=b"")))


# ── Which way ─────────────────────────────────────────────────────────────────────────────────────────

HERE, THERE, NONE = Place(("a",)), Place(("b",)), Place()


@pytest.mark.parametrize(
    ("trainer", "engine", "way"),
    [
        (NONE, NONE, "store"),
        (HERE, HERE, "ipc"),
        (HERE, THERE, "broadcast"),
        (HERE, Place(("b", "c"), 2), "broadcast"),
        (HERE, Place(("a", "b"), 2), "store"),  # NCCL has no two ranks on one GPU
        (HERE, NONE, "store"),
        (NONE, HERE, "store"),
    ],
)
def test_the_places_decide_how_weights_travel(trainer, engine, way):
    assert choose("auto", trainer, engine) == way
    assert choose("store", trainer, engine) == "store"


@pytest.mark.parametrize(
    ("asked", "trainer", "engine"),
    [("ipc", HERE, THERE), ("ipc", NONE, NONE), ("broadcast", HERE, HERE), ("broadcast", HERE, NONE)],
)
def test_a_way_that_the_places_do_not_have_is_refused(asked, trainer, engine):
    with pytest.raises(ValueError, match=f"sync.transport {asked} needs .*the trainer is on"):
        choose(asked, trainer, engine)


def test_gloo_broadcasts_between_cpus_when_asked():
    assert choose("broadcast", NONE, NONE) == "broadcast"
