"""Who is asked, who waits, who is left alone, and what ends a call: on the clock of a real event loop."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import pytest

from rl.config import Dispatch
from rl.pool import Pool, _affinity
from rl.replica import PoolDown, RoleError
from rl.roles import Local

QUICK = Dispatch(
    attempt=2.0, attempts=3, breaker=2, rest=0.05, in_flight=4, queue=8, patience=5.0, affinity=2
)


@dataclass
class Worker:
    """Does what `mode` says; counts what it is asked for."""

    mode: str = "ok"  # ok, fail, hang, refuse
    seconds: float = 0.0
    asked: list = field(default_factory=list)
    starts: int = 0
    now: int = 0
    most: int = 0

    async def start(self):
        self.starts += 1

    async def work(self, x=None):
        self.asked.append(x)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.mode == "hang":
                await asyncio.sleep(60)
            await asyncio.sleep(self.seconds)
            if self.mode == "fail":
                raise RuntimeError("out of memory")
            if self.mode == "refuse":
                raise ValueError("too long")
            return x
        finally:
            self.now -= 1


@dataclass
class Restarted(Worker):
    """As a restarted actor: it does nothing before its start."""

    up: bool = True
    start_works: bool = True

    async def start(self):
        self.starts += 1
        if not self.start_works:
            raise RuntimeError("still dead")
        self.up = True

    async def work(self, x=None):
        if not self.up:
            self.asked.append(x)
            raise RuntimeError("not started")
        return await super().work(x)


def pool_of(*workers, dispatch: Dispatch | None = QUICK, **numbers) -> Pool:
    cfg = Dispatch(**{**vars(dispatch), **numbers}) if dispatch else None
    return Pool([Local(f"w-{i}", worker) for i, worker in enumerate(workers)], "workers", cfg)


def run(coroutine, seconds=10.0):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def until(true, seconds=3.0):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


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


# ── Failures ────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── All down ────────────────────────────────────────────────────────────────────────────────────────────────


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
