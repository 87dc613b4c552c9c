"""Fusions that nobody thought of: each lowers, prints and parses, passes the static check, and means what NumPy says; or it is refused.

`pytest -m slow` tries many more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import hostweave as hw
from hostweave.analysis.check import check
from hostweave.analysis.interpret import interpret
from hostweave.errors import ArgumentError, ProgramError
from hostweave.fusion.ir import Fusion
from hostweave.fusion.reference import run_reference
from hostweave.host.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.arrays import numpy_dtype
from hostweave.runtime.shards import block_of

Array = NDArray[Any]
MESHES = ({"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"dp": 2, "tp": 2}, {"a": 2, "b": 3})
NUMBERS = (0, 1, 2, -1, 0.0, 1.0, 2.0)  # also those that number operands, as ints and as floats
SLICES = (0, -1, slice(0, 1), slice(1, None), slice(None, -1), slice(None, None, 2), slice(1, None, 3))


class Generator:
    """A mesh, sizes, and a function of random ops."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.mesh = hw.Mesh(**self.random.choice(MESHES))
        even = [self.mesh.size * times for times in (1, 2, 3)]
        choices = even if self.random.random() < 0.6 else [1, 2, 5, 7, 12]
        self.sizes = {name: self.random.choice(choices) for name in "MNK"}
        self.dtype = self.random.choice([hw.f64, hw.f64, hw.i64])

    def sharded(self, shape: list[Any]) -> tuple[Any, ...]:
        """These dims, some of them split."""
        axes = [name for name, _ in self.mesh.axes]
        self.random.shuffle(axes)
        dims = []
        for extent in shape:
            own = [axes.pop() for _ in tuple(axes) if self.random.random() < 0.3]
            dims.append(f"{extent}@{','.join(own)}" if own else extent)
        return tuple(dims)

    def fusion(self) -> Fusion:
        extents = [(name, self.sizes[name])[self.random.random() < 0.3] for name in "MNK" * 3]
        inputs = {
            f"x{i}": self.dtype[self.sharded(self.random.sample(extents, self.random.randint(1, 3)))]
            for i in range(self.random.randint(1, 3))
        }

        def random(**tensors: hw.Tensor) -> tuple[hw.Tensor, ...]:
            values = list(tensors.values())
            for _ in range(self.random.randint(1, 6)):
                with contextlib.suppress(ProgramError):  # of operands that do not fit
                    values.append(self.random.choice(OPS)(self, values, self.random.choice(values)))
            made = values[len(tensors) :] or [values[0] + 1]
            return tuple(self.random.sample(made, min(len(made), 2)))

        return hw.fusion(mesh=self.mesh, **inputs)(random)

    def arrays(self, fusion: Fusion, seed: int) -> dict[str, Array]:
        """Small integers: sums and products of them are exact."""
        random = np.random.default_rng(seed)
        dtype = numpy_dtype(self.dtype)
        return {v.name: random.integers(-2, 3, [e.bind(self.sizes) for e in v.type.shape]).astype(dtype) for v in fusion.inputs}


def _reduced(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    axes = tuple(g.random.sample(range(t.ndim), g.random.randint(0, t.ndim)))
    return g.random.choice([hw.sum, hw.max, hw.min, hw.mean])(t, axis=axes, keepdims=g.random.random() < 0.5)


def _located(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """Where the largest element is, of integers, as rounding may make others of floats equal."""
    if t.dtype != hw.i64:
        return _with_number(g, values, t)
    return hw.argmax(t, axis=g.random.randrange(t.ndim or 1), keepdims=g.random.random() < 0.5)


def _with_number(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    """An op of a tensor and a number, also beside the same op without the number."""
    op: Callable[[Any, Any], hw.Tensor] = g.random.choice(PAIRS)
    made = op(t, g.random.choice(NUMBERS))
    return g.random.choice([made, made - op(t, t), op(t, t) * 2 - made])


def _turned(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return hw.transpose(t, tuple(g.random.sample(range(t.ndim), t.ndim)))


def _cut(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    key: list[Any] = [slice(None)] * t.ndim
    if key:
        dim = g.random.randrange(t.ndim)
        is_sum = "(" in str(t.shape[dim])  # with a step it would have to divide, which other uses of the size may not allow
        key[dim] = g.random.choice(SLICES[:-2] if is_sum else SLICES)
    return t[tuple(key)]


def _joined(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    others = [t * 2, t, g.random.choice(values)]
    return hw.concat(g.random.sample(others, 2), axis=g.random.randrange(t.ndim or 1))


def _padded(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return hw.pad(t, [g.random.choice([0, 0, 1, 2]) for _ in range(2 * g.random.randint(0, t.ndim))], value=g.random.randint(-1, 1))


def _aside(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    made = _reduced(g, values, t) if g.random.random() < 0.5 else hw.reshard(t + 1, *g.sharded(list(t.shape)))
    return made.aside()


def _streamed(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return (-t).stream(g.random.randrange(t.ndim or 1), chunks=g.random.choice([None, 2, g.mesh.size, 2 * g.mesh.size]))


def _stream_of(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    return t.stream(g.random.randrange(t.ndim or 1), chunks=g.random.choice([None, 2, g.mesh.size, 2 * g.mesh.size])) * 2


PAIRS: tuple[Callable[[Any, Any], hw.Tensor], ...] = (
    lambda a, b: a + b,
    lambda a, b: b - a,
    lambda a, b: a * b,
    hw.maximum,
    hw.minimum,
    lambda a, b: hw.where(a > b, a, b),
    lambda a, b: hw.where(a != b, 3, a),
    lambda a, b: hw.where(a <= b, b, 7),
)

OPS: tuple[Callable[[Generator, list[hw.Tensor], hw.Tensor], hw.Tensor], ...] = (
    lambda g, values, t: t + g.random.choice(values),
    lambda g, values, t: t * g.random.choice(values),
    lambda g, values, t: t @ g.random.choice(values),
    lambda g, values, t: hw.where(t > 0, t, 0 - t),
    lambda g, values, t: hw.expand_dims(t, g.random.randint(0, t.ndim)),
    lambda g, values, t: hw.reshard(t, *g.sharded(list(t.shape))),
    lambda g, values, t: hw.reshard(t, *g.sharded(list(t.shape))),
    _with_number,
    _with_number,
    _reduced,
    _located,
    _turned,
    _cut,
    _joined,
    _padded,
    _aside,
    lambda g, values, t: hw.reshape(t, -1),
    _streamed,
    _stream_of,
)


def is_right(seed: int) -> bool:
    """Whether the program of this seed runs at its sizes. Fails where it does so wrongly."""
    generator = Generator(seed)
    return computes(generator, generator.fusion(), seed)


def computes(generator: Generator, fusion: Fusion, seed: int) -> bool:
    assert Fusion.parse(str(fusion)) == fusion
    try:
        host = lower(fusion, Options())
    except ProgramError:
        return False  # a loop that cannot be
    assert HostProgram.parse(str(host)) == host
    try:
        check(host)
    except ProgramError as error:
        if "choose sizes that it divides" in str(error):  # there are none, as of N and N - 1 that are both even
            return False
        raise
    arrays = generator.arrays(fusion, seed)
    try:
        ranks = interpret(host, arrays)
    except (ArgumentError, ProgramError):
        return False  # sizes that do not divide
    with np.errstate(all="ignore"):
        wanted = run_reference(fusion, arrays)
    for parameter, want in zip(host.outputs, wanted, strict=True):
        for rank, results in enumerate(ranks):
            block = want[block_of(parameter.type, host.mesh, rank, want.shape)]
            np.testing.assert_allclose(results[parameter.name], block, rtol=1e-12, atol=1e-12, err_msg=f"seed {seed}, rank {rank}\n{host}")
    return True


# How many seeds are tried; at least this part of them must run.
@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 20000), marks=pytest.mark.slow)], ids=["some", "many"])
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value encountered")
def test_random_programs(seeds: range) -> None:
    assert sum(map(is_right, seeds)) > 0.8 * len(seeds)


def moves_right(seed: int) -> bool:
    """A tensor from layout to layout over several axes, in loops where that can be."""
    generator = Generator(seed)
    generator.mesh = hw.Mesh(**generator.random.choice(({"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2})))
    generator.sizes = dict.fromkeys("MNK", 2 * generator.mesh.size)
    dims = list("MNK")[: generator.random.randint(1, 3)]

    @hw.fusion(mesh=generator.mesh, x=hw.f64[generator.sharded(dims)])
    def moved(x: hw.Tensor) -> hw.Tensor:
        for _ in range(generator.random.randint(1, 3)):
            x = hw.reshard(x, *generator.sharded(dims))
            if generator.random.random() < 0.7:
                x.stream(generator.random.randrange(x.ndim), chunks=generator.random.choice([None, 2, generator.mesh.size]))
        return x

    return computes(generator, moved, seed)


def test_random_moves() -> None:
    assert sum(map(moves_right, range(200))) > 100
