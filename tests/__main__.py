"""python -m tests: lint, types and the fast tests. `--all` adds the slow ones; the rest goes to pytest."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(argv: list[str]) -> int:
    everything, rest = "--all" in argv, [a for a in argv if a != "--all"]
    python = [sys.executable, "-m"]
    checks = [
        [*python, "ruff", "check", "."],
        [*python, "pyright", "--pythonpath", sys.executable],
        [*python, "pytest", *([] if everything else ["-m", "not slow"]), *rest],
    ]
    for check in checks:
        print("$", " ".join(check[1:]), flush=True)
        code = subprocess.run(check, cwd=ROOT).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
