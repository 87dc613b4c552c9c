"""The MLP of Llama 3, forward, beside torch: eager and torch.compile, with the same NCCL collectives.

8B on one GPU; 70B on all GPUs of this machine, tensor-parallel (an all_reduce) and sequence-parallel (an all_gather and a
reduce_scatter), as a whole and in steps, whose communication runs beside the last matmul. Milliseconds of the slowest rank,
the median over calls that all ranks begin together; random bf16 data. torch runs one process a GPU, Hostweave one thread a GPU.
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
from hostweave.build.cuda import gpus
from hostweave.build.paths import EXAMPLES
from hostweave.source import load_file

REPETITIONS = 15
TORCH = ("eager", "torch.compile")


@dataclass(frozen=True)
class Case:
    name: str
    parallel: str  # tp or sp
    tokens: int
    hidden: int
    inner: int


ALONE = tuple(Case("8B", "tp", tokens, 4096, 14336) for tokens in (8192, 2048))
TOGETHER = tuple(Case("70B", parallel, tokens, 8192, 28672) for parallel in ("tp", "sp") for tokens in (8192, 2048))


def main() -> None:
    _compare(ALONE, 1)
    if len(gpus()) > 1:
        _compare(TOGETHER, len(gpus()))


def _compare(cases: tuple[Case, ...], ranks: int) -> None:
    times = times_on_ranks(_calls_of_8b if ranks == 1 else _calls_of_70b, ranks, REPETITIONS)
    medians = [statistics.median(ms) for ms in times]
    for i, case in enumerate(cases):
        arrays = _arrays(case)
        for steps in (1,) if ranks == 1 else (1, ranks if case.parallel == "sp" else 2):
            program = hw.compile(_fusion(case, ranks, steps), target="cuda")
            calls = program.measure(warmups=5, repetitions=REPETITIONS, **arrays)
            ours = statistics.median(max(rank[n].total_ms for rank in calls) for n in range(REPETITIONS))
            program.close()
            peers = zip(TORCH, medians[i * len(TORCH) :], strict=False)
            beside = ", ".join(f"{name} {ms:.3f} ms ({ms / ours:.2f} times ours)" for name, ms in peers)
            way = f"{ranks} GPUs{f', in {steps} steps' if steps > 1 else ''}"
            print(f"{case.name} {case.parallel}, {case.tokens} tokens, {way}: {ours:.3f} ms; {beside}", flush=True)


def _fusion(case: Case, ranks: int, steps: int) -> hw.Fusion:
    swiglu = load_file(EXAMPLES / "transformer.py").swiglu
    x = hw.bf16["T@tp" if case.parallel == "sp" else "T", case.hidden]
    columns = hw.bf16[case.hidden, f"{case.inner}@tp"]
    weights = {"wg": columns, "wu": columns, "wd": hw.bf16[f"{case.inner}@tp", case.hidden]}

    @hw.fusion(mesh=hw.Mesh(tp=ranks), x=x, **weights)
    def mlp(x: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
        y = hw.reshard(swiglu(x, wg, wu, wd), "T@tp" if case.parallel == "sp" else "T", case.hidden)
        return y.stream("T", chunks=steps) if steps > 1 else y

    return mlp


def _arrays(case: Case) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {
        "x": (case.tokens, case.hidden),
        "wg": (case.hidden, case.inner),
        "wu": (case.hidden, case.inner),
        "wd": (case.inner, case.hidden),
    }
    return {name: random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


# --- torch ------------------------------------------------------------------------------------------------------------


def _calls_of_8b(rank: int, ranks: int) -> Iterator[Callable[[], Any]]:
    return _torch_calls(ALONE, ranks)


def _calls_of_70b(rank: int, ranks: int) -> Iterator[Callable[[], Any]]:
    return _torch_calls(TOGETHER, ranks)


def _torch_calls(cases: tuple[Case, ...], ranks: int) -> Iterator[Callable[[], Any]]:
    """For every case a call of each way."""
    import torch

    for case in cases:

        def random(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        rows = case.tokens // ranks if case.parallel == "sp" else case.tokens
        inner = case.inner // ranks
        arrays = random(rows, case.hidden), random(case.hidden, inner), random(case.hidden, inner), random(inner, case.hidden)
        forward = _torch_mlp(case.parallel, ranks)
        for way in (forward, torch.compile(forward, dynamic=False)):
            yield lambda way=way, arrays=arrays: way(*arrays)


def _torch_mlp(parallel: str, ranks: int) -> Callable[..., Any]:
    import torch
    import torch.distributed as dist

    def mlp(x: Any, wg: Any, wu: Any, wd: Any) -> Any:
        if parallel == "sp":
            whole = torch.empty(x.shape[0] * ranks, x.shape[1], device=x.device, dtype=x.dtype)
            dist.all_gather_into_tensor(whole, x)
            x = whole
        y = (torch.nn.functional.silu(x @ wg) * (x @ wu)) @ wd
        if parallel == "sp":
            shared = torch.empty(y.shape[0] // ranks, y.shape[1], device=y.device, dtype=y.dtype)
            dist.reduce_scatter_tensor(shared, y)
            return shared
        dist.all_reduce(y)
        return y

    return mlp


if __name__ == "__main__":
    main()
