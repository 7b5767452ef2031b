"""A judge that can be fooled: it repeats a verdict that the answer gives itself, and the policy finds
out.

With `--judge.neutralise True` such verdicts are rewritten before the judge reads them, and the same run
learns to reverse digits instead.
"""

from rl.config import Config, Judge, Policy, Reward, Trainer

CONFIG = Config(
    name="reward_hacking",
    policy=Policy(model="demo-hinted", warm_accuracy=0.02),
    judge=Judge(model="demo-gullible"),
    reward=Reward(judge=1.0),
    trainer=Trainer(steps=100),
)
