"""Views of donated inputs, compared with NumPy. Results are views, or are computed from views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.check.check import check as check_host
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel
from hostweave.types.tensor import block_of, holds

Traced = Callable[..., Any]
torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")


VIEWS: dict[str, Callable[[Any], Any]] = {
    "an index": lambda x: x[0],
    "the rest": lambda x: x[1:],
    "every second": lambda x: x[::2],
    "transposed": lambda x: x.T,
    "reshaped": lambda x: hw.reshape(x, -1),
    "a shard": lambda x: hw.reshard(x, "S@x", 4),
    "a chain": lambda x: hw.reshape(x[2:].T, -1)[1:],
}


HELD = hw.f32["S", 4]


def views_of(x: Any) -> list[Any]:
    return [view(x) for view in VIEWS.values()]


@hw.block(donate={"x": 0}, x=HELD)
def doubled(x):  # type: ignore[no-untyped-def]
    return x * 2, *views_of(x)


@hw.block(donate={"x": 1}, x=HELD)
def nested(x):  # type: ignore[no-untyped-def]
    y, *views = doubled(x)
    return x[1:], y + 1, *views


@hw.block(donate={"x": 2, "y": 0}, x=HELD, y=HELD)
def swapped(x, y):  # type: ignore[no-untyped-def]
    return hw.reshape(hw.reshape(x, -1), *x.shape), y[0], y * 1, x.T


def in_fusion(c, d):  # type: ignore[no-untyped-def]
    return c * 2, d - c, *views_of(c), *views_of(d), (c + d)[1:]


def in_block(c, d):  # type: ignore[no-untyped-def]
    return *doubled(c + 1), *doubled(d), c[0]


def in_nested_blocks(c, d):  # type: ignore[no-untyped-def]
    return *nested(c + 1), *nested(d)


def in_each_other(c, d):  # type: ignore[no-untyped-def]
    return *swapped(c, d), *swapped(c * 1, d * 1)


def given_twice(c, d):  # type: ignore[no-untyped-def]
    c = c + 1
    return *swapped(c, c), *swapped(d, d)


DONATING: tuple[tuple[Traced, dict[str, int]], ...] = (
    (in_fusion, {"c": 0, "d": 1}),
    (in_block, {}),
    (in_block, {"d": 8}),
    (in_nested_blocks, {}),
    (in_nested_blocks, {"d": 10}),
    (in_each_other, {}),
    (in_each_other, {"d": 0, "c": 2}),
    (given_twice, {}),
    (given_twice, {"c": 0, "d": 6}),
)


@pytest.mark.parametrize(("function", "donate"), DONATING, ids=lambda value: "_".join(value) if isinstance(value, dict) else value.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 17])
def test_views_have_the_values_before(ranks: int, function: Traced, donate: dict[str, int]) -> None:
    """Views of donated parameters have the values from before the results overwrite the parameters."""
    as_expected(hw.fusion(mesh=hw.Mesh(x=ranks), donate=donate, c=HELD, d=HELD)(function), {"S": 4 * ranks})


def as_expected(fusion: Fusion, sizes: dict[str, int]) -> None:
    """Compares the results of the compiled program, and of the interpreter, with NumPy."""
    random = np.random.default_rng(0)
    shapes = {value.name: [size.bind(sizes) for size in value.type.shape] for value in fusion.inputs}
    given = {name: random.integers(-8, 9, shape).astype(np.float32) for name, shape in shapes.items()}
    want, program = run_reference(fusion, given), hw.compile(fusion, target="cpu")
    host = HostProgram.parse(program.host_ir)
    check_host(host)
    for rank, results in enumerate(interpret(host, given)):
        for output, whole in zip(host.outputs, want, strict=True):
            if holds(output.type, host.mesh, rank):
                np.testing.assert_array_equal(results[output.name], whole[block_of(output.type, host.mesh, rank, whole.shape)])
    with parallel(check_dependencies=True):
        results = program.run(**{name: array.copy() for name, array in given.items()})
    for got, whole in zip(results if isinstance(results, tuple) else (results,), want, strict=True):
        np.testing.assert_array_equal(got, whole)


def test_nothing_else_is_copied() -> None:
    """The program has only two copies. The first copy saves a view of a donated parameter before the parameter is overwritten. The second
    copy is of an argument that is passed twice."""

    @hw.block(donate=("x",), x=HELD, y=HELD)
    def summed(x, y):  # type: ignore[no-untyped-def]
        return x + hw.sum(y), hw.reshape(x[1:].T, -1)

    host = lower(hw.fusion(mesh=hw.Mesh(x=1), c=HELD)(lambda c: summed(c * 2, c * 2)), Options())
    (function,) = host.functions
    of_function, of_program = ([i.lines()[0] for i in body if isinstance(i, ir.Copy)] for body in (function.body, host.body))
    assert of_function == ["copy %x_transposed -> %x_transposed_packed"]
    assert [i.type.shape for i in function.body if isinstance(i, ir.Allocate)] == [()]
    assert of_program == ["copy %multiply_c -> %summed_c"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_views_in_donated_memory(ranks: int) -> None:
    """Views of b and g stay in the memory of b and g. Views of c and d swap memory. A local slice of g is in the memory of e."""
    square = hw.f32["M@x", "M"]

    @hw.fusion(
        mesh=hw.Mesh(x=ranks), donate={"b": 0, "c": 1, "d": 2, "e": 3, "g": 4}, b=square, c=square, d=square, e=square, g=hw.f32["M", "M"]
    )
    def moved(b, c, d, e, g):  # type: ignore[no-untyped-def]
        return b.T, hw.reshape(hw.reshape(d, -1), "M", "M"), c.T, hw.reshard(g, "M@x", "M"), g.T

    as_expected(moved, {"M": 4})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dims_in_another_order(ranks: int) -> None:
    """A result in donated memory has its dims in another order: in a fusion, in a function, and if an argument is used after the call."""

    @hw.block(donate=("x",), x=hw.f32["M", "N"])
    def turned(x):  # type: ignore[no-untyped-def]
        return x.T

    @hw.fusion(mesh=hw.Mesh(x=ranks), donate={"c": 0, "d": 3}, c=hw.f32["M@x", "N"], d=hw.f32[3, "M", "N@x"])
    def transposed(c, d):  # type: ignore[no-untyped-def]
        return c.T, turned(c), turned(c + 1), hw.permute_dims(d * 2, (2, 0, 1)), d[0]

    as_expected(transposed, {"M": 2 * ranks, "N": 3 * ranks})
    c, d = np.arange(6 * ranks, dtype=np.float32).reshape(2, -1), np.ones((3, 2, 3 * ranks), np.float32)
    before = c.copy()
    first, *_ = hw.compile(transposed).run(c, d)
    np.testing.assert_array_equal(first, before.T)
    np.testing.assert_array_equal(c.ravel(), before.T.ravel())  # The donated array has the elements of the result in row-major order.


@pytest.mark.parametrize("library", [np, torch])
def test_a_call_gives_a_view_of_the_array(request: pytest.FixtureRequest, library: Any) -> None:
    @hw.fusion(donate=("c",), c=hw.f32["M", "N"])
    def transposed(c):  # type: ignore[no-untyped-def]
        return (c + 1).T

    request.addfinalizer(hw.init(hw.Threads(1)).close)
    program = hw.compile(transposed)
    c = library.reshape(library.arange(6, dtype=library.float32), (2, 3))
    result = program(c)
    assert result.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert c.tolist() == [[1, 4, 2], [5, 3, 6]]
    result[0, 0] = 9
    assert c[0, 0] == 9  # c shares memory with the result.


def test_a_kernel_that_reorders_elements_is_not_in_place() -> None:
    """A kernel is not in place if the operand and the result have their elements in different orders."""

    @hw.block(donate=("x",), x=hw.f32["M", "M"])
    def turned(x):  # type: ignore[no-untyped-def]
        return (x * 2).T

    as_expected(hw.fusion(c=hw.f32["M", "M"])(lambda c: turned(c + 1)), {"M": 64})
    text = """kernel @twice(%x: f32[M, M]) {
  %y: f32[M, M] = multiply(%x, 2.0)
}
host @f(%x: f32[M, M]) -> (%y: f32[M, M] in %x) mesh() {
  %y_2 = reshape %y to [1, M, M]
  %y_3 = reshape %y_2 to [M, M]
  launch @twice %x -> %y_3
}
"""
    check_host(HostProgram.parse(text))
    with pytest.raises(ProgramError, match=r"writes %y_3 over the bytes of %x that it reads: give the result separate memory"):
        check_host(HostProgram.parse(text.replace("reshape %y_2 to [M, M]", "permute %y by [1, 0]")))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_views_of_donated_inputs_of_loops(ranks: int) -> None:
    """One chunk loop gathers a donated input. Another loop computes the result that overwrites the input."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), donate={"c": 0}, c=hw.f32["M@x", 4], w=hw.f32[4, "N"])
    def looped(c, w):  # type: ignore[no-untyped-def]
        gathered = (c @ w).stream(0, chunks=ranks)
        scaled = (c * 3).stream(1, chunks=2)
        return scaled, c[:, 1:], hw.reshard(gathered, "M", "N"), c.T

    as_expected(looped, {"M": 2 * ranks, "N": 3})


def test_views_on_several_meshes() -> None:
    """The donated inputs c and d are on two meshes, which share rank 1. c is also resharded to the mesh of d, and so is the donated
    argument of a block."""
    mesh = hw.Mesh(x=4)
    first, second = mesh.ranks([0, 1], z=2), mesh.ranks([1, 2, 3], z=3)

    @hw.block(donate={"x": 0}, x=hw.f32["M", 3].on(first))
    def moved(x):  # type: ignore[no-untyped-def]
        return x * 2, x[1], hw.reshard(x, "M@z", 3, mesh=second)

    @hw.fusion(mesh=mesh, donate={"c": 3, "d": 0}, c=hw.f32["M", 3].on(first), d=hw.f32["M@z", 3].on(second))
    def on_meshes(c, d):  # type: ignore[no-untyped-def]
        return d + 1, d[1:], hw.reshape(c.T, -1), c * 2, hw.reshard(c, "M@z", 3, mesh=second), *moved(c - 1)

    as_expected(on_meshes, {"M": 6})
