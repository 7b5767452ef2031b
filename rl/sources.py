"""Where the models come from: folders, or the demo's own, built once and cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from models.weights import load_folder
from rl.config import Config, ConfigError
from rl.demo.build import build_all, cache_dir
from rl.demo.specs import JudgeSpec, PolicySpec, Spec, TeacherSpec
from rl.display import Display
from rl.engines.make import Bundle, load_bundle


def wanted(cfg: Config) -> dict[str, str | Spec]:
    """Name → folder, or what the demo must build: "policy", "judge", "teacher/<name>"."""
    models: dict[str, str | Spec] = {"policy": cfg.policy.model}
    if cfg.policy.model == "demo":
        models["policy"] = PolicySpec(tasks=cfg.data.tasks, seed=cfg.seed, accuracy=cfg.policy.warm_accuracy)
    if cfg.uses_judge:
        models["judge"] = JudgeSpec(tasks=cfg.data.tasks) if cfg.judge.model == "demo" else cfg.judge.model
    for name, teacher in cfg.teachers.items() if cfg.uses_teachers else ():
        models[f"teacher/{name}"] = (
            TeacherSpec(tasks=teacher.keys) if teacher.model == "demo" else teacher.model
        )
    return models


def resolve(cfg: Config, show: Display) -> dict[str, Path]:
    """Name → folder of every model of the run; the demo's are built where the cache lacks them."""
    models = wanted(cfg)
    specs = {name: spec for name, spec in models.items() if not isinstance(spec, str)}
    with show.progress() as bars:
        built = build_all(specs, cache_dir(), bars.update)
    for name, model in built.items():
        show.note(f"{name}: {_report(specs[name], model.numbers)}")
    return {name: built[name].folder if name in built else Path(str(spec)) for name, spec in models.items()}


def _report(spec: Spec, numbers: Mapping[str, float]) -> str:
    """What was measured of a demo model when it was built, on held-out problems, against the ground truth."""
    if isinstance(spec, JudgeSpec):
        return (
            f"verdicts {100 * numbers['verdict']:.1f} % right against ground truth "
            f"({100 * numbers['false_positive']:.1f} % false positives), "
            f"scores {100 * numbers['exact_score']:.1f} % exact, {100 * numbers['parsed']:.1f} % readable"
        )
    right = {n.removeprefix("accuracy/"): v for n, v in numbers.items() if n.startswith("accuracy/")}
    return ", ".join(f"{100 * v:.1f} % right at {task}" for task, v in right.items()) + ", sampled"


def load_bundles(cfg: Config, folders: Mapping[str, Path], checkpoint: Path | None) -> dict[str, Bundle]:
    """Every model by value. A resumed run's policy is the checkpoint's; the reference is always the first
    policy.

    Raises ConfigError naming the field for a folder that is no model, and where a teacher's vocabulary
    differs.
    """
    bundles = {name: _load(name, folder) for name, folder in folders.items()}
    policy = bundles["policy"]
    for name, bundle in bundles.items():
        if name.startswith("teacher/") and bundle.tokenizer.fingerprint() != policy.tokenizer.fingerprint():
            raise ConfigError(
                f"{name} ({folders[name]}) has another vocabulary than the policy ({folders['policy']}): "
                "their token ids do not mean the same"
            )
    bundles["reference"] = policy
    if checkpoint is not None:
        _, state = load_folder(checkpoint / "policy")
        bundles["policy"] = replace(policy, weights={n: t.float().numpy() for n, t in state.items()})
    return bundles


def _load(name: str, folder: Path) -> Bundle:
    field = {"policy": "policy.model", "judge": "judge.model"}.get(name) or f"{name.replace('/', 's.')}.model"
    try:
        return load_bundle(folder)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{field}: {error}") from None
