"""A judge behind an OpenAI-compatible server: one question, one chat completion.

What goes wrong is told by kind in the reply's failure (rl/judges/desk.py lists them) and never raised. Only
the message's content is the verdict: where a server splits off reasoning, that is not read.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from losses import label_logps
from rl.engines.base import EngineStats
from rl.types import Ask, Finish, Reply

TOP = 20  # log-probs per token: the most that servers allow
SEEDS = 2**31  # what every server takes as a seed lies below
START_S = 10.0  # for a server to say that it is there
SHOWN = 200  # characters of a server's own words in a failure
# Null where a server does not tell; whatever else there is ("content_filter", "abort") cut the text off.
FINISH: Mapping[Any, Finish] = {"stop": "stop", None: "stop", "length": "length"}
# Other codes: 4xx is about the question, the rest about the server.
STATUS = {401: "key", 403: "key", 404: "address", 405: "address", 408: "timeout", 425: "rate", 429: "rate"}
LASTING = ("question", "key")  # kinds of failure that another attempt cannot mend


class OpenAIClient:
    """Chat completions of `model` at `url` (http://host:8000/v1), as many at a time as `connections`.

    key: sent as bearer token, if there is one. max_tokens, temperature: of an answer in words; of labels the
    log-probabilities of one token are asked for, at temperature 1.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        connections: int = 256,
    ) -> None:
        self.url, self.model = url.rstrip("/"), model
        self.temperature, self.max_tokens = temperature, max_tokens
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            timeout=None,  # deadlines are the caller's
        )
        self._began, self._busy_since, self._busy = time.monotonic(), 0.0, 0.0
        self._running = self._sampled = self._prompted = 0

    async def start(self) -> None:
        """Raises RuntimeError if nobody answers at the address, or the key is refused."""
        try:
            async with asyncio.timeout(START_S):
                response = await self._http.get(f"{self.url}/models")
        except TimeoutError:
            raise RuntimeError(f"{self.url} gave no answer within {START_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RuntimeError(f"{self.url} cannot be reached: {_named(error)}") from None
        # Not every server lists its models, so a 404 is an answer.
        if response.status_code in (401, 403) or response.status_code >= 500:
            raise RuntimeError(f"{self.url}: {_refusal(response)}")

    async def answer(self, asks: Sequence[Ask], seconds: float) -> list[Reply]:
        """A reply per question, each within `seconds`, waiting for a connection included."""
        return await asyncio.gather(*(self._answer(ask, seconds) for ask in asks))

    async def _answer(self, ask: Ask, seconds: float) -> Reply:
        began = time.monotonic()
        if not self._running:
            self._busy_since = began
        self._running += 1
        try:
            async with asyncio.timeout(seconds):
                reply = _read(
                    await self._http.post(f"{self.url}/chat/completions", json=self._body(ask)), ask
                )
        except TimeoutError:
            reply = Reply(failure=f"timeout: {self.url} gave no answer within {seconds:.3g} s")
        except ValueError as error:  # of the question: a text that is no Unicode, labels that look alike
            reply = Reply(failure=f"question: {error}", again=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reply = Reply(failure=f"connection: {self.url}: {_named(error)}")
        finally:
            self._running -= 1
            if not self._running:
                self._busy += time.monotonic() - self._busy_since
        self._sampled += reply.n_tokens
        self._prompted += reply.n_prompt
        return replace(reply, seconds=time.monotonic() - began)

    def _body(self, ask: Ask) -> dict[str, Any]:
        said = [{"role": "assistant", "content": ask.said}] if ask.said else []
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": ask.text}, *said],
            "seed": ask.seed % SEEDS,
        }
        if ask.labels:
            label_logps({}, ask.labels)  # raises ValueError for labels that an answer could not tell apart
            return body | {"max_tokens": 1, "temperature": 1.0, "logprobs": True, "top_logprobs": TOP}
        return body | {"max_tokens": self.max_tokens, "temperature": self.temperature}

    def stats(self) -> EngineStats:
        now = time.monotonic()
        return EngineStats(
            version=0,
            running=self._running,
            waiting=0,
            sampled_tokens=self._sampled,
            prompt_tokens=self._prompted,
            busy_s=self._busy + (now - self._busy_since if self._running else 0.0),
            wall_s=now - self._began,
        )

    async def stop(self) -> None:
        await self._http.aclose()


def _read(response: httpx.Response, ask: Ask) -> Reply:
    if response.status_code != 200:
        return _failure(response)
    try:
        return parse_completion(response.json(), ask.labels)
    except (ValueError, RecursionError) as error:  # no JSON, or not of a chat completion
        return Reply(failure=f"response: {_named(error)}: {response.text[:SHOWN]!r}")


def parse_completion(body: Any, labels: Sequence[str] = ()) -> Reply:
    """The first choice of a chat completion: its text, or its log-probs of the labels as the first token.

    Raises ValueError saying what is missing; content that is null or empty is not, it is an empty text.
    """
    try:
        choice, usage = body["choices"][0], body.get("usage") or {}
        text, finish = (
            choice["message"].get("content") or "",
            FINISH.get(choice.get("finish_reason"), "abort"),
        )
        n_prompt, n_tokens = (int(usage.get(f"{part}_tokens") or 0) for part in ("prompt", "completion"))
        first = choice["logprobs"]["content"][0]["top_logprobs"] if labels else []
        top = {entry["token"]: float(entry["logprob"]) for entry in first}
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"not a chat completion as asked for ({_named(error)})") from None
    if not isinstance(text, str):
        raise ValueError(f"the content is no text but {type(text).__name__}")
    logps = tuple(label_logps(top, labels).tolist()) if labels else ()
    return Reply(text=text, finish=finish, label_logps=logps, n_prompt=n_prompt, n_tokens=n_tokens)


def retry_after(value: str | None, now: float) -> float:
    """Seconds to wait by a Retry-After header (seconds, or a date) at `now` (Unix time); 0 without one."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except ValueError:
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _failure(response: httpx.Response) -> Reply:
    status = response.status_code
    kind = STATUS.get(status, "question" if 400 <= status < 500 else "server")
    after = retry_after(response.headers.get("retry-after"), time.time())
    return Reply(failure=f"{kind}: {_refusal(response)}", again=kind not in LASTING, after=after)


def _refusal(response: httpx.Response) -> str:
    return f"HTTP {response.status_code} {' '.join(response.text.split())[:SHOWN]}".strip()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
