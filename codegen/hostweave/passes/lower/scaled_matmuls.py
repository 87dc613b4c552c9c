"""Lowers scaled matmuls. Copies operands and scales to layouts that cuBLASLt supports, or emits simpler ops instead.

    %y: bf16[M, N] = scaled_matmul(%a, %w, %s, %t)      # a: f8e4m3[M, K], w: f8e4m3[K, N], s: f32[M, 1], t: f32[1, N]

becomes

    %w_transposed = permute %w by [1, 0]
    %w_transposed_by_rows = allocate f8e4m3[N, K]
    copy %w_transposed -> %w_transposed_by_rows
    %w_transposed_by_rows_transposed = permute %w_transposed_by_rows by [1, 0]
    matmul %a, %w_transposed_by_rows_transposed scales %s, %t -> %y
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from hostweave.analysis.alignment import ALIGNMENT_BYTES
from hostweave.communication.algorithm import Lowering
from hostweave.communication.dataflow import LoopIteration, expr_of
from hostweave.communication.packing import branch, contiguous_source, packed_destination, per_iteration
from hostweave.fusion_ir.index_map import ONE
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops.scaled import BLOCK, BLOCKS, is_composed, scaling
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Binary, Const
from hostweave.host_ir.rules.computing import PADDED, lies_along
from hostweave.passes.lower.kernels import Kernels
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, Dim, DType, TensorType, f8e4m3, f16, f32, strides_of

Operands = tuple[str, str, str, str]  # a, b, scales of a, scales of b
ScaledMatrix = tuple[str, str]  # a matrix and its scales


class ScaledMatmuls:
    def __init__(self, kernels: Kernels, b: Builder):
        self.kernels, self.b = kernels, b

    def multiply(self, op: Op, sources: Sequence[str], target: str, iteration: LoopIteration | None, lowering: Lowering | None) -> None:
        """Emits a scaled matmul. A chunk with slices of several shards needs one matmul per shard."""
        buffers = [*sources, target]
        if len(self.b.types[target].shape) == 2:
            self.multiply_matrices(op, buffers, iteration, lowering)
            return
        dim = op.result.walked.dim
        with self.b.loop(self.b.types[target].shape[dim]) as index:
            shards = [self.b.select(one, dim, index, f"{one}_shard") if len(self.b.types[one].shape) == 3 else one for one in buffers]
            self.multiply_matrices(op, shards, None, None)

    def multiply_matrices(self, op: Op, buffers: Sequence[str], iteration: LoopIteration | None, lowering: Lowering | None) -> None:
        a, b, scale_a, scale_b, target = buffers
        if is_composed(op):
            self.compose(op, (a, b, scale_a, scale_b), target, iteration)
            return
        has_blocks = scaling(*(self.b.types[name].shape for name in buffers[:4])) == BLOCKS
        columns = self.turned(b)
        of_b = self.turned(self.by_rows(columns, iteration)), self.turned(self.scale(self.turned(scale_b), columns, has_blocks, iteration))
        rows = self.b.types[a].shape[0]

        def direct(accumulates: bool, into: str | None = None) -> None:
            of_a = self.by_rows(a, iteration), self.scale(scale_a, a, has_blocks, iteration)
            if accumulates or self.is_aligned(target):  # The verifier rejects accumulation onto rows that are not contiguous.
                self.matmul(of_a, of_b, target, accumulates, into)
                return
            with packed_destination(self.b, target, iteration, self.multiple(target)) as packed:
                self.matmul(of_a, of_b, packed, False)

        multiply: Callable[[bool, str | None], None] = direct
        takes_few = {self.b.types[name].dtype for name in (a, b)} == {f8e4m3}  # A runtime kernel multiplies few rows.
        is_few = takes_few and rows.is_int and int(rows) <= ir.FEW_SCALED_ROWS
        if has_blocks and self.b.types[scale_a].shape[0] == rows and not _is_padded(rows) and not is_few:
            padded = multiply = self.padded(a, scale_a, of_b, target, iteration)
            if not rows.is_int:
                count = expr_of(rows)
                over = count % PADDED * Binary(">", count, Const(ir.FEW_SCALED_ROWS)) if takes_few else count % PADDED
                multiply = lambda *how: branch(self.b, over.equals(0), partial(direct, *how), partial(padded, *how))  # noqa: E731
        if lowering and op.result.name == lowering.adds:
            lowering.multiply = multiply
        else:
            multiply(False, None)

    def matmul(self, of_a: ScaledMatrix, of_b: ScaledMatrix, target: str, accumulates: bool, into: str | None = None) -> None:
        """Emits a matmul that writes `into`, by default `target`. If `accumulates`, the matmul adds the contents of `target`."""
        (a, scale_a), (b, scale_b) = of_a, of_b
        result = self.b.reshape(into or target, self.b.types[target].shape, f"{into}_matrix")
        self.b.emit(ir.Matmul(a, b, result, accumulate=(target,) * accumulates, scales=(scale_a, scale_b)))

    def padded(
        self, a: str, scale_a: str, of_b: ScaledMatrix, target: str, iteration: LoopIteration | None
    ) -> Callable[[bool, str | None], None]:
        """Function that emits the matmul of padded operands. Appends rows of zeros up to a multiple of PADDED rows. With one scale per part
        of a row, cuBLASLt 13.0 has no algorithm for other numbers of rows on an H100."""
        b, rows, blocks = self.b, self.b.types[a].shape[0], self.b.types[scale_a].shape[1]
        count = PADDED * rows.ceil_div(PADDED)
        wide = per_iteration(self.b, f"{a}_padded", replace(b.types[a], shape=(count, b.types[a].shape[1])), iteration)
        scales = per_iteration(self.b, f"{scale_a}_padded", BufferType(f32, (blocks, count)), iteration)
        product = per_iteration(self.b, f"{target}_padded", replace(b.types[target], shape=(count, b.types[target].shape[1])), iteration)

        def multiply(accumulates: bool, into: str | None) -> None:
            for memory in (wide, scales, *[product] * accumulates):
                b.emit(ir.Fill(memory, 0.0))
            head = b.slice(product, 0, rows, Const(0), f"{target}_rows")
            b.emit(ir.Copy(a, b.slice(wide, 0, rows, Const(0), f"{a}_rows")))
            b.emit(ir.Copy(self.turned(scale_a), b.slice(scales, 1, rows, Const(0), f"{scale_a}_rows")))
            if accumulates:
                b.emit(ir.Copy(target, head))
            self.matmul((wide, self.turned(scales)), of_b, product, accumulates)
            b.emit(ir.Copy(head, b.reshape(into or target, b.types[target].shape, f"{into}_matrix")))

        return multiply

    def turned(self, name: str) -> str:
        return self.b.permute(name, (1, 0), f"{name}_transposed")

    def by_rows(self, name: str, iteration: LoopIteration | None) -> str:
        """The matrix, or an aligned copy."""
        if self.is_aligned(name):
            return name
        return self.copied(name, per_iteration(self.b, f"{name}_by_rows", self.b.types[name], iteration))

    def is_aligned(self, name: str) -> bool:
        """False if rows of a matrix are not contiguous, or may begin at an address that is not a multiple of 16 bytes. Symbolic sizes count
        as multiples."""
        type, multiple = self.b.types[name], self.multiple(name)
        pitch = strides_of(type)[0]
        is_pitched = type.shape[0] != ONE and pitch.is_int and int(pitch) % multiple > 0
        return lies_along(type, 1) and not is_pitched and self.b.begins_at(name, multiple)

    def multiple(self, name: str) -> int:
        """Number of elements in the bytes to which cuBLASLt needs rows to be aligned."""
        return ALIGNMENT_BYTES // self.b.types[name].dtype.itemsize

    def scale(self, name: str, scaled: str, has_blocks: bool, iteration: LoopIteration | None) -> str:
        """Scales [R, C] of a matrix [M, K] in the layout of cuBLASLt: the scales themselves, or a copy. A vector of scales is contiguous.
        Scales of blocks are column-major if R is M. Otherwise each row begins at a multiple of PADDED elements."""
        type, rows = self.b.types[name], self.b.types[scaled].shape[0]
        r, c = type.shape
        if not has_blocks:
            return name if lies_along(type, 0) else self.copied(name, per_iteration(self.b, f"{name}_packed", type, iteration))
        if r == rows:
            columns = self.turned(name)
            if self.b.is_contiguous(columns):
                return name
            return self.turned(self.copied(columns, per_iteration(self.b, f"{name}_by_columns", BufferType(f32, (c, r)), iteration)))
        padded = c if _is_padded(c) else PADDED * c.ceil_div(PADDED)
        if padded == c and self.b.is_contiguous(name):
            return name
        memory = per_iteration(self.b, f"{name}_padded", BufferType(f32, (r, padded)), iteration)
        return self.copied(name, self.b.slice(memory, 1, c, Const(0), f"{name}_in_rows"))

    def copied(self, src: str, dst: str) -> str:
        self.b.emit(ir.Copy(src, dst))
        return dst

    def compose(self, op: Op, operands: Operands, target: str, iteration: LoopIteration | None) -> None:
        """Emits casts, a matmul, and multiplications by the scales. Operands with scales of blocks are scaled before the matmul."""
        a, b, scale_a, scale_b = operands
        shape = self.b.types[target].shape
        has_blocks = scaling(*(self.b.types[name].shape for name in operands)) == BLOCKS
        rows = self.widened(op, a, scale_a if has_blocks else "", iteration)
        columns = self.turned(self.widened(op, self.turned(b), self.turned(scale_b) if has_blocks else "", iteration))
        product = per_iteration(self.b, f"{op.result.name}_product", BufferType(f32, shape), iteration)
        self.b.emit(ir.Matmul(rows, columns, product))
        factors = () if has_blocks else (scale_a, scale_b)
        self.launch(op, product, factors, f32, target)

    def widened(self, op: Op, name: str, scale: str, iteration: LoopIteration | None) -> str:
        """Emits a cast to f16, which represents all 8-bit floats exactly. With scales of blocks, emits the product of the matrix and the
        scales, in f32. Returns the new buffer."""
        type, dtype = self.b.types[name], f32 if scale else f16
        if not lies_along(type, 1):
            return self.turned(self.widened(op, self.turned(name), scale and self.turned(scale), iteration))
        memory = per_iteration(self.b, f"{name}_{dtype}", BufferType(dtype, type.shape), iteration)
        if not scale:
            self.launch(op, name, (), dtype, memory)
            return memory
        blocks = self.b.types[scale].shape
        pairs = zip(type.shape, blocks, strict=True)
        split = tuple(each for size, count in pairs for each in (count, ONE if size == count else Size(BLOCK)))
        factor = self.b.reshape(contiguous_source(self.b, scale, iteration), (blocks[0], ONE, blocks[1], ONE), f"{scale}_of_blocks")
        source, result = (self.b.reshape(each, split, f"{each}_blocks") for each in (name, memory))
        self.launch(op, source, (factor,), f32, result)
        return memory

    def launch(self, op: Op, source: str, factors: Sequence[str], dtype: DType, target: str) -> None:
        """Emits the launch of a kernel that multiplies a buffer by factors. The kernel computes in `dtype`, and rounds the result once."""
        result = Value(op.result.name, self.kernels.tensor(target))
        names = {buffer: f"operand_{number}" for number, buffer in enumerate(dict.fromkeys((source, *factors)))}
        ops, last, have = list[Op](), names[source], self.b.types[source].dtype

        def add(kind: str, operands: tuple[str, ...], to: DType) -> str:
            type = TensorType(to, tuple(map(Dim, self.b.types[target].shape)))
            ops.append(Op(kind, operands, Value(f"term_{len(ops)}", type), location=op.location))
            return ops[-1].result.name

        if have != dtype:
            last = add("astype", (last,), dtype)
        for factor in factors:
            last = add("multiply", (last, names[factor]), dtype)
        if result.type.dtype != dtype or not ops:
            last = add("astype", (last,), result.type.dtype)
        ops[-1] = Op(ops[-1].kind, ops[-1].operands, result, location=op.location)
        inputs = tuple(ir.Parameter(name, self.kernels.tensor(buffer)) for buffer, name in names.items())
        kernel = self.kernels.keep(ir.Kernel("", inputs, tuple(ops)))
        self.b.emit(ir.Launch(kernel, tuple(names), (target,)))


def _is_padded(count: Size) -> bool:
    return count.divisor == 1 and count.coefficient % PADDED == 0
