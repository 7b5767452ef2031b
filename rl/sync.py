"""New weights reach the engines, and every engine proves that it holds them before its samples count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl.engines.base import UpdateReport

PROBE_LENGTH = 16  # tokens of the fixed prompt whose log-probs every engine must reproduce
# Nats at a log-prob near 0, by the engine's dtype; at a log-prob l the allowance is 1 + |l| / 10 times that,
# as unlikely tokens have large logits, whose rounding is relative. In float32 kernels differ in the order of
# their sums; SmolLM2-135M in bfloat16 was seen to differ by 0.57 at the probe's unlikely tokens.
PROBE_ATOL = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the trainer says of the weights that it published."""

    version: int
    checksums: Mapping[str, int]
    probe: tuple[float, ...]
    atol: float = PROBE_ATOL["float32"]  # see there


class SyncError(RuntimeError):
    """An engine does not hold the published weights."""


def probe_ids(vocab_size: int) -> tuple[int, ...]:
    """A fixed token sequence of any model with this vocabulary."""
    return tuple((7 * i + 3) % vocab_size for i in range(PROBE_LENGTH))


def verify(manifest: Manifest, report: UpdateReport, engine: str) -> None:
    """Raises SyncError naming the engine and the first difference: version, tensors, or probe log-probs."""
    if report.version != manifest.version:
        raise SyncError(f"{engine} serves version {report.version}, the trainer published {manifest.version}")
    wrong = sorted(n for n in manifest.checksums if report.checksums.get(n) != manifest.checksums[n])
    wrong += sorted(set(report.checksums) - set(manifest.checksums))
    if wrong:
        raise SyncError(
            f"{engine} holds other weights than version {manifest.version} of the trainer in "
            f"{len(wrong)} of {len(manifest.checksums)} tensors: {', '.join(wrong[:5])}"
        )
    if len(report.probe) != len(manifest.probe):
        raise SyncError(
            f"{engine} sent {len(report.probe)} probe log-probs, the trainer has {len(manifest.probe)}"
        )
    gaps = [abs(a - b) for a, b in zip(report.probe, manifest.probe, strict=True)]
    allowed = [manifest.atol * (1 + abs(b) / 10) for b in manifest.probe]
    if not all(gap <= most for gap, most in zip(gaps, allowed, strict=True)):  # NaN is not
        worst = next((i for i, gap in enumerate(gaps) if gap != gap), gaps.index(max(gaps)))
        raise SyncError(
            f"{engine} has the tensors of version {manifest.version} but computes other log-probs: "
            f"the probe is off by {gaps[worst]:.3g} nats, allowed are {allowed[worst]:.3g}"
        )
