from rl.rewards.combine import combine, exact, kinds
from rl.types import Abstain, InfraFail, ParseFail, Prompt, Score

WEIGHTS = {"f": 0.7, "g": 0.3}


def prompt(answer="41"):
    return Prompt(ids=(1,), text="14", answer=answer)


def test_o059_a_term_that_abstains_is_left_out_and_all_abstaining_is_a_missing_reward():
    assert combine({"f": Score(1.0), "g": Abstain()}, WEIGHTS) == 0.7
    assert combine({"f": Abstain(), "g": Abstain()}, WEIGHTS) is None
    assert combine({}, WEIGHTS) is None


def test_a_failed_term_makes_the_reward_missing():
    assert combine({"f": Score(1.0), "g": ParseFail("no_match")}, WEIGHTS) is None
    assert combine({"f": Score(1.0), "g": InfraFail("timeout")}, WEIGHTS) is None


def test_zero_is_a_score():
    assert combine({"f": Score(0.0), "g": Score(0.0)}, WEIGHTS) == 0.0


def test_the_exact_rule():
    assert exact(prompt(), " 41\n") == Score(1.0)
    assert exact(prompt(), "411") == Score(0.0)
    assert isinstance(exact(prompt(None), "41"), Abstain)


def test_outcomes_are_counted_by_kind():
    outcomes = [Score(1.0), Score(0.0), ParseFail("empty"), ParseFail("truncated"), InfraFail("x"), Abstain()]
    assert kinds(outcomes) == {
        "score": 2,
        "parse_fail/empty": 1,
        "parse_fail/truncated": 1,
        "infra_fail": 1,
        "abstain": 1,
    }
