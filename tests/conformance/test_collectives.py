"""Every collective with every supported dtype, on 1, 2, 3, 4 and 8 ranks. The result of each rank is compared with NumPy.

One program per number of ranks contains all collectives, so that few programs are compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import host_text
import ml_dtypes  # noqa: F401  the import registers bf16 and f8 with NumPy
import numpy as np
import pytest
from interpret import interpret
from numpy.typing import NDArray

import hostweave as hw
from hostweave.host_ir.ir import HostProgram
from hostweave.transports.transport import DEFAULT, REDUCTIONS, find_transport
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DTYPES, DType

Array = NDArray[Any]
RANKS = (1, 2, 3, 4, 8)
N = (3, 1, 0)  # number of elements of a block, for each seed

# Sizes of the input and of the output, in blocks, and the instruction.
MOVES = {
    "all_gather": (1, "D", "all_gather %{x} -> %{y} on x"),
    "broadcast": (1, 1, "broadcast %{x} -> %{y} from {root} on x"),
    "broadcast_to_others": (1, 1, "broadcast_to_others %{x} to %{y} from {root} on x"),
    "gather": (1, "D", "gather %{x} -> %{y} to {root} on x"),
    "scatter": ("D", 1, "scatter %{x} -> %{y} from {root} on x"),
    "all_to_all": ("D", "D", "all_to_all %{x} -> %{y} on x"),
    "collective_permute": (1, 1, "collective_permute %{x} -> %{y} from [{sources}] on x"),
    "ring": (1, 1, "group {{ send %{x} to (rank.x + 1) % {D} on x\n recv %{y} from (rank.x - 1) % {D} on x }}"),
}
REDUCES = {
    "all_reduce": (1, 1, "all_reduce {op} %{x} -> %{y} on x"),
    "reduce": (1, 1, "reduce {op} %{x} -> %{y} to {root} on x"),
    "reduce_scatter": ("D", 1, "reduce_scatter {op} %{x} -> %{y} on x"),
}
REDUCE = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "avg": np.add}


def root_of(ranks: int) -> int:
    return ranks // 2


def sources_of(ranks: int) -> list[int | None]:
    """Sources of a permute. Each rank receives from the previous rank; the first rank has no source."""
    return [None, *range(ranks - 1)]


def reducible(dtype: DType) -> bool:
    return dtype.name not in find_transport(DEFAULT).reduced_as


def cases(ranks: int) -> dict[str, tuple[str, str, DType, str]]:
    """For the name of each output: kind, reduction or "", dtype, and instruction."""
    result = {}
    words = {"D": ranks, "root": root_of(ranks), "sources": ", ".join("none" if s is None else str(s) for s in sources_of(ranks))}
    for dtype in DTYPES.values():
        for kind, (sent, _, text) in MOVES.items():
            y = f"{kind}_{dtype}"
            result[y] = (kind, "", dtype, text.format(x=f"{'wide' if sent == 'D' else 'one'}_{dtype}", y=y, **words))
        for kind, (sent, _, text) in REDUCES.items() if reducible(dtype) else ():
            for op in REDUCTIONS:
                y = f"{kind}_{op}_{dtype}"
                result[y] = (kind, op, dtype, text.format(x=f"{'wide' if sent == 'D' else 'one'}_{dtype}", y=y, op=op, **words))
    return result


@cache
def program(ranks: int) -> HostProgram:
    blocks = {**MOVES, **REDUCES}
    inputs = [f"%one_{d}: {d}[{ranks}@x, N], %wide_{d}: {d}[{ranks * ranks}@x, N]" for d in DTYPES.values()]
    outputs, body = [], []
    for y, (kind, _, dtype, text) in cases(ranks).items():
        outputs.append(f"%{y}: {dtype}[{ranks * ranks if blocks[kind][1] == 'D' else ranks}@x, N]")
        body += [f"fill %{y} with 0.0", text]  # Ranks without a result have zeros.
    text = f"host @collectives({', '.join(inputs)}) -> ({', '.join(outputs)}) mesh(x={ranks}) {{\n" + "\n".join(body) + "\n}\n"
    return host_text.parse(text)


@cache
def compiled(ranks: int, target: str) -> hw.Program:
    return hw.compile(program(ranks), target=target)


def arrays(ranks: int, seed: int) -> dict[str, Array]:
    """Small integers. Integers of signed dtypes may be negative. Sums and products are exact, except products of 8-bit integers, which may
    wrap around."""
    random = np.random.default_rng(seed)
    result = {}
    for dtype in DTYPES.values():
        low = 0 if dtype.kind in ("uint", "bool") else -2
        for name, blocks in (("one", ranks), ("wide", ranks * ranks)):
            result[f"{name}_{dtype}"] = random.integers(low, 3, (blocks, N[seed])).astype(numpy_dtype(dtype))
    return result


def expected(kind: str, op: str, mine: list[Array], rank: int) -> Array:
    """Expected result on `rank`, computed from the inputs of all ranks."""
    ranks, root, zeros = len(mine), root_of(len(mine)), np.zeros((1, mine[0].shape[1]), mine[0].dtype)
    if op:
        total = np.asarray(REDUCE[op].reduce([array.astype(np.float64) for array in mine]))
        total = total / ranks if op == "avg" else total
        if op == "avg" and mine[0].dtype.kind in "iu":
            total = np.trunc(total)
        total = total.astype(mine[0].dtype)
        if kind == "reduce_scatter":
            return total[rank : rank + 1]
        return total if kind == "all_reduce" or rank == root else zeros
    source = sources_of(ranks)[rank]
    match kind:
        case "all_gather":
            return np.concatenate(mine)
        case "broadcast":
            return mine[root]
        case "broadcast_to_others":
            return zeros if rank == root else mine[root]
        case "gather":
            return np.concatenate(mine) if rank == root else np.repeat(zeros, ranks, axis=0)
        case "scatter":
            return mine[root][rank : rank + 1]
        case "all_to_all":
            return np.concatenate([array[rank : rank + 1] for array in mine])
        case "collective_permute":
            return zeros if source is None else mine[source]
        case "ring":
            return mine[(rank - 1) % ranks]
    raise AssertionError(kind)


def compare(ranks: int, given: dict[str, Array], results: list[dict[str, Array]]) -> None:
    blocks = {**MOVES, **REDUCES}
    for y, (kind, op, dtype, _) in cases(ranks).items():
        passed = given[f"{'wide' if blocks[kind][0] == 'D' else 'one'}_{dtype}"]
        mine = np.split(passed, ranks)
        for rank, outputs in enumerate(results):
            got, want = (array.astype(np.float64) for array in (outputs[y], expected(kind, op, mine, rank)))
            # Averages of floats are rounded. All other results are exact.
            rounded = {"f16": 2e-3, "bf16": 2e-2, "f32": 1e-6, "f64": 1e-14}.get(dtype.name, 0) if op == "avg" else 0
            np.testing.assert_allclose(got, want, rtol=rounded, atol=0, err_msg=f"%{y} on rank {rank} of {ranks}")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", range(3))
def test_interpreted(ranks: int, seed: int) -> None:
    given = arrays(ranks, seed)
    compare(ranks, given, interpret(program(ranks), given))


@pytest.mark.parametrize("ranks", RANKS)
def test_compiled(ranks: int, target: str) -> None:
    names = [p.name for p in program(ranks).outputs]
    for seed in range(3):
        given = arrays(ranks, seed)
        compare(ranks, given, [dict(zip(names, local, strict=True)) for local in compiled(ranks, target).run(ranks=True, **given)])
