"""Number of all-gathers minus number of reduce-scatters in programs of modules."""

from collections.abc import Mapping

import hostweave as hw
from hostweave.host_ir.calls import inlined
from hostweave.host_ir.ir import AllGather, For, LaunchAllGather, LaunchReduceScatter, ReduceScatter
from hostweave.host_ir.tree import Body, bodies


def gathers(*programs: hw.Program) -> int:
    """Number of all-gathers minus number of reduce-scatters, summed over one call of each program. An all-reduce that consists of both
    counts as 0."""
    return sum(_counted(inlined(program.host).body, program.host.depths()) for program in programs)


def _counted(body: Body, depths: Mapping[str, int]) -> int:
    """Number of all-gathers minus number of reduce-scatters in a body. An instruction in a repeat counts once per iteration."""
    total = 0
    for i in body:
        times = depths.get(i.trips.name or "", 1) if isinstance(i, For) else 1
        total += isinstance(i, AllGather | LaunchAllGather) - isinstance(i, ReduceScatter | LaunchReduceScatter)
        total += times * sum(_counted(inner, depths) for inner in bodies(i))
    return total
