"""Decoder MLP blocks with norms for few tokens, compared with torch. Calls are consecutive, so host time is included.

Each of 16 tensor-parallel blocks computes x + swiglu(rms_norm(x)). On several GPUs a block has one all_reduce. Shapes are those of Llama 3:
8B on one GPU, and per-rank shapes of 70B at TP 8 on all GPUs. Data is random, in bf16, except that the weights of norms are 1. One process
per GPU runs all variants alternately on the same arrays. Printed times are milliseconds per call of the slowest rank, as medians over
series of calls. All ranks start a series together. One variant of Hostweave measures the algorithms of cuBLASLt and uses the fastest. A
lower bound is the time of a copy whose reads and writes together have as many bytes as the weights. `decode.py 70B` runs one case, and
`decode.py 70B 128` runs one number of tokens.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from peers import report
from peers.torch_graphs import in_a_graph
from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.programs import load_file

BLOCKS = 16
TOKENS = (1, 16, 128)
ROW = 20  # calls per series
REPETITIONS = 7
TOLERANCE = 0.03  # relative to the largest element; variants round different intermediates to bf16
OURS = "captured"
TUNED = f"{OURS}, tuned"
COPY = "copy"


@dataclass(frozen=True)
class Case:
    name: str
    hidden: int
    inner: int  # inner dim of one rank


ALONE, TOGETHER = Case("8B", 4096, 14336), Case("70B at TP8", 8192, 3584)


def main(names: Sequence[str]) -> None:
    cases = [name for name in names if not name.isdecimal()]
    tokens = tuple(int(name) for name in names if name.isdecimal()) or TOKENS
    if "8B" in cases or not cases:
        _compare(ALONE, tokens, 1)
    if len(gpus()) > 1 and ("70B" in cases or not cases):
        _compare(TOGETHER, tokens, len(gpus()))


def _compare(case: Case, all_tokens: Sequence[int], ranks: int) -> None:
    make = partial(_calls, case, all_tokens)
    for tokens, times in zip(all_tokens, times_on_ranks(make, ranks, REPETITIONS), strict=True):
        bound = statistics.median(times.pop(COPY)) / ROW
        ours = [name for name in times if "torch" not in name]
        share = bound / min(statistics.median(times[name]) / ROW for name in ours)
        of_copy = f"{share:.2f} of a copy's speed, {bound:.3f} ms"
        print(f"{case.name}, {BLOCKS} blocks, {tokens} tokens, {ranks} GPUs: {report.line(times, ours, ROW)}; {of_copy}", flush=True)


def program_of(case: Case, ranks: int, **options: Any) -> hw.Program:
    swiglu = load_file(EXAMPLES / "transformer.py").swiglu

    columns = hw.bf16[case.hidden, f"{case.inner * ranks}@tp"]
    types = {"n": hw.bf16[case.hidden], "wg": columns, "wu": columns, "wd": hw.bf16[f"{case.inner * ranks}@tp", case.hidden]}
    weights = {f"{name}_{i}": type_ for i in range(BLOCKS) for name, type_ in types.items()}

    @hw.block(x=hw.bf16["T", case.hidden], **types)
    def block(x: hw.Tensor, n: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
        return x + hw.reshard(swiglu(hw.rms_norm(x, n), wg, wu, wd), "T", case.hidden)

    @hw.fusion(mesh=hw.Mesh(tp=ranks), x=hw.bf16["T", case.hidden], **weights)
    def decode(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        for i in range(BLOCKS):
            x = block(x, *(weights[f"{name}_{i}"] for name in types))
        return x

    return hw.compile(decode, target="cuda", options=hw.Options(**options))


# --- calls of one rank ------------------------------------------------------------------------------------------------

Calls = dict[str, Callable[[], Any]]


def _calls(case: Case, all_tokens: Sequence[int], rank: int, ranks: int) -> Iterator[Calls]:
    """Yields, for every number of tokens, a series of calls of each variant. Raises AssertionError if the results of variants differ."""
    import torch
    import torch.distributed as dist

    hw.init()
    programs = [program_of(case, ranks, tune=tune) for tune in (False, True)]

    def random(*shape: int, scale: float) -> Any:
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    weights: dict[str, Any] = {}
    for i in range(BLOCKS):
        weights[f"n_{i}"] = torch.ones(case.hidden, device="cuda", dtype=torch.bfloat16)
        for name, shape in (("wg", (case.hidden, case.inner)), ("wu", (case.hidden, case.inner)), ("wd", (case.inner, case.hidden))):
            weights[f"{name}_{i}"] = random(*shape, scale=shape[0] ** -0.5)
    model, tuned_model = (program.bind(**weights) for program in programs)
    blocks = [tuple(weights[f"{name}_{i}"] for name in ("n", "wg", "wu", "wd")) for i in range(BLOCKS)]
    tuned_block = torch.compile(_torch_block, dynamic=False, mode="max-autotune-no-cudagraphs")
    read, written = torch.empty(2, sum(w.nbytes for w in weights.values()) // 2, dtype=torch.uint8, device="cuda")
    eager, tuned = (partial(_torch_decode, block, blocks=blocks) for block in (_torch_block, tuned_block))
    for tokens in all_tokens:
        x = random(tokens, case.hidden, scale=1)
        dist.broadcast(x, 0)
        with torch.no_grad():
            single: Calls = {
                "uncaptured": partial(model, x),
                OURS: model.capture(x),
                TUNED: tuned_model.capture(x),
                "torch eager": partial(eager, x),
                "torch eager in a graph": in_a_graph(partial(eager, x)),
                "torch.compile, max-autotune": partial(tuned, x),
                "torch.compile, max-autotune, in a graph": in_a_graph(partial(tuned, x)),
            }
            wanted = eager(x)
            for name, call in single.items():
                error = float((call() - wanted).abs().max() / wanted.abs().max())
                assert error <= TOLERANCE, f"{name}: {error}"
            single[COPY] = partial(written.copy_, read)
            yield {name: partial(_row, call) for name, call in single.items()}
        torch.compiler.reset()  # torch compiles a function for only a few shapes.
    for program in programs:
        program.close()


def _row(call: Callable[[], Any]) -> None:
    for _ in range(ROW):
        call()


def _torch_decode(block: Callable[..., Any], x: Any, blocks: list[tuple[Any, ...]]) -> Any:
    """All blocks by torch. Each call of `block` first adds the result of the previous block. So torch.compile can fuse the addition with
    the norm, as in a whole model."""
    import torch
    import torch.distributed as dist

    y = torch.zeros_like(x)
    for weights in blocks:
        x, y = block(x, y, *weights)
        if dist.get_world_size() > 1:
            dist.all_reduce(y)
    return x + y


def _torch_block(x: Any, y: Any, n: Any, wg: Any, wu: Any, wd: Any) -> tuple[Any, Any]:
    import torch

    x = x + y
    h = torch.nn.functional.rms_norm(x, n.shape, n, 1e-6)
    return x, (torch.nn.functional.silu(h @ wg) * (h @ wu)) @ wd


if __name__ == "__main__":
    main(sys.argv[1:])
