"""Mixed precision without shards: float32 masters, and the weights of lower precision that compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter in both precisions, or the rows of it that a rank steps, and its gradient in the step."""

    master: nn.Parameter  # of rows a DTensor
    working: Tensor
    grads: tuple[Tensor, ...]  # to be added in float32: of the working dtype, or sums over micro-batches


def summed(pieces: Sequence[Tensor]) -> Tensor:
    """In float32, and in the order of ranks: the same bits on whichever rank."""
    total = pieces[0].float()
    for piece in pieces[1:]:
        total = total + piece
    return total


class Replica:
    """What FSDP2 does over ranks, for one that has them all: no gathering, no reduction, no copies of both.

    At rest the model's parameters are its masters: float32, what a state dict holds and an optimiser steps.
    Its forward puts working weights in their places, the masters rounded to `dtype`, until `rest`. Gradients
    of a second micro-batch, and of any after it, are added in float32; that of a single one stays as it is.

    Bytes a parameter, in bfloat16: 4 + 2, with two moments 14; the gradient 2, or 6 while micro-batches add.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        own = [(module, name, p) for module in model.modules() for name, p in module._parameters.items()]
        self.slots = [(module, name) for module, name, p in own if p is not None]
        self.masters = [p for _, _, p in own if p is not None]
        self.working: list[nn.Parameter] = [nn.Parameter(p.detach().to(dtype)) for p in self.masters]
        self.rounded = self._versions()
        model.register_forward_pre_hook(lambda *_: self.work())

    def work(self) -> None:
        """Put the working weights in place, rounded anew if any master has been written since."""
        self._fold()
        if self.rounded != self._versions():
            self._round()
            self.rounded = self._versions()
        self._place(self.working)

    def outdated(self) -> None:
        """Say that masters have been written by what torch does not count: operations on several DTensors at
        once, and so its optimisers with foreach or fused."""
        self.rounded = []

    def rest(self) -> None:
        """Put the masters in place."""
        self._place(self.masters)

    def micro(self, exchange: bool) -> None:
        """Say, before its forward, that a micro-batch begins, and whether ranks add up gradients in its
        backward."""

    def gradients(self) -> list[list[Held]]:
        """Of the step, where there are any, in units that are stepped one after the other."""
        if any(p.grad is not None for p in self.masters):
            self._fold()
        grads = [
            w.grad if m.grad is None else m.grad for m, w in zip(self.masters, self.working, strict=True)
        ]
        both = zip(self.masters, self.working, grads, strict=True)
        return [[Held(m, w, (g,)) for m, w, g in both if g is not None]]

    def over_ranks(self, total: Tensor) -> Tensor:
        """The sum of what each rank has of a total over `gradients`."""
        return total

    def written(self, i: int) -> None:
        """Say that the i-th unit of `gradients` has been stepped: masters and working weights."""

    def stepped(self) -> None:
        """Say that all have been. Forgets the gradients."""
        self.forget()
        self.rounded = self._versions()

    def forget(self) -> None:
        for p in (*self.masters, *self.working):
            p.grad = None

    def _fold(self) -> None:
        for master, working in zip(self.masters, self.working, strict=True):
            if working.grad is not None:
                if master.grad is None:
                    master.grad = working.grad.float()
                else:
                    master.grad.add_(working.grad)
                working.grad = None

    @torch.no_grad()
    def _round(self) -> None:
        torch._foreach_copy_([*self.working], [*self.masters])

    def _place(self, parameters: Sequence[nn.Parameter]) -> None:
        for (module, name), p in zip(self.slots, parameters, strict=True):
            module._parameters[name] = p

    def _versions(self) -> list[int]:
        """torch counts the writes to a tensor: by an optimiser, a loaded checkpoint, anybody."""
        return [p._version for p in self.masters]


def own_part(x: Tensor) -> Tensor:
    """This rank's rows of a DTensor; any other tensor is its own. They share memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def attach(model: nn.Module, replica: Replica) -> None:
    object.__setattr__(model, "_replica", replica)  # past Module's, which looks for parameters


def replica_of(model: nn.Module) -> Replica | None:
    return getattr(model, "_replica", None)
