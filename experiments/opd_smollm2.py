"""On-policy distillation of two SmolLM2 into one: each teacher knows one skill, the student neither.

benchmarks/opd_smollm2.sh trains the teachers first; a teacher's model is its run's checkpoint:
--teachers.adder.model runs/.../checkpoints/.../policy
"""

from dataclasses import replace

from experiments.smollm2_arith import CONFIG as ARITH
from rl.config import Engine, Loss, Reward, Teacher

ENGINE = Engine(kind="vllm", gpus=0.2)
CONFIG = replace(
    ARITH,
    name="opd_smollm2",
    sampler=replace(ARITH.sampler, samples=4, engine=Engine(kind="vllm", gpus=0.3)),
    teachers={
        "adder": Teacher(model="adder", keys=("addition",), engine=ENGINE),
        "subtracter": Teacher(model="subtracter", keys=("subtraction",), engine=ENGINE),
    },
    reward=Reward(rule_name="gsm8k"),
    loss=Loss(policy=0.0, distill=1.0, distill_top_k=16),
    trainer=replace(ARITH.trainer, steps=100, lr=2e-5, gpus=0.3),
)
