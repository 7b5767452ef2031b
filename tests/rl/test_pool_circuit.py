"""A failed call goes elsewhere, a failed replica is left alone for a while: on a real event loop's clock."""

import asyncio
import time
from functools import partial

import pytest

from rl.pool import _affinity
from rl.replica import RoleError
from tests.rl.workers import Restarted, Worker, pool_of, run, until


def test_a_failed_or_slow_call_is_tried_on_another_replica():
    for mode in ("fail", "hang"):
        bad, good = Worker(mode=mode), Worker()

        async def go(bad=bad, good=good):
            pool = pool_of(bad, good, attempt=0.2)
            assert await pool.call("work", 5, deadline=3) == 5
            assert len(bad.asked) == len(good.asked) == 1

        run(go())


def test_attempts_and_the_deadline_bound_a_call():
    workers = [Worker(mode="fail") for _ in range(2)]

    async def go():
        pool = pool_of(*workers, breaker=100)
        with pytest.raises(RoleError, match="out of memory"):
            await pool.call("work", deadline=5)
        assert sum(len(w.asked) for w in workers) == 3
        slow = pool_of(Worker(mode="hang"), breaker=100, attempts=100, attempt=0.2)
        began = time.monotonic()
        with pytest.raises(RoleError):
            await slow.call("work", deadline=0.5)
        assert 0.45 < time.monotonic() - began < 2.0

    run(go())


def test_a_value_error_is_the_callers_fault_and_opens_nothing():
    worker, other = Worker(mode="refuse"), Worker(mode="refuse")

    async def go():
        pool = pool_of(worker, other)
        for _ in range(6):
            with pytest.raises(RoleError, match="too long"):
                await pool.call("work", deadline=1)
        assert len(worker.asked) + len(other.asked) == 6
        assert [r.state for r in pool.replicas] == ["up", "up"]

    run(go())


def test_o085_a_dead_replica_is_not_asked_while_open_and_the_other_answers_everything():
    dead, good = Restarted(up=False, start_works=False), Worker(seconds=0.001)

    async def go():
        pool = pool_of(dead, good)
        answers = [await pool.call("work", i, deadline=2) for i in range(30)]
        assert answers == list(range(30)) and len(dead.asked) == 2  # breaker
        await until(lambda: dead.starts >= 2)
        await asyncio.gather(*(pool.call("work", i, deadline=2) for i in range(30)))
        assert len(dead.asked) == 2 and pool.down_since is None
        assert "still dead" in pool.last_failure

    run(go())


def test_o085_a_restarted_replica_is_started_then_tried_by_one_call_then_trusted():
    again, other = Restarted(up=False, start_works=False, seconds=0.05), Worker(seconds=0.05)

    async def go():
        pool = pool_of(again, other)
        for i in range(4):
            await pool.call("work", i, deadline=2)
        replica = pool.replicas[0]
        assert replica.state == "open"
        again.start_works = True
        await until(lambda: replica.state == "trial")
        before = len(again.asked)
        calls = [asyncio.create_task(pool.call("work", i, deadline=2)) for i in range(4)]
        await asyncio.sleep(0.01)
        assert len(again.asked) == before + 1 and replica.state == "probed"  # one call, no more
        await asyncio.gather(*calls)
        assert replica.state == "up" and replica.failures == 0
        await asyncio.gather(*(pool.call("work", i, deadline=2) for i in range(8)))
        assert len(again.asked) > before + 2

    run(go())


def test_a_probe_that_fails_opens_the_circuit_again():
    worker, other = Worker(mode="fail"), Worker()

    async def go():
        pool = pool_of(worker, other)
        for i in range(3):
            await pool.call("work", i, deadline=2)
        seen = len(worker.asked)
        assert pool.replicas[0].state == "open"
        await until(lambda: pool.replicas[0].state == "trial")
        assert await pool.call("work", 9, deadline=2) == 9 and len(worker.asked) == seen + 1
        assert pool.replicas[0].state == "open"

    run(go())


def test_a_replica_on_trial_gets_the_next_call_whatever_its_key():
    workers = [Worker(mode="fail"), Worker()]

    async def go():
        pool = pool_of(*workers)
        for i in range(3):
            await pool.call("work", i, deadline=2)
        workers[0].mode = "ok"
        await until(lambda: pool.replicas[0].state == "trial")
        names = [handle.name for handle in pool.handles]
        other = next(key for key in map(str, range(99)) if max(names, key=partial(_affinity, key)) == "w-1")
        await pool.call("work", "probe", key=other, deadline=2)
        await pool.call("work", "usual", key=other, deadline=2)
        assert workers[0].asked[-1] == "probe" and workers[1].asked[-1] == "usual"

    run(go())


def test_failures_must_come_in_a_row_to_open_a_circuit():
    worker = Worker()

    async def go():
        pool = pool_of(worker, attempts=1)
        for mode in ("fail", "ok") * 5:
            worker.mode = mode
            await asyncio.gather(pool.call("work", deadline=1), return_exceptions=True)
        assert pool.replicas[0].state == "up" and len(worker.asked) == 10

    run(go())
