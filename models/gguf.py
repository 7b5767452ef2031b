"""GGUF files, in which llama.cpp keeps a model: one file of fields and block-quantised tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Kinds of tensors: plain numbers, or blocks of 32 that share a scale d (and of some an offset m).
PLAIN = {0: np.dtype("<f4"), 1: np.dtype("<f2")}
BLOCK = 32  # numbers; a row holds whole blocks
BLOCKS = {
    2: np.dtype([("d", "<f2"), ("q", "u1", 16)]),  # Q4_0: d (q - 8)
    3: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),  # Q4_1: d q + m
    8: np.dtype([("d", "<f2"), ("q", "i1", 32)]),  # Q8_0: d q
}


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor as it lies in the file."""

    kind: int
    shape: tuple[int, ...]  # rows first, as torch has it; the file has it the other way round
    start: int  # byte in the file

    @property
    def stop(self) -> int:
        n = math.prod(self.shape)
        plain = self.kind in PLAIN
        return self.start + (
            n * PLAIN[self.kind].itemsize if plain else n // BLOCK * BLOCKS[self.kind].itemsize
        )

    def values(self, file: np.ndarray) -> np.ndarray:
        """float32 of the tensor's shape, dequantised. `file`: the whole file's bytes."""
        data = file[self.start : self.stop]
        if self.kind in PLAIN:
            return data.view(PLAIN[self.kind]).astype("f4").reshape(self.shape)
        blocks = data.view(BLOCKS[self.kind])
        q = blocks["q"]
        if q.shape[1] == 16:  # the low halves of the bytes are the first 16 numbers of the block
            q = np.concatenate((q & 15, q >> 4), axis=1)
        x = q.astype("f4")
        if self.kind == 2:
            x -= 8
        x *= blocks["d"].astype("f4")[:, None]
        if self.kind == 3:
            x += blocks["m"].astype("f4")[:, None]
        return x.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Gguf:
    fields: Mapping[str, Any]  # "llama.block_count": 30, "tokenizer.ggml.tokens": [...], ...
    tensors: Mapping[str, Raw]
    bytes: np.ndarray  # of the file, mapped and read-only

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name].values(self.bytes)


class _Cursor:
    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        if self.at + n > len(self.data):
            raise ValueError("read_gguf: the file ends too early")
        self.at += n
        return self.data[self.at - n : self.at].tobytes()

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(SCALARS[kind])
        kind, n = self.number("I"), self.number("Q")
        if kind in SCALARS:
            form = f"<{n}{SCALARS[kind]}"
            return list(struct.unpack(form, self.take(struct.calcsize(form))))
        return [self.value(kind) for _ in range(n)]


def read_gguf(path: str | Path) -> Gguf:
    """Fields and tensors of a file of version 2 or 3.

    Raises ValueError for another file, a file cut off, and a quantisation other than Q4_0, Q4_1 and Q8_0.
    """
    data = np.memmap(path, dtype=np.uint8, mode="r")
    cursor = _Cursor(data)
    if cursor.take(4) != b"GGUF" or cursor.number("I") not in (2, 3):
        raise ValueError(f"read_gguf: {path} is no GGUF file of version 2 or 3")
    n_tensors, n_fields = cursor.number("Q"), cursor.number("Q")
    fields = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(n_fields)}
    found = {}
    for _ in range(n_tensors):
        name, rank = cursor.string(), cursor.number("I")
        shape = tuple(cursor.number("Q") for _ in range(rank))[::-1]
        found[name] = cursor.number("I"), shape, cursor.number("Q")
    align = fields.get("general.alignment", 32)
    base = -(-cursor.at // align) * align
    tensors = {}
    for name, (kind, shape, offset) in found.items():
        if kind not in PLAIN | BLOCKS:
            raise ValueError(
                f"read_gguf: {name} of {path} has the quantisation of number {kind}, expected F32 (0), "
                "F16 (1), Q4_0 (2), Q4_1 (3) or Q8_0 (8)"
            )
        tensors[name] = Raw(kind, shape, base + offset)
        if tensors[name].stop > len(data):
            raise ValueError(f"read_gguf: {path} ends before its tensor {name} does")
    return Gguf(fields, tensors, data)
