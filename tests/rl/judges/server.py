"""A server that speaks HTTP over a real socket and misbehaves as it is told to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Answer:
    body: Any = None  # text as it is, else as JSON
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    how: Literal["whole", "truncated", "reset", "disconnect"] = "whole"


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float


def said(text: str | None = "S:5", finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    """A chat completion as servers write it."""
    return {
        "id": "c-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **message},
                "finish_reason": finish,
            }
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15},
    }


def likely(**logps: float) -> dict[str, Any]:
    """A completion of one token with the log-probs of its alternatives."""
    body, top = said("x", "length"), [{"token": token, "logprob": p} for token, p in logps.items()]
    body["choices"][0]["logprobs"] = {"content": [{"token": "x", "logprob": -0.1, "top_logprobs": top}]}
    return body


@dataclass
class Server:
    """script(request's number from 0, what it asks) → answer; `url` is where a client goes."""

    script: Callable[[int, str], Answer] = lambda n, text: Answer(body=said())
    models: Answer = Answer(body={"object": "list", "data": []})
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    now: int = 0
    most: int = 0

    @property
    def asked(self) -> list[str]:
        return [request.body["messages"][0]["content"] for request in self.requests]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._one(head.decode().split("\r\n"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(
        self, lines: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        verb, path, _ = lines[0].split()
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines[1:] if x)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        if verb == "GET":
            answer = self.models
        else:
            self.requests.append(Request(path, headers, body, time.monotonic()))
            answer = self.script(len(self.requests) - 1, body["messages"][0]["content"])
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(answer.delay)
        finally:
            self.now -= 1
        if answer.how == "disconnect":
            raise ConnectionError
        if answer.how == "reset":
            writer.transport.abort()
            raise ConnectionError
        text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        data = text.encode()
        fields = {"content-type": "application/json", "content-length": str(len(data)), **answer.headers}
        told = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"HTTP/1.1 {answer.status} Whatever\r\n{told}\r\n".encode())
        writer.write(data[: len(data) // 2] if answer.how == "truncated" else data)
        await writer.drain()
        if answer.how == "truncated":
            raise ConnectionError

    @asynccontextmanager
    async def up(self, port: int = 0) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        try:
            yield self
        finally:
            server.close()


def closed_port() -> int:
    """A port at which nobody listens."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
