"""Lowers asynchronous communication (`async`) to work on a separate stream. An event marks each result that another stream needs."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from hostweave.communication.dataflow import Dataflow
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS, RESHARD_STEPS, TO_OTHER_MESHES, communicates
from hostweave.host_ir import ir, tree
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const

COMM = "comm"  # stream of asynchronous communication
COPIES = "copies"  # stream of local copies after a communication; the next communication need not wait for the copies


class Asynchronous:
    def __init__(self, flow: Dataflow, b: Builder, is_called_beside: bool):
        self.flow, self.b = flow, b
        self.is_called_beside = is_called_beside  # True if communication of the caller may still run on the stream COMM
        self.pending: dict[str, str] = {}  # value for which the caller's stream has not waited -> event, or "" if no op reads the value
        self.copied: dict[str, str] = {}  # value that a copy on the stream COPIES completes -> event of the copy
        # value that the caller's stream sums from terms after a wait -> functions that emit the sums
        self.sums: dict[str, list[Callable[[], None]]] = {}
        self.is_forked = False

    def takes(self, op: Op) -> bool:
        is_reshard = op.kind in RESHARD_STEPS and op.result.is_async and op.result.stream is None
        return is_reshard and not self.flow.is_view(op) and op.kind not in TO_OTHER_MESHES

    def run(self, op: Op, communicate: Callable[[], None]) -> None:
        """Emits the instructions of `communicate` on the separate stream, after all earlier work of the caller's stream. The copy of
        this rank's block runs on the same stream, on the stream COPIES or on the caller's stream. Sums of terms may run on the caller's
        stream."""
        name, self.b.sums = op.result.name, [] if self._is_summed_by_user(op) else None
        body, copies = self.instructions(op, communicate)
        sums, self.b.sums = self.b.sums, None
        self.pending[name] = ready = self.b.new_events(f"{name}_ready") if self._is_read(name) else ""
        aside = copies if ready and not self._is_awaited(op) else []
        arrived = self.b.new_events(f"{name}_arrived") if aside else ""
        latest = next((i for i in self.b.issued() if not tree.names(i, "stream")), None)
        if latest is None or tree.names(latest, "fork") != (COMM,):  # Otherwise the caller's stream has no new work since the last fork.
            self.b.emit(ir.Fork(COMM))
        begins = [ir.Wait(event, Const(0)) for source in op.tensors if (event := self.copied.get(self.flow.viewed(source)))]
        self.enqueue([*begins, *body, *(copies if not ready else ())], ready, aside, arrived)
        if aside:
            self.copied[name] = ready
        elif ready and copies:
            for source in op.tensors:  # the copies read the source, which may itself be asynchronous
                self.wait_for(source)
            for copy in copies:
                self.b.emit(copy)
        self.sums[name] = sums or []
        self.is_forked = True

    def instructions(self, op: Op, communicate: Callable[[], None]) -> tuple[list[tree.Instruction], list[tree.Instruction]]:
        """Instructions that `communicate` emits, and copies that may run on another stream."""
        self.b.aside = []
        with self.b.nested() as body, self.b.by(op.result.transport):
            communicate()
        copies, self.b.aside = self.b.aside, None
        return body, copies

    def enqueue(self, body: Iterable[tree.Instruction], ready: str, copies: Iterable[tree.Instruction], arrived: str, at: int = 0) -> None:
        """Emits communication on the stream COMM, and records event `ready` at the end. If there is an event `arrived`, records its index
        `at` after the communication, and emits `copies` on the stream COPIES."""
        done = [ir.Record(ready, Const(0))] if ready else []
        self._on(COMM, *body, *([ir.Record(arrived, Const(at))] if arrived else done))
        if arrived:
            self._on(COPIES, ir.Wait(arrived, Const(at)), *copies, *done)

    def _on(self, stream: str, *body: tree.Instruction) -> None:
        self.b.emit(ir.OnStream(stream, Const(0), tuple(replace(i, location=self.b.location) for i in body)))

    def _is_read(self, name: str) -> bool:
        """True if an op reads the value or a view of it. If the value is only returned, the join at the end of the body suffices."""
        return any(not self.flow.is_view(op) or self._is_read(op.result.name) for op in self.flow.consumers[name])

    def _is_summed_by_user(self, op: Op) -> bool:
        """True if the first consumer is a kernel. A kernel can read the terms of all ranks, and sum the terms itself."""
        users = [user for user in self.flow.consumers[op.result.name] if not self.flow.is_view(user)]
        return bool(users) and users[0].result.stream is None and bool(OPS[users[0].kind].cpp)

    def _is_awaited(self, op: Op) -> bool:
        """True if the next work of the caller's stream reads the result."""
        following = self.flow.fusion.ops[self.flow.fusion.ops.index(op) + 1 :]
        busy = next((other for other in following if not self.flow.is_view(other) and not self.takes(other)), None)
        return busy is not None and op.result.name in map(self.flow.viewed, busy.tensors)

    def settle(self, ops: Iterable[Op]) -> None:
        for op in ops:
            if not self.flow.is_view(op) and not self.takes(op):  # `run` emits the waits of an asynchronous op
                for name in op.tensors:
                    self.wait_for(name)
                if communicates(op) and (op.callee or self.is_called_beside):
                    self.is_forked, self.is_called_beside = self.is_forked or self.is_called_beside, False
                    self.join()

    def wait_for(self, name: str) -> None:
        """Makes the caller's stream wait for a pending value, or for all communication if the value has no event."""
        viewed = self.flow.viewed(name)
        event = self.pending.pop(viewed, None)
        if event:
            self.b.emit(ir.Wait(event, Const(0)))
            self._sum(viewed)
        elif event is not None:
            self.join()

    def join(self) -> None:
        """Makes the caller's stream wait for all work of the streams COMM and COPIES."""
        if self.is_forked:
            self.b.emit(ir.Join(COMM))
            for name, event in self.pending.items():
                if name in self.copied:
                    self.b.emit(ir.Wait(event, Const(0)))
            self.is_forked = False
            self.pending.clear()
            for name in list(self.sums):
                self._sum(name)

    def _sum(self, name: str) -> None:
        for emit in self.sums.pop(name, ()):
            emit()
