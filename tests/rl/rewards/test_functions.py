"""Users' reward functions: how they are found, which signatures are understood, what their values mean."""

import asyncio
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.rewards.functions import adapt, load, read, union
from rl.types import Abstain, ParseFail, Prompt, Score

PROMPT = Prompt(ids=(1,), text="2+2=", answer="4", key="sums", extra={"n": 3})


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


# ── load ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_function_is_loaded_from_its_file_and_imports_from_the_folder(tmp_path):
    write(tmp_path / "helper_of_reward.py", "VALUE = 41")
    path = write(tmp_path / "reward.py", "from helper_of_reward import VALUE\ndef f(): return VALUE + 1")
    assert load(f"{path}:f")() == 42


def test_files_of_the_same_name_do_not_clash_and_pickle_their_own_classes(tmp_path):
    text = "import pickle\nclass C: tag = {0!r}\ndef f(): return pickle.loads(pickle.dumps(C())).tag"
    specs = [f"{write(tmp_path / name / 'reward.py', text.format(name))}:f" for name in "ab"]
    first, second = (load(spec) for spec in specs)
    assert (first(), second()) == ("a", "b")


def test_a_missing_function_is_reported_with_the_file_and_what_is_in_it(tmp_path):
    path = write(
        tmp_path / "reward.py", "import os\nfrom math import sqrt\ndef f(): ...\nclass G: ...\nh = 3"
    )
    with pytest.raises(ValueError, match=f"no function 'h' in {path}; it has f, G$"):
        load(f"{path}:h")


@pytest.mark.parametrize("spec", ["reward.py", "reward.py:", ":f", "reward:f", "/absent/reward.py:f"])
def test_a_spec_that_names_no_file_or_function_is_a_value_error(spec):
    with pytest.raises(ValueError, match="expected path/to/file.py:name|no file /absent/reward.py"):
        load(spec)


def test_what_the_file_raises_names_the_file(tmp_path):
    path = write(tmp_path / "reward.py", "import absent_module")
    with pytest.raises(ModuleNotFoundError) as caught:
        load(f"{path}:f")
    assert str(path) in caught.value.__notes__[0]


# ── adapt ─────────────────────────────────────────────────────────────────────────────────────────


def ours(prompt, completion, answer, extra):
    return prompt, completion, answer, extra


async def ours_async(prompt, completion, answer, extra):
    return prompt, completion, answer, extra


def verl(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return data_source, solution_str, ground_truth, extra_info, kwargs


async def verl_async(data_source, solution_str, ground_truth, extra_info=None, threshold=0.5):
    return data_source, solution_str, ground_truth, extra_info, {"threshold": threshold}


def test_both_signatures_get_the_prompt_sync_and_async():
    assert adapt(ours)(PROMPT, "4") == ("2+2=", "4", "4", {"n": 3})
    assert adapt(ours_async)(PROMPT, "4") == ("2+2=", "4", "4", {"n": 3})
    assert adapt(verl)(PROMPT, "4") == ("sums", "4", "4", {"n": 3}, {})
    assert adapt(verl_async)(PROMPT, "4") == ("sums", "4", "4", {"n": 3}, {"threshold": 0.5})


def test_fixed_arguments_are_added_and_win():
    assert adapt(verl, threshold=0.9)(PROMPT, "4")[4] == {"threshold": 0.9}
    assert adapt(verl_async, ground_truth="5")(PROMPT, "4")[2] == "5"
    with pytest.raises(ValueError, match="threshold"):
        adapt(ours, threshold=0.9)


def test_a_function_may_take_what_it_needs_and_gets_its_own_extra():
    def spoils(completion, extra, **rest):
        extra["n"] = None
        return sorted(rest)

    assert adapt(spoils)(PROMPT, "4") == ["answer", "prompt"]
    assert PROMPT.extra == {"n": 3}


def test_calls_of_an_async_function_share_one_event_loop():

    async def loop(prompt, completion, answer, extra):
        return asyncio.get_running_loop()

    rate = adapt(loop)
    first = rate(PROMPT, "4")
    assert rate(PROMPT, "4") is first
    first.close()


@pytest.mark.parametrize(
    "function",
    [
        lambda: 0.0,
        lambda completion: 0.0,
        lambda prompt, completion, answer: 0.0,
        lambda a, b, c, d: 0.0,
        lambda *args, **kwargs: 0.0,
        lambda prompt, completion, answer, extra, /: 0.0,
        lambda prompt, completion, answer, extra, tokenizer: 0.0,
        lambda data_source, solution_str, ground_truth: 0.0,
    ],
)
def test_another_signature_is_a_value_error_that_says_what_is_expected(function):
    with pytest.raises(ValueError, match=r"\(prompt, completion, answer, extra\) or verl's .*solution_str"):
        adapt(function)


# ── read ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.0, 0.0), (0, 0.0), (False, 0.0), (True, 1.0), (-3, -3.0), (17.5, 17.5),
        (Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5),
        (np.float32(0.5), 0.5), (np.float64(0.5), 0.5), (np.longdouble(0.5), 0.5), (np.int8(-2), -2.0),
        (np.bool_(True), 1.0), (np.array(0.25), 0.25), (np.array([[2]]), 2.0),
        (torch.tensor(0.5), 0.5), (torch.tensor([1.0], requires_grad=True), 1.0), (torch.tensor(True), 1.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ],
)  # fmt: skip
def test_a_finite_number_is_a_score_whatever_its_type_and_size(value, score):
    outcome, metrics = read(value)
    assert outcome == Score(score) and metrics == {}
    assert type(outcome.value) is float
    assert read({"score": value}) == (Score(score), {})


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (math.nan, "nan"), (np.float32("nan"), "nan"), (torch.tensor(math.nan), "nan"),
        (math.inf, "inf"), (-math.inf, "inf"), (10**400, "inf"), (np.float16("inf"), "inf"),
        ([1.0], "list"), ((1.0, {}), "list"), ([], "list"),
        ("1.0", "string"), ("", "string"), (np.str_("1"), "string"), (np.array(["1"]), "string"),
        (1j, "complex"), (np.complex64(1), "complex"),
        (np.zeros(2), "not_one_element"), (torch.zeros(0), "not_one_element"),
        (torch.ones(2, 2), "not_one_element"),
        (object(), "not_a_number"), (lambda: 1, "not_a_number"), (b"1", "not_a_number"),
    ],
)  # fmt: skip
def test_anything_else_is_a_parse_failure_that_says_which(value, status):
    for outcome, _ in (read(value), read({"score": value})):
        assert isinstance(outcome, ParseFail) and outcome.status == status


def test_a_dict_without_score_is_a_parse_failure_that_keeps_its_metrics():
    outcome, metrics = read({"acc": 1})
    assert isinstance(outcome, ParseFail) and outcome.status == "no_score" and metrics == {"acc": 1.0}
    assert read({})[0] == ParseFail("no_score", "{}")
    assert read({"score": {"score": 1.0}})[0] == ParseFail("not_a_number", "{'score': 1.0}")


def test_none_abstains_with_the_metrics_it_has():
    assert isinstance(read(None)[0], Abstain)
    outcome, metrics = read({"score": None, "format": 0.0})
    assert isinstance(outcome, Abstain) and metrics == {"format": 0.0}


def test_the_other_keys_are_metrics_of_plain_types():
    value = {
        "score": np.float32(1), "acc": True, "n": np.int64(3), "nan": math.nan, "pred": "x" * 9999,
        "none": None, "list": list(range(99)), 7: np.bool_(False), "big": 10**400, "f": np.float64(2),
    }  # fmt: skip
    outcome, metrics = read(value)
    assert outcome == Score(1.0)
    assert math.isnan(metrics.pop("nan"))
    assert metrics.pop("pred") == "x" * 4096
    assert metrics.pop("list") == "[0, 1, 2, 3, 4, 5, ...]"
    assert str(metrics.pop("big")).startswith("1000")
    assert metrics == {"acc": True, "n": 3.0, "7": False, "f": 2.0}
    assert {type(v) for v in metrics.values()} == {bool, float}


# ── union ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_union_has_every_key_and_marks_what_is_missing():
    rows = [{"acc": True}, {}, {"format": 0.5, "acc": False}]
    assert union(rows) == {"acc": [True, None, False], "format": [None, None, 0.5]}
    assert union([]) == {} and union([{}, {}]) == {}
