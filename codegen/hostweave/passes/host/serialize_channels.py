"""Serialises communications that must be ordered: each rank runs them one after another, in the same order as all other ranks.

    for %i in 0..4 {
      stream loop[%i] {
        matmul %x_i, %w -> %h_i
        all_reduce sum %h_i -> %hs_i on tp
        all_gather %hs_i -> %y_i on dp
      }
    }

becomes

    for %i in 0..4 {
      stream loop[%i] {
        matmul %x_i, %w -> %h_i
        if %i != 0 {
          wait channels_idle[0]
        }
        all_reduce sum %h_i -> %hs_i on tp
        all_gather %hs_i -> %y_i on dp
        record channels_idle[0]
      }
    }

A wait refers to the latest record of its event, so one event orders communications across streams. Communications that streams and events
already order do not change.
"""

from dataclasses import replace
from functools import partial

from hostweave.base.names import unique_name
from hostweave.check.channel_order import unordered_instructions
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const, Var, opposite
from hostweave.options import Options


def serialize_channels(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    if not (in_turn := unordered_instructions(program)):
        return program
    pools = {pool.name for of in (program.streams, program.events) for pool in of}
    turns = _Turns(in_turn, unique_name("channels_idle", pools))
    return replace(program, events=(*program.events, ir.Events(turns.event, 1)), body=turns.in_order(program.body))


def _concerns(instruction: tree.Instruction, in_turn: set[tree.Instruction]) -> bool:
    return any(inner in in_turn for inner in tree.walk((instruction,)))


class _Turns:
    """Adds turns. A turn is a wait for an event, communications, and a record of the event."""

    def __init__(self, in_turn: set[tree.Instruction], event: str):
        self.in_turn, self.event = in_turn, event

    def in_order(self, body: tree.Body) -> tree.Body:
        """Adds turns to the body of the program, or to bodies of disjoint ranks."""
        if tree.are_on_disjoint_ranks([i for i in body if _concerns(i, self.in_turn)]):
            return tuple(tree.with_bodies(i, self.in_order) if _concerns(i, self.in_turn) else i for i in body)
        unchanged, body = set(body), self.across_streams(body)  # This set lacks changed instructions, because they name the new event.
        changed = [k for k, instruction in enumerate(body) if instruction not in unchanged]
        first, last = changed[0], changed[-1]
        begin = self.without(ir.Wait, body[first])  # The first communication waits for nothing.
        if begin == (body[first],):
            begin = self.without_first_wait(body[first])
        end = self.without(ir.Record, body[last]) if last > first else ()
        return (*body[:first], *begin, *body[first + 1 : last], *end, *body[last + 1 :])

    def across_streams(self, body: tree.Body) -> tree.Body:
        """Adds turns to a body that is not in a stream block."""
        result: list[tree.Instruction] = []
        for instruction in body:
            if not _concerns(instruction, self.in_turn):
                result.append(instruction)
            elif tree.names(instruction, "stream"):
                result.append(tree.with_bodies(instruction, self.on_one_stream))
            elif any(tree.names(inner, "stream") or inner.work == "compute" for inner in tree.walk((instruction,))):
                result.append(tree.with_bodies(instruction, self.across_streams))
            else:
                result.extend(self.on_one_stream((instruction,)))
        return tuple(result)

    def without_first_wait(self, loop: tree.Instruction) -> tree.Body:
        """Removes the wait of the first iteration. Instead records the event before the loop if the wait is under a condition or in an
        inner loop, or if there may be no iteration. Each wait needs a record."""
        inside = [inner for i in tree.bodies(loop)[0] for inner in (tree.bodies(i)[0] if tree.names(i, "stream") else (i,))]
        wait = next(i for i in tree.walk((loop,)) if self.event in tree.names(i, "wait"))
        if loop.trips is None or not loop.trips.is_int or not any(i is wait for i in inside):
            return (ir.Record(self.event, Const(0)), loop)
        (index,) = tree.names(loop, "index")
        later = partial(ir.If, opposite(Var(index).equals(0)), location=wait.location)
        return tree.rewrite((loop,), lambda i: later((i,)) if i is wait else None)

    def without(self, kind: type[ir.Wait | ir.Record], instruction: tree.Instruction) -> tree.Body:
        """Removes an instruction if it is a wait or record (`kind`) of the turn's event. In a stream block, removes such instructions."""
        if isinstance(instruction, kind) and instruction.event == self.event:
            return ()
        if tree.names(instruction, "stream"):
            return (tree.with_bodies(instruction, lambda body: tuple(kept for i in body for kept in self.without(kind, i))),)
        return (instruction,)

    def on_one_stream(self, body: tree.Body) -> tree.Body:
        """Adds one turn around all communications of `in_turn`, or turns inside conditions and bodies of disjoint ranks."""
        positions = [k for k, instruction in enumerate(body) if _concerns(instruction, self.in_turn)]
        if not positions:
            return body
        first, last = positions[0], positions[-1]
        alone = body[first]
        if first == last and alone.condition_of_body:  # The turn is inside, because a branch without communication need not wait.
            return (*body[:first], tree.with_bodies(alone, self.on_one_stream), *body[last + 1 :])
        if tree.are_on_disjoint_ranks([body[k] for k in positions]):  # A rank need not wait for instructions of other ranks.
            return tuple(tree.with_bodies(i, self.on_one_stream) if i.ranks else i for i in body)
        wait = ir.Wait(self.event, Const(0), location=alone.location)
        record = ir.Record(self.event, Const(0), location=body[last].location)
        return (*body[:first], wait, *body[first : last + 1], record, *body[last + 1 :])
