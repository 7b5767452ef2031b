"""The rule of reasoning-gym's prompts: each task's own scorer decides."""

from __future__ import annotations

from rl.data.gym import GymError, gym
from rl.types import Abstain, InfraFail, Outcome, ParseFail, Prompt, Score

SECONDS = 2.0  # for one answer: some scorers evaluate what is written in it


def reasoning_gym(prompt: Prompt, text: str) -> Outcome:
    """The score in [0, 1] that the prompt's task gives to the final answer of the text; many give partial
    credit.

    Abstains for a prompt that is not reasoning-gym's (rl/data/rows_gym.py). A scorer that raises on the
    answer, or does not end, is an InfraFail; a score out of [0, 1] a ParseFail.
    """
    origin = prompt.extra.get("reasoning_gym")
    if origin is None:
        return Abstain("the prompt is not one of reasoning-gym's")
    try:
        score = gym().score(**origin, answer=final_answer(text), seconds=SECONDS)
    except GymError as error:
        return InfraFail(str(error))
    return Score(score) if 0.0 <= score <= 1.0 else ParseFail("out_of_bounds", f"{origin['task']}: {score}")


def final_answer(text: str) -> str:
    """What stands between the last <answer> and </answer> behind the reasoning, as the package's own prompts
    ask for; without these the whole text behind the reasoning."""
    said = text.rpartition("</think>")[2]
    end = said.rfind("</answer>")
    start = said.rfind("<answer>", 0, max(end, 0))
    return (said[start + len("<answer>") : end] if start >= 0 else said).strip()
