"""Groups of questions to judges behind real HTTP servers that limit, fail, stall, lie and die."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import pytest

from rl.actors.judge import Judge
from rl.config import Dispatch, Scalar
from rl.config import Judge as JudgeConfig
from rl.judges.desk import Desk, Judging, kind
from rl.pool import Pool
from rl.replica import PoolDown
from rl.roles import Local
from rl.types import Ask, InfraFail, ParseFail, Prompt, Reply, Score
from tests.rl.judges.server import Answer, Server, closed_port, said

QUICK = Dispatch(attempt=3.0, attempts=3, breaker=2, rest=0.05, in_flight=64, patience=5.0, affinity=8)
CFG = JudgeConfig(model="judge-7b", template="{problem}|{candidate}", temperature=0.7, max_tokens=9)
FINE = Answer(body=said("S:4"))


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def asks(n=4):
    return [Ask(text=f"q{i}", about=(i,), seed=i) for i in range(n)]


def desk_at(*urls: str, cfg: JudgeConfig = CFG, **numbers) -> Desk:
    dispatch = replace(QUICK, **numbers)
    judges = [Local(f"judge-{i}", Judge(None, cfg, url, f"judge-{i}")) for i, url in enumerate(urls)]
    return Desk(Pool(judges, "judge", dispatch), dispatch)


def with_servers(servers, work, seconds=10.0, **numbers):
    """work(desk) with the desk over all servers."""

    async def go():
        async with AsyncExitStack() as stack, asyncio.timeout(seconds):
            for server in servers:
                await stack.enter_async_context(server.up())
            return await work(desk_at(*(server.url for server in servers), **numbers))

    return asyncio.run(go())


def one_group(*servers, n=4, deadline=5.0, **numbers):
    return with_servers(servers, lambda desk: desk.answer(asks(n), key="p", deadline=deadline), **numbers)


def always(answer: Answer) -> Server:
    return Server(lambda n, text: answer)


# ── One group ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_groups_questions_go_to_one_replica_and_replies_keep_their_order():
    servers = [
        Server(lambda n, text: Answer(body=said(text), delay=0.01 * (4 - int(text[1])))) for _ in range(2)
    ]
    replies = one_group(*servers)
    assert [r.text for r in replies] == ["q0", "q1", "q2", "q3"] and {r.attempts for r in replies} == {1}
    assert sorted(len(server.requests) for server in servers) == [0, 4]
    assert {r.replica for r in replies} <= {"judge-0", "judge-1"} and len({r.replica for r in replies}) == 1


def test_the_key_is_sent_from_its_environment_variable(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-7")
    server = always(FINE)
    one_group(server, n=1, cfg=replace(CFG, api_key="JUDGE_KEY"))
    assert server.requests[0].headers["authorization"] == "Bearer sk-7"
    assert server.requests[0].body["model"] == "judge-7b" and server.requests[0].body["temperature"] == 0.7


@pytest.mark.parametrize(
    "bad",
    [
        Answer(status=500, body="oops"),
        Answer(body=said(), how="truncated"),
        Answer(body=said(), how="reset"),
        Answer(body="<html>"),
        Answer(body={"choices": []}),
        Answer(status=404, body="no such model"),
        Answer(body=said(), delay=30),
    ],
    ids=["500", "truncated", "reset", "not json", "no choices", "404", "slow"],
)
def test_o056_what_fails_on_one_replica_is_answered_by_the_other(bad):
    for order in ([always(bad), always(FINE)], [always(FINE), always(bad)]):
        for key in ("a", "b", "c"):  # some of them prefer the bad one
            replies = with_servers(
                order, lambda d, key=key: d.answer(asks(2), key=key, deadline=5), attempt=0.3
            )
            assert [r.text for r in replies] == ["S:4", "S:4"]


def test_only_the_failed_questions_are_asked_again_of_another_replica():
    first = Server(lambda n, text: FINE if text in ("q0", "q2") else Answer(status=500))
    second = Server(lambda n, text: FINE if text in ("q0", "q2") else Answer(status=500))
    replies = one_group(first, second)
    assert [r.attempts for r in replies] == [1, 3, 1, 3]
    assert [bool(r.failure) for r in replies] == [False, True, False, True]
    assert sorted(first.asked + second.asked) == sorted(["q0", "q1", "q2", "q3"] + ["q1", "q3"] * 2)
    assert {len(first.asked), len(second.asked)} == {2, 6} or {len(first.asked), len(second.asked)} == {4}


@pytest.mark.parametrize("status", [400, 401, 403, 422])
def test_a_refusal_of_the_question_or_the_key_is_not_repeated(status):
    servers = [always(Answer(status=status, body="maximum context length is 4096")) for _ in range(2)]
    replies = one_group(*servers)
    assert all(r.failure and r.attempts == 1 for r in replies)
    assert sum(len(server.requests) for server in servers) == 4


def test_questions_that_a_judge_refuses_do_not_open_its_circuit():
    async def work(desk):
        for _ in range(5):
            replies = await desk.answer(asks(2), key="", deadline=5)
            assert {kind(r) for r in replies} == {"question"}
        return [replica.state for replica in desk.pool.replicas]

    assert with_servers([always(Answer(status=400, body="too long"))], work) == ["up"]


def test_o054_one_slow_question_of_eight_costs_its_own_reply_only_and_no_more_than_the_deadline():
    slow = Server(lambda n, text: Answer(body=said("S:4"), delay=60 if text == "q3" else 0))

    async def work(desk):
        began = time.monotonic()
        return await desk.answer(asks(8), key="", deadline=1.6), time.monotonic() - began

    replies, took = with_servers([slow], work, attempt=0.5)
    assert took < 2.5 and [r.text for i, r in enumerate(replies) if i != 3] == ["S:4"] * 7
    assert replies[3].failure.startswith("timeout: ") and replies[3].attempts == 3
    assert slow.asked.count("q0") == 1


def test_a_replica_that_never_comes_back_from_a_call_is_a_failed_attempt_of_all_its_questions():
    class Stuck:
        async def answer(self, asks, seconds):
            await asyncio.sleep(60)

    async def go():
        dispatch = replace(QUICK, attempt=0.1)
        desk = Desk(Pool([Local("judge-0", Stuck())], "judge", replace(dispatch, breaker=99)), dispatch)
        return await desk.answer(asks(2), key="", deadline=5), desk.metrics()

    replies, metrics = asyncio.run(go())
    assert all(r.failure.startswith("replica: judge-0.answer gave no answer within 0.1 s") for r in replies)
    assert {r.attempts for r in replies} == {3} and metrics["failures/replica"] == 6


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


def test_no_questions_need_no_replica():
    async def go():
        return await desk_at(f"http://127.0.0.1:{closed_port()}/v1").answer([], key="", deadline=1)

    assert asyncio.run(go()) == []


def test_kinds_of_failures_without_a_word_for_them():
    assert kind(Reply()) == ""
    assert kind(Reply(failure="unknown character: é", again=False)) == "question"
    assert kind(Reply(failure="it broke")) == "replica"


# ── From a group to its verdicts ────────────────────────────────────────────────────────────────────────────

PROMPT = Prompt(ids=(1,), text="r12345=", answer="54321")


def test_o056_a_group_becomes_verdicts_and_what_failed_is_an_outcome_of_its_own_answer():
    def script(n, text):
        return {
            "a": Answer(body=said("S:5")),
            "b": Answer(body=said("hm")),
            "c": Answer(status=500, body="oops"),
            "d": Answer(body=said("S:0")),
        }[text.rpartition("|")[2]]

    async def work(desk):
        judging = Judging(desk.pool, CFG, desk.cfg, deadline=5.0)
        return await judging.rate(PROMPT, list("abcd"), [1, 2, 3, 4])

    a, b, c, d = with_servers([Server(script)], work)
    assert (a.outcome, d.outcome) == (Score(1.0), Score(0.0))
    assert isinstance(b.outcome, ParseFail)
    assert isinstance(c.outcome, InfraFail) and "HTTP 500 oops" in c.outcome.why
    assert [len(v.calls) for v in (a, b, c, d)] == [1] * 4 and c.calls[0].attempts == 3
    assert a.calls[0].producer == "judge" and a.calls[0].replica == "judge-0"


@dataclass
class Logits:
    """A scalar judge's replica: it reads one question list at a time, and takes no seconds."""

    asked: list = field(default_factory=list)

    async def answer(self, asks):
        self.asked.append(asks)
        return [
            Reply(failure="unknown character 'é'", again=False)
            if "é" in ask.text
            else Reply(score=len(ask.text) / 10)
            for ask in asks
        ]


def test_a_scalar_judge_goes_the_same_way():
    async def go():
        replica = Logits()
        judging = Judging(Pool([Local("scalar-0", replica)], "scalar", QUICK), Scalar(), QUICK, deadline=5.0)
        verdicts = await judging.rate(PROMPT, ["1", "é", "333"], [1, 2, 3])
        return verdicts, replica, judging.desk.metrics()

    verdicts, replica, metrics = asyncio.run(go())
    assert [type(v.outcome) for v in verdicts] == [Score, InfraFail, Score]
    assert verdicts[0].calls[0].producer == "scalar" and len(replica.asked) == 1
    assert metrics["failures/question"] == 1
