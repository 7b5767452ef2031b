import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tokenizer import char_tokenizer, load_tokenizer

ALPHABET = "0123456789+=<>eos \n'é"
TOKENIZER = char_tokenizer(ALPHABET)


@given(st.text(ALPHABET))
def test_one_token_per_character_and_back(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_ids_are_pad_eos_then_the_alphabet():
    assert (TOKENIZER.pad_id, TOKENIZER.eos_ids, TOKENIZER.bos_id) == (0, (1,), None)
    assert TOKENIZER.encode(ALPHABET) == list(range(2, 2 + len(ALPHABET)))
    assert TOKENIZER.vocab_size == 2 + len(ALPHABET)


def test_unknown_characters_are_named():
    with pytest.raises(ValueError, match="'x' at 2"):
        TOKENIZER.encode("12x")


def test_a_spelled_out_special_token_is_text_unless_asked_for():
    assert TOKENIZER.encode("1<eos>") == [TOKENIZER.encode(c)[0] for c in "1<eos>"]
    assert TOKENIZER.encode("1<eos>", parse_special=True) == [3, 1]


def test_a_pickled_tokenizer_is_the_same():
    copy = pickle.loads(pickle.dumps(TOKENIZER))
    assert copy.fingerprint() == TOKENIZER.fingerprint()
    assert copy.encode("1<eos>") == TOKENIZER.encode("1<eos>")


def test_decode_can_show_special_tokens():
    assert TOKENIZER.decode([3, 1, 0]) == "1"
    assert TOKENIZER.decode([3, 1, 0], skip_special=False) == "1<eos><pad>"


def test_a_folder_gives_back_the_same_tokenizer(tmp_path):
    TOKENIZER.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint() == TOKENIZER.fingerprint()
    assert loaded.encode("1 + 2") == TOKENIZER.encode("1 + 2")
    assert (loaded.eos_ids, loaded.pad_id) == (TOKENIZER.eos_ids, TOKENIZER.pad_id)
    with pytest.raises(ValueError, match="'x' at 0"):
        loaded.encode("x")


def test_a_folder_s_own_files_are_written_back_as_they_were(tmp_path):
    TOKENIZER.save(tmp_path / "a")
    own = {
        "tokenizer.json": (tmp_path / "a/tokenizer.json").read_bytes() + b" \r\n",
        "tokenizer_config.json": b'{"eos_token": "<eos>", "chat_template": "t", "unknown": 1}',
        "generation_config.json": b"{}",
        "additional_chat_templates/tool_use.jinja": b"tools",
        "LICENSE.txt": "©".encode(),
    }
    (tmp_path / "a/additional_chat_templates").mkdir()
    for name, data in own.items():
        (tmp_path / "a" / name).write_bytes(data)
    (tmp_path / "a/README.md").write_text("of other weights")
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(tmp_path / "a")))
    tokenizer.save(tmp_path / "b")
    files = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "b").as_posix(): path.read_bytes() for path in files} == own


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_without_a_tokenizer_is_refused_by_what_is_missing(tmp_path, name):
    TOKENIZER.save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {name}"):
        load_tokenizer(tmp_path)


def test_fingerprint_sees_order_and_special_tokens():
    ab = char_tokenizer("ab")
    others = [char_tokenizer("ba"), char_tokenizer("ab", eos="<end>"), char_tokenizer("ab", bos="<bos>")]
    assert len({t.fingerprint() for t in [ab, *others]}) == 4
    assert char_tokenizer("ab").fingerprint() == ab.fingerprint()


def test_a_repeated_character_is_refused():
    with pytest.raises(ValueError, match="twice"):
        char_tokenizer("aba")
