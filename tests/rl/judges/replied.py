"""Groups of answers whose judges reply what the test says."""

from dataclasses import replace

from rl.config import Judge, Scalar
from rl.judges.questions import questions, scalar_questions
from rl.judges.verdicts import scalar_verdicts, verdicts
from rl.types import Prompt, Reply, Score, Verdict

PROMPT = Prompt(ids=(1,), text="problem ", answer="4")
TEN = Judge(template="{problem}{candidate}", label="Score:", hi=10.0)
UNIT = replace(TEN, format="json", label="score", hi=1.0)
YES = Judge(template="{problem}{candidate}", format="yes_no")
RUBRIC = Judge(
    template="{candidate} {criterion}", format="rubric", criteria=("a", "b", "c"), points=(2.0, 1.0, -1.0)
)


def judged(cfg: Judge, *said: str | Reply | list[str | Reply]) -> list[Verdict]:
    """What each answer's questions are replied, in order: one reply, or a list."""
    per = [r if isinstance(r, list) else [r] for r in said]
    asks = questions(cfg, PROMPT, [f"answer {i}" for i in range(len(per))], list(range(len(per))))
    replies = [r if isinstance(r, Reply) else Reply(text=r) for of_one in per for r in of_one]
    return verdicts(cfg, asks, replies, len(per))


def outcomes(cfg: Judge, *said):
    return [v.outcome for v in judged(cfg, *said)]


def values(said: list[Verdict]) -> list[float]:
    return [v.outcome.value for v in said if isinstance(v.outcome, Score)]


def scalar(cfg: Scalar, *replies: Reply) -> list[Verdict]:
    asks = scalar_questions(cfg, PROMPT, [str(i) for i in range(len(replies))])
    return scalar_verdicts(cfg, asks, replies, len(replies))
