"""A rank's part of a checkpoint holds what was staged, whatever training does while it is written."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from models.config import ModelConfig
from models.parallelise import parallelise
from models.transformer import Transformer
from rl.config import Trainer
from rl.staging import Staging, read, read_weights
from rl.step import make_optimizer
from tests.ranks import spawn

CFG = ModelConfig(
    family="llama", vocab_size=7, d_model=12, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=6, d_ff=10,
    max_len=16, tie_embeddings=True, eos_ids=(1,), pad_id=0,
)  # fmt: skip
CPU = torch.device("cpu")


class Trained:
    """A model and its optimiser, on all ranks; `step` is one without a loss. bfloat16: masters of their own,
    of several ranks as DTensors."""

    def __init__(self, ranks: int, dtype: str = "float32", seed: int = 1, device: str = "cpu") -> None:
        self.model = Transformer(CFG)
        self.model.init_weights(torch.Generator().manual_seed(seed))
        mesh = init_device_mesh(device, (ranks,))
        parallelise(self.model.to(device), mesh, compile=False, param_dtype=dtype)
        self.optimizer = make_optimizer(self.model, Trainer(lr=0.1))

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = p.detach().sin() + 0.1
        self.optimizer.step()
        dist.all_reduce(torch.zeros((), device=next(self.model.parameters()).device))  # as training does

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def whole(self) -> dict[str, torch.Tensor]:
        """Masters and both moments."""
        state = self.state()
        flat = {**state["model"]}
        for name, moments in state["optimizer"]["state"].items():
            flat |= {f"{name} {kind}": x for kind, x in moments.items()}
        return {n: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for n, x in flat.items()}

    def load(self, path: Path) -> None:
        state = self.state()
        read(path, state)
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip


def _written(rank: int, ranks: int, folder: str, dtype: str) -> Any:
    trained, staging = Trained(ranks, dtype), Staging(CPU, 60)
    trained.step()
    staged = trained.whole()
    dcp.save(trained.state(), checkpoint_id=f"{folder}/still/trainer")
    staging.stage(trained.state())
    write_data = FileSystemWriter.write_data

    def slowly(*args: Any) -> Any:  # what ranks say after it comes between other steps of each
        time.sleep(1.0 + 0.2 * rank)
        return write_data(*args)

    FileSystemWriter.write_data = slowly  # pyright: ignore[reportAttributeAccessIssue]
    writing = threading.Thread(target=staging.write, args=(Path(folder) / "moving",))
    writing.start()
    for _ in range(20):
        trained.step()
    assert writing.is_alive()
    for _ in range(60):
        trained.step()
        time.sleep(0.02)
    writing.join()
    for name, value in trained.whole().items():
        assert not torch.equal(value, staged[name]), name
    return staged


@pytest.mark.parametrize("ranks, dtype", [(1, "float32"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16")])
def test_what_is_written_while_training_goes_on_is_byte_for_byte_what_was_staged(tmp_path, ranks, dtype):
    staged = spawn(ranks, tmp_path, _written, dtype)
    still, moving = ({p.name: p.read_bytes() for p in (tmp_path / kind / "trainer").glob("*.distcp")}
                     for kind in ("still", "moving"))  # fmt: skip
    assert len(still) == ranks and still == moving
    whole = read_weights(tmp_path / "moving", CFG)  # in one process, without any group
    assert whole.keys() == {name for name in staged if " " not in name}
    for name, value in whole.items():
        assert value.dtype == torch.float32 and torch.equal(value, staged[name]), name


def _resumed(rank: int, ranks: int, folder: str) -> Any:
    trained = Trained(ranks, seed=2)
    trained.load(Path(folder) / "moving")
    return trained.whole()


def test_what_two_ranks_wrote_is_read_by_one_and_by_three(tmp_path):
    staged = spawn(2, tmp_path, _written, "float32")
    for ranks in (1, 3):
        resumed = spawn(ranks, tmp_path, _resumed)
        assert resumed.keys() == staged.keys()
        for name, value in staged.items():
            assert torch.equal(resumed[name], value), name


def _twice(rank: int, ranks: int, folder: str) -> Any:
    trained, staging, expected, memory = Trained(ranks), Staging(CPU, 60), [], set()
    for i in range(2):
        trained.step()
        expected.append(trained.whole())
        staging.stage(trained.state())
        assert staging.memory is not None
        memory.add(staging.memory.data_ptr())
        staging.write(Path(folder) / f"{i}")
    assert len(memory) == 1, "the memory is kept"
    for i, values in enumerate(expected):
        trained.load(Path(folder) / f"{i}")
        for name, value in trained.whole().items():
            assert torch.equal(value, values[name]), (i, name)
    return 0


def test_two_in_a_row_share_the_memory_and_nothing_else(tmp_path):
    spawn(2, tmp_path, _twice)


def _on_a_full_disk(rank: int, ranks: int, folder: str) -> Any:
    trained, staging, path = Trained(ranks), Staging(CPU, 60), Path(folder) / "full"
    trained.step()
    staging.stage(trained.state())
    if rank == 1:
        (path / "trainer").mkdir(parents=True)
        os.symlink("/dev/full", path / "trainer" / "__1_0.distcp")
    dist.barrier()
    with pytest.raises(OSError, match=r"cannot write .*full/trainer: rank 1: .*") as caught:
        staging.write(path)
    trained.step()  # training has nothing to do with it
    return str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
def test_a_full_disk_is_told_by_all_ranks_and_names_the_one_that_met_it(tmp_path):
    said = spawn(2, tmp_path, _on_a_full_disk)
    assert "rank 0" not in said


def test_what_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(OSError, match="cannot read .*nowhere/trainer"):
        read_weights(tmp_path / "nowhere", CFG)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_the_memory_is_pinned_and_a_step_right_after_changes_nothing(tmp_path, dtype):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trained, staging = Trained(1, dtype, device="cuda"), Staging(torch.device("cuda", 0), 60)
        for i in range(2):
            trained.step()
            staged = trained.whole()
            staging.stage(trained.state())
            trained.step()
            assert staging.memory is not None and staging.memory.is_pinned()
            staging.write(tmp_path / f"{i}")
            for name, value in read_weights(tmp_path / f"{i}", CFG).items():
                assert torch.equal(value, staged[name].cpu()), (i, name)
            trained.load(tmp_path / f"{i}")
            for name, value in trained.whole().items():
                assert torch.equal(value, staged[name]), (i, name)
        staging.close()
    finally:
        dist.destroy_process_group()
