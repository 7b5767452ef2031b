"""One function that makes a model parallel: compile per block, then shard per block and at the root."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from models.transformer import Transformer


def parallelise(
    model: Transformer, mesh: DeviceMesh, *, compile: bool, param_dtype: str = "float32"
) -> Transformer:
    """Compile each block and shard the model over the one-dimensional mesh (FSDP2), in place.

    Parameters are gathered in `param_dtype`; gradients are reduced in float32 and SUMMED over ranks, for
    losses that are already divided by global counts.

    Embedding, final norm and head belong to the root, which stays gathered from `forward` to the end of
    `backward`. So losses may use `model.head` outside of `forward`, under two conditions: take it after the
    forward of the same micro-batch (before, it is a shard), and let the loss depend on the hidden states too
    (their backward is what reduces the root's gradients). After a forward that no backward follows call
    `model.reshard()`, or the next forward reads the root's weights of before the optimiser step.
    """
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, param_dtype), reduce_dtype=torch.float32)
    for block in model.model.layers:
        if compile:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _sum_over_ranks(module)
    return model


def _sum_over_ranks(module: nn.Module) -> None:
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # The factor alone asks for a pre-multiplied sum, which gloo does not have.
    module.set_force_sum_reduction_for_comms(True)
