"""GRPO on a verifiable reward: the answer is right or it is not."""

from rl.config import Config, Reward

CONFIG = Config(name="rule_grpo", reward=Reward(rule=1.0))
