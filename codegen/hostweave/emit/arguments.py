"""The arguments of a program, and the sizes that they bind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hostweave.emit.cpp import CUDA_TYPES, CppExprPrinter
from hostweave.emit.instructions import Emitter
from hostweave.emit.parts import Local, part_view, parts_of
from hostweave.host_ir import ir
from hostweave.host_ir.size_requirements import not_empty, not_negative
from hostweave.types.size import Atom, LocalSize, Size, Sum


@dataclass(frozen=True)
class SizeBinding:
    """A symbolic size, and what must divide it: 1 where its value already is a multiple."""

    label: str  # the user's name
    name: str
    value: str
    divisor: int
    parts: tuple[Local, ...]  # what follows from it


@dataclass(frozen=True)
class Argument:
    name: str  # the user's
    field: str
    type: str  # of what one rank holds: bf16[M/8, K]
    dtype: str
    cpp: str
    shape: str
    pattern: str  # the shape as far as it is known before this argument tells its sizes
    sizes: tuple[SizeBinding, ...]
    again: bool  # dims to check once its sizes are known
    used: bool
    on: str = ""  # the condition that this rank has it


@dataclass(frozen=True)
class _Binding:
    """The dim of an input that tells a symbolic size: the size is the dim times the number of its shards, if those are even."""

    name: str
    dim: int
    shards: int
    from_whole: bool = False  # what this rank holds does not tell it


def inputs_of(program: ir.HostProgram, emitter: Emitter) -> tuple[Argument, ...]:
    """The inputs in order: each tells the sizes that those before it do not."""
    parts = parts_of(program)
    known: set[Atom] = {part for part in parts if part.size.is_int}
    result = []
    for parameter in program.inputs:
        bindings: list[_Binding] = []
        for dim, extent in enumerate(program.local_type(parameter).shape):
            binding = _binding(program, dim, extent)
            if binding and parameter.type.mesh:
                binding = replace(binding, from_whole=True)
            if binding and binding.name not in {*known, *(b.name for b in bindings)}:
                bindings.append(binding)
        result.append(argument(program, parameter, emitter, known, bindings))
        for binding in bindings:
            known.update((binding.name, *(part for part in parts if part.size.name == binding.name)))
    return tuple(result)


def _binding(program: ir.HostProgram, dim: int, extent: Size) -> _Binding | None:
    """What a local extent such as `M/8` or `part(M, x)` tells."""
    part = extent.factor
    if isinstance(part, LocalSize) and part.size.name:
        return _Binding(part.size.name, dim, part.ranks_in(program.mesh), from_whole=True)
    name = (extent * extent.divisor).name
    return _Binding(name, dim, extent.divisor) if name else None


def argument(
    program: ir.HostProgram, parameter: ir.Parameter, emitter: Emitter, known: set[Atom], bindings: list[_Binding] | None = None
) -> Argument:
    type, integers = program.local_type(parameter), emitter.integers
    field = emitter.buffers[parameter.name].text
    is_open = [not set(extent.atoms) <= known for extent in type.shape]
    return Argument(
        name=parameter.name,
        field=field,
        type=str(type),
        dtype=CUDA_TYPES[type.dtype.name],
        cpp=type.dtype.cpp,
        shape=integers.extents(type.shape),
        pattern="{" + ", ".join("hw::kAny" if open else integers.alone(e) for e, open in zip(type.shape, is_open, strict=True)) + "}",
        sizes=tuple(_size(program, binding, field, integers) for binding in bindings or ()),
        again=sum(is_open) > len(bindings or ()) or any(binding.from_whole for binding in bindings or ()),
        used=parameter.name in emitter.used,
        on=emitter.context.flag(parameter.type.mesh) if parameter.type.mesh else "",
    )


def _size(program: ir.HostProgram, binding: _Binding, field: str, integers: CppExprPrinter) -> SizeBinding:
    multiple, dim = integers.multiples.get(binding.name, 1), f"in.{field}.dim({binding.dim})"
    is_multiple = binding.shards % multiple == 0 and not binding.from_whole
    if binding.from_whole:
        dim = f"in.{field}.whole_dim({binding.dim}, {binding.shards})"
    elif binding.shards > 1:
        dim += f" * {binding.shards}"
    return SizeBinding(
        label=binding.name,
        name=integers.sizes[binding.name],
        value=dim,
        divisor=1 if is_multiple else multiple,
        parts=tuple(part_view(program, integers, part) for part in parts_of(program) if part.size.name == binding.name),
    )


def requirements_of(program: ir.HostProgram, integers: CppExprPrinter) -> Iterator[str]:
    """Calls that check sizes: differences, those of which a reduction needs an element, and sums that ranks share."""
    for extent in not_negative(program):
        yield f'hw::expect_room("{str(extent).strip("()")}", {integers.alone(extent)})'
    for kind, extent in not_empty(program):
        yield f'hw::expect_elements("{kind}", "{str(extent).strip("()")}", {integers.alone(extent)})'
    for size, multiple in integers.multiples.items():
        if isinstance(size, Sum) and multiple > 1:
            yield f'hw::expect_divisible("{str(size).strip("()")}", {integers.sum(size).strip("()")}, {multiple})'
