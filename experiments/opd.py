"""On-policy distillation: one student learns two skills from two teachers, each asked for the prompts of
its key."""

from rl.config import Config, Data, Loss, Teacher, Trainer

CONFIG = Config(
    name="opd",
    data=Data(tasks=("reverse", "sort")),
    teachers={"reverser": Teacher(keys=("reverse",)), "sorter": Teacher(keys=("sort",))},
    loss=Loss(policy=0.0, distill=1.0),
    trainer=Trainer(steps=200, lr=1e-3),
)
