"""Lowers scaled matmuls: copies operands and scales to layouts of cuBLASLt, or composes the matmul of other ops.

    %y: bf16[M, N] = scaled_matmul(%a, %w, %s, %t)      # a: f8e4m3[M, K], w: f8e4m3[K, N], s: f32[M, 1], t: f32[1, N]

becomes

    %w_transposed = permute %w to [1, 0]
    %w_by_columns = allocate f8e4m3[N, K]
    copy %w_transposed -> %w_by_columns
    %w_columns = permute %w_by_columns to [1, 0]
    matmul %a, %w_columns scales %s, %t -> %y
"""

from collections.abc import Sequence

from hostweave.communication.packing import packed_destination
from hostweave.communication.schedule import Lowering
from hostweave.communication.steps import Steps
from hostweave.fusion_ir.index_map import ONE
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops.scaled import BLOCK, BLOCKS, is_composed, scaling
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Var
from hostweave.host_ir.rules.computing import PADDED, lies_along
from hostweave.passes.lower.kernels import Kernels
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, Dim, DType, TensorType, f16, f32

Operands = tuple[str, str, str, str]  # a, b, and the scales of each


class ScaledMatmuls:
    def __init__(self, kernels: Kernels, b: Builder):
        self.kernels, self.b = kernels, b

    def multiply(self, op: Op, sources: Sequence[str], target: str, steps: Steps | None, lowering: Lowering | None) -> None:
        """Emits the matmul of the operands, or of a chunk. A chunk with slices of several shards needs one matmul per shard."""
        buffers, stream = [*sources, target], op.result.stream
        if len(self.b.types[target].shape) == 2:
            self.multiply_matrices(op, buffers, steps, lowering)
            return
        assert steps is not None
        assert stream is not None
        index = Var(self.b.loop_index())
        with self.b.looped() as body:
            shards = [
                self.b.select(buffer, stream.dim, index, f"{buffer}_shard") if len(self.b.types[buffer].shape) == 3 else buffer
                for buffer in buffers
            ]
            self.multiply_matrices(op, shards, None, None)
        self.b.emit(ir.For(index.name, self.b.types[target].shape[stream.dim], tuple(body)))

    def multiply_matrices(self, op: Op, buffers: Sequence[str], steps: Steps | None, lowering: Lowering | None) -> None:
        a, b, scale_a, scale_b, target = buffers
        if is_composed(op):
            self.compose(op, (a, b, scale_a, scale_b), target, steps)
            return
        has_blocks = scaling(*(self.b.types[name].shape for name in buffers[:4])) == BLOCKS
        scales = (
            self.scale(scale_a, a, has_blocks, steps),
            self.turned(self.scale(self.turned(scale_b), self.turned(b), has_blocks, steps)),
        )
        a, b = self.by_rows(a, steps), self.turned(self.by_rows(self.turned(b), steps))
        if lowering and op.result.name == lowering.adds:
            lowering.matmul = ir.Matmul(a, b, target, scales=scales)
            return
        if lies_along(self.b.types[target], 1):
            self.b.emit(ir.Matmul(a, b, target, scales=scales))
            return
        with packed_destination(self.b, target, steps) as packed:
            self.b.emit(ir.Matmul(a, b, packed, scales=scales))

    # --- layouts of cuBLASLt ---

    def turned(self, name: str) -> str:
        return self.b.permute(name, (1, 0), f"{name}_transposed")

    def by_rows(self, name: str, steps: Steps | None) -> str:
        """A matrix with contiguous rows: its own memory, or a copy."""
        return name if lies_along(self.b.types[name], 1) else self.copied(name, self.memory(f"{name}_by_rows", self.b.types[name], steps))

    def scale(self, name: str, scaled: str, has_blocks: bool, steps: Steps | None) -> str:
        """Scales [R, C] of a matrix [M, K] in the layout of cuBLASLt.

        A vector is contiguous. Scales of blocks are stored by columns if R is M, else by rows that start at multiples of PADDED.
        """
        type, rows = self.b.types[name], self.b.types[scaled].shape[0]
        r, c = type.shape
        if not has_blocks:
            return name if lies_along(type, 0) else self.copied(name, self.memory(f"{name}_packed", type, steps))
        if r == rows:
            columns = self.turned(name)
            if self.b.is_contiguous(columns):
                return name
            return self.turned(self.copied(columns, self.memory(f"{name}_by_columns", BufferType(f32, (c, r)), steps)))
        padded = Size(-(-int(c) // PADDED) * PADDED) if c.is_int else c
        if padded == c and self.b.is_contiguous(name):
            return name
        memory = self.memory(f"{name}_padded", BufferType(f32, (r, padded)), steps)
        return self.copied(name, self.b.slice(memory, 1, c, Const(0), f"{name}_in_rows"))

    def copied(self, src: str, dst: str) -> str:
        self.b.emit(ir.Copy(src, dst))
        return dst

    def memory(self, wanted: str, type: BufferType, steps: Steps | None) -> str:
        """Allocates contiguous memory. In a loop each iteration has its own."""
        if steps is None:
            return self.b.allocate_here(wanted, BufferType(type.dtype, type.shape))
        ring = self.b.allocate(wanted, BufferType(type.dtype, (steps.count, *type.shape)))
        return self.b.select(ring, 0, steps.block, f"{wanted}_{steps.index.name}")

    # --- composed of other ops ---

    def compose(self, op: Op, operands: Operands, target: str, steps: Steps | None) -> None:
        """Emits casts, a matmul and multiplications with the scales.

        Operands are cast to f16, which represents all 8-bit floats. With scales of blocks, they are cast to f32 and scaled before the
        matmul.
        """
        a, b, scale_a, scale_b = operands
        shape = self.b.types[target].shape
        has_blocks = scaling(*(self.b.types[name].shape for name in operands)) == BLOCKS
        if has_blocks:
            wide = self.unscaled(op, a, scale_a, steps), self.turned(self.unscaled(op, self.turned(b), self.turned(scale_b), steps))
        else:
            wide = self.widened(op, a, f16, steps), self.turned(self.widened(op, self.turned(b), f16, steps))
        product = self.memory(f"{op.result.name}_product", BufferType(f32, shape), steps)
        self.b.emit(ir.Matmul(*wide, product))
        factors = () if has_blocks else (scale_a, scale_b)
        self.launch(op, product, factors, f32, target)

    def widened(self, op: Op, name: str, dtype: DType, steps: Steps | None) -> str:
        type = self.b.types[name]
        if not lies_along(type, 1):
            return self.turned(self.widened(op, self.turned(name), dtype, steps))
        memory = self.memory(f"{name}_{dtype}", BufferType(dtype, type.shape), steps)
        self.launch(op, name, (), dtype, memory)
        return memory

    def unscaled(self, op: Op, name: str, scale: str, steps: Steps | None) -> str:
        """A matrix times its scales of blocks, in f32."""
        type, blocks = self.b.types[name], self.b.types[scale].shape
        if not lies_along(type, 1):
            return self.turned(self.unscaled(op, self.turned(name), self.turned(scale), steps))
        memory = self.memory(f"{name}_{f32}", BufferType(f32, type.shape), steps)
        split = tuple(
            part for size, count in zip(type.shape, blocks, strict=True) for part in (count, ONE if size == count else Size(BLOCK))
        )
        factor = self.b.reshape(self.by_rows_of(scale, steps), (blocks[0], ONE, blocks[1], ONE), f"{scale}_of_blocks")
        source, result = (self.b.reshape(each, split, f"{each}_blocks") for each in (name, memory))
        self.launch(op, source, (factor,), f32, result)
        return memory

    def by_rows_of(self, scale: str, steps: Steps | None) -> str:
        return scale if self.b.is_contiguous(scale) else self.copied(scale, self.memory(f"{scale}_packed", self.b.types[scale], steps))

    def launch(self, op: Op, source: str, factors: Sequence[str], dtype: DType, target: str) -> None:
        """Launches a kernel that multiplies a buffer by factors in `dtype` and rounds once."""
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
