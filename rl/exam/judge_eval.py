"""How good is a judge or a reward? It scores labelled answers; nothing is trained."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from rl.config import Config, ConfigError, to_dict
from rl.display import Display
from rl.exam.labelled import Labelled
from rl.exam.report import groups, report
from rl.rewards.producers import Producer
from rl.seeds import fold_in
from rl.types import Outcome, Score, Verdict

AT_A_TIME = 256  # prompts whose answers are under way
PRINT_EVERY = 5.0  # seconds

Heard = Callable[[str, Sequence[int], Sequence[Verdict]], None]  # (producer, places of the rows, verdicts)


async def judge_eval(
    cfg: Config,
    producers: Mapping[str, Producer],
    rows: Sequence[Labelled],
    heard: Heard = lambda name, places, verdicts: None,
) -> dict[str, dict[str, Any]]:
    """Producer → its report (judge_report.report). One is asked after the other, so that the times are their
    own; answers to one prompt go together, as a group does in training. `heard` gets each group at once."""
    reports = {}
    for name, producer in producers.items():
        began = time.monotonic()
        verdicts = await _ask(cfg, name, producer, rows, heard)
        reports[name] = report(verdicts, rows, time.monotonic() - began, cfg.health)
    return reports


async def _ask(
    cfg: Config, name: str, producer: Producer, rows: Sequence[Labelled], heard: Heard
) -> list[Verdict]:
    gate, found = asyncio.Semaphore(AT_A_TIME), dict[int, Verdict]()

    async def one(places: Sequence[int]) -> None:
        seeds = [fold_in(cfg.seed, "judge_eval", i) for i in places]
        async with gate:
            said = await producer.rate(rows[places[0]].prompt, [rows[i].text for i in places], seeds)
        found.update(zip(places, said, strict=True))
        heard(name, places, said)

    await asyncio.gather(*(one(places) for places in groups(rows)))
    return [found[i] for i in range(len(rows))]


async def run(
    cfg: Config, producers: Mapping[str, Producer], rows: Sequence[Labelled], show: Display, folder: Path
) -> dict[str, Any]:
    """judge_eval with its tables, and its files in the folder: calls.jsonl (every call, failures too),
    answers.jsonl (every answer with its label and outcome), report.json (what is returned)."""
    if not producers:
        raise ConfigError("judge_eval: nothing to measure; set reward.judge, scalar, rule or fn")
    done, printed = dict.fromkeys(producers, 0), time.monotonic()
    with (folder / "calls.jsonl").open("w") as calls, (folder / "answers.jsonl").open("w") as answers:

        def heard(name: str, places: Sequence[int], verdicts: Sequence[Verdict]) -> None:
            nonlocal printed
            for i, verdict in zip(places, verdicts, strict=True):
                answers.write(json.dumps(_answer(name, rows[i], verdict)) + "\n")
                for call in verdict.calls:
                    about = [rows[places[k]].where for k in call.about]
                    calls.write(json.dumps({**asdict(call), "producer": name, "about": about}) + "\n")
            done[name] += len(places)
            if time.monotonic() - printed > PRINT_EVERY:
                printed = time.monotonic()
                show.note(f"{name}: {done[name]} of {len(rows)} answers")

        reports = await judge_eval(cfg, producers, rows, heard)
    result = {"file": cfg.data.file, "reports": reports, "config": to_dict(cfg)}
    (folder / "report.json").write_text(json.dumps(result, indent=2))
    print_reports(reports, cfg.data.file or "the demo's own", show)
    show.lines("files", [f"{folder}/  report.json, answers.jsonl, calls.jsonl"])
    return result


def _answer(name: str, row: Labelled, verdict: Verdict) -> dict[str, Any]:
    return {
        "producer": name,
        "where": row.where,
        "key": row.key,
        "prompt": row.prompt.text,
        "answer": row.text,
        "reference": row.prompt.answer,
        "label": row.label,
        "score": verdict.outcome.value if isinstance(verdict.outcome, Score) else None,
        "outcome": _words(verdict.outcome),
        "noise": verdict.noise,
        **({"told": dict(verdict.told)} if verdict.told else {}),
    }


def _words(outcome: Outcome) -> dict[str, Any]:
    return {"kind": type(outcome).__name__, **({} if isinstance(outcome, Score) else asdict(outcome))}


# ── Tables ────────────────────────────────────────────────────────────────────────────────────────


def print_reports(reports: Mapping[str, Mapping[str, Any]], source: str, show: Display) -> None:
    """One table with a column for each producer; then, of each, calibration, keys and warnings."""
    first, failed = (
        next(iter(reports.values())),
        {k for r in reports.values() for k in r["outcomes"]} - {"score"},
    )
    columns = [_column(r, sorted(failed)) for r in reports.values()]
    lines = [line for line in dict.fromkeys(chain(*columns)) if any(c.get(line) for c in columns)]
    title = f"{first['answers']} labelled answers, {first['right']:.1%} of them right ({source})"
    show.note("")
    show.table(title, ["", *reports], [[line, *(c.get(line, "") for c in columns)] for line in lines])
    for name, r in reports.items():
        bins = [(f"{b['lo']:.1f}–{b['hi']:.1f}", b["n"], b["score"], b["label"]) for b in r["reliability"]]
        keys = [(key, k["scored"], k["right"], k["accuracy"], k["auc"]) for key, k in r["keys"].items()]
        _table(show, f"{name}: scores and truth", ["score", "answers", "mean score", "right"], bins)
        _table(show, f"{name}: by key", ["key", "answers", "right", "accuracy", "AUC"], keys)
        for warning in r["warnings"]:
            show.note(f"{name}: {warning}", "yellow")
    show.note("")


def _table(show: Display, title: str, header: list[str], rows: Sequence[tuple[Any, ...]]) -> None:
    if rows:
        show.note("")
        show.table(
            title,
            header,
            [[_number(x) if isinstance(x, float) else str(x or "") for x in row] for row in rows],
        )


def _column(r: Mapping[str, Any], failed: Sequence[str]) -> dict[str, str]:
    """Line → what one producer has there; empty: nothing to say."""
    lines = {"scored": f"{r['scored']:.1%}"}
    for kind in failed:
        n = r["outcomes"].get(kind, 0)
        lines[kind.replace("_", " ")] = f"{n} ({n / r['answers']:.1%})" if n else ""
    if r["best_accuracy"] is not None:
        lines["accuracy at 0.5"] = _number(r["accuracy"])
        lines["accuracy, best cut"] = f"{r['best_accuracy']:.4f} (at {r['best_threshold']:.3g})"
        lines["wrong, called right"] = f"{r['false_right']:.1%}"
        lines["right, called wrong"] = f"{r['false_wrong']:.1%}"
    if r["auc"] is not None:
        lines["AUC (95 %)"] = f"{r['auc']:.4f} ({r['auc_low']:.4f}–{r['auc_high']:.4f})"
    lines |= {
        "mean score": _number(r["score_mean"]),
        "calibration error": _number(r["ece"]),
        "noise of a score": _number(r["noise"]),
        "first place wins": _number(r["first_place"]),
        "orders agree": _number(r["swap_agreement"]),
        "score ~ length": _number(r["length_corr"]),
        "answers/s": f"{r['answers_per_s']:,.1f}",
    }
    if r["calls"]:
        lines["calls (attempts)"] = f"{r['calls']:,} ({r['attempts']:,})"
        lines["latency, 50 % / 95 %"] = f"{r['latency_s_p50']:.3f} s / {r['latency_s_p95']:.3f} s"
        lines["tokens read / written"] = f"{r['prompt_tokens']:,} / {r['tokens']:,}"
        lines["judge's seconds"] = f"{r['judge_seconds']:,.1f}"
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
