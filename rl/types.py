"""The data that travels: prompt → sample → outcome → advantage → batch. Frozen, free of torch and Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem of the data set. `ids` are what the policy reads; `text` is what a judge reads."""

    ids: tuple[int, ...]
    text: str
    key: str = ""  # which teacher or judge serves it
    answer: str | None = None  # ground truth, if there is one
    extra: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0  # factor of what its answers teach; they are sampled, judged and counted all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution that tokens are drawn from. `temperature=0` is greedy; `top_p=1`, `top_k=0` switch
    those off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop_ids: tuple[int, ...] = ()  # in addition to the model's own end-of-sequence ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer. T counts its tokens, the stop token included.

    `logps` are the log-probabilities in nats under the distribution that was sampled (after temperature
    and top-p);
    `versions[t]` is the weight version that produced token t.
    """

    tokens: np.ndarray  # [T] int32
    logps: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32
    finish: Finish

    @property
    def version_min(self) -> int:
        return int(self.versions.min()) if self.versions.size else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probabilities of given tokens under one model. T counts the scored positions.

    `logps` [T] of the tokens themselves; `top_ids`, `top_logps` [T, K] of the K most likely tokens, or None;
    `full` [T, V] of the whole vocabulary, or None.
    """

    logps: np.ndarray
    top_ids: np.ndarray | None = None
    top_logps: np.ndarray | None = None
    full: np.ndarray | None = None


# ── What a judge, rule or function says about one answer: only a Score is a reward ────────────────


@dataclass(frozen=True, slots=True)
class Score:
    """A reward on the scale [0, 1] of its producer (judges are normalised by their declared bounds)."""

    value: float


@dataclass(frozen=True, slots=True)
class Abstain:
    """The producer does not serve this prompt. Not a failure."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class ParseFail:
    """The producer answered and no score could be read. `status` is the parser's word for it."""

    status: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class InfraFail:
    """The producer did not answer: it raised, timed out or died."""

    why: str


Outcome = Score | Abstain | ParseFail | InfraFail


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeta:
    """What the controller knows of one sample; its token arrays stay in the object store."""

    text: str
    n_tokens: int
    finish: Finish
    version_min: int
    version_max: int
    engine: str = ""  # who sampled it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One question to a judge: about one answer of a group, or about two in the order that they are shown."""

    text: str  # what the judge reads: the rendered template
    about: tuple[int, ...]  # places of the answers in the group
    seed: int
    part: str = ""  # which vote or which criterion; empty where there is one question per answer
    nonce: str = ""  # the word in the verdict's tag, where one was drawn
    labels: tuple[str, ...] = ()  # wanted are their log-probs as the next token, and no text
    said: str = ""  # of a chat model: the assistant's message that `text`, the user's, is followed by


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back: the judge's own text, labels' log-probs or number, or why there is none."""

    text: str = ""
    finish: Finish = "stop"
    label_logps: tuple[float, ...] = ()  # nats, one per label of the question; -inf: not among those sent
    score: float | None = None  # of a scalar judge, raw
    failure: str = ""  # why nothing came back; empty: something did
    again: bool = True  # of a failure: another attempt may do better
    after: float = 0.0  # of a failure: seconds that the server asks to wait before
    n_prompt: int = 0  # tokens that the judge read for it, and wrote: none for another question's reply
    n_tokens: int = 0
    seconds: float = 0.0
    replica: str = ""
    attempts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One question and its reply as they are recorded: failures too."""

    producer: str
    prompt: str  # first 16 hex digits of the SHA-256 of what the judge read
    about: tuple[int, ...]
    part: str
    text: str
    finish: str
    outcome: str  # "score", or the word for why there is none
    score: float | None  # on [0, 1]; pairwise: how far the first shown beats the second
    n_prompt: int
    n_tokens: int
    seconds: float
    replica: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a producer of rewards says of one answer: judge, scalar judge, rule or function."""

    outcome: Outcome
    told: Mapping[str, float | str | bool] = field(default_factory=dict)  # beside the score; logged
    noise: float | None = None  # variance of the score's mean over votes, where there were several
    calls: tuple[Call, ...] = ()  # each call stands in one verdict, that of the first answer it is about
