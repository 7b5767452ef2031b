import pytest

from experiments.opd import CONFIG as OPD
from rl.cli import normalise, take
from rl.config import ConfigError
from run import parse


def cfg(*argv):
    return parse(["--exp", "genrm_grpo", *argv])[0]


def test_exp_stands_anywhere_and_a_wrong_name_lists_the_right_ones():
    assert parse(["--trainer.lr", "3e-4", "--exp=opd"])[0].name == "opd"
    assert take(["--a", "--exp", "opd", "--b"], "--exp") == ("opd", ["--a", "--b"])
    with pytest.raises(ConfigError, match="'nope'.*genrm_grpo, genrm_opd, .*opd, .*rule_grpo, sync_grpo"):
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


def test_o089_tuples_of_text():
    assert cfg("--data.tasks=['sort', 'add']").data.tasks == ("sort", "add")


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
