"""Results in donated memory, and slices at positions that are inputs, compared with NumPy and torch on 1 to 4 ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_here import needs_cuda
from interpret import interpret
from numpy.typing import NDArray

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.cli.notes import costly_choices
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.numpy_dtypes import numpy_dtype

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from adamw import ZERO, adamw, rates

Array = NDArray[Any]
Arrays = dict[str, Array]
Traced = Callable[..., Any]
torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")


SIZES = {"S": 11, "D": 5, "B": 3, "H": 6, "E": 4, "T": 3}


INPUTS = {
    "rows": hw.f32["S@x", "D"],  # The updated dim is sharded.
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
    held = hw.dynamic_update_slice(held, row, (position, 0))
    return row + hw.sum(held, axis=0, keepdims=True), held


@cache
def program(ranks: int, target: str = "cpu") -> hw.Program:
    @hw.fusion(mesh=hw.Mesh(x=ranks), donate=tuple(DONATED), **INPUTS)
    def decode(rows, heads, kept, layer_0, layer_1, row, values, position, slot):  # type: ignore[no-untyped-def]
        new_rows = hw.dynamic_update_slice(rows, row * 2, (position, 0))  # The update may cross shard boundaries.
        new_heads = hw.dynamic_update_slice(heads, values, (slot, 0, position - 1, 0))
        part = hw.dynamic_slice(new_rows, (position, slot), (4, 2))
        new_kept = hw.dynamic_update_slice(kept, row, (2, 0))
        before = hw.sum(kept, axis=1)  # The sum reads the old value.
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
    """Reference of an update, with the semantics of jax.lax."""
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


@pytest.mark.parametrize("donate", [{}, {"x": 0}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_is_updated_by_itself(ranks: int, donate: dict[str, int]) -> None:
    """An update with as many elements as the tensor fits only at position 0."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), donate=donate, x=hw.f32["4@x", 3], position=hw.i32[1])
    def update(x, position):  # type: ignore[no-untyped-def]
        rows = x * 2
        return hw.dynamic_update_slice(x, x, (0, 0)), hw.dynamic_update_slice(rows, rows, (position, 0)), rows + 1

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    got = hw.compile(update).run(x=x.copy(), position=np.array([2], np.int32))
    for result, wanted in zip(got, (x, x * 2, x * 2 + 1), strict=True):
        np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_sequence_has_a_separate_position(ranks: int) -> None:
    """One cache is sharded along the positions, and one along the batch. Only new elements are written to the caches."""
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
def test_results_are_in_donated_inputs(ranks: int) -> None:
    """Results are written to donated arrays, both in `run` and in calls of ranks. The interpreter and the reference give the same
    values."""
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
    with pytest.raises(ArgumentError, match="S - T = -1: a slice or an index exceeds its dim; pass at least 1 more, or take less"):
        program(1).run(**v)


def test_only_the_update_is_written() -> None:
    """A cache is copied only if old values are read after the update. A note reports the read. The kernel of an update writes only the
    elements of the update."""
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
    """Several steps of AdamW, compared with torch. A step is one in-place kernel, and the communication of the ZeRO stage."""
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
    w = random.standard_normal(22).astype(np.float32)  # The number of elements is uneven on 4 ranks.
    m, v = np.zeros_like(w), np.zeros_like(w)
    parameter = torch.nn.Parameter(torch.tensor(w))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2)
    for step in range(1, 6):
        g = random.standard_normal((ranks, 22)).astype(np.float32)
        parameter.grad = torch.tensor(g).mean(0)
        optimizer.step()
        compiled.run(w, m, v, g, **{name: np.array(rate, np.float32) for name, rate in rates(step, lr=1e-2).items()})
        np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=5e-6, atol=1e-6)


@needs_cuda
def test_donation_compiles_for_cuda() -> None:
    compiled = program(2, "cuda")
    assert compiled.module.name == "decode"
    assert "warning" not in (compiled.folder / "build.log").read_text()
