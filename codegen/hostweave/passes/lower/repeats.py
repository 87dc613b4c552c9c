"""Lowers a repeat to a loop of calls.

    %y: bf16[M, K] = repeat @layer(%x, %w, depth=depth, each=(1,), carried=(0,), returned=(0,))

becomes, if `depth` is odd and %x is a temporary,

    %y_other = allocate bf16[M, K]
    copy %x -> %y_other
    for %i in 0..depth {
      %w_i = select %w[0: %i]
      %x_i = choose %y_other if %i % 2 == 0 else %y
      %y_i = choose %y if %i % 2 == 0 else %y_other
      call @layer %x_i, %w_i -> %y_i
    }

The carried value alternates between two buffers, and the last call writes %y. For an even `depth`, the two buffers are swapped. If %x is
not a temporary, the first call reads %x without a copy.

If the operand %wg of a repeat is gathered call by call (`gather_ahead`), each call gathers the tensor of the next call:

    fork comm
    stream comm[0] { all_gather %w_first -> %wg_first on x; record gathered_ready[0] }
    for %i in 0..depth {
      wait gathered_ready[0]
      if %i < depth - 1 {
        fork comm
        stream comm[0] { all_gather %w_next -> %wg_next on x; record gathered_ready[0] }
      }
      %wg_i = select %wg[0: %i % 2]
      call @layer ...
    }

Each gather begins after the call that last read the memory of the gathered tensor.
"""

from dataclasses import dataclass
from functools import partial

from hostweave.communication.collective import gather_one
from hostweave.communication.dataflow import Dataflow, expr_of
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops.attributes import BACKWARD, DEPTH, EACH, INDEX
from hostweave.fusion_ir.ops.calls import carried_by, is_gathered_by_call, lagged_by
from hostweave.host_ir import ir, tree
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const, Expr, Var
from hostweave.passes.lower.asynchronous import COMM, Asynchronous
from hostweave.passes.lower.buffers import Buffers
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


@dataclass(frozen=True)
class _Carried:
    """Memory of a value that each call passes to the next call."""

    name: str
    source: str  # operand of the first call
    buffers: tuple[str, ...]  # one buffer, which each call updates or which keeps all values; or two buffers that alternate
    keeps: str = ""  # "taken": `buffers` has the operands of all calls, and the last result; "given": the results of all calls
    is_copied: bool = True  # True if the first call reads a copy of `source`


@dataclass(frozen=True)
class _NextCall:
    """Gathers for the next call of a repeat."""

    op: Op  # the repeat
    gathers: dict[int, Op]  # operand of the repeat -> the gather
    slots: dict[int, str]  # operand of the repeat -> memory of two gathered tensors
    event: str  # recorded after the gathers of a call
    arrived: list[str]  # events, one per gather, that are recorded before a copy of this rank's block; empty if nothing is copied


def gathers_by_call(flow: Dataflow, op: Op) -> dict[int, Op]:
    """Operands of a repeat that are gathered call by call, and the gathers."""
    made = {number: flow.made.get(op.tensors[number]) for number in op[EACH]}  # A call has no operand in `each`.
    return {number: gather for number, gather in made.items() if gather and is_gathered_by_call(gather, flow.consumers[gather.result.name])}


class RepeatLowering:
    def __init__(self, flow: Dataflow, buffers: Buffers, asynchronous: Asynchronous, b: Builder):
        self.flow, self.buffers, self.asynchronous, self.b = flow, buffers, asynchronous, b
        self.inputs = {value.name for value in flow.fusion.inputs}
        self.memories = dict(zip(flow.fusion.outputs, flow.fusion.donated, strict=False))  # result -> donated input

    def lower(self, op: Op, function: Fusion) -> None:
        b, depth, name, results = self.b, op[DEPTH], op.result.name, len(function.outputs)
        used = {user[INDEX]: user.result.name for user in self.flow.consumers[name] if user.kind == "output"} | {0: name}
        pairs = carried_by(op)
        gathers = gathers_by_call(self.flow, op)
        ahead = self.gather_first(op, gathers) if gathers else None
        given = ["" if number in gathers else self.buffers.contiguous(operand) for number, operand in enumerate(op.tensors)]
        types = [type.local(self.flow.mesh, self.flow.uneven) for type in function.output_types]
        carried = {operand: self.begin(op, function, given[operand], (operand, result), used) for operand, result in pairs.items()}
        apart, needed = dict[int, str](), {*used, *pairs.values()}
        targets = {number: b.allocate(f"{name}_unused", type) for number, type in enumerate(types) if number not in needed}
        whole = {number: self.whole(op, used[number]) for number in used if number < results and number not in pairs.values()}
        for number in whole:
            memory = self.memories.get(used[number], "")
            taken = [at for at, operand in enumerate(op.tensors) if operand == memory]
            if any(not self.is_updated(function, at, number) for at in taken):  # The call would overwrite one of its operands.
                apart[number] = b.allocate(f"{used[number]}_new", types[number])
        with b.loop(depth) as index:
            at = _tensor_of_call(op, index)
            sources = self.gather_next(ahead, index) if ahead else {}
            sources |= {
                number: b.select(given[number], 0, at, f"{given[number]}_{index.name}") for number in op[EACH] if number not in gathers
            }
            for number, first in lagged_by(op).items():
                before = b.select(given[number], 0, (at + (expr_of(depth) - 1)) % expr_of(depth), f"{given[number]}_before")
                sources[number] = b.choose(at.equals(0), given[first], before, f"{function.inputs[number].name}_{index.name}")
            for operand, result in pairs.items():
                sources[operand], targets[result] = self.turn(op, carried[operand], index, function.inputs[operand].name)
            selected = {number: b.select(buffer, 0, at, f"{buffer}_{index.name}") for number, buffer in whole.items()}
            targets |= selected | apart
            operands = tuple(sources.get(number, buffer) for number, buffer in enumerate(given[: len(function.inputs)]))
            b.emit(ir.Call(function.name, operands, tuple(targets[number] for number in range(results))))
            for number, buffer in apart.items():
                b.emit(ir.Copy(buffer, selected[number]))
        for operand, result in pairs.items():
            kept, all_given = (used.get(results + number, "") for number in (operand, len(function.inputs) + result))
            self.end(op, carried[operand], used.get(result, ""), kept, all_given)

    def gather_first(self, op: Op, gathers: dict[int, Op]) -> _NextCall:
        """Emits the gathers of the first call."""
        slots = dict[int, str]()
        for number, gather in gathers.items():
            self.asynchronous.wait_for(gather.tensors[0])
            stack = self.flow.local(gather.result)
            slots[number] = self.b.allocate(gather.result.name, BufferType(stack.dtype, (Size(2), *stack.shape[1:])))
        ahead = _NextCall(op, gathers, slots, self.b.new_events("gathered_ready"), [])
        self.gather(ahead, Const(0), "first")
        return ahead

    def gather_next(self, ahead: _NextCall, index: Var) -> dict[int, str]:
        """Waits for the gathers of call `index`, and emits those of the next call. Returns the gathered tensors of call `index`."""
        b, last = self.b, expr_of(ahead.op[DEPTH]) - 1
        b.emit(ir.Wait(ahead.event, Const(0)))
        with b.inside(lambda body: ir.If(index.less(last), body)):
            self.gather(ahead, index + 1, "next")
        return {number: b.select(slots, 0, index % 2, f"{slots}_{index.name}") for number, slots in ahead.slots.items()}

    def gather(self, ahead: _NextCall, call: Expr, word: str) -> None:
        """Emits the gathers of a call. A copy of this rank's block runs on the stream COPIES, during the next gather."""
        b, made = self.b, list[tuple[list[tree.Instruction], list[tree.Instruction]]]()  # communication and copies of each gather
        for number, gather in ahead.gathers.items():
            stack, slots = self.buffers.buffer_of(gather.tensors[0]), ahead.slots[number]
            src = b.select(stack, 0, _tensor_of_call(ahead.op, call), f"{stack}_{word}")
            dst = b.slot(slots, call % 2, f"{slots}_{word}")
            with b.from_here():
                body, copies = self.asynchronous.instructions(gather, partial(gather_one, b, self.flow, gather, src, dst))
            made.append(([i for i in body if not tree.names(i, "allocate")], copies))
            with b.outermost():  # The memory is in use while a call allocates its own.
                for i in (i for i in body if tree.names(i, "allocate")):
                    b.emit(i)
        b.emit(ir.Fork(COMM))
        if not any(copies for _, copies in made):
            self.asynchronous.enqueue([i for body, _ in made for i in body], ahead.event, [], "")
            return
        if not ahead.arrived:
            ahead.arrived.append(b.new_events("gathered_arrived", len(made)))
        for number, (body, copies) in enumerate(made):
            ready = ahead.event if number == len(made) - 1 else ""
            self.asynchronous.enqueue(body, ready, copies, ahead.arrived[0], number)

    def is_updated(self, function: Fusion, operand: int, result: int) -> bool:
        """True if a function returns a result in the memory of an operand."""
        return bool(function.donated) and function.donated[result] == function.inputs[operand].name

    def whole(self, op: Op, name: str) -> str:
        """Buffer of the stacked results of all calls: the donated input if no later op reads this input, otherwise separate memory."""
        memory, later = self.memories.get(name, ""), self.flow.fusion.ops[self.flow.fusion.ops.index(op) + 1 :]
        is_read_later = any(self.flow.viewed(operand) == memory for other in later for operand in other.tensors)
        if memory and name not in self.buffers.by_value and not is_read_later:
            self.buffers.by_value[name] = name  # the output parameter
        return self.buffers.buffer_of(name)

    def begin(self, op: Op, function: Fusion, source: str, pair: tuple[int, int], used: dict[int, str]) -> _Carried:
        b, type, results = self.b, self.b.types[source], len(function.outputs)
        name, kept = used.get(pair[1], ""), used.get(results + pair[0], "")
        wanted = name or f"{op.result.name}_{pair[1]}"
        all_given = used.get(results + len(function.inputs) + pair[1], "")
        if all_given and not kept and not self.is_updated(function, *pair):
            return _Carried(wanted, source, (self.buffers.buffer_of(all_given),), keeps="given", is_copied=False)
        if kept or all_given:
            whole = b.allocate(f"{kept or wanted}_and_last", BufferType(type.dtype, (op[DEPTH] + 1, *type.shape)))
            first = b.select(whole, 0, expr_of(op[DEPTH]) if op[BACKWARD] else Const(0), f"{kept or wanted}_first")
            carried = _Carried(wanted, source, (whole,), keeps="taken")
        else:
            first = last = self.buffers.buffer_of(name) if name else b.allocate(wanted, type)
            if self.is_updated(function, *pair):
                carried = _Carried(wanted, source, (first,))
            else:
                other = b.allocate(f"{wanted}_other", type)
                first, second = (last, other) if op[DEPTH].bind(self.flow.fusion.depths) % 2 == 0 else (other, last)
                carried = _Carried(wanted, source, (first, second), is_copied=self.is_temporary(op.tensors[pair[0]]))
        if carried.is_copied:
            b.emit(ir.Copy(source, first))
        return carried

    def is_temporary(self, name: str) -> bool:
        """True if later calls may overwrite the memory of a value, because only the repeat reads the value."""
        users = [user for user in self.flow.consumers[name] if user.kind != "output"]
        return self.flow.viewed(name) not in self.inputs and len(users) == 1 and name not in self.flow.fusion.outputs

    def turn(self, op: Op, carried: _Carried, index: Var, parameter: str) -> tuple[str, str]:
        """Buffer that call `index` reads, and buffer that this call writes for the next call."""
        b, name, (first, *others) = self.b, carried.name, carried.buffers
        own, taken = f"{name}_{index.name}", f"{parameter}_{index.name}"
        if carried.keeps == "given":
            count = expr_of(op[DEPTH])
            at, way = (count - 1 - index, Const(1)) if op[BACKWARD] else (index, count - 1)
            before = b.select(first, 0, (at + way) % count, f"{name}_before")
            given = b.select(first, 0, at, own)
            return b.choose(index.equals(0), carried.source, before, taken), given
        if carried.keeps:
            number, further = (expr_of(op[DEPTH]) - index, -1) if op[BACKWARD] else (index, 1)
            return b.select(first, 0, number, taken), b.select(first, 0, number + further, own)
        if not others:
            return first, first
        is_even, (second,) = (index % 2).equals(0), others
        before = b.choose(is_even, first, second, taken if carried.is_copied else f"{name}_before")
        given = b.choose(is_even, second, first, own)
        return before if carried.is_copied else b.choose(index.equals(0), carried.source, before, taken), given

    def end(self, op: Op, carried: _Carried, name: str, kept: str, all_given: str) -> None:
        """Maps the last carried value, and the stacks of all operands and results, to views of the buffer that keeps all values."""
        if not carried.keeps:
            return
        (whole,) = carried.buffers
        end = expr_of(op[DEPTH])
        if carried.keeps == "taken":
            if kept:
                self.buffers.by_value[kept] = self.b.slice(whole, 0, op[DEPTH], Const(int(op[BACKWARD])), kept)
            if all_given:
                self.put(self.b.slice(whole, 0, op[DEPTH], Const(int(not op[BACKWARD])), all_given), all_given)
        else:
            end = end - 1
        if name and (name in self.buffers.by_value or self.flow.consumers[name]):
            self.put(self.b.select(whole, 0, Const(0) if op[BACKWARD] else end, name), name)

    def put(self, view: str, name: str) -> None:
        """Maps a value to a view. If the value already has memory, copies the view to this memory."""
        if self.buffers.by_value.setdefault(name, view) != view:
            self.b.emit(ir.Copy(view, self.buffers.by_value[name]))


def _tensor_of_call(op: Op, call: Expr) -> Expr:
    """Index of the tensor that a call of a repeat reads from a stack or group."""
    return expr_of(op[DEPTH]) - 1 - call if op[BACKWARD] else call
