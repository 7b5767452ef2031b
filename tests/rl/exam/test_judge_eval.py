import asyncio
import io
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments import judge_eval as experiment
from rl.config import ConfigError, Health
from rl.display import Display
from rl.exam.judge_eval import judge_eval, run
from rl.exam.labelled import Labelled, demo_labelled, read_labelled
from rl.exam.report import groups, report
from rl.judges.stats import auc
from rl.rewards.combine import RULES
from rl.types import Abstain, Call, InfraFail, ParseFail, Prompt, Score, Verdict

CFG, HEALTH = experiment.CONFIG, Health()
ROOT = Path(__file__).parents[3]
GSM8K = Path(os.environ.get("GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))


class Rule:
    def __init__(self, name):
        self.rule = RULES[name]

    async def rate(self, prompt, texts, seeds):
        return [Verdict(outcome=self.rule(prompt, text)) for text in texts]


class Fake:
    """Says what `outcome(text, seed)` says; each answer costs a call."""

    def __init__(self, outcome):
        self.outcome, self.asked, self.running, self.most = outcome, [], 0, 0

    async def rate(self, prompt, texts, seeds):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.asked.append((prompt.text, tuple(texts), tuple(seeds)))
        return [
            Verdict(outcome=self.outcome(t, s), noise=0.01, calls=(call(about=(i,)),))
            for i, (t, s) in enumerate(zip(texts, seeds, strict=True))
        ]


def call(about=(0,), **fields):
    defaults = dict(producer="x", prompt="ab", part="", text="S:4", finish="stop", outcome="score",
                    score=0.5, n_prompt=100, n_tokens=20, seconds=0.5, replica="r", attempts=2)  # fmt: skip
    return Call(**{**defaults, "about": about, **fields})


def row(label, key="", prompt="q", text="t"):
    return Labelled(
        where=f"f:{text}", prompt=Prompt(ids=(), text=prompt, key=key), text=text, label=label, key=key
    )


def said(*outcomes):
    return [Verdict(outcome=Score(o) if isinstance(o, int | float) else o) for o in outcomes]


def show():
    return Display(0, console=Console(file=io.StringIO(), width=200, soft_wrap=True))


# ── The report ────────────────────────────────────────────────────────────────────────────────────


def test_a_report_by_hand():
    verdicts = said(
        0.9, 0.7, 0.6, 0.2, ParseFail("no_match"), ParseFail("truncated"), InfraFail("x"), Abstain()
    )
    rows = [row(x) for x in (1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0)]
    r = report(verdicts, rows, 4.0, HEALTH)
    assert r["outcomes"] == {
        "score": 4, "parse_fail/no_match": 1, "parse_fail/truncated": 1, "infra_fail": 1, "abstain": 1,
    }  # fmt: skip
    assert (r["answers"], r["scored"], r["right"]) == (8, 0.5, 0.5)
    assert (r["accuracy"], r["best_accuracy"]) == (0.75, 0.75) and r["auc"] == 0.75
    assert r["auc_low"] < 0.75 < r["auc_high"]
    assert (r["false_right"], r["false_wrong"]) == (0.25, 0.0)
    assert r["ece"] == pytest.approx((0.1 + 0.7 + 0.4 + 0.2) / 4)
    assert [(b["n"], b["label"]) for b in r["reliability"]] == [(1, 0.0), (1, 1.0), (1, 0.0), (1, 1.0)]
    assert r["answers_per_s"] == 2.0 and r["keys"] == {} and r["calls"] == 0
    json.dumps(r, allow_nan=False)


def test_a_report_without_a_single_score_says_so_and_no_number():
    r = report(said(InfraFail("x"), ParseFail("empty")), [row(1.0), row(0.0)], 1.0, HEALTH)
    assert r["scored"] == 0 and r["accuracy"] is r["auc"] is r["ece"] is r["score_mean"] is None
    assert r["reliability"] == [] and json.dumps(r, allow_nan=False)


def test_without_wrong_answers_there_is_an_accuracy_and_no_auc():
    r = report(said(1.0, 0.2), [row(1.0), row(1.0)], 1.0, HEALTH)
    assert r["accuracy"] == 0.5 and r["auc"] is None and r["auc_low"] is None


def test_logits_are_ranked_and_not_calibrated():
    r = report(said(-3.0, 4.0, 2.0), [row(0.0), row(1.0), row(1.0)], 1.0, HEALTH)
    assert r["auc"] == r["best_accuracy"] == 1.0 and r["ece"] is None and r["reliability"] == []
    assert r["best_threshold"] == -0.5 and r["saturation"] is None


def test_each_key_has_its_own_line():
    rows = [row(1.0, "a"), row(0.0, "a"), row(1.0, "b"), row(1.0, "b")]
    r = report(said(0.9, 0.1, 0.1, ParseFail("empty")), rows, 1.0, HEALTH)
    assert r["keys"]["a"] == {"scored": 2, "right": 0.5, "accuracy": 1.0, "auc": 1.0}
    assert r["keys"]["b"] == {"scored": 1, "right": 1.0, "accuracy": 0.0, "auc": None}


def test_the_cost_is_that_of_all_calls():
    verdicts = [
        Verdict(outcome=Score(1.0), calls=(call(), call(seconds=2.0))),
        Verdict(outcome=InfraFail("x")),
    ]
    r = report(verdicts, [row(1.0), row(0.0)], 4.0, HEALTH)
    assert (r["calls"], r["attempts"], r["prompt_tokens"], r["tokens"]) == (2, 4, 200, 40)
    assert (r["judge_seconds"], r["latency_s_p50"], r["latency_s_p95"]) == (2.5, 0.5, 2.0)


def test_an_untrustworthy_judge_is_named_in_the_report():
    rows = [row(float(i % 2), prompt=f"q{i // 4}", text="x" * (i + 1)) for i in range(400)]
    (warning,) = report(said(*[1.0] * 400), rows, 1.0, HEALTH)["warnings"]
    assert (
        warning.startswith("100% of its scores are exactly the highest") and "50% of the answers" in warning
    )


def test_a_label_of_one_half_is_right():
    r = report(said(0.9, 0.1), [row(0.5), row(0.4)], 1.0, HEALTH)
    assert r["right"] == 0.5 and r["accuracy"] == r["auc"] == 1.0
    assert r["ece"] == pytest.approx((0.4 + 0.3) / 2)  # against the labels themselves


def test_rows_and_verdicts_must_match():
    with pytest.raises(ValueError, match="got 1 and 2 rows"):
        report(said(1.0), [row(1.0), row(0.0)], 1.0, HEALTH)
    with pytest.raises(ValueError):
        report([], [], 1.0, HEALTH)


# ── Asking ────────────────────────────────────────────────────────────────────────────────────────


def test_answers_to_one_prompt_are_judged_together_wherever_they_stand():
    rows = [row(1.0, prompt="a", text="1"), row(0.0, prompt="b", text="2"), row(1.0, prompt="a", text="3")]
    assert groups(rows) == [[0, 2], [1]]
    fake = Fake(lambda text, seed: Score(float(text) / 4))
    reports = asyncio.run(judge_eval(CFG, {"judge": fake}, rows))
    assert [(p, texts) for p, texts, _ in fake.asked] == [("a", ("1", "3")), ("b", ("2",))]
    assert len({seed for *_, seeds in fake.asked for seed in seeds}) == 3
    assert reports["judge"]["score_mean"] == pytest.approx(0.5)
    assert reports["judge"]["auc"] == auc([0.25, 0.5, 0.75], [True, False, True]) == 0.5


def test_prompts_that_differ_in_an_extra_field_are_judged_apart():
    one, two = row(1.0), row(1.0)
    other = replace(two, prompt=replace(two.prompt, extra={"tests": "assert f(2)"}))
    assert groups([one, two]) == [[0, 1]] and groups([one, other]) == [[0], [1]]


def test_prompts_are_judged_at_the_same_time_but_not_all():
    rows, fake = [row(1.0, prompt=str(i)) for i in range(1000)], Fake(lambda text, seed: Score(1.0))
    asyncio.run(judge_eval(CFG, {"judge": fake}, rows))
    assert fake.most == 256


def test_the_seeds_are_the_configs():
    def asked(seed):
        fake = Fake(lambda text, seed: Score(1.0))
        asyncio.run(judge_eval(replace(CFG, seed=seed), {"judge": fake}, [row(1.0)]))
        return fake.asked

    assert asked(0) == asked(0) != asked(1)


def test_a_run_leaves_every_call_every_answer_and_the_report(tmp_path):
    rows, display = demo_labelled(("reverse",), 64, seed=0), show()

    def outcome(text, seed):
        x = random.Random(seed).random()
        return ParseFail("no_match", "??") if x < 0.2 else InfraFail("timeout") if x < 0.3 else Score(x)

    result = asyncio.run(run(CFG, {"judge": Fake(outcome), "rule": Rule("exact")}, rows, display, tmp_path))
    lines = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
             for name in ("calls", "answers")}  # fmt: skip
    assert len(lines["calls"]) == 64 and len(lines["answers"]) == 128
    assert {tuple(c["about"]) for c in lines["calls"]} == {(r.where,) for r in rows}
    assert all(c["producer"] == "judge" and c["text"] == "S:4" for c in lines["calls"])
    failed = [a for a in lines["answers"] if a["outcome"]["kind"] == "ParseFail"]
    assert failed and failed[0]["score"] is None and failed[0]["outcome"]["status"] == "no_match"
    assert json.loads((tmp_path / "report.json").read_text())["reports"] == result["reports"]
    printed = display.console.file.getvalue()
    for word in ("judge", "rule", "accuracy at 0.5", "AUC", "calibration error", "parse fail/no match",
                 "infra fail", "latency", "tokens read / written", "answers/s", str(tmp_path)):  # fmt: skip
        assert word in printed, word
    assert f"{len(failed)} (" in printed


def test_nothing_to_measure_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="nothing to measure"):
        asyncio.run(run(CFG, {}, demo_labelled(("sort",), 4, 0), show(), tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_rule_agrees_with_the_demos_labels():
    rows = demo_labelled(CFG.data.tasks, CFG.data.held_out, CFG.seed)
    assert len(rows) == CFG.data.held_out and experiment.RUN == "judge_eval"
    r = asyncio.run(judge_eval(CFG, {"rule": Rule("exact")}, rows))["rule"]
    assert r["accuracy"] == r["auc"] == 1.0 and r["ece"] == 0.0 and r["best_threshold"] == 0.5


def test_the_gsm8k_rule_agrees_with_all_5276_verdicts():
    path = GSM8K / "example_model_solutions.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}; set GSM8K_DIR to the folder of the GSM8K files")
    rows = read_labelled(path)
    r = asyncio.run(judge_eval(CFG, {"rule": Rule("gsm8k")}, rows))["rule"]
    assert r["answers"] == 5276 and r["scored"] == 1.0
    assert r["accuracy"] == r["best_accuracy"] == r["auc"] == 1.0 and r["ece"] == 0.0
    assert (
        r["auc_low"] > 0.998 and {k["accuracy"] for k in r["keys"].values()} == {1.0} and len(r["keys"]) == 4
    )
    assert not r["warnings"]
