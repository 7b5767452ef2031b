"""Prompts: rows encoded for the policy and checked one by one before anything starts; an ordinal names one
for ever."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rl.data.rows import DataError, Message, Row, read_rows
from rl.seeds import fold_in
from rl.types import Prompt

__all__ = ["Counts", "DataError", "Row", "Stream", "fingerprint", "make_prompts", "read_rows"]

TooLong = Literal["error", "drop", "truncate_left", "truncate_right"]
Chat = Literal["auto", "always", "never"]


class Encoder(Protocol):
    """The policy's tokenizer (models/tokenizer.py)."""

    @property
    def first_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Message]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the rows: used, of these cut to fit, and dropped because they were too long."""

    used: int
    cut: int
    dropped: int


def make_prompts(
    rows: Iterable[Row],
    encoder: Encoder,
    *,
    needs_answer: str | None,
    keys: Iterable[str] | None,
    max_prompt: int,
    too_long: TooLong = "error",
    chat: Chat = "auto",
) -> tuple[list[Prompt], Counts]:
    """Encoded prompts, in the order of their rows. A plain prompt begins with the encoder's first ids (such
    as a beginning of sequence); a chat has what its template writes.

    Of a prompt that was cut, `ids` are what is left and `text` is the whole: a judge judges the problem as it
    was set. A plain prompt loses ids behind the first ids; a chat loses them from its last user message, and
    its template stays whole.

    Raises DataError for the first row that the run could not use, and where all are dropped.

    Args:
      needs_answer: what needs an answer (for the message), or None.
      keys: the keys that have a teacher, or None where no teacher is asked.
      max_prompt: tokens that a prompt may have, so that the answer still fits into the model.
      too_long: what to do with a longer one; see Data in rl/config.py.
      chat: when to use the chat template; see there too.
    """
    served, first = None if keys is None else set(keys), encoder.first_ids
    prompts: list[Prompt] = []
    cut = dropped = 0
    for row in rows:
        _check(row, needs_answer, served)
        messages = _messages(row, chat)
        try:
            ids = encoder.chat(messages) if messages else [*first, *encoder.encode(row.text)]
            if len(ids) > max_prompt and too_long == "drop":
                dropped += 1
                continue
            if len(ids) > max_prompt and too_long != "error":
                left, cut = too_long == "truncate_left", cut + 1
                if messages:
                    ids = _cut_chat(messages, encoder, max_prompt, left)
                else:
                    ids = _cut(ids, len(first), max_prompt, left)
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from None
        if not 0 < len(ids) <= max_prompt:
            raise DataError(
                f"{row.where}: the prompt has {len(ids)} tokens; 1 to {max_prompt} leave room for an answer. "
                "data.too_long can drop or cut what is longer"
            )
        prompts.append(
            Prompt(
                ids=tuple(ids),
                text=row.text,
                key=row.key,
                answer=row.answer,
                extra=row.extra,
                weight=row.weight,
            )
        )
    if dropped and not prompts:
        raise DataError(
            f"all {dropped} prompts have more than {max_prompt} tokens, and data.too_long is drop"
        )
    return prompts, Counts(used=len(prompts), cut=cut, dropped=dropped)


def _check(row: Row, needs_answer: str | None, served: set[str] | None) -> None:
    if needs_answer and row.answer is None:
        others = f"; its other fields: {', '.join(sorted(row.extra))}" if row.extra else ""
        raise DataError(f"{row.where}: the prompt has no answer, and {needs_answer} needs one{others}")
    if served is not None and row.key not in served:
        raise DataError(f"{row.where}: key {row.key!r} has no teacher; the teachers serve {sorted(served)}")


def _messages(row: Row, chat: Chat) -> tuple[Message, ...]:
    """What goes through the chat template; empty: the prompt is plain."""
    if chat == "never":
        if len(row.messages) > 1:
            raise DataError(
                f"{row.where}: {len(row.messages)} chat messages are no plain prompt, and data.chat is never"
            )
        return ()
    if chat == "always" and not row.messages:
        return ({"role": "user", "content": row.text},)
    return row.messages


def _cut(ids: list[int], n_first: int, n: int, left: bool) -> list[int]:
    room = n - n_first
    if room < 1:
        raise ValueError(f"the {n_first} tokens that begin every prompt leave no room in {n}")
    return ids[:n_first] + (ids[len(ids) - room :] if left else ids[n_first:n])


def _cut_chat(messages: tuple[Message, ...], encoder: Encoder, n: int, left: bool) -> list[int]:
    """The chat whose last user message is as long as fits into n tokens."""
    at = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if at is None:
        raise ValueError(f"the chat has more than {n} tokens, and no user message that could be cut")
    content = encoder.encode(messages[at]["content"])
    kept, ids = len(content), encoder.chat(messages)
    while len(ids) > n:
        kept -= len(ids) - n
        if kept < 1:
            raise ValueError(f"the chat has more than {n} tokens even without its last user message")
        part = content[len(content) - kept :] if left else content[:kept]
        text = encoder.decode(part).strip("\ufffd")  # a cut through a character of several tokens
        ids = encoder.chat([*messages[:at], {"role": "user", "content": text}, *messages[at + 1 :]])
    return ids


def fingerprint(rows: Iterable[Row]) -> str:
    """SHA-256 of what the rows ask, their answers and keys, in order: other data, or the same in another
    order, is another value. A resumed run compares it, since an ordinal names a prompt by its place."""
    digest = hashlib.sha256()
    for row in rows:
        turns = [[message["role"], message["content"]] for message in row.messages]
        digest.update(json.dumps([row.text, row.answer, row.key, turns]).encode() + b"\n")
    return digest.hexdigest()


@dataclass(slots=True)
class Stream:
    """Ordinal → prompt, a function of the seed alone: nothing to save, nothing to skip after a resume."""

    prompts: Sequence[Prompt]
    seed: int
    shuffle: bool = True
    _epoch: int = -1
    _order: Sequence[int] = ()

    def __getitem__(self, ordinal: int) -> Prompt:
        epoch, place = divmod(ordinal, len(self.prompts))
        if epoch != self._epoch:
            order = list(range(len(self.prompts)))
            if self.shuffle:
                random.Random(fold_in(self.seed, "order", epoch)).shuffle(order)
            self._epoch, self._order = epoch, order
        return self.prompts[self._order[place]]
