"""Times of calls on GPUs of this machine, with one torch.distributed process per GPU. Without a GPU, the processes use CPUs."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from peers.report import print_machine

WARMUPS = 5
POLL_SECONDS = 0.2

# Takes a rank and the number of ranks, and yields groups of calls by name. The calls of a group are timed alternately.
Make = Callable[[int, int], Iterable[Mapping[str, Callable[[], Any]]]]


def times_on_ranks(make: Make, ranks: int, repetitions: int, wait: int = 0) -> Iterator[dict[str, list[float]]]:
    """Yields the times of each group of calls: by name of the call, the milliseconds of the slowest rank in each repetition.

    All ranks start each call together. Before the call, the GPU spins for `wait` cycles while the host enqueues the call. `make` must be
    picklable, because the processes of the ranks call it, after they have initialised torch.distributed.
    """
    import torch.multiprocessing as processes

    print_machine()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # This port is free.
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(rank) for rank in range(ranks)]
        for path in paths:
            path.touch()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
        running = processes.spawn(_rank, args=(ranks, make, repetitions, wait, paths), nprocs=ranks, join=False)
        ended, given = False, 0
        while not ended:
            ended = running.join(timeout=POLL_SECONDS)  # `join` re-raises the exception of a rank.
            groups = zip(*(path.read_text().split("\n")[:-1] for path in paths), strict=False)
            for of_ranks in islice(groups, given, None):
                given += 1
                times = [json.loads(line) for line in of_ranks]
                yield {name: [max(ms) for ms in zip(*(one[name] for one in times), strict=True)] for name in times[0]}


def _rank(rank: int, ranks: int, make: Make, repetitions: int, wait: int, paths: list[Path]) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    else:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    with paths[rank].open("a") as file:
        for calls in make(rank, ranks):
            times = _times(calls, repetitions, wait) if torch.cuda.is_available() else _cpu_times(calls, repetitions)
            print(json.dumps(times), file=file, flush=True)
    calls = {}  # The assignment frees graphs, because NCCL cannot destroy a communicator that a graph uses.
    dist.destroy_process_group()


def _times(calls: Mapping[str, Callable[[], Any]], repetitions: int, wait: int) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in calls}
    together = torch.zeros(1, device="cuda")
    for repetition in range(repetitions + WARMUPS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            torch.cuda._sleep(wait)
            dist.all_reduce(together)  # All ranks start the call together.
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if repetition >= WARMUPS:
                times[name].append(begin.elapsed_time(end))
    return times


def _cpu_times(calls: Mapping[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - begin))
    return times
