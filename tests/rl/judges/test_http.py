"""What becomes of one question at an OpenAI-compatible server, over a real socket."""

import asyncio
import math
import time
from email.utils import formatdate

import pytest

from rl.judges.http import OpenAIClient, parse_completion, retry_after
from rl.types import Ask
from tests.rl.judges.server import Answer, Server, closed_port, likely, said

ASK = Ask(text="Is 4 right?", about=(0,), seed=2**40 + 7)
LABELS = Ask(text="Is 4 right?", about=(0,), seed=1, labels=("Yes", "No"))


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(answer: Answer, question: Ask = ASK, seconds: float = 5.0, **options):
    """(reply, the request that the server saw)"""

    async def go():
        async with Server(lambda n, text: answer).up() as server:
            client = OpenAIClient(server.url, "judge-7b", **options)
            (reply,) = await client.answer([question], seconds)
            await client.stop()
            return reply, server.requests[0]

    return asyncio.run(go())


def test_a_question_is_one_user_message_with_sampling_seed_and_key():
    options = {"key": "sk-1", "temperature": 0.7, "max_tokens": 99}
    reply, request = ask(Answer(body=said("fine. S:5")), **options)
    assert request.path == "/v1/chat/completions" and request.headers["authorization"] == "Bearer sk-1"
    assert request.body == {
        "model": "judge-7b",
        "messages": [{"role": "user", "content": "Is 4 right?"}],
        "seed": (2**40 + 7) % 2**31,
        "temperature": 0.7,
        "max_tokens": 99,
    }
    assert (reply.text, reply.finish, reply.failure) == ("fine. S:5", "stop", "")
    assert (reply.n_prompt, reply.n_tokens) == (12, 3) and reply.seconds > 0


def test_without_a_key_none_is_sent():
    _, request = ask(Answer(body=said()))
    assert "authorization" not in request.headers


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop", "stop"), (None, "stop"), ("length", "length"), ("content_filter", "abort"), ("abort", "abort")],
)
def test_finish_reasons(reason, finish):
    assert ask(Answer(body=said("S:5", reason)))[0].finish == finish


@pytest.mark.parametrize("content", ["", None])
def test_an_empty_content_is_an_empty_text_and_reasoning_is_not_the_verdict(content):
    reply, _ = ask(Answer(body=said(content, reasoning_content="so S:5 then")))
    assert reply.text == "" and not reply.failure


def test_labels_are_read_from_the_first_tokens_alternatives_with_spellings_summed():
    body = likely(**{"Yes": math.log(0.5), " yes": math.log(0.2), "Maybe": math.log(0.1)})
    reply, request = ask(Answer(body=body), LABELS)
    assert reply.label_logps == pytest.approx((math.log(0.7), -math.inf))
    sent = request.body
    assert (sent["logprobs"], sent["top_logprobs"], sent["max_tokens"]) == (True, 20, 1)
    assert sent["temperature"] == 1.0


def test_labels_that_cannot_be_told_apart_are_the_questions_fault_and_cost_no_call():
    async def go():
        async with Server().up() as server:
            client = OpenAIClient(server.url, "m")
            (reply,) = await client.answer([Ask(text="?", about=(0,), seed=1, labels=("1", "10"))], 5)
            return reply, server.requests

    reply, requests = asyncio.run(go())
    assert reply.failure.startswith("question:") and not reply.again and not requests


STATUSES = [
    (400, "question", False),
    (401, "key", False),
    (403, "key", False),
    (404, "address", True),
    (408, "timeout", True),
    (422, "question", False),
    (425, "rate", True),
    (429, "rate", True),
    (500, "server", True),
    (502, "server", True),
    (503, "server", True),
    (307, "server", True),
]


@pytest.mark.parametrize(("status", "kind", "again"), STATUSES)
def test_statuses_have_a_kind_the_servers_words_and_say_whether_to_try_again(status, kind, again):
    words = {"error": {"message": "maximum context length is 4096 tokens"}}
    reply, _ = ask(Answer(status=status, body=words))
    assert reply.failure.startswith(f"{kind}: HTTP {status} ") and reply.again is again
    assert "maximum context length is 4096" in reply.failure and reply.text == ""


@pytest.mark.parametrize("status", [408, 425, 429, 503])
def test_retry_after_is_read(status):
    assert ask(Answer(status=status, headers={"Retry-After": "7"}))[0].after == 7.0


def test_retry_after_in_seconds_as_a_date_and_as_nonsense():
    now = 1_700_000_000.0
    assert retry_after("1.5", now) == 1.5
    assert retry_after(formatdate(now + 30, usegmt=True), now) == 30.0
    assert retry_after(formatdate(now - 30, usegmt=True), now) == 0.0
    assert [retry_after(value, now) for value in (None, "soon", "nan", "inf", "-3", "")] == [0.0] * 6


@pytest.mark.parametrize(
    "body",
    [
        "<html>busy</html>",
        '{"choices": [{"message": {"content": "S:5"',
        "[" * 100_000,
        "null",
        {},
        {"choices": []},
        {"choices": [{"text": "S:5"}]},
        {"choices": [{"message": {"content": ["S:5"]}}]},
        {"choices": [{"message": None}]},
        {"error": {"message": "in a 200"}},
        {**said(), "usage": {"prompt_tokens": "many"}},
        {**said(), "usage": [1]},
    ],
    ids=lambda body: str(body)[:40],
)
def test_a_200_that_is_no_completion_is_a_failure_and_never_a_text(body):
    reply, _ = ask(Answer(body=body))
    assert reply.failure.startswith("response: ") and reply.again and reply.text == ""


def test_missing_logprobs_are_a_failure_where_labels_were_asked_for():
    for logprobs in ({}, {"logprobs": None}, {"logprobs": {"content": []}}):
        body = said("Yes")
        body["choices"][0] |= logprobs
        with pytest.raises(ValueError, match="not a chat completion as asked for"):
            parse_completion(body, ("Yes", "No"))
        assert parse_completion(body).text == "Yes"


@pytest.mark.parametrize("how", ["truncated", "reset", "disconnect"])
def test_a_body_cut_short_and_a_lost_connection_are_failures_to_be_tried_again(how):
    reply, _ = ask(Answer(body=said("S:5 " * 200), how=how))
    assert reply.failure.startswith("connection: http://127.0.0.1") and reply.again


def test_a_refused_connection_is_a_failure_and_the_start_says_so():
    client = OpenAIClient(f"http://127.0.0.1:{closed_port()}/v1", "m")
    (reply,) = asyncio.run(client.answer([ASK], 5))
    assert reply.failure.startswith("connection: ") and reply.again
    with pytest.raises(RuntimeError, match="cannot be reached: ConnectError"):
        asyncio.run(client.start())


def test_an_address_that_is_none_is_a_failure():
    (reply,) = asyncio.run(OpenAIClient("htp:/x", "m").answer([ASK], 5))
    assert reply.failure.startswith("connection: ")


def test_o054_a_slow_answer_fails_alone_at_the_deadline():
    async def go():
        slow = Server(lambda n, text: Answer(body=said(), delay=30 if text == "slow" else 0))
        async with slow.up() as server:
            client = OpenAIClient(server.url, "m")
            asks = [Ask(text="slow" if i == 3 else "quick", about=(i,), seed=i) for i in range(8)]
            began = time.monotonic()
            replies = await client.answer(asks, 0.5)
            return replies, time.monotonic() - began

    replies, took = asyncio.run(go())
    assert took < 3.0 and [bool(r.failure) for r in replies] == [i == 3 for i in range(8)]
    assert replies[3].failure.startswith("timeout: ") and "within 0.5 s" in replies[3].failure


def test_o055_questions_are_asked_at_the_same_time_up_to_the_bound():
    async def go():
        async with Server(lambda n, text: Answer(body=said(), delay=0.1)).up() as server:
            client = OpenAIClient(server.url, "m", connections=16)
            began = time.monotonic()
            replies = await client.answer([ASK] * 32, 10)
            return replies, time.monotonic() - began, server.most, client.stats()

    replies, took, most, stats = asyncio.run(go())
    assert not any(r.failure for r in replies) and most <= 16 and took < 2.5  # one by one: 3.2 s
    assert (stats.sampled_tokens, stats.prompt_tokens, stats.running) == (96, 384, 0)
    assert 0 < stats.busy_s <= stats.wall_s


@pytest.mark.parametrize(
    ("status", "fine"), [(200, True), (404, True), (401, False), (403, False), (503, False)]
)
def test_start_asks_whether_the_server_is_there(status, fine):
    async def go():
        async with Server(models=Answer(status=status, body="no such key")).up() as server:
            await OpenAIClient(server.url, "m").start()

    if fine:
        asyncio.run(go())
    else:
        with pytest.raises(RuntimeError, match=f"HTTP {status} no such key"):
            asyncio.run(go())
