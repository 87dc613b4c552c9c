"""Random programs in which a block has some of the ops, compared with NumPy. `pytest -m slow` tests many more programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fusion_properties import IGNORED, computes, seed_ranges
from random_fusions import Generator

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.types.tensor import Dim


def outlined(generator: Generator, fusion: Fusion) -> Fusion | None:
    """Moves consecutive ops to a block. The block has randomly sharded parameters, and is called twice. Returns None if the ops cannot form
    a block."""
    first = generator.random.randrange(len(fusion.ops))
    ops = fusion.ops[first : first + generator.random.randint(1, 4)]
    made = {op.result.name: op.result for op in ops}
    used = {*fusion.outputs, *(name for op in (*fusion.ops[:first], *fusion.ops[first + len(ops) :]) for name in op.tensors)}
    read = dict.fromkeys(name for op in ops for name in op.tensors if name not in made)
    results = [value for name, value in made.items() if name in used]
    if not results or not read:
        return None
    parameters = tuple(parameter(generator, fusion.values()[name]) for name in read)
    block = Fusion("block", fusion.mesh, parameters, ops, tuple(value.name for value in results))
    first_result, *others = (Value(value.name, replace(value.type, dims=tuple(map(Dim, value.type.shape)))) for value in results)
    again = replace(first_result, name="again")
    calls = (
        Op("call", tuple(read), first_result, callee=block),
        *(Op("output", (first_result.name,), value, (("index", i),), callee=block) for i, value in enumerate(others, 1)),
        Op("call", tuple(read), again, callee=block),
    )
    result = replace(fusion, body=(*fusion.ops[:first], *calls, *fusion.ops[first + len(ops) :]), outputs=(*fusion.outputs, "again"))
    try:
        verify_fusion(result)
    except ProgramError:  # No parameter determines a size of the block.
        return None
    return result


def parameter(generator: Generator, value: Value) -> Value:
    """Parameter for a value, with a random sharding. A dim whose size is an expression is not sharded."""
    axes = [dim.axes for dim in map(Dim.of, generator.sharded(["M"] * len(value.type.dims)))]
    whole = [size.is_int or str(size) in generator.sizes for size in value.type.shape]
    dims = (Dim(size, own if may else ()) for size, own, may in zip(value.type.shape, axes, whole, strict=True))
    return Value(value.name, replace(value.type, dims=tuple(dims)), pinned=True)


def is_right(seed: int) -> bool | None:
    """Returns True if the program of this seed runs, None if `outlined` returns None, and otherwise False."""
    generator = Generator(seed)
    fusion = outlined(generator, generator.fusion())
    return fusion and computes(generator, fusion, seed)


@pytest.mark.parametrize("seeds", seed_ranges(120, 20000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_blocks(seeds: range) -> None:
    ran = [is_right(seed) for seed in seeds]
    assert sum(right is not None for right in ran) > 0.7 * len(seeds)
    assert sum(right is True for right in ran) > 0.6 * len(seeds)
