"""Moves between two meshes, for all pairs of shardings in `layouts`. Meshes are disjoint or overlap, and may differ in size and axes. The
block of each rank is compared with NumPy.

One program contains all moves between two meshes, so that few programs are compiled. Each program runs at several sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import permutations
from math import lcm

import numpy as np
import pytest
from blocks_of_ranks import Array, arrays, compare, kinds_of, traced
from interpret import interpret

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir
from hostweave.pipeline import lower
from hostweave.runtime.cpu import seeded
from hostweave.types.blocks import transfer
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import DTYPES

ONE, TWO, THREE, FOUR, EIGHT = (Mesh(x=ranks) for ranks in (1, 2, 3, 4, 8))

# The mesh of the program, the source mesh, and the destination mesh.
PAIRS = {
    "one rank": (ONE, ONE, ONE.ranks([0], dp=1, tp=1)),
    "to the neighbour": (TWO, TWO.ranks([0]), TWO.ranks([1])),
    "two to one of them": (TWO, TWO, TWO.ranks([1])),
    "one between two": (THREE, THREE.ranks([0, 2]), THREE.ranks([1])),
    "two stages": (FOUR, FOUR.ranks([0, 1]), FOUR.ranks([2, 3])),
    "one to three": (FOUR, FOUR.ranks([1]), FOUR.ranks([0, 2, 3])),
    "three to two, one of them in both": (FOUR, FOUR.ranks([0, 1, 2]), FOUR.ranks([3, 2])),
    "to the next rank, one of them in both": (FOUR, FOUR.ranks([1, 2]), FOUR.ranks([2, 3])),
    "all to some": (FOUR, FOUR, FOUR.ranks([3, 1])),
    "some to all": (FOUR, FOUR.ranks([2, 1]), FOUR),
    "three among themselves": (FOUR, FOUR.ranks([3, 0, 1]), FOUR.ranks([3, 0, 1])),
    "the same ranks in two axes": (FOUR, FOUR, Mesh(dp=2, tp=2)),
    "four in two axes to four in a row": (EIGHT, EIGHT.ranks(range(4), dp=2, tp=2), EIGHT.ranks(range(4, 8))),
    "four to six, two of them in both": (Mesh(dp=2, tp=4), EIGHT.ranks([0, 1, 4, 5], a=2, b=2), EIGHT.ranks([5, 4, 3, 2, 7, 6], c=3, d=2)),
}


def layouts(mesh: Mesh) -> list[tuple[str, ...]]:
    """Shardings of three dims: replicated, over one axis, and over two axes in both orders."""
    names = [name for name, _ in mesh.axes]
    if len(names) == 1:
        return [("A", "B", "C"), (f"A@{names[0]}", "B", "C"), ("A", f"B@{names[0]}", "C"), ("A", "B", f"C@{names[0]}")]
    some = [(f"A@{a},{b}", "B", "C") for a, b in permutations(names)] + [(f"A@{a}", "B", f"C@{b}") for a, b in permutations(names)]
    return [("A", "B", "C"), ("A", f"B@{names[0]}", "C"), *some]


def moves(program: Mesh, old: Mesh, new: Mesh) -> Fusion:
    def results(x: hw.Tensor) -> list[hw.Tensor]:
        return [hw.reshard(x, *dims, mesh=new) for dims in layouts(new)]

    return traced("reshards", program, {f"x{i}": hw.i32[dims].on(old) for i, dims in enumerate(layouts(old))}, results)


def reductions(program: Mesh, old: Mesh, new: Mesh) -> Fusion:
    """Reductions over a sharded dim, with every dtype. The result is replicated or sharded on the mesh `new`."""
    axes = ",".join(name for name, _ in old.axes)

    def results(x: hw.Tensor) -> list[hw.Tensor]:
        kinds = kinds_of(x.dtype) if x.dtype in (hw.i32, hw.f32, hw.bool_) else kinds_of(x.dtype)[:1]
        return [hw.reshard(getattr(hw, kind)(x, axis="A"), *dims[1:], mesh=new) for kind in kinds for dims in layouts(new)[:3]]

    return traced("reductions", program, {f"x_{dtype}": dtype[f"A@{axes}", "B", "C"].on(old) for dtype in DTYPES.values()}, results)


@cache
def fusion_and_program(of: Callable[[Mesh, Mesh, Mesh], Fusion], pair: str) -> tuple[Fusion, ir.HostProgram]:
    fusion = of(*PAIRS[pair])
    return fusion, lower(fusion, hw.Options())


SEEDS = 4


def sizes(of: Callable[[Mesh, Mesh, Mesh], Fusion], pair: str, seed: int) -> dict[str, int]:
    """Small sizes. For seeds 0 and 1, the sizes are even on both meshes. For other seeds, the sizes may be uneven if the program allows
    uneven sizes. Then the last ranks have fewer elements or none."""
    _, old, new = PAIRS[pair]
    ranks = lcm(old.size, new.size)
    even = {"A": ranks * (1 + seed % 2), "B": ranks * (2 - seed % 2), "C": ranks}
    uneven = [{}, {}, {"A": 10, "B": 3, "C": 7}, {"A": 1, "B": 17, "C": 2}][seed]
    return {**even, **{name: size for name, size in uneven.items() if name in fusion_and_program(of, pair)[1].uneven}}


CASES = [
    *((moves, pair) for pair in PAIRS),
    *((reductions, pair) for pair in ("three to two, one of them in both", "some to all")),
]
# These pairs have all kinds of moves. Programs of other pairs are compiled only with `-m slow`.
COMPILED = ("one between two", "two stages", "three to two, one of them in both", "some to all", "four to six, two of them in both")
NAME_PARTS = {"ids": lambda part: part.__name__ if callable(part) else str(part)}


def on_ranks(fusion: Fusion, results: list[tuple[Array | None, ...]]) -> list[dict[str, Array]]:
    """Outputs by name, for each rank. Asserts that an output is None exactly on the ranks outside the mesh of the output."""
    types = {name: value.type for name, value in fusion.values().items()}
    for rank, local in enumerate(results):
        for name, array in zip(fusion.outputs, local, strict=True):
            assert (array is not None) == (rank in types[name].mesh_in(fusion.mesh).all_ranks)
    return [{n: a for n, a in zip(fusion.outputs, local, strict=True) if a is not None} for local in results]


@pytest.mark.parametrize(("of", "pair"), CASES, **NAME_PARTS)
def test_interpreted(of: Callable[[Mesh, Mesh, Mesh], Fusion], pair: str) -> None:
    fusion, program = fusion_and_program(of, pair)
    for seed in range(SEEDS):
        given = arrays(fusion, sizes(of, pair, seed), seed)
        compare(fusion, given, interpret(program, given))


@pytest.mark.parametrize(
    ("of", "pair"), [pytest.param(*case, marks=[] if case[1] in COMPILED else [pytest.mark.slow]) for case in CASES], **NAME_PARTS
)
def test_compiled(of: Callable[[Mesh, Mesh, Mesh], Fusion], pair: str, target: str) -> None:
    fusion, lowered = fusion_and_program(of, pair)
    program = hw.compile(lowered, target=target)
    for seed in range(SEEDS):
        given = arrays(fusion, sizes(of, pair, seed), seed)
        compare(fusion, given, on_ranks(fusion, program.run(ranks=True, **given)))
        if target == "cpu":
            with seeded(seed):
                compare(fusion, given, on_ranks(fusion, program.run(ranks=True, **given)))
    program.close()


@pytest.mark.parametrize("rows", [10, 6])
def test_ints_that_ranks_share_unevenly(rows: int) -> None:
    """10 rows are 4, 4, 2 on 3 ranks, and 3, 3, 3, 1 on 4 ranks. 6 rows are even on 3 ranks, and 2, 2, 2, 0 on 4 ranks."""
    dims = [(f"{rows}", "3"), (f"{rows}@x", "3"), (f"{rows}", "3@x")]
    held = [tuple(int(dim) if dim.isdigit() else dim for dim in layout) for layout in dims]

    def results(x: hw.Tensor) -> list[hw.Tensor]:
        return [hw.reshard(x, *layout, mesh=FOUR) for layout in held]

    fusion = traced("reshards", FOUR, {f"x{i}": hw.i32[layout].on(FOUR.ranks([2, 3, 1])) for i, layout in enumerate(held)}, results)
    program = hw.compile(fusion)
    given = arrays(fusion, {f"{rows}": rows, "3": 3}, 0)
    compare(fusion, given, interpret(lower(fusion, hw.Options()), given))
    for seed in range(2):
        with seeded(seed):
            compare(fusion, given, on_ranks(fusion, program.run(ranks=True, **given)))


def test_a_size_that_ranks_must_share_evenly() -> None:
    """A chunk loop over M needs even shards. Moves of the same program then use routes for even shards."""
    mesh = Mesh(x=5)
    two, three = mesh.ranks([0, 1]), mesh.ranks([2, 3, 4])

    @hw.fusion(mesh=mesh, x=hw.f32["M@x", "K"].on(two), v=hw.f32["K", "M@x"].on(two))
    def evenly(x, v):
        return (-x).stream("M", 2), hw.reshard(x, "M@x", "K", mesh=three), hw.reshard(v, "K", "M@x", mesh=three)

    host, program = lower(evenly, hw.Options()), hw.compile(evenly)
    assert host.uneven == ()
    for rows in (12, 24):
        x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        given = {"x": x, "v": -x.T}
        compare(evenly, given, interpret(host, given))
        compare(evenly, given, on_ranks(evenly, program.run(ranks=True, **given)))
    program.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_each_rank_receives_each_missing_block_once(pair: str) -> None:
    """The number of sent elements equals the number of elements that destination ranks lack."""
    program, old, new = PAIRS[pair]
    shape = (12, 12, 12)
    for have in layouts(old):
        for want in layouts(new):
            source, target = hw.i32[tuple(d.replace(n, "12") for d, n in zip(have, "ABC", strict=True))], want
            target = hw.i32[tuple(d.replace(n, "12") for d, n in zip(want, "ABC", strict=True))]
            found = transfer(source.on(old), target.on(new), program)
            whole = np.arange(np.prod(shape)).reshape(shape)
            lacking = 0
            for rank in new.all_ranks:
                wanted = target.on(new).shard(whole, rank, program)
                held = source.on(old).shard(whole, rank, program) if rank in old.all_ranks else whole[:0]
                lacking += wanted.size - np.intersect1d(wanted, held, assume_unique=True).size
            assert found.share(old.size_of(source.axes)) * whole.size == lacking
