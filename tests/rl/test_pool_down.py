"""All replicas down, and replicas of changing moods: who waits, who is told, and that every call ends."""

import asyncio
import random
import time

import pytest

from rl.replica import PoolDown, RoleError
from tests.rl.workers import QUICK, Restarted, Worker, pool_of, run, until


def test_when_all_are_down_callers_wait_beyond_their_deadline_and_get_their_answer():
    workers = [Restarted(up=False, start_works=False) for _ in range(2)]

    async def go():
        pool = pool_of(*workers)
        calls = [asyncio.create_task(pool.call("work", i, deadline=0.3)) for i in range(8)]
        await until(lambda: pool.down_since is not None)
        await asyncio.sleep(0.5)
        waits = [call for call in calls if not call.done()]
        assert waits, "those who had no third attempt behind them wait"
        for worker in workers:
            worker.start_works = True
        answers = await asyncio.gather(*waits)
        assert set(answers) <= set(range(8)) and pool.down_since is None
        pool.check()

    run(go())


def test_callers_who_arrive_while_all_are_down_wait_also_through_probes_that_fail():
    worker = Worker(mode="fail")  # its start works, its work does not

    async def go():
        pool = pool_of(worker, attempts=2)
        with pytest.raises(RoleError, match="out of memory"):
            await pool.call("work", deadline=1)
        call = asyncio.create_task(pool.call("work", 3, deadline=0.2))
        await until(lambda: len(worker.asked) >= 7)
        assert not call.done() and pool.down_since is not None
        worker.mode = "ok"
        assert await call == 3

    run(go())


def test_after_patience_the_pool_is_down_by_name_duration_and_last_failure():
    async def go():
        pool = pool_of(Restarted(up=False, start_works=False), patience=0.4)
        calls = [pool.call("work", i, deadline=30) for i in range(6)]
        began = time.monotonic()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert 0.35 < time.monotonic() - began < 2.0
        down = [e for e in errors if isinstance(e, PoolDown)]
        assert down and all(isinstance(e, RoleError) for e in errors)
        assert "workers: none of 1 replicas has answered for 0.4" in str(down[0])
        assert "w-0.start failed: still dead" in str(down[0])
        with pytest.raises(PoolDown):
            await pool.call("work", deadline=30)  # at once
        with pytest.raises(PoolDown):
            pool.check()

    run(go())


def test_patience_counts_from_the_last_answer_not_from_the_last_probe():
    async def go():
        pool = pool_of(Worker(mode="fail"), patience=0.5)
        began = time.monotonic()
        with pytest.raises(PoolDown):
            while True:  # nobody waits between the probes
                call = asyncio.create_task(pool.call("work", deadline=1))
                await asyncio.wait([call], timeout=0.02)
                call.cancel()
                pool.check()
                await asyncio.sleep(0.1)
        assert 0.45 < time.monotonic() - began < 3.0

    run(go())


def test_a_pool_that_nobody_asked_while_it_was_down_serves_the_next_call():
    worker = Restarted(up=False, start_works=False)

    async def go():
        pool = pool_of(worker, patience=0.2, attempts=2)
        with pytest.raises(RoleError, match="not started"):
            await pool.call("work", deadline=1)
        await asyncio.sleep(0.3)
        worker.start_works = True
        await until(lambda: pool.down_since is None)
        assert await pool.call("work", 1, deadline=1) == 1

    run(go())


@pytest.mark.parametrize("seed", range(4))
def test_under_chaos_every_call_ends_no_bound_is_broken_and_nothing_is_left_behind(seed):
    rng = random.Random(seed)
    workers = [Worker(seconds=0.002) for _ in range(3)]

    async def moods(pool):
        while True:
            for worker in workers:
                worker.mode = rng.choice(["ok", "ok", "ok", "fail", "hang", "refuse"])
            await asyncio.sleep(0.02)
            assert all(load <= QUICK.in_flight for load in pool.load)

    async def go():
        pool = pool_of(*workers, attempt=0.05, rest=0.02)
        restless = asyncio.create_task(moods(pool))
        calls = []
        for i in range(150):
            call = pool.call(
                "work", i, deadline=0.3, key=rng.choice(["", "a", "b"]), weight=rng.randint(1, 4)
            )
            calls.append(asyncio.create_task(call))
            if rng.random() < 0.2:
                rng.choice(calls).cancel()
            await asyncio.sleep(0.003 * rng.random())
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert not restless.done() and restless.cancel()
        for worker in workers:
            worker.mode = "ok"
        await until(lambda: all(r.state in ("up", "trial") for r in pool.replicas))
        answers = await asyncio.gather(*(pool.call("work", i, deadline=5) for i in range(20)))
        assert answers == list(range(20)) and pool.load == [0, 0, 0] and pool.waiting == 0
        return results

    results = run(go(), 20)
    assert all(r == i for i, r in enumerate(results) if isinstance(r, int))
    assert all(isinstance(r, int | RoleError | asyncio.CancelledError) for r in results)
    assert sum(isinstance(r, int) for r in results) > 30
