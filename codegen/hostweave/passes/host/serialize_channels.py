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
host issues them. Only what streams and events do not order already takes part in it. Where a step computes between two
communications, the first one of the next step is issued before that (software_pipeline), if the ranks can go on in that order too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hostweave.base.errors import ProgramError
from hostweave.base.names import unique_name
from hostweave.check.channel_order import unordered
from hostweave.check.happens_before import order, run
from hostweave.check.match_collectives import meetings
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import sizes_to_check
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Const
from hostweave.options import Options
from hostweave.passes.host.software_pipeline import software_pipeline


def serialize_channels(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    """After it any two communications of different channels are ordered on every rank."""
    in_turn = _unordered(program)
    if not in_turn:
        return program
    ahead = software_pipeline(program, lambda i: _concerns(i, in_turn))
    if ahead is not None and _goes_on(overlapped := _in_turn(ahead, _unordered(ahead))):
        return overlapped
    return _in_turn(program, in_turn)


def _in_turn(program: ir.HostProgram, in_turn: set[int]) -> ir.HostProgram:
    turns = _Turns(in_turn, _free_event(program))
    body = turns.across_streams(program.body)
    first = next(place for place, instruction in enumerate(body) if instruction is not program.body[place])
    body = (*body[:first], ir.Record(turns.event, Const(0)), *body[first:])  # for the first wait
    return replace(program, events=(*program.events, ir.Events(turns.event, 1)), body=body)


def _goes_on(program: ir.HostProgram) -> bool:
    """Whether no ranks wait for one another, each for what another one has not been given its turn for."""
    try:
        for sizes in sizes_to_check(program):
            instances = instantiate(program, sizes)
            deque(run(order(instances, meetings(instances))), maxlen=0)
    except ProgramError:
        return False
    return True


def _concerns(instruction: ir.Instruction, in_turn: set[int]) -> bool:
    return any(id(inner) in in_turn for inner in ir.walk((instruction,)))


def _unordered(program: ir.HostProgram) -> set[int]:
    """The ids of the communications, and groups of them, that some rank may run at the same time as one of another channel."""
    used = {i.channel for i in ir.walk(program.body) if isinstance(i, ir.Communication)}
    if sum(program.channel(name).takes_turns for name in used) < 2:
        return set()
    pairs = (pair for sizes in sizes_to_check(program) for pair in unordered(instantiate(program, sizes)))
    own = {id(instruction) for instruction in ir.walk(program.body)}  # a block that it calls orders those of its own
    return own & {id(operation.instruction) for pair in pairs for operation in pair}


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
        return _concerns(instruction, self.in_turn)
