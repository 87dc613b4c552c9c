"""What a call takes on a rank, checked once: what is bound, and the arrays of the call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hostweave.runtime.arrays import Library
from hostweave.runtime.meeting import Shape, Span
from hostweave.runtime.windows import Place


@dataclass(frozen=True)
class Table:
    """The inputs that a program has bound on a rank, checked, and a place for each of the others."""

    library: Library | None  # of the first that this rank has
    shapes: tuple[Shape | None, ...]  # of all inputs; None where a call has it
    spans: tuple[Span, ...]
    digest: str  # "" where nothing is bound
    native: Any
    taken: dict[Any, Taken] = field(default_factory=dict, repr=False)  # with it in calls before, by the states of all arrays

    def joined(self, shapes: Iterable[Shape]) -> tuple[Shape, ...]:
        """The shapes of all inputs, of which a call has these."""
        rest = iter(shapes)
        return tuple(next(rest) if shape is None else shape for shape in self.shapes)


@dataclass(frozen=True)
class Taken:
    """The inputs of a call, beside those that are bound, and where its outputs go. It keeps no array alive."""

    table: Table
    library: Library | None  # of the first that this rank has
    addresses: tuple[int, ...]
    shapes: tuple[Shape, ...]
    sizes: tuple[tuple[str, int], ...]  # that the caller knows
    stream: int  # cudaStream_t
    given: tuple[tuple[int, ...], tuple[Shape | None, ...]] | None  # addresses of out=, and shapes of what the rank has of it
    donated: tuple[int, ...]  # of each output the address of the input that it takes over, else 0
    spans: tuple[Span, ...]  # of what is taken and given
    windows: tuple[Place, ...]  # of what lies in memory that ranks share, as the program says

    @property
    def all_shapes(self) -> tuple[Shape, ...]:
        return self.table.joined(self.shapes)
