import random
import subprocess
import sys

import pytest

from rl.demo.tasks import (
    ALPHABET,
    TASKS,
    answer_of,
    change_digit,
    draw,
    is_correct,
    make_prompts,
    make_rows,
    problem,
    split_of,
)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("r52814=", "41825"),
        ("r00012=", "21000"),
        ("s52814=", "12458"),
        ("s90909=", "00999"),
        ("a12+34=", "640"),
        ("a99+99=", "891"),
        ("a00+07=", "700"),
        ("a05+05=", "010"),
    ],
)
def test_the_rule_agrees_with_answers_worked_out_by_hand(text: str, answer: str) -> None:
    assert answer_of(text) == answer
    assert is_correct(text, answer)


@pytest.mark.parametrize("said", ["", "4182", "418255", "41825=", " 41825", "41825 ", "41825\n", "4182٥"])
def test_only_the_whole_answer_and_nothing_more_is_right(said: str) -> None:
    assert not is_correct("r52814=", said)


@pytest.mark.parametrize("text", ["", "r5281=", "r52814", "x52814=", "a1+34=", "r52814=4", "r5281٤="])
def test_what_is_no_problem_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(ValueError, match="expected a problem like"):
        answer_of(text)


@pytest.mark.parametrize("task", TASKS)
def test_problems_and_answers_stay_within_the_alphabet(task: str) -> None:
    rng = random.Random(0)
    for _ in range(200):
        text, answer = problem(task, rng)
        assert set(text + answer) <= set(ALPHABET)
        assert is_correct(text, answer)


@pytest.mark.parametrize("task", TASKS)
def test_no_problem_is_in_both_splits_and_a_tenth_is_held_out(task: str) -> None:
    train = {text for text, _, _ in make_prompts([task], 4000, 0, "train")}
    held_out = {text for text, _, _ in make_prompts([task], 500, 0, "held_out")}
    assert not train & held_out
    rng = random.Random(1)
    share = sum(split_of(problem(task, rng)[0]) == "held_out" for _ in range(4000)) / 4000
    assert 0.07 < share < 0.13


def test_a_sum_and_its_mirror_image_are_in_the_same_split() -> None:
    for x in range(0, 100, 7):
        for y in range(100):
            assert split_of(f"a{x:02d}+{y:02d}=") == split_of(f"a{y:02d}+{x:02d}=")


def test_prompts_are_a_function_of_the_arguments_and_tasks_take_turns() -> None:
    prompts = make_prompts(("sort", "add"), 10, 3, "train")
    assert prompts == make_prompts(("sort", "add"), 10, 3, "train")
    assert prompts != make_prompts(("sort", "add"), 10, 4, "train")
    assert [key for _, _, key in prompts] == ["sort", "add"] * 5
    assert all(is_correct(text, answer) for text, answer, _ in prompts)


def test_rows_carry_what_prompts_do() -> None:
    rows = make_rows(("reverse",), 5, 0, "held_out")
    assert [(row.text, row.answer, row.key) for row in rows] == make_prompts(("reverse",), 5, 0, "held_out")
    assert len({row.where for row in rows}) == 5


@pytest.mark.parametrize("tasks", [[], ["reverse", "multiply"]])
def test_an_unknown_task_or_none_is_an_error(tasks: list[str]) -> None:
    with pytest.raises(ValueError, match="tasks must be some of reverse, sort, add"):
        make_prompts(tasks, 1, 0, "train")


def test_draw_gives_the_split_that_was_asked_for() -> None:
    rng = random.Random(0)
    assert all(split_of(draw("sort", rng, "held_out")[0]) == "held_out" for _ in range(20))


def test_change_digit_changes_exactly_one_position_to_another_digit() -> None:
    rng = random.Random(0)
    for _ in range(200):
        changed = change_digit("41825", rng)
        assert len(changed) == 5 and changed.isdigit()
        assert sum(a != b for a, b in zip("41825", changed, strict=True)) == 1


def test_tasks_critic_and_build_do_not_import_torch() -> None:
    code = "import sys, rl.demo.tasks, rl.demo.critic, rl.demo.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
