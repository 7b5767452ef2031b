import pytest

from rl.data import DataError, Stream, make_prompts, read_jsonl
from rl.types import Prompt


class Letters:
    def encode(self, text):
        if "#" in text:
            raise ValueError("unknown character '#'")
        return [ord(c) for c in text]


def rows(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return read_jsonl(path)


def load(tmp_path, *lines, needs_answer=None, keys=None, max_prompt=10):
    return make_prompts(
        rows(tmp_path, *lines), Letters(), needs_answer=needs_answer, keys=keys, max_prompt=max_prompt
    )


def test_prompts_carry_answer_key_and_the_rest(tmp_path):
    (p,) = load(tmp_path, '{"prompt": "ab", "answer": 7, "key": "k", "level": 3}', "")
    assert p == Prompt(ids=(97, 98), text="ab", answer="7", key="k", extra={"level": 3})


def test_gsm8k_is_read_as_it_ships(tmp_path):
    shipped = r'{"question": "1 + 1?", "answer": "It is 1+1=<<1+1=2>>2\n#### 2"}'
    keyed = '{"question": "b", "answer": "#### 2", "key": "k"}'
    both = '{"prompt": "c", "question": "d"}'
    first, second, third = rows(tmp_path, shipped, keyed, both)
    assert (first.text, first.answer, first.key) == ("1 + 1?", "It is 1+1=<<1+1=2>>2\n#### 2", "gsm8k")
    assert first.extra == {} and second.key == "k"
    assert (third.text, third.key, third.extra) == ("c", "", {"question": "d"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"prompts\.jsonl:2: not JSON"),
        ("[1]", r":2: expected an object"),
        ('{"answer": "x"}', r':2: "prompt" must be a text'),
        ('{"prompt": ""}', r':2: "prompt" must be a text'),
        ('{"question": ""}', r':2: "question" must be a text'),
        ('{"prompt": "a", "answer": [1]}', r':2: "answer" must be'),
        ('{"prompt": "#"}', r":2: unknown character"),
        ('{"prompt": "aaaaaaaaaaaa"}', r":2: the prompt has 12 tokens"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path, '{"prompt": "fine"}', line)


def test_a_rule_without_an_answer_and_a_key_without_a_teacher(tmp_path):
    with pytest.raises(DataError, match=r":1: the prompt has no answer, and reward\.rule needs one"):
        load(tmp_path, '{"prompt": "a"}', needs_answer="reward.rule")
    with pytest.raises(DataError, match=r":1: key 'b' has no teacher; the teachers serve \['a'\]"):
        load(tmp_path, '{"prompt": "a", "key": "b"}', keys=["a"])


def test_no_file_and_no_prompts(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="no prompts"):
        rows(tmp_path, "")


def test_o081_the_order_is_a_function_of_seed_and_ordinal_and_every_epoch_has_every_prompt():
    prompts = [Prompt(ids=(i,), text=str(i)) for i in range(48)]
    stream, again = Stream(prompts, seed=3), Stream(prompts, seed=3)
    order = [stream[i].text for i in range(144)]
    assert [again[i].text for i in reversed(range(144))] == order[::-1]
    for epoch in range(3):
        assert sorted(order[48 * epoch : 48 * (epoch + 1)], key=int) == [str(i) for i in range(48)]
    assert order[:48] != order[48:96]
    assert [Stream(prompts, seed=4)[i].text for i in range(48)] != order[:48]
