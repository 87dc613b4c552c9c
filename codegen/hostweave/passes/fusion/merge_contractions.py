"""Makes a matmul contract several dims if reshapes merge them into the inner dim of both operands. A sharded dim then needs no gather.

    %x_2d: f32[S*B, E] = reshape(%x)                    # x: [S, B@dp, E], dy: [S, B@dp, F]
    %x_t: f32[E, S*B] = permute_dims(%x_2d, axes=(1, 0))
    %dy_2d: f32[S*B, F] = reshape(%dy)
    %dw: f32[E, F] = matmul(%x_t, %dy_2d)

becomes

    %x_permuted: f32[E, S, B@dp] = permute_dims(%x, axes=(2, 0, 1))
    %dw: f32[E, F] = matmul(%x_permuted, %dy, contracted=2)
"""

from dataclasses import dataclass, replace

from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.emitter import OpRewriter
from hostweave.fusion_ir.index_map import ONE, groups
from hostweave.fusion_ir.ir import Fusion, Op, attributes
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import CONTRACTED, ORDER
from hostweave.fusion_ir.rewriting import eliminate_dead_code
from hostweave.options import Options
from hostweave.types.size import product


def merge_contractions(fusion: Fusion, options: Options) -> Fusion:
    merged = _Merging(fusion).rewritten()
    return replaced(merged, body=eliminate_dead_code(merged.ops, fusion.outputs))


@dataclass(frozen=True)
class _Merged:
    """A value that permutes and merges dims of `source`. For each dim of the value, `dims` lists the merged dims of `source`, outermost
    first."""

    source: str
    dims: tuple[tuple[int, ...], ...]


class _Merging(OpRewriter):
    def add(self, op: Op) -> None:
        if CONTRACTED in OPS[op.kind].attributes and op[CONTRACTED] == 1 and len(op.tensors) == 2:
            a, b = map(self.merged, op.tensors)
            k, k_of_b = ([self.types[of.source].shape[dim] for dim in dims] for of, dims in ((a, a.dims[-1]), (b, b.dims[-2])))
            if len(k) > 1 and k == k_of_b:
                operands = self.split(a, len(a.dims) - 1), self.split(b, len(b.dims) - 2)
                op = replace(op, operands=operands, attributes=attributes(contracted=len(k)))
        self.emit(op)

    def merged(self, name: str) -> _Merged:
        """Follows permutations and merges of dims to their source, but not through chunk loops and stated shardings."""
        op = self.fusion.made.get(name)
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

    def split(self, merged: _Merged, inner: int) -> str:
        """Reshapes an operand so that its inner dim is not merged. Other merged dims stay merged."""
        name, shape = merged.source, self.types[merged.source].shape
        order = tuple(dim for dims in merged.dims for dim in dims)
        runs = [run for i, dims in enumerate(merged.dims) for run in ([(dim,) for dim in dims] if i == inner else [dims])]
        wanted = tuple(product(tuple(shape[dim] for dim in run)) for run in runs)
        if order != tuple(range(len(order))):
            name = self.make("permute_dims", name, how=attributes(axes=order), word="permuted", of=name)
        if wanted == self.types[name].shape:
            return name
        return self.reshaped(name, 0, len(shape), wanted, of=merged.source)
