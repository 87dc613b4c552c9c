"""All-gather + matmul and matmul + reduce-scatter on all GPUs of this machine, beside torch: the NCCL collective, then the matmul,
and torch's fused operators, which pipeline both through symmetric memory.

Milliseconds of the slowest rank, the median over calls that all ranks begin together; random bf16 data. torch runs one
process a GPU, Hostweave one thread a GPU. Puts want NCCL 2.29 or later (`NCCL_HOME` names another one).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.base.errors import HostweaveError
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion

REPETITIONS = 15
WAIT = 2_000_000  # cycles of the GPU before each call of torch: the time of its host does not count, as it does not in ours


@dataclass(frozen=True)
class Case:
    """M x K x N of one rank, M after the gather or before the scatter."""

    name: str
    kind: str  # ag or rs
    M: int
    K: int
    N: int


CASES = (
    Case("llama70b gate_up", "ag", 8192, 8192, 7168),
    Case("llama70b qkv", "ag", 8192, 8192, 1280),
    Case("llama8b gate_up", "ag", 8192, 4096, 3584),
    Case("llama70b gate_up, M = 2048", "ag", 2048, 8192, 7168),
    Case("llama70b down", "rs", 8192, 3584, 8192),
    Case("llama70b o_proj", "rs", 8192, 1024, 8192),
    Case("llama8b down", "rs", 8192, 1792, 4096),
)
# The program, chunks as a multiple of the ranks (by block) or as a number (across shards), and by what.
VARIANTS: tuple[tuple[str, int, int, str | None], ...] = (
    ("put", 1, 0, "put"),
    ("p2p", 1, 0, "p2p"),
    ("ring", 1, 0, "ring"),
    ("collective, 2 chunks", 0, 2, "collective"),
    ("collective, 4 chunks", 0, 4, "collective"),
    ("no overlap", 0, 0, None),
)


def main() -> None:
    ranks = len(gpus())
    for case, peer in zip(CASES, times_on_ranks(_torch_calls, ranks, REPETITIONS, WAIT), strict=True):
        base, fused = (statistics.median(peer[name]) for name in ("torch", "torch fused"))
        shape = f"{case.name} {case.M} x {case.K} x {case.N}, {case.kind}, {ranks} GPUs"
        print(f"{shape}: torch {base:.3f} ms, fused {fused:.3f} ms", flush=True)
        for name, blocks, slices, by in VARIANTS:
            program = hw.compile(_fusion(case, ranks, blocks * ranks or slices, by), target="cuda")
            try:
                times = program.measure(warmups=5, repetitions=REPETITIONS, **_arrays(case, ranks))
            except HostweaveError as why:
                print(f"  {name:22} not here: {why}", flush=True)
                continue
            ms = statistics.median(max(rank[i].total_ms for rank in times) for i in range(REPETITIONS))
            host = max(statistics.median(t.enqueue_us for t in rank) for rank in times)
            ratios = f"{base / ms:5.2f} of torch's speed, {fused / ms:5.2f} of fused"
            print(f"  {name:22} {ms:7.3f} ms, {ratios}, host {host:.0f} us", flush=True)
            program.close()


def _fusion(case: Case, ranks: int, chunks: int, by: str | None) -> Fusion:
    mesh = hw.Mesh(x=ranks)
    if by == "collective":
        by = "all_gather" if case.kind == "ag" else None
        chunking = "across_shards"
    else:
        chunking = None

    def ag(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        y = hw.matmul(hw.reshard(x, "M", "K"), w)
        return y.stream("M", chunks=chunks, algorithm=by, chunking=chunking) if chunks else y

    def rs(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        y = hw.reshard(hw.matmul(x, w), "M@x", "N")
        return y.stream("M", chunks=chunks, algorithm=by, chunking=chunking) if chunks else y

    if case.kind == "ag":
        return hw.fusion(mesh=mesh, x=hw.bf16["M@x", "K"], w=hw.bf16["K", "N"])(ag)
    return hw.fusion(mesh=mesh, x=hw.bf16["M", "K@x"], w=hw.bf16["K@x", "N"])(rs)


def _arrays(case: Case, ranks: int) -> dict[str, Any]:
    inner = case.K if case.kind == "ag" else case.K * ranks
    random = np.random.default_rng(0)
    return {
        "x": random.standard_normal((case.M, inner), np.float32).astype(ml_dtypes.bfloat16),
        "w": random.standard_normal((inner, case.N), np.float32).astype(ml_dtypes.bfloat16),
    }


# --- torch ------------------------------------------------------------------------------------------------------------


def _torch_calls(rank: int, ranks: int) -> Iterator[dict[str, Callable[[], None]]]:
    import torch

    for case in CASES:
        rows = case.M // ranks if case.kind == "ag" else case.M
        x = torch.randn(rows, case.K, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(case.K, case.N, device="cuda", dtype=torch.bfloat16)
        whole = torch.empty(case.M, case.K if case.kind == "ag" else case.N, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(case.M if case.kind == "ag" else case.M // ranks, case.N, device="cuda", dtype=torch.bfloat16)
        yield {"torch": _torch_call(case.kind, x, w, whole, y), "torch fused": _fused_call(case.kind, x, w)}


def _torch_call(kind: str, x: Any, w: Any, whole: Any, y: Any) -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    def ag() -> None:
        dist.all_gather_into_tensor(whole, x)
        torch.mm(whole, w, out=y)

    def rs() -> None:
        torch.mm(x, w, out=whole)
        dist.reduce_scatter_tensor(y, whole)

    return ag if kind == "ag" else rs


def _fused_call(kind: str, x: Any, w: Any) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    enable_symm_mem_for_group(group)
    if kind == "ag":
        return lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group, return_A=False)
    return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)


if __name__ == "__main__":
    main()
