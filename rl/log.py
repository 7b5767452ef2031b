"""What a run leaves behind: config.json, metrics.jsonl, ledger.jsonl, samples.jsonl, calls.jsonl (of judges),
validation.jsonl, and a wandb run. Written at once."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rl.config import Config, to_dict
from rl.ledger import Event
from rl.types import Call


def git_revision(root: Path) -> str | None:
    """Commit of the code, with "+changes" where files differ from it; None outside a repository."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def new_folder(cfg: Config) -> Path:
    """log.dir/name-time, with a number where that exists."""
    stem = Path(cfg.log.dir).resolve() / f"{cfg.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for path in (stem, *(stem.with_name(f"{stem.name}-{i}") for i in range(1, 1000))):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise FileExistsError(f"new_folder: {stem} and 999 more exist")


def changes(folder: Path, cfg: Config) -> list[str]:
    """Fields whose value is not the one that the run in `folder` began with: "trainer.lr 0.001 -> 0.0005"."""
    path = folder / "config.json"
    if not path.is_file():
        return []
    before, now = _flat(json.loads(path.read_text())), _flat(json.loads(json.dumps(to_dict(cfg))))
    return [f"{k} {before.get(k)} -> {now.get(k)}" for k in now if before.get(k) != now[k]]


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in data.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


class RunLog:
    """Files of one run. Every line is flushed when it is written, so that a kill loses at most the line
    under way."""

    def __init__(self, folder: Path, cfg: Config, *, version: int = 0, events: int = 0) -> None:
        """version, events: how far the run had come at the checkpoint that it goes on from; what was logged
        after it is cut off."""
        self.folder, self.events = folder, events
        _keep(folder / "metrics.jsonl", lambda _, line: line["step"] <= version)
        for name in ("samples", "calls", "validation"):
            _keep(folder / f"{name}.jsonl", lambda _, line: line["step"] <= version)
        _keep(folder / "ledger.jsonl", lambda i, _: i < events)
        resolved = {"git": git_revision(Path(__file__).parents[1]), **to_dict(cfg)}
        name = f"config_resumed_{version:06d}.json" if (folder / "config.json").exists() else "config.json"
        (folder / name).write_text(json.dumps(resolved, indent=2))
        names = ("metrics", "ledger", "samples", "calls", "validation")
        self._files = {n: (folder / f"{n}.jsonl").open("a") for n in names}
        self._step = version  # the last one logged
        self._wandb = _start_wandb(cfg, folder, resolved)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._write("metrics", {"step": step, "time": time.time(), **values})
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def event(self, event: Event) -> None:
        self.events += 1
        self._write("ledger", {k: v for k, v in asdict(event).items() if v is not None and v is not False})

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            self._write("samples", record)

    def calls(self, step: int, ordinal: int, calls: Iterable[Call]) -> None:
        """Every call to a judge, failed ones too, for prompt `ordinal`, while the trainer was at `step`."""
        for call in calls:
            self._write("calls", {"step": step, "ordinal": ordinal, **asdict(call)})

    def validation(self, values: Mapping[str, float]) -> None:
        """`step` is the version that was validated, not the one that the trainer has come to meanwhile."""
        self._write("validation", {"step": int(values["validation/version"]), "time": time.time(), **values})
        if self._wandb is not None:
            self._wandb.log(dict(values), step=self._step)

    def summary(self, values: Mapping[str, Any]) -> None:
        (self.folder / "summary.json").write_text(json.dumps(values, indent=2))
        if self._wandb is not None:
            self._wandb.summary.update(dict(values))

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _keep(path: Path, wanted: Callable[[int, dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file with the lines that are wanted, by number and content; a line that a kill cut
    short goes."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        kept = [line for i, line in enumerate(lines) if wanted(i, json.loads(line))]
        path.write_text("".join(line + "\n" for line in kept))


def wandb_mode(cfg: Config) -> Literal["online", "offline", "disabled"]:
    """auto: online where an account is configured (WANDB_API_KEY, WANDB_MODE or ~/.netrc), else offline."""
    if cfg.log.wandb != "auto":
        return cfg.log.wandb
    match os.environ.get("WANDB_MODE"):
        case "online" | "offline" | "disabled" as mode:
            return mode
    netrc = Path.home() / ".netrc"
    has_account = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text())
    return "online" if has_account else "offline"


def _start_wandb(cfg: Config, folder: Path, resolved: Mapping[str, Any]):
    mode = wandb_mode(cfg)
    if mode == "disabled":
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(
        project=cfg.log.project, name=folder.name, id=folder.name, dir=str(folder), mode=mode, resume="allow",
        config=dict(resolved),
    )  # fmt: skip
    run.define_metric("validation/*", step_metric="validation/version")
    return run
