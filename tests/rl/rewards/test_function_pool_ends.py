"""Real processes that are killed, stopped or lose a parent: what is answered and replaced; none is left."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rl.rewards.function_pool import FunctionPool
from rl.types import Abstain, InfraFail, Score
from tests.rl.rewards.zoo import PROMPT, ZOO, alive, using, warden, write

pytestmark = pytest.mark.slow  # processes, deadlines and kills
ROOT = Path(__file__).parents[3]


@pytest.fixture
def zoo(tmp_path):
    return f"{write(tmp_path, ZOO)}:reward"


@pytest.mark.parametrize("text", ["sleeps", "spins", "ignores", "stops", "waits_for_children"])
def test_a_call_past_its_deadline_is_killed_with_all_its_children_and_replaced(zoo, text):
    deadline = 0.6

    async def work(pool):
        began = time.monotonic()
        [(outcome, metrics)] = await pool.score(PROMPT, [text])
        took = time.monotonic() - began
        left = alive(zoo.split(":")[0], but="groups ^=")  # but the warden
        return outcome, metrics, took, left, await pool.score(PROMPT, ["good"])

    outcome, metrics, took, left, after = using(FunctionPool(zoo, workers=1, deadline=deadline), work)
    assert outcome == InfraFail(f"{zoo}: no answer within the deadline of 0.6 s") and metrics == {}
    assert deadline <= took < 2 * deadline
    assert not left
    assert after == [(Score(1.0), {})]


def test_a_child_that_a_call_leaves_behind_ends_with_the_pool(zoo):
    async def work(pool):
        assert await pool.score(PROMPT, ["leaves_child"]) == [(Score(1.0), {})]
        return alive(zoo.split(":")[0], patience=0.0)

    # The child, its parent, the warden; and then none: see `using`.
    assert len(using(FunctionPool(zoo, workers=1, deadline=5.0), work)) == 3


def test_a_cancelled_call_is_killed_and_its_answer_never_reaches_another(zoo):
    async def work(pool):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score(PROMPT, ["naps", "naps"]), 0.1)
        return await pool.score(PROMPT, ["metrics", "nothing"])

    (first, _), (second, _) = using(FunctionPool(zoo, workers=2, deadline=5.0), work)
    assert first == Score(2.0) and isinstance(second, Abstain)


def test_stopping_answers_the_calls_under_way_and_later_ones(zoo):
    async def work(pool):
        calls = asyncio.ensure_future(pool.score(PROMPT, ["sleeps", "waits_for_children", "good"]))
        await asyncio.sleep(0.3)
        await pool.stop()
        return [*await asyncio.wait_for(calls, 2), *await pool.score(PROMPT, ["good"])]

    said = [outcome.why for outcome, _ in using(FunctionPool(zoo, workers=2, deadline=20.0), work)]
    assert [why.removeprefix(f"{zoo}: ") for why in said] == [
        "the pool was stopped", "the pool was stopped", "the pool is not running", "the pool is not running",
    ]  # fmt: skip


def test_a_stopped_pool_can_be_started_again(zoo):
    async def work(pool):
        await pool.stop()
        await pool.start()
        return await pool.score(PROMPT, ["good"])

    assert using(FunctionPool(zoo, workers=1, deadline=5.0), work) == [(Score(1.0), {})]


def test_a_process_that_dies_between_calls_costs_none(zoo):
    async def work(pool):
        os.kill(pool._idle[0].process.pid, signal.SIGKILL)
        await asyncio.sleep(0.1)
        return await pool.score(PROMPT, ["good"])

    assert using(FunctionPool(zoo, workers=1, deadline=5.0), work) == [(Score(1.0), {})]


def test_the_pool_works_on_and_is_still_guarded_when_its_warden_was_killed(zoo):
    async def work(pool):
        os.kill(first := warden(zoo), signal.SIGKILL)
        await asyncio.sleep(0.2)
        rated = await pool.score(PROMPT, ["exits_hard", "good"])
        assert warden(zoo) != first
        return rated

    assert using(FunctionPool(zoo, workers=2, deadline=5.0), work)[1] == (Score(1.0), {})


@pytest.mark.parametrize(
    ("text", "children_first"),  # as Ray ends an actor
    [("good", False), ("spins", False), ("waits_for_children", False), ("waits_for_children", True)],
)
def test_all_processes_die_with_a_parent_that_is_killed(zoo, text, children_first):
    code = f"""
        import asyncio
        from rl.rewards.function_pool import FunctionPool
        from rl.types import Prompt
        async def main():
            pool = FunctionPool({zoo!r}, workers=2, deadline=600.0)
            await pool.start()
            asyncio.ensure_future(pool.score(Prompt(ids=(), text=""), [{text!r}]))
            await asyncio.sleep(0.5)
            print("busy", flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        parent.stdout.readline()
        before = alive(zoo.split(":")[0] + ":reward", patience=0.0)
        for pid, ppid, *_ in map(str.split, before if children_first else []):
            if ppid == str(parent.pid):
                os.kill(int(pid), signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()
    assert len(before) >= 4, "the parent, its two workers, the warden"
    assert not alive(zoo.split(":")[0], patience=3.0)


def test_a_file_that_vanishes_under_way_makes_calls_fail_and_not_the_pool(zoo):
    async def work(pool):
        path = Path(zoo.split(":")[0])
        path.unlink()
        gone = await pool.score(PROMPT, ["exits_hard", "good"])
        write(path.parent, ZOO)
        return [*gone, *await pool.score(PROMPT, ["good"])]

    first, second, third = using(FunctionPool(zoo, workers=1, deadline=5.0), work)
    assert "exit code 3" in first[0].why and "there is no file" in second[0].why
    assert third == (Score(1.0), {})
