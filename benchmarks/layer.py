"""The MLP of Llama 3, forward, beside torch: eager and torch.compile, with the same NCCL collectives.

8B on one GPU; 70B on all GPUs of this machine, tensor-parallel (an all_reduce) and sequence-parallel (an all_gather and a
reduce_scatter), as a whole, in steps, whose communication runs beside the last matmul, and by puts beside all three matmuls
(NCCL 2.29 or later); also at the sizes that a rank of 8 has. Milliseconds of the slowest rank,
the median over calls that all ranks begin together; random bf16 data. A process a GPU runs all of them in turn, on the same
arrays: matmuls run against the power limit of a GPU, so that what is measured later is measured on a warmer one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.base.errors import HostweaveError
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.programs import load_file

REPETITIONS = 15
WAIT = 2_000_000  # cycles of the GPU before each call: the time of the host does not count, as in a model it is hidden
TOLERANCE = 0.02  # of the largest element: both round sums of thousands of terms to bf16


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


def main() -> None:
    _compare(ALONE, 1)
    if len(gpus()) > 1:
        _compare(TOGETHER, len(gpus()))


def _compare(cases: tuple[Case, ...], ranks: int) -> None:
    make = _calls_of_8b if ranks == 1 else _calls_of_70b
    for case, times in zip(cases, times_on_ranks(make, ranks, REPETITIONS, WAIT), strict=True):
        medians = {name: statistics.median(ms) for name, ms in times.items()}
        ours, peers = ({name: ms for name, ms in medians.items() if ("torch" in name) == is_peer} for is_peer in (False, True))
        for name, ms in ours.items():
            beside = ", ".join(f"{peer} {peer_ms:.3f} ms ({peer_ms / ms:.2f} times ours)" for peer, peer_ms in peers.items())
            print(f"{case.name} {case.parallel}, {case.tokens} tokens, {ranks} GPUs, {name}: {ms:.3f} ms; {beside}", flush=True)


def _fusion(case: Case, ranks: int, steps: int, algorithm: str | None) -> hw.Fusion:
    swiglu = load_file(EXAMPLES / "transformer.py").swiglu
    x = hw.bf16["T@tp" if case.parallel == "sp" else "T", case.hidden]
    columns = hw.bf16[case.hidden, f"{case.inner}@tp"]
    weights = {"wg": columns, "wu": columns, "wd": hw.bf16[f"{case.inner}@tp", case.hidden]}

    @hw.fusion(mesh=hw.Mesh(tp=ranks), x=x, **weights)
    def mlp(x: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
        if algorithm:
            gate, up = (hw.matmul(x, w).stream("T", chunks=steps, algorithm=algorithm) for w in (wg, wu))
            product = hw.matmul(hw.silu(gate) * up, wd)
        else:
            product = swiglu(x, wg, wu, wd)
        y = hw.reshard(product, "T@tp" if case.parallel == "sp" else "T", case.hidden)
        return y.stream("T", chunks=steps, algorithm=algorithm) if steps > 1 else y

    return mlp


# --- calls of one rank ------------------------------------------------------------------------------------------------

Calls = dict[str, Callable[[], Any]]


def _calls_of_8b(rank: int, ranks: int) -> Iterator[Calls]:
    return _calls(ALONE, ranks)


def _calls_of_70b(rank: int, ranks: int) -> Iterator[Calls]:
    return _calls(TOGETHER, ranks)


def _calls(cases: tuple[Case, ...], ranks: int) -> Iterator[Calls]:
    """For every case a call of each way. Raises AssertionError where their results differ."""
    import torch

    group = hw.init()
    for case in cases:

        def random(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        rows = case.tokens // ranks if case.parallel == "sp" else case.tokens
        inner = case.inner // ranks
        arrays = random(rows, case.hidden), random(case.hidden, inner), random(case.hidden, inner), random(inner, case.hidden)
        eager = _torch_mlp(case.parallel, ranks)
        compiled = torch.compile(eager, dynamic=False)
        steps = () if ranks == 1 else (ranks if case.parallel == "sp" else 2,)
        programs: dict[str, tuple[int, str | None]] = {"in one piece": (1, None)} | {f"in {count} steps": (count, None) for count in steps}
        if ranks > 1 and case.parallel == "sp":
            programs |= {"by puts": (ranks, "put"), "by p2p": (ranks, "p2p")}
        ways = {name: hw.compile(_fusion(case, ranks, *way), target="cuda") for name, way in programs.items()}
        calls: Calls = {name: partial(way, *arrays, group=group) for name, way in ways.items()}
        calls |= {"torch eager": partial(eager, *arrays), "torch.compile": partial(compiled, *arrays)}
        wanted = eager(*arrays)
        if "by puts" in calls:
            try:
                calls["by puts"]()
            except HostweaveError:  # this NCCL has none
                del calls["by puts"]
        for call in calls.values():
            assert float((call() - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())
        del wanted
        yield calls
        for way in ways.values():
            way.close()


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
