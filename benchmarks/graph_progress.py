"""Cost of recording progress in CUDA graphs (HOSTWEAVE_GRAPH_PROGRESS). Reports of hangs use the recorded progress.

The benchmark uses all GPUs of this machine. It measures a layer of Llama 70B (TP 8 shapes), 16 MLP blocks with few tokens, and 16
all-reduces with residual and norm. Graphs with and without progress are launched alternately. Printed times are milliseconds of the slowest
rank, as medians over launches. All ranks start a launch together. Host times of a launch are in microseconds. Data is random, in bf16.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import decode
import sequence_parallel
import small_all_reduce
from peers import report
from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.types.tensor import block_shape, global_shape

REPETITIONS, WAIT = 15, 2_000_000
PLAIN, NOTED = "without progress", "with progress"
CASES = ("a layer, 8192 tokens", "a layer, 2048 tokens", "16 blocks, 16 tokens", "16 all-reduces, 16 rows")


def main() -> None:
    ranks = len(gpus())
    for case, times in zip(CASES, times_on_ranks(_calls, ranks, REPETITIONS, WAIT), strict=True):
        plain, noted = (statistics.median(times[name]) for name in (PLAIN, NOTED))
        print(f"{case}, {ranks} GPUs: {report.line(times, [PLAIN, NOTED])}; progress costs {noted / plain - 1:+.2%}", flush=True)


def programs_of(ranks: int) -> Iterator[tuple[hw.Program, dict[str, int]]]:
    """Programs, and sizes of their calls."""
    for tokens in (8192, 2048):
        sizes = sequence_parallel.sizes_of(tokens)
        yield hw.compile(sequence_parallel.fusion_of(ranks), target="cuda", options=hw.Options(sizes=sizes)), sizes
    yield decode.program_of(decode.TOGETHER, ranks), {"T": 16}
    yield small_all_reduce.program_of(ranks, "auto"), {"T": 16}


def _calls(rank: int, ranks: int) -> Iterator[dict[str, Callable[[], Any]]]:
    import torch

    group = hw.init()
    for (plain, sizes), (noted, _) in zip(programs_of(ranks), programs_of(ranks), strict=True):

        def random(value: Any, sizes: dict[str, int] = sizes, mesh: hw.Mesh = plain.host.mesh) -> Any:
            shape = block_shape(value.type, mesh, rank, global_shape(value.type, sizes))
            return (torch.randn(shape, device="cuda") / 64).to(torch.float32 if value.type.dtype is hw.f32 else torch.bfloat16)

        arrays = {value.name: random(value) for value in plain.host.arguments}
        os.environ.pop("HOSTWEAVE_GRAPH_PROGRESS", None)
        calls: dict[str, Callable[[], Any]] = {PLAIN: plain.capture(**arrays, sizes=sizes)}
        os.environ["HOSTWEAVE_GRAPH_PROGRESS"] = "1"
        calls[NOTED] = noted.capture(**arrays, sizes=sizes)
        torch.testing.assert_close(calls[PLAIN](), calls[NOTED]())
        for name, call in calls.items():
            us = statistics.median(_host_times(call))
            if rank == 0:
                print(f"host time of a launch, {name}: {us:.1f} us", flush=True)
        yield calls
        del calls
        plain.close()
        noted.close()
    group.close()


def _host_times(call: Callable[[], Any]) -> list[float]:
    from torch_door import microseconds_of

    return [us for _ in range(5) for us in microseconds_of(call, 4)[1:]]


if __name__ == "__main__":
    main()
