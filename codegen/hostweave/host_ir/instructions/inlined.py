"""Instructions that only inlined programs have. They name versions of the memory of donated arguments, before and after a call.

Only the check reads them. They are neither parsed nor emitted.
"""

from dataclasses import dataclass

from hostweave.host_ir.instructions.views import View
from hostweave.host_ir.tree import Instruction, Read
from hostweave.types.tensor import BufferType


@dataclass(frozen=True)
class _Parameter(View):
    shows = "in order"

    def type_of(self, source: BufferType) -> BufferType:
        return source


@dataclass(frozen=True)
class AsGiven(_Parameter):
    """An input: the present contents of the argument. A byte that a result overwrites can no longer be read by this name."""

    syntax = "%{out} = as_given %{src}"


@dataclass(frozen=True)
class TakeOver(_Parameter):
    """A result in the memory of a donated argument: the contents that later instructions write."""

    syntax = "%{out} = take_over %{src}"


@dataclass(frozen=True)
class Returned(Instruction):
    """Marks the end of a call. The whole result must have been written."""

    src: Read
    syntax = "returned %{src}"
