"""What a piece of code makes and multiplies, operation by operation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Under it: the most elements of any tensor that was made, and how many matmuls were done."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.matmuls = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else [out]
        self.numel = max([self.numel, *(x.numel() for x in made if isinstance(x, Tensor))])
        self.matmuls += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "baddbmm")
        return out
