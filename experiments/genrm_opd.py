"""A judge's reward and two teachers in one objective."""

from rl.config import Config, Data, Loss, Reward, Teacher

CONFIG = Config(
    name="genrm_opd",
    data=Data(tasks=("reverse", "sort")),
    teachers={"reverser": Teacher(keys=("reverse",)), "sorter": Teacher(keys=("sort",))},
    reward=Reward(judge=1.0),
    loss=Loss(distill=0.3),
)
