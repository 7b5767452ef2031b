"""Checkpoints that are whole or not there: written aside, listed with sizes and hashes, renamed at the
end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.ledger import Ledger, from_json, to_json

MANIFEST = "manifest.json"


def folder(run_dir: Path, version: int) -> Path:
    return run_dir / "checkpoints" / f"step_{version:06d}"


def begin(run_dir: Path, version: int) -> Path:
    """An empty folder to write into; nothing reads it until `commit` renames it."""
    aside = folder(run_dir, version).with_suffix(".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def commit(run_dir: Path, version: int, ledger: Ledger, extra: dict[str, Any], *, keep: int) -> Path:
    """Seal what was written since `begin` together with the ledger; then drop all but the newest `keep`."""
    aside, final = folder(run_dir, version).with_suffix(".tmp"), folder(run_dir, version)
    (aside / "ledger.json").write_text(json.dumps({"version": version, "ledger": to_json(ledger), **extra}))
    files = {str(p.relative_to(aside)): _fingerprint(p) for p in sorted(aside.rglob("*")) if p.is_file()}
    _write_synced(aside / MANIFEST, json.dumps(files))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    for old in sorted(final.parent.glob("step_??????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest(run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint of a run; names each one that it passes over and why."""
    for candidate in sorted((run_dir / "checkpoints").glob("step_*"), reverse=True):
        fault = _fault(candidate)
        if fault is None:
            return candidate
        say(f"passing over checkpoint {candidate.name}: {fault}")
    return None


def read(checkpoint: Path) -> tuple[int, Ledger, dict[str, Any]]:
    """(version, ledger, extra) as they were committed."""
    data = json.loads((checkpoint / "ledger.json").read_text())
    return data.pop("version"), from_json(data.pop("ledger")), data


def _fault(checkpoint: Path) -> str | None:
    if checkpoint.suffix == ".tmp":
        return "it was never finished"
    if not (checkpoint / MANIFEST).is_file():
        return f"it has no {MANIFEST}"
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text())
    except ValueError:
        return f"its {MANIFEST} is damaged"
    for name, fingerprint in listed.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if _fingerprint(checkpoint / name) != fingerprint:
            return f"{name} is damaged"
    return None


def _fingerprint(path: Path) -> list[Any]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return [path.stat().st_size, digest.hexdigest()]


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
