"""A weight update as the elements that changed: a fraction of the bytes, and exact to the last of them.

One step of reinforcement learning moves few bf16 weights as far as their neighbour. A tensor of n elements of
s bytes, k = p n of them changed, goes in the shortest of four forms:

  gaps   (1 + f) k + s k   elements between two changes in uint8, and f times 255 where there are more
         2 k + s k         the same in uint16: shorter below p = 0.27 %
  mask   n / 8 + s k       one bit an element: shorter from p = 1/8
  whole  s n               shorter from p = 1 - 1/(8 s)

What did not change takes nothing. At 1, 5 and 30 % of changes, scattered at random, a position is worth 8.1,
5.7 and 2.9 bits; these forms spend 8.7, 8 and 3.3. In all they are 1.5, 7.5 and 36 % of bf16 weights, 1.3,
6.3 and 33 % of float32 ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from models.checksum import INT_OF_SIZE, checksums
from models.shards import Piece
from models.weights import Weights, as_tensor

CHUNK = 1 << 24  # positions decoded at a time: 128 MiB
BOOLS_TO_BITS = sum(1 << (56 - 7 * i) for i in range(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """From version `base` to `version`; `before` and `after` are the `digest` of the weights at either end.

    arrays: flat, for Ray's object store or, with `header` as metadata, a safetensors file. bits/NAME has the
      new bits of the changed elements in their order; gaps/NAME or mask/NAME says which they are, and without
      either they are all. mask: bit i of byte j is element 8 j + i. gaps: the largest value of its dtype is
      so many unchanged elements; any other is that many, and a changed one.
    """

    base: int
    version: int
    before: str
    after: str
    arrays: dict[str, np.ndarray]

    @property
    def names(self) -> list[str]:
        """The tensors that changed."""
        return [key.removeprefix("bits/") for key in self.arrays if key.startswith("bits/")]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def header(self) -> dict[str, str]:
        ends = {"base": str(self.base), "version": str(self.version)}
        return ends | {"before": self.before, "after": self.after}

    @staticmethod
    def of(header: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> Delta:
        """The delta that `header` and `arrays` were taken from."""
        return Delta(
            base=int(header["base"]),
            version=int(header["version"]),
            before=header["before"],
            after=header["after"],
            arrays=dict(arrays),
        )


def digest(sums: Mapping[str, int]) -> str:
    """What a state is known by: a hash of its tensors' names and `checksums`, in any order."""
    lines = "".join(f"{name} {total}\n" for name, total in sorted(sums.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def diff(old: Weights, new: Weights, base: int, version: int) -> Delta:
    """What makes `new`, of `version`, out of `old`, of version `base`.

    It is the bits that are compared: NaN can equal itself, and 0.0 is not -0.0. Works tensor by tensor, on
    the device of `new`. Raises ValueError where the two have other names, shapes or dtypes.
    """
    if old.keys() != new.keys():
        raise ValueError(f"diff: only one state has {sorted(old.keys() ^ new.keys())}")
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name in new:
        a, b = as_tensor(old[name]), as_tensor(new[name])
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"diff: {name} was {tuple(a.shape)} {a.dtype}, is {tuple(b.shape)} {b.dtype}")
        parts[name] = _encode(_bits(a).to(b.device), _bits(b))
    before = checksums(old)
    after = before | checksums({name: new[name] for name, arrays in parts.items() if arrays})
    return Delta(
        base=base,
        version=version,
        before=digest(before),
        after=digest(after),
        arrays={f"{kind}/{name}": x for name, arrays in parts.items() for kind, x in arrays.items()},
    )


def apply(state: Mapping[str, Tensor], delta: Delta, held: Mapping[str, int] | None = None) -> dict[str, int]:
    """Write `delta` over `state`, in place and tensor by tensor, and return the `checksums` of the result.

    held: the checksums that `state` is known to have, as the delta before returned them; None adds them up.
    Raises ValueError, with nothing written, where the receiver holds another base; and where the changes do
    not fit or the result is not what the sender has, which leaves `state` good for nothing.
    """
    sums = dict(checksums(state) if held is None else held)
    leads = f"apply: the delta leads from version {delta.base} ({delta.before}) to {delta.version}"
    if digest(sums) != delta.before:
        raise ValueError(f"{leads}; the receiver holds {digest(sums)}: send it the weights whole")
    for name in delta.names:
        patch(state[name], delta, name)
    sums |= checksums({name: state[name] for name in delta.names})
    if digest(sums) != delta.after:
        raise ValueError(f"{leads} ({delta.after}); the result is {digest(sums)}: send the weights whole")
    return sums


def patch(view: Tensor, delta: Delta, name: str, piece: Piece | None = None) -> None:
    """Write one tensor's changes to `view`: of any strides, or the `piece` of it that this rank holds.

    It proves nothing: who patches pieces adds up `piece_checksums` and compares their `digest` with
    `delta.after`. Raises ValueError where positions do not fit the tensor.
    """
    whole = tuple(view.shape) if piece is None else piece.whole
    bits = view.detach().view(INT_OF_SIZE[view.element_size()])
    new = as_tensor(delta.arrays[f"bits/{name}"])
    misfit = ValueError(f"patch: the changes of {name} do not fit {whole}: the delta is damaged")
    if f"gaps/{name}" not in delta.arrays and f"mask/{name}" not in delta.arrays:
        if len(new) != math.prod(whole):
            raise misfit
        bits.copy_(new.view(whole) if piece is None else piece.of(new.view(whole)))
        return
    new, used = new.to(view.device), 0
    for at in _positions(delta, name, view.device):
        values, used = new[used : used + len(at)], used + len(at)
        if len(values) < len(at) or (len(at) and int(at[-1]) >= math.prod(whole)):
            raise misfit
        if piece is not None:
            at, values = _within(at, values, piece)
        if bits.is_contiguous():
            bits.view(-1).scatter_(0, at, values)
        else:
            bits[torch.unravel_index(at, bits.shape)] = values


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(INT_OF_SIZE[x.element_size()])


def _encode(old: Tensor, new: Tensor) -> dict[str, np.ndarray]:
    """The arrays of one tensor: none where nothing changed."""
    changed = old != new
    k, n, size = int(changed.sum()), new.numel(), new.element_size()
    mask = -(-n // 8)
    if k == 0:
        return {}
    if mask + k * size >= n * size:
        return {"bits": new.cpu().numpy().copy()}
    if k >= mask:
        words = pad(changed.view(torch.uint8), (0, 8 * mask - n)).view(torch.int64)
        packed = (words * BOOLS_TO_BITS >> 56).to(torch.uint8)  # bool i of a word: from bit 8 i to bit 56 + i
        return {"mask": packed.cpu().numpy(), "bits": new[changed].cpu().numpy()}
    at = changed.nonzero()[:, 0]
    gaps = at.diff(prepend=at.new_tensor([-1])) - 1
    narrow, wide = (k + int((gaps // limit).sum()) for limit in (0xFF, 0xFFFF))
    if narrow <= 2 * wide:
        packed = _fill(gaps, 0xFF, narrow).to(torch.uint8).cpu().numpy()
    else:
        packed = _fill(gaps, 0xFFFF, wide).to(torch.int16).cpu().numpy().view(np.uint16)
    return {"gaps": packed, "bits": new[at].cpu().numpy()}


def _fill(gaps: Tensor, limit: int, length: int) -> Tensor:
    """Gaps below `limit`, each after as many of `limit` as it had."""
    fillers = gaps // limit
    out = gaps.new_full((length,), limit)
    out[torch.arange(len(gaps), device=gaps.device) + fillers.cumsum(0)] = gaps - fillers * limit
    return out


def _positions(delta: Delta, name: str, device: torch.device) -> Iterator[Tensor]:
    """Flat positions of the changed elements, ascending, int64, a chunk at a time."""
    mask, gaps = (delta.arrays.get(f"{kind}/{name}") for kind in ("mask", "gaps"))
    if mask is not None:
        shift = torch.arange(8, dtype=torch.uint8, device=device)
        for i, part in enumerate(as_tensor(mask).to(device).split(CHUNK // 8)):
            yield ((part[:, None] >> shift) & 1).view(-1).nonzero()[:, 0] + i * (CHUNK // 8 * 8)
    elif gaps is not None:
        limit, end = np.iinfo(gaps.dtype).max, -1
        for part in as_tensor(gaps.view(np.int16) if limit > 0xFF else gaps).to(device).split(CHUNK):
            step = part.long() & limit  # uint16 comes as int16
            changed = step != limit
            at = (step + changed).cumsum(0) + end
            end = int(at[-1])
            yield at[changed]


def _within(at: Tensor, values: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """The positions in `piece` of those in its whole, and their values."""
    inner, n = math.prod(piece.whole[piece.axis + 1 :]), piece.whole[piece.axis]
    along = at // inner % n
    mine = (along >= piece.start) & (along < piece.stop)
    at, along = at[mine], along[mine] - piece.start
    at = (at // (inner * n) * (piece.stop - piece.start) + along) * inner + at % inner
    return at, values[mine]
