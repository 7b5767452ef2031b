import json
import os
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest

from rl.rewards.combine import RULES
from rl.rewards.gsm8k import gsm8k, readings, reference
from rl.types import Abstain, Prompt, Score

ROOT = Path(__file__).parents[3]
GSM8K = Path(os.environ.get("GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))
SIDES = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def judge(answer, text, question="How many of the 99 are left?"):
    return gsm8k(Prompt(ids=(1,), text=question, answer=answer), text)


# ── One case, one claim ───────────────────────────────────────────────────────────────────────────


def final(text):
    """The reading of a text that can mean one number at most."""
    found = readings(text)
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("A: 18", "18"),
        ("So 3 + 4 = 7.\n#### 18", "18"),
        ("#### 18 followed by 3 more words", "18"),
        ("#### 18\nChecked 2 times.", "18"),
        ("The answer is 18. That took 3 steps.", "18"),
        ("The final answer to the question is therefore: $18, since 2 * 9 = 18", "18"),
        ("The answer is about 18 dollars for 3 days", "18"),
        ("The answer is 3 * 6 = 18 dollars", "18"),
        ("The answer is n = 36 \\div 2 = 18 for 2 days", "18"),
        ("The answer is 9 / 4 ≈ 2.3, or 2", "2.3"),
        ("\\boxed{\\text{Total} = 20 - 2 = 18}", "18"),
        ("**Final Answer:** **18**", "18"),
        ("**Answer: 18**\n\nSee step 4.", "18"),
        ("Answer:\n18\nfor 5 days", "18"),
        ("A: 9 * 2 = <<9*2=18>>18", "18"),
        ("First \\boxed{5}, no: \\boxed{6}. Done in 3 steps.", "6"),
        ("The answer is 5. Wait, 3 eggs more: the answer is 8.", "8"),
        ("\\boxed{7}\nThe answer is 8.", "8"),
        ("The answer is 8.\n\\boxed{7}", "7"),
        ("#### \\boxed{7}", "7"),
        ("\\boxed{\\boxed{7}} of 9", "7"),
        ("\\[ \\boxed{18} \\] which is 2 more", "18"),
        ("The answer is \\(18\\), not 19", "18"),
        ("<think>The answer is 5? No.</think>She keeps 7.", "7"),
    ],
)
def test_the_last_declaration_comes_before_the_last_number(text, number):
    assert final(text) == Fraction(number)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9 * 2 = 18 dollars per day", "18"),
        ("She can buy no more than 7 apples.", "7"),
        ("The answer is no more than 7.", "7"),
        ("The answer is not 10 but 18", "18"),
        ("#### Step 2: add\n3 + 15 = 18", "18"),
        ("Answer:\n1. She has 3.\n2. So 15 more make 18", "18"),
        ("That is \\boxed{18", "18"),
        ("16-3", "3"),
        ("(8)-5", "5"),
        ("18...5 is glued, and ...5", "5"),
    ],
)
def test_without_a_declaration_the_last_number_counts(text, number):
    assert final(text) == Fraction(number)


@pytest.mark.parametrize(
    "text",
    [
        "3 + 4 = 7. The answer is 5 or 6",
        "7 so #### 5-6",
        "7\nA: 10+8",
        "7 so the answer is 10 + John's age",
        "7\nA: 3 ^ 2",
        "7\n#### 3 / 4 of it",
        "The answer is 5 and 6",
        "7 \\boxed{10 + x}",
        "The answer is 18 dollars to 20 dollars",
        "\\boxed{3 \\text{ or } 4}",
        "\\boxed{x=5, y=6}",
        "7 \\boxed{\\text{no solution}} 5",
        "7 \\boxed{}",
        "She has 7 by then. The answer is 10:30",
        "A: 1.234,50",
    ],
)
def test_a_declaration_that_is_left_open_is_no_number(text):
    assert readings(text) == ()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-5", "-5"),
        ("−5", "-5"),
        ("–5", "-5"),
        ("－５", "-5"),
        ("１２３", "123"),
        ("$-5$", "-5"),
        ("-$1,234.50", "-1234.5"),
        ("-\\$5", "-5"),
        ("$-5", "-5"),
        ("negative 5", "-5"),
        ("$1,234.50.", "1234.5"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        ("1,\\!234", "1234"),
        ("18\\,000", "18000"),
        ("18\u202f000", "18000"),
        ("€5", "5"),
        ("USD 5", "5"),
        ("Rs.5", "5"),
        ("$.50", "1/2"),
        ("1/2", "1/2"),
        ("½", "1/2"),
        ("1½", "3/2"),
        ("1 1/2", "3/2"),
        ("1\\frac12", "3/2"),
        ("-\\dfrac{1}{2}", "-1/2"),
        ("\\frac{1{,}000}{3}", "1000/3"),
        ("5.", "5"),
        ("18.00", "18"),
        ("007", "7"),
        ("50%", "50"),
        ("50\\%", "50"),
        ("18kg", "18"),
        ("18 m²", "18"),
        ("18 \\text{ m}^2", "18"),
        ("18\\text{cm}^{2}", "18"),
        ("18 s^-1", "18"),
        ("1.5e3", "1500"),
        ("2E-2", "1/50"),
        ("5e3kg", "5000"),
        ("1.5 × 10^3", "1500"),
        ("1.5 \\times 10^{3}", "1500"),
        ("1.5×10³", "1500"),
        ("10^3", "1000"),
    ],
)
@pytest.mark.parametrize("frame", ["A: {}", "So: {}", "\\boxed{{{}}}", "The answer is {}"])
def test_how_a_number_is_read(text, number, frame):
    assert final(frame.format(text)) == Fraction(number)


@pytest.mark.parametrize(
    "glued",
    ["10:30", "2024-05-17", "3/4/2024", "1.2.3", "1.234,50", "1,00,000", "1,2,3", "18/0", "5'10", "2^3",
     "B12", "m^2", "m²", "x_1", "1e999999999", "9" * 5000],
)  # fmt: skip
def test_what_is_glued_to_digits_is_read_whole_or_not_at_all(glued):
    assert readings(f"so {glued}") == ()
    assert final(f"18 apples, {glued}") == 18


def test_comparison_is_exact():
    big = 10**40 + 1
    assert judge(str(big), f"#### {big}") == judge(str(big), f"A: {big:,}.0") == Score(1.0)
    assert judge(str(big), f"#### {big - 1}") == judge(str(2**53 + 1), f"#### {2**53}") == Score(0.0)
    assert judge("1/3", "A: 0.3333333333333333") == Score(0.0)
    assert judge("0.5", "A: 1/2") == judge("1/2", "A: .50") == Score(1.0)
    assert judge("0.3", "A: 3/10") == Score(1.0)
    assert judge("1e+20", f"A: {10**20}") == Score(1.0)  # a JSON number, as its text


def test_a_number_in_millions_is_right_in_either_unit():
    assert readings("A: $1.5 million") == (Fraction(3, 2), Fraction(1_500_000))
    for answer, right in (("2", 1.0), ("2000000", 1.0), ("2000", 0.0)):
        assert judge(answer, "The answer is 2 million dollars.") == Score(right)


def test_an_answer_without_a_number_is_wrong_and_the_question_is_not_read():
    for text in ("", "I do not know.", "eighteen", "####", "<think>18</think>", "∞"):
        assert judge("18", text, question="Is it #### 18 or \\boxed{18}? A: 18") == Score(0.0)


def test_the_reference_is_gsm8ks_own_text_or_a_bare_number():
    own = "He has 3 * 6 = <<3*6=18>>18 apples.\nIn 2 days 18.\n#### 1,234"
    assert reference(own) == reference("1234") == reference(" 1,234.0\n") == reference("6 apples\nA: 1234")
    assert reference("#### -5") == -5 and reference("$18") == 18
    assert judge(own, "#### 1234") == Score(1.0) and judge(own, "#### 18") == Score(0.0)


def test_without_a_readable_reference_the_rule_abstains():
    assert isinstance(judge(None, "A: 18"), Abstain)
    for answer in ("", "eighteen", "18 or 19", "#### ", "3 apples\n#### none", "10:30"):
        assert isinstance(judge(answer, "A: 18"), Abstain), answer


def test_the_rule_is_registered():
    assert RULES["gsm8k"] is gsm8k


@pytest.mark.parametrize(
    "unit",
    ["1", "1 ", " ", "1,", "{", "-", "$", "=", "1*", "1=", "\n", "#### ", "####", "answer is ", "answer a ",
     "\\boxed{", "\\boxed{1}", "\\frac{1", "^{", "1 1/", "½", "A:\n", "a b = ", "0.3", "negative "],
)  # fmt: skip
def test_time_is_linear_in_the_length(unit):
    def seconds(repeats):
        text = "The answer is " + unit * repeats
        began = time.process_time()
        readings(text)
        return time.process_time() - began

    seconds(100)
    assert min(seconds(32_000) for _ in range(2)) < 1.0  # quadratic would be minutes


# ── 5,276 model answers with verdicts ─────────────────────────────────────────────────────────────


def read(name):
    if not (GSM8K / name).is_file():
        pytest.skip(f"no {GSM8K / name}; set GSM8K_DIR to the folder of the GSM8K files")
    return [json.loads(line) for line in (GSM8K / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def solutions():
    """(reference text, model answer, verdict) of all."""
    own = {row["question"]: row["answer"] for row in read("test.jsonl")}
    found = [
        (own[row["question"]], row[side]["solution"], row[side]["is_correct"])
        for row in read("example_model_solutions.jsonl")
        for side in SIDES
    ]
    assert len(found) == 5276 and 1000 < sum(correct for *_, correct in found) < 4000
    return found


PLAIN = re.compile(r"-?[\d,]+(?:\.\d+)?")


def group(n):
    whole, dot, rest = n.replace(",", "").partition(".")
    return f"{int(whole):,}{dot}{rest}" if PLAIN.fullmatch(n) else n


def decimals(n):
    return n + ("00" if "." in n else ".00") if PLAIN.fullmatch(n) else n


def dollars(n):
    return "-$" + n[1:] if n.startswith("-") else "$" + n


FULL_WIDTH = str.maketrans("0123456789-.,", "０１２３４５６７８９－．，")
REWRITINGS = {  # what the line "A: n" becomes
    "as shipped": lambda n: f"A: {n}",
    "hashes": lambda n: f"#### {n}",
    "hashes, nothing between": lambda n: f"####{n}",
    "boxed": lambda n: f"\\boxed{{{n}}}",
    "sentence": lambda n: f"The answer is {n}.",
    "sentence, formula": lambda n: f"So the final answer is: ${n}$.",
    "markdown": lambda n: f"**Answer:** **{n}**",
    "separators": lambda n: f"#### {group(n)}",
    "separators, boxed": lambda n: f"\\boxed{{{group(n).replace(',', '{,}')}}}",
    "unit": lambda n: f"A: {n} dollars per day",
    "unit, glued": lambda n: f"#### {n}kg",
    "unit, boxed": lambda n: f"$\\boxed{{{n}\\text{{ m}}^2}}$",
    "percent": lambda n: f"The answer is {n}%.",
    "currency": lambda n: f"#### {dollars(n)}",
    "currency, boxed": lambda n: "\\boxed{" + dollars(n).replace("$", "\\$") + "}",
    "currency and separators": lambda n: f"The answer is {dollars(group(n))}.",
    "currency behind": lambda n: f"A: {n} €",
    "equal decimals": lambda n: f"A: {decimals(n)}",
    "equal decimals, boxed": lambda n: f"\\boxed{{{decimals(group(n))}}}",
    "trailing sentences": lambda n: f"#### {n}\nI checked 3 times, by 10:30 on 2024-05-17. I am 100% sure.",
    "trailing sentences, same line": lambda n: f"The answer is {n}. She does it 7 days a week, so 52 weeks.",
    "trailing sentences, boxed": lambda n: f"\\boxed{{{n}}}. This holds for all 12 months.",
    "Unicode minus": lambda n: f"A: {n.replace('-', '−')}",
    "full width": lambda n: f"#### {n.translate(FULL_WIDTH)}",
    "carriage returns": lambda n: f"\r\nA: {n}\r\n\r\n",
    "an answer taken back": lambda n: f"The answer is 123454321. No:\n#### {n}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REWRITINGS)
def test_the_rule_agrees_with_all_verdicts_however_the_answer_is_written(solutions, name):
    rewrite, changed, wrong = REWRITINGS[name], 0, []
    for answer, text, correct in solutions:
        written, count = re.subn(r"^A: (.*)\Z", lambda m: rewrite(m[1].strip()), text.rstrip(), flags=re.M)
        changed += count
        if judge(answer, written) != Score(float(correct)):
            wrong.append((answer[-20:], written[-80:], correct))
    assert not wrong and changed >= 5260


def test_the_bare_number_and_the_data_sets_own_text_are_the_same_reference(solutions):
    for answer, text, correct in solutions:
        assert judge(answer.rpartition("####")[2].strip(), text) == Score(float(correct))


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_gsm8ks_own_solutions_are_right(name):
    for row in read(name):
        expected = Fraction(row["answer"].rpartition("####")[2].strip().replace(",", ""))
        assert reference(row["answer"]) == expected
        assert judge(row["answer"], row["answer"]) == Score(1.0)
