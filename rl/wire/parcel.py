"""What an engine is told of new weights: the tensors themselves, or where they are to be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from models.delta import Delta

Transport = Literal["store", "broadcast", "ipc"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where weights lie: UUIDs of their GPUs, one for each rank that holds a part; none: on a CPU."""

    gpus: tuple[str, ...] = ()
    ranks: int = 1  # processes that hold a part


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """A group of `size`: the trainer's rank 0 and an engine's processes. They meet at the store at host:port
    under `key`, and stay together for later versions; `seconds` is how long one may wait for the others."""

    host: str
    port: int
    key: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """The trainer's memory itself, for an engine on the same GPU. `handle` is opened once and stays valid."""

    gpu: str
    handle: bytes


Parcel = Mapping[str, object] | Delta | Broadcast | Mapped


def choose(asked: Literal["auto"] | Transport, trainer: Place, engine: Place) -> Transport:
    """auto: IPC on one GPU, NCCL between different ones, else by value.

    Raises ValueError where what is asked for cannot be: NCCL has no two ranks on one GPU, and IPC needs it.
    """
    shared = set(trainer.gpus) & set(engine.gpus)
    same = bool(shared) and set(engine.gpus) == shared
    if asked == "auto":
        if trainer.gpus and engine.gpus and not (shared and not same):
            return "ipc" if same else "broadcast"
        return "store"
    if asked == "ipc" and not same:
        raise ValueError(f"sync.transport ipc needs one GPU; {_named(trainer, engine)}")
    if asked == "broadcast" and (shared or bool(trainer.gpus) != bool(engine.gpus)):
        raise ValueError(f"sync.transport broadcast needs different GPUs, or none; {_named(trainer, engine)}")
    return asked


def _named(trainer: Place, engine: Place) -> str:
    where = [", ".join(place.gpus) or "the CPU" for place in (trainer, engine)]
    return f"the trainer is on {where[0]}, the engine on {where[1]}"
