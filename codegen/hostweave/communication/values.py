"""Interface through which communication asks the lowering for buffers of values."""

from typing import Protocol

from hostweave.communication.steps import LoopSteps
from hostweave.fusion_ir.ir import Op


class Values(Protocol):
    by_step: dict[str, str]  # values local to a loop, with their buffers of one chunk per step

    def buffer_of(self, name: str) -> str:
        """Buffer or view that holds all of a value."""

    def chunk(self, name: str, dim: int, steps: LoopSteps) -> str:
        """Part of a value that one iteration accesses."""

    def operand(self, op: Op, number: int, steps: LoopSteps | None) -> str:
        """Buffer that an op reads."""

    def destination(self, op: Op, steps: LoopSteps | None) -> str:
        """Buffer that an op writes."""

    def take_chunks(self, op: Op, steps: LoopSteps) -> None:
        """Allocates memory for the chunks that the steps of an op write."""
