"""GRPO on the score of a generative judge: five digits reversed, judged digit by digit."""

from rl.config import Config, Reward

CONFIG = Config(name="genrm_grpo", reward=Reward(judge=1.0))
