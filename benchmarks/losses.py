"""How fast and how exact is the fused head? From hidden states to loss to the gradients of hidden and head.

    python benchmarks/losses.py --device cuda --json out.json      about five minutes on one H200
    python benchmarks/losses.py --device cpu                       small, some seconds

`x limit` is time over that of three matmuls at the rate of an 8192³ matmul in the same run (CPU: 1024³),
both after 0.4 s of the same work, for a busy GPU lowers its clock to stay within its power. `x rested` is
over three at the rate of an idle GPU's first matmuls, which it does not sustain. `extra` is the peak of
memory beyond inputs and gradients. `dH`, `dW` are |g - g64| / |g64| against float64, `logp` is the largest
error of a log-prob in nats. The loss is GRPO's clip unless the line says otherwise.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # before this folder: its losses.py is not ours
from benchmarks import losses_methods as ways  # noqa: E402
from benchmarks.losses_methods import Case, Method, make_case  # noqa: E402
from losses.linear_loss import CHUNK, rows_torch  # noqa: E402
from losses.linear_rows import has_triton, rows_triton, triton  # noqa: E402

Launch = tuple[int, int, int]  # lanes, warps, stages
LAUNCHES = [(2048, 32, 1), (2048, 32, 3), (1024, 16, 1), (512, 8, 1)]
BROKEN: tuple[type[BaseException], ...] = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError, OSError,
) + ((importlib.import_module("triton.errors").TritonError,) if triton else ())  # fmt: skip


def median_ms(run: Callable[[], object], device: torch.device, *, reps: int, heat: float = 0.4) -> float:
    """Of the runs that follow `heat` seconds of them (CPU: one of them)."""
    begin = time.perf_counter()
    while True:
        run()
        if device.type == "cpu":
            break
        torch.cuda.synchronize()
        if time.perf_counter() - begin > heat:
            break
    times = []
    for _ in range(reps):
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times)[len(times) // 2]


def relative(got: Tensor, want: Tensor) -> float:
    """By blocks: the head's gradient in float64 would be gigabytes."""
    off = sum(
        float((g.double() - w.double()).square().sum())
        for g, w in zip(got.split(4096), want.split(4096), strict=True)
    )
    size = sum(float(w.double().square().sum()) for w in want.split(4096))
    return (off / size) ** 0.5


class Report:
    """Prints lines and keeps them; with a path the file is complete after every line."""

    def __init__(self, path: str | None, only: str) -> None:
        self.path, self.only, self.stop, self.rested = path, only, float("inf"), 1.0
        self.rows: list[dict[str, Any]] = []

    def note(self, text: str, **row: Any) -> None:
        print(text, flush=True)
        self.rows.append(row)
        if self.path:
            Path(self.path).write_text(json.dumps(self.rows, indent=1))

    def measure(
        self, case: Case, name: str, make: Callable[[], Method], loss: str | None = "policy", reps: int = 5
    ) -> float:
        """One line. A method that is missing or breaks says so in its line."""
        if self.only not in name:
            return float("inf")
        if time.monotonic() > self.stop:
            self.note(f"{name:58s} skipped, out of time", case=case.name, name=name, failed="out of time")
            return float("inf")
        h, w = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
        cuda = h.is_cuda
        try:
            method = make()

            def step() -> Tensor | None:
                h.grad = w.grad = None
                value, logp = method(case, h, w)
                value.backward()
                return logp

            logp = step()
            if cuda:
                torch.cuda.synchronize()
                h.grad = w.grad = None
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                logp = step()
                grads = sum(x.grad.nbytes for x in (h, w) if x.grad is not None)
                extra = (torch.cuda.max_memory_allocated() - before - grads) / 2**30
            else:
                extra = float("nan")
            assert h.grad is not None and w.grad is not None
            errors: dict[str, float | None] = {"dH": None, "dW": None, "logp": None}
            if loss is not None:
                dh, dw, true_logp = case.truth[loss]
                errors["dH"], errors["dW"] = relative(h.grad, dh), relative(w.grad, dw)
                errors["logp"] = None if logp is None else float((logp.double() - true_logp).abs().max())
            ms = median_ms(step, h.device, reps=reps)
        except ModuleNotFoundError as error:
            self.note(
                f"{name:58s} not installed ({error.name})", case=case.name, name=name, failed="not installed"
            )
            return float("inf")
        except BROKEN as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            self.note(f"{name:58s} failed, {why}", case=case.name, name=name, failed=why)
            return float("inf")
        finally:
            h.grad = w.grad = None
            if cuda:
                torch.cuda.empty_cache()
        x = ms / case.limit_ms
        shown = " ".join(f"{'-':>9s}" if e is None else f"{e:9.1e}" for e in errors.values())
        self.note(
            f"{name:58s}{ms:9.1f} {x:9.2f} {x * self.rested:9.2f} {extra:9.2f} {shown}",
            case=case.name, name=name, loss=loss, ms=ms, x_limit=x, x_rested=x * self.rested, extra_gib=extra,
            **errors,
        )  # fmt: skip
        return ms


def matmul_rate(device: torch.device, dtype: torch.dtype, heat: float) -> float:
    """FLOP/s of a square matmul."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / (median_ms(lambda: a @ b, device, reps=15, heat=heat) * 1e-3)


def matmuls(report: Report, case: Case, chunk: int) -> None:
    """The three matmuls alone at this chunk size: the floor of any way to organise it like this."""
    n, h, w = len(case.hidden), case.hidden[:chunk], case.head
    a = torch.empty(chunk, len(w), device=h.device, dtype=h.dtype)
    dh, dw, dw32 = torch.empty_like(h), torch.zeros_like(w), torch.zeros_like(w, dtype=torch.float32)
    torch.mm(h, w.T, out=a)
    a.mul_(1e-3)
    kinds: dict[str, Callable[[], object]] = {
        "logits": lambda: torch.mm(h, w.T, out=a),
        "dH": lambda: torch.mm(a, w, out=dh),
        "dW": lambda: dw.addmm_(a.T, h),
        "dW in float32": lambda: torch.addmm(dw32, a.T, h, out_dtype=torch.float32, out=dw32),
    }
    times = {kind: median_ms(run, h.device, reps=9) * n / chunk for kind, run in kinds.items()}
    total = times["logits"] + times["dH"] + times["dW"]
    parts = ", ".join(f"{k} {v:.2f}" for k, v in times.items())
    text = f"  matmuls alone, {chunk} tokens: {total:.1f} ms, x {total / case.limit_ms:.2f}  ({parts})"
    report.note(text, case=case.name, name=f"matmuls alone, chunk {chunk}", ms=total, parts=times)


def bound(launch: Launch) -> Any:
    return functools.partial(rows_triton, **dict(zip(("lanes", "warps", "stages"), launch, strict=True)))


def rows_alone(report: Report, case: Case, chunk: int) -> None:
    """The row kernel alone, over all chunks, per launch."""
    n, v = len(case.hidden), len(case.head)
    a = torch.randn(chunk, v, device=case.hidden.device).to(case.hidden.dtype)
    y = case.target[:chunk]
    for launch in LAUNCHES:
        op = bound(launch)

        def run(op: Any = op) -> None:
            for _ in range(8):  # so that no launch is waited for
                op(a, a, y, None, (1.0, None, 1.0))

        ms = median_ms(run, a.device, reps=5) / 8 * n / chunk
        rate = 6 * n * v / ms / 1e9  # the second reading finds nothing in the cache
        text = f"  rows, (lanes, warps, stages) {launch}: {ms:.2f} ms, {rate:.2f} TB/s of 2 reads, 1 write"
        report.note(text, case=case.name, name=f"rows {launch}", ms=ms)


def ours(report: Report, case: Case, chunks: list[int], rows: Any) -> None:
    """Chunk sizes, then variants at the default."""
    line = functools.partial(report.measure, case)
    way = functools.partial(ways.ours, rows=rows)
    kind = "triton rows" if rows else "torch rows"
    for chunk in chunks:
        line(f"ours, {kind}, chunk {chunk}", lambda chunk=chunk: way("policy", chunk))
    f32 = torch.float32
    line("ours, default chunk", lambda: way("policy", None))
    line("ours, with entropy bonus", lambda: way("entropy", None), "entropy")
    line(f"ours, top-{case.ids.shape[1]} reverse KL", lambda: way("top-k", None), "top-k")
    line("ours, head gradient in float32", lambda: way("policy", None, grad_dtype=f32))
    line(
        "ours, logits and head gradient in float32",
        lambda: way("policy", max(1, chunks[-1] // 3), logit_dtype=f32, grad_dtype=f32),
    )
    line("ours, token loss not compiled", lambda: way("policy", None, compiled=False))
    if case.hidden.is_cuda:
        compiled = torch.compile(rows_torch, dynamic=True)
        line("ours, torch.compile'd rows", lambda: ways.ours("policy", CHUNK, compiled))


def peers(report: Report, case: Case, piece: int) -> None:
    line = functools.partial(report.measure, case, reps=3)
    top = f"top-{case.ids.shape[1]} reverse KL"
    if case.hidden.is_cuda:
        line("cut-cross-entropy", lambda: ways.cut_cross_entropy("high"))
        line("cut-cross-entropy, no filter", lambda: ways.cut_cross_entropy(None))
        line("Liger fused cross-entropy (its loss: SFT)", ways.liger_cross_entropy, loss=None)
        line("torch.compile, full logits", lambda: ways.full_logits("policy", True))
        line(
            "torch.compile, full logits, with entropy bonus",
            lambda: ways.full_logits("entropy", True),
            "entropy",
        )
        line(
            f"torch.compile, chunks of {piece}, checkpointed",
            lambda: ways.checkpointed("policy", piece, True),
        )
        line("linear_logp, compiled (4 matmuls), chunk 8192", lambda: ways.recomputing(8192, True))
    line(f"linear_logp, eager (4 matmuls), chunk {piece}", lambda: ways.recomputing(piece, False))
    line(
        f"eager, chunks of {piece}, checkpointed (TRL's way)",
        lambda: ways.checkpointed("policy", piece, False),
    )
    line("eager, full logits", lambda: ways.full_logits("policy", False))
    line(f"eager, full logits, {top}", lambda: ways.full_logits("top-k", False), "top-k")
    if case.hidden.is_cuda:
        line("Liger fused GRPO", lambda: ways.liger_grpo(False), loss=None, reps=1)
        line("Liger fused GRPO, compiled", lambda: ways.liger_grpo(True), loss=None, reps=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="keep all lines there, rewritten after each")
    parser.add_argument("--only", default="", help="only lines whose name contains this")
    parser.add_argument("--case", type=int, action="append", help="0 or 1; both by default")
    parser.add_argument(
        "--seconds", type=float, default=290.0, help="shared by the cases; no line starts later"
    )
    cfg = parser.parse_args()
    device, begin = torch.device(cfg.device), time.monotonic()
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    report = Report(cfg.json, cfg.only)
    rested = matmul_rate(device, dtype, heat=0.0)
    rate = matmul_rate(device, dtype, heat=0.4)
    report.rested = rested / rate
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    name = f"{name}, torch {torch.__version__}, triton {getattr(triton, '__version__', 'none')}"
    report.note(
        f"{name}: {rate / 1e12:.3g} TFLOP/s in {str(dtype)[6:]} when busy, {rested / 1e12:.3g} rested",
        name="device", device=name, rate=rate, rested=rested,
    )  # fmt: skip
    shapes = [(16384, 896, 151936), (32768, 3584, 152064)] if cuda else [(256, 64, 4096), (512, 128, 8192)]
    chunks = [1152, 2048, 3328] if cuda else [32, 64]
    rows = rows_triton if has_triton(device) else None
    cases = cfg.case or list(range(len(shapes)))
    for done, i in enumerate(cases):
        report.stop = begin + cfg.seconds * (done + 1) / len(cases)
        case = make_case(*shapes[i], device, dtype, rate, ["policy", "entropy", "top-k"])
        print(f"\n{case.name}; three matmuls at the measured rate: {case.limit_ms:.1f} ms", flush=True)
        if rows:
            for chunk in (1152, CHUNK, 3328):
                matmuls(report, case, chunk)
            rows_alone(report, case, CHUNK)
        columns = ("ms", "x limit", "x rested", "extra GiB", "dH", "dW", "logp")
        print(f"{'':58s}" + " ".join(f"{c:>9s}" for c in columns), flush=True)
        ours(report, case, chunks, rows)
        peers(report, case, 4096 if cuda else 64)
        del case
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
