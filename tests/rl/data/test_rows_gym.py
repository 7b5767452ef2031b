import importlib.util
import json

import pytest

from rl.data.gym import Gym, GymError
from rl.data.rows import DataError, Row
from rl.data.rows_gym import reasoning_gym_rows
from rl.rewards.gym import final_answer, reasoning_gym
from rl.types import Abstain, InfraFail, Prompt, Score


@pytest.fixture(scope="module")
def gym_rows():
    if importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed")
    return reasoning_gym_rows(["chain_sum", "countdown", "ransom_note"], 7, 0)


def prompt(row: Row) -> Prompt:
    return Prompt(ids=(1,), text=row.text, key=row.key, answer=row.answer, extra=row.extra)


def test_gym_tasks_take_turns_and_are_a_function_of_the_seed(gym_rows):
    names = ["chain_sum", "countdown", "ransom_note"]
    assert [row.key for row in gym_rows] == [*names, *names, "chain_sum"]
    assert reasoning_gym_rows(names, 7, 0) == gym_rows
    assert {row.text for row in reasoning_gym_rows(names, 7, 1)}.isdisjoint(row.text for row in gym_rows)
    assert len({row.text for row in gym_rows}) == 7
    assert json.loads(json.dumps(gym_rows[0].extra)) == gym_rows[0].extra
    assert gym_rows[0].extra["metadata"]["source_dataset"] == "chain_sum"


def test_gym_entries_do_not_depend_on_the_process(gym_rows):
    origin = gym_rows[2].extra["reasoning_gym"]  # ransom_note: its text depends on the order of a set
    other = Gym()
    (entry,) = other.entries(origin["task"], origin["seed"], origin["index"], origin["index"] + 1, 60.0)
    other.close()
    assert (entry["question"], entry["answer"]) == (gym_rows[2].text, gym_rows[2].answer)


def test_gym_held_out_and_training_do_not_overlap(gym_rows):
    held_out = reasoning_gym_rows(["coin_flip"], 100, 0)
    train = reasoning_gym_rows(["coin_flip"], 100, 0, avoid=[row.text for row in held_out])
    assert len({row.text for row in [*held_out, *train]}) == 200


def test_gym_says_when_a_task_has_too_few_questions(gym_rows, monkeypatch):
    monkeypatch.setattr("rl.data.rows_gym.REPEATS", 50)
    with pytest.raises(DataError, match=r"coin_flip has only \d+ different questions here of 5000"):
        reasoning_gym_rows(["coin_flip"], 5000, 0)


def test_gym_names_tasks_close_to_an_unknown_one(gym_rows):
    with pytest.raises(DataError, match="no task 'chain_sums'; close are chain_sum"):
        reasoning_gym_rows(["countdown", "chain_sums"], 2, 0)
    with pytest.raises(DataError, match="at least one task"):
        reasoning_gym_rows([], 2, 0)


def test_the_rule_is_the_tasks_own_scorer(gym_rows):
    for row in gym_rows:
        text = f"<think> <answer>0</answer> </think> so <answer> {row.answer}\n</answer>"
        assert reasoning_gym(prompt(row), text) == Score(1.0)
        assert reasoning_gym(prompt(row), row.answer or "") == Score(1.0)
    countdown = gym_rows[1]  # any expression that gives the number is right
    assert reasoning_gym(prompt(countdown), f"({countdown.answer})") == Score(1.0)
    assert reasoning_gym(prompt(gym_rows[0]), "no idea") == Score(0.0)
    assert isinstance(reasoning_gym(Prompt(ids=(1,), text="a"), "b"), Abstain)


def test_a_scorer_that_does_not_end_or_raises_is_an_infra_fail_and_the_next_call_works(gym_rows, monkeypatch):
    monkeypatch.setattr("rl.rewards.gym.SECONDS", 0.3)
    outcome = reasoning_gym(prompt(gym_rows[1]), "9**9**9**9")
    assert outcome == InfraFail("reasoning-gym: countdown took more than 0.3 s")
    monkeypatch.undo()
    assert reasoning_gym(prompt(gym_rows[0]), gym_rows[0].answer) == Score(1.0)
    (primes,) = reasoning_gym_rows(["prime_factorization"], 1, 0)
    outcome = reasoning_gym(prompt(primes), "x")
    assert isinstance(outcome, InfraFail) and "ValueError: invalid literal" in outcome.why


def test_the_final_answer_stands_behind_the_reasoning_in_the_last_tags():
    assert final_answer("<answer>1</answer> no: <answer> 2 </answer>.") == "2"
    assert final_answer("<answer>1</answer></think> 3 ") == "3"
    assert final_answer("</answer> 4 <answer>") == "</answer> 4 <answer>"
    assert final_answer("<answer>5") == "<answer>5"


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GymError, match="pip install reasoning-gym"):
        Gym().tasks()
