"""Chunk loops in which the number of chunks need not divide the rows. The last chunk of each shard may be smaller."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled
from cuda_here import needs_cuda
from fusion_properties import compare
from interpret import interpret
from random_fusions import BY_BLOCK, GATHERING, SCATTERING

import hostweave as hw
from hostweave.base.errors import OverlapWarning
from hostweave.build.cuda import gpus
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.pipeline import lower

RANKS, TRANSPORTS = (1, 2, 3, 4, 8), ("auto", "two_sided", "peer", "one_sided")
ROWS = (5, 7, 12)  # rows of each shard, or all rows in `summed`
QUICK = [*((n, rows) for n in (1, 2, 3) for rows in (5, 12)), (8, 5)]  # Other pairs are similar, and run with -m slow.
# Pairs of (ranks, rows) that run without -m slow. Transport auto covers all algorithms, so the other transports have few pairs. Pairs with
# 2 ranks are similar to pairs with 3, and run with -m more.
WITH = {"auto": QUICK, "two_sided": [(3, 5)], "peer": [(2, 12), (3, 12)], "one_sided": [(1, 5), (2, 5), (8, 5)]}
CASES = [
    pytest.param(n, rows, transport, marks=[pytest.mark.more] * (n == 2) if (n, rows) in WITH[transport] else [pytest.mark.slow])
    for n in RANKS
    for rows in ROWS
    for transport in TRANSPORTS
]
BY_COPIES = {"ring", "put", "all_gather", "reduce_scatter"}
POSSIBLE = {
    "auto": {*GATHERING, *SCATTERING},
    "two_sided": {*GATHERING, *SCATTERING} - {"put"},
    "peer": BY_COPIES,
    "one_sided": BY_COPIES,
}


def gathered(ranks: int, rows: int | str, chunks: int, algorithm: str | None) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f64[f"{rows}@x", 4], w=hw.f64[4, 3])
    def f(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return (x @ w).stream(0, chunks=chunks, algorithm=algorithm) + 1

    return f


def scattered(ranks: int, rows: int | str, chunks: int, algorithm: str | None) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f64[rows, f"{4 * ranks}@x"], w=hw.f64[f"{4 * ranks}@x", 3])
    def f(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x @ w, f"{rows}@x", 3).stream(0, chunks=chunks, algorithm=algorithm) + 1

    return f


def summed(ranks: int, rows: int | str, chunks: int, algorithm: str | None = None) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f64[rows, f"{4 * ranks}@x"], w=hw.f64[f"{4 * ranks}@x", 3], b=hw.f64[2, rows])
    def f(x: hw.Tensor, w: hw.Tensor, b: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return hw.reshard(x @ w, rows, 3).stream(0, chunks=chunks), (b * 2).stream(1, chunks=chunks)

    return f


def columns(ranks: int, rows: int | str, chunks: int, algorithm: str | None = None) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f64[2, 4], w=hw.f64[4, f"{rows}@x"], v=hw.f64[3, f"{rows}@x", 2])
    def f(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return (x @ hw.reshard(w, 4, rows)).stream(1, chunks=chunks), hw.reshard(v, 3, rows, 2).stream(1, chunks=chunks) * 2

    return f


def arrays_of(fusion: Fusion, **sizes: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {value.name: [size.bind(sizes) for size in value.type.shape] for value in fusion.inputs}
    return {name: random.integers(-3, 4, shape).astype(np.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize(("ranks", "rows", "transport"), CASES)
def test_every_algorithm(ranks: int, rows: int, transport: str) -> None:
    options, tried = hw.Options(transport=transport), 0
    for chunks in (2, 3, 2 * ranks, *([4 * ranks] if ranks < 8 else [])):  # 32 chunks on 8 ranks would take as long as all other cases.
        made: list[Fusion] = [summed(ranks, rows, chunks), columns(ranks, rows * ranks, chunks)]
        for make, algorithms in ((gathered, GATHERING), (scattered, SCATTERING)):
            for algorithm in POSSIBLE[transport].intersection(algorithms):
                if ranks > 1 and (algorithm in BY_BLOCK or algorithm == "ring") == (chunks % ranks == 0):
                    made.append(make(ranks, rows * ranks, chunks, algorithm))
        for fusion in made:
            host = lower(fusion, options)
            check(host, fusion=fusion)
            arrays = arrays_of(fusion)
            compare(host, fusion, arrays, interpret(host, arrays), f"{rows} rows, {chunks} chunks\n{host}")
            tried += 1
    assert tried >= 8


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.more), 3, pytest.param(4, marks=pytest.mark.slow), 8])
def test_compiled(ranks: int, transport: str) -> None:
    algorithms = {"gather": "put", "scatter": "put"} if transport in ("peer", "one_sided") else {"gather": "p2p", "scatter": "ring"}
    rows, split = 5 * ranks, 4 * ranks

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f64[f"{rows}@x", 4], w=hw.f64[4, 3], y=hw.f64[rows, f"{split}@x"], v=hw.f64[f"{split}@x", 3])
    def f(x: hw.Tensor, w: hw.Tensor, y: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, ...]:
        product = y @ v
        return (
            (x @ w).stream(0, chunks=2 * ranks, algorithm=algorithms["gather"] if ranks > 1 else None),
            hw.reshard(product, f"{rows}@x", 3).stream(0, chunks=2 * ranks, algorithm=algorithms["scatter"] if ranks > 1 else None),
            hw.reshard(y @ v * 2, rows, 3).stream(0, chunks=3),
            (w * 2).stream(0, chunks=3),
        )

    arrays, program = arrays_of(f), hw.compile(f, options=hw.Options(transport=transport))
    for _ in range(2):
        for got, want in zip(program.run(**arrays), run_reference(f, arrays), strict=True):
            np.testing.assert_array_equal(got, want)
    program.close()


@pytest.mark.parametrize(("make", "algorithm"), [(gathered, "p2p"), (scattered, "put"), (summed, None)])
def test_named_rows(make: Callable[..., Fusion], algorithm: str | None) -> None:
    """A variant is compiled for sizes that the number of chunks does not divide, and for uneven shards."""
    fusion = make(2, "M", 4, algorithm)
    program = hw.compile(fusion)
    for size in (8, 10, 6, 2, 5, 1, 0):
        arrays = arrays_of(fusion, M=size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OverlapWarning)
            results = program.run(**arrays)
        for got, want in zip(results if isinstance(results, tuple) else (results,), run_reference(fusion, arrays), strict=True):
            np.testing.assert_array_equal(got, want)
    program.close()


@pytest.mark.parametrize("algorithm", [None, "p2p", "broadcast"])
@pytest.mark.parametrize("dims", [("M@x", 4), ("M@x", "B", 4)], ids=str)
def test_a_chunk_for_each_row(dims: tuple[Any, ...], algorithm: str | None) -> None:
    """The loop divides its index by the rows of a shard, M/2 or M*B/2."""

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f64[dims], w=hw.f64[4, 3])
    def rows(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return (hw.reshape(x, -1, 4) @ w).stream(0, algorithm=algorithm)

    host = lower(rows, hw.Options())
    check(host, fusion=rows)
    for size in (6, 2):
        arrays = arrays_of(rows, M=size, B=3)
        compare(host, rows, arrays, interpret(host, arrays), str(host))


@needs_cuda
@pytest.mark.parametrize(("make", "algorithm"), [(gathered, "put"), (scattered, "ring"), (summed, None), (columns, None)])
def test_builds_for_cuda(make: Callable[..., Fusion], algorithm: str | None) -> None:
    program = hw.compile(make(2, 10, 4, algorithm), "cuda")
    assert program.source == hw.compile(make(2, 10, 4, algorithm)).source
    assert compiled(make(2, 10, 4, algorithm), target="cuda").module.name == "f"


@pytest.mark.gpu
@pytest.mark.skipif(len(gpus()) < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(
    ("make", "algorithm"),
    [(gathered, "put"), (gathered, "ring"), (scattered, "put"), (scattered, "p2p"), (scattered, "ring"), (summed, None), (columns, None)],
)
def test_on_two_gpus(make: Callable[..., Fusion], algorithm: str | None) -> None:
    fusion = make(2, 10, 4, algorithm)
    arrays, program = arrays_of(fusion), hw.compile(fusion, "cuda")
    for _ in range(2):
        results = program.run(**arrays)
        for got, want in zip(results if isinstance(results, tuple) else (results,), run_reference(fusion, arrays), strict=True):
            np.testing.assert_array_equal(got, want)
    program.close()


def test_a_loop_for_the_rest() -> None:
    """Each shard of 5 rows has a chunk of 3 rows and one of 2 rows. One loop computes the larger chunks, and a second loop the smaller."""
    text = str(lower(gathered(2, 10, 4, "p2p"), hw.Options()))
    assert "%x_gathered_i = slice %x_gathered[0: 3 from %p * 5]" in text
    assert "%x_gathered_i_2 = slice %x_gathered[0: 2 from %p * 5 + 3]" in text
    assert text.count("for %i in 0..2") == 2
