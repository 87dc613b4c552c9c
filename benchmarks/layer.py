"""Forward pass of a Llama 3 MLP, compared with eager PyTorch and torch.compile, both with NCCL collectives.

The cases are: 8B on one GPU; 70B on all GPUs of this machine, tensor-parallel (an all_reduce) and sequence-parallel (an all_gather and a
reduce_scatter); and the sequence-parallel 70B at per-rank shapes of TP 8. On several GPUs, Hostweave has three variants: sequential, the
compiler's choice, and the compiler's choice in a CUDA graph. On one GPU, only the sequential variant is measured. For the sequence-parallel
MLP, another variant of torch.compile fuses the collectives with matmuls (async TP). Gate and up share one weight in all variants. Data is
random, in bf16. One process per GPU runs the variants of a row alternately on the same arrays. Printed times are milliseconds of the
slowest rank, as medians over calls. All ranks start a call together. Later measurements may be slower, if matmuls reach the power limit of
the GPU. Arguments are names of cases, such as "70B at TP8"; default: all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from peers import report
from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.build.cuda import gpus

REPETITIONS = 15
WAIT = 2_000_000  # cycles that a kernel spins before each call, to hide host time, as in a model of many layers
TOLERANCE = 0.02  # relative to the largest element; both implementations round sums of thousands of terms to bf16


@dataclass(frozen=True)
class Case:
    name: str
    parallel: str  # tp or sp
    tokens: int
    hidden: int
    inner: int


ALONE = tuple(Case("8B", "tp", tokens, 4096, 14336) for tokens in (8192, 2048))
TOGETHER = (
    *(Case("70B", parallel, tokens, 8192, 28672) for parallel in ("tp", "sp") for tokens in (8192, 2048)),
    *(Case("70B at TP8", "sp", tokens, 8192, 3584 * len(gpus())) for tokens in (8192, 2048)),
)


def main(names: Sequence[str]) -> None:
    for cases, ranks in ((ALONE, 1), (TOGETHER, len(gpus()))):
        chosen = tuple(case for case in cases if case.name in names or not names)
        if chosen and (ranks > 1 or cases is ALONE):
            _compare(chosen, ranks)


def _compare(cases: tuple[Case, ...], ranks: int) -> None:
    rows = (case for case in cases for _ in range(3 if ranks > 1 and case.parallel == "sp" else 2))
    for case, times in zip(rows, times_on_ranks(partial(_calls, cases), ranks, REPETITIONS, WAIT), strict=True):
        ours = [name for name in times if "torch" not in name]
        print(f"{case.name} {case.parallel}, {case.tokens} tokens, {ranks} GPUs: {report.line(times, ours)}", flush=True)


def program_of(case: Case, ranks: int, overlap: str) -> hw.Program:
    """Program of a layer of a case."""
    inner, rows = case.inner // ranks, "T@tp" if case.parallel == "sp" else "T"
    gate_up, down = hw.bf16[case.hidden, f"{ranks}@tp", 2, inner], hw.bf16[f"{case.inner}@tp", case.hidden]

    @hw.fusion(mesh=hw.Mesh(tp=ranks), x=hw.bf16[rows, case.hidden], wgu=gate_up, wd=down)
    def mlp(x: hw.Tensor, wgu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
        y = hw.matmul(x, hw.reshape(wgu, case.hidden, 2 * case.inner))
        y = hw.reshape(y, "T", ranks, 2, inner)
        gated = hw.silu(y[:, :, 0]) * y[:, :, 1]
        return hw.reshard(hw.matmul(hw.reshape(gated, "T", case.inner), wd), rows, case.hidden)

    return hw.compile(mlp, target="cuda", options=hw.Options(overlap=overlap, sizes={"T": case.tokens}))


# --- calls of one rank ------------------------------------------------------------------------------------------------

Calls = dict[str, Callable[[], Any]]


def _calls(cases: tuple[Case, ...], rank: int, ranks: int) -> Iterator[Calls]:
    """Yields, for every case and baseline, a call of each variant of Hostweave and a call of the baseline. Raises AssertionError if results
    differ."""
    import torch

    group = hw.init()
    for case in cases:

        def random(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        rows = case.tokens // ranks if case.parallel == "sp" else case.tokens
        inner = case.inner // ranks
        x, wgu, wd = arrays = random(rows, case.hidden), random(case.hidden, 2 * inner), random(inner, case.hidden)
        blocks = x, wgu.view(case.hidden, 1, 2, inner), wd
        ways = {"in sequence": program_of(case, ranks, "off")} | ({"as chosen": program_of(case, ranks, "auto")} if ranks > 1 else {})
        eager = _torch_mlp(case.parallel, ranks)
        calls: Calls = {name: partial(way, *blocks, group=group) for name, way in ways.items()}
        if rank == 0 and "as chosen" in ways:
            print(*(f"  {choice}" for choice in ways["as chosen"].choices), sep="\n", flush=True)
        if "as chosen" in ways:
            calls["captured"] = ways["as chosen"].capture(*blocks, group=group)
        peers = {"torch eager": eager, "torch.compile": torch.compile(eager, dynamic=False)}
        if ranks > 1 and case.parallel == "sp":
            peers["torch async TP"] = _async_tp()
        wanted = eager(*arrays)
        for name, peer in peers.items():  # There is one row per baseline, because compiling a baseline may take a minute.
            row = calls | {name: partial(peer, *arrays)}
            for call in row.values():
                assert float((call() - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())
            yield row
        del wanted
        for way in ways.values():
            way.close()


def _async_tp() -> Callable[..., Any]:
    """Sequence-parallel MLP. torch.compile splits the collectives and the matmuls into chunks that overlap."""
    import torch
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group = dist.group.WORLD
    assert group is not None
    enable_symm_mem_for_group(group.group_name)

    def mlp(x: Any, wgu: Any, wd: Any) -> Any:
        gate, up = (all_gather_tensor(x, 0, group) @ wgu).chunk(2, -1)
        return reduce_scatter_tensor((torch.nn.functional.silu(gate) * up) @ wd, "sum", 0, group)

    return torch.compile(mlp, dynamic=False, options={"_micro_pipeline_tp": True})


def _torch_mlp(parallel: str, ranks: int) -> Callable[..., Any]:
    import torch
    import torch.distributed as dist

    def mlp(x: Any, wgu: Any, wd: Any) -> Any:
        if parallel == "sp":
            whole = torch.empty(x.shape[0] * ranks, x.shape[1], device=x.device, dtype=x.dtype)
            dist.all_gather_into_tensor(whole, x)
            x = whole
        gate, up = (x @ wgu).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ wd
        if parallel == "sp":
            shared = torch.empty(y.shape[0] // ranks, y.shape[1], device=y.device, dtype=y.dtype)
            dist.reduce_scatter_tensor(shared, y)
            return shared
        dist.all_reduce(y)
        return y

    return mlp


if __name__ == "__main__":
    main(sys.argv[1:])
