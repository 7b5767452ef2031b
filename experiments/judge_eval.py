"""Nothing is trained: labelled answers are scored by the configured judges and rewards, and compared."""

from rl.config import Config, Reward

RUN = "judge_eval"
CONFIG = Config(name="judge_eval", reward=Reward(judge=1.0))
