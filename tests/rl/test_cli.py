import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from experiments.opd import CONFIG as OPD
from rl.cli import normalise, take
from rl.config import ConfigError
from rl.log import RunLog
from run import main, parse
from tests.rl.fakes import finish, make_loop, small

ROOT = Path(__file__).parents[2]
SWEEP = yaml.safe_load((ROOT / "experiments/sweep.yaml").read_text())


def cfg(*argv):
    return parse(["--exp", "genrm_grpo", *argv])[0]


def test_exp_stands_anywhere_and_a_wrong_name_lists_the_right_ones():
    assert parse(["--trainer.lr", "3e-4", "--exp=opd"])[0].name == "opd"
    assert take(["--a", "--exp", "opd", "--b"], "--exp") == ("opd", ["--a", "--b"])
    with pytest.raises(ConfigError, match="'nope'.*genrm_grpo, .*genrm_opd, .*opd, .*rule_grpo, .*sync_grpo"):
        parse(["--exp", "nope"])
    with pytest.raises(ConfigError, match="needs a value"):
        parse(["--exp"])


def test_values_with_space_or_equals_hyphen_or_underscore():
    for argv in (["--trainer.lr", "3e-4"], ["--trainer.lr=3e-4"], ["--trainer.lr=0.0003"]):
        assert cfg(*argv).trainer.lr == 3e-4
    assert (
        cfg("--staleness.max-age", "1").staleness.max_age
        == cfg("--staleness.max_age=1").staleness.max_age
        == 1
    )


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], True),
        (["--data.shuffle"], True),
        (["--data.no-shuffle"], False),
        (["--data.shuffle=False"], False),
        (["--data.shuffle=false"], False),
        (["--data.shuffle", "False"], False),
        (["--data.shuffle=True"], True),
        (["--data.shuffle=0"], False),
        (["--data.shuffle", "--data.no-shuffle"], False),
    ],
)
def test_o093_o096_booleans_in_every_spelling(argv, value):
    assert cfg(*argv).data.shuffle is value


def test_o091_a_boolean_is_never_a_truthy_text():
    with pytest.raises(ConfigError, match="is a boolean"):
        cfg("--data.shuffle=maybe")
    assert cfg("--trainer.compile=False").trainer.compile is False
    assert cfg("--trainer.compile").trainer.compile is True
    assert cfg("--trainer.compile", "--trainer.compile=None").trainer.compile is None


def test_o093_a_wrong_spelling_ends_with_exit_code_two():
    with pytest.raises(SystemExit) as error:
        cfg("--no-data.shuffle")
    assert error.value.code == 2


@pytest.mark.parametrize(
    "argv",
    [["--trainer.betas=(0.8, 0.99)"], ["--trainer.betas", "[0.8, 0.99]"], ["--trainer.betas", "0.8", "0.99"]],
)
def test_o089_tuples_as_sweeps_write_them(argv):
    assert cfg(*argv).trainer.betas == (0.8, 0.99)


@pytest.mark.parametrize("text", ["['sort', 'add']", "(sort, add)", '["sort","add"]'])
def test_o089_tuples_of_text(text):
    assert cfg(f"--data.tasks={text}").data.tasks == cfg("--data.tasks", text).data.tasks == ("sort", "add")


@pytest.mark.parametrize(
    ("argv", "criteria"),
    [
        (["--judge.criteria=['Is it right, and short?', \"It's polite\"]"],
         ("Is it right, and short?", "It's polite")),
        (["--judge.criteria=Is it right, and short?"], ("Is it right, and short?",)),
        (["--judge.criteria", "(a) right?", "[b] short?"], ("(a) right?", "[b] short?")),
        (["--judge.criteria=[]"], ()),
        (["--judge.criteria=('Is it right, and short?')"], ("Is it right, and short?",)),
    ],
)  # fmt: skip
def test_o089_text_in_a_tuple_keeps_its_commas_brackets_and_quotes(argv, criteria):
    assert cfg(*argv).judge.criteria == criteria


def test_teachers_are_fields_like_any_other():
    config, *_ = parse(["--exp", "opd", "--teachers.sorter.replicas", "2"])
    assert config.teachers["sorter"].replicas == 2 and config.teachers["reverser"].replicas == 1


def test_plan_and_resume_flags():
    assert parse(["--plan", "--exp", "opd"])[1:] == (True, None, "train")
    assert parse(["--exp", "opd", "--resume"])[1:] == (False, "newest", "train")
    assert parse(["--exp", "opd", "--resume", "runs/x"])[2] == "runs/x"


def test_normalise_leaves_what_it_does_not_know():
    assert normalise(["--unknown=3", "word"], OPD) == ["--unknown=3", "word"]


def test_a_section_alone_names_the_field_that_people_mean():
    config = cfg("--data", "x.jsonl", "--judge=some/model", "--policy", "folder")
    assert (config.data.file, config.judge.model, config.policy.model) == ("x.jsonl", "some/model", "folder")


# ── Sweeps ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flag", ["--loss.kl_form=k3", "--loss.kl-form=k3"])
def test_o090_dotted_names_override_in_both_spellings_and_the_tracker_shows_it(tmp_path, monkeypatch, flag):
    wandb = SimpleNamespace(init=Mock())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = cfg(flag, "--staleness.max_age=4", "--data.shuffle=False", "--log.wandb=offline")
    with RunLog(tmp_path, config):
        pass
    shown = wandb.init.call_args.kwargs["config"]
    assert shown["loss"]["kl_form"] == "k3"
    assert (shown["staleness"]["max_age"], shown["data"]["shuffle"]) == (4, False)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(json.dumps(shown))


@pytest.mark.parametrize("value", ["{'model': 'x', 'chat': True}", '{"model": "x", "chat": true}'])
@pytest.mark.parametrize(
    ("name", "such"),
    [("--judge", "--judge.model"), ("--trainer", "--trainer.steps"), ("--teachers", ""), ("--nothing", ""),
     ("--judge.engine", "--judge.engine.kind")],
)  # fmt: skip
def test_o090_a_dictionary_is_refused_in_one_line(capsys, name, such, value):
    for argv in ([f"{name}={value}"], [name, value]):
        assert main(["--exp", "genrm_grpo", "--plan", *argv]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"{name} takes no dictionary: name each of its fields with dots")
        assert said.count("\n") == 1 and such in said


def test_o090_a_section_alone_is_no_field_and_a_json_object_is_one():
    with pytest.raises(ConfigError, match="--trainer is a section, .*as --trainer.steps"):
        cfg("--trainer=3")
    assert cfg('--reward.fn_kwargs={"a": 1}').reward.fn_kwargs == '{"a": 1}'
    assert cfg("--judge.template={problem} {candidate}").judge.template == "{problem} {candidate}"


def agent_command(values):
    """What wandb's agent runs for the sweep's file."""
    args = [f"--{name}={value}" for name, value in values.items()]
    macros = {"${env}": ["/usr/bin/env"], "${program}": [SWEEP["program"]], "${args}": args}
    return [word for part in SWEEP["command"] for word in macros.get(part, [part])]


@pytest.mark.parametrize("end", [0, -1], ids=["first", "last"])
def test_o092_the_sweep_file_starts_run_py_with_all_its_parameters(end):
    ways = {name: way.get("values", [way.get("value", way.get("min")), way.get("value", way.get("max"))])
            for name, way in SWEEP["parameters"].items()}  # fmt: skip
    values = {name: way[end] for name, way in ways.items()}
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*agent_command(values), "--plan"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"η = {values['staleness.max_age']}" in done.stdout and values["loss.form"] in done.stdout
    config = parse(agent_command(values)[3:])[0]
    assert config.trainer.betas == ((0.9, 0.95), (0.9, 0.99))[end] and config.data.shuffle is (end == 0)
    for name in ("trainer.lr", "staleness.max_age", "loss.kl", "seed"):
        found = config
        for part in name.split("."):
            found = getattr(found, part)
        assert found == values[name] and type(found) is type(values[name]), name


def test_o092_the_sweep_optimises_a_number_that_a_run_logs(tmp_path):
    finish(make_loop(tmp_path, small(steps=1)))
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert isinstance(logged[SWEEP["metric"]["name"]], float)


# ── What else people type ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("points", [("-1",), ("-1", "-2e-3")])
@pytest.mark.parametrize("flag", ["--trainer.share_prompt", "--trainer.share-prompt"])
def test_o094_a_list_ends_at_the_next_flag_also_at_one_with_an_underscore(points, flag):
    for argv in (["--judge.points", *points, flag], [f"--judge.points=({', '.join(points)})", flag]):
        config = cfg(*argv, "--data.no_shuffle")
        assert config.judge.points == tuple(map(float, points))
        assert config.trainer.share_prompt is True and config.data.shuffle is False


def test_a_source_of_prompts_on_the_command_line_takes_the_place_of_the_experiments():
    assert parse(["--exp", "smollm2_arith"])[0].data.arithmetic == ("addition", "subtraction")
    data = parse(["--exp", "smollm2_arith", "--data", "train.jsonl"])[0].data
    assert (data.file, data.arithmetic, data.chat) == ("train.jsonl", (), "always")
    assert data.largest == 9 and parse(["--exp", "smollm2_arith"])[0].data.largest == 20
    assert parse(["--exp", "smollm2_arith", "--data.arithmetic", "addition"])[0].data.largest == 20
    with pytest.raises(ConfigError, match="data.largest has no effect"):
        parse(["--exp", "smollm2_arith", "--data", "train.jsonl", "--data.largest", "10"])
    data = parse(["--exp", "genrm_grpo_seed", "--data.arithmetic", "addition"])[0].data
    assert (data.arithmetic, data.reasoning_gym) == (("addition",), ())
    with pytest.raises(ConfigError, match="different sources"):
        parse(["--exp", "smollm2_arith", "--data", "train.jsonl", "--data.arithmetic", "addition"])


def test_o095_another_key_of_a_dictionary_is_refused_by_name():
    known = parse(["--exp", "opd", "--teachers.sorter.weight=0.5", "--teachers.sorter.engine.gpus=0.3"])[0]
    assert known.teachers["sorter"].weight == 0.5 and known.teachers["sorter"].engine.gpus == 0.3
    with pytest.raises(ConfigError, match="has the teachers reverser, sorter; others are added in"):
        parse(["--exp", "opd", "--teachers.third.model", "x"])
    with pytest.raises(ConfigError, match="--teachers.third.model: this experiment has no teachers"):
        cfg("--teachers.third.model=x")


def test_o095_further_arguments_to_a_function_take_any_key():
    asked = cfg('--reward.fn_kwargs={"known": 1}', '--reward.fn-kwargs={"known": 2, "new": true}')
    assert json.loads(asked.reward.fn_kwargs) == {"known": 2, "new": True}
