"""Functions that do whatever users might write, in pools that must leave no process behind."""

import asyncio
import os
import subprocess
import textwrap
import time
from pathlib import Path

from rl.rewards.function_pool import FunctionPool
from rl.types import Prompt

PROMPT = Prompt(ids=(1,), text="2+2=", answer="4", key="sums", extra={"n": 3})
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
