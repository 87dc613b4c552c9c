"""The NumPy reference of ops, and tolerances for rounding."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compiled_fusions import random_arrays, sizes_of
from fusions_from_files import all_fusions, fusions, more_fusions, pipelines
from interpret import interpret
from numpy.typing import NDArray
from op_examples import EXAMPLES, X

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.cli.tolerance import tolerance, tolerance_of
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.ops import OPS, RESHARD_STEPS
from hostweave.fusion_ir.ops.attention import GRADIENTS
from hostweave.fusion_ir.reference import run_reference
from hostweave.fusion_ir.rewriting import needs_ranks, on_one_device
from hostweave.host_ir import tree
from hostweave.pipeline import lower
from hostweave.types.tensor import DType

Array = NDArray[Any]


def test_every_op_has_an_example() -> None:
    elsewhere = {
        "attention",
        "attention_lse",
        *GRADIENTS,
    }  # tested in tests/programs/attention
    assert (
        set(EXAMPLES) == set(OPS) - {"kernel", "output", "repeat", "renumber", "reverse_second", *RESHARD_STEPS} - elsewhere
    )  # all ops that are not tested elsewhere, except user kernels, repeats, outputs of calls, and ops that only passes create


@pytest.mark.parametrize("kind", EXAMPLES)
def test_op(kind: str) -> None:
    function, expected = EXAMPLES[kind]
    fusion = hw.fusion(mesh=hw.Mesh(x=2), x=hw.f64["M", "N"])(lambda x: function(x))
    assert kind in {op.kind for op in fusion.ops}
    (result,) = run_reference(fusion, {"x": X})
    np.testing.assert_allclose(result, expected(X), rtol=1e-15)
    assert result.shape == np.shape(expected(X))


@pytest.mark.parametrize("op", ["pad(%x, low=(1, 0), high=(0, 0))", "fill()", "fill(value=2.5)"])
def test_attributes_that_are_left_out_have_their_defaults(op: str) -> None:
    shape = "(M + 1)" if op.startswith("pad") else "M"
    fusion = Fusion.parse(f"fusion @f(%x: f64[M, N]) mesh(x=2) {{\n%y: f64[{shape}, N] = {op}\nreturn %y\n}}")
    (expected,) = run_reference(fusion, {"x": X})
    assert np.array_equal(expected, np.pad(X, ((1, 0), (0, 0))) if op.startswith("pad") else np.full(X.shape, 2.5 * ("2.5" in op)))
    for result in interpret(lower(fusion, hw.Options()), {"x": X}):
        np.testing.assert_array_equal(result["y"], expected)


def test_integers_stay_exact_and_keep_their_dtype() -> None:
    fusion = hw.fusion(x=hw.u8["N"])(lambda x: hw.sum(x))
    (result,) = run_reference(fusion, {"x": np.array([200, 100], np.uint8)})
    assert result == 44
    assert result.dtype == np.uint8


def test_a_cast_rounds() -> None:
    fusion = hw.fusion(x=hw.f32["N"])(lambda x: hw.astype(hw.astype(x, hw.bf16), hw.f32))
    x = np.array([1.00390625, 3.3], np.float32)
    (result,) = run_reference(fusion, {"x": x})
    np.testing.assert_array_equal(result, x.astype(ml_dtypes.bfloat16).astype(np.float64))


def test_several_outputs_and_a_seed_program() -> None:
    x, w = np.arange(12.0).reshape(4, 3), np.arange(6.0).reshape(3, 2)
    fusion = hw.fusion(x=hw.f32["M", "K"], w=hw.f32["K", "N"])(lambda x, w: (x @ w, -x))
    product, negative = run_reference(fusion, {"x": x, "w": w})
    np.testing.assert_array_equal(product, x @ w)
    np.testing.assert_array_equal(negative, -x)
    (y,) = run_reference(fusions("seeds.py", ranks=2)["matmul_rs_flat"], {"x": np.ones((4, 6)), "w": np.ones((6, 5))})
    np.testing.assert_array_equal(y, np.full((4, 5), 6.0))


def test_inputs_that_do_not_fit() -> None:
    fusion = fusions("seeds.py", ranks=2)["ag_matmul_flat"]
    with pytest.raises(ArgumentError, match=r"^ag_matmul_flat: w is missing; pass w=$"):
        run_reference(fusion, {"x": np.ones((4, 6))})
    with pytest.raises(ArgumentError, match=r"^ag_matmul_flat: w has 1 dims; pass a bf16\[K, N\]$"):
        run_reference(fusion, {"x": np.ones((4, 6)), "w": np.ones(6)})


@pytest.mark.parametrize("dtype", [hw.f64, hw.f32, hw.f16, hw.bf16])
@pytest.mark.parametrize("ranks", [1, 8])
def test_tolerance_covers_a_sum_of_rounded_terms_and_not_much_more(dtype: DType, ranks: int) -> None:
    length = 512 * ranks
    store = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype.name]
    accumulate = np.float64 if dtype is hw.f64 else np.float32
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, length)).astype(store)
    exact = x.astype(np.longdouble).sum(axis=1)
    partial = np.add.accumulate(x.astype(accumulate).reshape(2000, ranks, -1), axis=2, dtype=accumulate)[:, :, -1].astype(store)
    total = partial[:, 0]
    for rank in range(1, ranks):
        total = (total.astype(accumulate) + partial[:, rank].astype(accumulate)).astype(store)
    allowed = tolerance(dtype, length, ranks)
    error = np.abs(total.astype(np.longdouble) - exact)
    assert np.all(error <= allowed.atol + allowed.rtol * np.abs(exact))
    assert np.max(error) > allowed.atol / 100


@pytest.mark.parametrize("head", [64, 256])
def test_tolerance_covers_the_scores_of_a_softmax_and_not_much_more(head: int) -> None:
    sizes, scale = {"S": 2000}, head**-0.5

    @hw.fusion(mesh=hw.Mesh(x=1), q=hw.f32[1, "S", head], k=hw.f32[1, 8, head], v=hw.f32[1, 8, 8])
    def attended(q, k, v):  # type: ignore[no-untyped-def]
        return hw.scaled_dot_product_attention(q, k, v)

    rng = np.random.default_rng(head)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 2000, head), (1, 8, head), (1, 8, 8)))
    (exact,) = run_reference(attended, {"q": q, "k": k, "v": v})
    scores = np.add.accumulate(q[0, :, None] * k[0], axis=2, dtype=np.float32)[:, :, -1] * np.float32(scale)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = np.abs((weights @ v[0]) / weights.sum(axis=1, keepdims=True) - exact[0])
    allowed, without = tolerance_of(attended, attended.outputs[0], sizes), tolerance(hw.f32)
    assert np.all(error <= allowed.atol + allowed.rtol * np.abs(exact[0]))
    assert np.any(error > without.atol + without.rtol * np.abs(exact[0]))
    assert np.max(error) > allowed.atol / 10


@pytest.mark.parametrize("dtype", [hw.f64, hw.f32, hw.f16, hw.bf16])
def test_tolerance_grows_as_sums_do(dtype: DType) -> None:
    """A sum of 16 times as many random terms is about 4 times as large. So the tolerance grows at most with the square root of the number
    of terms."""
    for length in (1 << 10, 1 << 14, 1 << 26):
        assert tolerance(dtype, 16 * length).atol <= 4 * tolerance(dtype, length).atol


def test_integers_have_no_tolerance() -> None:
    assert tolerance(hw.i32, 100, 8).atol == 0


def test_one_device_computes_the_same_without_communication() -> None:
    """The programs contain functions, pipelines and slices. Exported projects compare results with those of one device."""
    for fusion in (*all_fusions(ranks=4, chunks=3).values(), *more_fusions(ranks=4).values(), *pipelines(ranks=4).values()):
        alone = on_one_device(fusion)
        assert not needs_ranks(fusion)
        assert not any(i.posts for i in tree.walk(lower(alone, hw.Options()).body))
        arrays = random_arrays(fusion, sizes_of(fusion), seed=1)
        for one, many in zip(run_reference(alone, arrays), run_reference(fusion, arrays), strict=True):
            np.testing.assert_array_equal(one, many)
