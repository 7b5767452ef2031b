import pytest

from rl.engines.base import UpdateReport
from rl.sync import Manifest, SyncError, verify

MANIFEST = Manifest(version=3, checksums={"a": 1, "b": 2}, probe=(-1.0, -2.0))


def report(version=3, checksums=None, probe=(-1.0, -2.0)):
    return UpdateReport(version=version, checksums=checksums or {"a": 1, "b": 2}, probe=probe)


def test_equal_weights_pass():
    verify(MANIFEST, report(), "sampler-0")
    verify(MANIFEST, report(probe=(-1.0, -2.0001)), "sampler-0")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (report(version=2), "sampler-0 serves version 2, the trainer published 3"),
        (report(checksums={"a": 1, "b": 9}), "1 of 2 tensors: b"),
        (report(checksums={"a": 1}), "tensors: b"),
        (report(checksums={"a": 1, "b": 2, "c": 3}), "tensors: c"),
        (report(probe=(-1.0, -2.1)), "off by 0.1 nats"),
        (report(probe=(-1.0, float("nan"))), "off by nan nats"),
        (report(probe=(-1.0,)), "1 probe log-probs"),
    ],
)
def test_any_difference_is_named(told, message):
    with pytest.raises(SyncError, match=message):
        verify(MANIFEST, told, "sampler-0")


def test_the_allowance_of_the_probe_grows_with_how_unlikely_its_tokens_are():
    half = Manifest(version=3, checksums={"a": 1, "b": 2}, probe=(-1.0, -30.0), atol=0.5)
    verify(half, report(probe=(-1.5, -31.9)), "sampler-0")
    with pytest.raises(SyncError, match="off by 0.6 nats, allowed are 0.55"):
        verify(half, report(probe=(-1.6, -30.0)), "sampler-0")
    with pytest.raises(SyncError, match="off by 2.1 nats, allowed are 2"):
        verify(half, report(probe=(-1.0, -32.1)), "sampler-0")
