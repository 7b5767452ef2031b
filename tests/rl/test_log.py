import json
from dataclasses import replace

from rl.config import Log
from rl.ledger import Event
from rl.log import RunLog, changes, new_folder, wandb_mode
from run import parse


def config(*argv):
    return parse(["--exp", "genrm_grpo", "--log.wandb", "disabled", *argv])[0]


def test_o063_the_saved_config_holds_the_values_of_the_command_line(tmp_path):
    cfg = config(
        "--trainer.lr", "3e-4", "--data.no-shuffle", "--trainer.betas", "0.8", "0.9", "--loss.kl", "1e-6"
    )
    with RunLog(tmp_path, cfg):
        pass
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["trainer"]["lr"] == 3e-4 and saved["data"]["shuffle"] is False
    assert saved["trainer"]["betas"] == [0.8, 0.9] and saved["loss"]["kl"] == 1e-6
    assert "git" in saved and changes(tmp_path, cfg) == []


def test_o084_what_changed_on_resume_is_named_and_saved_beside_the_first_config(tmp_path):
    with RunLog(tmp_path, config()):
        pass
    changed = config("--trainer.lr", "1e-5")
    assert changes(tmp_path, changed) == ["trainer.lr 0.0005 -> 1e-05"]
    with RunLog(tmp_path, changed, version=7):
        pass
    assert json.loads((tmp_path / "config_resumed_000007.json").read_text())["trainer"]["lr"] == 1e-5


def test_a_resumed_log_goes_on_where_the_checkpoint_was(tmp_path):
    with RunLog(tmp_path, config()) as log:
        for step in range(1, 6):
            log.metrics(step, {"x": float(step)})
            log.event(Event(kind="issue", ordinal=step - 1, at=0.0))
            log.samples([{"step": step}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')  # what a kill leaves
    with RunLog(tmp_path, config(), version=3, events=2) as log:
        log.metrics(4, {"x": 40.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["x"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 3


def test_two_runs_of_the_same_second_have_two_folders(tmp_path):
    cfg = replace(config(), log=Log(dir=str(tmp_path)))
    assert new_folder(cfg) != new_folder(cfg)


def test_wandb_is_offline_without_an_account(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    auto = replace(config(), log=Log())
    assert wandb_mode(auto) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert wandb_mode(auto) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode(auto) == "disabled"
