"""Random fusions with values of several dtypes: floats of 8 to 64 bits, ints and bools.

Most values are small ints, so that results are exact. Sizes are often 1, or smaller than the number of ranks. Two of three programs state
typical sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from random_fusions import MESHES, Generator, MakeOp

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options

INTS = (hw.i8, hw.i16, hw.i32, hw.u8, hw.u16, hw.u64)
FLOATS = (hw.f32, hw.bf16, hw.f16)
OTHERS = (*INTS, *FLOATS, hw.bool_, hw.f8e4m3, hw.f8e5m2)


def _small(g: Generator, t: hw.Tensor, dtypes: tuple[Any, ...]) -> hw.Tensor:
    """Clips the elements to values from 0 to 2, and casts the result to one of `dtypes`."""
    return hw.astype(hw.clip(t, 0, 2), g.random.choice(dtypes))


def _of_bits(g: Generator, t: hw.Tensor) -> hw.Tensor:
    x = _small(g, t, (*INTS, hw.bool_))
    axis = g.random.choice([None, *range(t.ndim)])
    return g.random.choice([hw.reduce_and, hw.reduce_or, hw.reduce_xor])(x, axis, g.random.random() < 0.5)


def _looked_up(g: Generator, t: hw.Tensor) -> hw.Tensor:
    """Takes slices along a random dim of `t`. The indices are computed from `t`, or made by iota."""
    x, axis = _small(g, t, OTHERS), g.random.randrange(t.ndim)
    row = hw.iota(t, axis, g.random.choice([hw.i32, hw.i64]))
    return hw.take(x, g.random.choice([row, row * 0, hw.astype(hw.argsort(t, axis), hw.i32)]), axis)


def _padded(g: Generator, t: hw.Tensor) -> hw.Tensor:
    return hw.pad(_small(g, t, OTHERS), [g.random.randint(0, 2) for _ in range(2 * g.random.randint(1, t.ndim))])


def _product(g: Generator, t: hw.Tensor) -> hw.Tensor:
    """Matmul of small ints in floats of 16 or 32 bits, or of 8-bit floats with scales."""
    x = _small(g, hw.reshape(t, t.shape[0], -1), FLOATS)
    if g.random.random() < 0.5:
        return hw.minimum(x @ g.resharded(x).T, 2)
    (a, scale_a), (b, scale_b) = (hw.quantize(hw.sign(y), "row") for y in (x, g.resharded(x)))
    return hw.minimum(hw.round(hw.scaled_matmul(a, b.T, scale_a, scale_b.T, out_dtype=hw.f32)), 2)


def _routed(g: Generator, t: hw.Tensor) -> hw.Tensor:
    x = _small(g, hw.reshape(t, t.shape[0], -1), FLOATS)
    experts = g.mesh.size * g.random.choice([1, 2])
    ids = hw.expand_dims(hw.iota(x, 0) % experts, 1)
    axes = g.random.choice([(), g.mesh.axes[0][0], tuple(name for name, _ in g.mesh.axes)])
    routing = hw.moe_routing(ids, experts, axes, capacity=g.random.choice([None, 1, 100]))
    return hw.moe_combine(hw.moe_dispatch(g.resharded(x), routing), routing, sent=g.random.choice([None, hw.bf16, hw.f32]))


MADE: tuple[Callable[[Generator, hw.Tensor], hw.Tensor], ...] = (
    lambda g, t: g.resharded(_small(g, t, OTHERS)),
    lambda g, t: hw.cumsum(hw.minimum(_small(g, t, FLOATS), 1), g.random.randrange(t.ndim)),
    lambda g, t: hw.sort(_small(g, t, (*INTS, *FLOATS)), g.random.randrange(t.ndim)),
    lambda g, t: hw.where(_small(g, t, (hw.bool_,)), _small(g, t, OTHERS[:9]), 1),
    _of_bits,
    _looked_up,
    _padded,
    _product,
    _routed,
)


def in_another_dtype(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    t = t if t.ndim else hw.reshape(t, 1)
    return hw.astype(g.random.choice(MADE)(g, t), g.dtype)


def with_dtypes(seed: int, meshes: Sequence[dict[str, int]] = MESHES) -> tuple[Generator, Fusion, Options]:
    ops: list[MakeOp] = [in_another_dtype] * 40
    generator = Generator(seed, meshes, ops)
    if seed % 2:
        generator.sizes |= dict.fromkeys("MN", 1)
    fusion = generator.fusion()
    symbols = {name for value in fusion.inputs for size in value.type.shape for name in size.symbols}
    sizes = {name: generator.random.choice([1, 3, 12]) for name in sorted(symbols)}
    return generator, fusion, Options(sizes=sizes if seed % 3 else {})
