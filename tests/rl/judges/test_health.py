"""Fake judges with one fault each, and healthy ones that must raise nothing."""

import json
import random

import pytest

from rl.config import Health
from rl.judges.health import GROUPS, LEAST, Alarm, Seen, Watch, alarms, measure
from rl.types import Abstain, Call, InfraFail, ParseFail, Score, Verdict

CFG = Health()


def call(about=(0,), score=0.5, **fields):
    defaults = dict(producer="judge", prompt="ab", part="", text="", finish="stop", outcome="score",
                    n_prompt=10, n_tokens=5, seconds=1.0, replica="r", attempts=1)  # fmt: skip
    return Call(**{**defaults, "about": about, "score": score, **fields})


def seen(score, group=0, length=10, truth=None, noise=None, calls=()):
    outcome = Score(score) if isinstance(score, int | float) else score
    return Seen(
        group=group, verdict=Verdict(outcome=outcome, noise=noise, calls=calls), length=length, truth=truth
    )


def clip(x):
    return min(1.0, max(0.0, x))


def answers(judge, *, seed=0, groups=64, samples=8, skill=0.5, known=True):
    """What `judge(rng, truth, length)` says of answers of which a share `skill` is right; prompts differ."""
    rng, out = random.Random(seed), []
    for g in range(groups):
        chance = rng.betavariate(4 * skill, 4 * (1 - skill)) if 0 < skill < 1 else skill
        for _ in range(samples):
            truth, length = float(rng.random() < chance), rng.randrange(20, 200)
            said = judge(rng, truth, length)
            out.append(seen(said, g, length, truth if known else None))
    return out


def names(raised):
    return [alarm.name for alarm in raised]


def raised(judged, first=(), cfg=CFG, bounded=True):
    now = measure(judged, bounded=bounded)
    return alarms(now, measure(first) if first else {}, cfg)


# ── Healthy judges ────────────────────────────────────────────────────────────────────────────────

HEALTHY = {
    "exact": lambda rng, truth, length: truth,
    "noisy": lambda rng, truth, length: clip(rng.gauss(0.3 + 0.4 * truth, 0.2)),
    "coarse": lambda rng, truth, length: round(5 * clip(rng.gauss(0.4 + 0.3 * truth, 0.25))) / 5,
    "wrong in a tenth": lambda rng, truth, length: truth if rng.random() < 0.9 else 1 - truth,
    "blind": lambda rng, truth, length: rng.random(),
    "a tenth unreadable": lambda rng, truth, length: ParseFail("no_match") if rng.random() < 0.1 else truth,
    "a little for length": lambda rng, truth, length: clip(rng.gauss(0.3 + 0.4 * truth, 0.2) + length / 2000),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_judge_raises_nothing_over_fifty_seeds(name):
    """Small looks and large ones, while the policy goes from few right answers to nearly all."""
    judge = HEALTHY[name]
    for seed in range(50):
        watch = Watch(CFG)
        for step, skill in enumerate((0.2, 0.5, 0.98)):
            groups, samples = ((10, 2), (12, 8), (40, 4))[seed % 3]
            shown = answers(judge, seed=100 * seed + step, groups=groups, samples=samples, skill=skill)
            watch.saw(shown)
            watch.canaries({str(i): clip(random.Random(i).random()) for i in range(16)})
            _, found = watch.look()
            assert not found, (seed, step, found)


@pytest.mark.parametrize("seed", range(50))
def test_a_healthy_judge_without_ground_truth_raises_nothing(seed):
    for name in ("noisy", "coarse", "wrong in a tenth", "blind"):
        assert not raised(answers(HEALTHY[name], seed=seed, groups=12, known=False)), name


def test_a_noisy_judge_with_other_seeds_at_every_look_does_not_drift():
    for seed in range(50):
        rng, watch = random.Random(seed), Watch(CFG)
        for _ in range(10):
            watch.canaries({str(i): clip(rng.gauss(0.5, 0.2)) for i in range(16)})
            metrics, found = watch.look()
            assert not found, (seed, found)
        assert metrics["judge/canary_drift"] > CFG.drift  # which alone would have been an alarm


# ── One fault each ────────────────────────────────────────────────────────────────────────────────


def test_a_judge_that_drifts():
    watch = Watch(CFG)
    for step in range(6):
        watch.canaries({f"c{i}": clip(0.5 + 0.08 * max(0, step - 1)) for i in range(16)})
        metrics, found = watch.look()
        assert names(found) == (["drift"] if step >= 3 else []), step
    assert metrics["judge/canary_drift"] == pytest.approx(0.32) and metrics["judge/canary_noise"] == 0
    assert "0.32 away" in found[0].message


def test_a_noisy_judge_that_drifts():
    for seed in range(10):
        rng, watch = random.Random(seed), Watch(CFG)
        for _ in range(2):
            watch.canaries({str(i): rng.gauss(0.2, 0.05) for i in range(16)})
        watch.canaries({str(i): rng.gauss(0.6, 0.05) for i in range(16)})
        assert names(watch.look()[1]) == ["drift"]


def test_a_judge_that_saturates():
    flat = answers(lambda rng, truth, length: 1.0 if rng.random() < 0.97 else 0.8)
    (alarm,) = raised(flat)
    assert alarm.name == "saturation" and "highest" in alarm.message
    low = answers(lambda rng, truth, length: 0.0, known=False)
    (alarm,) = raised(low)
    assert "100% of its scores are exactly the lowest" in alarm.message and "no ground truth" in alarm.message


def test_scores_at_the_end_are_no_alarm_where_the_truth_is_there_too():
    assert not raised(answers(HEALTHY["exact"], skill=0.99)) and not raised(
        answers(HEALTHY["exact"], skill=0.01)
    )
    wrong_end = answers(lambda rng, truth, length: 0.0, skill=0.97)
    assert names(raised(wrong_end)) == ["saturation"]


@pytest.mark.parametrize(("sign", "word"), [(1, "longer"), (-1, "shorter")])
def test_a_judge_that_prefers_length(sign, word):
    judged = answers(lambda rng, truth, length: clip(0.5 + sign * (length - 110) / 250 + rng.gauss(0, 0.1)))
    (alarm,) = raised(judged)
    assert alarm.name == "length" and word in alarm.message
    assert sign * measure(judged)["judge/length_corr"] > 0.7
    small = answers(lambda rng, truth, length: length / 200, groups=40, samples=2, known=False)
    assert names(raised(small)) == ["length"]


def test_length_is_no_bias_where_right_answers_are_longer():
    rng, judged = random.Random(0), []
    for g in range(60):
        for _ in range(8):
            truth = float(rng.random() < 0.5)
            judged.append(seen(clip(rng.gauss(0.2 + 0.6 * truth, 0.1)), g, int(50 + 100 * truth), truth))
    metrics = measure(judged)
    assert metrics["judge/length_corr"] > 0.7 and not alarms(metrics, {}, CFG)


def test_a_judge_that_is_hacked():
    """The score rises and the truth falls."""
    watch = Watch(CFG)
    for step in range(5):
        hacked = step / 4  # share of answers that have learned what pleases the judge

        def judge(rng, truth, length, hacked=hacked):
            return clip(rng.gauss(0.9, 0.05) if rng.random() < hacked else rng.gauss(0.2 + 0.6 * truth, 0.05))

        watch.saw(answers(judge, seed=step, groups=100, skill=0.6 - 0.5 * hacked))
        metrics, found = watch.look()
        assert names(found) == (["gap"] if step >= 2 else []), step
    assert metrics["judge/gap_growth"] > 0.6
    assert "ground truth 0.55 → 0.10" in found[0].message


def test_a_judge_that_was_generous_from_the_start_is_not_hacked():
    watch = Watch(CFG)
    for step in range(3):
        watch.saw(answers(lambda rng, truth, length: 0.7 + 0.2 * truth, seed=step))
        metrics, found = watch.look()
        assert not found and metrics["judge/gap"] > 0.25


def test_a_gap_that_chance_explains_is_no_alarm():
    now = {"judge/gap": 0.45, "judge/gap_margin": 0.15, "judge/score_mean": 0.8, "judge/truth_mean": 0.35}
    first = {**now, "judge/gap": 0.05, "judge/score_mean": 0.5, "judge/truth_mean": 0.45}
    assert not alarms(now, first, CFG)  # 0.40 ± 0.21 may be 0.19
    assert names(alarms({**now, "judge/gap_margin": 0.1}, first, CFG)) == ["gap"]
    assert not alarms({k: v for k, v in now.items() if k != "judge/gap_margin"}, first, CFG)


def test_a_judge_that_fails():
    def judge(rng, truth, length):
        x = rng.random()
        return ParseFail("truncated") if x < 0.3 else InfraFail("timeout") if x < 0.4 else truth

    (alarm,) = raised(answers(judge))
    assert alarm.name == "failures" and "(truncated 29%" in alarm.message and "no answer" in alarm.message
    assert names(raised([seen(InfraFail("down"), g) for g in range(64)])) == ["failures"]


def test_abstaining_is_no_failure():
    metrics = measure([seen(Abstain())] * 300 + [seen(1.0)] * 100)
    assert metrics["judge/abstain"] == 0.75 and metrics["judge/failures"] == 0
    assert metrics["judge/judgements"] == 100
    assert measure([]) == {"judge/judgements": 0}
    assert measure([seen(Abstain())]) == {"judge/judgements": 0, "judge/abstain": 1.0}


# ── Not before there is enough ────────────────────────────────────────────────────────────────────


def test_below_the_least_number_nothing_is_alarming():
    def failing(n, groups):
        return [seen(InfraFail("down"), i % groups) for i in range(n)]

    assert not raised(failing(LEAST - 1, 32)) and not raised(failing(500, GROUPS - 1))
    assert names(raised(failing(LEAST, GROUPS))) == ["failures"]
    watch = Watch(CFG)
    for score in (0.0, 0.0, 1.0):
        watch.canaries({str(i): score for i in range(GROUPS - 1)})
    assert not watch.look()[1]


def test_small_looks_are_put_together_until_there_is_enough():
    watch = Watch(CFG)
    sizes = []
    for step in range(5):
        watch.saw([seen(InfraFail("down"), 10 * step + i // 2) for i in range(20)])
        metrics, found = watch.look()
        sizes.append((metrics["judge/judgements"], names(found)))
    assert sizes == [(20, []), (40, []), (60, []), (80, ["failures"]), (20, [])]


# ── The numbers ───────────────────────────────────────────────────────────────────────────────────


def test_measures_of_five_answers():
    calls = tuple(call(seconds=s, attempts=a) for s, a in ((1.0, 1), (3.0, 2)))
    judged = [
        seen(1.0, truth=1.0, noise=0.04, calls=calls), seen(0.6, truth=0.0, noise=0.0),
        seen(0.0, truth=0.0), seen(0.3, truth=1.0), seen(ParseFail("ambiguous"), truth=1.0),
    ]  # fmt: skip
    m = {name.removeprefix("judge/"): value for name, value in measure(judged).items()}
    assert m["judgements"] == 5 and m["failures"] == m["parse_fail"] == m["parse_fail/ambiguous"] == 0.2
    assert m["infra_fail"] == 0 and m["score_mean"] == pytest.approx(0.475)
    hist = [m[f"score_hist_{i}"] for i in range(10)]
    assert hist == [0.25, 0, 0, 0.25, 0, 0, 0.25, 0, 0, 0.25]
    assert m["saturation"] == 0.25 and m["noise"] == pytest.approx(0.02**0.5)
    assert m["truth_mean"] == 0.5 and m["agreement"] == 0.5 and m["auc"] == 0.75
    assert m["gap"] == pytest.approx(-0.025)
    assert (m["latency_s_p50"], m["latency_s_p95"], m["attempts"]) == (1.0, 3.0, 1.5)
    assert (m["tokens"], m["prompt_tokens"]) == (2.0, 4.0)  # per judgement
    assert not any(name.endswith("_margin") for name in m)


def test_unbounded_scores_have_a_ranking_and_no_scale():
    judged = answers(lambda rng, truth, length: rng.gauss(5 * truth, 1))
    metrics = measure(judged, name="scalar", bounded=False)
    assert metrics["scalar/auc"] > 0.9 and "scalar/length_corr" in metrics
    assert not {"scalar/gap", "scalar/saturation", "scalar/agreement", "scalar/score_hist_0"} & metrics.keys()
    with pytest.raises(ValueError, match="bounded=False"):
        measure(judged)
    with pytest.raises(ValueError, match="got nan"):
        measure([seen(float("nan"))])


def test_alarms_carry_the_judges_name():
    metrics = measure([seen(1.0, g) for g in range(64)], name="scalar")
    (alarm,) = alarms(metrics, {}, CFG, name="scalar")
    assert alarm == Alarm("saturation", alarm.message) and alarm.message.startswith("scalar: 100% of its")


def test_limits_are_the_configs():
    judged = answers(lambda rng, truth, length: ParseFail("empty") if rng.random() < 0.1 else truth)
    assert not raised(judged) and names(raised(judged, cfg=Health(failures=0.02))) == ["failures"]


def test_a_resumed_run_keeps_its_baselines():
    honest, hacked = answers(HEALTHY["noisy"]), answers(lambda rng, truth, length: 0.9, seed=1, skill=0.2)
    watch = Watch(CFG)
    watch.saw(honest)
    for _ in range(2):
        watch.canaries({str(i): 0.2 for i in range(16)})
    watch.look()
    resumed = Watch.from_dict(json.loads(json.dumps(watch.to_dict())), CFG)
    for one in (watch, resumed):
        one.saw(hacked)
        one.canaries({str(i): 0.9 for i in range(16)})
    assert watch.look() == resumed.look()
    assert names(resumed.look()[1]) == ["drift"]  # nothing was judged since, the canaries still stand
    fresh = Watch(CFG)
    fresh.saw(hacked)
    assert "gap" not in names(fresh.look()[1])


def test_canaries_without_a_score_are_left_out():
    watch = Watch(CFG)
    watch.canaries({"a": 0.5, "b": None})
    watch.canaries({"a": None, "b": 0.1})
    watch.canaries({"a": 0.6, "b": 0.4})
    assert watch.look()[0]["judge/canary_drift"] == pytest.approx(0.2)
