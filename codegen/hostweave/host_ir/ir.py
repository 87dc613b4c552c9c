"""The host IR: the operations that the host of one rank enqueues, in order.

All ranks share one program. The rank number is a run-time value. An instruction outside of all `stream` blocks runs on the caller's stream.

Each instruction is a dataclass. Printer and parser follow its `syntax`. The roles of the fields say which buffers the instruction defines,
reads, writes or frees. Most analyses and passes use only roles and traits, so a new instruction does not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Concatenate, ParamSpec, TypeVar

from hostweave.base.signatures import checked
from hostweave.base.unchanged import fact
from hostweave.fusion_ir.choice import Choice
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.user_kernel import UserKernel, print_user_kernel
from hostweave.host_ir import tree
from hostweave.host_ir.instructions.communication import *  # noqa: F403
from hostweave.host_ir.instructions.computing import *  # noqa: F403
from hostweave.host_ir.instructions.control import *  # noqa: F403
from hostweave.host_ir.instructions.views import *  # noqa: F403
from hostweave.host_ir.instructions.windows import *  # noqa: F403
from hostweave.host_ir.tree import Body, Instruction, T, walk
from hostweave.transports.transport import SIGNALS, Transport
from hostweave.types.group import ParameterGroup, one_by_one
from hostweave.types.mesh import Mesh
from hostweave.types.size import LocalSize, Size
from hostweave.types.tensor import BufferType, TensorType

CALLER = "caller"  # name of the stream of the caller, in C++ and in reports
MAX_WORDS = 3  # maximum number of ops of a kernel whose name lists the ops
MAX_CHARACTERS = 48  # maximum number of characters of all result names, if the name of a kernel lists all results


@dataclass(frozen=True)
class Parameter:
    """An input or output of a program, function or kernel. `type` is the global type, or the local type in a kernel.

    `memory` is the donated input whose memory the output reuses, or "". If `in_window`, peers can access the parameter.
    """

    name: str
    type: TensorType
    memory: str = ""
    in_window: bool = False
    group: ParameterGroup | None = None

    def __str__(self) -> str:
        where = f" in %{self.memory}" if self.memory else " in window" * self.in_window
        return f"%{self.name}: {self.type}{where}" + (f" {self.group}" if self.group else "")


@dataclass(frozen=True)
class Kernel:
    """A generated kernel of ops on local tensors, such as pointwise ops and reductions.

    `ends` is the reason why the kernel is not fused with the consumers of its results. `receivers` is the number of ranks that get
    a block of the kernel's only result, including this rank, or 0.
    """

    name: str
    inputs: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    returned: tuple[str, ...] = ()  # names of the results; if empty, the last op computes the only result
    ends: str = field(default="", compare=False)
    receivers: int = 0

    @cached_property
    def made(self) -> Mapping[str, Op]:
        return {op.result.name: op for op in self.ops}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        return {p.name: p.type for p in self.inputs} | {op.result.name: op.result.type for op in self.ops}

    @cached_property
    def results(self) -> tuple[Parameter, ...]:
        return tuple(Parameter(name, self.types[name]) for name in self.returned or (self.ops[-1].result.name,))

    @cached_property
    def exchanges(self) -> Op | None:
        """The collective that the kernel computes together with the kernels of other ranks, or None."""
        return next((op for op in self.ops if OPS[op.kind].is_reshard_step), None)

    @cached_property
    def products(self) -> tuple[Op, ...]:
        """Matmuls of few rows with one common first operand, before the other ops."""
        return tuple(op for op in self.ops if OPS[op.kind].is_product)

    @property
    def delivered(self) -> BufferType:
        """Type of the result of the collective."""
        first = self.inputs[0].type
        return BufferType(first.dtype, first.shape)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(value for op in self.ops for _, value in op.attributes if isinstance(value, Size))

    @property
    def is_local(self) -> bool:
        """True if an attribute of an op depends on the size or position of the rank's shard."""
        return any(isinstance(atom, LocalSize) for size in self.sizes for atom in size.atoms)

    @property
    def descriptive_name(self) -> str:
        """Name that is made of the ops and the results: `negative_multiply_y`, or `fused_y` if there are many ops.

        The name omits iota, reshape, and the op of a returned value whose name begins with the op, such as `multiply_y`. If the names of
        the results are long, the kernel's name has only the last result. A kernel that updates its operand in place is named after the op
        and the operand. A name without ops ends in `_kernel`.
        """
        if update := next((op for op in self.ops if OPS[op.kind].updates), None):
            return f"{update.kind}_{update.tensors[0]}"
        results = [result.name for result in self.results]
        working = [op for op in self.ops if op.kind not in ("iota", "reshape")]
        words = [op.kind for op in working if op.result.name not in results or not op.result.name.startswith(f"{op.kind}_")]
        words = ["fused"] if len(self.ops) > MAX_WORDS else words
        named = results if sum(map(len, results)) <= MAX_CHARACTERS else results[-1:]
        return "_".join([*words, *named, *([] if words else ["kernel"])])

    def lines(self) -> list[str]:
        end = f"}}  # ends here: {self.ends}" if self.ends else "}"
        returned = [f"return {tree.field_text(self.returned, True)}"] if self.returned else []
        return [f"kernel @{self.name}({_listed(self.inputs)}) {{", *(f"{tree.INDENT}{line}" for line in (*self.ops, *returned)), end]


@dataclass(frozen=True)
class Function:
    """A function of the program. All calls use the same memory for temporaries."""

    name: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    body: Body


@dataclass(frozen=True)
class Channel:
    """A communicator with its transport. The ranks of a process group differ only along `axes` of `mesh`."""

    name: str
    mesh: Mesh  # mesh of the program, or of a subset of its ranks
    axes: tuple[str, ...]
    transport: Transport

    @property
    def size(self) -> int:
        return self.mesh.size_of(self.axes)

    @property
    def may_be_serialised(self) -> bool:
        """True if communications of the channel must not overlap with communications of other channels on the same device."""
        return self.size > 1 and self.transport.holds_multiprocessors

    def text(self, program: Mesh) -> str:
        """Text: `tp: tp two_sided`, or `x_of_ranks_2_3: x on mesh(x=2 of ranks 2, 3) two_sided`."""
        on = "" if self.mesh == program else f" on {self.mesh}"
        return f"{self.name}: {', '.join(self.axes)}{on} {self.transport.name}"


@dataclass(frozen=True)
class Pool:
    name: str
    count: int

    def __str__(self) -> str:
        return f"{self.name}[{self.count}]"


class Streams(Pool):
    """A pool of streams, indexed modulo `count`. Text: `loop[4]`."""


class Events(Pool):
    """A pool of events, such as `ready[2]`."""


S = TypeVar("S")
P = ParamSpec("P")


def analysis(compute: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator of an analysis of a program, fusion or kernel. Caches the result in the analysed object. Callers must not modify the
    result."""

    def once(program: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return fact(program, (compute, args, *kwargs.items()), None, compute, program, *args, **kwargs)

    return once


@dataclass(frozen=True)
class HostProgram:
    name: str
    mesh: Mesh
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    channels: tuple[Channel, ...] = ()
    streams: tuple[Streams, ...] = ()
    events: tuple[Events, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    body: Body = ()
    uneven: tuple[str, ...] = ()  # sizes that ranks may split unevenly: a rank of 8 holds `local(M, x)` of M, not `M/8`
    functions: tuple[Function, ...] = ()  # callees precede callers
    user_kernels: tuple[UserKernel, ...] = ()
    choices: tuple[Choice, ...] = ()  # choices of the compiler for reshards

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(f"{p.name}: {p.type}" for p in parameters) for parameters in (self.inputs, self.outputs))
        return f"<hostweave host program {self.name}({inputs}) -> {outputs} on {self.mesh}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        """Text of the program: kernels, functions, choices, the header, and the body, with one instruction per line."""
        lines = [line for user_kernel in self.user_kernels for line in print_user_kernel(user_kernel)]
        lines += [line for kernel in self.kernels for line in kernel.lines()]
        for f in self.functions:
            lines += [f"function @{f.name}({_listed(f.inputs)}) -> ({_listed(f.outputs)}) {{", *tree.body_lines(f.body), "}"]
        declared = {
            "channels": [channel.text(self.mesh) for channel in self.channels],
            "streams": self.streams,
            "events": self.events,
            "uneven": self.uneven,
        }
        header = "".join(f" {word}({_listed(items)})" for word, items in declared.items() if items)
        head = f"host @{self.name}({_listed(self.inputs)}) -> ({_listed(self.outputs)}) {self.mesh}{header} {{"
        return "\n".join([*lines, *map(str, self.choices), head, *tree.body_lines(self.body), "}"]) + "\n"

    @cached_property
    def code(self) -> str:
        """Text without choices, because the predicted times of choices may differ. Builds for one target and machine share an entry of the
        cache if the code is equal. Ranks that make a call together compare the code."""
        return str(replace(self, choices=()))

    @staticmethod
    @checked
    def parse(text: str) -> HostProgram:
        """Parses the text of a host program.

        Raises ParseError with the line and the column if the text is not valid.
        """
        from hostweave.host_ir.text import parse_host

        return parse_host(text)

    @property
    @analysis
    def arguments(self) -> tuple[Parameter, ...]:
        """Tensors that a caller passes: the inputs, with the tensors of each parameter group in place of the group."""
        return tuple(_one_by_one(self.inputs, {}))

    @property
    @analysis
    def results(self) -> tuple[Parameter, ...]:
        """Tensors that a caller gets: the outputs, with the tensors of each parameter group in place of the group."""
        return tuple(_one_by_one(self.outputs, {p.name: p.group.names for p in self.inputs if p.group}))

    @analysis
    def depths(self) -> dict[str, int]:
        """Maps each name of the first dim of a parameter group to the number of tensors of the group."""
        grouped = ((p.type.shape[0].name, p.group) for p in (*self.inputs, *self.outputs) if p.group)
        return {name: len(group.names) for name, group in grouped if name}

    @analysis
    def given_sizes(self) -> tuple[str, ...]:
        """Names of the symbolic sizes, except the depths of parameter groups."""
        return tuple(name for name in self.symbols() if name not in self.depths())

    def channel(self, name: str) -> Channel:
        return next(channel for channel in self.channels if channel.name == name)

    @property
    def optional_transports(self) -> frozenset[Transport]:
        """Transports of the program that some machines cannot use."""
        return frozenset(channel.transport for channel in self.channels if channel.transport.is_optional)

    @property
    def has_signals(self) -> bool:
        """True if ranks may signal each other. The counts of signals continue from call to call."""
        return any(channel.transport.carries >= SIGNALS for channel in self.channels)

    @property
    def libraries(self) -> frozenset[str]:
        return frozenset(library for i in self.instructions() for library in i.libraries)

    def instructions(self) -> Iterator[Instruction]:
        return (i for body in (*(function.body for function in self.functions), self.body) for i in walk(body))

    def local_type(self, parameter: Parameter) -> BufferType:
        return parameter.type.local(self.mesh, self.uneven)

    @property
    def windows(self) -> tuple[str, ...]:
        return tuple(p.name for p in (*self.inputs, *self.outputs) if p.in_window)

    @analysis
    def symbols(self) -> tuple[str, ...]:
        """Names of the symbolic sizes of inputs and outputs."""
        shapes = [size for p in (*self.inputs, *self.outputs) for size in p.type.shape]
        return tuple(dict.fromkeys(name for size in shapes for name in size.symbols))


def _one_by_one(parameters: Iterable[Parameter], groups: Mapping[str, tuple[str, ...]]) -> Iterator[Parameter]:
    for p, number, name in one_by_one(parameters):
        if number is None:
            yield p
        else:
            memory = groups[p.memory][number] if p.memory else ""
            yield replace(p, name=name, type=replace(p.type, dims=p.type.dims[1:]), memory=memory, group=None)


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def defined_types(program: HostProgram) -> Iterator[tuple[str, BufferType]]:
    """Yields names and local types of parameters, buffers and views, except in functions. Yields a name of two bodies twice."""
    types = {p.name: program.local_type(p) for p in (*program.inputs, *program.outputs)}
    yield from types.items()
    for instruction in walk(program.body):
        defined = instruction.defined(types)
        types.update(defined)
        yield from defined.items()


@analysis
def buffer_types(program: HostProgram) -> dict[str, BufferType]:
    """Local types of parameters, buffers and views outside of functions."""
    return dict(defined_types(program))
