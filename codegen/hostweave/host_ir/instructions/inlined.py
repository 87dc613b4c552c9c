"""Instructions of inlined programs only: versions of the memory behind parameters of a call with donated arguments.

The check reads them. They are neither parsed nor emitted.
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
    """An input: the current contents of the argument. Bytes that a result in donated memory has overwritten cannot be read by this name."""

    syntax = "%{out} = as_given %{src}"


@dataclass(frozen=True)
class TakeOver(_Parameter):
    """A result in the memory of a donated argument: the contents that are written from now on."""

    syntax = "%{out} = take_over %{src}"


@dataclass(frozen=True)
class Returned(Instruction):
    """End of a call. The whole result must have been written."""

    src: Read
    syntax = "returned %{src}"
