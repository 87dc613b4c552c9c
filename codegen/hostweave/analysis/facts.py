"""Invariants of the host IR. `FACTS` in pipeline.py states the passes between which each invariant holds.

Each function raises ProgramError if its invariant does not hold.
"""

from hostweave.analysis.def_use import def_use
from hostweave.analysis.kernel_indices import NotOneKernel, iteration, updated
from hostweave.base.errors import ProgramError
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.host_ir.expr import Const
from hostweave.types.size import Size


def kernels_are_single(program: ir.HostProgram) -> None:
    """`iteration` succeeds for every kernel."""
    for kernel in program.kernels:
        try:
            iteration(kernel)
        except NotOneKernel as why:
            raise ProgramError(f"kernel @{kernel.name}: {why}; split it", kernel.ops[-1].location) from None


def nothing_is_freed(program: ir.HostProgram) -> None:
    """No memory is freed before `plan_memory`, so earlier passes need not check for reused bytes."""
    for i in program.instructions():
        if names := tree.names(i, "free"):
            raise ProgramError(f"%{names[0]} is deallocated before plan_memory; remove the deallocate", i.location)


def updates_are_in_place(program: ir.HostProgram) -> None:
    """If a launch or call updates an operand, the operand and the updated result share memory."""
    kernels = {kernel.name: kernel for kernel in program.kernels}
    for body in bodies(program):
        uses = def_use(body)
        for i in tree.walk(body.body):
            read, written = tree.names(i, "read"), tree.names(i, "write")
            for number, at in updated(i, kernels, program.functions):
                if uses.root(read[number]) != uses.root(written[at]):
                    why = f"%{written[at]} updates %{read[number]}, which is in other memory"
                    raise ProgramError(f"{why}; copy %{read[number]} to %{written[at]} first", i.location)


def conditions_are_open(program: ir.HostProgram) -> None:
    """No condition is constant, and no loop has one iteration."""
    for i in program.instructions():
        if isinstance(i.condition_of_body, Const) or isinstance(i.chosen_by, Const):
            raise ProgramError("the condition is constant; write the body or buffer that it selects", i.location)
        if i.trips == Size():
            raise ProgramError("the loop runs once; replace the loop by its body", i.location)
