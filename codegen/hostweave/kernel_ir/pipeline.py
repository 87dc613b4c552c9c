"""The passes from a kernel to its loops, in order. Each pass is a function in a file with the same name."""

from collections.abc import Callable, Sequence

from hostweave.analysis.kernel_indices import NotOneKernel
from hostweave.base.errors import ProgramError
from hostweave.host_ir import ir
from hostweave.kernel_ir.distribute import distribute
from hostweave.kernel_ir.hoist import hoist
from hostweave.kernel_ir.hold_rows import hold_rows
from hostweave.kernel_ir.index_space import index_space
from hostweave.kernel_ir.loops import Loops
from hostweave.kernel_ir.name_outermost import name_outermost
from hostweave.kernel_ir.number_elements import number_elements
from hostweave.kernel_ir.split_walks import split_walks
from hostweave.kernel_ir.transpose import transpose
from hostweave.kernel_ir.vectorise import vectorise
from hostweave.types.machine import Machine
from hostweave.types.tensor import BufferType

PASSES: tuple[Callable[[Loops, Machine], Loops], ...] = (
    name_outermost,
    split_walks,
    distribute,
    transpose,
    vectorise,
    hoist,
    hold_rows,
    number_elements,
)

STAGES = (index_space.__name__, *(apply.__name__ for apply in PASSES))


def stages(kernel: ir.Kernel, buffers: Sequence[BufferType], machine: Machine) -> list[tuple[str, Loops]]:
    """The index space, then the loops after each pass that changes them, each with the name of the pass. `buffers` are the types of the
    kernel's inputs, then of its results."""
    try:
        found = [(index_space.__name__, index_space(kernel, buffers))]
    except NotOneKernel as reason:
        raise ProgramError(f"kernel @{kernel.name}: {reason}; split it") from None
    for apply in PASSES:
        loops = apply(found[-1][1], machine)
        if loops != found[-1][1]:
            found.append((apply.__name__, loops))
    return found
