"""How fast and how exact is the fused head? From hidden states to loss to the gradients of hidden and head.

    python benchmarks/losses.py --device cuda --json out.json      about six minutes on one H200
    python benchmarks/losses.py --device cpu                       small, some seconds

`x limit` is time over that of three matmuls at the rate of an 8192³ matmul (CPU: 1024³) just before, in the
same state: a busy GPU lowers its clock to stay within its power, in swings of about 1 s and of 4 %, and
comes back from a rest fast. Hence heat first, then the mean of runs that queue one behind the other, over
whole swings. `x rested` is over three at the rate of an idle GPU's first matmuls, which it does not sustain.
`extra` is the peak of memory beyond inputs and gradients. `dH`, `dW` are |g - g64| / |g64| against float64,
`logp` is the largest error of a log-prob in nats. The loss is GRPO's clip unless the line says otherwise.
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
from losses.linear_rows import has_triton, rows_triton, scale_triton, triton  # noqa: E402

BROKEN: tuple[type[BaseException], ...] = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError, OSError,
) + ((importlib.import_module("triton.errors").TritonError,) if triton else ())  # fmt: skip


def mean_ms(
    run: Callable[[], object], device: torch.device, *, heat: float = 0.5, window: float = 2.0
) -> float:
    """Of runs over `window` seconds after `heat` seconds of them, each launched while another runs."""
    if device.type == "cpu":
        begin, n = time.perf_counter(), 0
        while n == 0 or time.perf_counter() - begin < window / 10:
            run()
            n += 1
        return 1e3 * (time.perf_counter() - begin) / n
    begin, marks = time.perf_counter(), []
    while len(marks) < 2 or marks[0][0] + window > marks[-1][0]:
        run()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        if marks:
            marks[-1][1].synchronize()
        now = time.perf_counter() - begin
        if now < heat:
            marks.clear()
        marks.append((now, mark))
    marks[-1][1].synchronize()
    return marks[0][1].elapsed_time(marks[-1][1]) / (len(marks) - 1)


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
        self.path, self.only, self.stop, self.rested = path, only, float("inf"), 0.0
        self.rows: list[dict[str, Any]] = []

    def note(self, text: str, **row: Any) -> None:
        print(text, flush=True)
        self.rows.append(row)
        if self.path:
            Path(self.path).write_text(json.dumps(self.rows, indent=1))

    def measure(
        self,
        case: Case,
        name: str,
        make: Callable[[], Method],
        loss: str | None = "policy",
        window: float = 2.0,
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
            rate = matmul_rate(h.device, h.dtype)
            ms = mean_ms(step, h.device, window=window)
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
        x, rested = ms * rate / case.flop / 1e3, ms * self.rested / case.flop / 1e3
        shown = " ".join(f"{'-':>9s}" if e is None else f"{e:9.1e}" for e in errors.values())
        self.note(
            f"{name:58s}{ms:9.1f} {x:9.3f} {rested:9.3f} {rate / 1e12:9.4g} {extra:9.2f} {shown}",
            case=case.name, name=name, loss=loss, ms=ms, x_limit=x, x_rested=rested, rate=rate,
            extra_gib=extra, **errors,
        )  # fmt: skip
        return ms


def matmul_rate(device: torch.device, dtype: torch.dtype, heat: float = 0.5, window: float = 1.0) -> float:
    """FLOP/s of a square matmul."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / (mean_ms(lambda: a @ b, device, heat=heat, window=window) * 1e-3)


def parts(report: Report, case: Case, chunk: int) -> None:
    """What the matmuls cost at this chunk size, and the work on rows on top of them, without a loss."""
    n, h, w = len(case.hidden), case.hidden, case.head
    a = torch.empty(min(chunk, n), len(w), device=h.device, dtype=h.dtype)
    dh, dw, g = torch.empty_like(h), torch.empty_like(w), torch.full((n,), 1e-3, device=h.device)
    scales = (1.0, None, 1.0)

    def step(reads: bool, writes: bool) -> None:
        for start in range(0, n, chunk):
            at = slice(start, min(start + chunk, n))
            part, y, seen = a[: at.stop - start], case.target[at], None
            torch.mm(h[at], w.T, out=part)
            if reads:
                seen = rows_triton(part, None, y, None, None, scales)
            if writes:
                rows_triton(part, part, y, None, None, scales, seen, (g[at], g[at], None, None))
            torch.mm(part, w, out=dh[at])
            dw.addmm_(part.T, h[at], beta=float(start > 0))

    kinds = {"matmuls": (False, False), "and statistics": (True, False), "and gradient": (True, True)}
    for name, does in kinds.items():
        rate = matmul_rate(h.device, h.dtype)
        ms = mean_ms(lambda does=does: step(*does), h.device)
        x = ms * rate / case.flop / 1e3
        text = f"  chunk {chunk}, {name:38s} {ms:14.2f} {x:9.3f} {rate / 1e12:19.4g}"
        report.note(text, case=case.name, name=f"chunk {chunk}, {name}", ms=ms, x_limit=x, rate=rate)


def rows_alone(report: Report, case: Case, chunk: int) -> None:
    """The row kernel alone, over all chunks, beside a copy."""
    n, scales = len(case.hidden), (1.0, None, 1.0)
    a = torch.randn(chunk, len(case.head), device=case.hidden.device).to(case.hidden.dtype)
    b, y, ids, g = torch.empty_like(a), case.target[:chunk], case.ids[:chunk], case.weight[:chunk]
    seen, seen_k = (rows_triton(a.clone(), None, y, x, None, scales) for x in (None, ids))
    tilt, topk = (g, g, None, None), (g, None, torch.ones_like(case.teacher[:chunk]), g)
    kinds: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: b.copy_(a)),
        "statistics": (1, lambda: rows_triton(a, None, y, None, None, scales)),
        "gradient with entropy": (2, lambda: rows_triton(a, b, y, None, None, scales, seen, tilt)),
        "both, without a loss between": (3, lambda: rows_triton(a, b, y, None, None, scales)),
        "gradient with top-k": (2, lambda: rows_triton(a, b, y, ids, None, scales, seen_k, topk)),
        "statistics with top-k": (1, lambda: rows_triton(a, None, y, ids, None, scales)),  # spoils a: last
    }
    for name, (passes, run) in kinds.items():
        ms = mean_ms(run, a.device, heat=0.1, window=0.3) * n / chunk
        rate = passes * 2 * n * a.shape[1] / ms / 1e9
        text = f"  rows, {name:48s} {ms:8.2f} ms, {rate:.2f} TB/s"
        report.note(text, case=case.name, name=f"rows, {name}", ms=ms)


def ours(report: Report, case: Case, chunks: list[int], rows: Any) -> None:
    """The losses at the default chunk, then other chunks and variants."""
    line = functools.partial(report.measure, case)
    way = functools.partial(ways.ours, rows=rows, scale=scale_triton if rows else None)
    f32 = torch.float32
    line("ours, default", lambda: way("policy", None))
    line("ours, with entropy bonus", lambda: way("entropy", None), "entropy")
    line(f"ours, top-{case.ids.shape[1]} reverse KL", lambda: way("top-k", None), "top-k")
    for chunk in chunks:
        line(f"ours, with entropy bonus, chunk {chunk}", lambda chunk=chunk: way("entropy", chunk), "entropy")
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
    line = functools.partial(report.measure, case, window=1.0)
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
        line("Liger fused GRPO", lambda: ways.liger_grpo(False), loss=None)
        line("Liger fused GRPO, compiled", lambda: ways.liger_grpo(True), loss=None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="keep all lines there, rewritten after each")
    parser.add_argument("--only", default="", help="only lines whose name contains this")
    parser.add_argument("--case", type=int, action="append", help="0 or 1; both by default")
    parser.add_argument(
        "--seconds", type=float, default=340.0, help="shared by the cases; no line starts later"
    )
    cfg = parser.parse_args()
    device, begin = torch.device(cfg.device), time.monotonic()
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    report = Report(cfg.json, cfg.only)
    report.rested = rested = matmul_rate(device, dtype, heat=0.0, window=0.03)
    rate = matmul_rate(device, dtype)
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    name = f"{name}, torch {torch.__version__}, triton {getattr(triton, '__version__', 'none')}"
    report.note(
        f"{name}: {rate / 1e12:.3g} TFLOP/s in {str(dtype)[6:]} when busy, {rested / 1e12:.3g} rested",
        name="device", device=name, rate=rate, rested=rested,
    )  # fmt: skip
    shapes = [(16384, 896, 151936), (32768, 3584, 152064)] if cuda else [(256, 64, 4096), (512, 128, 8192)]
    chunks = [1152, 3072] if cuda else [32, 64]
    rows = rows_triton if has_triton(device) else None
    cases = cfg.case or list(range(len(shapes)))
    for done, i in enumerate(cases):
        report.stop = begin + cfg.seconds * (done + 1) / len(cases)
        case = make_case(*shapes[i], device, dtype, ["policy", "entropy", "top-k"])
        print(f"\n{case.name}; three matmuls at the busy rate: {case.flop / rate * 1e3:.1f} ms", flush=True)
        if rows and not cfg.only:
            parts(report, case, CHUNK)
            rows_alone(report, case, CHUNK)
        columns = ("ms", "x limit", "x rested", "TFLOP/s", "extra GiB", "dH", "dW", "logp")
        print(f"{'':58s}" + " ".join(f"{c:>9s}" for c in columns), flush=True)
        ours(report, case, chunks, rows)
        peers(report, case, 4096 if cuda else 64)
        del case
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
