"""Where sequences lie in a packed row, and which tokens each may see; with attention over it by padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """S segments in a packed row of T tokens. A segment is a sequence, or continues another one of the row.

    A segment's keys are those of the segment that it continues, and then its own tokens, so that queries and
    keys end together: of n queries and m keys, query i sees the keys 0 … m - n + i ("bottom right" causal).
    """

    cu_q: Tensor  # [S + 1] int32: where each segment begins in the row
    cu_k: Tensor  # [S + 1] int32: where its keys begin in `keys`
    max_q: int
    max_k: int
    keys: Tensor | None  # [K] int64, index into the row. None: each segment's keys are its own tokens
    positions: Tensor  # [T] int64, from 0, going on from the segment that is continued
    # The row's token for each place of a padded batch; past a segment's end it is the last one.
    padded: Tensor  # [S, max_q] int64, of queries
    padded_k: Tensor  # [S, max_k] int64, of keys
    packed: Tensor  # [T] int64, each token's place in the flattened `padded`

    @property
    def cu_seqlens(self) -> Tensor:
        """Of a plain layout, whose keys lie as its queries do."""
        if self.keys is not None:
            raise ValueError(
                "Layout: segments that continue others have keys of their own: read cu_q and cu_k"
            )
        return self.cu_q

    @property
    def max_len(self) -> int:
        return self.max_q


def make_layout(
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    after: Sequence[int | None] | None = None,
    total: int | None = None,
) -> Layout:
    """Layout of segments that lie one after another, filled up with padding to `total` tokens.

    after: for each segment the earlier one that it continues, or None; by default none does. Answers that
    share a prompt continue it: lengths [prompt, answer_1, …, answer_n], after [None, 0, …, 0].
    The padding becomes sequences no longer than the longest real one, so that it costs no more than they do.
    """
    lengths, used = list(lengths), sum(lengths)
    after = [None] * len(lengths) if after is None else list(after)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"make_layout: every segment needs at least one token, got lengths {lengths}")
    if len(after) != len(lengths) or any(a is not None and not 0 <= a < i for i, a in enumerate(after)):
        raise ValueError(f"make_layout: each segment continues an earlier one or None, got after {after}")
    if total is not None and total < used:
        raise ValueError(f"make_layout: {used} tokens do not fit into total={total}")
    longest = max(lengths)
    full, rest = divmod((total or used) - used, longest)
    lengths += [longest] * full + [rest] * bool(rest)
    after += [None] * (len(lengths) - len(after))

    row = torch.arange(sum(lengths))
    own = row.split(lengths)
    seen: list[Tensor] = []
    for tokens, before in zip(own, after, strict=True):
        seen.append(tokens if before is None else torch.cat((seen[before], tokens)))
    n_keys = [len(keys) for keys in seen]
    shared = any(a is not None for a in after)
    keys = torch.cat(seen) if shared else row
    cu_q, cu_k = (F.pad(torch.tensor(n).cumsum(0), (1, 0)) for n in (lengths, n_keys))

    def places(cu: Tensor) -> Tensor:  # [S, longest], index into what cu counts
        n = cu.diff()[:, None]
        return cu[:-1, None] + torch.minimum(torch.arange(int(n.max())), n - 1)

    there = partial(to_device, device=device)
    first = [m - n for m, n in zip(n_keys, lengths, strict=True)]
    place = torch.cat([torch.arange(n) for n in lengths])
    segment = torch.repeat_interleave(torch.tensor(lengths))
    return Layout(
        cu_q=there(cu_q.to(torch.int32)),
        cu_k=there(cu_k.to(torch.int32)),
        max_q=longest,
        max_k=max(n_keys),
        keys=there(keys) if shared else None,
        positions=there(place + torch.tensor(first)[segment]),
        padded=there(places(cu_q)),
        padded_k=there(keys[places(cu_k)]),
        packed=there(segment * longest + place),
    )


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """A copy that does not wait for the device's work, as one from memory that is not pinned would."""
    # torch's allocator gives pinned memory to nobody else before the copy from it is done.
    if torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """softmax(q kᵀ / sqrt(H)) v over what each segment sees, by torch's attention on a padded batch.

    q [T, N, H], k and v [T, K, H] -> [T, N, H]. K divides N: query head n reads key head n // (N / K).
    """
    # A [T, T] mask would cost sum(length)² where this costs S · max_q · max_k.
    q = rearrange(q[layout.padded], "s l n h -> s n l h")
    k, v = (rearrange(x[layout.padded_k], "s l n h -> s n l h") for x in (k, v))
    mask = None if layout.keys is None else _visible(layout)
    gqa = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
    return rearrange(o, "s n l h -> (s l) n h")[layout.packed]


def _visible(layout: Layout) -> Tensor:
    """[S, 1, max_q, max_k] bool. A query past its segment's end sees too much; `packed` leaves it out."""
    before = (layout.cu_k.diff() - layout.cu_q.diff())[:, None, None]
    query = torch.arange(layout.max_q, device=before.device)[:, None]
    key = torch.arange(layout.max_k, device=before.device)
    return (key <= query + before)[:, None]
