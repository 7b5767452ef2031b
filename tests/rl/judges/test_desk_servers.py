"""Servers that limit, die and come back: how fast the desk asks them, and that no question is lost."""

import asyncio
import time

import pytest

from rl.judges.desk import kind
from rl.replica import PoolDown
from tests.rl.judges.desks import FINE, always, asks, desk_at, with_servers
from tests.rl.judges.server import Answer, Server, closed_port, said


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# ── Rates ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_429_is_waited_out_as_long_as_it_says_and_is_neither_attempt_nor_failure():
    server = Server(lambda n, text: Answer(status=429, headers={"Retry-After": "0.2"}) if n < 4 else FINE)

    async def work(desk):
        replies = await desk.answer(asks(1), key="", deadline=5)
        return replies, desk.metrics(), desk.pool.replicas[0]

    replies, metrics, replica = with_servers([server], work, attempts=1)
    assert replies[0].text == "S:4" and replies[0].attempts == 5
    waits = [b.at - a.at for a, b in zip(server.requests, server.requests[1:], strict=False)]
    assert min(waits) >= 0.19 and max(waits) < 1.0
    assert metrics["failures/rate"] == 4 and metrics["lost"] == 0 and replica.failures == 0


def test_429_of_one_replica_sends_the_question_to_the_other_at_once():
    limited = always(Answer(status=429, headers={"Retry-After": "30"}))

    async def work(desk):
        began = time.monotonic()
        replies = [await desk.answer(asks(2), key=f"{i}", deadline=5) for i in range(10)]
        return replies, time.monotonic() - began

    replies, took = with_servers([limited, always(FINE)], work)
    assert all(r.text == "S:4" for group in replies for r in group) and took < 4.0
    assert len(limited.requests) == 2  # one call; then it is left alone


def test_a_retry_after_beyond_the_deadline_ends_at_the_deadline_with_the_servers_words():
    server = always(Answer(status=429, headers={"Retry-After": "60"}, body="slow down"))

    async def work(desk):
        began = time.monotonic()
        return await desk.answer(asks(1), key="", deadline=0.3), time.monotonic() - began

    (reply,), took = with_servers([server], work)
    assert 0.25 < took < 2.0 and "HTTP 429" in reply.failure and "slow down" in reply.failure


def test_o058_a_server_that_allows_a_few_per_moment_gets_them_and_no_question_is_lost():
    granted: list[float] = []

    def limit(n, text):
        now = time.monotonic()
        if sum(now - at < 0.1 for at in granted) >= 5:
            return Answer(status=429, headers={"Retry-After": "0.1"})
        granted.append(now)
        return FINE

    server = Server(limit)

    async def work(desk):
        desk.metrics()
        groups = await asyncio.gather(*(desk.answer(asks(2), key=f"{i}", deadline=30) for i in range(14)))
        return groups, desk.metrics(), desk.pool.replicas[0].limit

    groups, metrics, limit_now = with_servers([server], work, seconds=30)
    assert all(r.text == "S:4" for group in groups for r in group)
    assert limit_now < 20 and 0 < metrics["rate"] < 70  # 50 per second allowed
    assert len(server.requests) < 112, "it learned to ask less"


# ── Replicas that die ───────────────────────────────────────────────────────────────────────────────────────


def test_two_replicas_one_dead_all_questions_are_answered_and_the_dead_one_is_left_alone():
    async def go():
        async with always(FINE).up() as server:
            desk = desk_at(f"http://127.0.0.1:{closed_port()}/v1", server.url, rest=60)
            groups = [await desk.answer(asks(3), key=f"{i}", deadline=5) for i in range(12)]
            return groups, desk.pool.replicas[0].state, desk.metrics(), server

    groups, state, metrics, server = asyncio.run(go())
    assert all(r.text == "S:4" and r.replica == "judge-1" for group in groups for r in group)
    assert state == "open" and len(server.requests) == 36
    assert metrics["failures/connection"] == 6 and metrics["lost"] == 0 and metrics["replicas_up"] == 1
    assert metrics["attempts"] == pytest.approx(42 / 36)


def test_o085_all_dead_callers_wait_and_are_answered_when_a_server_comes_back():
    async def go():
        port = closed_port()
        desk = desk_at(f"http://127.0.0.1:{port}/v1", breaker=1)
        calls = [asyncio.create_task(desk.answer(asks(2), key="", deadline=0.5)) for _ in range(3)]
        await asyncio.sleep(0.6)
        assert desk.pool.down_since is not None and not any(call.done() for call in calls)
        assert "ConnectError" in desk.pool.last_failure
        async with always(FINE).up(port):
            groups = await asyncio.wait_for(asyncio.gather(*calls), 3)
            assert desk.pool.down_since is None
            return groups

    assert all(r.text == "S:4" for group in asyncio.run(go()) for r in group)


def test_o057_after_patience_without_any_replica_the_desk_raises_and_gives_no_rewards():
    async def go():
        desk = desk_at(f"http://127.0.0.1:{closed_port()}/v1", breaker=1, patience=0.3)
        await desk.answer(asks(2), key="", deadline=5)

    with pytest.raises(PoolDown, match=r"judge: none of 1 replicas has answered for 0.3.*ConnectError"):
        asyncio.run(go())


def test_o056_a_key_that_every_server_refuses_ends_in_a_clear_abort():
    refusing = Server(
        lambda n, text: Answer(status=401, body="bad key"), models=Answer(status=401, body="bad key")
    )

    async def work(desk):
        while True:
            replies = await desk.answer(asks(2), key="", deadline=5)
            assert all(kind(r) == "key" and r.attempts == 1 for r in replies)

    with pytest.raises(PoolDown, match="HTTP 401 bad key"):
        with_servers([refusing], work, patience=0.3)


# ── Bounds, counters ────────────────────────────────────────────────────────────────────────────────────────


def test_o055_32_questions_at_a_time_and_never_more_than_in_flight_at_the_server():
    server = always(Answer(body=said("S:4"), delay=0.1))

    async def work(desk):
        began = time.monotonic()
        calls = [asyncio.create_task(desk.answer(asks(1), key="", deadline=9)) for _ in range(32)]
        await asyncio.sleep(0.02)
        waiting = desk.metrics()["queue"], desk.metrics()["in_flight"]
        await asyncio.gather(*calls)
        return time.monotonic() - began, waiting, desk.metrics()

    took, waiting, metrics = with_servers([server], work, in_flight=16)
    assert server.most <= 16 and took < 2.5 and waiting == (16.0, 16.0)
    assert metrics["queue"] == metrics["in_flight"] == 0 and metrics["attempts"] == 1.0
    assert 0.1 <= metrics["seconds"] < 2.0 and metrics["rate"] > 10


def test_no_room_before_the_deadline_is_a_failure_of_its_own_kind():
    async def work(desk):
        first = asyncio.create_task(desk.answer(asks(1), key="", deadline=5))
        await asyncio.sleep(0.02)
        (reply,) = await desk.answer(asks(1), key="", deadline=0.1)
        await first
        return reply, desk.metrics()

    reply, metrics = with_servers([always(Answer(body=said(), delay=0.3))], work, in_flight=1)
    assert kind(reply) == "queue" and reply.attempts == 0 and metrics["failures/queue"] == 1
