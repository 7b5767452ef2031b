"""Supervised training and sampling of very small models: one padded batch, one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import Head, ModelConfig
from models.transformer import Transformer
from rl.demo.codec import CHARS, EOS, PAD, Codec
from rl.demo.specs import Size

Example = tuple[str, str]  # what is read, what should be written

BATCH = 64
LR = 2e-3
WARMUP = 50  # steps
MAX_LEN = 64  # tokens


def make_model(
    size: Size, seed: int, codec: Codec = CHARS, *, head: Head = "lm", max_len: int = MAX_LEN
) -> Transformer:
    """Queries and keys are normalised (Qwen3): the comparison of two digits is learned in fewer steps."""
    cfg = ModelConfig(
        family="qwen3", head=head, qk_norm=True, vocab_size=codec.tokenizer.vocab_size, d_model=size.d_model,
        n_layers=size.n_layers, n_heads=size.n_heads, n_kv_heads=size.n_heads, head_dim=size.head_dim,
        d_ff=size.d_ff, max_len=max_len, eos_ids=(EOS,), pad_id=PAD,
    )  # fmt: skip
    model = Transformer(cfg)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a batch padded at the right, [B, L, N, H]: no token sees what comes after it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def make_batch(examples: Sequence[Example], codec: Codec = CHARS) -> tuple[Tensor, Tensor]:
    """ids [B, L], end of text included, and the mask [B, L - 1] of the targets ids[:, 1:] to be written."""
    rows = [(codec.encode(read), [*codec.encode(written), EOS]) for read, written in examples]
    longest = max(len(read) + len(written) for read, written in rows)
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
    for i, (read, written) in enumerate(rows):
        end = len(read) + len(written)
        ids[i, :end] = torch.tensor(read + written)
        mask[i, len(read) - 1 : end - 1] = True
    return ids, mask


def target_logp(model: Transformer, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probs [n] of the targets under the mask, row by row."""
    hidden = model(ids[:, :-1], torch.arange(ids.shape[1] - 1), causal)
    return -F.cross_entropy(model.logits(hidden[mask]), ids[:, 1:][mask], reduction="none")


@torch.no_grad()
def answer_probability(model: Transformer, examples: Sequence[Example], codec: Codec = CHARS) -> float:
    """Mean over examples of Π_t p(token_t): the accuracy of sampling at temperature 1, in expectation."""
    ids, mask = make_batch(examples, codec)
    row = mask.nonzero()[:, 0]
    logp = torch.zeros(len(examples)).index_add(0, row, target_logp(model, ids, mask))
    return logp.exp().mean().item()


@dataclass(frozen=True, slots=True)
class Check:
    """What a look at the model decided."""

    done: bool
    settle: bool  # lower the learning rate: the skill is there, the noise is to go
    note: str


def fit(
    model: Transformer,
    draw: Callable[[int], Sequence[Example]],
    check: Callable[[], Check],
    *,
    steps: int,
    every: int,
    batch: int = BATCH,
    codec: Codec = CHARS,
    progress: Callable[[int, str], None],
) -> int:
    """AdamW on the cross-entropy of what should be written, until `check` is done. Returns the steps taken.

    `draw(n)` gives n examples; `check` looks at the model every `every` steps and may lower the learning rate
    by a fifth, so that no schedule needs to know when the training will end.
    """
    return descend(
        model, lambda: -target_logp(model, *make_batch(draw(batch), codec)).mean(), check,
        steps=steps, every=every, progress=progress,
    )  # fmt: skip


def descend(
    model: Transformer,
    loss_of: Callable[[], Tensor],
    check: Callable[[], Check],
    *,
    steps: int,
    every: int,
    progress: Callable[[int, str], None],
) -> int:
    """`fit` for any loss: each call of `loss_of` draws its own examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    settled = 1.0
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / WARMUP) * settled
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0:
            seen = check()
            progress(step, seen.note)
            if seen.done:
                return step
            settled *= 0.8 if seen.settle and settled > 0.05 else 1.0
    return steps


@torch.no_grad()
def sample(
    model: Transformer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    temperature: float,
    generator: torch.Generator,
    codec: Codec = CHARS,
) -> list[str]:
    """One text per prompt; a text that never ended is cut after max_tokens."""
    rows = [codec.encode(prompt) for prompt in prompts]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), max(map(len, rows)) + max_tokens), PAD)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    cfg, every, columns = model.cfg, torch.arange(len(rows)), torch.arange(ids.shape[1])
    shape = (cfg.n_layers, len(rows), ids.shape[1], cfg.n_kv_heads, cfg.head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)

    def logits(tokens: Tensor, places: Tensor) -> Tensor:
        """Of tokens [B, T] at places [B, T]. Keys of padding lie behind all that look, until replaced."""
        seen = (columns <= places[..., None])[:, None]  # [B, 1, T, columns]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer][every[:, None], places] = k
            values[layer][every[:, None], places] = v
            q, k, v = (x.transpose(1, 2) for x in (q, keys[layer], values[layer]))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

        return model.logits(model(tokens, places, attend))

    last = int(lengths.max())
    start = logits(ids[:, :last], columns[:last].expand(len(rows), -1))
    now = start[every, lengths - 1]
    for t in range(max_tokens):
        probs = (now / temperature).softmax(-1)
        ids[every, lengths + t] = torch.multinomial(probs, 1, generator=generator)[:, 0]
        place = (lengths + t)[:, None]
        if bool((ids == EOS).any(1).all()):
            break
        now = logits(ids.gather(1, place), place)[:, 0]
    return [codec.decode(row[n:]) for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
