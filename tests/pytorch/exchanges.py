"""What programs of modules exchange between ranks."""

import hostweave as hw
from hostweave.host_ir.calls import inlined
from hostweave.host_ir.ir import AllGather, ReduceScatter
from hostweave.host_ir.tree import walk


def gathers(*programs: hw.Program) -> int:
    """How many all-gathers calls of them make, but for those that are half of an all-reduce."""
    instructions = [i for program in programs for i in walk(inlined(program.host).body)]
    return sum(isinstance(i, AllGather) for i in instructions) - sum(isinstance(i, ReduceScatter) for i in instructions)
