"""The contract, for every loss of the registry: what a trainer may rely on without reading the file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import losses
from tests.losses.invariance import Totals, example, failures, from_token_loss
from tests.losses.registry import LOSSES, Entry

every_loss = pytest.mark.parametrize("entry", LOSSES, ids=lambda e: e.name)
FILES = sorted(p for p in Path(losses.__file__).parent.glob("*.py") if p.name != "__init__.py")


def seq_mean_token_mean(mask: Tensor, totals: Totals) -> Tensor:
    return losses.token_weight(
        mask, agg="seq_mean_token_mean", total_tokens=totals.tokens, total_rows=totals.rows
    )


@every_loss
def test_no_property_of_the_invariance_kit_is_broken(entry: Entry) -> None:
    inputs, mask = example()
    objective = from_token_loss(lambda x, m: entry.call(x, m)[0], seq_mean_token_mean)
    skip = ("micro_batch_split", "rank_split") if entry.by_batch else ()
    assert failures(objective, inputs, mask, wrt=entry.wrt, skip=skip) == {}


@every_loss
def test_loss_and_aux_have_the_masks_shape_and_are_zero_off_mask_and_aux_has_no_gradient(
    entry: Entry,
) -> None:
    inputs, mask = example()
    value, aux = entry.call({**inputs, entry.wrt: inputs[entry.wrt].clone().requires_grad_()}, mask)
    assert value.requires_grad and aux
    for x in (value, *aux.values()):
        assert x.shape == mask.shape and x.is_floating_point() and not x[~mask].any()
    assert not any(x.requires_grad for x in aux.values())


@every_loss
def test_one_graph_and_the_same_numbers_compiled(entry: Entry) -> None:
    inputs, mask = example()
    x = {**inputs, entry.wrt: inputs[entry.wrt].clone().requires_grad_()}
    torch._dynamo.reset()
    value, aux = torch.compile(entry.call, fullgraph=True, backend="eager")(x, mask)
    want, want_aux = entry.call(x, mask)
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(aux, want_aux)
    (grad,) = torch.autograd.grad(value.sum(), x[entry.wrt])
    torch.testing.assert_close(grad, *torch.autograd.grad(want.sum(), x[entry.wrt]))


@every_loss
def test_packed_tokens_give_what_padded_rows_give(entry: Entry) -> None:
    inputs, mask = example()
    inside = torch.arange(mask.shape[1]) < mask.shape[1] - 1  # drop a column; holes and masked rows stay
    row = torch.arange(mask.shape[0])[:, None].expand_as(mask)[:, inside].reshape(-1)
    packed = {k: x[:, inside].flatten(0, 1) for k, x in inputs.items()}
    rows = {"row": row, "n_rows": mask.shape[0] + 1} if entry.by_row else {}
    padded, _ = entry.call({k: x[:, inside] for k, x in inputs.items()}, mask[:, inside])
    value, _ = entry.call(packed, mask[:, inside].flatten(), **rows)
    torch.testing.assert_close(value, padded.flatten())


@every_loss
def test_bfloat16_inputs_lose_two_millionths_of_the_largest_loss_and_no_more(entry: Entry) -> None:
    """Against float64 on the same rounded inputs: everything after them is float32."""
    inputs, mask = example()
    low = {k: x.bfloat16() if x.is_floating_point() else x for k, x in inputs.items()}
    exact = {k: x.double() if x.is_floating_point() else x for k, x in low.items()}
    value, _ = entry.call(low, mask)
    want, _ = entry.call(exact, mask)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), want, rtol=0, atol=2e-6 * float(want.abs().max()) + 1e-6)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_is_a_leaf(path: Path) -> None:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0])
    assert "losses" not in roots and not roots & {"rl", "models", "numpy", "transformers"}


def test_the_helpers_that_policy_kl_and_correction_files_repeat_are_one_text() -> None:
    seen: dict[str, set[str]] = {}
    for path in FILES:
        if not path.stem.startswith(("distill", "linear", "genrm")):
            helpers = re.findall(
                r"^def (_kept|_out|_row_sum)(\(.*?)(?=^def |\Z)", path.read_text(), re.S | re.M
            )
            for name, body in helpers:
                seen.setdefault(name, set()).add(body.strip())
    assert {name: len(texts) for name, texts in seen.items()} == {"_kept": 1, "_out": 1, "_row_sum": 1}


def test_every_public_function_says_what_it_computes() -> None:
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_every_loss_advantage_and_correction_is_exported_and_in_the_index() -> None:
    index = (Path(losses.__file__).parent / "README.md").read_text()
    for path in FILES:
        if path.stem.startswith(("distill", "linear", "genrm", "cross")):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert hasattr(losses, node.name), f"{path.name}: {node.name} is not exported"
                assert f"`{node.name}`" in index, f"{node.name} is not in losses/README.md"


@every_loss
def test_a_tensor_that_does_not_fit_the_mask_is_refused(entry: Entry) -> None:
    inputs, mask = example()
    with pytest.raises(ValueError, match="mask"):
        entry.call(inputs, mask.double())
    with pytest.raises(ValueError, match="mask"):
        entry.call(inputs, mask[:, 1:])


def test_an_advantage_per_row_needs_its_axis_even_if_the_batch_is_square() -> None:
    logp, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"adv\[:, None\]"):
        losses.grpo_loss(logp, logp, torch.ones(3), mask)
    assert losses.grpo_loss(logp, logp, torch.ones(3)[:, None], mask)[0].sum() == -9
