"""GRPO on the score of a scalar judge: a sequence-classification model whose one logit is the reward."""

from rl.config import Config, Reward

CONFIG = Config(name="disrm_grpo", reward=Reward(scalar=1.0))
