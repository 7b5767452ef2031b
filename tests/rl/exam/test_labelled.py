import json
import os
import sys
from pathlib import Path

import pytest

from rl.data.rows import DataError
from rl.demo.tasks import is_correct, split_of
from rl.exam.labelled import GROUP, demo_labelled, read_labelled
from rl.types import Prompt

ROOT = Path(__file__).parents[3]
GSM8K = Path(os.environ.get("GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))


def read(tmp_path, *rows):
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_labelled(path)


OWN = {"prompt": "1 + 1?", "completion": "2", "label": True}


def test_our_own_fields(tmp_path):
    full = OWN | {"answer": 2, "key": "sums", "level": 3}
    one, two = read(tmp_path, full, "", OWN | {"completion": "", "label": 0.25})
    assert one.prompt == Prompt(ids=(), text="1 + 1?", key="sums", answer="2", extra={"level": 3})
    assert (one.text, one.label, one.key) == ("2", 1.0, "sums") and one.where.endswith("answers.jsonl:1")
    assert (two.text, two.label, two.prompt.answer) == ("", 0.25, None) and two.where.endswith(":3")


def test_chat_messages_become_a_text(tmp_path):
    (found,) = read(tmp_path, OWN | {"prompt": [{"role": "user", "content": "1 + 1?"}]})
    assert found.prompt.text == "1 + 1?"


def test_verls_layout_is_read_too(tmp_path):
    verl = {"data_source": "sums", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 7}}
    (found,) = read(tmp_path, OWN | verl)
    assert found.prompt == Prompt(ids=(), text="1 + 1?", key="sums", answer="2", extra={"index": 7})
    assert found.key == "sums"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", ": not JSON"),
        ("[1]", ": expected an object, got list"),
        ({"completion": "2", "label": 1}, '"prompt" must be a text or a list'),
        ({**OWN, "prompt": ""}, '"prompt" must be a text'),
        ({"prompt": "a", "label": 1}, '"completion" must be a text, got None'),
        ({"prompt": "a", "completion": "b"}, '"label" must be true or false'),
        ({**OWN, "label": "yes"}, "got 'yes'"),
        ({**OWN, "label": 7}, "in [0, 1], got 7"),
        ('{"prompt": "a", "completion": "b", "label": NaN}', "got nan"),
        ({**OWN, "answer": ["2"]}, '"answer" must be a text or a number, got list'),
        ({**OWN, "key": 7}, '"key" must be a text, got 7'),
        ({"question": "q", "answer": "#### 2"}, '"completion" must be a text'),  # GSM8K's own problems
        ({"question": "q", "big": {"solution": "s", "is_correct": True}}, '"ground_truth" must be'),
        ({"question": "q", "ground_truth": "2", "big": {"is_correct": True}}, ' big: "solution" must be'),
        (
            {"question": "q", "ground_truth": "2", "big": {"solution": "2", "is_correct": None}},
            ' big: "is_correct" must be true or false',
        ),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, row, message):
    with pytest.raises(DataError) as error:
        read(tmp_path, OWN, row)
    assert f"answers.jsonl:2{message}" in str(error.value) or (
        "answers.jsonl:2: " in str(error.value) and message in str(error.value)
    )


def test_a_missing_or_empty_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no file"):
        read_labelled(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="holds no labelled answers"):
        read(tmp_path, "")


def test_example_solutions_are_one_row_per_model(tmp_path):
    row = {"question": "q", "ground_truth": "A: 2", "small": {"solution": "A: 3", "is_correct": False},
           "big": {"solution": "A: 2", "is_correct": True}}  # fmt: skip
    found = read(tmp_path, row)
    assert [(r.key, r.text, r.label) for r in found] == [("small", "A: 3", 0.0), ("big", "A: 2", 1.0)]
    assert found[0].prompt == found[1].prompt == Prompt(ids=(), text="q", key="gsm8k", answer="A: 2")
    assert found[0].where.endswith("answers.jsonl:1 small")


def test_gsm8ks_example_solutions_as_they_ship():
    path = GSM8K / "example_model_solutions.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}; set GSM8K_DIR to the folder of the GSM8K files")
    rows = read_labelled(path)
    assert len(rows) == 5276 and len({row.key for row in rows}) == 4
    assert all(row.prompt.answer for row in rows) and 1000 < sum(row.label for row in rows) < 4000


def test_parquet_needs_pyarrow_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="needs the package pyarrow"):
        read_labelled(tmp_path / "a.parquet")


def test_parquet_is_read_like_jsonl(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{**OWN, "answer": "2"}, {**OWN, "answer": None}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    one, two = read_labelled(tmp_path / "a.parquet")
    assert one.prompt.answer == "2" and two.prompt.answer is None and two.where.endswith("a.parquet row 1")
    (tmp_path / "b.parquet").write_bytes(b"no table")
    with pytest.raises(DataError, match="not a Parquet file"):
        read_labelled(tmp_path / "b.parquet")


def test_the_demos_answers_are_held_out_and_labelled_by_the_truth():
    rows = demo_labelled(("reverse", "add"), 202, seed=3)
    assert len(rows) == 202 and rows == demo_labelled(("reverse", "add"), 202, seed=3)
    assert rows != demo_labelled(("reverse", "add"), 202, seed=4)
    for row in rows:
        assert row.label == is_correct(row.prompt.text, row.text) and split_of(row.prompt.text) == "held_out"
    assert 0.25 < sum(row.label for row in rows) / 202 < 0.6
    assert {row.key for row in rows} == {"reverse", "add"}
    assert len({row.prompt.text for row in rows[:GROUP]}) == 1
