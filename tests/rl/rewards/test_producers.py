"""The contract of all who give rewards: one verdict per answer, and only a score is a reward."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from experiments.genrm_grpo import CONFIG
from rl.actors.judge import Judge as JudgeActor
from rl.actors.reward import Function, Reward
from rl.config import Dispatch, Scalar
from rl.follow import outcomes
from rl.judges.desk import Judging
from rl.pool import Pool
from rl.rewards.combine import combine
from rl.rewards.functions import union
from rl.rewards.producers import Limiter, Pooled
from rl.roles import Local
from rl.types import Abstain, InfraFail, ParseFail, Prompt, Reply, Score, Verdict
from tests.rl.judges.server import Answer, Server, said

PROMPT = Prompt(ids=(), text="2+2=", answer="1.0")
QUICK = Dispatch(attempt=2.0, attempts=2, breaker=1000, rest=0.01, patience=5.0)
JUDGE = replace(CONFIG.judge, template="{problem}|{candidate}")

# What an answer's text makes a producer do: score with that number, say something unreadable, or fail.
ONE, ZERO, ODD, DEAD = "1.0", "0.0", "unreadable", "dead"
FUNCTION = """
def rate(prompt, completion, answer, extra):
    if completion == "dead":
        raise OSError("gone")
    found = {"score": "?" if completion == "unreadable" else float(completion), "seen": completion}
    return found | ({"only_here": 1} if completion == "0.0" else {})
"""


@dataclass
class Scripted:
    """A judge's actor: the last part of a question is the answer that it is about."""

    scalar: bool = False

    async def start(self): ...

    async def answer(self, asks, seconds=0.0):
        return [self.reply(ask.text.rpartition("|")[2]) for ask in asks]

    def reply(self, text):
        if text == DEAD:
            return Reply(failure="engine: gone", replica="judge-0")
        if self.scalar:
            return Reply(score=float("nan") if text == ODD else float(text))
        return Reply(text="well" if text == ODD else f"S:{5 * float(text):g}")


def http(n, text):
    text = text.rpartition("|")[2]
    if text == DEAD:
        return Answer(how="reset")
    return Answer(body=said("well" if text == ODD else f"S:{5 * float(text):g}"))


@asynccontextmanager
async def producer(kind, tmp_path):
    if kind == "rule":
        yield Pooled(Pool([Local("rule-0", Reward("exact"))]), 10.0)
    elif kind == "function":
        (tmp_path / "f.py").write_text(FUNCTION)
        actor = Function(f"{tmp_path}/f.py:rate", replace(CONFIG.reward, fn_workers=1))
        await actor.start()
        try:
            yield Pooled(Pool([Local("fn/0-0", actor)]), 60.0)
        finally:
            await actor.stop()
    elif kind == "generative":
        pool = Pool([Local("judge-0", Scripted()), Local("judge-1", Scripted())], dispatch=QUICK)
        yield Judging(pool, JUDGE, QUICK, deadline=10.0)
    elif kind == "scalar":
        pool = Pool([Local("scalar-0", Scripted(scalar=True))], dispatch=QUICK)
        yield Judging(pool, Scalar(template="{problem}|{candidate}"), QUICK, deadline=10.0)
    elif kind == "http":
        async with Server(http).up() as server:
            actor = JudgeActor(None, replace(JUDGE, model="m"), server.url)
            await actor.start()
            yield Judging(Pool([Local("judge-0", actor)], dispatch=QUICK), JUDGE, QUICK, deadline=10.0)
            await actor.stop()


KINDS = ["rule", "function", "generative", "scalar", "http"]
FAILING = [k for k in KINDS if k != "rule"]  # a rule reads any text


def rate(kind, tmp_path, texts, prompt=PROMPT):
    async def main():
        async with producer(kind, tmp_path) as p, asyncio.timeout(60):
            return await p.rate(prompt, texts, list(range(len(texts))))

    return asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_success_is_one_score_per_answer_in_their_order_and_zero_is_a_score(kind, tmp_path):
    verdicts = rate(kind, tmp_path, [ONE, ZERO, ONE])
    assert all(isinstance(v, Verdict) for v in verdicts)
    assert [v.outcome for v in verdicts] == [Score(1.0), Score(0.0), Score(1.0)]
    assert combine({kind: verdicts[1].outcome}, {kind: 2.0}) == 0.0


@pytest.mark.parametrize("kind", FAILING)
def test_a_failure_concerns_its_own_answer_and_is_typed(kind, tmp_path):
    one, odd, dead, zero = (v.outcome for v in rate(kind, tmp_path, [ONE, ODD, DEAD, ZERO]))
    assert (one, zero) == (Score(1.0), Score(0.0))
    assert isinstance(odd, ParseFail) and isinstance(dead, InfraFail) and dead.why
    assert combine({kind: odd}, {kind: 1.0}) is None and combine({kind: dead}, {kind: 1.0}) is None


@pytest.mark.parametrize("kind", FAILING)
def test_total_failure_is_a_failure_for_each_answer_and_no_exception(kind, tmp_path):
    for outcome in (v.outcome for v in rate(kind, tmp_path, [DEAD, DEAD])):
        assert isinstance(outcome, InfraFail)
    for outcome in (v.outcome for v in rate(kind, tmp_path, [ODD, ODD])):
        assert isinstance(outcome, ParseFail)


@pytest.mark.parametrize("kind", KINDS)
def test_no_answers_no_verdicts(kind, tmp_path):
    assert rate(kind, tmp_path, []) == []


def test_a_rule_without_a_reference_abstains_and_does_not_fail(tmp_path):
    (verdict,) = rate("rule", tmp_path, [ONE], replace(PROMPT, answer=None))
    assert isinstance(verdict.outcome, Abstain)


def test_what_is_told_beside_scores_is_the_union_of_keys_with_the_missing_marked(tmp_path):
    told = [v.told for v in rate("function", tmp_path, [ONE, ZERO, DEAD])]
    assert union(told) == {"seen": [ONE, ZERO, None], "only_here": [None, 1.0, None]}


@pytest.mark.parametrize("kind", ["generative", "scalar", "http"])
def test_every_call_to_a_judge_is_recorded_failed_ones_too(kind, tmp_path):
    verdicts = rate(kind, tmp_path, [ONE, ODD, DEAD])
    calls = [call for v in verdicts for call in v.calls]
    assert [call.about for call in calls] == [(0,), (1,), (2,)]
    assert [call.outcome.partition("/")[0] for call in calls] == ["score", "parse_fail", "infra_fail"]
    assert all(len(call.prompt) == 16 for call in calls) and calls[2].attempts >= 2


def test_a_mixture_scores_where_all_of_its_terms_do_and_is_missing_where_one_failed(tmp_path):
    weights = {"rule": 0.25, "judge": 0.75}

    async def main():
        async with producer("rule", tmp_path) as rule, producer("generative", tmp_path) as judge:
            texts = [ONE, ZERO, ODD, DEAD]
            rated = [await p.rate(PROMPT, texts, [0] * 4) for p in (rule, judge)]
            return [dict(zip(("rule", "judge"), pair, strict=True)) for pair in zip(*rated, strict=True)]

    assert [combine(outcomes(of), weights) for of in asyncio.run(main())] == [1.0, 0.0, None, None]


def test_o059_a_term_that_abstains_is_left_out_and_alone_it_gives_no_reward():
    f, g = {"f": Score(1.0), "g": Abstain()}, {"f": Abstain(), "g": Abstain()}
    weights = {"f": 0.7, "g": 0.3}
    assert combine(f, weights) == pytest.approx(0.7) and combine(g, weights) is None


def test_the_rate_of_calls_is_kept_over_all_functions(monkeypatch):
    async def main():
        limiter, loop = Limiter(6000.0), asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(limiter.wait(5) for _ in range(4)))  # 100 calls a second
        return loop.time() - began

    assert 0.15 <= asyncio.run(main()) < 1.0


def test_the_config_names_every_producer_that_it_uses():
    functions = {"fn": ("a.py:f", "b.py:g"), "fn_weights": (1, 0)}
    reward = replace(CONFIG.reward, judge=1.0, scalar=0.5, rule=0.1, **functions)
    assert reward.weights == {"judge": 1, "scalar": 0.5, "rule": 0.1, "fn/0": 1}
