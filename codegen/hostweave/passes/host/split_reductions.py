"""Splits a large reduction of several dims to few results into two kernels. Many thread blocks then share the work.

    launch @sum_y %x -> %y

with `%y: f32[] = sum(%x, axis=(0, 1))` of f32[M, N] becomes

    %y_rows = allocate f32[M]
    launch @sum_y_rows %x -> %y_rows
    launch @sum_y %y_rows -> %y
"""

from dataclasses import replace

from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import Op, Value, attributes
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXES, COUNT, KEEPDIMS
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import launched, names_in
from hostweave.options import Options
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, Dim, TensorType, f32

MULTIPROCESSORS_PER_RESULT = 4  # minimum for a split, because the block of a result uses only one multiprocessor
MIN_ROW = 512  # minimum number of elements of a row
MIN_ELEMENTS = 1 << 16  # minimum number of elements that are reduced to one result


def split_reductions(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    split = _Split(program, options.figures.multiprocessors // MULTIPROCESSORS_PER_RESULT)
    body = split.body(program.body)
    return replaced(program, body=body, kernels=launched(split.kernels.values(), body))


class _Split:
    def __init__(self, program: ir.HostProgram, results: int):
        """`results` is the maximum number of results of a reduction that is split."""
        self.results = results
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.taken = names_in(program)

    def body(self, body: tree.Body) -> tree.Body:
        return tuple(new for i in body for new in self.instruction(i))

    def instruction(self, i: tree.Instruction) -> tree.Body:
        if i.ranks:
            return (tree.with_bodies(i, self.body),)
        if not isinstance(i, ir.Launch) or not (kernel := self.kernels.get(i.kernel)) or not (row := _row(kernel, self.results)):
            return (i,)
        first, last = _halves(kernel, row)
        self.kernels |= {first.name: first, last.name: last}
        rows = claim_unique(f"{i.dsts[0]}_rows", self.taken)
        type = first.results[0].type
        return (
            ir.Allocate(rows, BufferType(type.dtype, type.shape), location=i.location),
            replace(i, kernel=first.name, dsts=(rows,)),
            replace(i, kernel=last.name, srcs=(rows,)),
        )


def _row(kernel: ir.Kernel, results: int) -> tuple[int, ...]:
    """The fewest innermost reduced dims that together have enough elements for a thread block. Empty if the kernel is not split."""
    op = kernel.ops[-1]
    if len(kernel.ops) > 1 or not OPS[op.kind].combine or OPS[op.kind].locates:
        return ()
    axes, shape, left = op[AXES], kernel.inputs[0].type.shape, product(op.result.type.shape)

    def is_less(dims: tuple[int, ...], most: int) -> bool:
        count = product(tuple(shape[dim] for dim in dims))
        return count.is_int and int(count) < most

    if not left.is_int or int(left) > results or is_less(axes, MIN_ELEMENTS):
        return ()
    return next((axes[k:] for k in range(len(axes) - 1, 0, -1) if not is_less(axes[k:], MIN_ROW)), ())


def _halves(kernel: ir.Kernel, row: tuple[int, ...]) -> tuple[ir.Kernel, ir.Kernel]:
    """A kernel that reduces the dims of a row, and a kernel that reduces the remaining dims."""
    (op,), (source,) = kernel.ops, kernel.inputs
    first_op = op
    if COUNT.name in dict(op.attributes):  # Only the second kernel divides by the divisor of a mean.
        first_op = Op("sum", op.operands, op.result, attributes(axis=op[AXES], keepdims=op[KEEPDIMS]), op.location)
    combine, is_narrow = OPS[op.kind].combine, source.type.dtype.kind == "float" and source.type.dtype.itemsize < 4
    is_rounded = is_narrow and combine is not None and combine.identity  # True if partial results are widened to f32
    dtype = f32 if is_rounded else source.type.dtype
    keeps = op[KEEPDIMS]
    dims = [Dim(Size()) if axis in row else dim for axis, dim in enumerate(source.type.dims) if keeps or axis not in row]
    others = tuple(axis if keeps else axis - sum(inner < axis for inner in row) for axis in op[AXES] if axis not in row)
    rows = Value(f"{op.result.name}_rows", TensorType(dtype, tuple(dims)))
    wide = Value(f"{source.name}_{dtype}", replace(source.type, dtype=dtype))
    total = replace(op.result, name=f"{op.result.name}_{dtype}", type=replace(op.result.type, dtype=dtype))
    if is_rounded:
        first = [Op("astype", (source.name,), wide, location=op.location), _with(first_op, wide.name, row, rows)]
        last = [_with(op, rows.name, others, total), Op("astype", (total.name,), op.result, location=op.location)]
    else:
        first = [_with(first_op, source.name, row, rows)]
        last = [_with(op, rows.name, others, op.result)]
    return (
        ir.Kernel(f"{op.kind}_{rows.name} of {kernel.name}", kernel.inputs, tuple(first)),
        ir.Kernel(f"{kernel.name} of rows", (ir.Parameter(rows.name, rows.type),), tuple(last)),
    )


def _with(op: Op, operand: str, axes: tuple[int, ...], result: Value) -> Op:
    return replace(op.with_attribute(AXES, axes), operands=(operand,), result=result)
