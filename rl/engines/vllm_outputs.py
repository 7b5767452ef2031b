"""From vLLM's outputs to ours: a completion, the scores of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.engines.vllm_samples import Sample
from rl.types import Completion, Scores


def completion(sample: Sample, finish: str | None, *, greedy: bool) -> Completion:
    """A sample that vLLM has ended. Raises RuntimeError where vLLM says it failed."""
    if finish not in ("stop", "length", "abort"):
        raise RuntimeError(f"vLLM ended {sample.name} with finish reason {finish!r}")
    tokens = np.asarray(sample.tokens, np.int32)
    logps = np.concatenate([np.zeros(0, np.float32), *sample.logps])
    versions = np.repeat(*np.asarray(sample.spans or [[0, 0]], np.int32).T)
    if not len(tokens) == len(logps) == len(versions):
        raise RuntimeError(
            f"vLLM sent {len(tokens)} tokens of {sample.name}, "
            f"{len(logps)} log-probs and {len(versions)} times"
        )
    if greedy:
        logps = np.zeros_like(logps)  # the distribution that was sampled has one token
    return Completion(tokens=tokens, logps=logps, versions=versions, finish=finish)


def entries(flat: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probs) [n, 1 + K] of the last n positions: the token itself, then K in falling order."""
    ids, logps = np.asarray(flat.token_ids, np.int32), np.asarray(flat.logprobs, np.float32)
    width = flat.end_indices[-1] - flat.start_indices[-1]  # of every position but the first prompt token's
    return ids.reshape(-1, width)[-n:], logps.reshape(-1, width)[-n:]


def top_scores(flat: Any, n: int, top_k: int) -> Scores:
    """Scores of the last n tokens of a prompt from its log-probs, the token's own and the K best."""
    ids, logps = entries(flat, n)
    top = slice(1, 1 + top_k)
    return Scores(
        logps=logps[:, 0].copy(),
        top_ids=ids[:, top].copy() if top_k else None,
        top_logps=logps[:, top].copy() if top_k else None,
    )


def next_scores(flat: Any, target: int, top_k: int) -> Scores | None:
    """Scores of one token from the log-probs of the sampled one and the K best; None: it is neither."""
    ids, logps = entries(flat, 1)
    at = np.flatnonzero(ids[0] == target)
    if not len(at):
        return None
    top = slice(1, 1 + top_k)
    return Scores(logps=logps[0, at[:1]].copy(), top_ids=ids[:, top].copy(), top_logps=logps[:, top].copy())


def full_scores(flat: Any, targets: Sequence[int], top_k: int, full: bool, temperature: float) -> Scores:
    """Scores of targets [T] from log-probs of the whole vocabulary at temperature 1, in any order.

    log softmax(logits / τ) = log softmax(log softmax(logits) / τ), as the softmax takes no notice of a shift.
    """
    ids, logps = (x[:, 1:] for x in entries(flat, len(targets)))
    whole = np.empty(ids.shape, np.float64)
    np.put_along_axis(whole, ids.astype(np.int64), logps.astype(np.float64) / temperature, axis=1)
    whole = (whole - np.logaddexp.reduce(whole, axis=1, keepdims=True)).astype(np.float32)
    best = np.argsort(-whole, axis=1, kind="stable")[:, :top_k]
    return Scores(
        logps=np.take_along_axis(whole, np.asarray(targets)[:, None], axis=1)[:, 0],
        top_ids=best.astype(np.int32) if top_k else None,
        top_logps=np.take_along_axis(whole, best, axis=1) if top_k else None,
        full=whole if full else None,
    )


def no_scores(vocab_size: int, top_k: int, full: bool) -> Scores:
    """Of no tokens."""
    return Scores(
        logps=np.zeros(0, np.float32),
        top_ids=np.zeros((0, top_k), np.int32) if top_k else None,
        top_logps=np.zeros((0, top_k), np.float32) if top_k else None,
        full=np.zeros((0, vocab_size), np.float32) if full else None,
    )
