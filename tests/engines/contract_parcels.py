"""What every engine promises of new weights that do not come by value; see contract.py."""

import asyncio

import numpy as np
import pytest
import torch
import torch.distributed as dist

from models.checksum import checksums
from models.delta import diff
from rl.engines.base import Engine
from rl.wire.gather import Rows
from rl.wire.parcel import Broadcast
from rl.wire.post import Post
from tests.engines.asked import (
    CFG,
    FREE,
    PROBE,
    build,
    close,
    collect,
    plain_token_logp,
    state,
    with_engine,
)


def whole(seed: int) -> list[dict[Rows, torch.Tensor]]:
    return [{(name, 0, len(tensor)): tensor for name, tensor in build(seed=seed).state_dict().items()}]


def posted(version: int, seed: int, device: str) -> Post:
    post = Post(CFG, torch.device(device))
    post.pack(version, whole(seed))
    return post


async def proven(engine: Engine, version: int, seed: int, report) -> None:
    """It holds the weights of this seed, says so, and samples with them."""
    model = build(seed=seed)
    assert (report.version, report.checksums) == (version, checksums(model.state_dict()))
    close(np.array(report.probe), plain_token_logp(model, PROBE[:1], PROBE[1:]))
    [c] = await collect(engine, PROBE, FREE, (1,))
    close(c.logps, plain_token_logp(model, PROBE, c.tokens.tolist()))
    assert (c.versions == version).all()


class ParcelContract:
    @with_engine
    async def test_a_delta_gives_the_bits_of_the_whole(self, engine, model):
        new = build(seed=1)
        changed = {n: p if "layers.0" in n else model.state_dict()[n] for n, p in new.state_dict().items()}
        report = await engine.update(1, diff(state(model), {n: p.numpy() for n, p in changed.items()}, 0, 1))
        assert (report.version, report.checksums) == (1, checksums(changed))
        new.load_state_dict(changed)
        close(np.array(report.probe), plain_token_logp(new, PROBE[:1], PROBE[1:]))

    @with_engine
    async def test_a_delta_of_other_weights_than_it_holds_is_refused_and_nothing_changes(self, engine, model):
        before, other = await engine.report(), build(seed=2)
        with pytest.raises((ValueError, RuntimeError), match="delta"):
            await engine.update(4, diff(state(other), state(build(seed=1)), 3, 4))
        after = await engine.report()
        assert (after.version, after.checksums) == (before.version, before.checksums)

    @with_engine
    async def test_broadcast_weights_arrive_version_after_version(self, engine, model):
        device = await sender_device(engine)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = Broadcast(host="127.0.0.1", port=store.port, key="engine/0", size=2, seconds=60)
        post = Post(CFG, torch.device(device))
        for version, seed in ((1, 1), (2, 5)):
            post.pack(version, whole(seed))
            update = asyncio.create_task(engine.update(version, where))
            await asyncio.gather(asyncio.to_thread(post.send, where), update)
            await proven(engine, version, seed, update.result())

    @with_engine
    async def test_a_sender_that_never_comes_costs_one_update_and_no_more(self, engine, model):
        device = await sender_device(engine)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = Broadcast(host="127.0.0.1", port=store.port, key="engine/0", size=2, seconds=1)
        before = await engine.report()
        with pytest.raises(RuntimeError, match="engine/0: the 2 ranks did not meet"):
            await engine.update(1, where)
        assert (await engine.report()).checksums == before.checksums
        again = Broadcast(host="127.0.0.1", port=store.port, key="engine/1", size=2, seconds=60)
        post = posted(2, 5, device)
        update = asyncio.create_task(engine.update(2, again))
        await asyncio.gather(asyncio.to_thread(post.send, again), update)
        await proven(engine, 2, 5, update.result())


async def sender_device(engine: Engine) -> str:
    """A CPU, or another GPU than the engine's."""
    if not (await engine.place()).gpus:
        return "cpu"
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return "cuda:1"
