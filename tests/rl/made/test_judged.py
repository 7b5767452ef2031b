import random

import pytest

from rl.config import Judge
from rl.judges.questions import questions
from rl.judges.reading import read
from rl.made.judged import draw
from rl.rewards.gsm8k import gsm8k
from rl.types import Reply, Score

JUDGE = Judge(template="{problem}\nAnswer: {candidate}\nRight?", format="yes_no", neutralise=True)


def drawn(n, *tasks, seed=0):
    rng = random.Random(seed)
    return [draw(tasks or ("addition", "subtraction"), rng) for _ in range(n)]


@pytest.mark.parametrize("tasks", [("addition", "subtraction"), ("three_terms",)])
def test_the_verdict_is_the_rules_and_the_judges_format_reads_it(tasks):
    for one in drawn(500, *tasks):
        (ask,) = questions(JUDGE, one.problem, [one.candidate], [0])
        outcome = read(JUDGE, ask, Reply(text=one.verdict, finish="stop")).outcome
        assert outcome == Score(float(one.right)) == gsm8k(one.problem, one.candidate), one


def test_a_verdict_says_the_right_number_whatever_the_answer_says():
    for one in drawn(200):
        problem, said = one.verdict.split(" = ", 1)
        assert int(said.split(",")[0]) == eval(problem) and one.problem.text == f"Compute {problem}."


def test_right_and_wrong_answers_are_about_as_many_and_of_many_forms():
    judged = drawn(2000)
    assert 0.4 < sum(one.right for one in judged) / 2000 < 0.6
    bare = [one.candidate.replace(one.verdict.split(" = ")[0], "P") for one in judged]
    assert len(set(bare)) > 1000
    assert sum(one.verdict.endswith("no number. Verdict: No") for one in judged) > 20


def test_the_generator_alone_decides():
    assert drawn(50, seed=1) == drawn(50, seed=1) != drawn(50, seed=2)


def test_numbers_go_up_to_the_largest_that_is_trained_on():
    rng = random.Random(0)
    problems = [draw(("subtraction",), rng, 12).problem for _ in range(400)]
    numbers = {int(n) for p in problems for n in p.text[8:-1].split(" - ")}
    assert numbers == set(range(1, 13)) and {p.answer for p in problems} >= {"11", "-11"}
