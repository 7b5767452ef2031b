import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from losses import genrm, genrm_prompt
from models.tokenizer import load_tokenizer
from rl.config import Judge, Sampler
from rl.demo import words
from rl.demo.codec import BYTES
from rl.demo.critic import FULL, LABEL, read_score
from rl.rewards.combine import RULES
from rl.types import Prompt, Score


def cases(n: int) -> list[tuple[str, int, str]]:
    """Problem, its answer, a candidate."""
    rng = random.Random(0)
    drawn = [words.problem(rng, i % 3) for i in range(n)]
    return [(text, right, words.draw_candidate(rng)) for text, right in drawn]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_its_bytes_and_comes_back(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids == BYTES.tokenizer.encode(text) == [2 + byte for byte in text.encode()]
    assert BYTES.decode(ids) == BYTES.tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["", "\x00\x01\x1f\x7f", " a  b \n\t\r\n", "😀👩‍👩‍👧", "é e\u0301", "<eos><pad>", "ÿ\ufeff\u200b"]
)
def test_control_characters_emoji_and_spelled_out_special_tokens_come_back(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text
    assert BYTES.tokenizer.encode(text) == BYTES.encode(text)


def test_a_saved_byte_tokenizer_reads_and_writes_the_same(tmp_path: Path) -> None:
    BYTES.tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "Zoë buys 3 🍎\n\x00 for $1.50 <eos>"
    assert loaded.fingerprint() == BYTES.tokenizer.fingerprint()
    assert loaded.encode(text) == BYTES.encode(text) and loaded.decode(BYTES.encode(text)) == text


def test_what_stands_behind_the_end_of_text_is_not_read() -> None:
    assert BYTES.decode([*BYTES.encode("#### 12"), 1, *BYTES.encode("3"), 0]) == "#### 12"


def test_half_a_character_is_a_replacement_character_that_can_be_encoded_again() -> None:
    text = BYTES.decode(BYTES.encode("é")[:1])
    assert text == "\ufffd" and BYTES.decode(BYTES.encode(text)) == text


@pytest.mark.parametrize(
    "candidate, value",
    [("#### 12", 5), ("12", 3), ("#### 12.", 2), ("####12", 2), ("### 12", 2), ("It is 12", 2), ("twelve", 0),
     ("", 0), ("#### ", 0), ("#### ١٢", 0), ("#### 12\n", 2)],
)  # fmt: skip
def test_the_score_of_forms_worked_out_by_hand(candidate: str, value: int) -> None:
    assert words.score(candidate) == value


def test_the_parser_that_runs_use_reads_every_score() -> None:
    for _, _, candidate in cases(500):
        said = words.critique(candidate)
        read = genrm.parse(said, format="label", label=LABEL, lo=0, hi=FULL, finish_reason="stop")
        assert read.score == words.score(candidate) == read_score(said)


def test_what_the_judge_learns_to_read_is_what_the_default_template_renders() -> None:
    for text, _, candidate in cases(200):
        read = genrm_prompt.render(Judge().template, {"problem": text, "candidate": candidate},
                                   neutralise=False, delimiter=None)  # fmt: skip
        assert read == words.judge_prompt(text, candidate)


def test_the_gsm8k_rule_reads_every_answer_that_a_policy_learns_from() -> None:
    rng = random.Random(0)
    for text, right, _ in cases(500):
        prompt = Prompt(ids=(), text=text, answer=f"#### {right}")
        assert RULES["gsm8k"](prompt, words.draw_answer(right, rng)) == Score(1.0)


def test_answers_fit_into_the_default_number_of_tokens_with_their_end() -> None:
    answers = [words.answer(right) for _, right, _ in cases(2000)]
    assert sum(len(BYTES.encode(text)) < Sampler().max_tokens for text in answers) / len(answers) > 0.97


def test_candidates_have_every_score_and_a_policys_answers_are_not_all_in_form() -> None:
    rng = random.Random(0)
    scores = [words.score(candidate) for _, _, candidate in cases(2000)]
    assert all(scores.count(value) > 100 for value in (0, words.OTHER, words.BARE, words.FORM))
    answers = [words.score(words.draw_answer(right, rng)) for _, right, _ in cases(2000)]
    assert 0.5 < answers.count(words.FORM) / len(answers) < 0.7


def test_words_and_codec_do_not_import_torch() -> None:
    code = "import sys, rl.demo.words, rl.demo.codec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
