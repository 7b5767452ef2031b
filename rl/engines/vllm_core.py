"""vLLM's processes as one thing that lives, answers or has died; nothing waits for the dead."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import safetensors.numpy
from safetensors.torch import save_file

from models.config import ModelConfig, to_hf
from models.delta import Delta
from models.weights import Weights, as_tensor, save_folder
from rl.engines.vllm_args import VllmOptions, engine_args, environment, find_device
from rl.engines.vllm_samples import Tally
from rl.wire.parcel import Broadcast, Mapped, Parcel

R = TypeVar("R")
SHARED = "/dev/shm"  # a folder in memory


class Core:
    """AsyncLLM, its processes and a folder of our own. Calls raise RuntimeError where vLLM fails or dies."""

    def __init__(self, cfg: ModelConfig, slots: int, max_len: int, options: VllmOptions) -> None:
        self.cfg, self.slots, self.max_len, self.options = cfg, slots, max_len, options
        self.error: BaseException | None = RuntimeError("not started")
        self.llm: Any = None
        self._scratch = ""

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────

    async def start(self, state: Weights | str, tally: Tally) -> None:
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._scratch = tempfile.mkdtemp(prefix="viva-vllm-")
        building = asyncio.ensure_future(asyncio.to_thread(self._build, state, tally))
        try:
            await asyncio.shield(building)
            tally.attach(self.llm.output_processor)
            self.error = None
            self._watcher = asyncio.create_task(self._watch())
            await self.rpc("viva_setup", asdict(self.cfg), os.getpid())
        except BaseException:
            await asyncio.wait([building])  # a thread cannot be cancelled; what it brings up must end
            await self.stop()
            raise

    def _build(self, state: Weights | str, tally: Tally) -> None:
        import torch

        device = find_device(self.options.device)
        total = 0
        if device == "cuda":
            if not torch.cuda.is_available():
                raise ValueError("VllmEngine: the installed vLLM is the CUDA build, and there is no GPU here")
            if torch.cuda.device_count() < self.options.tensor_parallel:
                raise ValueError(
                    f"VllmEngine: tensor_parallel is {self.options.tensor_parallel}, and there are "
                    f"{torch.cuda.device_count()} GPUs here: give the engine as many"
                )
            total = torch.cuda.get_device_properties(0).total_memory
        folder = state if isinstance(state, str) else f"{self._scratch}/model"
        args = engine_args(self.cfg, folder, device, self.slots, self.max_len, self.options, total=total)
        if not isinstance(state, str):
            Path(folder).mkdir()
            (Path(folder) / "config.json").write_text(json.dumps(to_hf(self.cfg)))
            if state:
                save_folder(folder, {name: as_tensor(x) for name, x in state.items()}, self.cfg)
            else:
                args["load_format"] = "dummy"
        os.environ.update(environment(device, self.options, self.cfg.dtype))
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args), stat_loggers=[lambda *_: tally])
        shutil.rmtree(f"{self._scratch}/model", ignore_errors=True)  # it may be large, and we may be killed

    async def stop(self) -> None:
        """End vLLM's processes. Every later call raises RuntimeError."""
        self.fail(RuntimeError("stopped"))
        llm, self.llm = self.llm, None
        if llm is not None:
            await asyncio.to_thread(_end, llm)
            del llm
            gc.collect()  # it is part of cycles; found when Python exits, it shuts down once more, and fails
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def _watch(self) -> None:
        """vLLM fails samples under way when it dies, but not calls, whose answers then never come."""
        while self.error is None:
            self._look()
            await asyncio.sleep(0.2)

    def _look(self) -> None:
        if self.llm is not None and self.llm.errored:
            self.fail(RuntimeError("a process of vLLM has died; its log says why"))

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self._over.set_result(None)

    def check(self) -> None:
        if self.error is not None:  # not raised itself: its traceback would grow with every caller
            raise RuntimeError(f"VllmEngine: {self.error!r}") from self.error

    # ── Calls ─────────────────────────────────────────────────────────────────────────────────────

    async def guard(self, call: Callable[[Any], Coroutine[Any, Any, R]]) -> R:
        """call(AsyncLLM)'s result. Raises RuntimeError where vLLM raises, dies first or is stopped."""
        self.check()
        task = asyncio.ensure_future(call(self.llm))
        try:
            await asyncio.wait([task, self._over], return_when=asyncio.FIRST_COMPLETED)
            error = task.exception() if task.done() else None
            if error is not None:
                self._look()
            if error is not None or not task.done():
                self.check()
            if error is None or isinstance(error, ValueError):
                return task.result()
            raise RuntimeError(f"VllmEngine: {error!r}") from error
        finally:
            task.cancel()

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """What each worker's method returns, called between two steps."""
        return await self.guard(lambda llm: llm.collective_rpc(method, args=args))

    async def background(self, job: str, *args: Any) -> list[Any]:
        """What each worker's method returns, run beside its steps."""
        await self.rpc("viva_begin", job, *args)
        nap = 0.001
        while True:
            answers = await self.rpc("viva_poll")
            if all(done for done, _ in answers):
                return [result for _, result in answers]
            await asyncio.sleep(nap)
            nap = min(2 * nap, 0.05)

    async def stage(self, parcel: Parcel) -> None:
        """Have the workers receive new weights; they serve the old ones until "viva_commit"."""
        match parcel:
            case Broadcast():
                await self.background("_viva_stage", "broadcast", asdict(parcel))
            case Mapped():
                await self.background("_viva_stage", "mapped", asdict(parcel))
            case Delta():
                await self._by_file("delta", parcel.nbytes, partial(_write_delta, parcel))
            case _:
                weights = cast(Weights, parcel)
                size = sum(w.nbytes for w in weights.values())
                await self._by_file("file", size, partial(_write, weights))

    async def _by_file(self, kind: str, size: int, write: Callable[[str], None]) -> None:
        roomy = os.path.isdir(SHARED) and shutil.disk_usage(SHARED).free > 2 * size
        handle, path = tempfile.mkstemp(prefix="viva-weights-", dir=SHARED if roomy else self._scratch)
        os.close(handle)
        try:
            await asyncio.to_thread(write, path)
            await self.background("_viva_stage", kind, {"path": path})
        finally:
            os.unlink(path)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """No step runs from here until `resume`. mode: keep running samples where they are, or wait."""
        # AsyncLLM.pause_generation, without the 20 ms that it sleeps afterwards
        await self.guard(
            lambda llm: llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        )

    async def resume(self) -> None:
        await self.guard(lambda llm: llm.resume_generation())

    async def abort(self, names: list[str]) -> None:
        """Has each of these requests, if vLLM has it, finish with what it has."""
        if names:
            await self.guard(lambda llm: llm.abort(names))

    async def ask(self, name: str, prompt: Mapping[str, Any], params: Any, added: Callable[[], bool]) -> Any:
        """The finished output of a request. added() is asked once vLLM has it: whether it is still wanted."""

        async def whole(llm: Any) -> Any:
            queue = await llm.add_request(name, prompt, params)
            finished = False
            try:
                if not added():
                    await llm.abort(name)
                output = None
                while not finished:
                    output = await queue.get()
                    finished = output.finished
                return output
            finally:
                if not (finished or llm.errored):  # the caller has gone
                    await llm.abort(name)

        return await self.guard(whole)


def _write(weights: Weights, path: str) -> None:
    save_file({n: as_tensor(w).detach().cpu().contiguous() for n, w in weights.items()}, path)


def _write_delta(delta: Delta, path: str) -> None:
    safetensors.numpy.save_file(delta.arrays, path, delta.header)


def _end(llm: Any) -> None:
    if llm.output_handler is not None:  # else it takes the end of the core for its death, and says so
        llm.output_handler.get_loop().call_soon_threadsafe(llm.output_handler.cancel)
    llm.shutdown(timeout=30)
