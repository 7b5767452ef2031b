"""reasoning-gym behind a process of its own, which generates its tasks' entries and scores answers to them.

A process, because scorers evaluate what a policy wrote (9**9**9 takes for ever), because some generators
iterate over sets, whose order depends on a process's hash seed, and because the import takes seconds. An
entry is a function of (task, seed, index) alone: it is not sent back to be scored, but generated again.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from copy import deepcopy
from functools import cache, lru_cache
from typing import IO, Any

LOAD = 120.0  # seconds for its import
SIZE = 500  # entries of one seed: entry i of seed s is entry 0 of seed s + i
MEMORY = 4 << 30  # bytes of data of the process, beyond which a scorer gets MemoryError

# For `python -c`: as a script, the file would put its folder on the path, and types.py hide the stdlib's.
_SERVE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rl.data.gym import serve; serve()"


class GymError(RuntimeError):
    """reasoning-gym is missing, raised, or took too long."""


class Gym:
    """The process, started by the first request and again after one that ended it. Requests wait in line."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def tasks(self) -> list[str]:
        return self._ask(
            {
                "do": "tasks",
            },
            LOAD,
        )

    def entries(self, task: str, seed: int, start: int, stop: int, seconds: float) -> list[dict[str, Any]]:
        """Entries {"question", "answer", "metadata"} of one seed; what JSON does not know is a text there."""
        return self._ask({"do": "entries", "task": task, "seed": seed, "span": [start, stop]}, seconds)

    def score(self, task: str, seed: int, index: int, answer: str, seconds: float) -> float:
        """The task's own score of an answer, mostly in [0, 1]."""
        return self._ask(
            {"do": "score", "task": task, "seed": seed, "index": index, "answer": answer}, seconds
        )

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, request: dict[str, Any], seconds: float) -> Any:
        """Raises GymError where there is no result in time."""
        with self._lock:
            if self._process is None:
                self._process = _start()
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(request | {"seconds": seconds}) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()  # ends: the process's own alarm kills it
            except BrokenPipeError:
                line = ""
            if not line:
                late = self._end() == -signal.SIGALRM
                told = f"took more than {seconds:g} s" if late else "ended its process"
                raise GymError(f"reasoning-gym: {request.get('task', 'the import')} {told}")
        reply = json.loads(line)
        if "failed" in reply:
            raise GymError(f"reasoning-gym: {reply['failed']}")
        return reply["result"]

    def _end(self) -> int:
        """Its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()  # the end of its input ends it
        return process.wait()


@cache
def gym() -> Gym:
    """The one of this process."""
    return Gym()


def _start() -> subprocess.Popen[str]:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise GymError("reasoning-gym is not installed: pip install reasoning-gym")
    return subprocess.Popen(
        [sys.executable, "-Pc", _SERVE, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # out of reach of Ctrl-C
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    )


# ── In the process ────────────────────────────────────────────────────────────────────────────────


def serve() -> None:
    """Answer one line of JSON with one, until the input ends."""
    replies: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a task prints is no reply
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, hard) if hard == -1 else (min(MEMORY, hard), hard))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is at
    signal.setitimer(signal.ITIMER_REAL, LOAD)
    missing = _missing()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request.pop("seconds"))
        try:
            reply = {"failed": missing} if missing else {"result": _DO[request.pop("do")](**request)}
        except BaseException as error:  # the one boundary where what a task raises becomes a reply
            reply = {"failed": f"{request.get('task', 'tasks')}: {type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _missing() -> str:
    """What it takes to import the package and does not exist; empty: nothing."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        return f"cannot be imported: {error}"
    return ""


def _tasks() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - {"composite"})


@lru_cache(maxsize=256)
def _dataset(task: str, seed: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=SIZE)


@lru_cache(maxsize=8192)
def _entry(task: str, seed: int, index: int) -> dict[str, Any]:
    return _dataset(task, seed)[index]


def _entries(task: str, seed: int, span: list[int]) -> list[Any]:
    return [_plain(_entry(task, seed, index)) for index in range(*span)]


def _score(task: str, seed: int, index: int, answer: str) -> float:
    return float(_dataset(task, seed).score_answer(answer, deepcopy(_entry(task, seed, index))))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    known = (
        value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if known else str(value)


_DO = {"tasks": _tasks, "entries": _entries, "score": _score}
