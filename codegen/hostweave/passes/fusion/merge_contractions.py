"""Makes a matmul whose inner dim is merged of the same dims in both operands a contraction over these, each with its own sharding.

    %x_2d: f32[S*B, E] = reshape(%x)                    # x: [S, B@dp, E], dy: [S, B@dp, F]
    %x_t: f32[E, S*B] = permute_dims(%x_2d, axes=(1, 0))
    %dy_2d: f32[S*B, F] = reshape(%dy)
    %dw: f32[E, F] = matmul(%x_t, %dy_2d)

becomes

    %x_permuted: f32[E, S, B] = permute_dims(%x, axes=(2, 0, 1))
    %dw: f32[E, F] = matmul(%x_permuted, %dy, contracted=2)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hostweave.fusion_ir.index_map import ONE, groups
from hostweave.fusion_ir.ir import Fusion, Op, Value, attributes
from hostweave.fusion_ir.ops.attributes import CONTRACTED, ORDER
from hostweave.fusion_ir.rewriting import Names, eliminate_dead_code
from hostweave.options import Options
from hostweave.types.size import product
from hostweave.types.tensor import Dim, TensorType


def merge_contractions(fusion: Fusion, options: Options) -> Fusion:
    """After it a dim that is merged for a product alone need not be gathered where one of its inner dims is sharded."""
    merging = _Merging(fusion)
    ops = [new for op in fusion.ops for new in merging.replaced(op)]
    return replace(fusion, ops=eliminate_dead_code(ops, fusion.outputs))


@dataclass(frozen=True)
class _Merged:
    """A value as a reshape of another one whose dims are permuted: each of its dims is some of those, the outermost first."""

    source: str
    dims: tuple[tuple[int, ...], ...]


class _Merging:
    def __init__(self, fusion: Fusion):
        self.types = {name: value.type for name, value in fusion.values().items()}
        self.made = {op.result.name: op for op in fusion.ops}
        self.names = Names(fusion)

    def replaced(self, op: Op) -> list[Op]:
        if op.kind != "matmul" or op[CONTRACTED] != 1 or len(op.tensors) != 2:
            return [op]
        a, b = map(self.merged, op.tensors)
        k, k_of_b = self.sizes(a, a.dims[-1]), self.sizes(b, b.dims[-2])
        if len(k) < 2 or k != k_of_b:
            return [op]
        first, second = self.split(op, a, len(a.dims) - 1), self.split(op, b, len(b.dims) - 2)
        operands = tuple(ops[-1].result.name if ops else merged.source for ops, merged in ((first, a), (second, b)))
        return [*first, *second, replace(op, operands=operands, attributes=attributes(contracted=len(k)))]

    def sizes(self, merged: _Merged, dims: Sequence[int]) -> tuple[object, ...]:
        return tuple(self.types[merged.source].shape[dim] for dim in dims)

    def merged(self, name: str) -> _Merged:
        """What a value is a reshape or a permutation of, as far back as dims are merged and none is split."""
        op = self.made.get(name)
        unmerged = _Merged(name, tuple((dim,) for dim in range(len(self.types[name].dims))))
        if op is None or op.kind not in ("reshape", "permute_dims") or op.result.stream or op.result.pinned:
            return unmerged
        before = self.merged(op.tensors[0])
        if op.kind == "permute_dims":
            return _Merged(before.source, tuple(before.dims[dim] for dim in op[ORDER]))
        runs = groups(self.types[op.tensors[0]].shape, op.result.type.shape)
        is_merge = len(runs) == len(op.result.type.dims) and all(len(right) == 1 for _, right in runs)
        if not is_merge or ONE in self.types[op.tensors[0]].shape:
            return unmerged
        return _Merged(before.source, tuple(tuple(dim for old in left for dim in before.dims[old]) for left, _ in runs))

    def split(self, op: Op, merged: _Merged, inner: int) -> list[Op]:
        """The ops that make an operand of which the inner dim is not merged, the others as before."""
        ops: list[Op] = []
        source = self.types[merged.source]
        order = tuple(dim for dims in merged.dims for dim in dims)
        runs = [run for i, dims in enumerate(merged.dims) for run in ([(dim,) for dim in dims] if i == inner else [dims])]
        shape = tuple(product(tuple(source.shape[dim] for dim in run)) for run in runs)
        name, type = merged.source, source
        if order != tuple(range(len(order))):
            type = replace(source, dims=tuple(Dim(source.shape[dim]) for dim in order))
            ops.append(Op("permute_dims", (name,), self.value(f"{name}_permuted", type), attributes(axes=order), op.location))
        if shape != type.shape:
            merged_type = replace(source, dims=tuple(map(Dim, shape)))
            before = ops[-1].result.name if ops else name
            ops.append(Op("reshape", (before,), self.value(f"{name}_reshaped", merged_type), location=op.location))
        return ops

    def value(self, wanted: str, type: TensorType) -> Value:
        value = Value(self.names.new(wanted), type)
        self.types[value.name] = type
        return value
