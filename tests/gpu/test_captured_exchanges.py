"""CUDA graphs of programs that communicate by puts, gets and signals. Ranks are threads or processes. Tests replay graphs, call the program
between replays, and capture automatically."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from compiled_fusions import compiled, fusion_of, integer_arrays, lowered, sizes_of
from cuda_here import nccl
from processes import environment

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.options import Options
from hostweave.types.tensor import block_of

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

LOOPS = ("ag_matmul_put", "ag_pieces_put", "ag_matmul_pull", "matmul_rs_put", "mlp_put", "columns_put", "residual_put")
NAMES = (*LOOPS, "exchanges", "permutes")  # The last two programs communicate outside of loops.
RANKS = [ranks for ranks in (2, 4, 8) if ranks <= len(gpus())]
REPLAYS = 4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(len(gpus()) < 2, reason=f"needs 2 GPUs, and there are {len(gpus())}"),
]
OLD = len(gpus()) >= 2 and nccl() < 23007
BOTH = [(name, "peer") for name in NAMES] + [(name, "one_sided") for name in NAMES if not OLD]


@cache
def of_name(name: str, transport: str, ranks: int, graph: str | None = None) -> tuple[Fusion, hw.Program]:
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    return fusion, compiled(fusion, "cuda", Options(transport=transport, graph=graph))


class Arrays:
    def __init__(self, fusion: Fusion, rank: int, times: int, empty: Callable[..., Any]):
        self.fusion, self.rank, self.sizes = fusion, rank, sizes_of(fusion, times)
        self.given = [torch.from_dlpack(empty(block.shape, v.type.dtype, "cuda")) for v, block in self.blocks(seed=0)]

    def blocks(self, seed: int) -> list[tuple[Any, Any]]:
        self.values = integer_arrays(self.fusion, self.sizes, seed)
        return [(v, self.block(v, self.values[v.name])) for v in self.fusion.inputs]

    def block(self, value: Any, array: Any) -> Any:
        return array[block_of(value.type, self.fusion.mesh, self.rank, array.shape)]

    def fill(self, seed: int) -> None:
        for array, (_, block) in zip(self.given, self.blocks(seed), strict=True):
            array.copy_(torch.from_numpy(block.astype("f8")))

    def expect(self, results: Any) -> None:
        results = results if isinstance(results, tuple) else (results,)
        for output, got, want in zip(lowered(self.fusion).outputs, results, run_reference(self.fusion, self.values), strict=True):
            assert (got.double().cpu().numpy() == self.block(output, want).astype("f8")).all(), output.name


def in_no_window(shape: tuple[int, ...], dtype: Any, target: str) -> Any:
    return torch.empty(shape, dtype={"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}[str(dtype)], device=target)


def replay(name: str, transport: str, group: hw.Group, empty: Callable[..., Any]) -> None:
    """Replays a graph with new values. A call between replays has larger arrays, and needs more memory. A call after the last replay uses
    the arrays of the graph."""
    fusion, program = of_name(name, transport, group.count)
    arrays, larger = (Arrays(fusion, group.rank, times, empty) for times in (3, 24))
    step = program.capture(*arrays.given, group=group)
    for seed in range(REPLAYS):
        arrays.fill(seed)
        arrays.expect(step())
        step()  # One launch directly precedes another launch.
        arrays.expect(step())
        if seed % 2:
            other = larger if seed == 1 else arrays
            other.fill(seed)
            other.expect(program(*other.given, group=group))
    group.check()


def decide(name: str, group: hw.Group) -> None:
    """All ranks start to use graphs at the same call, although the ranks pass arrays in different orders. Later calls pass larger arrays,
    and new arrays on rank 0."""
    fusion, program = of_name(name, "one_sided", group.count, "auto")
    sets, larger = [Arrays(fusion, group.rank, 3, in_no_window) for _ in range(3)], Arrays(fusion, group.rank, 24, in_no_window)
    first = program(*sets[0].given, group=group)
    outs = [torch.empty_like(first) if torch.is_tensor(first) else tuple(map(torch.empty_like, first)) for _ in sets]

    def call(which: int, seed: int) -> None:
        sets[which].fill(seed)
        sets[which].expect(program(*sets[which].given, out=outs[which], group=group))

    for call_number in range(2, 20):
        call(call_number * (group.rank + 1) % 3, call_number)
    (one,) = (local for running, local in group.programs.items() if running.compiled is program.compiled)
    assert one.common_graphs.agreed
    assert one.native.graphs
    for _ in range(2):
        larger.fill(0)
        larger.expect(program(*larger.given, group=group))
        for which in range(3):
            if group.rank == 0:
                sets[which] = Arrays(fusion, group.rank, 3, in_no_window)
            call(which, which)
    assert one.common_graphs.agreed
    group.check()


def on_rank(group: hw.Group, programs: list[tuple[str, str]]) -> None:
    torch.cuda.set_device(group.local_rank)
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, transport in programs:
            replay(name, transport, group, in_no_window)
            if name in LOOPS:
                replay(name, transport, group, group.empty)
            if transport == "one_sided":
                decide(name, group)
            torch.cuda.synchronize()
            sys.stdout.write(f"rank {group.rank}: {name} by {transport} is right\n")
            sys.stdout.flush()


def build(ranks: int, programs: list[tuple[str, str]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hw.Program.build, [of_name(*program, ranks)[1] for program in programs]))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("program", BOTH, ids=" by ".join)
def test_replays_of_threads(program: tuple[str, str], ranks: int) -> None:
    build(ranks, [program])
    threads = hw.Threads(ranks)
    threads.run(lambda rank: on_rank(hw.init(threads, call_timeout=20), [program]))


@pytest.mark.parametrize("ranks", RANKS)
def test_replays_of_processes(ranks: int) -> None:
    build(ranks, BOTH)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is right") == ranks * len(BOTH), done.stdout


def main() -> None:
    on_rank(hw.init(timeout=120, call_timeout=20), BOTH)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
