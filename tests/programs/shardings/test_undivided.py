"""Uneven sizes. If a program with symbolic sizes does not support uneven sizes, a variant runs in which the sizes are constants."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled, expect, integer_arrays

import hostweave as hw
from hostweave import running
from hostweave.base.errors import OverlapWarning
from hostweave.fusion_ir.ir import Fusion

SIZES = {"M": 5, "N": 6, "K": 3, "J": 3, "B": 3, "S": 4, "E": 5}
MESHES: list[Any] = [hw.Mesh(a=1, b=1), hw.Mesh(a=2, b=1), hw.Mesh(a=1, b=3), hw.Mesh(a=2, b=4)]
MESHES += [pytest.param(hw.Mesh(a=2, b=2), marks=pytest.mark.slow)]


def some_axes(mesh: hw.Mesh) -> Fusion:
    """Reshards over some of the axes that split a dim, and reductions whose result is sharded over some of these axes."""

    @hw.fusion(mesh=mesh, x=hw.f32["M@a,b", "K"], y=hw.f32["M@a", "K"], z=hw.f32["M@a", "K@b"], g=hw.f32["B@a,b", "E"])
    def some_axes(x, y, z, g):  # type: ignore[no-untyped-def]
        return (
            *(hw.reshard(x, *to) for to in (("M@a", "K"), ("M@b", "K"), ("M@b,a", "K"), ("M@a", "K@b"))),
            *(hw.reshard(y, *to) for to in (("M@a,b", "K"), ("M@b,a", "K"))),
            hw.reshard(z, "M@a,b", "K"),
            hw.reshard(hw.einsum("be,bf->ef", g, g), "E@a", "E"),
        )

    return some_axes


def reshapes(mesh: hw.Mesh) -> Fusion:
    """Reshapes that merge two dims, or split one dim."""

    @hw.fusion(mesh=mesh, x=hw.f32["M@a,b", "K"], y=hw.f32["J", "M@b"], t=hw.f32["B@a", "S", "E"], w=hw.f32["E", 3], n=hw.f32["N@a,b"])
    def reshapes(x, y, t, w, n):  # type: ignore[no-untyped-def]
        rows = hw.reshape(t, "B*S", "E") @ w
        return (
            *(hw.reshape(x, "M*K") * 2, hw.reshape(y, "J*M") + 1, hw.sum(hw.reshape(y, 1, "J*M"), 1)),
            *(rows, hw.reshape(rows, "B", "S", 3), hw.reshape(n, "N/2", 2) * 3, hw.reshape(n, 2, "N/2")),
        )

    return reshapes


def sums_of_sizes(mesh: hw.Mesh) -> Fusion:
    """Slices and concats with sharded dims whose sizes are sums. This program needs no variant."""

    @hw.fusion(mesh=mesh, x=hw.f32["M@a", "K"], y=hw.f32["N", "K"], w=hw.f32["K", 4])
    def sums_of_sizes(x, y, w):  # type: ignore[no-untyped-def]
        both = hw.reshard(hw.concat([x, y]), "(M + N)@a,b", "K")
        rows = hw.reshard(x[1:], "(M - 1)@b", "K")
        return both @ w, hw.sum(both, 0), hw.reshard(both * 2, "(M + N)", "K"), rows, hw.softmax(rows, 0), hw.reshard(rows, "(M - 1)", "K")

    return sums_of_sizes


def from_the_end(mesh: hw.Mesh) -> Fusion:
    """Indices and slices count from the end of a dim. Variances divide by the number of elements minus one."""

    @hw.block(x=hw.f32["M", "K"])
    def last(x):  # type: ignore[no-untyped-def]
        return x[-1] * 2, hw.sum(x[-2:], 0)

    @hw.fusion(mesh=mesh, x=hw.f32["M@a,b", "K"])
    def from_the_end(x):  # type: ignore[no-untyped-def]
        return (
            *(hw.reshard(x, "M@a", "K"), x[-1] + 1, x[-2:] * 2, x[:, -1], x[1:-1] - 1, *last(x + 1), *last(x)),
            *(hw.var(x, axis=0, correction=1), hw.std(x[1:], axis=0, correction=1)),
        )

    return from_the_end


PROGRAMS: tuple[Callable[[hw.Mesh], Fusion], ...] = (some_axes, reshapes, sums_of_sizes, from_the_end)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_matches_numpy(make: Callable[[hw.Mesh], Fusion], mesh: hw.Mesh) -> None:
    fusion = make(mesh)
    for sizes in (SIZES, {**SIZES, "M": 8, "B": 8, "E": 8, "N": 8}):
        arrays = integer_arrays(fusion, sizes, seed=mesh.size)
        expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True))


def test_calls_of_the_ranks_of_a_group() -> None:
    """Ranks of a group pass an uneven size by `prepare` and by `sizes=`. One input is bound."""
    mesh = hw.Mesh(a=2, b=2)

    @hw.fusion(mesh=mesh, x=hw.f32["M@a,b", "K"], w=hw.f32["K", 2])
    def some(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x, "M@a", "K") @ w

    x, w = np.arange(15, dtype=np.float32).reshape(5, 3), np.ones((3, 2), np.float32)
    program, threads = hw.compile(some).bind(w=w), hw.Threads(4)
    x_type, y_type = hw.f32["M@a,b", "K"], hw.f32["M@a", 2]

    def on_rank(rank: int) -> None:
        hw.init(threads)
        program.prepare({"M": 5, "K": 3})
        got = program(x_type.shard(x, rank, mesh).copy(), sizes={"M": 5})
        np.testing.assert_array_equal(got, y_type.shard(x @ w, rank, mesh))

    threads.run(on_rank)


def test_the_last_variants_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` and each rank of a group keep only the most recently used variants. A captured call keeps its variant."""
    monkeypatch.setattr(running, "MOST_PER_GROUP", 2)

    @hw.fusion(mesh=hw.Mesh(a=2, b=2), x=hw.f32["M@a,b", 3])
    def some(x: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x, "M@a", 3) * 2

    program = hw.compile(some)
    made: list[weakref.ref[Any]] = []
    at_sizes = running.Variants.at_sizes

    def noted(self: running.Variants, *arguments: Any) -> Any:
        if (found := at_sizes(self, *arguments)) is not None:
            made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(running.Variants, "at_sizes", noted)

    def alive() -> set[Any]:
        return {one for ref in made if (one := ref())}

    sizes = (5, 6, 7, 5, 4, 6, 7, 5)
    for rows in sizes:
        x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
        np.testing.assert_array_equal(program.run(x), 2 * x)
        assert len(alive()) <= 2

    threads, x_type, y_type = hw.Threads(4), hw.f32["M@a,b", 3], hw.f32["M@a", 3]

    def on_rank(rank: int) -> None:
        hw.init(threads)

        def call(rows: int, how: Any = program) -> Any:
            x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
            result = how(x_type.shard(x, rank, some.mesh).copy(), sizes={"M": rows})
            np.testing.assert_array_equal(result.outputs if how == program.capture else result, y_type.shard(2 * x, rank, some.mesh))
            return result

        captured = call(5, program.capture)
        program.prepare(*({"M": rows} for rows in sizes))
        for rows in sizes:
            call(rows)
        captured()

    threads.run(on_rank)
    assert len(alive()) <= 2 + 4 * 2  # `run` keeps 2 variants, and so does each of 4 ranks.
    program.close()


@pytest.mark.parametrize("rows", [5, 6, 7])
def test_a_stated_loop_over_rows_that_ranks_share_unevenly(rows: int) -> None:
    """The variant for uneven rows has no loop. A warning reports the missing loop."""

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", 4])
    def looped(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return (hw.reshard(x, "M", "K") @ w).stream("M", chunks=4, algorithm="p2p")

    arrays: dict[str, Any] = integer_arrays(looped, {"M": rows, "K": 3}, seed=0)
    program = compiled(looped)
    with pytest.warns(OverlapWarning, match=f"2 ranks do not split the size {rows}") if rows % 2 else nullcontext():
        got = program.run(**arrays)
    np.testing.assert_array_equal(got, arrays["x"] @ arrays["w"])


def test_compiling_a_variant_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    @hw.fusion(mesh=hw.Mesh(a=2, b=2), x=hw.f32["M@a,b", 3])
    def doubled(x: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x, "M@a", 3) * 2

    program = hw.compile(doubled)
    caplog.set_level("INFO", logger="hostweave")
    program.run(np.ones((5, 3), np.float32))
    assert [one.compiled.title for one in program.variants] == ["doubled at M=5"]
    told = [record.getMessage() for record in caplog.records]
    for what in ("doubled at M=5 on mesh(a=2, b=2): lowered to", "compiling doubled at M=5"):
        assert any(text.startswith(what) for text in told), told
    program.close()
