"""Operations: executions of an instruction on one rank, with the bytes that they read and write."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from hostweave.base.errors import ProgramError
from hostweave.host_ir import ir, tree
from hostweave.types.mesh import RankSizes
from hostweave.types.tensor import DType

StreamInPool = tuple[str, int]  # pool and index of a stream, such as ("loop", 2)


@dataclass(frozen=True, slots=True, eq=False)
class ByteLayout:
    """Layout of a view in its buffer: shape and strides in elements, and contiguous runs of bytes."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]  # (count, stride in bytes) of the dims along which runs repeat, largest stride first
    run: int  # bytes of a contiguous run

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def in_order(self) -> tuple[tuple[int, int], ...]:
        """Sizes and strides of the dims, merged where possible. Equal if two layouts have equal offsets of all elements."""
        merged: list[tuple[int, int]] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if merged and merged[-1][1] == size * stride:
                size *= merged.pop()[0]
            merged += [(size, stride)] if size != 1 else []
        return tuple(merged) if self.count else ()


def layout(dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> ByteLayout:
    """Layout of a strided view. Contiguous dims become the run. Other dims are merged where possible."""
    rows: list[tuple[int, int]] = []
    run = dtype.itemsize if all(shape) else 0
    for size, stride in sorted(zip(shape, strides, strict=True), key=operator.itemgetter(1)):
        pitch = stride * dtype.itemsize
        if size == 1 or not run:
            continue
        if not rows and pitch == run:
            run *= size
        elif rows and pitch == rows[-1][0] * rows[-1][1]:
            rows[-1] = (rows[-1][0] * size, rows[-1][1])
        else:
            rows.append((size, pitch))
    return ByteLayout(dtype, shape, strides, tuple(reversed(rows)), run)


ALWAYS = sys.maxsize  # later than all generations


class ByteRegion(NamedTuple):
    """Bytes of an input, output or allocation on one rank. A generation is the number of a version of the contents. Each execution of the
    allocate begins a generation, and so does each result in donated memory."""

    root: str
    offset: int  # bytes
    layout: ByteLayout
    generation: int  # generation that is written, or first generation that may be read
    last: int = ALWAYS  # last generation that may be read


class Access(NamedTuple):
    name: str
    region: ByteRegion
    reads: bool
    writes: bool
    at: int | None = None  # rank that owns the memory; None: the rank of the operation


@dataclass(slots=True, eq=False, repr=False)
class Operation:
    """One execution of an instruction on one rank. A fork is one operation on the caller's stream, and one on each forked stream."""

    instruction: tree.Instruction
    rank: int
    stream: StreamInPool | None  # None: the caller's stream
    iteration: tuple[tuple[str, int], ...]  # indices of the enclosing loops
    accesses: tuple[Access, ...] = ()
    channel: ir.Channel | None = None
    process_group: tuple[int, ...] = ()  # global ranks, in process group order
    peer: int | None = None  # global rank of the peer, or of a collective's root
    members: tuple[Operation, ...] = ()  # operations of a group
    waits: tuple[Operation, ...] = ()  # operations that a fork, a join or an event orders before this operation
    frees: tuple[Operation, ...] = ()  # for an allocate: the last deallocate of each stream whose bytes the allocate may reuse

    @property
    def communications(self) -> tuple[Operation, ...]:
        return self.members if self.members else (self,) if self.process_group else ()

    @property
    def may_be_serialised(self) -> bool:
        """True if a communication of this operation must not overlap with communications of other channels on the same device."""
        return any(communication.channel.may_be_serialised for communication in self.communications if communication.channel)

    def __repr__(self) -> str:
        stream = f"{self.stream[0]}[{self.stream[1]}]" if self.stream else "the caller's stream"
        indices = "".join(f", %{name} = {value}" for name, value in self.iteration)
        return f"rank {self.rank}, {stream}{indices}: {instruction_text(self.instruction)}"


def instruction_text(instruction: tree.Instruction) -> str:
    """Text of an instruction without its body."""
    return instruction.lines()[0].removesuffix(" {") or "the caller before the next call"


@dataclass(frozen=True)
class Root:
    """A buffer that is not a view. `role` is input, output or allocation."""

    layout: ByteLayout
    role: str

    @property
    def size(self) -> int:
        return self.layout.count * self.layout.dtype.itemsize


@dataclass(frozen=True)
class Instances:
    """Operations of each rank in the order of issue, and the buffers and sizes of each rank."""

    program: ir.HostProgram
    sizes: tuple[RankSizes, ...]
    roots: tuple[Mapping[str, Root], ...]
    ranks: tuple[tuple[Operation, ...], ...]


def failure(program: ir.HostProgram, message: str, instruction: tree.Instruction | None = None) -> ProgramError:
    """Error for a fault in an execution of `program`, with the user's line if the line is known."""
    location = instruction.location if instruction else None
    return ProgramError(message if location else f"@{program.name}: {message}", location)
