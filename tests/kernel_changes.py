"""Kernels of functions and of programs, their loops, and the lines that a pass removes and adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hostweave as hw
from hostweave.emit.program import ProgramSources
from hostweave.host_ir import tree
from hostweave.host_ir.ir import HostProgram, Kernel, Launch, buffer_types
from hostweave.kernel_ir.index_space import index_space
from hostweave.kernel_ir.loops import Loops
from hostweave.kernel_ir.pipeline import PASSES, stages
from hostweave.kernel_ir.text import parse_loops
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.machine import H200, Machine
from hostweave.types.tensor import BufferType, TensorType


def kernel_of(function: Callable[..., Any], **inputs: TensorType) -> tuple[Kernel, list[BufferType]]:
    """The only kernel of a function, and the types of its inputs and results in memory."""
    host = lower(hw.fusion(**inputs)(function), Options())
    (kernel,), types = host.kernels, buffer_types(host)
    (launch,) = (i for i in tree.walk(host.body) if isinstance(i, Launch))
    return kernel, [types[name] for name in (*launch.srcs, *launch.dsts)]


def expect_loops_to_parse(host: HostProgram) -> None:
    """Tests that the text of the loops of all kernels in the C++ of a program parses to the same loops, after each pass."""
    for kernel, buffers in ProgramSources(host).context.launches:
        for _, loops in stages(kernel, buffers, H200):
            assert parse_loops(str(loops), kernel) == loops


def changes(
    apply: Callable[[Loops, Machine], Loops], function: Callable[..., Any], machine: Machine = H200, **inputs: TensorType
) -> list[str]:
    """Lines of the loops that differ after a pass. A removed line begins with "- ", and an added line with "+ "."""
    loops = index_space(*kernel_of(function, **inputs))
    for earlier in PASSES[: PASSES.index(apply)]:
        loops = earlier(loops, machine)
    before, after = [*loops.lines()], [*apply(loops, machine).lines()]
    return [f"- {line}" for line in before if line not in after] + [f"+ {line}" for line in after if line not in before]
