"""How a run ends, as a person sees it."""

import subprocess
import sys

import pytest

from tests.runs.command import ROOT, write_copy_task

SAYING = """
import runpy, sys
from rl.actors import cluster

end = cluster.stop_roles

async def said(roles):
    print("the engines end", flush=True)
    await end(roles)

cluster.stop_roles = said
runpy.run_path("run.py", run_name="__main__")
"""


@pytest.mark.slow
def test_results_are_shown_before_the_engines_are_waited_for(tmp_path):
    flags = map(str, [*write_copy_task(tmp_path), "--trainer.steps", 2])
    done = subprocess.run(
        [sys.executable, "-c", SAYING, *flags], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [done.stdout.index(what) for what in ("held-out problems", "summary.json", "the engines end")]
    assert shown == sorted(shown)
