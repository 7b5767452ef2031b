"""Text to ids and back for the demo's models: characters of an alphabet, or bytes. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from models.tokenizer import Tokenizer, byte_tokenizer, char_tokenizer
from rl.demo.specs import JudgeSpec, Spec, TextSpec
from rl.demo.tasks import ALPHABET, BRACKETS

PAD, EOS = 0, 1  # of every codec


@dataclass(frozen=True, slots=True)
class Codec:
    """A tokenizer, and ten times faster what its `encode` does."""

    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]

    def __post_init__(self) -> None:
        assert (self.tokenizer.pad_id, self.tokenizer.eos_ids) == (PAD, (EOS,))

    def decode(self, ids: Sequence[int]) -> str:
        """The text before the end of text, if it comes."""
        written = list(ids)
        return self.tokenizer.decode(written[: written.index(EOS)] if EOS in written else written)


def _chars(alphabet: str) -> Codec:
    tokenizer = char_tokenizer(alphabet)
    id_of = {char: tokenizer.encode(char)[0] for char in alphabet}
    return Codec(tokenizer, lambda text: [id_of[char] for char in text])


def _bytes() -> Codec:
    return Codec(byte_tokenizer(), lambda text: [EOS + 1 + byte for byte in text.encode()])


CHARS = _chars(ALPHABET)
BRACKETED = _chars(ALPHABET + BRACKETS)  # of a judge that reads candidates whose verdicts were rewritten
BYTES = _bytes()


def codec_of(spec: Spec) -> Codec:
    if isinstance(spec, TextSpec):
        return BYTES
    return BRACKETED if isinstance(spec, JudgeSpec) and spec.gullible else CHARS
