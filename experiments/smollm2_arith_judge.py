"""smollm2_arith rewarded by a generative judge: SmolLM2 too, which a short supervised run taught to judge.

The first run makes the judge, from right and wrong answers that are made up too (rl/made/judged.py). The
rule's verdict is not used for training; it is the ground truth beside the judge's score.

Two judges, as one, who writes 21 tokens about each of 1024 answers a step, was never idle (docs/results.md).
"""

from dataclasses import replace

from experiments.smollm2_arith import CONFIG as ARITH
from rl.config import Engine, Judge, Reward

CONFIG = replace(
    ARITH,
    name="smollm2_arith_judge",
    sampler=replace(ARITH.sampler, engine=Engine(kind="vllm", gpus=0.3)),
    judge=Judge(
        model="arithmetic-judge",
        chat=True,
        template="{problem}\n\nAnswer: {candidate}\n\nIs the last number of the answer right?",
        format="yes_no",
        neutralise=True,
        temperature=0.0,
        max_tokens=40,
        slots=512,
        replicas=2,
        engine=Engine(kind="vllm", gpus=0.15),
    ),
    reward=Reward(judge=1.0, rule_name="gsm8k"),
    trainer=replace(ARITH.trainer, gpus=0.3),
)
