"""Instructions of inlined calls, for the check: views of arguments before and after a call, and the end of a call. Parser and emitter do
not support these instructions."""

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
    """An input of the call: the argument with its contents before the call. No instruction may read bytes through this view after a result
    has overwritten the bytes."""

    syntax = "%{out} = as_given %{src}"


@dataclass(frozen=True)
class TakeOver(_Parameter):
    """A result of the call in the memory of a donated argument: the contents that the call writes."""

    syntax = "%{out} = take_over %{src}"


@dataclass(frozen=True)
class Returned(Instruction):
    """End of a call: the whole result must have been written."""

    src: Read
    syntax = "returned %{src}"
