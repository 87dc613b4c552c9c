"""Delays the caller's wait for a loop until the first use of the loop's results. An instruction that uses or orders streams, or calls a
function, ends the delay.

    for %i in 0..4 { stream loop[%i] { ... matmul %x_i, %w -> %h_i } }
    join loop
    launch @sum_z %v -> %z
    launch @add_y %h, %z -> %y

becomes

    for %i in 0..4 { stream loop[%i] { ... matmul %x_i, %w -> %h_i } }
    launch @sum_z %v -> %z
    join loop
    launch @add_y %h, %z -> %y

The pass moves only joins. Waits for events are already before the first use of the data.
"""

from hostweave.analysis.def_use import DefUse, def_use
from hostweave.base.unchanged import replaced
from hostweave.host_ir import ir, tree
from hostweave.options import Options


def sink_waits(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    return replaced(program, body=_sunk(program.body, def_use(program)))


def _sunk(body: tree.Body, uses: DefUse) -> tree.Body:
    result: list[tree.Instruction] = []
    running: dict[str, list[tree.Instruction]] = {}  # work of each stream since its last join
    # Joins that move down, each with the work for which the join waits.
    waiting: list[tuple[tree.Instruction, list[tree.Instruction]]] = []
    position = 0  # index in `result` at which the waiting joins will be inserted
    for instruction in body:
        communicates = any(isinstance(i, ir.Communication) for i in tree.walk((instruction,)))
        # If the body has issued no work for a join, the join orders communications after work of the caller.
        if any(_orders(instruction) or uses.conflict(issued, [instruction]) or (communicates and not issued) for _, issued in waiting):
            result[position:position] = [join for join, _ in waiting]
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
            position = len(result)
    result[position:position] = [join for join, _ in waiting]
    return tuple(result)


def _orders(instruction: tree.Instruction) -> bool:
    """True if a join must stay before this instruction, which uses or orders streams, or calls a function. A join may pass another join."""
    return not tree.names(instruction, "join") and any(i.orders or tree.names(i, "stream", "call") for i in tree.walk((instruction,)))
