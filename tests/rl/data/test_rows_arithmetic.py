from collections import Counter

import pytest

from rl.data.rows import DataError
from rl.data.rows_arithmetic import TASKS, arithmetic_rows, pool, problems, split_of, value

TWO = ("addition", "subtraction")


def test_the_value_of_every_problem_is_what_python_says():
    for task in TASKS:
        assert all(value(p) == eval(p) for p in problems(task))


def test_there_are_162_problems_of_two_numbers_and_2916_of_three():
    assert [len(set(problems(task))) for task in TASKS] == [81, 81, 2916]


def test_no_problem_is_in_both_splits_nor_the_same_with_its_numbers_in_another_order():
    for task in TASKS:
        assert sorted(pool(task, "train") + pool(task, "held_out")) == sorted(problems(task))
    for p in pool("addition", "held_out"):
        assert split_of(" + ".join(reversed(p.split(" + ")))) == "held_out"
    assert split_of("3 + 4 - 9") == split_of("3 - 9 + 4") == split_of("4 - 9 + 3")


def test_a_quarter_is_held_out_whether_results_are_small_or_large():
    for task in TASKS:
        ordered = sorted(problems(task), key=value)
        half = len(ordered) // 2
        for part in (ordered[:half], ordered[half:]):
            assert 0.17 < sum(split_of(p) == "held_out" for p in part) / len(part) < 0.33, task


def test_larger_numbers_are_trained_on_and_what_is_held_out_stays_as_it_is():
    for task in TWO:
        assert pool(task, "held_out", 12) == pool(task, "held_out")
        more = set(pool(task, "train", 12)) - set(pool(task, "train"))
        assert len(more) == 12 * 12 - 81 and all(max(map(int, p.split()[::2])) > 9 for p in more)
    assert arithmetic_rows(TWO, 50, 5, "held_out", 12) == arithmetic_rows(TWO, 50, 5, "held_out")
    rows = arithmetic_rows(TWO, 2000, 5, "train", 12)
    asked = {row.text for row in rows}
    assert asked.isdisjoint(row.text for row in arithmetic_rows(TWO, 2000, 5, "held_out"))
    assert "Compute 12 - 7." in asked and all(row.answer == str(eval(row.text[8:-1])) for row in rows)


def test_rows_are_a_function_of_the_arguments_alone_and_the_tasks_take_turns():
    rows = arithmetic_rows(TWO, 200, 5, "train")
    assert rows == arithmetic_rows(TWO, 200, 5, "train") != arithmetic_rows(TWO, 200, 6, "train")
    assert Counter(row.key for row in rows) == {"addition": 100, "subtraction": 100}
    for row in rows:
        problem = row.text.removeprefix("Compute ").removesuffix(".")
        assert row.answer == str(eval(problem)) and split_of(problem) == "train"
    assert {row.text for row in rows}.isdisjoint(row.text for row in arithmetic_rows(TWO, 200, 5, "held_out"))


@pytest.mark.parametrize("tasks", [(), ("addition", "division")])
def test_a_task_that_is_not_there_is_refused_with_those_that_are(tasks):
    with pytest.raises(DataError, match="addition, subtraction, three_terms, got (none|division)"):
        arithmetic_rows(tasks, 1, 0, "train")
