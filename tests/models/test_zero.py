"""Gradients and weights that ranks exchange, whatever the rows of their parameters."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from models.attention import make_layout, packed_attention
from models.exchange import Way
from models.parallelise import parallelise, sync_gradients
from models.replica import replica_of, summed
from models.transformer import Transformer
from models.zero import Zero, leaves_room
from rl.adamw import squared_norm
from tests.ranks import spawn
from tests.rl.steps import MODEL


def fresh() -> Transformer:
    model = Transformer(MODEL)
    model.init_weights(torch.Generator().manual_seed(5))
    return model


class Odd(nn.Module):
    """Rows that do not divide, and fewer than ranks; a parameter that only some ranks use, and one none."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.few = nn.Parameter(torch.randn(1, 5)), nn.Parameter(torch.randn(4))
        self.none, self.all = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(7, 5))

    def forward(self, some: bool) -> torch.Tensor:
        total = self.all.sum() + 2 * self.few.sum()
        return total + 4 * self.some.sum() if some else total


def _odd(rank: int, ranks: int, folder: str, exchange: Way) -> Any:
    model = Odd()
    mesh = DeviceMesh("cpu", list(range(ranks)))
    zero = Zero(model, torch.bfloat16, mesh=mesh, units=[], exchange=exchange)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    found = []
    for micros in (1, 2):
        for idle in (False, True):
            for i in range(micros):
                zero.micro(exchange=i == micros - 1)
                loss = model(rank == 0)
                if not (idle and rank == 1):
                    (3 * loss).backward()
            held = [h for unit in zero.gradients() for h in unit]
            zero.rest()
            grads = {n: torch.zeros(s) for n, s in shapes.items()}
            names = {p: n for n, p in model.named_parameters()}
            for h in held:
                own, master = summed(h.grads), h.master
                own = DTensor.from_local(own, mesh, [Shard(0)], shape=master.shape, stride=master.stride())
                grads[names[master]] = own.full_tensor()
            norm = zero.over_ranks(squared_norm(held)).sqrt()
            found.append({n: g.unique().tolist() for n, g in grads.items()})
            torch.testing.assert_close(norm, torch.cat([g.flatten() for g in grads.values()]).norm())
            zero.forget()
    return found


@pytest.mark.parametrize("exchange", ["messages", "memory"])
def test_rows_that_are_none_and_gradients_that_are_missing_count_as_zero(tmp_path, exchange):
    found = spawn(3, tmp_path, _odd, exchange)
    for (micros, busy), grads in zip([(1, 3), (1, 2), (2, 3), (2, 2)], found, strict=True):
        each = 3.0 * micros
        assert grads == {"some": [4 * each], "few": [2 * each * busy], "none": [0], "all": [each * busy]}


def _late(rank: int, ranks: int, folder: str) -> Any:
    """Rank 1 is late wherever the others could already write over what it still reads."""
    model = Odd()
    zero = Zero(model, torch.bfloat16, mesh=DeviceMesh("cpu", [*range(ranks)]), units=[], exchange="memory")

    def late(pieces: Sequence[Tensor]) -> Tensor:
        time.sleep(0.3 * (rank == 1))
        return summed(pieces)

    def backward(times: float) -> None:
        zero.micro(exchange=True)
        (times * model(True)).backward()

    def found() -> set[float]:
        return {x for unit in zero.gradients() for h in unit for x in late(h.grads).unique().tolist()}

    for times in (1.0, 3.0):
        backward(times)
        assert found() <= {0.0, 2 * times, 4 * times, 8 * times}
        zero.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.zero.summed", late)
        backward(1.0)
        backward(3.0)
        assert found() <= {0.0, 8.0, 16.0, 32.0}
    zero.forget()
    zero.work()
    before = [w.detach().clone() for w in zero.working]
    time.sleep(0.3 * (rank == 1))
    assert all(torch.equal(w, b) for w, b in zip(zero.working, before, strict=True))
    with torch.no_grad():
        torch._foreach_mul_(zero.masters, 2.0)
    zero.outdated()
    zero.work()
    assert all(torch.equal(w, 2 * b) for w, b in zip(zero.working, before, strict=True))


def test_nobody_writes_into_memory_that_another_rank_still_reads(tmp_path):
    spawn(2, tmp_path, _late)


def _order(rank: int, ranks: int, folder: str, overlap: bool, message: int) -> Any:
    mesh = DeviceMesh("cpu", list(range(ranks)))
    how: dict[str, Any] = {"compile": False, "param_dtype": "bfloat16"}
    model = parallelise(fresh(), mesh, overlap=overlap, message=message, **how)
    zero = replica_of(model)
    assert isinstance(zero, Zero)
    sync_gradients(model, True)
    ids, seen = torch.arange(3), []
    layout = make_layout([3])
    hidden = model(ids, ids, lambda layer, q, k, v: packed_attention(q, k, v, layout))
    model.model.embed_tokens.weight.register_hook(lambda g: seen.append(zero.exchanged))
    (hidden @ model.head.T).sum().backward()
    after = zero.exchanged
    assert sum(map(len, zero.gradients())) == len(zero.masters)
    sizes = [sum(zero.working[i].nbytes for i in unit) // ranks for unit in zero.units]
    return seen, after, zero.exchanged, sizes


@pytest.mark.parametrize("overlap", [True, False])
def test_the_blocks_gradients_travel_while_backward_goes_on_or_after_it(tmp_path, overlap):
    (before_embedding,), after, last, sizes = spawn(2, tmp_path, _order, overlap, 1)
    assert len(sizes) == last == 4  # final norm and two blocks; then embedding and head
    assert (before_embedding, after) == ((3, 4) if overlap else (0, 0))


def test_short_messages_are_joined_until_they_are_long_enough(tmp_path):
    _, _, _, (norm, block, other, embedding) = spawn(2, tmp_path, _order, True, 1)
    for message, expected in [
        (norm + 1, [norm + block, other, embedding]),
        (norm + block + 1, [norm + block + other, embedding]),
        (2**28, [norm + block + other + embedding]),
    ]:
        folder = tmp_path / str(message)
        folder.mkdir()
        seen, after, last, sizes = spawn(2, folder, _order, True, message)
        assert sizes == expected and last == after == len(sizes) and seen == [len(sizes) - 1]


@pytest.mark.parametrize(
    ("billions", "ranks", "gb", "roomy"),
    [
        (7.62, 2, 150, True),
        (14.8, 2, 150, False),
        (7.62, 2, 85, False),
        (3.09, 2, 85, True),
        (7.62, 1, 150, False),
    ],
)
def test_whole_weights_leave_two_fifths_of_memory_to_activations(billions, ranks, gb, roomy):
    """On two ranks 11 bytes a parameter: 2 of weights, 2 of gradients, 1 of the other's, 6 of masters and
    moments."""
    assert leaves_room(int(billions * 1e9), torch.bfloat16, ranks, gb * 1e9) == roomy


def _choices(rank: int, ranks: int, folder: str) -> Any:
    mesh = DeviceMesh("cpu", list(range(ranks)))

    def whole_with(**how: Any) -> bool:
        return replica_of(parallelise(fresh(), mesh, compile=False, **how)) is not None

    assert whole_with(param_dtype="bfloat16") and whole_with(param_dtype="bfloat16", keep_gathered=True)
    assert not whole_with(param_dtype="float32")
    assert not whole_with(param_dtype="bfloat16", offload=True)
    assert not whole_with(param_dtype="bfloat16", keep_gathered=False)
    assert not whole_with(param_dtype="bfloat16", shard=True)
    refused: list[dict[str, Any]] = [{"param_dtype": "float32"}, {"param_dtype": "bfloat16", "offload": True}]
    for how in refused:
        with pytest.raises(ValueError, match="leave out shard=False"):
            whole_with(shard=False, **how)
    with pytest.raises(ValueError, match="shards travel in messages"):
        whole_with(shard=True, param_dtype="bfloat16", exchange="memory")


def test_weights_stay_whole_where_they_are_rounded_and_memory_allows(tmp_path):
    spawn(2, tmp_path, _choices)
