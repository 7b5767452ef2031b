"""genrm_grpo with η = 0: every token is trained under the weights that sampled it."""

from rl.config import Config, Reward, Staleness

CONFIG = Config(name="sync_grpo", reward=Reward(judge=1.0), staleness=Staleness(max_age=0))
