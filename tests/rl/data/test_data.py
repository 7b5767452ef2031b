import json
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import processors

from models.chat import ChatTemplate
from models.tokenizer import Tokenizer, byte_tokenizer
from rl.data.prompts import Counts, DataError, Row, Stream, fingerprint, make_prompts, read_rows
from rl.types import Prompt

TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}a{% endif %}"""


def make_tokenizer(template=TEMPLATE) -> Tokenizer:
    """A byte a token; "<bos>" stands before every text."""
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer(bos="<bos>")._json)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
    )
    chat = None if template is None else ChatTemplate(template)
    return Tokenizer(backend, eos="<eos>", pad="<pad>", bos="<bos>", template=chat)


TOKENIZER = make_tokenizer()


class Letters:
    first_ids = ()

    def encode(self, text):
        if "#" in text:
            raise ValueError("unknown character '#'")
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def chat(self, messages):
        raise ValueError("no chat template")


def rows(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return read_rows(path)


def load(tmp_path, *lines, needs_answer=None, keys=None, max_prompt=10):
    prompts, _ = make_prompts(
        rows(tmp_path, *lines), Letters(), needs_answer=needs_answer, keys=keys, max_prompt=max_prompt
    )
    return prompts


def make(*given: Row, encoder=TOKENIZER, max_prompt=1000, **settings):
    return make_prompts(given, encoder, needs_answer=None, keys=None, max_prompt=max_prompt, **settings)


def plain(text, **fields):
    return Row(f"line of {text[:9]}", text, None, "", {}, **fields)


def chat(*contents, text="?"):
    roles = ("system", "user", "assistant", "user")[-len(contents) :] if len(contents) > 1 else ("user",)
    turns = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=True))
    return plain(text, messages=turns)


def shown(prompt: Prompt) -> str:
    return TOKENIZER.decode(prompt.ids, skip_special=False)


def test_prompts_carry_answer_key_and_the_rest(tmp_path):
    (p,) = load(tmp_path, '{"prompt": "ab", "answer": 7, "key": "k", "level": 3}', needs_answer="")
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
        ('{"prompt": "a", "key": 1}', r':2: "key" must be a text'),
        ('{"prompt": "#"}', r":2: unknown character"),
        ('{"prompt": "aaaaaaaaaaaa"}', r":2: the prompt has 12 tokens"),
        ('{"prompt": [{"role": "user", "content": "a"}]}', r":2: no chat template"),
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


def test_o100_a_template_that_needs_a_reference_refuses_a_row_without_one_and_names_its_fields(tmp_path):
    fine = '{"prompt": "a", "answer": "b", "colour": "red"}'
    assert load(tmp_path, fine, needs_answer="judge.template")[0].extra == {"colour": "red"}
    message = (
        r":2: the prompt has no answer, and judge\.template needs one; its other fields: answers, colour"
    )
    with pytest.raises(DataError, match=message):
        load(tmp_path, fine, '{"prompt": "a", "answers": "b", "colour": 1}', needs_answer="judge.template")
    with pytest.raises(DataError, match=r":1: .* judge\.template needs one$"):
        load(tmp_path, '{"prompt": "a", "answer": null}', needs_answer="judge.template")


def test_an_empty_answer_is_an_answer(tmp_path):
    assert load(tmp_path, '{"prompt": "a", "answer": ""}', needs_answer="reward.rule")[0].answer == ""


def test_no_file_and_no_prompts(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        read_rows(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="no prompts"):
        rows(tmp_path, "")


def test_o099_plain_and_chat_prompts_of_a_bos_model_begin_with_one_bos():
    prompts, counts = make(plain("12"), chat("12"), chat("s", "12", "14", "16"))
    assert [shown(p) for p in prompts] == [
        "<bos>12",
        "<bos>u12<eos>a",
        "<bos>ss<eos>u12<eos>a14<eos>u16<eos>a",
    ]
    assert counts == Counts(used=3, cut=0, dropped=0)


def test_chat_always_and_never():
    (p,), _ = make(plain("12"), chat="always")
    assert shown(p) == "<bos>u12<eos>a"
    (p,), _ = make(chat("12", text="12"), chat="never")
    assert shown(p) == "<bos>12"
    with pytest.raises(
        DataError, match=r"line of \?: 2 chat messages are no plain prompt, and data\.chat is never"
    ):
        make(plain("?", messages=chat("s", "12", "14", "16").messages[:2]), chat="never")


@pytest.mark.parametrize("settings", [{"chat": "always"}, {}])
def test_a_chat_without_a_template_is_refused_with_its_place(settings):
    row = plain("12") if settings else chat("12")
    with pytest.raises(DataError, match=r"line of .*: .*no chat template"):
        make(row, encoder=make_tokenizer(None), **settings)


def test_what_a_row_spells_ends_no_turn():
    (p,), _ = make(chat("1<eos>2<bos>"))
    assert shown(p) == "<bos>u1<eos>2<bos><eos>a" and len(p.ids) == len("u1<eos>2<bos>a") + 2


# ── Too long ──────────────────────────────────────────────────────────────────────────────────────


def test_too_long_is_an_error_that_names_the_row_and_the_way_out():
    fits, _ = make(plain("1234"), max_prompt=5)
    assert len(fits[0].ids) == 5
    with pytest.raises(DataError, match=r"line of 12345: the prompt has 6 tokens; 1 to 5 .* data\.too_long"):
        make(plain("12345"), max_prompt=5)


def test_dropped_prompts_are_counted_and_dropping_all_is_an_error():
    prompts, counts = make(plain("1"), plain("123456"), chat("1234"), max_prompt=5, too_long="drop")
    assert [p.text for p in prompts] == ["1"] and counts == Counts(used=1, cut=0, dropped=2)
    with pytest.raises(DataError, match="all 2 prompts have more than 5 tokens"):
        make(plain("12345"), plain("123456"), max_prompt=5, too_long="drop")


@pytest.mark.parametrize(("side", "left"), [("truncate_left", "<bos>3456"), ("truncate_right", "<bos>1234")])
def test_a_plain_prompt_is_cut_at_its_side_keeps_its_bos_and_its_text(side, left):
    prompts, counts = make(plain("1"), plain("123456"), max_prompt=5, too_long=side)
    assert [shown(p) for p in prompts] == ["<bos>1", left]
    assert prompts[1].text == "123456"  # a judge judges the whole problem
    assert counts == Counts(used=2, cut=1, dropped=0)


@pytest.mark.parametrize(("side", "left"), [("truncate_left", "34"), ("truncate_right", "12")])
def test_a_chat_is_cut_in_its_last_user_message_and_its_template_stays_whole(side, left):
    row = chat("s", "56", "78", "1234", text="whole")
    n = len(make(row)[0][0].ids)
    (p,), counts = make(row, max_prompt=n - 2, too_long=side)
    assert shown(p) == f"<bos>ss<eos>u56<eos>a78<eos>u{left}<eos>a"
    assert p.text == "whole" and counts == Counts(used=1, cut=1, dropped=0)


def test_a_chat_whose_other_messages_are_too_long_already_is_refused():
    with pytest.raises(DataError, match="more than 17 tokens even without its last user message"):
        make(chat("s" * 9, "12", "34", "56"), max_prompt=17, too_long="truncate_left")
    system = plain("?", messages=({"role": "system", "content": "123456789"},))
    with pytest.raises(DataError, match="no user message that could be cut"):
        make(system, max_prompt=9, too_long="truncate_right")
    with pytest.raises(DataError, match="the 1 tokens that begin every prompt leave no room in 1"):
        make(plain("12"), max_prompt=1, too_long="truncate_left")


@pytest.mark.parametrize("side", ["truncate_left", "truncate_right"])
@pytest.mark.parametrize("n", range(8, 15))
def test_a_cut_through_a_character_leaves_no_half_of_it(side, n):
    (p,), _ = make(chat("é人é人é人"), max_prompt=n, too_long=side)
    assert n - 2 <= len(p.ids) <= n and "\ufffd" not in shown(p)


# ── The order ─────────────────────────────────────────────────────────────────────────────────────


def test_o081_the_order_is_a_function_of_seed_and_ordinal_and_every_epoch_has_every_prompt():
    prompts = [Prompt(ids=(i,), text=str(i)) for i in range(48)]
    stream, again = Stream(prompts, seed=3), Stream(prompts, seed=3)
    order = [stream[i].text for i in range(144)]
    assert [again[i].text for i in reversed(range(144))] == order[::-1]
    for epoch in range(3):
        assert sorted(order[48 * epoch : 48 * (epoch + 1)], key=int) == [str(i) for i in range(48)]
    assert order[:48] != order[48:96]
    assert [Stream(prompts, seed=4)[i].text for i in range(48)] != order[:48]


def test_the_position_is_the_ordinal_another_process_goes_on_where_this_one_stopped():
    prompts = [Prompt(ids=(i,), text=str(i)) for i in range(7)]
    code = (
        "from rl.data.prompts import Stream\nfrom rl.types import Prompt\n"
        "s = Stream([Prompt(ids=(i,), text=str(i)) for i in range(7)], seed=5)\n"
        "print(*(s[i].text for i in range(10, 30)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    stream = Stream(prompts, seed=5)
    assert [stream[i].text for i in range(30)][10:] == told.split()


def test_a_changed_file_has_another_fingerprint(tmp_path):
    lines = ['{"prompt": "a", "answer": "1", "key": "k"}', '{"prompt": "b"}', '{"prompt": "c"}']
    first = fingerprint(rows(tmp_path, *lines))
    assert fingerprint(rows(tmp_path, "", *lines)) == first  # the same rows, on other lines
    chats = [json.dumps({"prompt": [{"role": role, "content": "b"}]}) for role in ("user", "system")]
    others = [
        [lines[1], lines[0], lines[2]],
        lines[:2],
        [*lines, lines[2]],
        [lines[0].replace("a", "d", 1), *lines[1:]],
        [lines[0].replace('"1"', '"2"'), *lines[1:]],
        [lines[0].replace('"k"', '"l"'), *lines[1:]],
        [lines[0].replace('"answer": "1", ', ""), *lines[1:]],
        [lines[0], '{"prompt": "b", "answer": ""}', lines[2]],
        [lines[0], chats[0], lines[2]],
        [lines[0], chats[1], lines[2]],
    ]
    found = {fingerprint(rows(tmp_path, *changed)) for changed in others}
    assert len({first, *found}) == 1 + len(others)


def test_o098_the_weight_of_a_prompt_arrives_unchanged_in_every_epoch(tmp_path):
    lines = [f'{{"prompt": "{name}", "weight": {weight}}}' for name, weight in (("a", 1), ("b", 0))]
    stream = Stream(load(tmp_path, *lines), seed=1)
    for ordinal in range(8):
        assert stream[ordinal].weight == {"a": 1, "b": 0}[stream[ordinal].text]
