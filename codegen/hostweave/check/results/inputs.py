"""Random inputs of a fusion: elements of a finite field in place of floats, integers, and bools. Positions and lengths are drawn from all
valid values."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostweave.check.results.field import PRIME
from hostweave.check.results.functions import Functions
from hostweave.check.results.samples import Exact, Samples
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attention import masks_of
from hostweave.fusion_ir.ops.attributes import LAGGED
from hostweave.fusion_ir.ops.grouped import GROUPED
from hostweave.types.mesh import Sizes
from hostweave.types.numpy_dtypes import computing_dtype
from hostweave.types.tensor import TensorType, global_shape

SMALL_INTEGERS = 3  # number of values of integers without a role
XORED_VALUES = 2**16  # number of values of integers that xor reduces; with few bits, two results are often equal by chance
ANY, POSITIONS, STARTS, LENGTHS, OFFSETS, ENDS, XORED = "any", "positions", "starts", "lengths", "offsets", "ends", "xored"


def random_inputs(
    fusion: Fusion, sizes: Sizes, seeds: int, functions: Functions, roles: Mapping[str, tuple[str, int]]
) -> dict[str, Samples]:
    """Global inputs with one sample per seed. The shadow of a float is independent of its element (see samples.py)."""
    random = _Random()
    return {v.name: _random(random, v.type, sizes, seeds, functions, *roles.get(v.name, (ANY, 0))) for v in fusion.inputs}


BLOCK, MAX_BLOCKS = 2**13, 32  # numbers per block, and maximum number of cached blocks; all checks of a process draw the same numbers


@lru_cache(MAX_BLOCKS)
def _block(number: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
    random = np.random.default_rng((39, number))
    return random.standard_normal(BLOCK), random.integers(1, PRIME, BLOCK, np.uint64)


class _Random:
    def __init__(self) -> None:
        self.integers = np.random.default_rng(39).integers
        self.drawn = 0

    def floats(self, shape: tuple[int, ...]) -> tuple[NDArray[Any], ...]:
        """Shadows and elements of an array. Each call draws new numbers."""
        start, self.drawn = self.drawn, self.drawn + prod(shape)
        starts = range(start // BLOCK * BLOCK, max(self.drawn, start + 1), BLOCK)
        pieces = [[component[max(start - at, 0) : self.drawn - at] for component in _block(at // BLOCK)] for at in starts]
        return tuple(np.concatenate(components).reshape(shape) for components in zip(*pieces, strict=True))


def _random(random: _Random, type: TensorType, sizes: Sizes, seeds: int, functions: Functions, role: str, bound: int) -> Samples:
    shape = (seeds, *global_shape(type, sizes))
    if type.dtype.kind == "float":
        shadow, element = random.floats(shape)
        shadow[1:2] = np.copysign(shadow[1:2], -shadow[:1])  # The first two seeds have opposite signs, so abs negates one of the two.
        return functions.real.from_components(shadow, element)
    if type.dtype.kind == "bool":
        return Exact(random.integers(0, 2, shape).astype(bool))
    count = {ANY: SMALL_INTEGERS, XORED: XORED_VALUES, POSITIONS: bound}.get(role, bound + 1)
    values: Any = random.integers(0, max(count, 1), shape)
    if role in (OFFSETS, ENDS):
        values.sort(axis=-1)
    if role == OFFSETS:
        values[..., :1], values[..., -1:] = 0, bound
    if role == LENGTHS and values.size > 1:
        values.flat[0] = bound
    return Exact(values.astype(computing_dtype(type.dtype)))


def index_roles(fusion: Fusion, sizes: Sizes) -> dict[str, tuple[str, int]]:
    """Maps each integer input with a role, such as positions, to the role and its bound."""
    found: dict[str, tuple[str, int]] = {}
    for name, role, bound in _index_roles(fusion, sizes):
        if role != XORED or name not in found:
            earlier = found.get(name, (role, bound))
            found[name] = (role, min(bound, earlier[1]))
    return {v.name: found[v.name] for v in fusion.inputs if v.name in found}


def _index_roles(fusion: Fusion, sizes: Sizes) -> Iterator[tuple[str, str, int]]:
    """Yields name, role and bound of each value that an op uses as positions, starts, lengths, offsets or ends, or reduces by xor. If the
    value comes from another tensor by views, copies, reshards or casts only, yields the name of that tensor."""
    moved: dict[str, str] = {}

    def source(name: str) -> str:
        while name in moved:
            name = moved[name]
        return name

    def size(name: str, dim: int) -> int:
        return int(fusion.types[name].shape[dim].bind(sizes))

    for op in fusion.ops:
        if op.callee:
            if op.kind != "output":
                inner = index_roles(op.callee, sizes)
                lagged = (op.callee.inputs[at] for at in op[LAGGED])
                for given, parameter in zip(op.tensors, (*op.callee.inputs, *lagged), strict=True):
                    if parameter.name in inner:
                        yield (source(given), *inner[parameter.name])
        elif OPS[op.kind].counts:
            yield source(op.tensors[0]), POSITIONS if op.kind == "index" else STARTS, size(op.tensors[1], 0)
        elif op.kind in GROUPED:
            yield source(op.tensors[3]), ENDS, size(op.tensors[0], 0)
        elif OPS[op.kind].is_attention:
            for word, name in masks_of(op, op.tensors).items():
                if word in (LENGTHS, OFFSETS):
                    yield source(name), word, size(op.tensors[1], -2)
        elif OPS[op.kind].partial == "xor":
            yield source(op.tensors[0]), XORED, XORED_VALUES
        elif len(op.tensors) == 1 and _moves(op):
            moved[op.result.name] = op.tensors[0]


def _moves(op: Op) -> bool:
    copies = ("astype", "copy", "reshard", "broadcast_to", "collective_permute")
    return OPS[op.kind].is_view or OPS[op.kind].is_reshard_step or op.kind in copies
