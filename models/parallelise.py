"""One function that makes a model parallel: recompute, compile and shard each block, or not."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.compiler.config as caches
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.exchange import MESSAGE, Way
from models.replica import Replica, attach, replica_of
from models.transformer import Attention, Block, Transformer, rotate
from models.zero import Zero, leaves_room

Recompute = Literal["none", "selective", "full"]
DEAR = {
    "aten::mm", "aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention", "torch_attn::_varlen_attn", "viva::fa4",
    "flash_attn::_flash_attn_varlen_forward",
}  # fmt: skip


def parallelise(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    compile: bool,
    param_dtype: str = "float32",
    recompute: Recompute = "none",
    full_blocks: int = 0,
    offload: bool = False,
    keep_gathered: bool | None = None,
    shard: bool | None = None,
    join: bool | None = None,
    overlap: bool = True,
    message: int = MESSAGE,
    exchange: Way = "auto",
) -> Transformer:
    """Compile each block and shard the model over the one-dimensional mesh, in place.

    Ranks compute in `param_dtype`; gradients are added in float32 and SUMMED over ranks, for losses that are
    already divided by global counts. Parameters at rest and what an optimiser makes of them are float32
    shards, DTensors, with `offload` in the host's memory.

    shard: the weights that compute too, and gradients: FSDP2. Without, each rank has all of them. In float32,
    which is for one rank, they are all there is; in another `param_dtype` models/replica.py holds masters
    beside them, and models/zero.py for several ranks, which exchange gradients and new weights.
    None: where float32, `offload`, keep_gathered=False or, on several ranks, memory asks for it: with whole
    weights P (4 + 12 / ranks + 2 (1 - 1 / ranks)) bytes must leave a rank two fifths for activations.
    join: queries, keys and values come from one matmul; keys and values alone are too narrow for a GPU to
    share out. None: on CUDA.
    overlap: exchange gradients of whole weights beside the backward, or after it.
    message: bytes, at least, of one message from a rank to another.
    exchange: of whole weights and their gradients: in messages, or by writes into the memory of other ranks,
    which must be of one machine. auto: the latter on GPUs that have a way to each other.

    recompute: what the backward pass computes again. none: what the compiler finds cheaper than memory.
    selective: all but matmuls and attention. full: the block from its input. `full_blocks`: so many, from the
    first, do that whatever `recompute` says, until the others fit into memory.

    keep_gathered: each weight is gathered once until `reshard(model)`, which then must follow the last
    backward; else in each forward and again in each backward. None: where all of them take less than a tenth
    of the memory.

    Embedding, final norm and head belong to the root, which stays gathered from `forward` to the end of
    `backward`. So losses may use `model.head` outside of `forward`, under two conditions: take it after the
    forward of the same micro-batch (before, it is a shard), and let the loss depend on the hidden states too
    (their backward is what reduces the root's gradients). After a forward that no backward follows call
    `reshard(model)`, or the next forward reads the weights of before the optimiser step.
    """
    dtype = getattr(torch, param_dtype)
    # Inputs as they are: the root casts the embeddings, and rotary tables stay float32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    cuda = mesh.device_type == "cuda"
    several, wide = mesh.size() > 1, dtype == torch.float32
    n, memory = sum(p.numel() for p in model.parameters()), _memory() if cuda else math.inf
    if shard is None:
        roomy = leaves_room(n, dtype, mesh.size(), memory) and keep_gathered is not False
        shard = wide or offload or (several and not roomy)
    if keep_gathered is None:
        keep_gathered = n * dtype.itemsize < 0.1 * memory
    if not shard and (offload or (several and wide)):
        raise ValueError(
            "parallelise: weights stay whole without offload, and on several ranks in a param_dtype below "
            f"float32; got {param_dtype}, {mesh.size()} ranks, offload={offload}: leave out shard=False"
        )
    if shard and exchange == "memory":
        raise ValueError("parallelise: shards travel in messages: with exchange=memory set shard=False")
    offloading = CPUOffloadPolicy(pin_memory=cuda) if offload else OffloadPolicy()
    split = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    for i, block in enumerate(model.model.layers):
        assert isinstance(block, Block)
        if cuda if join is None else join:
            _join(block.self_attn)
        _recompute(block, "full" if i < full_blocks else recompute)
        if compile:
            block.compile(fullgraph=True)
        if shard:
            split(block, reshard_after_forward=not keep_gathered)
    if compile:
        model.model.norm.compile(fullgraph=True)
        _key_caches(Path(__file__).with_name("attention.py"))
    if not shard:
        if several:
            blocks = [*model.model.layers]
            zero = Zero(
                model, dtype, mesh=mesh, units=blocks, overlap=overlap, message=message, exchange=exchange
            )
            attach(model, zero)
        elif not wide:
            attach(model, Replica(model, dtype))
        return model
    split(model, reshard_after_forward=False)
    for module in _sharded(model):
        module.set_reshard_after_backward(not keep_gathered, recurse=False)
        if several:  # one rank has nothing to sum, and the division would be one more pass
            module.set_gradient_divide_factor(1.0)
            # The factor alone asks for a pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
    return model


def _memory() -> float:
    """Bytes of the GPU that are this process's."""
    share = torch.cuda.get_per_process_memory_fraction()
    return share * torch.cuda.get_device_properties().total_memory


def _key_caches(source: Path) -> None:
    """torch keeps compiled graphs on disk, by keys that do not see how an operation of ours goes backward:
    the file that says it becomes part of them, for all that this process compiles."""
    tag = f"{source.stem} {hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if tag not in caches.cache_key_tag:
        caches.cache_key_tag = f"{caches.cache_key_tag} {tag}".strip()


def reshard(model: nn.Module) -> None:
    """Give the gathered weights back: the next forward gathers those that the optimiser then has made.
    Without shards: put the masters in the place of what was computed with."""
    if (replica := replica_of(model)) is not None:
        replica.rest()
    for module in _sharded(model):
        module.reshard()


def sync_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward reduces gradients over ranks, or each adds them up, whole and in float32.
    Call it before the forward of each micro-batch."""
    if (replica := replica_of(model)) is not None:
        replica.micro(exchange=now)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (m for m in model.modules() if isinstance(m, FSDPModule))


def _join(attention: Attention) -> None:
    """Project to queries, keys and values by a single matmul. The parameters stay three: to lay them side by
    side is a read and a write of weights, nothing beside thousands of tokens."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    sizes = [part.out_features // attention.head_dim for part in parts]

    def heads(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias = torch.cat([p.bias for p in parts]) if attention.q_proj.bias is not None else None
        joined = F.linear(x, torch.cat([p.weight for p in parts]), bias)
        joined = rearrange(joined, "... (n h) -> ... n h", h=attention.head_dim)
        if attention.q_norm is None or attention.k_norm is None:
            # All are turned at once, values by nothing: parts that are put together again in the backward
            # take a kernel that loads them number by number.
            turned = (torch.arange(sum(sizes), device=x.device) < sum(sizes[:2]))[:, None]
            joined = rotate(joined, torch.where(turned, cos, 1.0), torch.where(turned, sin, 0.0))
            q, k, v = joined.split(sizes, dim=-2)
            return q, k, v
        q, k, v = joined.split(sizes, dim=-2)
        q, k = attention.q_norm(q), attention.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()  # a rotation makes the others anew

    attention.heads = heads


def _recompute(block: nn.Module, how: Recompute) -> None:
    """Put `checkpoint` around the block's forward; the names of its parameters stay."""
    if how == "none":
        return
    contexts: dict[str, Any] = {}
    if how == "selective":
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_the_dear)}
    inner = block.forward

    def forward(*args: Any) -> Any:  # a function of its own, not a partial: what the compiler starts from
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, **contexts)

    block.forward = forward


def _keep_the_dear(ctx: Any, op: Any, *args: Tensor, **kwargs: Any) -> CheckpointPolicy:
    dear = op.name().partition(".")[0] in DEAR
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
