"""Chat templates: messages become text as Hugging Face renders them, and none can spell a special token.

A template is Jinja source with the variables messages, add_generation_prompt, tools and documents (both None)
and the named special tokens. Its whitespace rules, extensions and functions are those that Hugging Face
documents for `apply_chat_template`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message = Mapping[str, str]  # {"role", "content"}

PRIVATE = range(0x100000, 0x10FFFE)  # code points (plane 16) that have no meaning and survive any template


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The source, and the special tokens that it may name (such as unk_token) beyond bos, eos and pad."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    def render(
        self, messages: Sequence[Message], tokens: Mapping[str, str], add_generation_prompt: bool
    ) -> str:
        """Raises ValueError where the template is broken or refuses the messages (raise_exception)."""
        try:
            return _compiled(self.source).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **{**self.tokens, **tokens},
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from None


@dataclass(frozen=True, slots=True)
class Shielded:
    """Messages that spell no special token: some characters have stand-ins, which `restore` puts back."""

    messages: tuple[Message, ...]
    stands_for: Mapping[str, str]  # stand-in → character; empty: the messages are as they were

    def restore(self, text: str) -> str:
        return text.translate(str.maketrans(dict(self.stands_for)))


def shield(messages: Sequence[Message], spellings: tuple[str, ...], source: str) -> Shielded:
    """Give a stand-in to the first character of every special token that a content spells, and to what begins
    or ends a content and could become one together with the template's own text.

    A stand-in is one character for one character, so that a template may strip, split and measure contents.
    Raises ValueError for a message that is not a role (one word) and a content (text).
    """
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not re.fullmatch(r"\w+", role) or not isinstance(content, str):
            raise ValueError(f'chat: expected {{"role": a word, "content": text}}, got {dict(message)!r}')
    places = [_places(message["content"], spellings) for message in messages]
    spelled = {
        message["content"][at] for message, found in zip(messages, places, strict=True) for at in found
    }
    unused = free((source, *(message["content"] for message in messages)), len(spelled))
    stand_in = dict(zip(sorted(spelled), unused, strict=True))
    shielded = []
    for message, found in zip(messages, places, strict=True):
        content = "".join(stand_in[c] if at in found else c for at, c in enumerate(message["content"]))
        shielded.append({**message, "content": content})
    return Shielded(tuple(shielded), {stand: char for char, stand in stand_in.items()})


def free(texts: Iterable[str], n: int) -> str:
    """n private characters in a row that no text contains. Raises ValueError where there are none."""
    taken = sorted({ord(c) for text in texts for c in text if ord(c) in PRIVATE})
    start = PRIVATE.start
    for stop in (*taken, PRIVATE.stop):
        if stop - start >= n:
            return "".join(map(chr, range(start, start + n)))
        start = stop + 1
    raise ValueError(f"chat: the messages leave no {n} private characters (U+100000 to U+10FFFD) unused")


def _places(content: str, spellings: tuple[str, ...]) -> set[int]:
    """Where the characters stand that `shield` replaces."""
    pattern, tails, heads = _fragments(spellings)
    places = {match.start() for match in pattern.finditer(content)}
    begin, end = len(content) - len(content.lstrip()), len(content.rstrip())  # templates strip contents
    if content.startswith(tails, begin):
        places.add(begin)
    if content.endswith(heads, begin, end):
        places.add(end - 1)
    return places


@lru_cache(maxsize=8)
def _fragments(spellings: tuple[str, ...]) -> tuple[re.Pattern[str], tuple[str, ...], tuple[str, ...]]:
    """(matches before each spelling, their proper ends, their proper beginnings)."""
    pattern = "|".join(map(re.escape, spellings)) or "(?!)"
    tails = {s[k:] for s in spellings for k in range(1, len(s))}
    heads = {s[:k] for s in spellings for k in range(1, len(s))}
    return re.compile(f"(?={pattern})"), tuple(tails), tuple(heads)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant said, for training on it: here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which would change what the model reads."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # a template that prints the day gives other ids tomorrow
