"""Attention: one instruction for a result and for the log-sum-exps of its scores, where these are asked for after it.

    %y: bf16[B, H@tp, S, 128] = attention(%q, %k, %v, scale=0.125, causal=top_left)
    %l: f32[B, H@tp, S] = attention_lse(%q, %k, scale=0.125, causal=top_left)

becomes `attention %q, %k, %v scaled 0.125 diagonal 0 -> %y lse %l`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops.attention import BOTTOM_RIGHT
from hostweave.fusion_ir.ops.attributes import CAUSAL, SCALE, WINDOW
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Expr
from hostweave.host_ir.strides import strides_of
from hostweave.passes.lower import communication
from hostweave.passes.lower.buffers import Buffers
from hostweave.passes.lower.dataflow import Dataflow
from hostweave.passes.lower.steps import expr_of, rank_in_group
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType

RESULT, LSE = KINDS = ("attention", "attention_lse")


class Attentions:
    def __init__(self, flow: Dataflow, buffers: Buffers, b: Builder):
        self.flow, self.buffers, self.b = flow, buffers, b
        self.lse = _lse_of_each(flow.fusion.ops)

    def compute(self, op: Op) -> None:
        if op in self.lse.values():
            return  # the one before has written it
        lse = op if op.kind == LSE else self.lse.get(op.result.name)
        q, k, v = map(self.source, (*op.tensors, op.tensors[1])[:3])
        with ExitStack() as copies:

            def packed(buffer: str) -> str:
                return copies.enter_context(communication.packed_destination(self.b, buffer, None))

            if op.kind == LSE:
                target = self.b.allocate_here(f"{op.result.name}_unused", BufferType(self.b.types[q].dtype, self.b.types[q].shape))
            else:
                target = self.buffers.buffer_of(op.result.name)
                target = target if self.has_dense_rows(target) else packed(target)
            sums = (packed(self.buffers.buffer_of(lse.result.name)),) if lse else ()
            self.b.emit(ir.Attention(q, k, v, op[SCALE], target, self.diagonal(op), op[WINDOW] or None, sums))

    def source(self, name: str) -> str:
        whole = self.buffers.buffer_of(name)
        return whole if self.has_dense_rows(whole) else communication.contiguous_source(self.b, whole, None)

    def has_dense_rows(self, buffer: str) -> bool:
        return strides_of(self.b.types[buffer])[-1] == Size()

    def diagonal(self, op: Op) -> Expr | None:
        """By how much the last column that a row sees is behind it: more on a rank whose rows begin further down."""
        if not op[CAUSAL]:
            return None
        (queries, keys), own = (
            (self.flow.types[name].dims[-2] for name in op.tensors[:2]),
            self.b.types[self.buffers.buffer_of(op.tensors[0])],
        )
        mesh = self.flow.mesh_of(op)
        even = queries.size // mesh.size_of(queries.axes)
        rows = even if own.shape[-2] == even else queries.size.ceil_div(mesh.size_of(queries.axes))
        first = rank_in_group(mesh, queries.axes) * expr_of(rows)
        return first + (expr_of(keys.size) - expr_of(queries.size)) if op[CAUSAL] == BOTTOM_RIGHT else first


def _lse_of_each(ops: Sequence[Op]) -> dict[str, Op]:
    """By the name of an attention the log-sum-exps of its scores that a later op asks for."""
    found: dict[str, Op] = {}
    for number, op in enumerate(ops):
        if op.kind == LSE:
            same = (o for o in ops[:number] if o.kind == RESULT and (o.operands[:2], o.attributes) == (op.operands, op.attributes))
            if first := next((o for o in same if o.result.name not in found), None):
                found[first.result.name] = op
    return found
