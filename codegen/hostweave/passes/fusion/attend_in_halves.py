"""Splits causal attention of rows in zigzag into two ops: one for the first piece of each rank, and one for the second pieces."""

from collections.abc import Iterator, Sequence

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.emitter import Attributes, OpRewriter
from hostweave.fusion_ir.index_map import ONE
from hostweave.fusion_ir.ir import Fusion, Op, Value, attributes
from hostweave.fusion_ir.ops import operand_types
from hostweave.fusion_ir.ops.attention import BOTTOM_RIGHT, COUNTS, GRADIENTS, TOP_LEFT
from hostweave.fusion_ir.ops.attributes import CAUSAL, SCALE, WINDOW
from hostweave.fusion_ir.sharding import Layout, flow, layout, with_layout
from hostweave.options import Options
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, TensorType
from hostweave.types.zigzag import Zigzag, inverse, order_of_pieces

# Dim of the query rows in each operand: q, k, v and, in a backward pass, the result, gradient and lse. 0 if the operand has no query rows.
ROWS = (-2, 0, 0, -2, -2, -1)
OF_ROWS = ("attention", "attention_lse", GRADIENTS[0])
PIECES = "first_piece", "second_piece"  # pieces of a rank's rows
HALVES = "lower_half", "upper_half"  # halves of the keys or values of all ranks


def attend_in_halves(fusion: Fusion, options: Options) -> Fusion:
    return _Halving(fusion).rewritten()


class _Halving(OpRewriter):
    def __init__(self, fusion: Fusion):
        super().__init__(fusion)
        # (value, layout, dim of rows) -> operands of the first and of the second op
        self.halves: dict[tuple[str, Layout, int], tuple[str, str]] = {}

    def add(self, op: Op) -> None:
        if op.kind not in COUNTS or not op[CAUSAL]:
            self.emit(op)
            return
        operands = operand_types(op, self.types)
        rule = flow(op, operands, self.mesh)
        needed = rule.operands(rule.computed(layout(op.result.type)))
        self.axes, self.size = needed[0][-2], operands[0].shape[-2]
        if not isinstance(self.axes, Zigzag):
            self.emit(op)
            return
        self.expect_known(operands)
        self.ranks = op.result.type.mesh_in(self.mesh).size_of(self.axes)
        self.half, self.piece = self.size // 2, self.size // (2 * self.ranks)
        halves = [self.halved(*operand) for operand in zip(op.tensors, needed, ROWS, strict=False)]
        firsts, seconds = zip(*halves, strict=True)
        facts = {"scale": op[SCALE], "window": op[WINDOW] or None}
        first = self.make(op.kind, *firsts, how=attributes(causal=TOP_LEFT, **facts), word="first")
        second = self.make(op.kind, *seconds, how=attributes(causal=BOTTOM_RIGHT, reversed=self.ranks, **facts), word="second")
        self.join((first, second)) if op.kind in OF_ROWS else self.add_up(first, second)

    def expect_known(self, operands: Sequence[TensorType]) -> None:
        count, (q, k, *_) = COUNTS[self.op.kind], operands
        why = f"rows of {q} are in zigzag, which supports no lengths or bias together with a causal mask" if len(operands) > count else ""
        if k.shape[-2] != q.shape[-2]:
            why = f"rows of {q} are in zigzag, but there are {k.shape[-2]} keys for {q.shape[-2]} rows"
        if why:
            raise ProgramError(f"{self.op.kind}: {why}; shard the rows in order, as {self.size}@{','.join(self.axes)}", self.op.location)

    def in_layout(self, name: str, needed: Layout) -> str:
        if layout(self.types[name]) == needed:
            return name
        result = Value(self.free_name(f"{name}_in_order"), with_layout(self.types[name], needed))
        self.emit(Op("reshard", (name,), result, location=self.op.location))
        return result.name

    def halved(self, name: str, needed: Layout, rows: int) -> tuple[str, str]:
        if (name, needed, rows) not in self.halves:
            operand = self.in_layout(name, needed)
            self.halves[name, needed, rows] = self.rows(operand, rows) if rows else self.columns(operand)
        return self.halves[name, needed, rows]

    def rows(self, name: str, dim: int) -> tuple[str, str]:
        at = len(self.types[name].dims) + dim
        by_rank = self.make("renumber", name, how=attributes(axis=at, sources=order_of_pieces(self.ranks)), word="by_rank", of=name)
        pieces = self.reshaped(by_rank, at, 1, (Size(self.ranks), Size(2), self.piece), "pieces", name)
        halves = zip(self.selected(pieces, at + 1, PIECES, name), ("first_rows", "second_rows"), strict=True)
        first, second = (self.reshaped(half, at, 2, (self.half,), word, name) for half, word in halves)
        return first, second

    def selected(self, name: str, axis: int, words: tuple[str, str], of: str) -> Iterator[str]:
        return (self.make("select", name, how=attributes(axis=axis, index=i), word=word, of=of) for i, word in enumerate(words))

    def columns(self, name: str) -> tuple[str, str]:
        """The lower half of the keys or values, and all keys or values."""
        type = self.types[name]
        some = TensorType(type.dtype, (*type.dims[:-2], Dim(self.half), type.dims[-1]))
        return self.make("slice", name, how=attributes(axis=len(type.dims) - 2, start=0, step=1), like=some, word=HALVES[0], of=name), name

    def join(self, halves: tuple[str, str]) -> None:
        result, rows = self.op.result, -1 if self.op.kind == "attention_lse" else -2
        at = len(result.type.dims) + rows
        shape = Size(self.ranks), ONE, self.piece
        pieces = [self.reshaped(half, at, 1, shape, word) for half, word in zip(halves, PIECES, strict=True)]
        joined = self.make("concat", *pieces, how=attributes(axis=at + 1), word="pieces")
        by_rank = self.reshaped(joined, at, 3, (self.size,), "by_rank")
        self.halves[result.name, layout(result.type), rows] = halves
        self.finish("renumber", by_rank, how=attributes(axis=at, sources=inverse(order_of_pieces(self.ranks))))

    def add_up(self, first: str, second: str) -> None:
        """Sums the gradients of the keys or values. The rows of the first op attend only to the lower half of the keys."""
        at = len(self.types[second].dims) - 2
        halves = self.reshaped(second, at, 1, (Size(2), self.half), "halves", second)
        lower, upper = self.selected(halves, at, HALVES, second)
        self.finish("concat", self.make("add", lower, first), upper, how=attributes(axis=at))

    def finish(self, kind: str, *sources: str, how: Attributes) -> None:
        self.emit(Op(kind, sources, self.op.result, how, self.op.location))
