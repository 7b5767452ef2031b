"""Real processes that run what users might write: whatever a function does concerns its own call only."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rl.rewards.function_pool import FunctionPool, NoAnswer
from rl.types import Abstain, InfraFail, ParseFail, Prompt, Score

pytestmark = pytest.mark.slow  # processes, deadlines and kills

PROMPT = Prompt(ids=(1,), text="2+2=", answer="4", key="sums", extra={"n": 3})
ROOT = Path(__file__).parents[3]

# The answer's text names what is done with it.
ZOO = """
    import asyncio, os, re, signal, socket, subprocess, sys, threading, time

    def good(): return 1.0
    def naps(): time.sleep(0.2); return 1.0
    def sleeps(): time.sleep(600)
    def spins(): re.fullmatch("(a|a)*b", "a" * 60)  # inside C, without releasing the interpreter's lock
    def ignores():
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM): signal.signal(s, signal.SIG_IGN)
        while True:
            try: time.sleep(600)
            except BaseException: pass
    def stops(): os.kill(os.getpid(), signal.SIGSTOP)

    def raises(): raise KeyError("what")
    def asserts(): assert False
    def exits(): sys.exit(3)
    def exits_hard(): os._exit(3)
    def crashes(): os.kill(os.getpid(), signal.SIGSEGV)
    def interrupts(): raise KeyboardInterrupt
    def recurses(): return recurses()
    def group(): raise ExceptionGroup("several", [ValueError("a")])
    class Bad(Exception):
        def __str__(self): raise RuntimeError
    def bad_error(): raise Bad
    def allocates():
        held = []
        while True: held.append(bytearray(1 << 26))

    def lists(): return [1.0]
    def nothing(): return None
    def nan(): return float("nan")
    def unpicklable(): return lambda: 1.0
    def generates(): yield 1.0
    def metrics(): return {"score": 2.0, "acc": True, "lock": threading.Lock()}

    def prints():
        print("to stdout"); print("to stderr", file=sys.stderr); os.system("echo to the shell")
        return 1.0
    def prints_much(): sys.stdout.write("x" * 3_000_000); return 1.0
    def reads(): return float(input())
    def closes_stdout(): sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2); return 1.0
    def closes_all(): os.closerange(0, 1024); return 1.0
    def alarm():
        def late(*_): raise TimeoutError("alarm")
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(600)
    def leaves_alarm():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 1.0
    def loop(): return asyncio.run(asyncio.sleep(0, 1.0))

    def child():
        code = "import time; time.sleep(600)"
        return subprocess.Popen([sys.executable, "-Sc", code, __file__], close_fds=False)
    def leaves_child(): child(); return 1.0
    def waits_for_children():
        if os.fork() == 0:
            while True: pass
        child().wait()
    def child_outlives_parent(): child(); os._exit(3)
    def forked_outlives_parent():
        if os.fork() == 0: time.sleep(600)
        os._exit(3)
    def forks_and_both_return():
        os.fork()
        return 1.0
    def child_gets_our_number():
        a, b = socket.socketpair()
        b.setblocking(False)
        if os.fork() == 0:
            for _ in range(100): os.dup(a.fileno())  # one gets the number of the pool's pipe
            return 1.0
        os.wait()
        try: return b.recv(100)
        except BlockingIOError: return 0.0
    def child_raises():
        if os.fork() == 0: raise ValueError
        os.wait()
        return 1.0

    def reward(prompt, completion, answer, extra): return globals()[completion]()
"""


@pytest.fixture
def zoo(tmp_path):
    return f"{write(tmp_path, ZOO)}:reward"


def write(folder: Path, text: str, name: str = "reward.py") -> Path:
    (folder / name).write_text(textwrap.dedent(text))
    return folder / name


def using(pool, work):
    """What `work(pool)` returns, in a pool that is started, and then stopped with nothing left of it."""

    async def bounded():
        async with asyncio.timeout(30):
            await pool.start()
            try:
                return await work(pool)
            finally:
                await pool.stop()
                assert not alive(pool.spec.split(":")[0])
                assert not alive("", parent=os.getpid()), "a zombie"

    return asyncio.run(bounded())


def score(spec, texts, workers=1, deadline=10.0, **options):
    pool = FunctionPool(spec, workers=workers, deadline=deadline, **options)
    return using(pool, lambda pool: pool.score(PROMPT, texts))


def alive(
    path: str | Path, parent: int | None = None, but: str = "ps -wweo", patience: float = 1.0
) -> list[str]:
    """Processes with the path in their command line, or zombies of a parent, that `ps` still shows after a
    while."""
    until = time.monotonic() + patience
    while True:
        shown = subprocess.run(
            ["ps", "-wweo", "pid=,ppid=,stat=,args="], capture_output=True, text=True
        ).stdout
        rows = [line for line in shown.splitlines() if str(path) in line and but not in line]
        if parent is None:
            rows = [row for row in rows if not row.split()[2].startswith("Z")]
        else:
            rows = [row for row in rows if row.split()[1] == str(parent) and row.split()[2].startswith("Z")]
        if not rows or time.monotonic() > until:
            return rows
        time.sleep(0.05)


def warden(spec: str) -> int:
    (pid,) = (row.split()[0] for row in alive(spec, patience=0.0) if "groups ^=" in row)
    return int(pid)


def test_both_signatures_sync_and_async(tmp_path):
    path = write(
        tmp_path,
        """
        import asyncio
        def ours(prompt, completion, answer, extra):
            return {"score": completion == answer, "n": extra["n"], "prompt": prompt}
        async def ours_async(prompt, completion, answer, extra):
            await asyncio.sleep(0)
            return ours(prompt, completion, answer, extra)
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
            right = solution_str == ground_truth
            return {"score": right, "n": extra_info["n"], "prompt": data_source, **kwargs}
        async def compute_score_async(data_source, solution_str, ground_truth, extra_info, **kwargs):
            return compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
        """,
    )
    right = (Score(1.0), {"n": 3.0, "prompt": "2+2="})
    assert score(f"{path}:ours", ["4", "5"])[0] == right
    assert score(f"{path}:ours_async", ["5", "4"])[1] == right
    right = (Score(1.0), {"n": 3.0, "prompt": "sums", "strict": True})
    assert score(f"{path}:compute_score", ["4"], fixed={"strict": True})[0] == right
    wrong = (Score(0.0), {"n": 3.0, "prompt": "sums"})
    assert score(f"{path}:compute_score_async", ["5"])[0] == wrong


def test_whatever_a_function_does_concerns_its_own_call_only(zoo, capfd):
    expected = {
        "good": Score(1.0),
        "raises": "KeyError: 'what' (reward.py:",
        "asserts": "AssertionError (reward.py:",
        "exits": "SystemExit: 3",
        "exits_hard": "exit code 3",
        "crashes": "ended by signal 11 (Segmentation fault)",
        "interrupts": "KeyboardInterrupt",
        "recurses": "RecursionError",
        "group": "ExceptionGroup: several (1 sub-exception)",
        "bad_error": "Bad: <exception str() failed>",
        "allocates": "MemoryError",
        "lists": "list",
        "nothing": Abstain("the function returned None"),
        "nan": "nan",
        "unpicklable": "not_a_number",
        "generates": "not_a_number",
        "metrics": Score(2.0),
        "prints": Score(1.0),
        "prints_much": Score(1.0),
        "reads": "EOFError",
        "closes_stdout": Score(1.0),
        "closes_all": "closed its pipe",
        "alarm": "TimeoutError: alarm",
        "leaves_alarm": Score(1.0),
        "naps": Score(1.0),
        "loop": Score(1.0),
        "forks_and_both_return": Score(1.0),
        "child_gets_our_number": Score(0.0),
        "child_raises": Score(1.0),
        "child_outlives_parent": "exit code 3",
        "forked_outlives_parent": "exit code 3",
        "no such name": "KeyError: 'no such name'",
    }

    async def one_by_one(pool):
        return {text: await pool.score(PROMPT, [text, "good"]) for text in expected}

    said = using(FunctionPool(zoo, workers=1, deadline=5.0, memory_gb=0.6), one_by_one)
    for text, ((outcome, _), (next_outcome, _)) in said.items():
        match outcome:
            case InfraFail(why):
                assert expected[text] in why, text
            case ParseFail(status):
                assert status == expected[text], text
            case _:
                assert outcome == expected[text], text
        assert next_outcome == Score(1.0), f"the call after {text!r}"
    assert said["metrics"][0][1]["acc"] is True
    assert capfd.readouterr() == ("", "")


def test_what_is_printed_is_kept_and_quoted_when_the_process_ends(tmp_path, capfd):
    path = write(
        tmp_path,
        """
        import os
        def f(prompt, completion, answer, extra):
            print("about to", completion)
            os.system("echo in the shell")
            return 1.0 if completion == "return" else os._exit(1)
        """,
    )

    async def work(pool):
        await pool.score(PROMPT, ["return"])
        await asyncio.sleep(0.1)
        return pool.printed, await pool.score(PROMPT, ["end"])

    printed, [(outcome, _)] = using(FunctionPool(f"{path}:f", workers=1, deadline=5.0), work)
    assert printed == "about to return\nin the shell\n"
    assert "exit code 1; the last it printed: about to return" in outcome.why
    assert capfd.readouterr() == ("", "")


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


def test_calls_run_side_by_side_and_answers_keep_their_order(tmp_path):
    path = write(
        tmp_path,
        """
        import time
        def f(prompt, completion, answer, extra): time.sleep(0.2); return float(completion)
        """,
    )

    async def work(pool):
        began = time.monotonic()
        rated = await pool.score(PROMPT, [str(i) for i in range(32)])
        return [outcome.value for outcome, _ in rated], time.monotonic() - began

    values, took = using(FunctionPool(f"{path}:f", workers=8, deadline=5.0), work)
    assert values == list(range(32))
    assert 4 * 0.2 <= took < 2.5, "one after the other is 6.4 s"


def test_waiting_for_a_worker_is_not_part_of_a_call_s_deadline(zoo):
    assert score(zoo, ["naps"] * 4, deadline=0.5) == [(Score(1.0), {})] * 4


def test_two_pools_of_one_function_do_not_share_anything(tmp_path):
    path = write(
        tmp_path,
        """
        calls = 0
        def f(prompt, completion, answer, extra, step=1):
            global calls
            calls += step
            return calls
        """,
    )

    async def work(one):
        two = FunctionPool(f"{path}:f", workers=1, deadline=5.0, fixed={"step": 10})
        await two.start()
        both = await asyncio.gather(one.score(PROMPT, "ab"), two.score(PROMPT, "ab"))
        await two.stop()
        return both, await one.score(PROMPT, "a")

    both, after = using(FunctionPool(f"{path}:f", workers=1, deadline=5.0), work)
    assert [[o.value for o, _ in rated] for rated in both] == [[1.0, 2.0], [10.0, 20.0]]
    assert after == [(Score(3.0), {})]


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


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("def g(): ...", ValueError, "no function 'f' in .*reward.py; it has g"),
        ("def f(x): ...", ValueError, r"expected a function \(prompt, completion, answer, extra\)"),
        ("import absent_module", ValueError, "(?s)absent_module.*while importing .*reward.py"),
        ("def f(:", ValueError, "(?s)reward.py.*SyntaxError"),
        ("raise SystemExit('run me as a script')", ValueError, "SystemExit: run me as a script"),
        ("import os; print('bye'); os._exit(7)", NoAnswer, "(?s)loading it: .*exit code 7.*bye"),
        ("while True: pass", NoAnswer, "loading it: no answer within the deadline of 2 s"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_at_start_and_leaves_nothing(
    tmp_path, text, error, message
):
    path = write(tmp_path, text)
    pool = FunctionPool(f"{path}:f", workers=2, deadline=1.0, load_deadline=2.0)
    with pytest.raises(error, match=message):
        asyncio.run(asyncio.wait_for(pool.start(), 10))
    assert not alive(path)
    assert not alive("", parent=os.getpid())


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


def test_large_texts_and_strange_characters_go_both_ways(tmp_path):
    path = write(
        tmp_path,
        """
        def f(prompt, completion, answer, extra):
            return {"score": len(completion), "head": completion[:3], "big": len(extra["big"])}
        """,
    )
    prompt = Prompt(ids=(1,), text="", extra={"big": b"x" * 5_000_000})
    pool = FunctionPool(f"{path}:f", workers=1, deadline=10.0)
    text = "é\ud800\n" + "y" * 3_000_000
    [(outcome, metrics)] = using(pool, lambda pool: pool.score(prompt, [text]))
    assert outcome == Score(3_000_003.0) and metrics == {"head": "é\ud800\n", "big": 5e6}


@pytest.mark.parametrize("options", [{"workers": 0}, {"deadline": 0.0}, {"deadline": float("inf")}])
def test_options_that_cannot_work_are_refused(zoo, options):
    with pytest.raises(ValueError, match="workers >= 1 and finite deadlines"):
        FunctionPool(zoo, **{"workers": 1, "deadline": 1.0, **options})
