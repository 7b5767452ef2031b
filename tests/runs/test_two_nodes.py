"""The same command on a cluster of two nodes: roles on both, trainer ranks meeting over the nodes' own
addresses."""

import json
import subprocess

import pytest
import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster

from tests.runs.command import command, wait_for_step, write_copy_task

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_run_spread_over_two_nodes(tmp_path, two_nodes):
    flags = [
        *write_copy_task(tmp_path), "--ray.address", two_nodes.address, "--ray.spread", "--trainer.ranks", 2,
        "--sampler.replicas", 2, "--trainer.steps", 30, "--checkpoint.every", 10,
    ]  # fmt: skip
    process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folder = wait_for_step(tmp_path / "runs", 5, process)
    ray.init(address=two_nodes.address, log_to_driver=False)
    placed = {
        a["Name"].split("/")[-1]: a["Address"]["IPAddress"]
        for a in actors().values()
        if a["State"] == "ALIVE"
    }
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert {"trainer-0", "trainer-1", "sampler-0", "sampler-1", "rule-0"} <= placed.keys()
    assert placed["trainer-0"] != placed["trainer-1"], "the ranks sit on two nodes"
    assert placed["sampler-0"] != placed["sampler-1"]
    assert set(placed.values()) == {ray.util.get_node_ip_address(), "127.0.0.2"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines] == list(range(1, 31))
    assert "2 node(s), 4 cores" in out
