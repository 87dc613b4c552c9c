"""Interface through which communication gets the buffers of values from the lowering."""

from typing import Protocol

from hostweave.communication.steps import LoopSteps
from hostweave.fusion_ir.ir import Op


class Values(Protocol):
    by_step: dict[str, str]  # buffers of values that exist only in a loop; each has one chunk per iteration

    def buffer_of(self, name: str) -> str:
        """Buffer or view that contains all of a value."""

    def chunk(self, name: str, dim: int, steps: LoopSteps) -> str:
        """Part of a value that one iteration accesses."""

    def operand(self, op: Op, number: int, steps: LoopSteps | None) -> str:
        """Buffer from which an op reads its operand."""

    def destination(self, op: Op, steps: LoopSteps | None) -> str:
        """Buffer to which an op writes its result."""

    def take_chunks(self, op: Op, steps: LoopSteps) -> None:
        """Allocates memory for the chunks that the iterations of an op write."""
