"""Runs mutants with one change in random schedules. A mutant that the check accepts must be correct.

When an operation starts, it reads its inputs and fills its outputs with NaN. When it ends, it writes its outputs. The caller writes inputs
and reads outputs on the caller's stream. All memory is NaN before the caller writes the inputs, and after the caller has read the outputs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from interpret import Rank, World, interpret
from lowered_fusions import NAMES, program
from numpy.typing import NDArray

from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.check.match_collectives import match_communications
from hostweave.check.operations import Instances, Operation, StreamInPool
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import minimal_sizes
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const, Var
from hostweave.host_ir.ir import HostProgram
from hostweave.types.tensor import block_of, global_shape

Array = NDArray[Any]
Inputs = dict[str, Array]


def mutants(host: HostProgram) -> Iterator[HostProgram]:
    """Yields programs in which one synchronisation is missing, one stream is changed, or two adjacent instructions are swapped."""
    for at in list(tree.walk(host.body)):
        if isinstance(at, ir.Fork | ir.Join | ir.Record | ir.Wait):
            yield _with(host, at, ())
        if isinstance(at, ir.OnStream):
            for other in (Const(0), Var(leaf.name) // 2 if isinstance(leaf := at.index, Var) else Const(1), at.index + 1):
                yield _with(host, at, replace(at, index=other))
    for body in [host.body, *(body for at in tree.walk(host.body) for body in tree.bodies(at))]:
        for first, second in pairwise(body):
            if not set(tree.names(first, "define", "index")):
                yield replace(host, body=_exchanged(host.body, body, first, second))


def _with(host: HostProgram, at: tree.Instruction, new: tree.Instruction | tree.Body) -> HostProgram:
    return replace(host, body=tree.rewrite(host.body, lambda i: new if i.location == at.location and i == at else None))


def _exchanged(whole: tree.Body, body: tree.Body, first: tree.Instruction, second: tree.Instruction) -> tree.Body:
    if whole is body:
        at = next(k for k, instruction in enumerate(body) if instruction is first)
        return (*body[:at], second, first, *body[at + 2 :])
    inner = [replace(i, **{f: _exchanged(getattr(i, f), body, first, second) for f in ("body", "orelse") if hasattr(i, f)}) for i in whole]
    return tuple(inner)


class Machine:
    """Simulates all ranks and streams. `run` chooses the next step by a seed."""

    def __init__(self, instances: Instances, inputs: dict[str, Array], seed: int):
        program = instances.program
        self.instances, self.inputs, self.draw = instances, inputs, random.Random(seed)
        self.met = {member: meeting for meeting in match_communications(instances) for member in meeting.operations}
        self.world = World(instances, self.met)
        self.ranks = [Rank(self.world, rank, {}) for rank in range(program.mesh.size)]
        self.queues: list[list[Operation]] = []
        self.callers: list[tuple[Operation, Operation]] = []
        for rank, operations in enumerate(instances.ranks):
            before, after = (Operation(tree.Instruction(), rank, None, ()) for _ in range(2))
            self.callers.append((before, after))
            streams: dict[StreamInPool | None, list[Operation]] = {None: [before]}
            for operation in operations:
                streams.setdefault(operation.stream, []).append(operation)
            streams[None].append(after)
            self.queues.extend(streams.values())
        self.started: dict[Operation, dict[str, Array]] = {}
        self.ended: set[Operation] = set()
        self.outputs: dict[int, dict[str, Array]] = {}

    def run(self) -> list[dict[str, Array]]:
        while ready := [queue for queue in self.queues if queue and self.can_go_on(queue[0])]:
            queue = self.draw.choice(ready)
            if queue[0] in self.started:
                self.end(queue.pop(0))
            else:
                self.start(queue[0])
        assert not any(self.queues), "deadlock"
        return [self.outputs[rank] for rank in range(len(self.ranks))]

    def can_go_on(self, operation: Operation) -> bool:
        if operation not in self.started:
            return all(waited in self.ended for waited in operation.waits)
        # Sends are buffered, so a send does not wait for its peer.
        receives = (member for member in operation.communications if not isinstance(member.instruction, ir.Send))
        return all(other in self.world.posted for member in receives for other in self.met[member].operations)

    def start(self, operation: Operation) -> None:
        rank = self.ranks[operation.rank]
        before, after = self.callers[operation.rank]
        if operation is before:
            for array in rank.bytes.values():
                array[:] = 255
        if operation is after:
            outputs = self.instances.program.outputs
            self.outputs[operation.rank] = {parameter.name: rank.whole(parameter.name).copy() for parameter in outputs}
        for member in operation.communications:
            read = [rank.array(access) for access in member.accesses if access.reads]
            self.world.posted[member] = read[0].copy() if read else None
        written = [access for member in operation.members or (operation,) for access in member.accesses if access.writes]
        results: dict[str, Array] = {}
        if not operation.communications and operation.accesses and not isinstance(operation.instruction, ir.Allocate | ir.Deallocate):
            kept = [rank.array(access).copy() for access in written]
            rank.compute(operation)
            results = {access.name: rank.array(access).copy() for access in written}
            for access, array in zip(written, kept, strict=True):
                rank.array(access)[...] = array
        for access in written:
            rank.array(access)[...] = np.nan
        self.started[operation] = results

    def end(self, operation: Operation) -> None:
        rank = self.ranks[operation.rank]
        before, after = self.callers[operation.rank]
        if operation is before:
            for name, array in self.inputs.items():
                parameter = next(p for p in self.instances.program.inputs if p.name == name)
                rank.whole(name)[...] = array[block_of(parameter.type, self.instances.program.mesh, operation.rank, array.shape)]
        if operation is after:
            for memory in rank.bytes.values():
                memory[:] = 255
        for access in operation.accesses if not operation.communications else ():
            if access.writes and access.name in self.started[operation]:
                rank.array(access)[...] = self.started[operation][access.name]
        for member in operation.communications:
            for access in member.accesses:
                if access.writes:
                    target = rank.array(access)
                    target[...] = rank.received(member).reshape(target.shape)
        self.ended.add(operation)


def arguments(host: HostProgram) -> Inputs:
    draw = np.random.default_rng(0)
    sizes = minimal_sizes(host)
    return {p.name: draw.integers(-1, 2, global_shape(p.type, sizes)).astype(ml_dtypes.bfloat16) for p in host.inputs}


def is_right(host: HostProgram, inputs: Inputs, want: list[dict[str, Array]], seed: int) -> bool:
    outputs = Machine(instantiate(host, minimal_sizes(host)), inputs, seed).run()
    return all(np.array_equal(got["y"], expected["y"]) for got, expected in zip(outputs, want, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_accepted_mutants_are_correct_in_every_schedule(name: str) -> None:
    host = program(name, 3)
    inputs, passed = arguments(host), 0
    for mutant in (host, *mutants(host)):
        with contextlib.suppress(ProgramError):
            check(mutant)
            want = interpret(mutant, inputs)
            passed += 1
            assert all(is_right(mutant, inputs, want, seed) for seed in range(5))
    assert passed > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_fork_join_or_wait_is_wrong_in_some_schedule(name: str) -> None:
    host = program(name, 3)
    inputs = arguments(host)
    want = interpret(host, inputs)
    needed = [i for i in tree.walk(host.body) if isinstance(i, ir.Fork | ir.Join | ir.Wait)]
    assert needed
    for instruction in needed:
        mutant = _with(host, instruction, ())
        assert not all(is_right(mutant, inputs, want, seed) for seed in range(200)), instruction
