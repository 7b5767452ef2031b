import json
import subprocess
import sys

import numpy as np
import pytest

from rl.data.rows import DataError, make_row, read_rows, readable

GSM8K = {"question": "1 + 1?", "answer": "It is 1+1=<<1+1=2>>2\n#### 2"}
TURNS = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1 + 1?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": TURNS,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7, "answer": "#### 2"},
}


def write(tmp_path, rows, suffix):
    path = tmp_path / f"prompts{suffix}"
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


FORMATS = pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])


@FORMATS
def test_a_row_is_the_same_in_every_format(tmp_path, suffix):
    plain = {"prompt": "é", "answer": 7, "key": "k", "level": 3, "tags": ["a", "b"]}
    (row,) = read_rows(write(tmp_path, [plain], suffix))
    assert (row.text, row.answer, row.key, row.messages) == ("é", "7", "k", ())
    assert row.extra == {"level": 3, "tags": ["a", "b"]}
    (row,) = read_rows(write(tmp_path, [VERL], suffix))
    assert (row.text, row.answer, row.key) == ("1 + 1?", "2", "openai/gsm8k")
    assert row.messages == tuple(TURNS)
    assert row.extra == {
        "ability": "math",
        "reward_model": {"style": "rule"},
        "split": "train",
        "index": 7,
        "answer": "#### 2",
    }
    (row,) = read_rows(write(tmp_path, [GSM8K], suffix))
    assert (row.text, row.answer, row.key) == (GSM8K["question"], GSM8K["answer"], "gsm8k")


@FORMATS
def test_an_answer_that_is_missing_is_none(tmp_path, suffix):
    rows = read_rows(write(tmp_path, [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": 3}], suffix))
    assert [row.answer for row in rows] == [None, "3"]


@pytest.mark.parametrize(
    ("value", "answer"),
    [(float("nan"), None), (np.float64("nan"), None), (18.0, "18"), (0.5, "0.5"), (-0.0, "0"), (0, "0"),
     ("", ""), (np.int64(3), "3"), (np.str_("x"), "x"), (1e300, "1e+300")],
)  # fmt: skip
def test_an_answer_is_a_text_and_a_whole_float_an_integer(value, answer):
    assert make_row({"prompt": "a", "answer": value}, "here").answer == answer


def test_numpy_becomes_python():
    messages = np.array([{"role": "user", "content": "a"}], dtype=object)
    columns = {"n": np.int64(2), "v": np.ones((1, 2)), "d": {"x": np.float32(0.5)}}
    row = make_row({"prompt": messages, **columns}, "here")
    assert row.messages == ({"role": "user", "content": "a"},)
    assert row.extra == {"n": 2, "v": [[1.0, 1.0]], "d": {"x": 0.5}}
    assert type(row.extra["n"]) is int and type(row.extra["v"]) is list


def test_no_argument_is_changed():
    before = json.dumps(VERL)
    make_row(VERL, "here")
    assert json.dumps(VERL) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": "3"}, r'here: "answer" is \'3\' but "reward_model": .* is \'2\'; give one of them'),
        ({"key": "k"}, r'"key" is \'k\' but "data_source" is'),
        ({"index": 8}, r'"index" is 8 but "extra_info": \{"index"\} is 7'),
        (
            {"reward_model": {"ground_truth": {"target": ["2"]}}},
            r'"ground_truth"\} must be a text or a number',
        ),
        ({"answer": True}, r'"answer" must be a text or a number, got bool'),
        ({"data_source": 3}, r'"data_source" must be a text, got 3'),
    ],
)
def test_what_a_row_says_twice_and_differently_or_wrongly_is_an_error(changes, message):
    with pytest.raises(DataError, match=message):
        make_row({**VERL, **changes}, "here")


def test_what_a_row_says_twice_alike_is_fine():
    row = make_row({**VERL, "answer": 2, "key": "openai/gsm8k", "index": 7}, "here")
    assert (row.answer, row.key, row.extra["index"]) == ("2", "openai/gsm8k", 7)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "a text or a list of chat messages, not empty, got \\[\\]"),
        (None, "got None"),
        (7, "got 7"),
        ("  \n", "a text that is not empty"),
        (["hi"], "message 0 of 'prompt': expected"),
        (
            [*TURNS, {"role": "bot", "content": "a"}],
            "message 2 of 'prompt': role must be one of system, .*'bot'",
        ),
        ([{"content": "a"}], "role must be one of .*got None"),
        ([{"role": "user", "content": ""}], "message 0 .*content must be a text that is not empty"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content must be a text"),
        ([{"role": "user", "content": "a", "tool_calls": ["f"]}], "only role and content .* tool_calls"),
        ([*TURNS, {"role": "assistant", "content": "2"}], "ends with the assistant's message"),
    ],
)
def test_a_prompt_that_is_none_is_named_by_its_place(prompt, message):
    with pytest.raises(DataError, match="here: .*" + message):
        make_row({"prompt": prompt}, "here")


def test_columns_that_parquet_fills_with_none_are_no_fields_of_a_message():
    row = make_row({"prompt": [{"role": "user", "content": "a", "tool_calls": None}]}, "here")
    assert row.messages == ({"role": "user", "content": "a"},)


def test_a_judge_reads_the_users_message_or_every_turn():
    assert readable(TURNS) == "1 + 1?"
    more = [*TURNS, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    assert readable(more) == "system: Count.\n\nuser: 1 + 1?\n\nassistant: 2\n\nuser: Sure?"


def test_places_are_lines_of_text_and_rows_of_parquet(tmp_path):
    bad = [{"prompt": "a"}, {"prompt": " "}]
    for suffix, place in ((".jsonl", r"prompts\.jsonl:2: "), (".parquet", r"prompts\.parquet row 1: ")):
        with pytest.raises(DataError, match=place):
            read_rows(write(tmp_path, bad, suffix))


def test_files_that_cannot_be_read_are_said(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="expected one of .jsonl, .json, .parquet, got "):
        read_rows(tmp_path)
    with pytest.raises(DataError, match="there is no file"):
        read_rows(tmp_path / "none.parquet")
    (tmp_path / "x.parquet").write_text("{}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        read_rows(tmp_path / "x.parquet")
    monkeypatch.undo()
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="not a Parquet file"):
        read_rows(tmp_path / "x.parquet")


def test_reading_text_needs_neither_numpy_nor_pyarrow():
    code = "import sys, rl.data.rows; assert not {'numpy', 'pyarrow', 'reasoning_gym'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
