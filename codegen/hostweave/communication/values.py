"""Interface through which the lowering of communication gets the buffers of values."""

from typing import Protocol

from hostweave.communication.steps import LoopSteps
from hostweave.fusion_ir.ir import Op


class Values(Protocol):
    by_step: dict[str, str]  # value that exists only in a loop -> buffer, with one chunk per iteration

    def buffer_of(self, name: str) -> str: ...

    def chunk(self, name: str, dim: int, steps: LoopSteps) -> str:
        """Part of a value that one iteration accesses."""

    def operand(self, op: Op, number: int, steps: LoopSteps | None) -> str:
        """Buffer from which an op reads its operand."""

    def destination(self, op: Op, steps: LoopSteps | None) -> str:
        """Buffer to which an op writes its result."""

    def take_chunks(self, op: Op, steps: LoopSteps) -> None:
        """Allocates memory for the chunks that the iterations of an op write."""
