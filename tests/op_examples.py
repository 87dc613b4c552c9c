"""Example of each op: a program, and its equivalent in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from math import erf, erfc, lgamma
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hostweave as hw
from hostweave.fusion_ir.frontend.recording import record
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.pointwise import philox

Array = NDArray[Any]
X = np.array([[-2.0, -0.5, 0.25], [0.5, 1.0, 3.0]])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def scattered(x: Array, source: Array) -> Array:
    result = x.copy()
    np.put_along_axis(result, np.argsort(x, 1), source, 1)
    return result


def grouped_order(x: Array) -> Array:
    """For two groups of the columns of each row: the ends of the groups, the columns of both groups sorted by group, and the position of
    each of these columns in the sorted order."""
    groups = np.clip(np.floor(x) + 1, 0, 2)
    result = np.zeros((len(x), 2 + 2 * x.shape[1]), np.int32)
    for i, row in enumerate(groups):
        used = [j for group in (0, 1) for j in np.flatnonzero(row == group)]
        result[i, :2] = (row == 0).sum(), len(used)
        result[i, 2 : 2 + len(used)] = used
        result[i, 2 + x.shape[1] + np.array(used, int)] = np.arange(len(used))
    return result


@hw.block(x=hw.f64["M", "N"])
def add_one(x: hw.Tensor) -> hw.Tensor:
    return x + 1


def scaled_product(x: hw.Tensor) -> hw.Tensor:
    scales = hw.astype(hw.sum(x, axis=1, keepdims=True), hw.f32)
    return hw.scaled_matmul(hw.astype(x, hw.f8e4m3), hw.astype(x.T, hw.f8e5m2), scales, scales.T, out_dtype=hw.f32)


EXAMPLES: dict[str, tuple[Callable[[hw.Tensor], hw.Tensor], Callable[[Array], Array]]] = {
    "matmul": (lambda x: x @ x.T, lambda x: x @ x.T),
    "scaled_matmul": (scaled_product, lambda x: (x @ x.T) * x.sum(1, keepdims=True) * x.sum(1)),
    "grouped_matmul": (
        lambda x: hw.grouped_matmul(x.T, hw.broadcast_to(x, 2, "M", "N"), hw.arange(1, 5, 2)),
        lambda x: x.T @ x,
    ),
    "grouped_outer": (
        lambda x: hw.grouped_matmul(x, x.T, hw.arange(1, 5, 2)),
        lambda x: np.stack([x[:, :1] @ x[:, :1].T, x[:, 1:] @ x[:, 1:].T]),
    ),
    "add": (lambda x: 1 + x, lambda x: x + 1),
    "subtract": (lambda x: 1 - x, lambda x: 1 - x),
    "multiply": (lambda x: 2 * x, lambda x: 2 * x),
    "divide": (lambda x: 1 / x, lambda x: 1 / x),
    "maximum": (lambda x: hw.maximum(x, 0.3), lambda x: np.maximum(x, 0.3)),
    "minimum": (lambda x: hw.minimum(x, -x), lambda x: np.minimum(x, -x)),
    "pow": (lambda x: hw.pow(x * x, 1.5), lambda x: np.abs(x) ** 3),
    "floor_divide": (lambda x: x // 0.3, lambda x: x // 0.3),
    "remainder": (lambda x: x % -0.3, lambda x: x % -0.3),
    "fmod": (lambda x: hw.fmod(x, -0.3), lambda x: np.fmod(x, -0.3)),
    "atan2": (lambda x: hw.atan2(x, 0.3), lambda x: np.arctan2(x, 0.3)),
    "hypot": (lambda x: hw.hypot(x, 0.3), lambda x: np.hypot(x, 0.3)),
    "copysign": (lambda x: hw.copysign(2.0, x), lambda x: np.copysign(2.0, x)),
    "asin": (lambda x: hw.asin(x / 4), lambda x: np.arcsin(x / 4)),
    "acos": (lambda x: hw.acos(x / 4), lambda x: np.arccos(x / 4)),
    "atan": (hw.atan, np.arctan),
    "asinh": (hw.asinh, np.arcsinh),
    "acosh": (lambda x: hw.acosh(x * x + 1), lambda x: np.arccosh(x * x + 1)),
    "atanh": (lambda x: hw.atanh(x / 4), lambda x: np.arctanh(x / 4)),
    "log1p": (lambda x: hw.log1p(x * x), lambda x: np.log1p(x * x)),
    "log2": (lambda x: hw.log2(x * x), lambda x: np.log2(x * x)),
    "log10": (lambda x: hw.log10(x * x), lambda x: np.log10(x * x)),
    "erfc": (hw.erfc, np.vectorize(erfc)),
    "lgamma": (lambda x: hw.lgamma(x * x), lambda x: np.vectorize(lgamma)(x * x)),
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
    "fill": (lambda x: hw.full(("N", 2), -3, x.dtype) * x[0, 0], lambda x: np.full((3, 2), -3) * x[0, 0]),
    "philox": (lambda x: hw.uniform(x, seed=3), lambda x: philox(np, *np.ogrid[:2, :3], 0, 0, 3, 0)),
    "sum": (lambda x: hw.sum(x, axis="N"), lambda x: x.sum(axis=1)),
    "prod": (hw.prod, np.prod),
    "max": (lambda x: hw.max(x, axis=0, keepdims=True), lambda x: x.max(axis=0, keepdims=True)),
    "gcd": (lambda x: hw.gcd(hw.astype(4 * x, hw.i8), 6), lambda x: np.gcd((4 * x).astype(np.int8), 6)),
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
    "inverse_order": (lambda x: record("inverse_order", hw.argsort(x, 1), axis=1), lambda x: np.argsort(np.argsort(x, 1), 1)),
    "group_order": (lambda x: record("group_order", hw.astype(hw.clip(hw.floor(x) + 1, 0, 2), hw.i32), axis=1, groups=2), grouped_order),
    "cumsum": (lambda x: hw.cumsum(x, 1), lambda x: np.cumsum(x, 1)),
    "pad": (lambda x: hw.pad(x, (1, 0, 0, 2), value=7), lambda x: np.pad(x, [(0, 2), (1, 0)], constant_values=7)),
    "call": (add_one, lambda x: x + 1),
    "reshard": (lambda x: hw.reshard(x, "M@x", "N"), lambda x: x),
}
# Functions of one tensor that have the same name in NumPy.
EXAMPLES |= {
    kind: (getattr(hw, kind), getattr(np, kind))
    for kind, op in OPS.items()
    if op.is_public and op.arity == 1 and kind not in EXAMPLES and hasattr(np, kind)
}
