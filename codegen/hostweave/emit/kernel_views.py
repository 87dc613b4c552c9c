"""Kernels as the templates see them: generated ones, and user kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Kernel:
    """A thread for each element of the results, or for some neighbours of them."""

    template: ClassVar[str] = "pointwise"
    name: str
    by: str  # the function of all its variants
    comments: tuple[str, ...]
    params: tuple[str, ...]
    arguments: tuple[str, ...]  # the names of the parameters
    variants: tuple[tuple[str, str], ...]  # a condition, and what it takes: how threads share rows, or arguments of a template
    varied: tuple[str, ...]  # the parameters of the latter
    row: str  # the name of the former
    bounds: str  # how many threads a block has at most
    each: str  # the head of the loop over elements
    indices: tuple[str, ...]  # declarations of the indices that its own stands for, and of what threads hold
    body: tuple[str, ...]


@dataclass(frozen=True)
class Pass:
    """One walk over what is reduced, which some reductions need."""

    before: tuple[str, ...]
    starts: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Reduction(Kernel):
    """A thread or a block for each element of what is kept, or a block for a tile of them, which walks what is reduced to it.

    Neighbouring threads read side by side: those of elements, or those that share the innermost loop.
    """

    template = "reduction"
    inner: tuple[str, ...]  # the heads of the loops over what is reduced
    passes: tuple[Pass, ...]
    once: str  # the condition under which a thread stores what several have reduced
    stores: tuple[str, ...]  # of results that have the kept dims alone
    last: tuple[str, ...]  # a last walk, for results of every element


@dataclass(frozen=True)
class Text:
    """C++ of the user, and where it stands: lines to include before it, and the others as they are, each at its place."""

    includes: tuple[str, ...]
    lines: tuple[str, ...]
    line: int
    file: str


@dataclass(frozen=True)
class Source:
    """A function of the user, and the one that the CPU target has in its place."""

    name: str
    declaration: str
    text: Text
    cpu: Text | None
