"""Who is asked and who waits: on the clock of a real event loop."""

import asyncio
import time
from collections import Counter

import pytest

from rl.pool import Pool
from rl.replica import RoleError
from rl.roles import Local
from tests.rl.workers import QUICK, Worker, pool_of, run, until

# ── Without dispatch ────────────────────────────────────────────────────────────────────────────────────────


def test_without_dispatch_a_call_goes_to_the_least_loaded_and_fails_at_its_deadline():
    workers = Worker(seconds=0.05), Worker(mode="hang")

    async def go():
        pool = pool_of(*workers, dispatch=None)
        first, second = await asyncio.gather(
            pool.call("work", 1, deadline=5), pool.call("work", 2, deadline=0.1), return_exceptions=True
        )
        assert first == 1 and isinstance(second, RoleError)
        assert str(second) == "w-1.work gave no answer within 0.1 s"
        assert [len(w.asked) for w in workers] == [1, 1] and pool.load == [0, 0]

    run(go())


def test_all_raises_and_each_has_the_error_of_a_dead_replica_in_its_place():
    async def go():
        pool = pool_of(Worker(), Worker(mode="fail"), dispatch=None)
        with pytest.raises(RoleError, match="w-1.work failed: out of memory"):
            await pool.all("work", deadline=1)
        good, bad = await pool.each("work", 7, deadline=1)
        assert good == 7 and isinstance(bad, RoleError)

    run(go())


def test_a_pool_without_replicas_is_refused():
    with pytest.raises(ValueError, match="judge has no replicas"):
        Pool([], "judge")


# ── Which replica ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_goes_to_one_replica_until_that_is_busier_than_the_least_by_more_than_affinity():
    workers = [Worker(seconds=0.1) for _ in range(4)]

    async def go():
        pool = pool_of(*workers, in_flight=100)
        await asyncio.gather(*(pool.call("work", i, key="a", deadline=5) for i in range(3)))
        (usual,) = [i for i, w in enumerate(workers) if w.asked]  # loads 0, 1, 2 are within affinity 2
        await asyncio.gather(*(pool.call("work", i, key="a", deadline=5) for i in range(8)))
        assert len(workers[usual].asked) > 3 and sum(len(w.asked) for w in workers) == 11
        loads = Counter(len(w.asked) for i, w in enumerate(workers) if i != usual)
        assert sum(loads.elements()) == 11 - len(workers[usual].asked)
        assert sum(n > 0 for n in (len(w.asked) for w in workers)) > 1  # the rest went elsewhere

    run(go())


def test_keys_spread_over_replicas_and_only_those_of_a_lost_one_move():
    names = [f"w-{i}" for i in range(4)]

    async def usual(keys, places):
        workers = {i: Worker() for i in places}
        pool = Pool([Local(names[i], w) for i, w in workers.items()], "workers", QUICK)
        for key in keys:
            await pool.call("work", key, key=key, deadline=1)
        return {key: i for i, w in workers.items() for key in w.asked}

    keys = [f"prompt {i}" for i in range(80)]
    before, after = run(usual(keys, range(4))), run(usual(keys, range(3)))
    assert min(Counter(before.values()).values()) >= 8 and len(set(before.values())) == 4
    assert all(after[key] == before[key] for key in keys if before[key] != 3)


def test_without_a_key_load_is_even():
    workers = [Worker(seconds=0.02) for _ in range(3)]

    async def go():
        pool = pool_of(*workers)
        await asyncio.gather(*(pool.call("work", deadline=5) for _ in range(9)))

    run(go())
    assert [len(w.asked) for w in workers] == [3, 3, 3]


# ── The queue ───────────────────────────────────────────────────────────────────────────────────────────────


def test_no_replica_has_more_than_in_flight_questions_and_the_rest_wait_in_order():
    worker = Worker(seconds=0.01)

    async def go():
        pool = pool_of(worker)
        calls = [asyncio.create_task(pool.call("work", i, deadline=5)) for i in range(12)]
        await asyncio.sleep(0.002)
        assert pool.load == [4] and pool.waiting == 8 and pool.full
        await asyncio.gather(*calls)
        assert pool.load == [0] and pool.waiting == 0 and not pool.full

    run(go())
    assert worker.most == 4 and worker.asked == list(range(12))


def test_weights_count_as_questions_and_a_call_heavier_than_the_bound_goes_alone():
    worker = Worker(seconds=0.01)

    async def go():
        pool = pool_of(worker)
        calls = [pool.call("work", w, weight=w, deadline=5) for w in (3, 1, 1, 9, 2, 2)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.002)
        assert pool.load == [4] and pool.waiting == 14
        await until(lambda: worker.asked[-1] == 9)
        assert worker.now == 1 and pool.load == [9]
        await asyncio.gather(*tasks)

    run(go())
    assert worker.asked == [3, 1, 1, 9, 2, 2]  # the light ones do not overtake the heavy one


def test_the_deadline_includes_the_queue():
    async def go():
        pool = pool_of(Worker(mode="hang"), in_flight=1, attempt=30, attempts=1)
        first = asyncio.create_task(pool.call("work", deadline=0.5))
        await asyncio.sleep(0.01)
        began = time.monotonic()
        with pytest.raises(RoleError, match="workers: no replica was free before the deadline"):
            await pool.call("work", deadline=0.1)
        assert time.monotonic() - began < 0.45 and pool.waiting == 0
        with pytest.raises(RoleError):
            await first

    run(go())


def test_a_cancelled_caller_leaves_neither_a_place_in_the_queue_nor_load():
    async def go():
        pool = pool_of(Worker(seconds=0.05), in_flight=1)
        tasks = [asyncio.create_task(pool.call("work", i, deadline=5)) for i in range(3)]
        await asyncio.sleep(0.01)
        tasks[1].cancel()  # waits
        tasks[0].cancel()  # works
        assert await tasks[2] == 2
        assert pool.load == [0] and pool.waiting == 0 and [r.state for r in pool.replicas] == ["up"]

    run(go())
