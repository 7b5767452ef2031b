from dataclasses import replace

import pytest

from experiments import genrm_grpo, reward_hacking
from rl.config import Config, ConfigError, Data, Judge, Loss, Policy, Reward, Scalar, Teacher
from rl.demo.specs import (
    JudgeSpec,
    PolicySpec,
    ScalarSpec,
    TeacherSpec,
    TextJudgeSpec,
    TextPolicySpec,
    TextScalarSpec,
    TextTeacherSpec,
)
from rl.sources import HINT, wanted

ALL = Config(
    reward=Reward(judge=1.0, scalar=1.0),
    loss=Loss(distill=1.0),
    teachers={"one": Teacher(keys=("reverse",)), "all": Teacher()},
)


def test_the_demo_builds_what_the_config_uses_and_nothing_else() -> None:
    assert wanted(genrm_grpo.CONFIG) == {"policy": PolicySpec(), "judge": JudgeSpec()}
    assert wanted(replace(ALL, seed=3)) == {
        "policy": PolicySpec(seed=3),
        "judge": JudgeSpec(),
        "scalar": ScalarSpec(),
        "teacher/one": TeacherSpec(tasks=("reverse",)),
        "teacher/all": TeacherSpec(tasks=("reverse",)),  # serves every prompt of a mixture
    }


def test_reward_hacking_has_a_gullible_judge_and_a_hinted_policy() -> None:
    cfg = reward_hacking.CONFIG
    hinted = PolicySpec(accuracy=cfg.policy.warm_accuracy, hint=HINT)
    assert wanted(cfg) == {"policy": hinted, "judge": JudgeSpec(gullible=True)}


@pytest.mark.parametrize("data", [Data(file="train.jsonl"), Data(reasoning_gym=("chain_sum",))])
def test_prompts_from_elsewhere_get_the_models_of_any_text(data: Data) -> None:
    assert wanted(replace(ALL, data=data, seed=3)) == {
        "policy": TextPolicySpec(seed=3),
        "judge": TextJudgeSpec(),
        "scalar": TextScalarSpec(),
        "teacher/one": TextTeacherSpec(),
        "teacher/all": TextTeacherSpec(),
    }


def test_folders_stay_folders_and_a_judge_behind_urls_has_none() -> None:
    cfg = replace(ALL, policy=Policy(model="p"), scalar=Scalar(model="s"), judge=Judge(model="j"))
    assert {name: model for name, model in wanted(cfg).items() if "teacher" not in name} == {
        "policy": "p", "scalar": "s", "judge": "j",
    }  # fmt: skip
    served = replace(cfg, judge=Judge(model="demo", urls=("http://localhost:8000/v1",)))
    assert "judge" not in wanted(served)


@pytest.mark.parametrize("model", ["demo-gullible", "demo-hinted"])
def test_a_reserved_name_means_something_in_its_role_only(model: str) -> None:
    cfg = replace(ALL, policy=Policy(model=model), judge=Judge(model=model), scalar=Scalar(model=model))
    built = {name for name, spec in wanted(cfg).items() if not isinstance(spec, str) and "/" not in name}
    assert built == {"judge" if model == "demo-gullible" else "policy"}


@pytest.mark.parametrize("field", ["policy", "judge"])
def test_hints_and_gullibility_need_the_demos_tasks(field: str) -> None:
    cfg = replace(reward_hacking.CONFIG, data=Data(file="train.jsonl"))
    cfg = replace(cfg, judge=Judge()) if field == "policy" else replace(cfg, policy=Policy())
    with pytest.raises(ConfigError, match=f"{field}.model demo-"):
        wanted(cfg)
