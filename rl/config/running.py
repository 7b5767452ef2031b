"""Time, place and what is left behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Staleness:
    max_age: int = 2
    """η: no token older than this many versions is ever trained. 0 is exactly synchronous training."""
    late: Literal["wait", "drop"] = "wait"
    """Groups still under way when a step could start without them. wait: it starts when none of them would
    be too old for all steps after it, so that no answer is lost for being long (nor a step ever held up for
    longer than the deadlines of sampler and judges); drop: it starts, and what is too old then is sampled
    anew."""
    weights: Literal["keep", "recompute", "wait"] = "keep"
    """What new weights do to running samples: go on over the old KV cache, re-prefill, or finish first."""
    pick: str = ""
    """Your choice of the groups of a step, "path/to/file.py:name": pick(ready, version, prompts) → ordinals
    (rl/admission.py). Empty: the oldest."""
    attempts: int = 8
    """How often one prompt is issued at most, counting re-issues after staleness or failure."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    transport: Literal["auto", "store", "broadcast", "ipc"] = "auto"
    """New weights: by value through Ray's object store, by broadcast (NCCL between GPUs, gloo between CPUs),
    or from the trainer's own memory (CUDA IPC, on one GPU). auto: ipc, broadcast or store, as the places
    allow."""
    delta: bool = False
    """By value: only what has changed since the version before, exact to the bit. The trainer keeps one more
    copy of the weights."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    start: float = 600.0
    """Seconds until every engine and trainer rank must be up; on a GPU vLLM takes one to two minutes. That a
    process ends is noticed at once."""
    generate: float = 120.0
    judge: float = 60.0
    teach: float = 60.0
    train: float = 300.0
    sync: float = 60.0
    patience: int = 2000
    """Groups in a row that may be dropped without one becoming ready; then the run ends and says why."""


@dataclass(frozen=True, kw_only=True)
class Ray:
    address: str | None = None
    """None: a private cluster on this machine. "auto" or host:port: join a running one."""
    spread: bool = False
    """Place the actors over as many nodes as there are, instead of as few as possible."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: int = 50
    """Steps between checkpoints; one more at the end. 0: none. Training stands still while its state is
    copied to the hosts' memory, 12 bytes a parameter over all ranks, and goes on while that is written."""
    keep: int = 2


@dataclass(frozen=True, kw_only=True)
class Log:
    dir: str = "runs"
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online where an account is configured, else offline. metrics.jsonl is always written."""
    project: str = "viva"
