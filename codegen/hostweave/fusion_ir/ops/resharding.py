"""Ops that permute or renumber the blocks of a dim, the op `reshard`, and the steps into which reshards are decomposed."""

from dataclasses import replace
from typing import Any

from hostweave.fusion_ir.index_map import IndexMap, numbered
from hostweave.fusion_ir.ir import Attribute, Op
from hostweave.fusion_ir.ops.attributes import AXIS, BLOCKS, DIM, MESH_AXES, REDUCTION, ROOT, SOURCES, TO
from hostweave.fusion_ir.ops.definition import Mismatch, OpDef, Types, checked_axis, elementwise, unsharded
from hostweave.types.tensor import TensorType
from hostweave.types.zigzag import Zigzag

OPS: dict[str, OpDef] = {}

NO_SOURCE = -1  # entry of `sources` for a block of zeros


def _collective_permute(types: Types, op: Op) -> TensorType:
    (x,) = types
    axis, sources = checked_axis(op[AXIS], x), op[SOURCES]
    named = [source for source in sources if source != NO_SOURCE]
    if not sources or any(not 0 <= source < len(sources) for source in named):
        raise Mismatch(f"sources={sources}: each must be one of {len(sources)} blocks, from 0 on, or None ({NO_SOURCE} in text) for zeros")
    if len(set(named)) < len(named):
        raise Mismatch(f"sources={sources}: a block is named more than once; use hw.concat to repeat a block")
    if x.shape[axis].is_int and int(x.shape[axis]) % len(sources):
        raise Mismatch(f"{len(sources)} blocks do not divide dim {axis} of {x}; give a number of sources that divides it")
    return unsharded(x)


def _blocks_permuted(types: Types, op: Op) -> IndexMap:
    labels = numbered(types[0].shape)
    moved = labels[op[AXIS]]
    return IndexMap((labels,), labels, frozenset((moved,)), ((moved, len(op[SOURCES])),))


def _numpy_collective_permute(np: Any, x: Any, axis: int, sources: tuple[int, ...]) -> Any:
    blocks = np.split(x, len(sources), axis)
    return np.concatenate([np.zeros_like(blocks[0]) if source == NO_SOURCE else blocks[source] for source in sources], axis)


def _renumbered(types: Types, op: Op) -> tuple[TensorType, Types]:
    (x,), axis = types, op[AXIS]
    axes = x.dims[axis].axes
    dim = replace(x.dims[axis], axes=tuple(axes) if isinstance(axes, Zigzag) else Zigzag(axes))
    return replace(x, dims=(*x.dims[:axis], dim, *x.dims[axis + 1 :])), types


def _whole_blocks(types: Types, op: Op) -> IndexMap:
    return replace(_blocks_permuted(types, op), blocks=())


def _reshard_step(types: Types, op: Op) -> TensorType:
    (x,) = types
    for dim in (DIM, TO):
        if dim in OPS[op.kind].attributes and not 0 <= op[dim] < len(x.dims):
            raise Mismatch(f"{dim.name}={op[dim]} is out of range; {x} has dims 0 to {len(x.dims) - 1}")
    return unsharded(x)


def _step(kind: str, makes: str, *attributes: Attribute[Any], **facts: Any) -> None:
    OPS[kind] = OpDef(1, _reshard_step, elementwise, lambda np, x, **_: x, attributes, is_reshard_step=True, makes=makes, **facts)


OPS["collective_permute"] = OpDef(
    *(1, _collective_permute, _blocks_permuted, _numpy_collective_permute, (AXIS, SOURCES)),
    whole="permuted",
    linear="first",
    makes="permuted",
)
# The op `renumber` changes the sharding of a dim from zigzag to rank order, or back. Each rank keeps its local tensor.
OPS["renumber"] = replace(OPS["collective_permute"], map=_whole_blocks, stated=_renumbered, is_view=True, makes="renumbered")

OPS["reshard"] = OpDef(1, lambda types, op: unsharded(types[0]), elementwise, lambda np, x: x, target="sharding", makes="resharded")

# Steps of reshards. The order of these steps breaks ties between sequences that move equal bytes in equally many steps.
_step("shard", "sliced", DIM, MESH_AXES, is_view=True, cuts=True)
_step("all_gather", "gathered", DIM, MESH_AXES)
_step("permute_shards", "permuted", MESH_AXES, SOURCES, target="sharding")
_step("all_to_all", "turned", DIM, TO, MESH_AXES)
_step("all_reduce", "reduced", MESH_AXES, REDUCTION)
_step("reduce_scatter", "scattered", DIM, MESH_AXES, REDUCTION)
_step("reduce", "reduced", MESH_AXES, REDUCTION, ROOT, target="sharding", to_other_mesh=True)
_step("transfer", "moved", BLOCKS, target="sharding", to_other_mesh=True)
