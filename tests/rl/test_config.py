import ast
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

import rl.config
from experiments.genrm_grpo import CONFIG as GENRM
from experiments.genrm_opd import CONFIG as GENOPD
from experiments.opd import CONFIG as OPD
from experiments.sync_grpo import CONFIG as SYNC
from rl.check import check
from rl.config import ConfigError, Staleness, Teacher, route
from rl.objective import describe
from run import EXPERIMENTS, experiment


def refused(config, section, match, **values):
    changed = replace(config, **{section: replace(getattr(config, section), **values)})
    with pytest.raises(ConfigError, match=match):
        check(changed)


def test_every_experiment_is_sound():
    names = [p.stem for p in EXPERIMENTS.glob("[!_]*.py")]
    assert {"genrm_grpo", "rule_grpo", "opd", "genrm_opd", "sync_grpo"} <= set(names)
    for name in names:
        check(experiment(name).CONFIG)


def test_compositions_that_cannot_mean_what_they_say_are_refused():
    refused(GENRM, "staleness", r"max_age \(η\) must be >= 0, got -1", max_age=-1)
    refused(GENRM, "sampler", "group baseline", samples=1)
    refused(GENRM, "sampler", "cannot hold a group", slots=4)
    refused(GENRM, "sampler", "greedy samples", temperature=0.0)
    refused(GENRM, "trainer", "every rank needs a group", prompts=1, ranks=2)
    refused(GENRM, "trainer", "leave trainer.shard out", shard=False, offload=True)
    refused(GENRM, "trainer", "several ranks that each have all weights", exchange="memory")
    refused(GENRM, "trainer", "several ranks that each", exchange="memory", ranks=2, shard=True)
    refused(GENRM, "reward", "loss.policy needs an advantage", judge=0.0)
    refused(GENRM, "loss", "there are no teachers", distill=1.0)
    refused(GENRM, "judge", "judge.lo must be below judge.hi", lo=5.0)
    refused(OPD, "loss", "nothing to learn from", distill=0.0)
    refused(OPD, "loss", "acts through the policy term", distill_form="advantage")
    refused(GENRM, "correction", "counts the ratio twice", weight="tis")
    refused(GENRM, "correction", "forgets the ratio", prox="loglinear")
    refused(GENRM, "correction", "needs correction.keep_low", reject="geometric")
    refused(GENRM, "correction", "no effect with correction.reject none", keep_high=2.0)
    refused(GENRM, "correction", "no effect with correction.weight none", high=2.0)
    refused(GENRM, "loss", "biased on samples of an older policy", form="reinforce")
    refused(GENRM, "loss", "shrunk goes by how far a judge's votes are apart", advantage="shrunk")
    refused(GENRM, "loss", r"loss.k must lie in 1..sampler.samples", advantage="passk", k=9)
    refused(GENOPD, "loss", "wants one advantage per sequence", form="gspo", distill_form="advantage")
    refused(SYNC, "correction", "needs staleness.max_age > 0", prox="loglinear", weight="tis")
    with pytest.raises(ConfigError, match="two teachers"):
        check(replace(OPD, teachers={**OPD.teachers, "again": Teacher(keys=("sort",))}))


def test_all_faults_are_named_at_once():
    bad = replace(GENRM, staleness=Staleness(max_age=-1), sampler=replace(GENRM.sampler, samples=1))
    with pytest.raises(ConfigError) as error:
        check(bad)
    assert len(str(error.value).splitlines()) == 2


def test_routing_is_by_key():
    assert route(OPD) == {"reverse": "reverser", "sort": "sorter"}


def test_the_config_needs_nothing_but_the_standard_library():
    for path in Path(rl.config.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        outside = {name for name in imported if not name.startswith("rl.config.")}
        assert outside <= {"__future__", "collections.abc", "dataclasses", "typing"}, path


def test_o064_the_kl_is_off_where_its_coefficient_is_zero_and_there_is_no_second_switch():
    off, on = GENRM, replace(GENRM, loss=replace(GENRM.loss, kl=0.2))
    assert not off.uses_reference and on.uses_reference
    assert [f.name for f in fields(GENRM.loss) if f.name.startswith("kl")] == ["kl", "kl_form"]
    assert not any("kl   " in line for line in describe(off))
    assert any("0.2 · kl" in line for line in describe(on))


def test_o065_a_kl_in_the_reward_is_refused_at_the_start_and_names_what_there_is():
    done = subprocess.run(
        [sys.executable, "run.py", "--exp", "genrm_grpo", "--reward.kl", "0.1"],
        cwd=EXPERIMENTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0 and "reward.kl" in done.stderr + done.stdout
    assert "--loss.kl" in done.stderr + done.stdout
