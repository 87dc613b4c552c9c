"""Asynchronous communication (`aside()`): on a stream of its own, beside what does not need its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import RESHARD_STEPS, TO_OTHER_MESHES
from hostweave.host_ir import ir
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const
from hostweave.passes.lower.dataflow import Dataflow

COMM = "comm"  # the stream of what communicates aside


class Aside:
    """Puts communications aside, and has the caller's stream wait for them where it needs them."""

    def __init__(self, flow: Dataflow, b: Builder):
        self.flow, self.b = flow, b
        self.pending: set[str] = set()  # values that the caller's stream has not waited for

    def takes(self, op: Op) -> bool:
        is_reshard = op.kind in RESHARD_STEPS and op.result.aside and op.result.stream is None
        return is_reshard and not self.flow.is_view(op) and op.kind not in TO_OTHER_MESHES

    def run(self, op: Op, communicate: Callable[[], None]) -> None:
        """What `communicate` emits, after all that the caller's stream holds."""
        with self.b.nested() as body:
            communicate()
        self.b.emit(ir.Fork(COMM))
        self.b.emit(ir.OnStream(COMM, Const(0), tuple(body)))
        self.pending.add(op.result.name)

    def settle(self, ops: Iterable[Op]) -> None:
        """Waits for what was communicated aside, where these ops read some of it, or call what communicates beside it."""
        for op in ops:
            if self.flow.is_view(op) or self.takes(op):  # it touches no memory, or does so on the same stream
                continue
            for name in op.tensors:
                self.wait_for(name)
            if op.callee and any(step.kind in RESHARD_STEPS and step.kind != "shard" for step in op.callee.all_ops):
                self.join()

    def wait_for(self, name: str) -> None:
        """Before the caller's stream reads this value."""
        if self.flow.viewed(name) in self.pending:
            self.join()

    def join(self) -> None:
        if self.pending:
            self.b.emit(ir.Join(COMM))
            self.pending.clear()
