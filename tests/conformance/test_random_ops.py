"""Random programs of many kinds of ops with random shardings. Programs pass the check, and the results of the interpreter are close to
those of NumPy.

Programs use the transports auto and one_sided, loops that the compiler chooses, functions, and donated inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interpret import interpret
from kernel_changes import expect_loops_to_parse

import hostweave as hw
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.pipeline import lower
from hostweave.types.numpy_dtypes import numpy_dtype

MESHES: tuple[dict[str, int], ...] = ({"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 3})
SIZES = {"A": 12, "B": 24, "C": 36}  # multiples of the number of ranks of each mesh in MESHES
UNEVEN = {"A": 11, "B": 10, "C": 9}  # used only for sizes that are ints in the program
ROWS = 5  # range of the indices
TOLERANCE = 2e-3  # relative to the largest element, because some ops divide


class Writer:
    """Writes one program: a tensor with named dims passes through a sequence of ops."""

    def __init__(self, draw: random.Random, symbolic: float, mesh: hw.Mesh):
        self.draw, self.mesh = draw, mesh
        one_each = {"A": mesh.axes[0][1], "B": mesh.size, "C": mesh.axes[-1][1]}  # A rank may have only one index of a dim.
        ints = draw.choice([SIZES, UNEVEN, one_each])
        self.has_room = ints["A"] <= ints["C"]  # True if a slice of A indices fits into a dim of C indices.
        self.sizes: dict[str, Any] = {name: name if draw.random() < symbolic else size for name, size in ints.items()}
        self.results: list[hw.Tensor] = []
        self.function: Any = None

    def layout(self, dims: str) -> list[str]:
        result = [str(self.sizes[dim]) for dim in dims]
        for axis in self.draw.sample([name for name, _ in self.mesh.axes], len(self.mesh.axes)):
            if dims and self.draw.random() < 0.5:
                i = self.draw.randrange(len(dims))
                result[i] += ("," if "@" in result[i] else "@") + axis
        return result

    def begin(self, inputs: dict[str, hw.Tensor]) -> None:
        self.inputs, self.t, self.dims = inputs, inputs["x"], "AB"
        self.seen = [(self.t, self.dims)]

    def op(self) -> None:
        axis = self.draw.randrange(len(self.dims))
        fitting = [op for dims, op in OPS if self.dims.endswith(dims) or (dims == "ab" and len(self.dims) == 2)]
        self.draw.choice(fitting)(self, self.t, axis)
        if self.draw.random() < 0.15:
            self.results.append(self.t)
        self.seen.append((self.t, self.dims))

    def is_now(self, t: hw.Tensor, dims: str | None = None) -> None:
        self.t, self.dims = t, self.dims if dims is None else dims


def _elementwise(w: Writer, t: hw.Tensor, axis: int) -> None:
    fs: list[Callable[[hw.Tensor], hw.Tensor]] = [
        lambda t: t + 1,
        lambda t: t * 0,
        lambda t: hw.maximum(t, 0),
        lambda t: hw.where(t > 0, t, 1),
    ]
    w.is_now(w.draw.choice(fs)(t))


def _permute(w: Writer, t: hw.Tensor, axis: int) -> None:
    order = w.draw.sample(range(len(w.dims)), len(w.dims))
    w.is_now(hw.permute_dims(t, tuple(order)), "".join(w.dims[i] for i in order))


def _sum_away(w: Writer, t: hw.Tensor, axis: int) -> None:
    w.is_now(hw.sum(t, axis=axis), w.dims[:axis] + w.dims[axis + 1 :])


def _one_before(w: Writer, t: hw.Tensor, axis: int) -> None:
    alike = [t for t, dims in w.seen if dims == w.dims]
    w.is_now(t + w.draw.choice(alike or [t]))


def _rows(w: Writer, t: hw.Tensor, axis: int) -> None:
    if "A" in w.dims:
        w.is_now(hw.take(t, w.inputs["ids"], axis=w.dims.index("A")))


def _part(w: Writer, t: hw.Tensor, axis: int) -> None:
    few = min(4, w.sizes[w.dims[axis]]) if isinstance(w.sizes[w.dims[axis]], int) else 4
    sizes = [few if i == axis else w.sizes[dim] for i, dim in enumerate(w.dims)]
    w.results.append(hw.dynamic_slice(t, [w.inputs["p"] if i == axis else 0 for i in range(len(sizes))], sizes))


def _update(w: Writer, t: hw.Tensor, axis: int) -> None:
    if "cache" in w.inputs and w.has_room:
        w.results.append(hw.dynamic_update_slice(w.inputs.pop("cache"), t, [w.inputs["p"], 0]))


def _called(w: Writer, t: hw.Tensor, axis: int) -> None:
    w.is_now(w.function(hw.reshard(t, w.sizes["A"], w.sizes["B"]), t + 1))


def _scatter(w: Writer, t: hw.Tensor, axis: int) -> None:
    a, b = w.sizes["A"], w.sizes["B"]
    w.results.append(hw.scatter_add(t, 0, hw.broadcast_to(hw.reshape(w.inputs["ids"], a, 1), a, b), t))


def _cut(w: Writer, t: hw.Tensor, axis: int) -> None:
    if all(isinstance(size, int) for size in w.sizes.values()):
        kept = slice(None, None, 2) if w.draw.random() < 0.5 else slice(1, min(5, w.sizes[w.dims[axis]]))
        w.results.append(t[tuple(kept if i == axis else slice(None) for i in range(len(w.dims)))])


def _joined(w: Writer, t: hw.Tensor, axis: int) -> None:
    if all(isinstance(size, int) for size in w.sizes.values()):
        whole = [slice(0, w.sizes[dim]) for dim in w.dims]
        w.is_now(hw.concat([t, t + 1], axis=axis)[tuple(whole)] + hw.concat(hw.split(t, 2, axis=axis), axis=axis))


# For each op: the names of the last dims that the op needs ("" for none, "ab" for any two dims), and a function that applies the op.
OPS: list[tuple[str, Callable[[Writer, hw.Tensor, int], None]]] = [
    ("", lambda w, t, axis: w.is_now(-t)),
    ("", _elementwise),
    ("", lambda w, t, axis: w.is_now(t + hw.sum(t, axis=axis, keepdims=True))),
    ("", lambda w, t, axis: w.is_now(t - hw.max(t, axis=axis, keepdims=True))),
    ("", lambda w, t, axis: w.is_now(t + hw.mean(t, axis=axis, keepdims=True) - hw.var(t, axis=axis, keepdims=True))),
    ("", lambda w, t, axis: w.is_now(hw.softmax(t, axis=axis))),
    ("", lambda w, t, axis: w.is_now(t + hw.astype(hw.argmax(t, axis=axis, keepdims=True), hw.f32))),
    ("", lambda w, t, axis: w.is_now(hw.cumsum(t, axis=axis))),
    ("", lambda w, t, axis: w.is_now(hw.sort(t, axis=axis))),
    *[("", lambda w, t, axis: w.is_now(hw.reshard(t, *w.layout(w.dims))))] * 3,
    ("", _one_before),
    ("", _rows),
    ("", _part),
    ("", _cut),
    ("", _joined),
    ("ab", _permute),
    ("ab", _sum_away),
    ("B", lambda w, t, axis: w.is_now(t + w.inputs["b"])),
    ("B", lambda w, t, axis: w.is_now(hw.rms_norm(t, w.inputs["b"]))),
    ("AB", lambda w, t, axis: w.is_now(hw.matmul(t, w.inputs["w"]), "AC")),
    ("AB", lambda w, t, axis: w.is_now(hw.relu(hw.matmul(t, w.inputs["w"])) * hw.matmul(t, w.inputs["w"] + 1), "AC")),
    ("AC", lambda w, t, axis: w.is_now(hw.matmul(t, w.inputs["w"].T), "AB")),
    ("AB", lambda w, t, axis: w.is_now(hw.einsum("ab,cb->ac", t, t), "AA")),
    ("AB", lambda w, t, axis: w.is_now(hw.take_along_axis(t, hw.argsort(t, axis=axis), axis=axis))),
    ("AB", lambda w, t, axis: w.is_now(t + hw.sum(w.inputs["terms"], axis=0))),
    ("AB", lambda w, t, axis: w.is_now(hw.embedding(w.inputs["ids"], t))),
    ("AB", _update),
    ("AB", _called),
    ("AB", _scatter),
]


def program(draw: random.Random) -> Fusion:
    mesh, symbolic = hw.Mesh(**draw.choice(MESHES)), draw.choice([0, 0.6, 1])
    w = Writer(draw, symbolic, mesh)
    inputs = {name: hw.f32[tuple(w.layout(dims))] for name, dims in (("x", "AB"), ("w", "BC"), ("b", "B"))}
    inputs["terms"] = hw.f32[f"{mesh.axes[0][1]}@{mesh.axes[0][0]}", w.sizes["A"], w.sizes["B"]]
    inputs |= {"ids": hw.i32[tuple(w.layout("A"))], "p": hw.i32[()]}
    donate = ("cache",) if draw.random() < 0.3 else ()
    inputs |= {name: hw.f32[tuple(w.layout("CB"))] for name in donate}

    @hw.block(u=hw.f32[w.sizes["A"], w.sizes["B"]], v=hw.f32[w.sizes["A"], w.sizes["B"]])
    def gated(u, v):  # type: ignore[no-untyped-def]
        return hw.relu(u) * v - u

    @hw.fusion(mesh=mesh, donate=donate, **inputs)
    def random_program(**given):  # type: ignore[no-untyped-def]
        w.function = gated
        w.begin(given)
        for _ in range(draw.randrange(3, 8)):
            w.op()
        if "cache" in given:
            w.results.append(given["cache"] + 1)
        return w.t, *w.results

    return random_program


def given_arrays(fusion: Fusion, sizes: dict[str, int], seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    shapes = {v.name: tuple(int(dim.bind(sizes)) for dim in v.type.shape) for v in fusion.inputs}
    arrays = {name: draw.integers(-2, 3, shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"ids": draw.integers(0, min(ROWS, *shapes["ids"]), shapes["ids"]).astype(np.int32), "p": np.int32(draw.integers(0, 3))}


@pytest.mark.parametrize("seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 1000))])
def test_results_of_every_rank_equal_those_of_numpy(seed: int) -> None:
    draw = random.Random(seed)
    fusion = program(draw)
    symbols = {name for value in fusion.inputs for size in value.type.shape for name in size.symbols}
    known = {name: size for name, size in SIZES.items() if name in symbols} if draw.random() < 0.4 else {}
    host = lower(fusion, hw.Options(transport=draw.choice(["auto", "one_sided"]), overlap=draw.choice(["auto", "off"]), sizes=known))
    assert hw.Fusion.parse(str(fusion)) == fusion
    assert HostProgram.parse(str(host)) == host
    expect_loops_to_parse(host)
    check(host, fusion=fusion)
    given = given_arrays(fusion, {name: draw.randrange(ROWS, 20) if name in host.uneven else size for name, size in SIZES.items()}, seed)
    results = interpret(host, given)
    for output, whole in zip(host.outputs, run_reference(fusion, given), strict=True):
        largest = np.abs(whole.astype(np.float64)).max(initial=1)
        for rank in output.type.mesh_in(fusion.mesh).all_ranks:
            want = output.type.shard(whole.astype(numpy_dtype(output.type.dtype)), rank, fusion.mesh)
            np.testing.assert_allclose(
                results[rank][output.name], want, TOLERANCE, TOLERANCE * largest, err_msg=f"%{output.name} on {rank}"
            )
