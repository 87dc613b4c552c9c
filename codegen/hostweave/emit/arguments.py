"""Inputs and outputs of a program, the sizes that inputs bind, and the checks of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hostweave.emit.context import ProgramContext
from hostweave.emit.cpp import CUDA_TYPES, CppExprPrinter
from hostweave.emit.instructions import Buffer, Emitter
from hostweave.emit.layers import Words, in_loop
from hostweave.emit.meshes import part_view, parts_of
from hostweave.host_ir import ir
from hostweave.host_ir.size_requirements import not_empty, not_negative
from hostweave.types.size import Atom, LocalSize, Size, Sum


class SizeBinding:
    """A symbolic size that an input binds, and its divisor to check: 1 if the value is a multiple already."""

    def __init__(self, program: ir.HostProgram, binding: _Binding, path: str, integers: CppExprPrinter):
        multiple, self.value = integers.multiples.get(binding.name, 1), f"{path}.dim({binding.dim})"
        is_multiple = binding.shards % multiple == 0 and not binding.from_global
        if binding.from_global:
            self.value = f"{path}.global_dim({binding.dim}, {binding.shards})"
        elif binding.shards > 1:
            self.value += f" * {binding.shards}"
        self.label, self.name = binding.name, integers.sizes[binding.name]  # the user's name, and the C++ name
        self.divisor = 1 if is_multiple else multiple
        of_it = (part for part in parts_of(program) if part.size.name == binding.name)
        self.parts = tuple(part_view(program, integers, part) for part in of_it)  # local sizes derived from it


@dataclass(frozen=True)
class Argument:
    name: str  # the user's
    label: str  # C++ for it
    dtype: str
    shape: str
    pattern: str  # the shape before this argument binds its sizes; unknown dims are hw::kAny
    sizes: tuple[SizeBinding, ...]
    again: bool  # check the shape again once its sizes are bound
    buffer: Buffer  # the local buffer: bf16[M/8, K]
    used: bool
    place: Words  # path in the struct of inputs or outputs
    on: str = ""  # true on the ranks that hold it; empty if all do
    memory: Words = ()  # of an output: path of the input that was donated for it

    @property
    def path(self) -> str:
        return "".join(map(str, self.place))

    @property
    def member(self) -> str:
        """Name of the field in its struct."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class _Binding:
    """Dim of an input that binds a symbolic size: the dim times its number of shards, if the shards are even."""

    name: str
    dim: int
    shards: int
    from_global: bool = False  # the local dim alone does not determine the size


def inputs_of(program: ir.HostProgram, emitter: Emitter) -> tuple[Argument, ...]:
    """Inputs in order. Each binds the sizes that no earlier input binds."""
    parts = parts_of(program)
    known: set[Atom] = {part for part in parts if part.size.is_int}
    result = []
    for parameter in program.inputs:
        bindings: list[_Binding] = []
        for dim, size in enumerate(program.local_type(parameter).shape):
            binding = _binding(program, parameter, dim, size)
            if binding and binding.name not in {*known, *(b.name for b in bindings)}:
                bindings.append(binding)
        result.append(argument(program, parameter, emitter, known, bindings))
        for binding in bindings:
            known.update((binding.name, *(part for part in parts if part.size.name == binding.name)))
    return tuple(result)


@dataclass(frozen=True)
class CheckedInTurn:
    """Arguments that calls take one per call, checked in a loop over the calls."""

    index: str
    count: int
    members: tuple[Argument, ...]


def checks_of(arguments: Sequence[Argument], context: ProgramContext) -> Iterator[Argument | CheckedInTurn]:
    """Checks of inputs or outputs. Arguments that calls take one per call are checked in a loop.

    Arguments of the first call that bind sizes are checked before the loop.
    """
    by_name = {x.name: x for x in arguments}
    behind = dict[str, CheckedInTurn]()  # keyed by the last argument of the first call
    in_turn, alone = set[str](), set[str]()
    for layers in context.layers:
        members = []
        for column, pattern in zip(zip(*layers.names, strict=True), layers.taken.patterns, strict=True):
            given = [by_name[name] for name in column if name in by_name]
            memory = in_loop([x.memory for x in given], context.index)
            if len(given) == len(column) and memory is not None:
                place = (f"{layers.side}.{layers.field}[{context.index}].{given[0].member}",)
                members.append(replace(given[0], place=place, label=pattern.cpp(context.index), memory=memory))
                in_turn.update(column)
                alone.update(x.name for x in given[:1] if x.sizes)
        if members:
            behind[members[-1].name] = CheckedInTurn(context.index, len(layers.names), tuple(members))
    for x in arguments:
        if x.name not in in_turn or x.name in alone:
            yield replace(x, again=x.again and x.name not in in_turn)
        if x.name in behind:
            yield behind[x.name]


def _binding(program: ir.HostProgram, parameter: ir.Parameter, dim: int, size: Size) -> _Binding | None:
    """Binding that a local size such as `M/8` or `local(M, x)` gives, or None."""
    part = size.factor
    if isinstance(part, LocalSize) and part.size.name:
        return _Binding(part.size.name, dim, part.ranks_in(program.mesh), from_global=True)
    name = (size * size.divisor).name
    return _Binding(name, dim, size.divisor, from_global=parameter.type.mesh is not None) if name else None


def argument(
    program: ir.HostProgram, parameter: ir.Parameter, emitter: Emitter, known: set[Atom], bindings: list[_Binding] | None = None
) -> Argument:
    type, integers = program.local_type(parameter), emitter.integers
    is_open = [not set(size.atoms) <= known for size in type.shape]
    return Argument(
        name=parameter.name,
        label=f'"{parameter.name}"',
        place=(place := _place(program, parameter.name, emitter)),
        dtype=CUDA_TYPES[type.dtype.name],
        shape=integers.shape(type.shape),
        pattern="{" + ", ".join("hw::kAny" if open else integers.size(e) for e, open in zip(type.shape, is_open, strict=True)) + "}",
        sizes=tuple(SizeBinding(program, binding, "".join(map(str, place)), integers) for binding in bindings or ()),
        again=sum(is_open) > len(bindings or ()) or any(binding.from_global for binding in bindings or ()),
        buffer=emitter.buffers[parameter.name],
        used=parameter.name in emitter.used,
        on=emitter.context.flag(parameter.type.mesh) if parameter.type.mesh else "",
        memory=_place(program, parameter.memory, emitter) if parameter.memory else (),
    )


def _place(program: ir.HostProgram, name: str, emitter: Emitter) -> Words:
    """Path of an input or output from its struct: `in.x`, or `in.layers[0].w`."""
    side = "in" if name in {parameter.name for parameter in program.inputs} else "out"
    return emitter.context.places.get(name, (f"{side}.{emitter.buffers[name].text}",))


def requirements_of(program: ir.HostProgram, integers: CppExprPrinter) -> Iterator[str]:
    """Runtime calls that check sizes: differences, reduced dims that need an element, and sums that are sharded."""
    for dim_size in not_negative(program):
        yield f'hw::expect_room("{str(dim_size).strip("()")}", {integers.size(dim_size)})'
    for kind, dim_size in not_empty(program):
        yield f'hw::expect_elements("{kind}", "{str(dim_size).strip("()")}", {integers.size(dim_size)})'
    for size, multiple in integers.multiples.items():
        if isinstance(size, Sum) and multiple > 1:
            yield f'hw::expect_divisible("{str(size).strip("()")}", {integers.sum(size)}, {multiple})'
