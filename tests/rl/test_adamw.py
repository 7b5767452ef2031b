"""AdamW in one pass is torch's."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import metrics

from models.replica import Held
from rl.adamw import step

SHAPES = [(256,), (128,), (48,), (512, 64), (31, 32)]
HOW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def rounded(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(p.detach().bfloat16())


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_torchs_of_the_scaled_gradient_and_rounds_the_working_weights(dtype, compile):
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    masters = [nn.Parameter(p.detach().clone()) for p in theirs]
    working = [rounded(p) for p in masters]
    expected, ours = torch.optim.AdamW(theirs, **HOW), torch.optim.AdamW(masters, **HOW)
    for i in range(4):
        grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = 0.3 * g.float()
        for optimizer in (expected, ours):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + i)
        expected.step()
        held = [Held(m, w, g) for m, w, g in zip(masters, working, grads, strict=True)]
        step(ours, held, torch.tensor(0.3), compile=compile)
    for p, m, w in zip(theirs, masters, working, strict=True):
        torch.testing.assert_close(m, p, rtol=1e-5, atol=1e-6)
        assert torch.equal(w, rounded(m))
        assert expected.state[p].keys() == ours.state[m].keys()
        for name, value in expected.state[p].items():
            torch.testing.assert_close(ours.state[m][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_one_kernel_a_graph_and_no_graph_for_a_size_or_a_learning_rate():
    torch._dynamo.reset()
    metrics.reset()
    counters.clear()
    for n in (2, 3, 5, 8):
        p = nn.Parameter(torch.randn(n, 128))
        optimizer = torch.optim.AdamW([p], lr=0.1 / n)
        step(optimizer, [Held(p, rounded(p), torch.randn(n, 128).bfloat16())], torch.ones(()), compile=True)
    assert metrics.generated_kernel_count == counters["stats"]["unique_graphs"] == 1
