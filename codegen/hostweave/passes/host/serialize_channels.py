"""Host to host: communications on different channels run one after the other on a rank, in the same order on all ranks.

    for %i in 0..4 {
      stream ring[%i] {
        matmul %x_i, %w -> %h_i
        all_reduce sum %h_i -> %hs_i on tp
        all_gather %hs_i -> %y_i on dp
      }
    }

becomes

    record turn[0]
    for %i in 0..4 {
      stream ring[%i] {
        matmul %x_i, %w -> %h_i
        wait turn[0]
        all_reduce sum %h_i -> %hs_i on tp
        all_gather %hs_i -> %y_i on dp
        record turn[0]
      }
    }

A wait binds to the record that was made last, so that one event passes the turn on from stream to stream, in the order in which the
host issues them. Only what streams and events do not order already takes part in it.
"""

from __future__ import annotations

from dataclasses import replace

from hostweave.base.names import unique_name
from hostweave.check.channel_order import unordered_instructions
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Const
from hostweave.options import Options


def serialize_channels(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    """After it any two communications of different channels are ordered on every rank."""
    if not (in_turn := unordered_instructions(program)):
        return program
    turns = _Turns(in_turn, _free_event(program))
    body = turns.across_streams(program.body)
    first = next(place for place, instruction in enumerate(body) if instruction is not program.body[place])
    body = (*body[:first], ir.Record(turns.event, Const(0)), *body[first:])  # for the first wait
    return replace(program, events=(*program.events, ir.Events(turns.event, 1)), body=body)


def _are_of_different_ranks(instructions: list[ir.Instruction]) -> bool:
    ranks = [rank for i in instructions if isinstance(i, ir.OnMesh) for rank in i.mesh.all_ranks]
    return all(isinstance(i, ir.OnMesh) for i in instructions) and len(set(ranks)) == len(ranks)


def _free_event(program: ir.HostProgram) -> str:
    return unique_name("turn", {streams.name for streams in program.streams} | {events.name for events in program.events})


class _Turns:
    """Has communications wait for one event, and record it."""

    def __init__(self, in_turn: set[int], event: str):
        self.in_turn, self.event = in_turn, event

    def across_streams(self, body: ir.Body) -> ir.Body:
        """A body outside of every stream block: each block in it takes a turn, and so does each communication on the caller's stream."""
        result: list[ir.Instruction] = []
        for instruction in body:
            if not self.concerns(instruction):
                result.append(instruction)
            elif isinstance(instruction, ir.OnStream):
                result.append(replace(instruction, body=self.on_one_stream(instruction.body)))
            elif isinstance(instruction, ir.For | ir.OnMesh):
                result.append(replace(instruction, body=self.across_streams(instruction.body)))
            elif isinstance(instruction, ir.If):
                branches = self.across_streams(instruction.body), self.across_streams(instruction.orelse)
                result.append(replace(instruction, body=branches[0], orelse=branches[1]))
            else:
                result.extend(self.on_one_stream((instruction,)))
        return tuple(result)

    def on_one_stream(self, body: ir.Body) -> ir.Body:
        """One turn for all that a body communicates: from the first communication to the last one."""
        places = [place for place, instruction in enumerate(body) if self.concerns(instruction)]
        if not places:
            return body
        first, last = places[0], places[-1]
        alone = body[first]
        if first == last and isinstance(alone, ir.If):  # a branch that communicates nothing need not wait
            alone = replace(alone, body=self.on_one_stream(alone.body), orelse=self.on_one_stream(alone.orelse))
            return (*body[:first], alone, *body[last + 1 :])
        if _are_of_different_ranks([body[place] for place in places]):  # nor need one rank wait for what others do
            return tuple(replace(i, body=self.on_one_stream(i.body)) if isinstance(i, ir.OnMesh) else i for i in body)
        wait = ir.Wait(self.event, Const(0), location=alone.location)
        record = ir.Record(self.event, Const(0), location=body[last].location)
        return (*body[:first], wait, *body[first : last + 1], record, *body[last + 1 :])

    def concerns(self, instruction: ir.Instruction) -> bool:
        return any(id(inner) in self.in_turn for inner in ir.walk((instruction,)))
