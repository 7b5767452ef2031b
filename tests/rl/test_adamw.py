"""AdamW in one pass is torch's."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import metrics

from models.replica import Held
from rl.adamw import squared_norm, step

SHAPES = [(256,), (128,), (48,), (512, 64), (31, 32)]
HOW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def rounded(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(p.detach().bfloat16())


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pieces", [1, 3])
def test_it_is_torchs_of_the_scaled_gradient_and_rounds_the_working_weights(pieces, dtype, compile):
    torch._dynamo.reset()
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    masters = [nn.Parameter(p.detach().clone()) for p in theirs]
    working = [rounded(p) for p in masters]
    expected, ours = torch.optim.AdamW(theirs, **HOW), torch.optim.AdamW(masters, **HOW)
    for i in range(4):
        grads = [tuple(torch.randn(shape).to(dtype) for _ in range(pieces)) for shape in SHAPES]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = 0.3 * torch.stack(g).float().sum(0)
        for optimizer in (expected, ours):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + i)
        expected.step()
        held = [Held(m, w, g) for m, w, g in zip(masters, working, grads, strict=True)]
        norm = torch.cat([p.grad.flatten() for p in theirs if p.grad is not None]).norm()
        torch.testing.assert_close(0.3 * squared_norm(held, compile=compile).sqrt(), norm, rtol=1e-5, atol=0)
        step(ours, held, torch.tensor(0.3), compile=compile)
    for p, m, w in zip(theirs, masters, working, strict=True):
        torch.testing.assert_close(m, p, rtol=1e-5, atol=1e-6)
        assert torch.equal(w, rounded(m))
        assert expected.state[p].keys() == ours.state[m].keys()
        for name, value in expected.state[p].items():
            torch.testing.assert_close(ours.state[m][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2])
def test_one_kernel_a_graph_and_no_graph_for_a_size_or_a_learning_rate(pieces):
    torch._dynamo.reset()
    metrics.reset()
    counters.clear()
    for n in (2, 3, 5, 8):
        p = nn.Parameter(torch.randn(n, 128))
        optimizer = torch.optim.AdamW([p], lr=0.1 / n)
        grads = tuple(torch.randn(n, 128).bfloat16() for _ in range(pieces))
        held = [Held(p, rounded(p), grads)]
        squared_norm(held, compile=True)
        step(optimizer, held, torch.ones(()), compile=True)
    graphs = 1 if pieces == 1 else 2  # the norm of a sum is compiled too
    assert metrics.generated_kernel_count == counters["stats"]["unique_graphs"] == graphs
