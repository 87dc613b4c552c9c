"""Inputs and outputs of a program, the symbolic sizes that inputs determine, and run-time checks of arguments and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hostweave.emit.context import ProgramContext
from hostweave.emit.cpp import CUDA_TYPES, CppExprPrinter
from hostweave.emit.instructions import Emitter, OperandBuffer
from hostweave.emit.layout import GuardedStatement, guarded
from hostweave.emit.meshes import shares_of
from hostweave.host_ir import ir
from hostweave.host_ir.size_requirements import not_empty, not_negative
from hostweave.types.size import Atom, LocalSize, Size, Sum
from hostweave.types.tensor import BufferType


@dataclass(frozen=True)
class CheckedArgument:
    name: str  # the user's name
    label: str  # C++ expression of the user's name
    dtype: str
    shape: str
    pattern: str  # expected shape before this argument binds sizes; dims of unknown size are hw::kAny
    sizes: tuple[str, ...]  # declarations and checks of the sizes that this argument binds
    again: bool  # True if the check follows the bindings of sizes, and compares with `shape` instead of `pattern`
    buffer: OperandBuffer  # local buffer, such as bf16[M/8, K]
    used: bool
    parameter: str  # parameter of the program; for a group, all other fields describe the first tensor of the group
    path: str  # C++ path of the tensor, such as in.x
    member: str  # last name of the path
    on: str = ""  # C++ condition under which this rank has the tensor; empty if all ranks have the tensor
    memory: str = ""  # C++ path of the donated input whose memory an output uses
    donated: str = ""

    def statements(self) -> Iterator[GuardedStatement]:
        """Check of the tensor, and declarations of the sizes that the tensor binds. If `again`, the declarations come first."""
        type = self.buffer.type
        # C++ dtype and shape do not state the type if a dim is symbolic, or if a bool is stored as a byte.
        named = f', "{type}"' if type.dtype.name == "bool" or not all(size.is_int for size in type.shape) else ""
        shape = self.shape if self.again else self.pattern
        check = f"{self.path}.expect({self.label}, {self.dtype}, {shape}, rank_.device(){named});"
        if self.memory:
            check = f"HW_CHECK(hw::take_over({self.label}, {self.memory}, {self.path}, caller));"
        sizes = [("", line) for line in self.sizes]
        yield from (*sizes, (self.on, check)) if self.again else ((self.on, check), *sizes)


@dataclass(frozen=True)
class _Binding:
    """A dim of an input that determines a symbolic size: the local dim times the number of shards, or the global dim."""

    name: str
    dim: int
    shards: int
    from_global: bool = False  # True if shards may be uneven, or if only some ranks have the tensor

    def lines(self, program: ir.HostProgram, path: str, context: ProgramContext) -> Iterator[str]:
        """C++ that declares the size and the local sizes derived from it, and checks that the size has the divisors that are needed."""
        integers = context.integers
        multiple, name = integers.multiples.get(self.name, 1), integers.sizes[self.name]
        local = f"{path}.dim({self.dim})" + (f" * {self.shards}" if self.shards > 1 else "")
        yield f"const int64_t {name} = {f'{path}.global_dim({self.dim}, {self.shards})' if self.from_global else local};"
        if multiple > 1 and (self.from_global or self.shards % multiple):
            yield f'hw::expect_divisible("{self.name}", {name}, {multiple});'
        for share in shares_of(program):
            if share.size.name == self.name:
                yield f"const int64_t {integers.sizes[share]} = {context.share_value(share)};"


def inputs_of(program: ir.HostProgram, emitter: Emitter) -> tuple[CheckedArgument, ...]:
    """Inputs in order. Each input binds its symbolic sizes, except sizes that an earlier input binds."""
    shares = shares_of(program)
    known: set[Atom] = {*(share for share in shares if share.size.is_int), *program.depths()}
    result = []
    for parameter in program.inputs:
        bindings: list[_Binding] = []
        for dim, size in enumerate(_one(program, parameter).shape):
            binding = _binding(program, parameter, dim, size)
            if binding and binding.name not in {*known, *(b.name for b in bindings)}:
                bindings.append(binding)
        result.append(argument(program, parameter, emitter, known, bindings))
        for binding in bindings:
            known.update((binding.name, *(share for share in shares if share.size.name == binding.name)))
    return tuple(result)


def checks_of(arguments: Sequence[CheckedArgument], context: ProgramContext) -> str:
    return guarded(_statements(arguments, context))


def _statements(arguments: Sequence[CheckedArgument], context: ProgramContext) -> Iterator[GuardedStatement]:
    """Checks of tensors. A loop checks parameter groups. The first tensor of a group binds sizes before the loop."""
    last = {structs.field: x for x in arguments if (structs := context.struct_of.get(x.parameter))}
    # The sizes of tensors on submeshes come first, so that checks with one condition share a block.
    yield from (("", line) for x in arguments if x.on for line in x.sizes)
    for x in arguments:
        structs, sizes = context.struct_of.get(x.parameter), () if x.on else x.sizes
        yield from (("", line) for line in sizes) if structs else replace(x, sizes=sizes).statements()
        if structs and last[structs.field] is x:
            index, each = context.index, context.names.of("each", "struct of an array")
            yield "", f"for (int64_t {index} = 0; {index} < {structs.count}; ++{index}) {{"
            yield "", f"const auto& {each} = {structs.at(index)};"
            for member in (member for member in arguments if member.parameter in structs.groups):
                name, memory = member.parameter, context.struct_of[member.donated].member(member.donated, index) if member.donated else ""
                path, label = f"{each}.{structs.members[name]}", structs.label(name, index)
                yield from replace(member, path=path, label=label, memory=memory, sizes=(), again=True).statements()
            yield "", "}"


def _binding(program: ir.HostProgram, parameter: ir.Parameter, dim: int, size: Size) -> _Binding | None:
    """Binding of a symbolic size by a local size such as `M/8` or `local(M, x)`. None if the local size is of another form."""
    share = size.factor
    if isinstance(share, LocalSize) and share.size.name:
        return _Binding(share.size.name, dim, share.ranks_in(program.mesh), from_global=True)
    name = (size * size.divisor).name
    return _Binding(name, dim, size.divisor, from_global=parameter.type.mesh is not None) if name else None


def argument(
    program: ir.HostProgram, parameter: ir.Parameter, emitter: Emitter, known: set[Atom], bindings: Sequence[_Binding] = ()
) -> CheckedArgument:
    type, integers = _one(program, parameter), emitter.integers
    buffer, path = emitter.buffers[parameter.name], _path(program, parameter.name, emitter)
    structs = emitter.context.struct_of.get(parameter.name)
    is_open = [not set(size.atoms) <= known for size in type.shape]
    return CheckedArgument(
        name=(name := parameter.group.first if parameter.group else parameter.name),
        label=f'"{name}"',
        parameter=parameter.name,
        path=path,
        member=structs.members[parameter.name] if structs else buffer.text,
        dtype=CUDA_TYPES[type.dtype.name],
        shape=integers.shape(type.shape),
        pattern="{" + ", ".join("hw::kAny" if open else integers.size(e) for e, open in zip(type.shape, is_open, strict=True)) + "}",
        sizes=tuple(line for binding in bindings for line in binding.lines(program, path, emitter.context)),
        again=sum(is_open) > len(bindings) or any(binding.from_global for binding in bindings),
        buffer=replace(buffer, type=type),
        used=parameter.name in emitter.used and parameter.group is None,
        on=emitter.context.flag(parameter.type.mesh) if parameter.type.mesh else "",
        memory=_path(program, parameter.memory, emitter) if parameter.memory else "",
        donated=parameter.memory if parameter.group else "",
    )


def _one(program: ir.HostProgram, parameter: ir.Parameter) -> BufferType:
    type = program.local_type(parameter)
    return replace(type, shape=type.shape[1:]) if parameter.group else type


def _path(program: ir.HostProgram, name: str, emitter: Emitter) -> str:
    """C++ path of an input or output, such as `in.x`. For a parameter group, the path of the first tensor: `in.layers[0].w`."""
    side = "in" if name in {parameter.name for parameter in program.inputs} else "out"
    structs = emitter.context.struct_of.get(name)
    return structs.member(name, "0") if structs else f"{side}.{emitter.buffers[name].text}"


def requirements_of(program: ir.HostProgram, integers: CppExprPrinter) -> Iterator[str]:
    """C++ calls that check sizes at run time. Differences must not be negative. Dims of reductions without an identity must not be empty.
    A sum of sizes must be a multiple of its divisor."""
    for dim_size in not_negative(program):
        if not integers.depths.keys() >= {*dim_size.atoms}:
            yield f'hw::expect_room("{str(dim_size).strip("()")}", {integers.size(dim_size)})'
    for kind, dim_size in not_empty(program):
        yield f'hw::expect_elements("{kind}", "{str(dim_size).strip("()")}", {integers.size(dim_size)})'
    for size, multiple in integers.multiples.items():
        if isinstance(size, Sum) and multiple > 1:
            yield f'hw::expect_divisible("{str(size).strip("()")}", {integers.sum(size)}, {multiple})'
