"""Places of a program's values, which lowering knows and communication asks for."""

from typing import Protocol

from hostweave.communication.steps import Steps
from hostweave.fusion_ir.ir import Op


class Values(Protocol):
    by_step: dict[str, str]  # a value that lives in one loop -> the buffer of one chunk a step

    def buffer_of(self, name: str) -> str:
        """The buffer or view that holds all of a value."""

    def chunk(self, name: str, dim: int, steps: Steps) -> str:
        """Part of a value that one iteration touches."""

    def operand(self, op: Op, number: int, steps: Steps | None) -> str:
        """Buffer that an op reads."""

    def destination(self, op: Op, steps: Steps | None) -> str:
        """Buffer that an op writes."""

    def take_chunks(self, op: Op, steps: Steps) -> None:
        """Takes memory for what the steps of an op write."""
