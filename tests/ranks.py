"""A function in several processes that reach each other."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _process(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store_{work.__name__}_{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    result = work(rank, ranks, folder, *args)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def spawn(ranks: int, folder: Any, work: Callable[..., Any], *args: Any) -> Any:
    """What rank 0 returned of work(rank, ranks, folder, *args). Once for a folder and a function."""
    mp.spawn(_process, (ranks, str(folder), work, args), nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
    return torch.load(f"{folder}/result")
