import shutil

from rl import checkpoint
from rl.ledger import Event, fold

LEDGER = fold([Event(kind="issue", ordinal=0, at=0.0), Event(kind="issue", ordinal=1, at=0.0)])


def save(run, version, keep=3):
    aside = checkpoint.begin(run, version)
    (aside / "trainer").mkdir()
    (aside / "trainer" / "shard").write_bytes(bytes(range(256)) * version)
    return checkpoint.commit(run, version, LEDGER, {"events": 7}, keep=keep)


def test_what_was_committed_comes_back(tmp_path):
    folder = save(tmp_path, 5)
    assert checkpoint.newest(tmp_path, print) == folder
    assert checkpoint.read(folder) == (5, LEDGER, {"events": 7})


def test_only_the_newest_are_kept(tmp_path):
    for version in (1, 2, 3, 4):
        save(tmp_path, version, keep=2)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step_000003", "step_000004"]


def test_o083_damaged_or_unfinished_checkpoints_are_named_and_passed_over(tmp_path):
    whole = save(tmp_path, 1)
    (save(tmp_path, 2) / "trainer" / "shard").write_bytes(b"cut")
    (save(tmp_path, 3) / "trainer" / "shard").unlink()
    checkpoint.begin(tmp_path, 9)
    said = []
    assert checkpoint.newest(tmp_path, said.append) == whole
    assert [line.split(": ", 1)[1] for line in said] == [
        "it was never finished", "trainer/shard is missing", "trainer/shard is damaged",
    ]  # fmt: skip


def test_no_checkpoint_at_all(tmp_path):
    assert checkpoint.newest(tmp_path, print) is None
    shutil.rmtree(tmp_path)
