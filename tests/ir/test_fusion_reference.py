"""The NumPy reference computes what each op means, and the tolerance covers what rounding does."""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from example_programs import all_fusions, fusions, more_fusions, pipelines
from interpret import interpret
from numpy.typing import NDArray
from whole_programs import random_arrays, sizes_of

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.cli.tolerance import tolerance
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.ops import OPS, RESHARD_STEPS
from hostweave.fusion_ir.ops.attention import GRADIENTS
from hostweave.fusion_ir.ops.pointwise import philox
from hostweave.fusion_ir.reference import run_reference
from hostweave.fusion_ir.rewriting import needs_ranks, on_one_device
from hostweave.host_ir import tree
from hostweave.pipeline import lower
from hostweave.types.tensor import DType

Array = NDArray[Any]
X = np.array([[-2.0, -0.5, 0.25], [0.5, 1.0, 3.0]])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def scattered(x: Array, source: Array) -> Array:
    result = x.copy()
    np.put_along_axis(result, np.argsort(x, 1), source, 1)
    return result


# One example an op: the program, and the same in plain NumPy.


@hw.block(x=hw.f64["M", "N"])
def add_one(x: hw.Tensor) -> hw.Tensor:
    return x + 1


EXAMPLES: dict[str, tuple[Callable[[hw.Tensor], hw.Tensor], Callable[[Array], Array]]] = {
    "matmul": (lambda x: x @ x.T, lambda x: x @ x.T),
    "add": (lambda x: 1 + x, lambda x: x + 1),
    "subtract": (lambda x: 1 - x, lambda x: 1 - x),
    "multiply": (lambda x: 2 * x, lambda x: 2 * x),
    "divide": (lambda x: 1 / x, lambda x: 1 / x),
    "maximum": (lambda x: hw.maximum(x, 0.3), lambda x: np.maximum(x, 0.3)),
    "minimum": (lambda x: hw.minimum(x, -x), lambda x: np.minimum(x, -x)),
    "pow": (lambda x: hw.pow(x * x, 1.5), lambda x: np.abs(x) ** 3),
    "floor_divide": (lambda x: x // 0.3, lambda x: x // 0.3),
    "remainder": (lambda x: x % -0.3, lambda x: x % -0.3),
    "negative": (lambda x: -x, lambda x: -x),
    "reciprocal": (hw.reciprocal, lambda x: 1 / x),
    "log": (lambda x: hw.log(x * x), lambda x: np.log(x * x)),
    "sqrt": (lambda x: hw.sqrt(x * x), np.abs),
    "rsqrt": (lambda x: hw.rsqrt(x * x), lambda x: 1 / np.abs(x)),
    "erf": (hw.erf, np.vectorize(erf)),
    "sigmoid": (hw.sigmoid, sigmoid),
    "relu": (hw.relu, lambda x: np.maximum(x, 0)),
    "gelu": (hw.gelu, lambda x: x / 2 * (1 + np.vectorize(erf)(x / np.sqrt(2)))),
    "gelu_tanh": (
        lambda x: hw.gelu(x, approximate="tanh"),
        lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
    "silu": (hw.silu, lambda x: x * sigmoid(x)),
    "equal": (lambda x: x == 0.5, lambda x: x == 0.5),
    "not_equal": (lambda x: x != 0.5, lambda x: x != 0.5),
    "less": (lambda x: x < 0.5, lambda x: x < 0.5),
    "less_equal": (lambda x: x <= 0.5, lambda x: x <= 0.5),
    "greater": (lambda x: x > 0.5, lambda x: x > 0.5),
    "greater_equal": (lambda x: x >= 0.5, lambda x: x >= 0.5),
    "logical_and": (lambda x: (x > 0) & (x < 2), lambda x: (x > 0) & (x < 2)),
    "logical_or": (lambda x: (x < 0) | (x > 2), lambda x: (x < 0) | (x > 2)),
    "logical_not": (lambda x: ~(x > 0), lambda x: x <= 0),
    "where": (lambda x: hw.where(x > 0, x, 7), lambda x: np.where(x > 0, x, 7)),
    "astype": (lambda x: hw.astype(x, hw.i32), lambda x: x.astype(np.int32)),
    "copy": (hw.copy, lambda x: x),
    "iota": (lambda x: hw.iota(x, "N"), lambda x: np.arange(3)),
    "philox": (lambda x: hw.uniform(x, seed=3), lambda x: philox(np, *np.ogrid[:2, :3], 0, 0, 3, 0)),
    "sum": (lambda x: hw.sum(x, axis="N"), lambda x: x.sum(axis=1)),
    "prod": (hw.prod, np.prod),
    "max": (lambda x: hw.max(x, axis=0, keepdims=True), lambda x: x.max(axis=0, keepdims=True)),
    "logical_xor": (lambda x: (x < 0) ^ (x > -1), lambda x: (x < 0) ^ (x > -1)),
    **{
        kind: (lambda x, of=of: of(hw.astype(4 * x, hw.i8)), lambda x, of=of: of((4 * x).astype(np.int8)))
        for kind, of in {
            "bitwise_and": lambda x: x & 3,
            "bitwise_or": lambda x: 4 | x,
            "bitwise_xor": lambda x: x ^ -1,
            "bitwise_invert": lambda x: ~x,
            "bitwise_left_shift": lambda x: x << 2,
            "bitwise_right_shift": lambda x: x >> 1,
        }.items()
    },
    **{
        f"reduce_{word}": (
            lambda x, word=word: getattr(hw, f"reduce_{word}")(hw.astype(4 * x, hw.i8), 0),
            lambda x, word=word: getattr(np, f"bitwise_{word}").reduce((4 * x).astype(np.int8), axis=0),
        )
        for word in ("and", "or", "xor")
    },
    "min": (lambda x: hw.min(x, axis=(0, 1)), np.min),
    "mean": (lambda x: hw.mean(x, axis=-1), lambda x: x.mean(axis=1)),
    "argmax": (lambda x: hw.argmax(x, axis="N"), lambda x: x.argmax(axis=1)),
    "expand_dims": (lambda x: x[:, None], lambda x: x[:, None]),
    "reshape": (lambda x: hw.reshape(x, "M*N"), lambda x: x.reshape(-1)),
    "permute_dims": (lambda x: x.T, lambda x: x.T),
    "broadcast_to": (lambda x: hw.broadcast_to(x, 5, "M", "N"), lambda x: np.broadcast_to(x, (5, 2, 3))),
    "select": (lambda x: x[:, -1], lambda x: x[:, -1]),
    "slice": (lambda x: x[-1:, ::3], lambda x: x[-1:, ::3]),
    "concat": (lambda x: hw.concat([x, -x], axis=1), lambda x: np.concatenate([x, -x], 1)),
    "collective_permute": (lambda x: hw.collective_permute(x, 1, [None, 0, 1]), lambda x: np.pad(x[:, :2], ((0, 0), (1, 0)))),
    "index": (lambda x: hw.take(x, hw.iota(x, 0), 0), lambda x: x),
    "start": (lambda x: hw.dynamic_slice(x, (1, -5), (2, 2)), lambda x: x[:2, :2]),
    "dynamic_update_slice": (lambda x: hw.dynamic_update_slice(x, -x[:, :2], (0, 9)), lambda x: np.concatenate([x[:, :1], -x[:, :2]], 1)),
    "take": (lambda x: hw.take(x, hw.argsort(x, 1), 1), lambda x: x[:, np.argsort(x, 1)]),
    "scatter": (lambda x: hw.scatter(x, 1, hw.argsort(x, 1), -x), lambda x: scattered(x, -x)),
    "scatter_sum": (lambda x: hw.scatter_add(x, 1, hw.argsort(x, 1), x), lambda x: x + scattered(x, x)),
    "argsort": (lambda x: hw.argsort(x, descending=True), lambda x: np.argsort(-x, stable=True)),
    "cumsum": (lambda x: hw.cumsum(x, 1), lambda x: np.cumsum(x, 1)),
    "pad": (lambda x: hw.pad(x, (1, 0, 0, 2), value=7), lambda x: np.pad(x, [(0, 2), (1, 0)], constant_values=7)),
    "call": (add_one, lambda x: x + 1),
    "reshard": (lambda x: hw.reshard(x, "M@x", "N"), lambda x: x),
}
# Functions of one tensor that NumPy has under the same name.
EXAMPLES |= {
    kind: (getattr(hw, kind), getattr(np, kind))
    for kind, op in OPS.items()
    if op.is_public and op.arity == 1 and kind not in EXAMPLES and hasattr(np, kind)
}


def test_every_op_has_an_example() -> None:
    elsewhere = {"attention", "attention_lse", *GRADIENTS}  # tests/programs/test_attention.py and test_attention_backward.py
    assert (
        set(EXAMPLES) == set(OPS) - {"kernel", "output", "fill", "renumber", "reverse_second", *RESHARD_STEPS} - elsewhere
    )  # C++ of the user, and the compiler's own


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


@pytest.mark.parametrize("dtype", [hw.f64, hw.f32, hw.f16, hw.bf16])
def test_tolerance_grows_as_sums_do(dtype: DType) -> None:
    """As the square root of what is added up: a sum of 16 times as many terms of either sign is 4 times as large."""
    for length in (1 << 10, 1 << 14, 1 << 26):
        assert tolerance(dtype, 16 * length).atol <= 4 * tolerance(dtype, length).atol


def test_integers_have_no_tolerance() -> None:
    assert tolerance(hw.i32, 100, 8).atol == 0


def test_one_device_computes_the_same_without_communication() -> None:
    """What exported projects compare with: every program, its functions, pipelines and slices among them."""
    for fusion in (*all_fusions(ranks=4, chunks=3).values(), *more_fusions(ranks=4).values(), *pipelines(ranks=4).values()):
        alone = on_one_device(fusion)
        assert not needs_ranks(fusion)
        assert not any(i.posts for i in tree.walk(lower(alone, hw.Options()).body))
        arrays = random_arrays(fusion, sizes_of(fusion), seed=1)
        for one, many in zip(run_reference(alone, arrays), run_reference(fusion, arrays), strict=True):
            np.testing.assert_array_equal(one, many)
