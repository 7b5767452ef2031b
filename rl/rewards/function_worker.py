"""The process that calls a user's reward function: one request, one answer, over a socket of its own.

Nothing here survives what a function may do to its process; function_pool.py ends and replaces it.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import IO, Any

from rl.rewards.functions import Rated, adapt, load, read
from rl.types import InfraFail, Prompt

WHY = 1000  # characters of an error's message that are kept
SIZE = struct.Struct("!Q")  # bytes of the message that follows


def serve(fd: int) -> None:
    """A worker's life: load the function, then answer one request after the other until the socket closes."""
    os.set_inheritable(fd, False)
    # A child of the function must not hold the socket open: its closing tells the pool that we are gone.
    os.register_at_fork(after_in_child=partial(os.close, fd))
    sock, out, me = socket.socket(fileno=fd), os.dup(1), os.getpid()
    requests = sock.makefile("rb")

    def answer(data: bytes) -> None:
        if os.getpid() != me:  # a child that the function forked came out of it, like its parent
            os._exit(0)
        _tidy(out)
        sock.sendall(SIZE.pack(len(data)) + data)

    spec, memory, fixed, offered = pickle.loads(_receive(requests))
    _limit(memory)
    try:
        rate = adapt(load(spec), offered | _semaphore(offered), **fixed)
    except BaseException as error:  # whatever users' files do when they are imported
        answer(_why(error).encode(errors="backslashreplace"))
        os._exit(1)
    answer(b"")
    while request := _receive(requests):
        answer(pickle.dumps(_call(rate, request)))
    os._exit(0)  # whatever threads there are


def _semaphore(offered: dict[str, Any]) -> dict[str, Any]:
    """A semaphore cannot travel: its count does, and becomes one here."""
    count = offered.get("concurrent_semaphore")
    return {} if count is None else {"concurrent_semaphore": threading.Semaphore(count)}


def _receive(pipe: IO[bytes]) -> bytes:
    """The next message; empty at the end."""
    head = pipe.read(SIZE.size)
    return pipe.read(*SIZE.unpack(head)) if head else b""


def _limit(memory: int | None) -> None:
    if memory is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _call(rate: Callable[[Prompt, str], Any], request: bytes) -> Rated:
    try:
        return read(rate(*pickle.loads(request)))
    except BaseException as error:  # the one boundary where what users' code raises becomes an outcome
        place = traceback.extract_tb(error.__traceback__)[-1]
        return InfraFail(f"{_why(error)} ({os.path.basename(place.filename)}:{place.lineno})"), {}


def _why(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:WHY]


def _tidy(out: int) -> None:
    """Keep from the next call what this one may have left: a running alarm, streams closed or replaced."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for fd in (1, 2):
        os.dup2(out, fd)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = sys.stdout
