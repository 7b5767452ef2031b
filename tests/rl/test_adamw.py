"""AdamW in one pass is torch's; the Triton kernel does what torch does: on CUDA, or with TRITON_INTERPRET=1
on a CPU."""

import importlib.util
import os

import pytest
import torch
from torch import nn

from models.checksum import has_triton
from models.replica import Held
from rl import adamw
from rl.adamw import Slot, norms_torch, norms_triton, squared_norm, step, step_torch, step_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(256,), (128,), (48,), (512, 64), (31, 32)]
ODD = [(7,), (33, 65), (1,), (2047,), (3, 683)]  # of no multiple of 16, and just below and above a chunk
HOW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
interpreted = importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"
kernel = pytest.mark.skipif(
    not (has_triton(DEVICE) or interpreted), reason="needs triton, and CUDA or TRITON_INTERPRET=1"
)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def rounded(p: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(p.detach().bfloat16())


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pieces", [1, 3])
def test_it_is_torchs_of_the_scaled_gradient_and_rounds_the_working_weights(pieces, dtype, units):
    torch.manual_seed(0)
    theirs = [nn.Parameter(noise(*shape)) for shape in SHAPES]
    masters = [nn.Parameter(p.detach().clone()) for p in theirs]
    working = [rounded(p) for p in masters]
    expected, ours = torch.optim.AdamW(theirs, **HOW), torch.optim.AdamW(masters, **HOW)
    for i in range(4):
        grads = [tuple(noise(*shape).to(dtype) for _ in range(pieces)) for shape in SHAPES]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = 0.3 * torch.stack(g).float().sum(0)
        for optimizer in (expected, ours):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + i)
        expected.step()
        held = [Held(m, w, g) for m, w, g in zip(masters, working, grads, strict=True)]
        norm = torch.cat([p.grad.flatten() for p in theirs if p.grad is not None]).norm()
        torch.testing.assert_close(0.3 * squared_norm(held).sqrt(), norm, rtol=1e-5, atol=0)
        told: list[int] = []
        factor = torch.tensor(0.3, device=DEVICE)
        parts = [held] if units == 1 else [held[:2], held[2:]]
        step(ours, parts, factor, written=told.append)
        assert told == ([0] if units == 1 else [1, 0])  # the larger first
    for p, m, w in zip(theirs, masters, working, strict=True):
        torch.testing.assert_close(m, p, rtol=1e-5, atol=1e-6)
        assert torch.equal(w, rounded(m))
        assert expected.state[p].keys() == ours.state[m].keys()
        for name, value in expected.state[p].items():
            got = ours.state[m][name].to(value.device)  # torch counts steps on the host
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-7)


def assert_rounded(working, master):
    """To the nearest on CUDA; Triton's interpreter cuts bfloat16 off."""
    if DEVICE.type == "cuda" or working.dtype != torch.bfloat16:
        assert torch.equal(working, master.to(working))
    else:
        torch.testing.assert_close(working.float(), master, rtol=2.0**-7, atol=0)


def slots(shapes, working, dtypes, pieces) -> list[Slot]:
    made = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        master, mean, square = noise(*shape), noise(*shape), noise(*shape).square()
        grads = tuple(noise(*shape).to(dtype) for _ in range(pieces))
        made.append(Slot(master, mean, square, master.to(working), grads))
    return made


@kernel
@pytest.mark.parametrize("shapes", [SHAPES, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("working", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_kernel_steps_as_torch_does(shapes, working, pieces, mixed):
    torch.manual_seed(1)
    dtypes = [torch.float32 if mixed and i % 2 else working for i in range(len(shapes))]
    expected = slots(shapes, working, dtypes, pieces)
    got = [Slot(*(x.clone() for x in s[:4]), s.grads) for s in expected]
    scalars = torch.tensor([0.3, 0.99, 0.02, 0.7], device=DEVICE)
    for _ in range(2):
        step_torch(expected, scalars, (0.9, 0.999), 1e-8)
        step_triton(got, scalars, (0.9, 0.999), 1e-8)
    for a, b in zip(got, expected, strict=True):
        for x, y in zip(a[:3], b[:3], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        assert_rounded(a.working, a.master)


@kernel
@pytest.mark.parametrize("shapes", [SHAPES, ODD], ids=["even", "odd"])
def test_the_kernel_s_squares_are_those_of_torch(shapes):
    torch.manual_seed(2)
    grads = [tuple(noise(*shape).bfloat16() for _ in range(1 + i % 2)) for i, shape in enumerate(shapes)]
    got, expected = torch.cat(norms_triton(grads)).sum(), torch.cat(norms_torch(grads)).sum()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


@kernel
def test_the_kernel_writes_to_nothing_but_its_elements():
    """Rows in the middle of larger tensors, as a rank's are, at addresses of no multiple of 16 bytes."""
    around = [torch.full((101, 7), 5.0, device=DEVICE) for _ in range(3)]
    weights = torch.full((101, 7), 5.0, device=DEVICE, dtype=torch.bfloat16)
    inner = [x[3:98] for x in (*around, weights)]
    step_triton([Slot(*inner, (torch.ones_like(inner[0]),))], torch.ones(4, device=DEVICE), (0.9, 0.9), 1.0)
    for x in (*around, weights):
        assert (x[:3] == 5.0).all() and (x[98:] == 5.0).all() and (x[3:98] != 5.0).all()


@kernel
def test_a_gradient_whose_rows_lie_apart_is_read_right():
    grad = noise(64, 32).bfloat16().T
    (got,), (expected,) = norms_triton([(grad,)]), norms_torch([(grad,)])
    torch.testing.assert_close(got.sum(), expected.sum(), rtol=1e-5, atol=0)
    master = noise(32, 64)
    own = [[x.clone() for x in (master, master, master.square(), master.bfloat16())] for _ in "ab"]
    a, b = (Slot(*tensors, (grad,)) for tensors in own)
    scalars = torch.tensor([0.3, 0.99, 0.02, 0.7], device=DEVICE)
    step_torch([a], scalars, (0.9, 0.999), 1e-8)
    step_triton([b], scalars, (0.9, 0.999), 1e-8)
    torch.testing.assert_close(b.master, a.master, rtol=1e-5, atol=1e-6)


def test_every_chunk_of_every_tensor_has_its_place_once():
    n = adamw.BLOCK
    chunks = adamw._chunks((1, n, n + 1, 3 * n), torch.device("cpu")).tolist()
    assert chunks == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]


@kernel
def test_warming_up_launches_each_kind_of_kernel_on_nothing_of_the_run(monkeypatch):
    parameter, launched, launch = nn.Parameter(torch.ones(7, device=DEVICE)), set(), adamw._launch
    optimizer, working = torch.optim.AdamW([parameter]), parameter.detach().bfloat16()

    def counted(rows, n_grads, *rest):
        launched.add((len(rows[0]) > n_grads, n_grads, rows[0][0].dtype, rows[0][0].numel() % 16))
        launch(rows, n_grads, *rest)

    monkeypatch.setattr(adamw, "has_triton", lambda device: True)
    monkeypatch.setattr(adamw, "_launch", counted)
    adamw.warm(optimizer, working, ranks=2)
    assert len(launched) == 16  # norm or step, 1 piece or 2, bfloat16 or float32, aligned or not
    assert not optimizer.state and bool((parameter == 1).all() and (working == 1).all())
