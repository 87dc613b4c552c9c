"""Lowers attention. One instruction computes the result, and the log-sum-exps of the scores if the program uses log-sum-exps. Another
instruction computes the gradients.

    %y: bf16[B, H@tp, S, 128] = attention(%q, %k, %v, scale=0.125, causal=top_left)
    %l: f32[B, H@tp, S] = attention_lse(%q, %k, scale=0.125, causal=top_left)

becomes `attention %q, %k, %v scaled 0.125 diagonal 0 -> %y lse %l`. If keys are sharded in blocks, each rank attends to its local block. In
a chunk loop, each rank attends to the block of the iteration.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from hostweave.base.errors import ProgramError
from hostweave.communication.dataflow import Dataflow, LoopIteration, expr_of, rank_in_group
from hostweave.communication.packing import branch, contiguous_source, packed_destination
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attention import BIAS_GRADIENT, BOTTOM_RIGHT, COUNTS, GRADIENTS, is_by_kernels, kernels_for, masks_of
from hostweave.fusion_ir.ops.attributes import CAUSAL, KEY_BLOCKS, PIECES, REVERSED, SCALE, WINDOW
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Expr
from hostweave.passes.lower.buffers import Buffers
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType, Dim, strides_of

RESULT, LSE = "attention", "attention_lse"
ALIGNMENT = 8  # 16-bit elements that cuDNN reads at once
KINDS = (RESULT, LSE, *GRADIENTS)


@dataclass(frozen=True)
class Seen:
    """Rows of a rank that attend to a block of keys, and the columns that these rows see. `rows` and `columns` are 0 or 1 for a half, or
    None for all. `diagonal` is the diagonal of the causal mask, or None without a mask."""

    rows: int | None = None
    columns: int | None = None
    diagonal: Expr | None = None


class Attentions:
    def __init__(self, flow: Dataflow, buffers: Buffers, b: Builder):
        self.flow, self.buffers, self.b = flow, buffers, b
        self.beside = _computed_beside(flow.fusion.ops)
        self.done = {op.result.name for others in self.beside.values() for op in others.values()}

    def compute(self, op: Op, iteration: LoopIteration | None) -> None:
        if op.result.name in self.done:
            return  # Another op's instruction writes this result.
        made = {op.kind: op, **self.beside.get(op.result.name, {})}
        if iteration:
            self.block(op, made, iteration)
        else:
            self.at_once(op, made)

    def block(self, op: Op, made: Mapping[str, Op], iteration: LoopIteration) -> None:
        """Emits attention to the current block of keys. A row that sees no key of the block gets 0, and the log-sum-exp -inf. The weight of
        such a row is 0 when blocks are merged."""
        b, kernels = self.b, self.kernels(op, made)
        q, k, v = (self.aligned(self.buffers.operand(op, number, iteration), iteration) for number in range(3))

        def target(kind: str) -> str:
            chunk = self.buffers.destination(made[kind], iteration)
            return b.reshape(chunk, b.types[chunk].shape[1:], f"{chunk}_own")

        result, lse = target(RESULT), target(LSE)

        def half(buffer: str, dim: int, which: int | None) -> str:
            at = len(b.types[buffer].shape) + dim
            name = buffer.removesuffix("_own").removesuffix(f"_{iteration.index.name}")
            return buffer if which is None else b.chunk(buffer, at, Const(which), Size(2), f"{name}_half")

        def attend(seen: Seen | None) -> None:
            if seen is None or seen.rows is not None:
                b.emit(ir.Fill(result, 0.0))
                b.emit(ir.Fill(lse, float("-inf")))
            if seen is not None:
                query, own = half(q, -2, seen.rows), half(result, -2, seen.rows)
                key, value = half(k, -2, seen.columns), half(v, -2, seen.columns)
                with packed_destination(b, half(lse, -1, seen.rows), None) as sums:
                    b.emit(ir.Attention(query, key, value, op[SCALE], own, (sums,), diagonal=seen.diagonal, kernels=kernels))

        if not op[CAUSAL]:
            attend(Seen())
            return
        rank = rank_in_group(self.flow.mesh_of(op), self.flow.types[op.tensors[0]].dims[-2].axes)
        before, after = (Seen(columns=0), Seen(rows=1)) if op[PIECES] else (Seen(), None)

        of_others = partial(branch, b, iteration.owned_by.less(rank), partial(attend, before), partial(attend, after))
        branch(b, iteration.is_own, partial(attend, Seen(diagonal=Const(0))), of_others)

    def at_once(self, op: Op, made: Mapping[str, Op]) -> None:
        if op[PIECES]:
            raise ProgramError(f"{op.kind}: zigzag attention of {op[PIECES]} pieces needs a chunk loop; stream both gathers", op.location)
        operands, named = op.tensors[: COUNTS[op.kind]], masks_of(op, op.tensors)
        in_blocks = op.kind in (RESULT, LSE) and op[KEY_BLOCKS] > 0

        def own(buffer: str) -> str:
            return self.b.reshape(buffer, self.b.types[buffer].shape[1:], f"{buffer}_own") if in_blocks else buffer

        def of(word: str, read: Callable[[str], str]) -> tuple[str, ...]:
            return (read(named[word]),) if word in named else ()

        lengths, offsets = (of(word, lambda name: own(self.buffers.contiguous(name))) for word in ("lengths", "offsets"))
        masks: dict[str, Any] = {
            "diagonal": self.diagonal(op, bool(lengths)),
            "window": op[WINDOW] or None,
            "lengths": lengths,
            "bias": of("bias", lambda name: self.source(name, 1)),
            "offsets": offsets,
            "corner": BOTTOM_RIGHT if lengths and op[CAUSAL] == BOTTOM_RIGHT else "",
            "kernels": self.kernels(op, made),
        }
        with ExitStack() as copies:

            def target(kind: str, like: str, is_packed: bool = False, alignment: int = ALIGNMENT) -> str:
                if kind not in made:
                    return self.b.allocate_here(f"{op.result.name}_unused", BufferType(self.b.types[like].dtype, self.b.types[like].shape))
                whole = own(self.buffers.buffer_of(made[kind].result.name))
                is_left = self.is_aligned(whole, alignment) and not is_packed
                return whole if is_left else copies.enter_context(packed_destination(self.b, whole, None, alignment))

            if op.kind in GRADIENTS:
                q, k, v, o, gradient = map(self.source, operands[:5])
                lse, (dq, dk, dv) = self.buffers.contiguous(operands[5]), map(target, GRADIENTS, (q, k, v))
                dbias = (target(BIAS_GRADIENT, q, alignment=1),) if BIAS_GRADIENT in made else ()
                self.b.emit(ir.AttentionBackward(q, k, v, o, gradient, lse, op[SCALE], dq, dk, dv, dbias, **masks))
            else:
                q, k, v = map(self.source, (*operands, operands[1])[:3])
                result, sums = target(RESULT, q), (target(LSE, q, True),) if LSE in made else ()
                self.b.emit(ir.Attention(q, k, v, op[SCALE], result, sums, "zeros" if in_blocks else "", **masks))

    def kernels(self, op: Op, made: Mapping[str, Op]) -> str:
        """Library of attention kernels that the op needs, or "" if cuDNN supports the op."""
        types = [self.flow.types[name] for name in op.tensors[:3]]
        q, _, v = types = types if op.kind != LSE else [*types[:2], types[1]]
        is_needed = any(is_by_kernels(each, *types) for each in made.values())
        return kernels_for(q.dtype, max(int(q.shape[-1]), int(v.shape[-1]))) if is_needed else ""

    def source(self, name: str, alignment: int = ALIGNMENT) -> str:
        return self.aligned(self.buffers.buffer_of(name), None, alignment)

    def aligned(self, buffer: str, iteration: LoopIteration | None, alignment: int = ALIGNMENT) -> str:
        return buffer if self.is_aligned(buffer, alignment) else contiguous_source(self.b, buffer, iteration, alignment)

    def is_aligned(self, buffer: str, alignment: int = ALIGNMENT) -> bool:
        """True if each row is contiguous, and rows of 16-bit elements begin at multiples of `alignment` elements."""
        *outer, last = strides_of(self.b.types[buffer])
        are_aligned = all(stride.coefficient % alignment == 0 for stride in outer) and self.b.begins_at(buffer, alignment)
        return last == Size() and (self.b.types[buffer].dtype.itemsize > 2 or are_aligned)

    def diagonal(self, op: Op, has_lengths: bool) -> Expr | None:
        """Last column that a row sees, minus the index of the row. None without a causal mask.

        "bottom_right" adds the number of columns, and subtracts the number of rows. With lengths, the instruction itself adds the number of
        valid columns.
        """
        if not op[CAUSAL]:
            return None
        queries, keys = (self.flow.types[name].dims[-2] for name in op.tensors[:2])
        own = [self.b.types[self.buffers.buffer_of(name)].shape[-2] for name in op.tensors[:2]]
        mesh = self.flow.mesh_of(op)

        def first(dim: Dim, rows: Size) -> Expr:
            """Global index of this rank's first row along a dim. `rows` is the rank's number of rows."""
            even = dim.size // mesh.size_of(dim.axes)
            rank = rank_in_group(mesh, dim.axes)
            number = Const(op[REVERSED] - 1) - rank if dim == queries and op[REVERSED] else rank
            return number * expr_of(even if rows == even else dim.size.ceil_div(mesh.size_of(dim.axes)))

        shift = first(queries, own[0]) - first(keys, own[1])
        more = -1 * queries.size if has_lengths else keys.size - queries.size
        return shift + expr_of(more) if op[CAUSAL] == BOTTOM_RIGHT else shift


def _computed_beside(ops: Sequence[Op]) -> dict[str, dict[str, Op]]:
    """Maps the result of an attention op to later ops, by kind. The instruction of the attention op also computes these ops."""
    found: dict[str, dict[str, Op]] = {}
    first: dict[tuple[Any, ...], Op] = {}
    for op in ops:
        if op.kind in (RESULT, *GRADIENTS):
            key = (op.kind in GRADIENTS, op.operands, op.attributes)
            known = first.get(key)
            if known is None or op.kind in (known.kind, *found.get(known.result.name, {})):
                first[key] = op
            else:
                found.setdefault(known.result.name, {})[op.kind] = op
        elif op.kind == LSE:
            results = ((o, (*o.operands[:2], *o.operands[3:])) for o in first.values() if o.kind == RESULT and o.result.name not in found)
            if known := next((o for o, others in results if (others, o.attributes) == (op.operands, op.attributes)), None):
                found[known.result.name] = {LSE: op}
    return found
