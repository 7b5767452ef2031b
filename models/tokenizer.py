"""Text to token ids and back: a wrapper over `tokenizers`, and a tokenizer of one token per character."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from models.chat import ChatTemplate, Message, free, shield

# What else of a Hugging Face folder a model cannot do without, whether we read it or not.
KEPT = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
        "*.tiktoken", "chat_template*", "additional_chat_templates/*", "generation_config.json", "LICENSE*",
        "NOTICE*")  # fmt: skip


class Tokenizer:
    """Ids of text, text of ids. Special tokens are read from text only where that is asked for.

    `backend` may be the text of a tokenizer.json. `files`: the folder's own other files by name, which `save`
    writes as they were.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | str,
        *,
        eos: str | None = None,
        pad: str | None = None,
        bos: str | None = None,
        template: ChatTemplate | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._json = backend if isinstance(backend, str) else backend.to_str()
        self._plain = self._fresh()
        self.template = template
        self.files = dict(files or {})
        self._aliased: tuple[str, tokenizers.Tokenizer, dict[int, int]] | None = None
        # The spelling of a special token in a text is text: nobody can end a turn by writing "<eos>".
        self._plain.encode_special_tokens = True
        roles = {"eos": eos, "pad": pad, "bos": bos}
        self.special = {role: token for role, token in roles.items() if token is not None}
        for role, token in self.special.items():
            if self._plain.token_to_id(token) is None:
                raise ValueError(f"Tokenizer: {role} token {token!r} is not in the vocabulary")

    def __reduce__(self) -> tuple[object, ...]:
        # The backend's own pickle forgets encode_special_tokens.
        return _rebuild, (self._json, self.special, self.template, self.files)

    def _fresh(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._json)
        backend.no_truncation()  # some files ship with a length at which ids are cut off silently
        backend.no_padding()
        return backend

    @cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        return self._fresh()

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
        if not parse_special:
            self._check(text)
        backend = self._parsing if parse_special else self._plain
        return backend.encode(text, add_special_tokens=add_special).ids

    def _check(self, text: str) -> None:
        for at, char in enumerate(text if self._alphabet is not None else ""):
            if char not in (self._alphabet or ()):
                raise ValueError(f"Tokenizer.encode: unknown character {char!r} at {at} of {text!r}")

    @property
    def first_ids(self) -> tuple[int, ...]:
        """What the tokenizer's own template puts before a text, such as a beginning of sequence."""
        if self._plain.num_special_tokens_to_add(False) == 0:
            return ()
        added = {token.content for token in self._plain.get_added_tokens_decoder().values()}
        text = min(self._plain.get_vocab().keys() - added)  # any text will do, the empty one aside
        encoding = self._plain.encode(text, add_special_tokens=True)
        return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of [{"role", "content"}, ...] in the model's chat template: those of transformers'
        `apply_chat_template`, but a special token that a content spells is text, never that token.

        What the template writes itself is parsed. Added tokens that are not special (such as <think>) are
        read in contents too. Raises ValueError without a template, and where it refuses the messages.
        """
        if self.template is None:
            raise ValueError(
                "Tokenizer.chat: the model has no chat template; put a chat_template.jinja into its folder, "
                "or use plain prompts"
            )
        special = self._special_tokens
        names = {f"{role}_token": token for role, token in self.special.items()}
        shielded = shield(messages, tuple(special), self.template.source)
        text = self.template.render(shielded.messages, names, add_generation_prompt)
        spelled = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._check(shielded.restore(spelled.sub("", text)))
        if not shielded.stands_for:
            return self._parsing.encode(text, add_special_tokens=False).ids
        # The template's special tokens get a second spelling, which no content has.
        alias = free([text, shielded.restore(text)], len(special))
        if self._aliased is None or self._aliased[0] != alias:
            self._aliased = alias, *self._with_aliases(alias)
        _, backend, meaning = self._aliased
        to_alias = dict(zip(special, alias, strict=True))
        text = shielded.restore(spelled.sub(lambda match: to_alias[match[0]], text))
        return [meaning.get(id, id) for id in backend.encode(text, add_special_tokens=False).ids]

    def _with_aliases(self, alias: str) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """(reads aliases as tokens, and special tokens as text; id of an alias → id that it stands for)."""
        backend = self._fresh()
        backend.encode_special_tokens = True
        known = self._plain.get_added_tokens_decoder()
        ids = list(self._special_tokens.values())
        backend.add_tokens(
            [
                AddedToken(char, lstrip=known[id].lstrip, rstrip=known[id].rstrip, normalized=False)
                for char, id in zip(alias, ids, strict=True)
            ]
        )
        vocab = backend.get_vocab()
        return backend, {vocab[char]: id for char, id in zip(alias, ids, strict=True)}

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        added = self._plain.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

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
        """Write what transformers' AutoTokenizer opens: tokenizer.json, and `files` or without those
        tokenizer_config.json and, of a template, chat_template.jinja."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in {**self.files, "tokenizer.json": self._json.encode()}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        if self.files:
            return
        names = {f"{role}_token": token for role, token in self.special.items()}
        if self.template is not None:
            names = {**self.template.tokens, **names}
            (folder / "chat_template.jinja").write_text(self.template.source, encoding="utf-8")
        fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(fixed | names, indent=2))


def _rebuild(
    json: str, special: dict[str, str], template: ChatTemplate | None, files: dict[str, bytes]
) -> Tokenizer:
    return Tokenizer(json, **special, template=template, files=files)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Open the tokenizer.json and tokenizer_config.json of a Hugging Face folder, and its chat template.

    Raises FileNotFoundError where one of the two is not there.
    """
    folder = Path(folder)
    for needed in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / needed).is_file():
            raise FileNotFoundError(f"load_tokenizer: {folder} has no {needed}")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    values = {name: value for name, value in config.items() if name.endswith("_token")}
    tokens = {name: v["content"] if isinstance(v, dict) else v for name, v in values.items()}
    named = {name: token for name, token in tokens.items() if isinstance(token, str)}
    eos, pad, bos = (named.pop(f"{role}_token", None) for role in ("eos", "pad", "bos"))
    source = _template_source(folder, config)
    return Tokenizer(
        (folder / "tokenizer.json").read_bytes().decode(),
        eos=eos,
        pad=pad,
        bos=bos,
        template=None if source is None else ChatTemplate(source, named),
        files={
            path.relative_to(folder).as_posix(): path.read_bytes()
            for pattern in KEPT
            for path in folder.glob(pattern)
            if path.is_file() and path.name != "tokenizer.json"
        },
    )


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja goes before the configuration's chat_template; of several, the "default" one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


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


def byte_tokenizer(*, pad: str = "<pad>", eos: str = "<eos>", bos: str | None = None) -> Tokenizer:
    """One token per byte of UTF-8: no text is unknown. Ids: pad, eos, bos if any, then bytes 0 to 255.

    Ids that cut a character in two decode to U+FFFD there.
    """
    special = [token for token in (pad, eos, bos) if token is not None]
    # ByteLevel spells a byte as a letter: itself where it is visible in Latin-1, else the next one from 256.
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unseen = iter(range(256, 512))
    symbols = [chr(byte if byte in visible else next(unseen)) for byte in range(256)]
    vocab = {token: i for i, token in enumerate([*special, *symbols])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(backend, eos=eos, pad=pad, bos=bos)
