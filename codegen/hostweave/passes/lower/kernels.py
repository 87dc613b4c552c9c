"""Kernels that lowering launches: kernels of one op, and kernels that reduce terms, multiply ints or scale matrices. Kernels of one op
are shared by ops that differ only in names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from hostweave.base.names import unique_name
from hostweave.fusion_ir.ir import Op, Value, attributes
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import OFFSET
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir
from hostweave.types.size import FirstIndex, Size
from hostweave.types.tensor import BufferType, Dim, TensorType, f32

# Reduction -> the op that reduces along a dim, and the op that combines two terms.
PAIRWISE = {
    **{"sum": ("sum", "add"), "prod": ("prod", "multiply"), "max": ("max", "maximum"), "min": ("min", "minimum")},
    **{word: (f"reduce_{word}", f"bitwise_{word}") for word in ("and", "or", "xor")},
}


class Kernels:
    def __init__(self, types: dict[str, BufferType]):
        self.types = types
        self.made: dict[object, ir.Kernel] = {}

    def computing(self, op: Op, sources: Sequence[str], target: str) -> str:
        """Kernel that computes `op` on these buffers."""
        names: dict[str, str] = {}  # buffer -> operand; two operands share a buffer if one operand is a view of the other operand
        for operand, buffer in zip(op.tensors, sources, strict=True):
            names.setdefault(buffer, operand)
        called = {operand: names[buffer] for operand, buffer in zip(op.tensors, sources, strict=True)}
        inputs = tuple(ir.Parameter(name, self.tensor(buffer)) for buffer, name in names.items())
        body = replace(_of_shard(op).renamed(called), result=Value(op.result.name, self.tensor(target)))
        positions = {name: str(i) for i, name in enumerate(names.values())}
        same = replace(body.renamed(positions), result=replace(body.result, name="")), tuple(p.type for p in inputs)
        return self.keep(ir.Kernel("", inputs, (body,)), same)

    def keep(self, kernel: ir.Kernel, same: object = None) -> str:
        """Registers a kernel, unless an equal kernel exists. Returns the name of the registered kernel."""
        same = same or kernel
        if same not in self.made:
            self.made[same] = replace(kernel, name=self.free(kernel.descriptive_name))
        return self.made[same].name

    def multiplying(self, a: str, b: str, target: str, op: Op) -> str:
        """Kernel for a matmul of ints. Overflow wraps around."""
        result = Value(op.result.name, self.tensor(target))
        sizes = {buffer: self.tensor(buffer).shape for buffer in (a, b)}
        rank = len(result.type.dims) + 1  # batch, m, k, n
        taken = {result.name}
        names = {name: unique_name(f"operand_{number}", taken) for number, name in enumerate(sizes)}
        rows, columns, terms = (unique_name(word, taken) for word in ("rows", "columns", "product"))
        *batch, m, n = result.type.shape
        k = sizes[a][-1]

        def seen(name: str, buffer: str, at: int) -> Op:
            shape = (*sizes[buffer][:at], Size(), *sizes[buffer][at:])
            dims = tuple(map(Dim, (*(Size() for _ in range(rank - len(shape))), *shape)))
            return Op("reshape", (names[buffer],), Value(name, replace(result.type, dims=dims)), location=op.location)

        product = Value(terms, replace(result.type, dims=tuple(map(Dim, (*batch, m, k, n)))))
        ops = (
            *(seen(rows, a, len(sizes[a])), seen(columns, b, len(sizes[b]) - 2)),
            Op("multiply", (rows, columns), product, location=op.location),
            Op("sum", (terms,), result, attributes(axis=(rank - 2,)), op.location),
        )
        return self.named(f"matmul_{result.name}", names, ops)

    def summing(self, reduction: str, terms: str, target: str, op: Op) -> str:
        """Kernel that reduces a buffer to the result of `op`. The outermost dim of the buffer has one term per rank."""
        (kind, _), result = PAIRWISE[reduction], Value(op.result.name, self.tensor(target))
        body = Op(kind, (terms,), result, (("axis", (0,)),), op.location)
        return self.named(f"{kind}_{result.name}", {terms: terms}, (body,))

    def adding(self, terms: Sequence[str], target: str, op: Op, reduction: str) -> str:
        """Kernel that reduces terms. Floats of fewer than 32 bits are reduced in f32, and rounded once. A buffer with an additional first
        dim has one term per index of this dim."""
        along, one_more = PAIRWISE[reduction]
        result = Value(op.result.name, self.tensor(target))
        wide = f32 if result.type.dtype.kind == "float" and result.type.dtype.itemsize < 4 else result.type.dtype
        type = replace(result.type, dtype=wide)
        ops: list[Op] = []

        def add(kind: str, operands: tuple[str, ...], type: TensorType, *axis: int) -> str:
            name = unique_name(f"term_{len(ops)}", {*terms, result.name})
            ops.append(Op(kind, operands, Value(name, type), (("axis", axis),) if axis else (), op.location))
            return name

        def term(name: str) -> str:
            here = self.tensor(name)
            widened = name if here.dtype == wide else add("astype", (name,), replace(here, dtype=wide))
            return widened if len(here.dims) == len(type.dims) else add(along, (widened,), type, 0)

        total = reduce(lambda total, name: add(one_more, (total, term(name)), type), terms[1:], term(terms[0]))
        if wide == result.type.dtype:
            ops[-1] = replace(ops[-1], result=result)
        else:
            ops.append(Op("astype", (total,), result, (), op.location))
        return self.named(f"{one_more}_landed_{result.name}", {name: name for name in terms}, ops)

    def named(self, name: str, operands: Mapping[str, str], ops: Iterable[Op]) -> str:
        """Registers a kernel of `ops`. Returns its name. `operands` maps each buffer to the name of an operand."""
        inputs = tuple(ir.Parameter(operand, self.tensor(buffer)) for buffer, operand in operands.items())
        kernel = ir.Kernel(self.free(name), inputs, tuple(ops))
        self.made[kernel] = kernel
        return kernel.name

    def free(self, wanted: str) -> str:
        return unique_name(wanted, {kernel.name for kernel in self.made.values()})

    def tensor(self, buffer: str) -> TensorType:
        return unsharded(self.types[buffer])


def _of_shard(op: Op) -> Op:
    """Makes an iota over a sharded dim begin at the first global index of the rank's shard. Other ops do not change."""
    if not OPS[op.kind].is_range or not (dim := op.result.type.dims[0]).axes:
        return op
    first = Size(1, (FirstIndex(dim.size, dim.axes, op.result.type.mesh),))
    return replace(op, attributes=attributes(offset=op[OFFSET] + first))
