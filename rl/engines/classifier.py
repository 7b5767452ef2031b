"""Scalar judges: text in, the one logit of a sequence-classification model out."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from models.config import ModelConfig
from models.tokenizer import Tokenizer
from rl.engines.base import Engine, EngineStats
from rl.engines.request import check_ids
from rl.engines.scoring import TOKENS_AT_ONCE

Row = Mapping[str, Sequence[int]]  # what the model reads: input_ids, and what else its architecture wants


class Classifier(Protocol):
    """Every constructor is cheap; `start` brings the model up."""

    async def start(self) -> None: ...

    def encode(self, text: str, said: str | None = None) -> Row:
        """Tokens of a text; with `said` of a user's message and the assistant's, which may be empty.

        Raises ValueError where the model cannot read them; nothing is ever truncated.
        """
        ...

    async def classify(self, rows: Sequence[Row]) -> list[float]:
        """The raw logit of each row."""
        ...

    def stats(self) -> EngineStats: ...

    async def stop(self) -> None: ...


class EngineClassifier:
    """A model with a score head in any of our engines."""

    def __init__(self, engine: Engine, cfg: ModelConfig, tokenizer: Tokenizer) -> None:
        self.engine, self.cfg, self.tokenizer = engine, cfg, tokenizer

    async def start(self) -> None:
        await self.engine.start()

    def encode(self, text: str, said: str | None = None) -> Row:
        if said is None:
            ids = self.tokenizer.encode(text, add_special=True)
        else:
            ids = self.tokenizer.chat(messages(text, said), add_generation_prompt=False)
        ids = one_bos(ids, self.tokenizer.bos_id)
        check_ids("classify", ids, vocab_size=self.cfg.vocab_size, max_len=self.cfg.max_len)
        return {"input_ids": ids}

    async def classify(self, rows: Sequence[Row]) -> list[float]:
        return await self.engine.classify([row["input_ids"] for row in rows])

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def stop(self) -> None:
        await self.engine.stop()


class HFClassifier:
    """Every other architecture, through transformers' AutoModelForSequenceClassification and the folder's own
    tokenizer.

    Rows of equal length share a forward pass and nothing is padded: on which side, with which positions and
    which last token differs between architectures. Scores agree up to rounding whoever is beside. A text and
    what was `said` go through the chat template if there is one, else they are the tokenizer's pair.
    """

    def __init__(self, folder: str | Path, *, rows: int = 256, device: str = "cpu", threads: int = 1) -> None:
        self.folder, self.rows, self.device, self.threads = folder, rows, device, threads
        self._pool: ThreadPoolExecutor | None = None
        self._running = self._tokens = 0
        self._busy = 0.0

    async def start(self) -> None:
        """Raises RuntimeError without transformers, ValueError for a folder that is no scalar judge."""
        self._began = time.perf_counter()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hf-classifier")
        self.model, self.tokenizer = await self._submit(
            partial(load_hf, self.folder, self.device, self.threads)
        )
        self.max_len = length_limit(self.model, self.tokenizer.model_max_length)

    def encode(self, text: str, said: str | None = None) -> Row:
        tokenizer = self.tokenizer
        if said is not None and tokenizer.chat_template:
            check_spelling((text, said), tokenizer.all_special_tokens)
            row = tokenizer.apply_chat_template(messages(text, said), tokenize=True, return_dict=True)
        else:  # as lists, since an empty pair would be none; what spells a special token is text
            pair = None if said is None else [said]
            many = tokenizer([text], pair, split_special_tokens=True, verbose=False)
            row = {name: ids[0] for name, ids in many.items()}
        vocab_size = self.model.get_input_embeddings().num_embeddings
        check_ids("classify", row["input_ids"], vocab_size=vocab_size, max_len=self.max_len)
        return dict(row)

    async def classify(self, rows: Sequence[Row]) -> list[float]:
        self._running += len(rows)
        try:
            return await self._submit(lambda: logits(self.model, rows, self.rows))
        finally:
            self._running -= len(rows)
            self._tokens += sum(len(row["input_ids"]) for row in rows)

    async def classify_texts(self, texts: Sequence[tuple[str, str | None]]) -> list[float]:
        """The logit of each (text, pair or None)."""
        return await self.classify([self.encode(text, pair) for text, pair in texts])

    def stats(self) -> EngineStats:
        return EngineStats(
            version=0,
            running=self._running,
            waiting=0,
            sampled_tokens=0,
            prompt_tokens=self._tokens,
            busy_s=self._busy,
            wall_s=time.perf_counter() - self._began,
        )

    async def stop(self) -> None:
        if self._pool is not None:
            await asyncio.to_thread(self._pool.shutdown)

    def _submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        if self._pool is None:
            raise RuntimeError("HFClassifier: not started")

        def timed() -> Any:
            began = time.perf_counter()
            with torch.inference_mode():
                result = function()
            self._busy += time.perf_counter() - began
            return result

        return asyncio.get_running_loop().run_in_executor(self._pool, timed)


# ── Pure parts ────────────────────────────────────────────────────────────────────────────────────


def messages(text: str, said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": said}]


def one_bos(ids: list[int], bos: int | None) -> list[int]:
    """Without the second of two first tokens: the template writes one, and the tokenizer adds its own."""
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def check_spelling(texts: Sequence[str], special: Sequence[str]) -> None:
    """Raise ValueError where a text spells a special token, which would end its turn in a chat template."""
    for token in special:
        if any(token in text for text in texts):
            raise ValueError(f"classify: the text spells the special token {token!r}")


def length_limit(model: nn.Module, tokenizer_limit: int) -> int:
    """Most tokens of a row: what the tokenizer's and the model's config allow, and the position table holds.

    A table with a padding index (RoBERTa) begins to count behind it.
    """
    config: Any = model.config
    known = [tokenizer_limit, getattr(config.get_text_config(), "max_position_embeddings", None)]
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    known += [
        t.num_embeddings - t.padding_idx - 1
        for t in tables
        if isinstance(t, nn.Embedding) and t.padding_idx is not None
    ]
    return min(n for n in known if n)


def load_hf(folder: str | Path, device: str, threads: int) -> tuple[Any, Any]:
    """(model, tokenizer). Weights in the folder's dtype, on a CPU in float32."""
    try:
        hf: Any = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"HFClassifier: the model in {folder} needs the package transformers, and {error.name} is not "
            "installed: pip install transformers"
        ) from None
    torch.set_num_threads(threads)  # holds for the whole process
    config = hf.AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.num_labels != 1:
        raise ValueError(
            f"HFClassifier: {folder} must have one label, whose logit is the score; got {config.num_labels}"
        )
    model, info = hf.AutoModelForSequenceClassification.from_pretrained(
        folder, config=config, local_files_only=True, dtype="auto", output_loading_info=True
    )
    if info["missing_keys"]:  # transformers would draw them at random
        raise ValueError(
            f"HFClassifier: {folder} lacks weights of {type(model).__name__}: "
            f"{', '.join(sorted(info['missing_keys']))}"
        )
    model.config.use_cache = False
    model = model.float() if device == "cpu" else model
    return model.to(device).eval(), hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def logits(model: Any, rows: Sequence[Row], at_once: int) -> list[float]:
    """The model's logit of each row, at most `at_once` rows at a time."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        alike[len(row["input_ids"]), *row].append(i)
    scores = torch.empty(len(rows))
    for places in alike.values():
        size = min(at_once, max(1, TOKENS_AT_ONCE // len(rows[places[0]]["input_ids"])))
        if model.config.get_text_config().pad_token_id is None:  # decoders then refuse more than one row
            size = 1
        for part in torch.tensor(places).split(size):
            chosen = [rows[i] for i in part.tolist()]
            batch = {n: torch.tensor([row[n] for row in chosen], device=model.device) for n in chosen[0]}
            scores[part] = model(**batch).logits[:, 0].float().cpu()
    return scores.tolist()
