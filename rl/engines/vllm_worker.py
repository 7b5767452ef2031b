"""What runs inside vLLM's worker processes: weights in, in place, and proof of the weights that are there.

vLLM mixes `Extension` into its worker class and calls its methods by name, between two steps. Receiving
weights and adding up checksums would hold those steps up, so they run in a thread and a CUDA stream of their
own (`viva_begin`, then `viva_poll` until it is done); what remains between two steps is one copy, memory to
memory (`viva_commit`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
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

from models.checksum import piece_checksums
from models.config import ModelConfig
from models.delta import Delta, patch
from models.shards import Piece, pieces, unfuse
from rl.wire.inbox import Inbox, gpu_of
from rl.wire.parcel import Broadcast, Mapped

if current_platform.is_cpu():
    # Else weights are packed once for oneDNN and the originals freed: nothing would be left to copy into, and
    # a checksum would prove nothing about the numbers that are multiplied.
    _custom_ops._supports_onednn = False


class Extension:
    """Names begin with viva_, as vLLM refuses an extension that would hide a name of its worker."""

    _viva_pool: ThreadPoolExecutor
    _viva_stream: torch.cuda.Stream | None
    _viva_pieces: dict[str, Piece]
    _viva_weights: dict[str, Tensor]
    _viva_staged: dict[str, Tensor]  # beside them, from the first update on
    _viva_inbox: Inbox
    _viva_job: Future[Any]

    def viva_setup(self, cfg: dict[str, Any], owner: int) -> None:
        """Find the model's own parameters under our names, and live no longer than the process `owner`.

        Raises ValueError where a parameter is not there.
        """
        sys.setswitchinterval(5e-4)  # seconds; vLLM's loop and the thread below take turns at Python's lock
        threading.Thread(target=_die_with, args=(owner,), name="viva-owner", daemon=True).start()
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        config = ModelConfig(**{**cfg, "eos_ids": tuple(cfg["eos_ids"])})
        self._viva_pieces = pieces(config, rank, size)
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        parameters = {name: p.data for name, p in model.named_parameters()}
        shapes = {name: piece.shape for name, piece in self._viva_pieces.items()}
        self._viva_weights, self._viva_staged = unfuse(parameters, shapes), {}
        self._viva_pool = ThreadPoolExecutor(1, thread_name_prefix="viva")
        device = next(iter(self._viva_weights.values())).device
        self._viva_inbox = Inbox(config, device, rank)
        self._viva_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def viva_gpu(self) -> str:
        return gpu_of(self._viva_inbox.device)

    def _viva_stage(self, kind: str, fields: dict[str, Any]) -> None:
        """Receive this rank's part of new weights, to the device and in the model's dtype."""
        if not self._viva_staged:
            self._viva_staged = {n: torch.empty_like(view) for n, view in self._viva_weights.items()}
        if kind == "delta":
            self._viva_change(fields["path"])
        for tensors in self._viva_tensors(kind, fields):
            torch._foreach_copy_(
                [self._viva_staged[name] for name in tensors],
                [self._viva_pieces[name].of(tensor) for name, tensor in tensors.items()],
            )
        if self._viva_stream is not None:
            self._viva_stream.synchronize()

    def _viva_change(self, path: str) -> None:
        with safe_open(path, framework="np") as file:
            delta = Delta.of(file.metadata(), {key: file.get_tensor(key) for key in file.keys()})
        torch._foreach_copy_(
            [self._viva_staged[name] for name in self._viva_weights], list(self._viva_weights.values())
        )
        for name in delta.names:
            patch(self._viva_staged[name], delta, name, self._viva_pieces[name])

    def _viva_tensors(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        match kind:
            case "file":
                with safe_open(fields["path"], framework="pt") as file:
                    yield from ({name: file.get_tensor(name)} for name in self._viva_weights)
            case "broadcast":
                yield from self._viva_inbox.receive(Broadcast(**fields))
            case "mapped":
                yield from self._viva_inbox.receive(Mapped(**fields))

    def _viva_checksums(self) -> dict[str, int]:
        return piece_checksums(self._viva_weights, self._viva_pieces)

    def viva_begin(self, job: str, *args: Any) -> None:
        self._viva_job = self._viva_pool.submit(self._viva_run, job, *args)

    def _viva_run(self, job: str, *args: Any) -> Any:
        with torch.inference_mode():
            if self._viva_stream is None:
                return getattr(self, job)(*args)
            with torch.cuda.device(self._viva_inbox.device), torch.cuda.stream(self._viva_stream):
                return getattr(self, job)(*args)

    def viva_poll(self) -> list[Any]:
        """[done, result]. Raises what the job raised."""
        return [True, self._viva_job.result()] if self._viva_job.done() else [False, None]

    @torch.inference_mode()
    def viva_commit(self) -> None:
        """Copy the staged weights over the model's own. The addresses stay, so captured graphs stay valid."""
        torch._foreach_copy_(
            list(self._viva_weights.values()), [self._viva_staged[name] for name in self._viva_weights]
        )
        if self._viva_stream is not None:
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
