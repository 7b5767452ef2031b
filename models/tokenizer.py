"""Text to token ids and back: a wrapper over `tokenizers`, and a tokenizer of one token per character."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers


class Tokenizer:
    """Ids of text, text of ids. Special tokens are read from text only where that is asked for."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos: str | None = None,
        pad: str | None = None,
        bos: str | None = None,
    ) -> None:
        self._json = backend.to_str()
        self._plain = tokenizers.Tokenizer.from_str(self._json)
        # The spelling of a special token in a text is text: nobody can end a turn by writing "<eos>".
        self._plain.encode_special_tokens = True
        roles = {"eos": eos, "pad": pad, "bos": bos}
        self.special = {role: token for role, token in roles.items() if token is not None}
        for role, token in self.special.items():
            if backend.token_to_id(token) is None:
                raise ValueError(f"Tokenizer: {role} token {token!r} is not in the vocabulary")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self._json, self.special)  # the backend's own pickle forgets encode_special_tokens

    @cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._json)

    @cached_property
    def _alphabet(self) -> frozenset[str] | None:
        """The known characters, where every token is one character; else None."""
        if not isinstance(self._plain.model, models.WordLevel):
            return None
        added = {token.content for token in self._plain.get_added_tokens_decoder().values()}
        tokens = self._plain.get_vocab().keys() - added
        return frozenset(tokens) if all(len(token) == 1 for token in tokens) else None

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Ids of text. `add_special` adds what the tokenizer's template adds (such as a first token);
        `parse_special` reads special tokens that are spelled out, as chat templates do.

        Raises ValueError naming the first character that a character tokenizer does not know.
        """
        if self._alphabet is not None and not parse_special:
            for at, char in enumerate(text):
                if char not in self._alphabet:
                    raise ValueError(f"Tokenizer.encode: unknown character {char!r} at {at} of {text!r}")
        backend = self._parsing if parse_special else self._plain
        return backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._plain.decode(list(ids), skip_special_tokens=skip_special)

    @property
    def vocab_size(self) -> int:
        return self._plain.get_vocab_size()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        eos = self._id("eos")
        return () if eos is None else (eos,)

    @property
    def pad_id(self) -> int | None:
        return self._id("pad")

    @property
    def bos_id(self) -> int | None:
        return self._id("bos")

    def _id(self, role: str) -> int | None:
        return self._plain.token_to_id(self.special[role]) if role in self.special else None

    def fingerprint(self) -> str:
        """SHA-256 over vocabulary and special tokens: equal where two models mean the same by an id."""
        vocab = sorted(self._plain.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(json.dumps([vocab, sorted(self.special.items())]).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer opens."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._json)
        names = {f"{role}_token": token for role, token in self.special.items()}
        fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(fixed | names, indent=2))


def _rebuild(json: str, special: dict[str, str]) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(json), **special)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Open the tokenizer.json and tokenizer_config.json of a Hugging Face folder."""
    folder = Path(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())

    def token(role: str) -> str | None:
        value = config.get(f"{role}_token")
        return value["content"] if isinstance(value, dict) else value

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Tokenizer(backend, eos=token("eos"), pad=token("pad"), bos=token("bos"))


def char_tokenizer(
    alphabet: str, *, pad: str = "<pad>", eos: str = "<eos>", bos: str | None = None
) -> Tokenizer:
    """One token per character. Ids: pad, eos, bos if there is one, then the alphabet in its order."""
    if len(set(alphabet)) != len(alphabet):
        raise ValueError(f"char_tokenizer: a character occurs twice in {alphabet!r}")
    special = [token for token in (pad, eos, bos) if token is not None]
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(backend, eos=eos, pad=pad, bos=bos)
