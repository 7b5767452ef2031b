"""Builds the demo's models once: in parallel, each in a folder named by a hash of all that made it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from rl.demo.specs import JudgeSpec, PolicySpec, Size, Spec, TeacherSpec, TextSpec

__all__ = ["BuildError", "Built", "JudgeSpec", "PolicySpec", "Size", "Spec", "TeacherSpec",
           "build", "build_all", "cache_dir", "find"]  # fmt: skip

REPORT = "report.json"
_ROOT = Path(__file__).parents[2]
_MODELS = ("config", "tokenizer", "transformer", "weights")


class BuildError(RuntimeError):
    """A model could not be built; the message says which and holds the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A Hugging Face folder, and what was measured when it was built: accuracies are of held-out problems."""

    folder: Path
    numbers: Mapping[str, float]


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "viva"


def folder_of(spec: Spec, cache: Path) -> Path:
    """Named by a hash of the spec, of the sources that make and run the model, and of torch's version."""
    kind = type(spec).__name__.removesuffix("Spec").lower()
    made_by = hashlib.sha256(json.dumps([kind, asdict(spec), version("torch")]).encode())
    for source in [*sorted((_ROOT / "rl/demo").glob("*.py")), *(_ROOT / f"models/{m}.py" for m in _MODELS)]:
        made_by.update(source.read_bytes())
    parts = [kind, *(() if isinstance(spec, TextSpec) else spec.tasks), made_by.hexdigest()[:16]]
    return cache / "-".join(parts)


def find(spec: Spec, cache: Path) -> Built | None:
    """The model, if the cache holds it whole: every file has the hash that the report says."""
    folder = folder_of(spec, cache)
    try:
        report = json.loads((folder / REPORT).read_text())
        whole = all(_sha256(folder / name) == known for name, known in report["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return Built(folder=folder, numbers=report["numbers"]) if whole else None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ── One model, in this process ────────────────────────────────────────────────────────────────────


def build(spec: Spec, cache: Path, progress: Callable[[float, str], None]) -> Built:
    """Finds or trains one model. `progress` gets the fraction done and a note on what was last measured."""
    found = find(spec, cache)
    if found is None:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as scratch:
            _train(spec, Path(scratch) / "model", progress)
            _publish(spec, cache, Path(scratch))
        found = find(spec, cache)
        assert found is not None
    progress(1.0, "ready")
    return found


def _train(spec: Spec, folder: Path, progress: Callable[[float, str], None]) -> None:
    from models.weights import save_folder
    from rl.demo.codec import codec_of
    from rl.demo.recipes import make

    wall, cpu = time.monotonic(), time.process_time()
    model, numbers = make(spec, progress)
    numbers |= {
        "parameters": model.cfg.n_params,
        "seconds": round(time.monotonic() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }
    save_folder(folder, model, model.cfg, codec_of(spec).tokenizer)
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    report = {"spec": asdict(spec), "numbers": numbers, "files": files}
    (folder / REPORT).write_text(json.dumps(report, indent=2))


def _publish(spec: Spec, cache: Path, scratch: Path) -> None:
    """Renames the finished folder into place, over a damaged one; what another process made first stays."""
    with _locked(cache / ".lock"):
        if find(spec, cache) is None:
            folder = folder_of(spec, cache)
            if folder.exists():
                folder.rename(scratch / "damaged")
            (scratch / "model").rename(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ── Several models, in parallel ───────────────────────────────────────────────────────────────────


def build_all(
    specs: Mapping[str, Spec], cache: Path, progress: Callable[[str, float, str], None]
) -> dict[str, Built]:
    """Finds or trains every model; those that are missing in parallel, one process and one thread each.

    `progress` gets name, fraction and note, in this process. The first failure ends the other builds and
    raises BuildError with the child's traceback.
    """
    built = {name: found for name, spec in specs.items() if (found := find(spec, cache))}
    for name in built:
        progress(name, 1.0, "cached")
    names: dict[Spec, list[str]] = {}  # two names may want the same model
    for name in specs.keys() - built.keys():
        names.setdefault(specs[name], []).append(name)
    running: dict[Connection, tuple[list[str], BaseProcess]] = {}
    try:
        for spec, wanted_as in names.items():
            pipe, process = _start(spec, cache)
            running[pipe] = wanted_as, process
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                wanted_as, process = running[pipe]
                match _receive(pipe, process, wanted_as[0]):
                    case Built() as model:
                        del running[pipe]
                        process.join()
                        built |= dict.fromkeys(wanted_as, model)
                    case (fraction, note):
                        for name in wanted_as:
                            progress(name, fraction, note)
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return {name: built[name] for name in specs}


def _start(spec: Spec, cache: Path) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, spec, cache), daemon=True)
    process.start()
    theirs.close()  # so that the end of the child is the end of the pipe
    return ours, process


def _receive(pipe: Connection, process: BaseProcess, name: str) -> Built | tuple[float, str]:
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        raise BuildError(f"building {name}: its process ended with exit code {process.exitcode}") from None
    if isinstance(message, str):
        raise BuildError(f"building {name} failed:\n{message}")
    return message


def _child(pipe: Connection, spec: Spec, cache: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its children
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(build(spec, cache, lambda fraction, note: pipe.send((fraction, note))))
    except BaseException:  # the parent raises it
        pipe.send(traceback.format_exc())
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """A parent that was killed ends nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
