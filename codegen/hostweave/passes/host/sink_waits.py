"""Host to host: the caller's stream waits for a loop only before the first use of its results.

    for %i in 0..4 { stream ring[%i] { ... matmul %x_i, %w -> %h_i } }
    join ring
    launch @sum_z %v -> %z
    launch @add_y %h, %z -> %y

becomes

    for %i in 0..4 { stream ring[%i] { ... matmul %x_i, %w -> %h_i } }
    launch @sum_z %v -> %z
    join ring
    launch @add_y %h, %z -> %y

The waits of a stream for an event stand before their first use from the start: a ring's, and those that order channels.
"""

from dataclasses import replace

from hostweave.analysis.def_use import DefUse, def_use
from hostweave.host_ir import ir, tree
from hostweave.options import Options


def sink_waits(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    """A join goes down past what the caller's stream does with memory that the joined streams do not touch."""
    return replace(program, body=_sunk(program.body, def_use(program)))


def _sunk(body: tree.Body, uses: DefUse) -> tree.Body:
    result: list[tree.Instruction] = []
    running: dict[str, list[tree.Instruction]] = {}  # what streams were given since they were joined last
    waiting: list[tuple[tree.Instruction, list[tree.Instruction]]] = []  # joins on their way down, with what they wait for
    place = 0  # where they are by now
    for instruction in body:
        if any(_orders(instruction) or uses.conflict(issued, [instruction]) for _, issued in waiting):
            result[place:place] = [join for join, _ in waiting]
            waiting = []
        for block in tree.walk((instruction,)):
            for pool in tree.names(block, "stream"):
                running.setdefault(pool, []).append(block)
        if joined := tree.names(instruction, "join"):
            waiting.append((instruction, [block for pool in joined for block in running.pop(pool, [])]))
            continue
        if instruction.ranks:
            instruction = tree.with_bodies(instruction, lambda inner: _sunk(inner, uses))
        result.append(instruction)
        if not waiting or instruction.calls:
            place = len(result)
    result[place:place] = [join for join, _ in waiting]
    return tuple(result)


def _orders(instruction: tree.Instruction) -> bool:
    """Whether it concerns other streams than the caller's. A join may go past another one."""
    return not tree.names(instruction, "join") and any(i.orders or tree.names(i, "stream", "call") for i in tree.walk((instruction,)))
