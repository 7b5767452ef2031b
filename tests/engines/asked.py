"""A small model, what a plain forward pass says of it, and engines asked through the interface alone."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import numpy as np
import torch

from models.attention import make_layout, packed_attention
from models.config import ModelConfig
from models.transformer import Transformer
from rl.engines.base import Engine
from rl.types import Completion, SamplingParams

SLOTS = 8
CFG = ModelConfig(  # heads of 32: the least that vLLM serves on a CPU
    vocab_size=23, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=48, max_len=512
)
PROBE = (1, 2, 3, 4)
PROMPT = (3, 1, 4, 1, 5)
FREE = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=400)
ATOL = 1e-4  # nats in float32


class Host(Protocol):
    def run(self, main: Coroutine[Any, Any, Any]) -> Any: ...

    async def engine(self, model: Transformer, version: int = 0) -> Engine:
        """A started engine of `SLOTS` slots and `PROBE` that serves this model and has nothing to do."""
        ...

    async def release(self, engine: Engine) -> None: ...


def build(cfg: ModelConfig = CFG, seed: int = 0) -> Transformer:
    model = Transformer(cfg).requires_grad_(False)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def state(model: Transformer) -> dict[str, np.ndarray]:
    return {name: p.numpy().copy() for name, p in model.state_dict().items()}


def plain_logp(model: Transformer, ids, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature) [T - 1, V] of the tokens after the first, in float64."""
    layout = make_layout([len(ids)])
    hidden = model(torch.tensor(ids), layout.positions, lambda _, q, k, v: packed_attention(q, k, v, layout))
    return (model.logits(hidden)[:-1].double() / temperature).log_softmax(-1)


def plain_token_logp(model: Transformer, prompt, tokens, temperature: float = 1.0) -> np.ndarray:
    logp = plain_logp(model, [*prompt, *tokens], temperature)[len(prompt) - 1 :]
    return logp.gather(-1, torch.tensor(tokens, dtype=torch.int64)[:, None])[:, 0].float().numpy()


async def collect(engine: Engine, prompt, params, seeds, request_id: str = "r") -> list[Completion]:
    found = {}
    async for index, completion in engine.generate(prompt, params=params, seeds=seeds, request_id=request_id):
        assert index not in found
        found[index] = completion
    return [found[i] for i in sorted(found)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def tokens_more(engine: Engine, n: int) -> None:
    begun = engine.stats().sampled_tokens
    await until(lambda: engine.stats().sampled_tokens >= begun + n)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)


def same_tokens(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.tokens, b.tokens) and a.finish == b.finish


def with_engine(test):
    """Run `async test(self, engine, model)` on an engine that serves build()."""

    def run(self, host: Host):
        async def main():
            model = build()
            engine = await host.engine(model)
            try:
                await test(self, engine, model)
            finally:
                await host.release(engine)

        host.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
