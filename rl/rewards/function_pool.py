"""Processes that call a user's reward function and can be killed.

Workers are fresh interpreters, each the leader of a session, so that one signal reaches whatever a function
has forked. `subprocess` starts them, and not `multiprocessing`, which would import the parent's main module
(in a Ray actor: Ray itself) in every worker, and leave its resource tracker running.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl.rewards.function_worker import SIZE, WHY
from rl.rewards.functions import Rated
from rl.types import InfraFail, Prompt

SAID = 4096  # bytes of its last output that are kept of each worker
REAP = 5.0  # seconds that a killed process gets to vanish

# For `python -c`: as a script, the file would put its folder on the path, and types.py hide the stdlib's.
WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from rl.rewards.function_worker import serve
serve(int(sys.argv[1]))
"""

# Reads process groups, one a line; a second mention takes a group off again. Its input ends when the parent
# dies, in whatever way: then it kills the groups that are left. It is no child of its parent, since Ray kills
# the children of an actor that it ends.
WARDEN = """
import os, signal, sys
if os.fork():
    os._exit(0)
groups = set()
for line in sys.stdin.buffer:
    groups ^= {int(line)}
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class NoAnswer(RuntimeError):
    """A worker did not answer: it took too long, died, or could not be started."""


class FunctionPool:
    """`workers` processes that call one reward function, each call under a deadline.

    What a function does concerns its own call only: it may print, raise, exit, fork, spin, exhaust memory. A
    worker that dies, or does not answer in time, is killed with its process group, and the next call starts
    another. All of them die with this process, however it ends. Out of reach is only a descendant that made
    itself a group of its own.

    Args:
      spec: "path/to/file.py:name"; see `load` and `adapt`.
      workers: calls at a time.
      deadline: seconds for a call.
      load_deadline: seconds for starting a worker and importing the file.
      memory_gb: GB of data (RLIMIT_DATA) of each process, beyond which it gets MemoryError; None: no limit.
      fixed: further arguments of the function, by name. offered: those that it gets if it takes them.
    """

    def __init__(
        self,
        spec: str,
        *,
        workers: int,
        deadline: float,
        load_deadline: float = 60.0,
        memory_gb: float | None = 8.0,
        fixed: Mapping[str, Any] | None = None,
        offered: Mapping[str, Any] | None = None,
    ) -> None:
        if workers < 1 or not 0 < deadline < math.inf or not 0 < load_deadline < math.inf:
            raise ValueError(
                "FunctionPool: expected workers >= 1 and finite deadlines > 0, got "
                f"workers={workers}, deadline={deadline}, load_deadline={load_deadline}"
            )
        self.spec, self.workers, self.deadline, self.load_deadline = spec, workers, deadline, load_deadline
        memory = None if memory_gb is None else int(memory_gb * 1e9)
        self._first = pickle.dumps((spec, memory, dict(fixed or {}), dict(offered or {})))
        self._gate = asyncio.Semaphore(workers)
        self._live: list[_Worker] = []  # until reaped
        self._guarded: set[int] = set()  # process groups that the warden knows
        self._idle: list[_Worker] = []
        self._warden: subprocess.Popen[bytes] | None = None
        self._running = False

    async def start(self) -> None:
        """Raises ValueError if the function cannot be loaded or called, NoAnswer if loading takes too long or
        ends the process; nothing is left running then."""
        self._warden = _new_warden(self.spec)
        self._running = True
        try:
            self._idle += await asyncio.gather(*(self._launch() for _ in range(self.workers)))
        except BaseException:
            await self.stop()
            raise

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Rated]:
        """(outcome, metrics) of each text: one call for each, up to `workers` at a time."""
        return await asyncio.gather(*(self._rate(pickle.dumps((prompt, text))) for text in texts))

    async def stop(self) -> None:
        """End every process. Calls under way, and those that come later, are InfraFail."""
        self._running = False
        self._idle.clear()
        await asyncio.gather(*(self._end(worker) for worker in self._live))
        warden, self._warden = self._warden, None
        if warden is not None:
            await _dismiss(warden)

    @property
    def printed(self) -> str:
        """The last of what the function printed in each of the workers."""
        return "".join(worker.said.decode(errors="replace") for worker in self._live)

    async def _rate(self, request: bytes) -> Rated:
        async with self._gate:
            try:
                worker = await self._take()
                rated = pickle.loads(await self._ask(worker, request, self.deadline))
            except (NoAnswer, ValueError) as error:
                return InfraFail(str(error)), {}
            self._idle.append(worker)
            return rated

    async def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.gone:
                return worker
            await self._end(worker)
        return await self._launch()

    async def _launch(self) -> _Worker:
        if not self._running:
            raise NoAnswer(f"{self.spec}: the pool is not running")
        try:
            worker = _Worker(self.spec)
            self._live.append(worker)
            self._toggle(worker.process.pid)
        except OSError as error:
            raise NoAnswer(f"{self.spec}: no process could be started: {error}") from error
        problem = await self._ask(worker, self._first, self.load_deadline, "loading it: ")
        if problem:
            await self._end(worker)
            raise ValueError(f"{self.spec} could not be loaded: {problem.decode()}")
        return worker

    async def _ask(self, worker: _Worker, request: bytes, seconds: float, doing: str = "") -> bytes:
        """The worker's answer. A worker that gives none, or is not waited for any longer, is ended."""
        try:
            async with asyncio.timeout(seconds):
                return await worker.ask(request)
        except TimeoutError:
            await self._end(worker)
            why = f"no answer within the deadline of {seconds:g} s"
        except (EOFError, OSError):
            ending = await self._end(worker)
            why = ending if self._running else "the pool was stopped"
        except asyncio.CancelledError:
            await self._end(worker)
            raise
        raise NoAnswer(f"{self.spec}: {doing}{why}")

    async def _end(self, worker: _Worker) -> str:
        """How it ended, in words."""
        worker.kill()
        if worker.process.pid in self._guarded:
            self._toggle(worker.process.pid)
        ending = await worker.end()
        if worker in self._live:
            self._live.remove(worker)
        return ending

    def _toggle(self, group: int) -> None:
        """Tell the warden of a new group, or that a known one is dead."""
        assert self._warden is not None
        self._guarded ^= {group}
        try:
            _tell(self._warden, group)
        except BrokenPipeError:  # someone ended the warden: another takes over
            self._warden = _new_warden(self.spec)
            for known in self._guarded:
                _tell(self._warden, known)


class _Worker:
    """A process, our end of the pipe to it, and the last of what it printed."""

    def __init__(self, spec: str) -> None:
        self.sock, theirs = socket.socketpair()
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.said = b""
        fd = theirs.fileno()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-Puc", WORKER, str(fd), json.dumps(sys.path), spec],  # spec: for `ps`
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[fd],
                start_new_session=True,
                env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # the processes are the parallelism
            )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        asyncio.get_running_loop().add_reader(self.output.fileno(), self._listen)

    def _listen(self) -> None:
        with suppress(BlockingIOError):
            chunk = os.read(self.output.fileno(), 1 << 16)
            self.said = (self.said + chunk)[-SAID:]
            if not chunk:
                asyncio.get_running_loop().remove_reader(self.output.fileno())

    @property
    def gone(self) -> bool:
        """It ended, or closed its pipe, between two calls."""
        return self.streams is None or self.streams[0].at_eof() or self.streams[0].exception() is not None

    async def ask(self, request: bytes) -> bytes:
        if self.streams is None:
            self.streams = await asyncio.open_connection(sock=self.sock)
        reader, writer = self.streams
        writer.write(SIZE.pack(len(request)) + request)
        await writer.drain()
        (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
        return await reader.readexactly(size)

    def kill(self) -> None:
        """The whole group, before its leader is reaped: only until then is the number certainly its own."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # the latter on macOS, of zombies
                os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self) -> str:
        """Reap the process and close what connects us. How it ended, in words."""
        await _reaped(self.process)
        if not self.output.closed:
            self._listen()
            asyncio.get_running_loop().remove_reader(self.output.fileno())
            self.output.close()
            self.streams[1].transport.abort() if self.streams else self.sock.close()
        code, said = self.process.returncode, self.said[-WHY:].decode(errors="replace").strip()
        return _ending(code) + (f"; the last it printed: {said}" if said else "")


def _new_warden(spec: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-ISc", WARDEN, spec],  # spec: for `ps`
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # out of reach of Ctrl-C
    )
    process.wait()  # it has forked
    return process


def _tell(warden: subprocess.Popen[bytes], group: int) -> None:
    assert warden.stdin is not None
    warden.stdin.write(f"{group}\n".encode())


async def _dismiss(warden: subprocess.Popen[bytes]) -> None:
    """Not being our child, its end shows as that of its output."""
    assert warden.stdin is not None and warden.stdout is not None
    warden.stdin.close()
    os.set_blocking(warden.stdout.fileno(), False)
    with suppress(TimeoutError):
        async with asyncio.timeout(REAP):
            while warden.stdout.read() is None:
                await asyncio.sleep(0.005)
    warden.stdout.close()


async def _reaped(process: subprocess.Popen[bytes]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(REAP):
            while process.poll() is None:
                await asyncio.sleep(0.005)


def _ending(code: int | None) -> str:
    if code is None:
        return "its process was killed and does not end"
    if code == -signal.SIGKILL:
        return "it closed its pipe to the pool, or was killed from outside (out of memory?)"
    if code < 0:
        return f"its process was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"its process ended with exit code {code}"
