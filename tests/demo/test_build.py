import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from models.tokenizer import load_tokenizer
from models.weights import load_folder
from rl.demo import build as building
from rl.demo.build import BuildError, build, build_all, find, folder_of
from rl.demo.codec import BRACKETED, BYTES, CHARS, Codec
from rl.demo.specs import (
    JudgeSpec,
    PolicySpec,
    ScalarSpec,
    Size,
    Spec,
    TeacherSpec,
    TextJudgeSpec,
    TextPolicySpec,
    TextScalarSpec,
    TextTeacherSpec,
)
from rl.sources import _report

SMALL = Size(d_model=16, n_layers=1, n_heads=2, head_dim=8, d_ff=24)
POLICY = PolicySpec(steps=2, size=SMALL)


def quiet(fraction: float, note: str) -> None:
    pass


def folders(cache: Path) -> list[Path]:
    """Models, and what a build left behind."""
    return [path for path in cache.iterdir() if path.is_dir()]


def test_a_built_folder_opens_as_a_model_with_the_shared_vocabulary_and_a_report(tmp_path: Path) -> None:
    built = build(JudgeSpec(steps=2, size=SMALL), tmp_path, quiet)
    cfg, state = load_folder(built.folder)
    assert cfg.d_model == 16 and sum(t.numel() for t in state.values()) == built.numbers["parameters"]
    assert load_tokenizer(built.folder).fingerprint() == CHARS.tokenizer.fingerprint()
    assert {"verdict", "false_positive", "exact_score", "parsed", "cpu_seconds"} <= built.numbers.keys()
    assert "false_positive" in built.numbers


@pytest.mark.parametrize(
    "spec, codec, head, measured",
    [
        (JudgeSpec(steps=1, size=SMALL, gullible=True), BRACKETED, "lm", {"fooled", "fooled_disarmed"}),
        (ScalarSpec(steps=1, size=SMALL), CHARS, "score", {"auc", "verdict", "false_positive"}),
        (TextPolicySpec(steps=1, size=SMALL), BYTES, "lm", {"form", "number"}),
        (TextTeacherSpec(steps=1, size=SMALL), BYTES, "lm", {"form", "number"}),
        (TextJudgeSpec(steps=1, size=SMALL), BYTES, "lm", {"parsed", "exact_score"}),
        (TextScalarSpec(steps=1, size=SMALL), BYTES, "score", {"error"}),
    ],
)
def test_every_other_kind_opens_with_its_vocabulary_and_head(
    spec: Spec, codec: Codec, head: str, measured: set[str], tmp_path: Path
) -> None:
    built = build(spec, tmp_path, quiet)
    cfg, state = load_folder(built.folder)
    assert cfg.head == head and ("score.weight" in state) == (head == "score")
    assert cfg.vocab_size == codec.tokenizer.vocab_size
    assert load_tokenizer(built.folder).fingerprint() == codec.tokenizer.fingerprint()
    assert measured <= built.numbers.keys()
    assert _report(spec, built.numbers)


def test_the_second_build_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(POLICY, tmp_path, quiet)
    monkeypatch.setattr(building, "_train", None)
    seen: list[tuple[float, str]] = []
    assert build(POLICY, tmp_path, lambda fraction, note: seen.append((fraction, note))) == first
    assert seen == [(1.0, "ready")]
    assert folders(tmp_path) == [first.folder]


def test_another_spec_or_torch_gives_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Spec] = [
        POLICY,
        PolicySpec(steps=2, size=SMALL, seed=1),
        PolicySpec(steps=3, size=SMALL),
        PolicySpec(steps=2),
        PolicySpec(steps=2, size=SMALL, tasks=("sort",)),
        PolicySpec(steps=2, size=SMALL, hint=0.05),
        TeacherSpec(steps=2, size=SMALL, tasks=("reverse",)),
        JudgeSpec(steps=2, size=SMALL),
        JudgeSpec(steps=2, size=SMALL, gullible=True),
        ScalarSpec(steps=2, size=SMALL),
        TextPolicySpec(steps=2, size=SMALL),
        TextTeacherSpec(steps=2, size=SMALL, seed=0),
        TextJudgeSpec(steps=2, size=SMALL),
        TextScalarSpec(steps=2, size=SMALL),
    ]
    known = {folder_of(spec, tmp_path) for spec in specs}
    monkeypatch.setattr(building, "version", lambda package: "0.0")
    assert len(known | {folder_of(POLICY, tmp_path)}) == len(specs) + 1


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "report.json"])
@pytest.mark.parametrize("left", [0.5, 0.0])
def test_a_damaged_folder_is_built_again(file: str, left: float, tmp_path: Path) -> None:
    folder = build(POLICY, tmp_path, quiet).folder
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[: int(len(whole) * left)])
    if not left:
        (folder / file).unlink()
    assert find(POLICY, tmp_path) is None
    assert build(POLICY, tmp_path, quiet) == find(POLICY, tmp_path)
    if file != "report.json":  # which holds seconds
        assert (folder / file).read_bytes() == whole


def test_a_build_that_comes_second_keeps_what_the_first_one_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = building._train

    def slow(spec: Spec, folder: Path, progress: object) -> None:
        monkeypatch.setattr(building, "_train", train)
        build(spec, tmp_path, quiet)  # another process is faster
        train(spec, folder, quiet)

    monkeypatch.setattr(building, "_train", slow)
    built = build(POLICY, tmp_path, quiet)
    assert find(POLICY, tmp_path) == built
    assert folders(tmp_path) == [built.folder]


def test_models_are_built_in_parallel_and_the_same_spec_only_once(tmp_path: Path) -> None:
    judge = JudgeSpec(steps=25, size=SMALL)
    seen: list[tuple[str, float, str]] = []
    specs = {"policy": POLICY, "judge": judge, "second": judge}
    built = build_all(specs, tmp_path, lambda *now: seen.append(now))
    assert list(built) == ["policy", "judge", "second"]
    assert built["judge"] == built["second"] == find(judge, tmp_path)
    assert {name for name, fraction, _ in seen if fraction == 1.0} == {"policy", "judge", "second"}
    assert any(name == "judge" and 0 < fraction < 1 and "verdicts" in note for name, fraction, note in seen)
    here = build(POLICY, tmp_path / "here", quiet)
    for name, tensor in load_folder(here.folder)[1].items():
        assert torch.equal(tensor, load_folder(built["policy"].folder)[1][name])


def test_a_failing_build_is_raised_with_its_name_and_reason_and_ends_the_others(tmp_path: Path) -> None:
    bad = PolicySpec(size=Size(head_dim=3))
    endless = TeacherSpec(tasks=("sort",), accuracy=2.0, steps=10**9, size=SMALL)
    with pytest.raises(BuildError, match=r"(?s)building policy failed.*head_dim must be even"):
        build_all({"policy": bad, "teacher": endless}, tmp_path, lambda *now: None)
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes by /proc")
def test_builds_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from rl.demo.build import TeacherSpec, build_all\n"
        "if __name__ == '__main__':\n"
        "    endless = TeacherSpec(tasks=('sort',), accuracy=2.0, steps=10**9)\n"
        f"    cache = Path({str(tmp_path)!r})\n"
        "    build_all({'teacher': endless}, cache, lambda *now: print(*now, flush=True))\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith("teacher")  # it trains
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while any(map(_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children and not any(map(_alive, children))


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
