"""Real processes that run what users might write: whatever a function does concerns its own call only."""

import asyncio
import os
import time

import pytest

from rl.rewards.function_pool import FunctionPool, NoAnswer
from rl.types import Abstain, InfraFail, ParseFail, Prompt, Score
from tests.rl.rewards.zoo import PROMPT, ZOO, alive, score, using, write

pytestmark = pytest.mark.slow  # processes, deadlines and kills


@pytest.fixture
def zoo(tmp_path):
    return f"{write(tmp_path, ZOO)}:reward"


def test_both_signatures_sync_and_async(tmp_path):
    path = write(
        tmp_path,
        """
        import asyncio
        def ours(prompt, completion, answer, extra):
            return {"score": completion == answer, "n": extra["n"], "prompt": prompt}
        async def ours_async(prompt, completion, answer, extra):
            await asyncio.sleep(0)
            return ours(prompt, completion, answer, extra)
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
            right = solution_str == ground_truth
            return {"score": right, "n": extra_info["n"], "prompt": data_source, **kwargs}
        async def compute_score_async(data_source, solution_str, ground_truth, extra_info, **kwargs):
            return compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
        """,
    )
    right = (Score(1.0), {"n": 3.0, "prompt": "2+2="})
    assert score(f"{path}:ours", ["4", "5"])[0] == right
    assert score(f"{path}:ours_async", ["5", "4"])[1] == right
    right = (Score(1.0), {"n": 3.0, "prompt": "sums", "strict": True})
    assert score(f"{path}:compute_score", ["4"], fixed={"strict": True})[0] == right
    wrong = (Score(0.0), {"n": 3.0, "prompt": "sums"})
    assert score(f"{path}:compute_score_async", ["5"])[0] == wrong


def test_whatever_a_function_does_concerns_its_own_call_only(zoo, capfd):
    expected = {
        "good": Score(1.0),
        "raises": "KeyError: 'what' (reward.py:",
        "asserts": "AssertionError (reward.py:",
        "exits": "SystemExit: 3",
        "exits_hard": "exit code 3",
        "crashes": "ended by signal 11 (Segmentation fault)",
        "interrupts": "KeyboardInterrupt",
        "recurses": "RecursionError",
        "group": "ExceptionGroup: several (1 sub-exception)",
        "bad_error": "Bad: <exception str() failed>",
        "allocates": "MemoryError",
        "lists": "list",
        "nothing": Abstain("the function returned None"),
        "nan": "nan",
        "unpicklable": "not_a_number",
        "generates": "not_a_number",
        "metrics": Score(2.0),
        "prints": Score(1.0),
        "prints_much": Score(1.0),
        "reads": "EOFError",
        "closes_stdout": Score(1.0),
        "closes_all": "closed its pipe",
        "alarm": "TimeoutError: alarm",
        "leaves_alarm": Score(1.0),
        "naps": Score(1.0),
        "loop": Score(1.0),
        "forks_and_both_return": Score(1.0),
        "child_gets_our_number": Score(0.0),
        "child_raises": Score(1.0),
        "child_outlives_parent": "exit code 3",
        "forked_outlives_parent": "exit code 3",
        "no such name": "KeyError: 'no such name'",
    }

    async def one_by_one(pool):
        return {text: await pool.score(PROMPT, [text, "good"]) for text in expected}

    said = using(FunctionPool(zoo, workers=1, deadline=5.0, memory_gb=0.6), one_by_one)
    for text, ((outcome, _), (next_outcome, _)) in said.items():
        match outcome:
            case InfraFail(why):
                assert expected[text] in why, text
            case ParseFail(status):
                assert status == expected[text], text
            case _:
                assert outcome == expected[text], text
        assert next_outcome == Score(1.0), f"the call after {text!r}"
    assert said["metrics"][0][1]["acc"] is True
    assert capfd.readouterr() == ("", "")


def test_what_is_printed_is_kept_and_quoted_when_the_process_ends(tmp_path, capfd):
    path = write(
        tmp_path,
        """
        import os
        def f(prompt, completion, answer, extra):
            print("about to", completion)
            os.system("echo in the shell")
            return 1.0 if completion == "return" else os._exit(1)
        """,
    )

    async def work(pool):
        await pool.score(PROMPT, ["return"])
        await asyncio.sleep(0.1)
        return pool.printed, await pool.score(PROMPT, ["end"])

    printed, [(outcome, _)] = using(FunctionPool(f"{path}:f", workers=1, deadline=5.0), work)
    assert printed == "about to return\nin the shell\n"
    assert "exit code 1; the last it printed: about to return" in outcome.why
    assert capfd.readouterr() == ("", "")


def test_calls_run_side_by_side_and_answers_keep_their_order(tmp_path):
    path = write(
        tmp_path,
        """
        import time
        def f(prompt, completion, answer, extra): time.sleep(0.2); return float(completion)
        """,
    )

    async def work(pool):
        began = time.monotonic()
        rated = await pool.score(PROMPT, [str(i) for i in range(32)])
        return [outcome.value for outcome, _ in rated], time.monotonic() - began

    values, took = using(FunctionPool(f"{path}:f", workers=8, deadline=5.0), work)
    assert values == list(range(32))
    assert 4 * 0.2 <= took < 2.5, "one after the other is 6.4 s"


def test_waiting_for_a_worker_is_not_part_of_a_call_s_deadline(zoo):
    assert score(zoo, ["naps"] * 4, deadline=0.5) == [(Score(1.0), {})] * 4


def test_two_pools_of_one_function_do_not_share_anything(tmp_path):
    path = write(
        tmp_path,
        """
        calls = 0
        def f(prompt, completion, answer, extra, step=1):
            global calls
            calls += step
            return calls
        """,
    )

    async def work(one):
        two = FunctionPool(f"{path}:f", workers=1, deadline=5.0, fixed={"step": 10})
        await two.start()
        both = await asyncio.gather(one.score(PROMPT, "ab"), two.score(PROMPT, "ab"))
        await two.stop()
        return both, await one.score(PROMPT, "a")

    both, after = using(FunctionPool(f"{path}:f", workers=1, deadline=5.0), work)
    assert [[o.value for o, _ in rated] for rated in both] == [[1.0, 2.0], [10.0, 20.0]]
    assert after == [(Score(3.0), {})]


def test_large_texts_and_strange_characters_go_both_ways(tmp_path):
    path = write(
        tmp_path,
        """
        def f(prompt, completion, answer, extra):
            return {"score": len(completion), "head": completion[:3], "big": len(extra["big"])}
        """,
    )
    prompt = Prompt(ids=(1,), text="", extra={"big": b"x" * 5_000_000})
    pool = FunctionPool(f"{path}:f", workers=1, deadline=10.0)
    text = "é\ud800\n" + "y" * 3_000_000
    [(outcome, metrics)] = using(pool, lambda pool: pool.score(prompt, [text]))
    assert outcome == Score(3_000_003.0) and metrics == {"head": "é\ud800\n", "big": 5e6}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("def g(): ...", ValueError, "no function 'f' in .*reward.py; it has g"),
        ("def f(x): ...", ValueError, r"expected a function \(prompt, completion, answer, extra\)"),
        ("import absent_module", ValueError, "(?s)absent_module.*while importing .*reward.py"),
        ("def f(:", ValueError, "(?s)reward.py.*SyntaxError"),
        ("raise SystemExit('run me as a script')", ValueError, "SystemExit: run me as a script"),
        ("import os; print('bye'); os._exit(7)", NoAnswer, "(?s)loading it: .*exit code 7.*bye"),
        ("while True: pass", NoAnswer, "loading it: no answer within the deadline of 2 s"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_at_start_and_leaves_nothing(
    tmp_path, text, error, message
):
    path = write(tmp_path, text)
    pool = FunctionPool(f"{path}:f", workers=2, deadline=1.0, load_deadline=2.0)
    with pytest.raises(error, match=message):
        asyncio.run(asyncio.wait_for(pool.start(), 10))
    assert not alive(path)
    assert not alive("", parent=os.getpid())


@pytest.mark.parametrize("options", [{"workers": 0}, {"deadline": 0.0}, {"deadline": float("inf")}])
def test_options_that_cannot_work_are_refused(zoo, options):
    with pytest.raises(ValueError, match="workers >= 1 and finite deadlines"):
        FunctionPool(zoo, **{"workers": 1, "deadline": 1.0, **options})
