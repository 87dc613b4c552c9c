"""Pads the matrices of a matmul so that each row begins at a multiple of 16 bytes, if the cost model predicts a gain.

    %y = allocate bf16[M, 50257]              %y_padded = allocate bf16[M, 50264]
    matmul %x, %w -> %y                       %y = slice %y_padded[1: 50257 from 0]
    launch @softmax %y -> %z        becomes   matmul %x, %w -> %y
                                              launch @softmax %y -> %z

The padding is never read or written. Inputs and outputs of the program have no padding. A kernel therefore copies an unaligned input before
the matmul, and an unaligned output after the matmul. Temporaries that cannot be padded are also copied. `split_unaligned` later splits off
the 50257th column.
"""

from collections.abc import Iterator
from dataclasses import replace

from hostweave.analysis.alignment import ALIGNMENT_BYTES, Unaligned, rows_of, takes_padded_rows, unaligned
from hostweave.analysis.def_use import Place, def_use
from hostweave.base.names import claim_unique
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import names_in, registered
from hostweave.host_ir.expr import Const
from hostweave.options import Options
from hostweave.types.machine import Machine
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, strided, strides_of


def widen_rows(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    rows = _Rows(program)
    for place in rows.uses.places:
        if found := unaligned(place.instruction, rows.uses.types, options.figures):
            rows.align(place, found, options.figures)
    return replace(program, body=tree.edited(program.body, rows.edits), kernels=tuple(rows.kernels.values())) if rows.edits else program


class _Rows:
    def __init__(self, program: ir.HostProgram):
        self.uses, self.taken = def_use(program), names_in(program)
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.edits: dict[int, tree.Body] = {}

    def align(self, place: Place, found: Unaligned, machine: Machine) -> None:
        """Pads the rows of all unaligned matrices of a matmul, or of no matrix."""
        matmul, types = found.matmul, self.uses.types
        roots = dict.fromkeys(self.uses.root(getattr(matmul, field)) for field in found.pitched)
        widened = {root: new for root in roots if (new := self.widened(root))}
        for own in widened.values():
            types = {**types, **own}
        left = unaligned(matmul, types, machine)
        copied = left.pitched if left else ()
        moved = sum(2 * int(product(type.shape)) * type.dtype.itemsize for type in (types[getattr(matmul, field)] for field in copied))
        if found.gain < moved / machine.memory or (copied and (place.loop or place.block)):  # Concurrent iterations would share the copy.
            return
        for root in widened:
            allocate = self.uses.allocates[root]
            if allocate.number not in self.edits:
                self.edits[allocate.number] = tuple(self.wide(root, self.uses.types[root], allocate.instruction))
        before, after = list[tree.Instruction](), list[tree.Instruction]()
        for field in copied:
            matrix = self.copy(getattr(matmul, field), field == "dst", matmul, before, after)
            matmul = replace(matmul, **{field: matrix})  # type: ignore[arg-type]
        if copied:
            self.edits[place.number] = (*before, matmul, *after)

    def widened(self, root: str) -> dict[str, BufferType]:
        """Types of a buffer and of its views after the rows are padded. Empty if the buffer cannot be padded."""
        allocate, own = self.uses.allocates.get(root), self.uses.types[root]
        if not allocate or allocate.instruction.in_window or not own.shape[-1].is_int:
            return {}
        apart = strides_of(BufferType(own.dtype, (*own.shape[:-1], _aligned(own))))
        types = {**self.uses.types, root: strided(own, own.shape, apart)}
        new = {root: types[root]}
        try:
            for view in self.uses.viewed.get(root, ()):
                new.update(view.instruction.defined(types))
                types.update(new)
        except ValueError:  # The view merges the padded dim with another dim.
            return {}
        return new if all(self.accepts(touch.instruction, types) for touch in self.uses.touches[root]) else {}

    def accepts(self, i: tree.Instruction, types: dict[str, BufferType]) -> bool:
        launched = tree.names(i, "launch")
        is_accepted = bool(launched) and self.kernels.keys() >= {*launched} and not i.exchanges
        return is_accepted or i.copies or takes_padded_rows(i, types)

    def wide(self, name: str, type: BufferType, at: tree.Instruction) -> Iterator[tree.Instruction]:
        memory, last = claim_unique(f"{name}_padded", self.taken), len(type.shape) - 1
        shape = (*type.shape[:-1], _aligned(type))
        yield ir.Allocate(memory, BufferType(type.dtype, shape), location=at.location)
        yield ir.Slice(name, memory, last, type.shape[-1], Const(0), location=at.location)

    def copy(self, old: str, is_result: bool, at: ir.Matmul, before: list[tree.Instruction], after: list[tree.Instruction]) -> str:
        """Copies an operand to aligned rows before the matmul, or a result from aligned rows after the matmul. Returns the new matrix."""
        type, turned = self.uses.types[old], None
        if rows_of(type)[0] == -2:  # The rows in memory are the columns of the matrix.
            rank = len(type.shape)
            turned = (*range(rank - 2), rank - 1, rank - 2)
            flat = claim_unique(f"{old}_rows", self.taken)
            before.append(ir.Permute(flat, old, turned, location=at.location))
            (type,) = before[-1].defined(self.uses.types).values()
        else:
            flat = old
        new = claim_unique(f"{old}_apart", self.taken)
        before += self.wide(new, type, at)
        src, dst = (new, flat) if is_result else (flat, new)
        kernel = ir.Kernel("", (ir.Parameter(src, unsharded(type)),), (Op("copy", (src,), Value(dst, unsharded(type))),))
        name = registered(self.kernels, kernel, f"copy_{dst}")  # Unlike a copy, the kernel can be fused.
        (after if is_result else before).append(ir.Launch(name, (src,), (dst,), location=at.location))
        if not turned:
            return new
        back = claim_unique(f"{new}_columns", self.taken)
        before.append(ir.Permute(back, new, turned, location=at.location))
        return back


def _aligned(type: BufferType) -> Size:
    multiple = ALIGNMENT_BYTES // type.dtype.itemsize
    return Size(-(-int(type.shape[-1]) // multiple) * multiple)
