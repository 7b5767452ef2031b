"""A judge's reward and two teachers in one objective."""

from rl.config import Config, Data, Loss, Reward, Teacher, Trainer

CONFIG = Config(
    name="genrm_opd",
    data=Data(tasks=("reverse", "sort")),
    teachers={"reverser": Teacher(keys=("reverse",)), "sorter": Teacher(keys=("sort",))},
    reward=Reward(judge=1.0),
    loss=Loss(distill=0.3),
    trainer=Trainer(steps=200, lr=1e-3),
)
