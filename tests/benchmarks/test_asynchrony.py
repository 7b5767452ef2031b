"""The comparison's arithmetic, on runs whose numbers are known."""

import json
from xml.etree import ElementTree

import pytest

from benchmarks import asynchrony
from benchmarks.asynchrony import MODES, at, covered, curve, equal_time, panels, read, table
from benchmarks.charts import Curve, Panel, draw, ticks

COMPILE_S = 20.0


def write_run(folder, *, step_s, max_age, steps=10, validated=()):
    """A run whose first step compiles, and whose trainer works half of every other; a group is sampled in the
    first half of each step."""
    folder = folder / "run-1"
    folder.mkdir(parents=True)
    now, worked, lines, events = 500.0, 0.0, [], []
    for k in range(1, steps + 1):
        took = COMPILE_S if k == 1 else step_s
        for kind, when in (("issue", now), ("dispatch", now), ("generate", now + took / 2)):
            events.append({"kind": kind, "ordinal": k, "at": when - 400.0})
        now, worked = now + took, worked + took / 2
        lines.append({
            "step": k, "time": now, "throughput/step_s": took, "idle/trainer": 1 - worked / (now - 500.0),
            "truth/accuracy": k / steps, "age/mean": max_age, "length/mean": 100.0, "length/truncated": 0.25,
            "length/p50": 50, "length/p90": 300, "length/p99": 500, "length/max": 512,
        })  # fmt: skip
    summary = {"before": {"truth": 0.1}, "after": {"truth": 0.9}, "age_max": max_age, "dropped": {"stale": 3}}
    config = {
        "trainer": {"prompts": 4}, "sampler": {"samples": 8}, "staleness": {"max_age": max_age},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name, told in {
        "metrics": lines,
        "ledger": events,
        "validation": [{"step": v, "validation/truth": t} for v, t in validated],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "fast", step_s=1.0, max_age=2)
    write_run(tmp_path / "slow", step_s=2.0, max_age=0)
    return dict(zip(MODES, ([read(tmp_path / name)] for name in ("fast", "slow")), strict=True))


def test_compilation_and_the_steps_that_admit_nothing_more_are_outside_the_clock(runs):
    rows = {line.split(" | ")[0].strip("| "): line for line in table(runs, [0], skip=1)}
    assert "| 1.000 (1.000) | 2.000 (2.000) |" in rows["s/step, steps 2 to 8"]
    assert "2.00x (2.00x)" in rows["speed-up"]
    assert "| 3,200 (3,200) | 1,600 (1,600) |" in rows["trained tokens/s"]
    assert "| 50% (50%) | 50% (50%) |" in rows["trainer idle"]
    assert "| 50% (50%) | 50% (50%) |" in rows["sampler idle"]
    assert "| 300 (300) | 300 (300) |" in rows["tokens an answer, p90 of a step, mean"]


def test_at_equal_time_the_slower_mode_is_read_where_the_faster_has_ended(runs):
    fast, slow = (runs[mode][0] for mode in MODES)
    # 9 s after the first step: the fast one is done; the slow one has made 4.5 steps more
    smooth = [1, 1.5, 2, 2.5, 3.5, 4.5]  # tenths, mean of up to 4 steps: steps 1 to 6
    assert equal_time([fast, slow], skip=1) == pytest.approx([0.85, (smooth[4] + smooth[5]) / 2 / 10])
    assert [k for k, _, _ in curve(slow, skip=1)] == list(range(1, 11))
    assert curve(slow, skip=1)[1][1:] == pytest.approx((2.0, 0.15))


def test_a_run_that_was_validated_is_read_by_its_held_out_problems(tmp_path):
    write_run(tmp_path / "run", step_s=1.0, max_age=2, validated=[(5, 0.4), (10, 0.7)])
    run = read(tmp_path / "run")
    assert curve(run, skip=1) == [(5, pytest.approx(4.0), 0.4), (10, pytest.approx(9.0), 0.7)]
    assert "held-out accuracy at equal time" in "\n".join(table(dict.fromkeys(MODES, [run]), [0], skip=1))


def test_runs_of_unlike_length_or_too_short_are_refused(tmp_path, runs):
    write_run(tmp_path / "short", step_s=1.0, max_age=2, steps=5)
    with pytest.raises(SystemExit, match="expected runs of the same length"):
        table({**runs, MODES[1]: [read(tmp_path / "short")]}, [0], skip=1)
    with pytest.raises(SystemExit, match="more than --skip"):
        table(runs, [0], skip=8)
    with pytest.raises(SystemExit, match="no finished run"):
        read(tmp_path / "nothing")


def test_spans_that_overlap_are_counted_once_and_cut_at_the_ends():
    assert covered([(0, 4), (1, 2), (3, 6), (9, 12)], 2, 10) == pytest.approx((4 + 1) / 8)
    assert covered([], 0, 1) == 0


def test_a_curve_is_straight_between_its_points_and_level_beyond_them():
    points = [(1.0, 0.0), (3.0, 1.0)]
    assert [at(points, x) for x in (0.0, 1.0, 2.0, 5.0)] == [0.0, 0.0, 0.5, 1.0]


def test_a_finished_run_is_not_made_again_and_a_failed_one_is_shown(tmp_path, monkeypatch):
    asked = []

    def start(command, **_):
        asked.append(command)
        return type("Done", (), {"returncode": 1})()

    monkeypatch.setattr(asynchrony.subprocess, "run", start)
    write_run(tmp_path / f"{MODES[0]}-0", step_s=1.0, max_age=2)
    argv = ["asynchrony.py", "--out", str(tmp_path), "--seeds", "0", "--flags", "--trainer.steps", "10"]
    monkeypatch.setattr(asynchrony.sys, "argv", argv)
    with pytest.raises(SystemExit, match="--staleness.max_age 0"):
        asynchrony.main()
    (command,) = asked
    assert command[-6:] == ["--trainer.steps", "10", "--seed", "0", "--staleness.max_age", "0"]


def test_the_picture_has_a_line_for_every_run_in_both_panels(runs):
    root = ElementTree.fromstring(draw(panels(runs, skip=1)))
    paths = root.findall(".//{http://www.w3.org/2000/svg}path")
    assert len(paths) == 4 and len({path.get("stroke") for path in paths}) == 2
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "seconds" in texts and "trained samples" in texts and set(MODES) <= set(texts)


def test_ticks_are_round_and_cover_what_is_drawn():
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0.12, 0.93)[0] <= 0.12 and ticks(0.12, 0.93)[-1] >= 0.93
    assert len(ticks(5.0, 5.0)) >= 2
    level = Panel(x="x", y="y", curves=[Curve(name="a", points=[(1.0, 0.5)])])
    assert "M52.0,147.0" in draw([level])
    with pytest.raises(ValueError, match="without points"):
        draw([Panel(x="x", y="y", curves=[Curve(name="a", points=[])])])
