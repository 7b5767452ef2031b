"""Where prompts and their answers come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl.config.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Data:
    file: str | None = None
    """JSONL or Parquet, one prompt a row: {"prompt", "answer"?, "key"?, ...}, the prompt a text or a list of
    chat messages; GSM8K as it ships. None: reasoning_gym, arithmetic, or the demo's own tasks."""
    reasoning_gym: tuple[str, ...] = ()
    """Tasks of the package reasoning-gym, by name; the task's name is the prompt's key."""
    arithmetic: tuple[Literal["addition", "subtraction", "three_terms"], ...] = ()
    """Problems such as "Compute 3 + 4.", for chat models; the task's name is the prompt's key."""
    largest: int = 9
    """Of arithmetic: the largest number in what is trained on. What is held out has numbers up to 9."""
    tasks: tuple[Literal["reverse", "sort", "add"], ...] = ("reverse",)
    """Demo tasks: reverse, sort, add. The task's name is the prompt's key."""
    size: int = 20_000
    """Prompts generated for training, of any tasks."""
    held_out: int = 512
    """Held-out prompts: judged and checked before and after, never trained on. A file gives its last ones."""
    shuffle: bool = True
    """A new order every epoch, a function of the seed and the epoch alone."""
    too_long: Literal["error", "drop", "truncate_left", "truncate_right"] = "error"
    """A prompt that leaves no room for an answer: refuse the file, leave the prompt out, or cut tokens off at
    that side. Counted."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Use the policy's chat template. auto: for prompts that are chat messages; always: a plain prompt is one
    user message."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    model: str = "demo"
    """"demo" (built and cached), "smollm2", a Hugging Face folder, or a name on a hub."""
    warm_accuracy: float = 0.3
    """Demo only: the supervised warm-up stops at this sampled accuracy."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    replicas: int = 1
    samples: int = 8
    """G: samples of one prompt, the group of GRPO."""
    temperature: float = 1.0
    max_tokens: int = 8
    slots: int = 256
    """Sequences that one engine runs at a time."""
    engine: Engine = field(default_factory=Engine)


@dataclass(frozen=True, kw_only=True)
class Validation:
    every: int = 0
    """Steps between validations of the held-out prompts while training goes on. 0: only before and after."""
    prompts: int = 0
    """The first so many held-out prompts. 0: all."""
    on: Literal["replica", "trainer"] = "replica"
    """Who answers, with the weights of exactly one version: an engine of its own, or the trainer's ranks
    while no batch is ready."""
    share: float = 0.25
    """Of the prompts, so many at a time at most: the rest of the judge is for training."""
