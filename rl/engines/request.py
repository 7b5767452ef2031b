"""What the built-in engine is asked for: requests, their prefilled prompts, and what is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from models.config import Head, ModelConfig
from rl.engines.base import PauseMode
from rl.types import Completion, SamplingParams


@dataclass(eq=False, kw_only=True)
class Prefilled:
    """Prompts of one bucket: keys and values per layer [R, L, 2 K H], logits [R, V] after each last token."""

    ids: Tensor  # [R, L]
    kv: list[Tensor]
    logits: Tensor


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt and its samples that wait for a slot, as (index, seed)."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    waiting: deque[tuple[int, int]]
    prefix: tuple[Prefilled, int] | None = None  # and its row, until every sample has a slot


Finished = tuple[Request, int, Completion]


def check_ids(function: str, ids: Sequence[int], *, vocab_size: int, max_len: int) -> None:
    if not 1 <= len(ids) <= max_len:
        raise ValueError(f"{function}: expected 1 to {max_len} token ids, got {len(ids)}")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"{function}: token ids must be in [0, {vocab_size}), got {min(ids)} to {max(ids)}")


def check_head(function: str, cfg: ModelConfig, head: Head) -> None:
    if cfg.head != head:
        raise ValueError(f"{function}: needs a model with head {head!r}, this one has {cfg.head!r}")


def check_request(ids: Sequence[int], params: SamplingParams, *, vocab_size: int, max_len: int) -> None:
    """Raise ValueError where a sample of this prompt cannot be drawn."""
    check_ids("generate", ids, vocab_size=vocab_size, max_len=max_len)
    if params.max_tokens < 1 or len(ids) + params.max_tokens > max_len:
        raise ValueError(
            f"generate: {len(ids)} prompt tokens and max_tokens={params.max_tokens} do not fit: "
            f"at least 1 to sample, at most {max_len} in all"
        )
    if params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0:
        raise ValueError(f"generate: expected temperature >= 0, 0 < top_p <= 1 and top_k >= 0, got {params}")


def check_scores(
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    top_k: int,
    temperature: float,
    *,
    vocab_size: int,
    max_len: int,
) -> None:
    """Raise ValueError where these tokens have no log-probs: the first of a sequence has no context."""
    if len(sequences) != len(starts):
        raise ValueError(f"score: {len(sequences)} sequences but {len(starts)} starts")
    if temperature <= 0 or not 0 <= top_k <= vocab_size:
        raise ValueError(
            f"score: expected temperature > 0 and top_k up to {vocab_size}, got {temperature} and {top_k}"
        )
    for ids, start in zip(sequences, starts, strict=True):
        check_ids("score", ids, vocab_size=vocab_size, max_len=max_len)
        if not 1 <= start <= len(ids):
            raise ValueError(f"score: expected a start from 1 to {len(ids)}, got {start}")


def check_mode(function: str, mode: str) -> None:
    if mode not in get_args(PauseMode):
        raise ValueError(f"{function}: mode must be one of {get_args(PauseMode)}, got {mode!r}")
