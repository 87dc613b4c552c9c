"""Times of calls of torch on all GPUs of this machine, one process a GPU."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

WARMUPS = 5

# Makes, on one rank, the calls that are to be timed: (rank, number of ranks) -> calls.
Make = Callable[[int, int], Iterable[Callable[[], Any]]]


def times_on_ranks(make: Make, ranks: int, repetitions: int) -> list[list[float]]:
    """Milliseconds [call][repetition], of the slowest rank each time. All ranks begin each call together.

    `make` is a function of a module, since other processes run it; torch.distributed is ready when they do.
    """
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
        processes.spawn(_rank, args=(ranks, make, repetitions, folder), nprocs=ranks, join=True)
        per_rank = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
    return [[max(times) for times in zip(*calls, strict=True)] for calls in zip(*per_rank, strict=True)]


def _rank(rank: int, ranks: int, make: Make, repetitions: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    times = [_times(call, repetitions) for call in make(rank, ranks)]
    (Path(folder) / str(rank)).write_text(json.dumps(times))
    dist.destroy_process_group()


def _times(call: Callable[[], Any], repetitions: int) -> list[float]:
    import torch
    import torch.distributed as dist

    times = []
    for repetition in range(repetitions + WARMUPS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if repetition >= WARMUPS:
            times.append(begin.elapsed_time(end))
    return times
