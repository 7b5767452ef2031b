"""Builds the demo's models side by side, one process each, and keeps them: a cache named by what made it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from models.weights import load_folder, save_folder
from rl.demo.fit import TOKENIZER
from rl.demo.recipes import make
from rl.demo.specs import JudgeSpec, Spec

ROOT = Path(__file__).parents[2]
Progress = Callable[[str, float, str], None]  # name, fraction done, what was last measured


class BuildError(RuntimeError):
    """A build failed; the message holds its traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model that is there. `numbers` were measured on held-out problems when it was built."""

    spec: Spec
    folder: Path
    numbers: Mapping[str, float]
    seconds: float
    cached: bool

    @property
    def report(self) -> str:
        """One line for a person."""
        n = self.numbers
        if isinstance(self.spec, JudgeSpec):
            said = (
                f"verdicts {100 * n['verdict']:.1f} % right against ground truth, {100 * n['false_positive']:.1f} % "
                f"false positives, scores {100 * n['exact_score']:.1f} % exact, {100 * n['parsed']:.1f} % readable"
            )
        else:
            said = ", ".join(
                f"{name.removeprefix('accuracy/')} {100 * value:.1f} % right"
                for name, value in n.items()
                if name.startswith("accuracy/")
            )
        return f"{said} on held-out problems ({'cached' if self.cached else f'built in {self.seconds:.0f} s'})"


def cache_dir() -> Path:
    """$VIVA_CACHE, or ~/.cache/viva."""
    return Path(os.environ.get("VIVA_CACHE") or Path.home() / ".cache" / "viva")


def folder_of(spec: Spec, cache: Path) -> Path:
    """Named by a hash of the spec, the sources that train it and the torch version."""
    digest = hashlib.blake2b(digest_size=10)
    sources = sorted([*ROOT.glob("rl/demo/*.py"), *ROOT.glob("models/*.py")])
    for text in (repr(spec), torch.__version__, *(path.read_text() for path in sources)):
        digest.update(text.encode() + b"\0")
    return cache / f"{type(spec).__name__.removesuffix('Spec').lower()}-{digest.hexdigest()}"


def find(spec: Spec, cache: Path) -> Built | None:
    """The cached model, if it is there and whole."""
    folder = folder_of(spec, cache)
    try:
        report = json.loads((folder / "report.json").read_text())
        load_folder(folder)
        whole = report["files"] == _fingerprints(folder)
    except (OSError, ValueError, KeyError):
        return None
    if not whole:
        return None
    return Built(spec=spec, folder=folder, numbers=report["numbers"], seconds=report["seconds"], cached=True)


def build(spec: Spec, cache: Path, progress: Callable[[float, str], None] = lambda fraction, note: None) -> Built:
    """Train, measure and keep one model. Written aside and renamed, so that nobody meets half of one."""
    began, folder = time.monotonic(), folder_of(spec, cache)
    model, numbers = make(spec, progress)
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    save_folder(aside, model, model.cfg, TOKENIZER)
    seconds = time.monotonic() - began
    report = {"spec": repr(spec), "numbers": numbers, "seconds": seconds, "files": _fingerprints(aside)}
    (aside / "report.json").write_text(json.dumps(report, indent=2))
    shutil.rmtree(folder, ignore_errors=True)  # a damaged one
    try:
        aside.rename(folder)
    except OSError:  # another process was faster with the same model
        shutil.rmtree(aside)
    return Built(spec=spec, folder=folder, numbers=numbers, seconds=seconds, cached=False)


def _fingerprints(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "report.json"
    }


def build_all(specs: Mapping[str, Spec], cache: Path, progress: Progress) -> dict[str, Built]:
    """Every model by its name: from the cache, or built in as many processes at a time as there are cores.

    Raises BuildError with the traceback of the first build that fails; the others are ended.
    """
    found = {name: find(spec, cache) for name, spec in specs.items()}
    done = {name: built for name, built in found.items() if built is not None}
    # Judges take longest.
    waiting = sorted(specs.keys() - done.keys(), key=lambda n: (not isinstance(specs[n], JudgeSpec), n))
    running: dict[Connection, tuple[str, BaseProcess]] = {}
    context = multiprocessing.get_context("spawn")
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                name = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(specs[name], cache, there), daemon=True)
                process.start()
                there.close()
                running[here] = (name, process)
                progress(name, 0.0, "")
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                name, process = running[ready]
                message = _receive(ready, name)
                if isinstance(message, Built):
                    done[name] = message
                    progress(name, 1.0, "")
                    del running[ready]
                    process.join()
                else:
                    progress(name, *message)
    finally:
        for _, process in running.values():
            process.kill()
    return {name: done[name] for name in specs}


def _receive(connection: Connection, name: str) -> Built | tuple[float, str]:
    try:
        message = connection.recv()
    except EOFError:
        raise BuildError(f"building {name} failed: its process died") from None
    if isinstance(message, str):
        raise BuildError(f"building {name} failed:\n{message}")
    return message


def _child(spec: Spec, cache: Path, parent: Connection) -> None:
    torch.set_num_threads(1)
    began_by = os.getppid()

    def progress(fraction: float, note: str) -> None:
        if os.getppid() != began_by:  # nobody waits for this model any more
            os._exit(1)
        parent.send((fraction, note))

    try:
        parent.send(build(spec, cache, progress))
    except BaseException:
        parent.send(traceback.format_exc())
        raise
