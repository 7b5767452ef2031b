import pytest

from rl.rewards.combine import combine, exact, kinds, noise
from rl.types import Abstain, InfraFail, ParseFail, Prompt, Score, Verdict

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


def test_the_noise_of_a_reward_is_that_of_its_terms_by_their_weights_squared():
    exactly, unread = Verdict(outcome=Score(1.0)), Verdict(outcome=ParseFail("no_match"))

    def voted(spread):
        return Verdict(outcome=Score(0.5), noise=spread)

    said = [
        {"f": voted(0.1), "g": voted(0.2)},
        {"f": voted(0.3), "g": exactly},
        {"f": exactly, "g": unread},  # of f's votes one could be read
    ]
    want = [0.49 * 0.1 + 0.09 * 0.2, 0.49 * 0.3 + 0.09 * 0.2, 0.49 * 0.3]
    assert noise(said, WEIGHTS) == pytest.approx(want)
    assert noise([{"f": exactly}, {"f": exactly}], WEIGHTS) == (0.0, 0.0)
