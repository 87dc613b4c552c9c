"""The pass keep_groups_apart: rows stay on the ranks of their experts between grouped matmuls with the same groups. Only elementwise ops
and slices of columns may be between the matmuls. No op outside of this chain of ops may use the rows, and the rows must not be a result."""

from __future__ import annotations

import numpy as np
import pytest
from interpret import interpret

import hostweave as hw
from hostweave.check.check import check
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.passes.fusion.keep_groups_apart import keep_groups_apart
from hostweave.pipeline import lower

TYPES = {"x": hw.f64["T", "K"], "w": hw.f64["6@ep", "K", "F"], "v": hw.f64["6@ep", "F", "K"], "ends": hw.i32[6], "bias": hw.f64["F"]}


def layer(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, ends: hw.Tensor, bias: hw.Tensor) -> hw.Tensor:
    h = hw.grouped_matmul(x, w, ends)
    return hw.grouped_matmul(hw.silu(h + bias) * h, v, ends)


def halves(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, ends: hw.Tensor, bias: hw.Tensor) -> hw.Tensor:
    h = hw.grouped_matmul(x, hw.permute_dims(v, (0, 2, 1)), ends)
    return hw.grouped_matmul(hw.relu(h[:, ::2]) * h[:, 1::2], w, ends)


def returned(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, ends: hw.Tensor, bias: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
    h = hw.grouped_matmul(x, w, ends)
    return hw.grouped_matmul(hw.silu(h), v, ends), h


def other_groups(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, ends: hw.Tensor, bias: hw.Tensor) -> hw.Tensor:
    return hw.grouped_matmul(hw.silu(hw.grouped_matmul(x, w, ends)), v, ends // 2)


def other_rows(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, ends: hw.Tensor, bias: hw.Tensor) -> hw.Tensor:
    h = hw.grouped_matmul(x, w, ends)
    return hw.grouped_matmul(hw.concat([h[1:], h[:1]]), v, ends)


def of_all_rows(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, ends: hw.Tensor, bias: hw.Tensor) -> hw.Tensor:
    h = hw.grouped_matmul(x, w, ends)
    return hw.grouped_matmul(h - hw.sum(h, axis=0, keepdims=True), v, ends)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("function", "is_apart"),
    [(layer, True), (halves, True), (returned, False), (other_groups, False), (other_rows, False), (of_all_rows, False)],
)
def test_rows_that_stay_on_the_ranks_of_their_experts(function: object, is_apart: bool, ranks: int) -> None:
    types = TYPES if function is not halves else TYPES | {"v": hw.f64["6@ep", 8, "K"], "w": hw.f64["6@ep", 4, "K"], "bias": hw.f64[4]}
    fusion = hw.fusion(mesh=hw.Mesh(ep=ranks), **types)(function)  # type: ignore[arg-type]
    assert (keep_groups_apart(fusion, Options()) != fusion) == (is_apart and ranks > 1)
    host = lower(fusion, Options())
    check(host, fusion=fusion)
    sums = sum(isinstance(i, ir.AllReduce) for i in tree.walk(host.body))
    assert sums == 0 if ranks == 1 else sums == 1 if is_apart else sums > 1
    random, sizes = np.random.default_rng(ranks), {"T": 12, "K": 5, "F": 4}
    shapes = {v.name: tuple(size.bind(sizes) for size in v.type.shape) for v in fusion.inputs}
    given = {name: random.standard_normal(shape) for name, shape in shapes.items()} | {"ends": np.array([1, 1, 5, 8, 9, 11], np.int32)}
    alone = hw.fusion(**{name: hw.f64[shape] if name != "ends" else hw.i32[6] for name, shape in shapes.items()})(function)  # type: ignore[arg-type]
    wanted = interpret(lower(alone, Options()), given)[0]
    for results in interpret(host, given):
        for got, want in zip(results.values(), wanted.values(), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)
