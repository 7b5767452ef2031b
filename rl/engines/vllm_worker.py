"""What runs inside vLLM's worker processes: weights in, in place, and proof of the weights that are there.

vLLM mixes `Extension` into its worker class and calls its methods by name, between two steps. Reading a file
and adding up checksums would hold those steps up, so they run in a thread of their own (`viva_begin`, then
`viva_poll` until it is done); what remains between two steps is one copy, memory to memory (`viva_commit`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm import _custom_ops  # pyright: ignore
from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from models.config import ModelConfig
from models.shards import Piece, piece_checksum, pieces, unfuse

if current_platform.is_cpu():
    # Else weights are packed once for oneDNN and the originals freed: nothing would be left to copy into, and
    # a checksum would prove nothing about the numbers that are multiplied.
    _custom_ops._supports_onednn = False


class Extension:
    """Names begin with viva_, as vLLM refuses an extension that would hide a name of its worker."""

    _viva_pool: ThreadPoolExecutor
    _viva_pieces: dict[str, Piece]
    _viva_weights: dict[str, Tensor]
    _viva_staged: dict[str, Tensor]
    _viva_job: Future[Any]

    def viva_setup(self, cfg: dict[str, Any], owner: int) -> None:
        """Find the model's own parameters under our names, and live no longer than the process `owner`.

        Raises ValueError where a parameter is not there.
        """
        threading.Thread(target=_die_with, args=(owner,), name="viva-owner", daemon=True).start()
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self._viva_pieces = pieces(ModelConfig(**{**cfg, "eos_ids": tuple(cfg["eos_ids"])}), rank, size)
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        parameters = {name: p.data for name, p in model.named_parameters()}
        shapes = {name: piece.shape for name, piece in self._viva_pieces.items()}
        self._viva_weights = unfuse(parameters, shapes)
        self._viva_pool = ThreadPoolExecutor(1, thread_name_prefix="viva")

    def _viva_stage(self, path: str) -> None:
        """Read this rank's part of a safetensors file to the device, in the model's dtype."""
        with safe_open(path, framework="pt") as file:
            self._viva_staged = {
                name: self._viva_pieces[name].of(file.get_tensor(name)).to(view.device, view.dtype, copy=True)
                for name, view in self._viva_weights.items()
            }
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _viva_checksums(self) -> dict[str, int]:
        return {n: piece_checksum(view, self._viva_pieces[n]) for n, view in self._viva_weights.items()}

    def viva_begin(self, job: str, *args: Any) -> None:
        self._viva_job = self._viva_pool.submit(self._viva_run, job, *args)

    def _viva_run(self, job: str, *args: Any) -> Any:
        if not torch.cuda.is_available():
            return getattr(self, job)(*args)
        device = self.device  # type: ignore[attr-defined]
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)), torch.inference_mode():
            return getattr(self, job)(*args)

    def viva_poll(self) -> list[Any]:
        """[done, result]. Raises what the job raised."""
        return [True, self._viva_job.result()] if self._viva_job.done() else [False, None]

    @torch.inference_mode()
    def viva_commit(self) -> None:
        """Copy the staged weights over the model's own. The addresses stay, so captured graphs stay valid."""
        for name, view in self._viva_weights.items():
            view.copy_(self._viva_staged[name])
        self._viva_staged = {}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _die_with(owner: int) -> None:
    """vLLM's processes would outlive an owner that is killed, and keep their memory from its successor."""
    core = os.getppid()
    owned = os.pidfd_open(owner)
    select.select([owned], [], [])  # readable once it has ended
    if core != owner:  # this is a worker; the core, its parent, is another process
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
