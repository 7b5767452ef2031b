import json

import pytest
import yaml

from rl.config import ConfigError
from rl.migrate import TABLE, MigrationError
from run import parse
from tests.rl.test_migrate import MEANT, VALID, nest


def write(path, tree):
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def run(path, *argv):
    return parse(["--exp", "rule_grpo", "--reward.legacy", path, *argv])[0]


@pytest.fixture
def legacy(tmp_path):
    return write(tmp_path / "old.yaml", nest(VALID))


def test_every_target_of_the_table_is_a_field_of_the_config_and_arrives(legacy):
    cfg = run(legacy)
    assert cfg.reward.fn == (MEANT["reward"]["fn"],)
    assert json.loads(cfg.reward.fn_kwargs) == MEANT["reward"]["fn_kwargs"]
    for section, fields in MEANT.items():
        for name, value in fields.items():
            if name not in ("fn", "fn_kwargs"):
                assert getattr(getattr(cfg, section), name) == value
    for row in TABLE:
        if row.new is not None:
            section, name = row.new.split(".")
            assert hasattr(getattr(cfg, section), name), row


def test_the_report_names_every_key_and_is_printed_before_anything_else(legacy, capsys):
    run(legacy)
    printed = capsys.readouterr().out
    assert printed.startswith(f"read from {legacy}\n")
    assert all(key in printed for key in VALID)


def test_a_flag_that_says_otherwise_is_a_conflict_and_one_that_agrees_is_none(legacy):
    with pytest.raises(MigrationError, match=r"judge.replicas = 8, but judge.replicas is set to 3"):
        run(legacy, "--judge.replicas", "3")
    assert run(legacy, "--judge.replicas=8").judge.replicas == 8
    assert run(legacy, "--reward.fn", "grade.py:grade").reward.fn == ("grade.py:grade",)
    with pytest.raises(MigrationError, match="reward.fn"):
        run(legacy, "--reward.fn", "other.py:grade")
    kwargs = json.dumps(MEANT["reward"]["fn_kwargs"])
    assert run(legacy, "--reward.fn-kwargs", kwargs).reward.fn_workers == 8


def test_what_the_experiment_has_gives_way_to_the_file(tmp_path):
    path = write(tmp_path / "old.yaml", {"reward_model": {"enable": False}})
    assert parse(["--exp", "rule_grpo", "--reward.legacy", path])[0].reward.judge == 0.0
    path = write(tmp_path / "older.yaml", {"reward_model": {"enable": True}})
    assert run(path).reward.judge == 1.0


def test_the_merged_config_is_checked_like_any_other(tmp_path):
    """In verl the guard ran before the migration, so that the old keys went around it."""
    path = write(tmp_path / "old.yaml", {"reward_model": {"enable": True, "rollout": {"temperature": 0}}})
    with pytest.raises(ConfigError, match="judge.votes > 1 at judge.temperature 0"):
        run(path, "--judge.votes", "3")


@pytest.mark.parametrize("text", ["- a list", "{unclosed", "plain"])
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, text):
    (tmp_path / "old.yaml").write_text(text)
    with pytest.raises(ConfigError, match="reward.legacy: .*old.yaml"):
        run(str(tmp_path / "old.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        run(str(tmp_path / "none.yaml"))


def test_a_key_without_a_counterpart_is_an_error_that_says_what_to_do(tmp_path):
    path = write(tmp_path / "old.yaml", {"reward_model": {"max_tpm": 1000}})
    with pytest.raises(MigrationError, match="max_tpm.*reward.rate"):
        run(path)
