"""Results in donated memory, and slices at positions given by inputs: against NumPy and torch, on 1 to 4 ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_here import needs_cuda
from interpret import interpret
from numpy.typing import NDArray

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.check.check import check as check_host
from hostweave.cli.notes import costly_choices
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import block_of, holds

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from adamw import ZERO, adamw, rates

Array = NDArray[Any]
Arrays = dict[str, Array]
Traced = Callable[..., Any]
torch = pytest.importorskip("torch", reason="what these tests compare with: pip install torch")
SIZES = {"S": 11, "D": 5, "B": 3, "H": 6, "E": 4, "T": 3}
INPUTS = {
    "rows": hw.f32["S@x", "D"],  # sharded positions
    "heads": hw.bf16["B", "H@x", "S", "E"],
    "kept": hw.f32["S", "D"],
    "layer_0": hw.f32["S", "D"],
    "layer_1": hw.f32["S", "D"],
    "row": hw.f32["T", "D"],
    "values": hw.bf16[1, "H@x", 2, "E"],
    "position": hw.i64[1],
    "slot": hw.i32[()],
}
DONATED = {"rows": "new_rows", "heads": "new_heads", "kept": "new_kept", "layer_0": "first", "layer_1": "second"}


@hw.block(donate=("held",), row=hw.f32["T", "D"], held=hw.f32["S", "D"], position=hw.i64[1])
def layer(row, held, position):  # type: ignore[no-untyped-def]
    """A layer that updates its cache, and then reads all of it."""
    held = hw.dynamic_update_slice(held, row, (position, 0))
    return row + hw.sum(held, axis=0, keepdims=True), held


@cache
def program(ranks: int, target: str = "cpu") -> hw.Program:
    @hw.fusion(mesh=hw.Mesh(x=ranks), donate=tuple(DONATED), **INPUTS)
    def decode(rows, heads, kept, layer_0, layer_1, row, values, position, slot):  # type: ignore[no-untyped-def]
        new_rows = hw.dynamic_update_slice(rows, row * 2, (position, 0))  # crosses shard boundaries
        new_heads = hw.dynamic_update_slice(heads, values, (slot, 0, position - 1, 0))
        part = hw.dynamic_slice(new_rows, (position, slot), (4, 2))
        new_kept = hw.dynamic_update_slice(kept, row, (2, 0))
        before = hw.sum(kept, axis=1)  # reads the value before the update
        h, first = layer(row, layer_0, position)
        h, second = layer(h, layer_1, position)
        h, second = layer(h, second, position + 1)
        return part, new_rows, new_heads, new_kept, before, hw.negative(h).stream(0), first, second

    return hw.compile(decode, target=target)


def arrays(position: int, slot: int) -> Arrays:
    random = np.random.default_rng(position + 8)
    shapes = {name: [int(size) if size.is_int else SIZES[str(size)] for size in type.shape] for name, type in INPUTS.items()}
    numbers = {name: random.integers(-8, 9, shapes[name]).astype(numpy_dtype(INPUTS[name].dtype)) for name in INPUTS}
    return {**numbers, "position": np.array([position]), "slot": np.array(slot, np.int32)}


def put(x: Array, update: Array, *starts: int) -> Array:
    """Update with the semantics of jax.lax."""
    result = x.copy()
    begins = [min(max(start, 0), have - size) for start, have, size in zip(starts, x.shape, update.shape, strict=True)]
    result[tuple(slice(begin, begin + size) for begin, size in zip(begins, update.shape, strict=True))] = update
    return result


def wanted(v: Arrays) -> list[Array]:
    position, slot = int(v["position"][0]), int(v["slot"])
    rows = put(v["rows"], v["row"] * 2, position, 0)
    at, column = min(max(position, 0), SIZES["S"] - 4), min(max(slot, 0), SIZES["D"] - 2)

    def through(h: Array, held: Array, position: int) -> tuple[Array, Array]:
        held = put(held, h, position, 0)
        return h + held.sum(0, keepdims=True), held

    h, first = through(v["row"], v["layer_0"], position)
    h, second = through(h, v["layer_1"], position)
    h, second = through(h, second, position + 1)
    heads = put(v["heads"], v["values"], slot, 0, position - 1, 0)
    kept = put(v["kept"], v["row"], 2, 0)
    return [rows[at : at + 4, column : column + 2], rows, heads, kept, v["kept"].sum(1), -h, first, second]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_of_a_batch_has_a_place_of_its_own(ranks: int) -> None:
    """Sharded positions and heads, and a sharded batch. Only as many elements of the cache are written as arrive."""
    B, S = 2 * ranks, 7

    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        donate=("cache", "held"),
        cache=hw.bf16["B", 3, "S@x", 4],
        held=hw.f32["B@x", "S", 4],
        values=hw.bf16["B", 3, 2, 4],
        row=hw.f32["B@x", 1, 4],
        positions=hw.i32["B"],
    )
    def step(cache, held, values, row, positions):  # type: ignore[no-untyped-def]
        return hw.dynamic_update_slice(cache, values * 2, (0, 0, positions, 0)), hw.dynamic_update_slice(held, row, (0, positions - 1, 0))

    random = np.random.default_rng(ranks)
    shapes = {"cache": (B, 3, S, 4), "held": (B, S, 4), "values": (B, 3, 2, 4), "row": (B, 1, 4)}
    v = {name: random.integers(-8, 9, shape).astype(numpy_dtype(step.values()[name].type.dtype)) for name, shape in shapes.items()}
    v["positions"] = random.integers(-1, S + 1, B).astype(np.int32)
    want = [np.stack([put(v["cache"][b], v["values"][b] * 2, 0, at, 0) for b, at in enumerate(v["positions"])])]
    want += [np.stack([put(v["held"][b], v["row"][b], at - 1, 0) for b, at in enumerate(v["positions"])])]
    program = hw.compile(step)
    assert not re.search(r"\n +copy ", program.host_ir)
    for got, wanted in ((run_reference(step, v), want), *((program.run(**copied(v)), want) for _ in range(2))):
        for result, expected in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(result, expected)
    with seeded(ranks):
        np.testing.assert_array_equal(program.run(**copied(v))[0], want[0])
    program.check()


def copied(v: Arrays) -> Arrays:
    return {name: array.copy() for name, array in v.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_donated_inputs_hold_the_results(ranks: int) -> None:
    """Donates global arrays, each rank's arrays without a copy, and in the interpreter and the reference."""
    compiled = program(ranks)
    text = compiled.host_ir
    fusion, host = Fusion.parse(compiled.fusion_ir), HostProgram.parse(text)
    assert str(fusion) == compiled.fusion_ir
    assert "%new_rows in %rows" in compiled.fusion_ir
    for position, slot in ((0, 0), (4, 2), (9, 9), (-3, -1), (7, 1)):
        v = arrays(position, slot)
        want, given = wanted(v), copied(v)
        with seeded(position) if position > 4 else parallel(check_dependencies=True):
            results = compiled.run(**given)
        for number, (got, expected) in enumerate(zip(results, want, strict=True)):
            np.testing.assert_array_equal(got, expected, err_msg=f"result {number} at {position}, {slot}")
        for name, number in zip(DONATED, (1, 2, 3, 6, 7), strict=True):
            assert results[number] is given[name]
    for got, expected in zip(run_reference(fusion, v), want, strict=True):
        np.testing.assert_array_equal(got, expected.astype(got.dtype))
    for rank, held in enumerate(interpret(host, v)):
        for got, output, expected in zip(held.values(), host.outputs, want, strict=True):
            np.testing.assert_array_equal(got, output.type.shard(expected, rank, host.mesh))

    threads = hw.Threads(ranks)

    def rank(number: int) -> None:
        hw.init(threads)
        own = {name: np.array(type.shard(v[name], number, host.mesh), order="C") for name, type in INPUTS.items()}
        addresses = {name: array.ctypes.data for name, array in own.items()}
        results = compiled(**own)
        for name, at in zip(DONATED, (1, 2, 3, 6, 7), strict=True):
            assert results[at] is own[name]
            assert own[name].ctypes.data == addresses[name]
            np.testing.assert_array_equal(own[name], host.outputs[at].type.shard(want[at], number, host.mesh))
        out = [np.empty_like(result) if at in (0, 4, 5) else None for at, result in enumerate(results)]
        fresh = {name: np.array(type.shard(v[name], number, host.mesh), order="C") for name, type in INPUTS.items()}
        with parallel(check_dependencies=True):
            compiled(**fresh, out=out)
        np.testing.assert_array_equal(fresh["rows"], own["rows"])

    threads.run(rank)


def test_an_update_longer_than_its_dim_is_refused() -> None:
    v = arrays(0, 0)
    v["row"] = np.zeros((SIZES["S"] + 1, SIZES["D"]), np.float32)
    with pytest.raises(ArgumentError, match="S - T = -1: a slice goes outside of its dim; pass at least 1 more, or slice less"):
        program(1).run(**v)


def test_only_the_update_is_written() -> None:
    """No cache is copied, except one that is read afterwards, for which a note is printed. A kernel iterates over the update's elements."""
    host = lower(Fusion.parse(program(1).fusion_ir), Options())
    copies = [i for body in (host.body, *(f.body for f in host.functions)) for i in tree.walk(body) if isinstance(i, ir.Copy)]
    assert [(copy.src, copy.dst) for copy in copies] == [("kept", "new_kept_2"), ("new_kept_2", "new_kept")]
    large = [i for i in tree.walk(host.body) if isinstance(i, ir.Allocate) and str(i.type.shape[0]) == "S" and len(i.type.shape) > 1]
    assert [i.out for i in large] == ["new_kept_2"]
    notes = costly_choices(Fusion.parse(program(1).fusion_ir), host, {"S": 64, "D": 64, "B": 1, "H": 1, "E": 1, "T": 1})
    assert any("%kept is donated, but is read after" in note for note in notes)
    kernels = program(1).sources["kernels.cu"]
    assert re.search(r"over_grid<1, Index>\(D \* T\)", kernels)
    assert re.search(r"\[\(\w+ \+ i\) \* D \+ j\] = row\[", kernels)


@pytest.mark.parametrize(("ranks", "stage"), [(1, "fsdp"), *((ranks, stage) for ranks in (2, 4) for stage in ZERO)])
def test_adamw_in_place(ranks: int, stage: str) -> None:
    """Several steps against torch: one in-place kernel, and the communication of the ZeRO stage."""
    compiled = hw.compile(adamw(ranks, stage))
    host = HostProgram.parse(compiled.host_ir)
    launches = [i for i in tree.walk(host.body) if isinstance(i, ir.Launch)]
    assert len(launches) == 1
    assert not any(isinstance(i, ir.Copy) for i in tree.walk(host.body))
    posted = [type(i).__name__ for i in tree.walk(host.body) if isinstance(i, ir.Communication)]
    expected = {
        "zero_1": ["LaunchAllReduce", "AllReduce", "AllGather"],
        "zero_2": ["ReduceScatter", "AllGather"],
        "fsdp": ["ReduceScatter"],
    }
    assert posted == (expected[stage] if ranks > 1 else [])
    random = np.random.default_rng(0)
    w = random.standard_normal(22).astype(np.float32)  # uneven over 4 ranks
    m, v = np.zeros_like(w), np.zeros_like(w)
    parameter = torch.nn.Parameter(torch.tensor(w))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2)
    for step in range(1, 6):
        g = random.standard_normal((ranks, 22)).astype(np.float32)
        parameter.grad = torch.tensor(g).mean(0)
        optimizer.step()
        compiled.run(w, m, v, g, **{name: np.array(rate, np.float32) for name, rate in rates(step, lr=1e-2).items()})
        np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=5e-6, atol=1e-6)


# --- views of donated inputs ------------------------------------------------------------------------------------------

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
    """Parameters of fusions and functions: results that overwrite them are written later."""
    as_expected(hw.fusion(mesh=hw.Mesh(x=ranks), donate=donate, c=HELD, d=HELD)(function), {"S": 4 * ranks})


def as_expected(fusion: Fusion, sizes: dict[str, int]) -> None:
    """Compiles and runs the program; compares its results and the interpreter's with NumPy."""
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
        results = program.run(**copied(given))
    for got, whole in zip(results if isinstance(results, tuple) else (results,), want, strict=True):
        np.testing.assert_array_equal(got, whole)


def test_nothing_else_is_copied() -> None:
    """There are two copies: of the view of a donated input, before it is overwritten, and of an argument that is passed twice."""

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
    """Views of one input, of two that swap memory, and a local slice in the memory of a shard."""
    square = hw.f32["M@x", "M"]

    @hw.fusion(
        mesh=hw.Mesh(x=ranks), donate={"b": 0, "c": 1, "d": 2, "e": 3, "g": 4}, b=square, c=square, d=square, e=square, g=hw.f32["M", "M"]
    )
    def moved(b, c, d, e, g):  # type: ignore[no-untyped-def]
        return b.T, hw.reshape(hw.reshape(d, -1), "M", "M"), c.T, hw.reshard(g, "M@x", "M"), g.T

    as_expected(moved, {"M": 4})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dims_in_another_order(ranks: int) -> None:
    """A donated input that is returned transposed: by a fusion, by a function, and by a function whose argument is used afterwards."""

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
    np.testing.assert_array_equal(c.ravel(), before.T.ravel())  # in order, in the donated array


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
    assert c[0, 0] == 9  # shared memory


def test_elements_do_not_change_places_in_one_memory() -> None:
    """A kernel accesses only its own index in place, but one buffer has its elements in another order."""

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
    with pytest.raises(ProgramError, match=r"writes %y_3 over the bytes of %x that it reads: give it memory of its own"):
        check_host(HostProgram.parse(text.replace("reshape %y_2 to [M, M]", "permute %y by [1, 0]")))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_views_beside_loops(ranks: int) -> None:
    """The donated input is gathered chunk by chunk, and the result that overwrites it is computed in a loop."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), donate={"c": 0}, c=hw.f32["M@x", 4], w=hw.f32[4, "N"])
    def looped(c, w):  # type: ignore[no-untyped-def]
        gathered = (c @ w).stream(0, chunks=ranks)
        scaled = (c * 3).stream(1, chunks=2)
        return scaled, c[:, 1:], hw.reshard(gathered, "M", "N"), c.T

    as_expected(looped, {"M": 2 * ranks, "N": 3})


def test_views_on_several_meshes() -> None:
    """Includes a view that another mesh holds in place."""
    mesh = hw.Mesh(x=4)
    first, second = mesh.ranks([0, 1], z=2), mesh.ranks([1, 2, 3], z=3)

    @hw.block(donate={"x": 0}, x=hw.f32["M", 3].on(first))
    def moved(x):  # type: ignore[no-untyped-def]
        return x * 2, x[1], hw.reshard(x, "M@z", 3, mesh=second)

    @hw.fusion(mesh=mesh, donate={"c": 3, "d": 0}, c=hw.f32["M", 3].on(first), d=hw.f32["M@z", 3].on(second))
    def on_meshes(c, d):  # type: ignore[no-untyped-def]
        return d + 1, d[1:], hw.reshape(c.T, -1), c * 2, hw.reshard(c, "M@z", 3, mesh=second), *moved(c - 1)

    as_expected(on_meshes, {"M": 6})


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_read_of_what_was_overwritten_is_found() -> None:
    """The lowered program has none. If the read is moved after the update, in text or to another stream, the check reports it."""
    text = """kernel @put(%x: f32[S], %u: f32[1], %at: i64[], %rows: i64[S]) {
  %y: f32[S] = dynamic_update_slice(%x, %u, %at, %rows, axes=(0,))
}
kernel @total(%x: f32[S]) {
  %sum: f32[] = sum(%x, axis=(0,))
}
host @f(%x: f32[S], %u: f32[1], %at: i64[], %rows: i64[S]) -> (%y: f32[S] in %x, %sum: f32[]) mesh() {
  launch @total %x -> %sum
  launch @put %x, %u, %at, %rows -> %y
}
"""
    host = HostProgram.parse(text)
    assert HostProgram.parse(str(host)) == host
    verify_host(host)
    check_host(host)
    late = replace(host, body=host.body[::-1])
    verify_host(late)
    with pytest.raises(ProgramError, match=r"launch @total %x -> %sum reads %x after %y was written over .* keep a copy"):
        check_host(late)
    unwritten = replace(host, body=host.body[:1])
    with pytest.raises(ProgramError, match=r"nothing writes bytes .* of the output %y"):
        check_host(unwritten)
    for wrong, message in {
        "%sum: f32[] in %x": r"%x is f32\[S\]: give them the same dims",
        "%sum: f32[] in %sum": "`in` must name an input: write one of",
    }.items():
        with pytest.raises(ProgramError, match=message):
            verify_host(HostProgram.parse(text.replace("%sum: f32[])", f"{wrong})")))
    twice = text.replace("%sum: f32[])", "%sum: f32[S] in %x)")
    with pytest.raises(ProgramError, match=r"another output uses the same input: name a separate input for each"):
        verify_host(HostProgram.parse(twice))
    with pytest.raises(ProgramError, match=r"%x is an input and may not be written"):
        verify_host(HostProgram.parse(text.replace("-> %y\n", "-> %x\n")))


IN_FUNCTION = """kernel @twice(%x: f32[S, 4]) {
  %y: f32[S, 4] = multiply(%x, 2.0)
}
kernel @sum(%y: f32[S, 4], %z: f32[S, 4]) {
  %t: f32[S, 4] = add(%y, %z)
}
function @fn(%x: f32[S, 4]) -> (%y: f32[S, 4] in %x, %first: f32[4]) {
  %x_0 = select %x[0: 0]
  copy %x_0 -> %first
  launch @twice %x -> %y
}
function @twice_fn(%x: f32[S, 4]) -> (%y: f32[S, 4] in %x, %first: f32[4]) {
  call @fn %x -> %y, %first
  launch @twice %y -> %y
}
function @plus(%x: f32[S, 4], %z: f32[S, 4]) -> (%y: f32[S, 4] in %x) {
  launch @twice %x -> %y
  launch @sum %y, %z -> %y
}
host @f(%c: f32[S, 4]) -> (%out: f32[S, 4], %again: f32[4], %last: f32[4]) mesh() {
  copy %c -> %out
  call @plus %out, %c -> %out
  call @fn %out -> %out, %again
  call @twice_fn %out -> %out, %last
}
"""
REFUSED_IN_FUNCTION: dict[str, tuple[str, str, str]] = {
    "late": (
        "  copy %x_0 -> %first\n  launch @twice %x -> %y\n",
        "  launch @twice %x -> %y\n  copy %x_0 -> %first\n",
        r"copy %fn_x_0 -> %again reads %fn_x_0 after %fn_y was written over bytes 0 to 16 of %out, which were donated: read them before",
    ),
    "late in a function that calls one": (
        "  call @fn %x -> %y, %first\n",
        "  %t = allocate f32[S, 4]\n  call @fn %x -> %y, %first\n  copy %x -> %t\n",
        r"copy %twice_fn_x -> %twice_fn_t reads %twice_fn_x after %fn_y_2 was written over bytes .* of %out, which were donated",
    ),
    "another argument there": (
        "  call @plus %out, %c -> %out\n",
        "  %t = reshape %out to [S, 4]\n  call @plus %out, %t -> %out\n",
        r"launch @sum .* reads %plus_z after %plus_y was written over bytes .* of %out, which were donated",
    ),
    "not written": (
        "  launch @twice %x -> %y\n}",
        "}",
        r"returned %fn_y reads %fn_y before bytes .* of %out is written: write them first",
    ),
}


@pytest.mark.parametrize("name", REFUSED_IN_FUNCTION)
def test_a_function_reads_what_was_overwritten(name: str) -> None:
    check_host(HostProgram.parse(IN_FUNCTION))
    before, after, message = REFUSED_IN_FUNCTION[name]
    wrong = HostProgram.parse(IN_FUNCTION.replace(before, after))
    verify_host(wrong)
    with pytest.raises(ProgramError, match=message):
        check_host(wrong)


X, Y = hw.f32["M", "N"], hw.f32["M@x", "N"]
REFUSED: dict[str, tuple[Any, Traced, str]] = {
    "unknown": (("z",), lambda x, y: x + y, "donate: 'z' is not an input; one of x, y"),
    "twice": (("x", "x"), lambda x, y: x + y, "donate: x is named twice; name it once"),
    "none fits": (
        ("x",),
        lambda x, y: hw.sum(x + y, 0),
        "no result of f32\\[M, N\\], apart from those that other inputs take, is computed from x; return",
    ),
    "not computed from it": (("x",), lambda x, y: (hw.exp(y), hw.sum(x)), "is computed from x; return one, or leave x out of donate"),
    "several": (
        ("x",),
        lambda x, y: (x + y, x - y),
        'results 0 and 1 are of f32\\[M, N\\] and computed from x; choose one: donate={"x": 0',
    ),
    "of another type": (
        {"x": 1},
        lambda x, y: (x + y, hw.sum(x)),
        "donate: result 1 does not have the type of x, f32\\[M, N\\]; results that do: 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_donated(name: str) -> None:
    donate, function, message = REFUSED[name]

    def both(x, y):  # type: ignore[no-untyped-def]
        return function(x, y)

    with pytest.raises(ProgramError, match=message) as caught:
        hw.fusion(mesh=hw.Mesh(x=2), donate=donate, x=X, y=Y)(both)
    assert "test_donation.py" in str(caught.value)


def test_what_a_function_cannot_update() -> None:
    @hw.block(donate=("x",), x=X)
    def summed(x):  # type: ignore[no-untyped-def]
        return hw.sum(x, axis=0)

    with pytest.raises(ProgramError, match=r"function @summed: donate: no result of f32.* is computed from x; return one, or leave x out"):
        hw.fusion(x=X)(lambda x: summed(x))


def test_a_result_is_chosen_by_its_number() -> None:
    @hw.fusion(donate={"x": 1, "y": 0}, x=X, y=hw.f32["M", "N"])
    def swapped(x, y):  # type: ignore[no-untyped-def]
        return x + y, x - y

    assert swapped.donated == ("y", "x")
    with pytest.raises(ProgramError, match=r"is returned in %z, which is not an input|%z is used before it is defined"):
        Fusion.parse(str(swapped).replace("in %y", "in %z"))
    with pytest.raises(ProgramError, match=r"two results are returned in %x; donate an input for each"):
        Fusion.parse(str(swapped).replace("in %y", "in %x"))


SLICES: dict[str, tuple[Traced, str]] = {
    "starts": (
        lambda x, u, at: hw.dynamic_slice(x, (at,), (1, 2)),
        "1 starts and 2 sizes for the 2 dims of f32\\[4, N\\]; give one of each",
    ),
    "a tensor": (lambda x, u, at: hw.dynamic_slice(x, at, (1, 2)), "give one of each for every dim"),
    "too long": (
        lambda x, u, at: hw.dynamic_slice(x, (at, 0), (5, "N")),
        "5 elements exceed dim 0 of f32\\[4, N\\]; take at most 4",
    ),
    "no size": (lambda x, u, at: hw.dynamic_slice(x, (at, 0), ("1+", "N")), "dynamic_slice: "),
    "a float": (lambda x, u, at: hw.dynamic_slice(x, (0.5, 0), (1, "N")), "dim 0 cannot start at 0.5; pass an int, or a tensor of ints"),
    "floats": (lambda x, u, at: hw.dynamic_slice(x, (hw.sum(x), 0), (1, "N")), "dim 0 cannot start at f32\\[\\]; pass an int"),
    "several": (lambda x, u, at: hw.dynamic_slice(x, (hw.iota(x, 0), 0), (1, "N")), "dim 0 cannot start at i32\\[4\\]; pass an int"),
    "several places": (
        lambda x, u, at: hw.dynamic_update_slice(x, u[:, :1], (0, hw.iota(x, 1))),
        r"dim 1 cannot start at i32\[N\]; pass an int, or a tensor of ints that has one element$",
    ),
    "a dtype": (
        lambda x, u, at: hw.dynamic_update_slice(x, hw.astype(u, hw.f16), (at, 0)),
        "does not go into f32\\[4, N\\]; use hw.astype",
    ),
    "a number": (lambda x, u, at: hw.dynamic_update_slice(x, 1.0, (at, 0)), "1.0 does not go into f32\\[4, N\\]"),
    "an update": (lambda x, u, at: hw.dynamic_update_slice(x, hw.concat([u] * 5), (at, 0)), "5 elements exceed dim 0"),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_that_do_not_fit(name: str) -> None:
    function, message = SLICES[name]

    def sliced(x, u, at):  # type: ignore[no-untyped-def]
        return function(x, u, at)

    with pytest.raises(ProgramError, match=message) as caught:
        hw.fusion(x=hw.f32[4, "N"], u=hw.f32[1, "N"], at=hw.i32[()])(sliced)
    assert "test_donation.py" in str(caught.value)


def test_arrays_that_cannot_be_donated(request: pytest.FixtureRequest) -> None:
    """Read-only arrays, overlapping arrays, and another array as out=."""

    @hw.fusion(donate=("x", "y"), x=hw.f32["N"], y=hw.f32["N"], z=hw.f32["N"])
    def sums(x, y, z):  # type: ignore[no-untyped-def]
        return x + z, y - z

    compiled = hw.compile(sums)
    x, y, z = (np.full(4, number, np.float32) for number in range(3))
    fixed = x.copy()
    fixed.flags.writeable = False
    request.addfinalizer(hw.init(hw.Threads(1)).close)
    for call in (compiled.run, compiled):
        with pytest.raises(ArgumentError, match=r"sums: x: is donated but read-only; pass a writable array"):
            call(fixed, y, z)
    with pytest.raises(ArgumentError, match=r"sums: bind: x: is donated, so each call writes to it; pass it to each call"):
        compiled.bind(x=x)
    held = compiled.bind(z=z)  # the same with bound inputs
    first, _ = held(x, y)
    assert first is x
    assert x.tolist() == [2.0] * 4
    x, y = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert held.run(x, y)[0] is x
    assert (x.tolist(), y.tolist()) == ([2.0] * 4, [-1.0] * 4)
    with pytest.raises(ArgumentError, match=r"x and y are the same array, and both are donated|y and x are the same array"):
        compiled.run(x, x, z)
    with pytest.raises(ArgumentError, match=r"x, which is donated: x and y overlap in memory; pass separate arrays"):
        compiled(x, x, z)
    with pytest.raises(ArgumentError, match=r"which is donated: x and z overlap in memory"):
        compiled(x, y, x)
    with pytest.raises(ArgumentError, match=r"out=: .*: is returned in x, which is donated; pass None for it, or that array"):
        compiled(x, y, z, out=(z.copy(), None))
    tx, ty, tz = (torch.full((4,), float(number)) for number in range(3))
    first, second = compiled(tx, ty, tz)
    assert first is tx
    assert second.data_ptr() == ty.data_ptr()
    assert (tx.tolist(), ty.tolist()) == ([2.0] * 4, [-1.0] * 4)
    wide = torch.zeros(8)
    assert compiled.run(wide[::2], ty, z)[0].tolist() == [2.0] * 4  # a strided array, and inputs of another library
    assert wide.tolist() == [2.0, 0.0] * 4


@needs_cuda
def test_donation_compiles_for_cuda() -> None:
    compiled = program(2, "cuda")
    assert compiled.module.name == "decode"
    assert "warning" not in (compiled.folder / "build.log").read_text()
