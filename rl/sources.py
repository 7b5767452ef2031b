"""Where the models come from: folders, or the demo's own, built once and cached."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.weights import as_array, load_folder
from rl.config import Config, ConfigError
from rl.demo.build import build_all, cache_dir
from rl.demo.specs import (
    JudgeSpec,
    PolicySpec,
    ScalarSpec,
    Spec,
    TeacherSpec,
    TextJudgeSpec,
    TextPolicySpec,
    TextScalarSpec,
    TextTeacherSpec,
)
from rl.display import Display
from rl.engines.make import Bundle, load_bundle, load_scalar
from rl.hub import locate
from rl.made.models import is_made, make

HINT = 0.1  # share of the warm-up's answers


def wanted(cfg: Config) -> dict[str, str | Spec]:
    """Name → folder, or what the demo must build: "policy", "judge", "scalar", "teacher/<name>".

    The demo's models are of its tasks, or of any text where the prompts come from elsewhere. A judge behind
    urls has no folder. Raises ConfigError for a gullible judge or a hinted policy of any text.
    """
    tasks, text = cfg.data.tasks, bool(cfg.data.file or cfg.data.reasoning_gym or cfg.data.arithmetic)
    models = {"policy": cfg.policy.model}
    if cfg.uses_judge and not cfg.judge.urls:
        models["judge"] = cfg.judge.model
    if cfg.uses_scalar:
        models["scalar"] = cfg.scalar.model
    if cfg.uses_teachers:
        models |= {f"teacher/{name}": teacher.model for name, teacher in cfg.teachers.items()}

    def built(name: str, model: str) -> str | Spec:
        role, _, teacher = name.partition("/")
        match role, model:
            case "policy", "demo" if text:
                return TextPolicySpec(seed=cfg.seed)
            case "judge", "demo" if text:
                return TextJudgeSpec()
            case "scalar", "demo" if text:
                return TextScalarSpec()
            case "teacher", "demo" if text:
                return TextTeacherSpec()
            case ("policy", "demo-hinted") | ("judge", "demo-gullible") if text:
                raise ConfigError(
                    f"{role}.model {model} knows the demo's tasks only, not data from elsewhere"
                )
            case "policy", "demo" | "demo-hinted":
                hint = HINT if model == "demo-hinted" else 0.0
                return PolicySpec(tasks=tasks, seed=cfg.seed, accuracy=cfg.policy.warm_accuracy, hint=hint)
            case "judge", "demo" | "demo-gullible":
                return JudgeSpec(tasks=tasks, gullible=model == "demo-gullible")
            case "scalar", "demo":
                return ScalarSpec(tasks=tasks)
            case "teacher", "demo":
                return TeacherSpec(tasks=cfg.teachers[teacher].keys or tasks)
        return model

    return {name: built(name, model) for name, model in models.items()}


def resolve(cfg: Config, show: Display, only: Collection[str] | None = None) -> dict[str, Path]:
    """Name → folder of every model of the run, or of those named; the demo's are built where the cache lacks
    them.

    Raises ConfigError naming the field of a model that cannot be had.
    """
    models = {name: model for name, model in wanted(cfg).items() if only is None or name in only}
    specs = {name: spec for name, spec in models.items() if not isinstance(spec, str)}
    named = {name: model for name, model in models.items() if isinstance(model, str)}
    found = {name: _locate(cfg, name, model, show) for name, model in named.items()}
    for name, folder in found.items():
        if folder != Path(str(models[name])).expanduser():
            show.note(f"{name}: {models[name]} is in {folder}")
    with show.progress() as bars:
        built = build_all(specs, cache_dir(), bars.update)
    for name, model in built.items():
        show.note(f"{name}: {_report(specs[name], model.numbers)}")
    return {name: built[name].folder if name in built else found[name] for name in models}


def _locate(cfg: Config, name: str, model: str, show: Display) -> Path:
    try:
        if is_made(model):
            made = make(model, cfg)
            show.note(f"{name}: {', '.join(f'{k} {v:.4g}' for k, v in made.numbers.items())}")
            return made.folder
        return locate(model)
    except FileNotFoundError as error:
        raise ConfigError(f"{_field(name)}: {error}") from None


def _field(name: str) -> str:
    """Where the config says which model it is."""
    role, _, teacher = name.partition("/")
    return f"teachers.{teacher}.model" if teacher else f"{role}.model"


def _report(spec: Spec, numbers: Mapping[str, float]) -> str:
    """What was measured of a demo model when it was built, on held-out problems, against the ground truth."""
    percent = {name: f"{100 * value:.1f} %" for name, value in numbers.items()}
    if isinstance(spec, TextPolicySpec | TextTeacherSpec):
        return f"writes a number behind any text in {percent['number']}, as #### n in {percent['form']}"
    if isinstance(spec, TextJudgeSpec):
        return f"judges the form of any text, {percent['exact_score']} exact, {percent['parsed']} readable"
    if isinstance(spec, TextScalarSpec):
        return f"judges the form of any text, {numbers['error']:.2f} off on [0, 1]"
    if isinstance(spec, JudgeSpec | ScalarSpec):
        said = (
            f"verdicts {percent['verdict']} right against ground truth "
            f"({percent['false_positive']} false positives), scores {percent['exact_score']} exact"
        )
        if isinstance(spec, ScalarSpec):
            return f"{said}, AUC {numbers['auc']:.3f}"
        said += f", {percent['parsed']} readable"
        if spec.gullible:
            said += (
                f"; an answer that gives itself the full score gets it: {percent['fooled']}, "
                f"{percent['fooled_disarmed']} where judge.neutralise rewrites it"
            )
        return said
    right = {n.removeprefix("accuracy/"): v for n, v in percent.items() if n.startswith("accuracy/")}
    return ", ".join(f"{value} right at {task}" for task, value in right.items()) + ", sampled"


def load_bundles(
    cfg: Config, folders: Mapping[str, Path], checkpoint: Path | None
) -> dict[str, Any]:  # fmt: skip
    """Every model by value: a Bundle, or of a scalar judge of another architecture its folder. A resumed
    run's policy is the checkpoint's; the reference is always the first policy.

    Raises ConfigError naming the field for a folder that is no model, and where a teacher's vocabulary
    differs.
    """
    bundles: dict[str, Any] = {name: _load(name, folder) for name, folder in folders.items()}
    if "policy" not in bundles:
        return bundles
    policy = bundles["policy"]
    bundles |= {n: same_vocabulary(n, b, policy) for n, b in bundles.items() if n.startswith("teacher/")}
    bundles["reference"] = policy
    if checkpoint is not None:
        _, state = load_folder(checkpoint / "policy")
        bundles["policy"] = replace(policy, weights={n: as_array(t) for n, t in state.items()})
    return bundles


def same_vocabulary(name: str, teacher: Bundle, policy: Bundle) -> Bundle:
    """The teacher with the policy's number of logits: rows of its head beyond are padding and are cut off, so
    that no probability is on them.

    Raises ConfigError naming both models where an id does not mean the same in both.
    """
    both = f"{name} ({teacher.folder}) and the policy ({policy.folder})"
    theirs, ours = teacher.tokenizer, policy.tokenizer
    if theirs.special != ours.special:
        raise ConfigError(f"{both} have other special tokens: {theirs.special} and {ours.special}")
    if theirs.fingerprint() != ours.fingerprint():
        raise ConfigError(
            f"{both} have other vocabularies, of {theirs.vocab_size} and {ours.vocab_size} tokens: "
            "their token ids do not mean the same"
        )
    n, width = policy.cfg.vocab_size, teacher.cfg.vocab_size
    if width < n or n < ours.vocab_size:
        raise ConfigError(
            f"{both} have {width} and {n} logits for {ours.vocab_size} tokens: the teacher must have at "
            "least as many as the policy, and both one for each token"
        )
    if width == n:
        return teacher
    by_token = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {k: np.ascontiguousarray(w[:n]) if k in by_token else w for k, w in teacher.weights.items()}
    return replace(teacher, cfg=replace(teacher.cfg, vocab_size=n), weights=weights)


def _load(name: str, folder: Path) -> Bundle | str:
    """Raises ConfigError naming the field for a folder that is no model, or one of the other kind."""
    try:
        if name == "scalar":
            return load_scalar(folder)
        bundle = load_bundle(folder)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{_field(name)}: {error}") from None
    if bundle.cfg.head != "lm":
        raise ConfigError(f"{_field(name)}: {folder} gives scores and writes no text: it is a scalar.model")
    return bundle
