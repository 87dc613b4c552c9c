"""All-reduces of few rows with residual and norm, compared with torch and FlashInfer.

Hostweave has two variants: all-reduces inside kernels, and all-reduces by NCCL. The variants of torch are kernels of torch.compile with
all-reduces of NCCL or of symmetric memory. FlashInfer's kernel computes all-reduce, residual and norm. This kernel runs if
flashinfer-python is installed, and is compiled at the first use.

A call has 16 dependent steps: y = x + all_reduce(term), x = rms_norm(y), and x times another array is the next term. Each variant is a CUDA
graph. Data is random with a fixed seed, in bf16. One process per GPU runs the variants of Hostweave, and torch.compile with NCCL,
alternately on the same arrays. The variants with symmetric memory or FlashInfer run later, on other arrays. Printed times are microseconds
per step of the slowest rank, as medians over calls. All ranks start a call together, after a kernel that spins. `small_all_reduce.py 16`
measures one number of rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

from peers import report
from peers.torch_graphs import in_a_graph
from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.build.cuda import gpus

STEPS = 16
WIDTH = 8192
ROWS = (16, 1, 4, 8, 32)
REPETITIONS = 15
SPIN = 1_000_000  # cycles that a kernel spins while the host enqueues
# Limit of the root mean square of the error, relative to the root mean square of the result. The limit assumes that two variants differ by
# four roundings to bf16 at each step. The limit also assumes that the relative errors of the roundings are independent, and uniform up to
# 2**-8. The root mean square of each relative error is 2**-8 / sqrt(3). Measured errors are 0.010 to 0.016. If the term of one rank in one
# step is missing, the error is at least 0.079. The largest error of an element is not used, because the largest error depends on the data.
TOLERANCE = (4 * STEPS / 3) ** 0.5 * 2**-8
OURS, BY_NCCL = "in kernels", "by NCCL"
SYMMETRIC = ("one_shot_all_reduce", "two_shot_all_reduce_")  # ops of PyTorch's symmetric memory
FLASHINFER = {"one-shot": True, "two-shot": False}

Calls = dict[str, Callable[[], Any]]


def main(all_rows: Sequence[int] = ROWS) -> None:
    ranks = len(gpus())
    times = list(times_on_ranks(partial(_calls, all_rows), ranks, REPETITIONS, SPIN))
    peers: dict[str, Any] = {f"torch {name}": partial(_symmetric_calls, name, all_rows) for name in SYMMETRIC}
    for name, make in (peers | {"FlashInfer": partial(_flashinfer_calls, all_rows)}).items():
        try:
            for row, peer in zip(times, times_on_ranks(make, ranks, REPETITIONS, SPIN), strict=True):
                row |= peer
        except Exception as error:  # The error is re-raised from the process of a rank.
            print(f"{name} does not run: {str(error).strip().splitlines()[-1]}", flush=True)
    for rows, row in zip(all_rows, times, strict=True):
        print(f"[{rows}, {WIDTH}] on {ranks} GPUs, a step: {report.line(row, [OURS, BY_NCCL], STEPS / 1e3, 'us', 2)}", flush=True)


def program_of(ranks: int, transport: str) -> hw.Program:
    """Program of STEPS all-reduces, each with a norm."""
    factors = {f"p_{i}": hw.bf16[f"{ranks}@tp", "T", WIDTH] for i in range(STEPS)}

    @hw.fusion(mesh=hw.Mesh(tp=ranks), x=hw.bf16["T", WIDTH], n=hw.bf16[WIDTH], **factors)
    def steps(x: hw.Tensor, n: hw.Tensor, **factors: hw.Tensor) -> hw.Tensor:
        for p in factors.values():
            x = hw.rms_norm(x + hw.sum(p * x, 0), n)
        return x

    return hw.compile(steps, target="cuda", options=hw.Options(transport=transport))


def _calls(all_rows: Sequence[int], rank: int, ranks: int) -> Iterator[Calls]:
    """Yields, for every number of rows, calls of Hostweave and of torch.compile with NCCL. Raises AssertionError if results differ."""
    import torch
    import torch.distributed as dist

    hw.init()
    torch.manual_seed(rank)
    programs = {OURS: program_of(ranks, "auto"), BY_NCCL: program_of(ranks, "two_sided")}
    n = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    begin, step = (torch.compile(function, dynamic=False) for function in (_first_term, _step))
    for rows in all_rows:
        x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
        dist.broadcast(x, 0)
        factors = [(torch.randn(rows, WIDTH, device="cuda") * 0.1).bfloat16() for _ in range(STEPS)]
        with torch.no_grad():
            eager = partial(_in_torch, _first_term, _step, x, n, factors)
            compiled = partial(_in_torch, begin, step, x, n, factors)
            captured = {name: program.capture(x, n, *(p[None] for p in factors)) for name, program in programs.items()}
            calls: Calls = {**captured, "torch.compile in a graph": in_a_graph(compiled)}
            wanted = eager()
            for name, call in calls.items():
                _expect(f"{name}, {rows} rows", call(), wanted)
            yield calls
        torch.compiler.reset()  # torch compiles a function for only a few shapes.
    for program in programs.values():
        program.close()


def _expect(name: str, result: Any, wanted: Any) -> None:
    error = float((result.float() - wanted.float()).norm() / wanted.float().norm())
    assert error <= TOLERANCE, f"{name}: the error is {error:.4f} of the result, more than {TOLERANCE:.4f}"


def _in_torch(begin: Callable[..., Any], step: Callable[..., Any], x: Any, n: Any, factors: list[Any]) -> Any:
    import torch.distributed as dist

    term = begin(x, factors[0])
    for p in [*factors[1:], factors[0]]:  # The last step reuses the first factor, and computes a term that nothing uses.
        dist.all_reduce(term)
        x, term = step(x, term, n, p)
    return x


def _symmetric_calls(name: str, all_rows: Sequence[int], rank: int, ranks: int) -> Iterator[Calls]:
    """Yields calls with the op `name`, an all-reduce of PyTorch's symmetric memory. Kernels of torch.compile write all terms but
    the first into that memory."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(rank)
    all_reduce, n = getattr(torch.ops.symm_mem, name), torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    for rows in all_rows:
        x, *factors = (torch.randn(1 + STEPS, rows, WIDTH, device="cuda") * 0.1).bfloat16()
        dist.broadcast(x, 0)
        term = symmetric_memory.empty((rows, WIDTH), dtype=torch.bfloat16, device="cuda")
        symmetric_memory.rendezvous(term, group.group_name)
        step = torch.compile(_step_in_place, dynamic=False)

        def steps(x: Any = x, factors: Any = factors, term: Any = term, step: Any = step) -> Any:
            term.copy_(x * factors[0])
            for p in [*factors[1:], factors[0]]:
                x = step(x, all_reduce(term, "sum", group.group_name), n, p, term)
            return x

        with torch.no_grad():
            wanted = _in_torch(_first_term, _step, x, n, factors)
            call = in_a_graph(steps)
            _expect(f"torch {name}, {rows} rows", call(), wanted)
            yield {f"torch {name} in a graph": call}
        torch.compiler.reset()


def _flashinfer_calls(all_rows: Sequence[int], rank: int, ranks: int) -> Iterator[Calls]:
    """Yields calls of FlashInfer's kernel of all-reduce, residual and RMSNorm: one-shot and, for more rows than ranks, two-shot."""
    import torch
    import torch.distributed as dist
    from flashinfer import comm

    torch.manual_seed(rank)
    n = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    with redirect_stdout(StringIO()):  # FlashInfer prints addresses.
        _, workspace = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, ranks, max(all_rows), WIDTH, group=dist.group.WORLD)
    unused = dict.fromkeys(("allreduce_out", "quant_out", "scale_out", "scale_factor", "layout_code"))
    fixed = {"world_size": ranks, "world_rank": rank, "hidden_dim": WIDTH, "workspace_ptrs": workspace, "rms_gamma": n, "rms_eps": 1e-6}
    kernel = partial(
        comm.trtllm_allreduce_fusion,
        launch_with_pdl=True,
        trigger_completion_at_end=False,
        fp32_acc=True,
        pattern_code=comm.AllReduceFusionPattern.kARResidualRMSNorm,
        **fixed,
        **unused,
    )
    for rows in all_rows:
        x, *factors = (torch.randn(1 + STEPS, rows, WIDTH, device="cuda") * 0.1).bfloat16()
        dist.broadcast(x, 0)

        def steps(is_one_shot: bool, x: Any = x, factors: Any = factors, rows: int = rows) -> Any:
            term = x * factors[0]
            for p in [*factors[1:], factors[0]]:
                total, normed = torch.empty_like(x), torch.empty_like(x)
                kernel(allreduce_in=term, token_num=rows, use_oneshot=is_one_shot, residual_in=x, residual_out=total, norm_out=normed)
                x, term = normed, normed * p
            return x

        with torch.no_grad():
            wanted = _in_torch(_first_term, _step, x, n, factors)
            ways = {
                name: is_one_shot for name, is_one_shot in FLASHINFER.items() if is_one_shot or rows > ranks
            }  # The two-shot kernel needs more rows than ranks.
            calls: Calls = {f"FlashInfer {name} in a graph": in_a_graph(partial(steps, is_one_shot)) for name, is_one_shot in ways.items()}
            for name, call in calls.items():
                _expect(f"{name}, {rows} rows", call(), wanted)
            yield calls


def _step_in_place(x: Any, total: Any, n: Any, p: Any, term: Any) -> Any:
    x, product = _step(x, total, n, p)
    term.copy_(product)
    return x


def _first_term(x: Any, p: Any) -> Any:
    return x * p


def _step(x: Any, term: Any, n: Any, p: Any) -> tuple[Any, Any]:
    import torch

    x = torch.nn.functional.rms_norm(x + term, n.shape, n, 1e-6)
    return x, x * p


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or ROWS)
