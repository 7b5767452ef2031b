"""Desks over judges behind real HTTP servers."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from rl.actors.judge import Judge
from rl.config import Dispatch
from rl.config import Judge as JudgeConfig
from rl.judges.desk import Desk
from rl.pool import Pool
from rl.roles import Local
from rl.types import Ask
from tests.rl.judges.server import Answer, Server, said

QUICK = Dispatch(attempt=3.0, attempts=3, breaker=2, rest=0.05, in_flight=64, patience=5.0, affinity=8)
CFG = JudgeConfig(model="judge-7b", template="{problem}|{candidate}", temperature=0.7, max_tokens=9)
FINE = Answer(body=said("S:4"))


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
