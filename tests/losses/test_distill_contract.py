"""What every divergence keeps to: the invariance kit, one graph, bfloat16, and which arguments it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from losses.distill import KINDS, distill_advantage, full_divergence, sampled_divergence, topk_divergence
from tests.losses.divergences import ON, gradient, logs
from tests.losses.invariance import Totals, example, failures, from_token_loss


def call(name: str, kind: Any) -> Any:
    def topk(x: dict[str, Tensor], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ids, wide = (
            torch.tensor([3, 0]).expand(*mask.shape, 2),
            torch.promote_types(x["logits_ref"].dtype, torch.float32),
        )
        teacher = x["logits_ref"].to(wide).log_softmax(-1)[..., [3, 0]]
        return topk_divergence(x["logits"], ids, teacher, mask, kind=kind)

    return {
        "full": lambda x, mask: full_divergence(x["logits"], x["logits_ref"], mask, kind=kind),
        "topk": topk,
        "sampled": lambda x, mask: sampled_divergence(x["logp"], x["logp_ref"], mask, kind=kind),
    }[name]


CALLS = [(n, k) for n in ("full", "topk") for k in KINDS] + [("sampled", "forward"), ("sampled", "reverse")]
every_call = pytest.mark.parametrize(("name", "kind"), CALLS)


@every_call
def test_no_property_of_the_invariance_kit_is_broken(name: str, kind: str) -> None:
    inputs, mask = example()
    fn, wrt = call(name, kind), "logp" if name == "sampled" else "logits"

    def weight(mask: Tensor, totals: Totals) -> Tensor:
        return mask / max(totals.tokens, 1)

    assert failures(from_token_loss(lambda x, m: fn(x, m)[0], weight), inputs, mask, wrt=wrt) == {}


@every_call
def test_one_graph_and_the_same_numbers_compiled(name: str, kind: str) -> None:
    inputs, mask = example()
    fn, wrt = call(name, kind), "logp" if name == "sampled" else "logits"
    x = {**inputs, wrt: inputs[wrt].clone().requires_grad_()}
    torch._dynamo.reset()
    loss, aux = torch.compile(fn, fullgraph=True, backend="aot_eager")(x, mask)
    want, want_aux = fn(x, mask)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(aux, want_aux)
    torch.testing.assert_close(gradient(loss, x[wrt]), gradient(want, x[wrt]))
    assert not any(v.requires_grad for v in aux.values()) and all(not v[~mask].any() for v in aux.values())


@every_call
def test_bfloat16_inputs_lose_nothing_but_their_own_rounding(name: str, kind: str) -> None:
    """Within 1e-5 nats, and 1e-5 of the loss, of float64 on the same rounded inputs."""
    inputs, mask = example()
    low = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    exact = {k: v.double() if v.is_floating_point() else v for k, v in low.items()}
    loss, _ = call(name, kind)(low, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), call(name, kind)(exact, mask)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"kind": "backward"}, "kind"), ({"temperature": 0.0}, "temperature"), ({"beta": 1.5}, "beta"),
        ({"alpha": 0.0}, "alpha"), ({"vocab": 9}, "vocab"), ({"teacher_temperature": -1.0}, "temperature"),
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(bad: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        full_divergence(logs(0.5, 0.5), logs(0.5, 0.5), ON, **bad)


def test_top_k_of_one_renormalised_and_ids_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="always 0"):
        topk_divergence(logs(0.5, 0.5), torch.tensor([[0]]), logs(0.5), ON, tail=False)
    with pytest.raises(ValueError, match="teacher_ids"):
        topk_divergence(logs(0.5, 0.5), torch.tensor([[0, 1]]), logs(0.5), ON)
    with pytest.raises(ValueError, match="clip"):
        distill_advantage(torch.zeros(1), torch.zeros(1), ON, clip=0.0)
