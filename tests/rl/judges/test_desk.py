"""A group's questions to judges behind real HTTP servers that fail, stall and lie: replies, then verdicts."""

import asyncio
import time
from dataclasses import dataclass, field, replace

import pytest

from rl.config import Scalar
from rl.judges.desk import Desk, Judging, kind
from rl.pool import Pool
from rl.roles import Local
from rl.types import InfraFail, ParseFail, Prompt, Reply, Score
from tests.rl.judges.desks import CFG, FINE, QUICK, always, asks, desk_at, one_group, with_servers
from tests.rl.judges.server import Answer, Server, closed_port, said


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


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
