"""From a host program to the view of it that the templates lay out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import lcm

from hostweave.emit import views
from hostweave.emit.cpp import CUDA_TYPES, Integers
from hostweave.emit.instructions import CALLER, WORKSPACE, Emitter, Shared
from hostweave.emit.meshes import RANK, coordinate, is_run, label, membership, place
from hostweave.emit.names import Names
from hostweave.errors import Location, ProgramError
from hostweave.fusion.extent import Extent, block_of, is_sum, part_of
from hostweave.fusion.source import Source
from hostweave.fusion.types import Mesh, mesh_of_part
from hostweave.host import ir
from hostweave.host.blocks import bodies, with_each_block_once
from hostweave.host.expr import Size, leaves
from hostweave.host.requirements import Walk, not_negative, trip_counts, types_in


def program_view(program: ir.HostProgram) -> views.Program:
    """Everything that the generated sources say. Raises ProgramError for what has no C++."""
    names, flat = Names(taken=[source.function for source in program.sources]), with_each_block_once(program)
    sizes = {name: names.of(name, "size") for name in program.symbols()}
    sizes |= {name: names.of(_part_name(name, program.mesh), "size") for name in part_names(flat)}
    integers = Integers(program.mesh, sizes, multiples(flat))
    shared = Shared(program, names, integers)
    functions = tuple(_function(block, shared) for block in bodies(program)[:-1])
    emitter = Emitter(program, shared)
    body = emitter.body(program.body)
    inputs, outputs = _inputs(flat, emitter), tuple(_argument(program, p, emitter, set(sizes)) for p in program.outputs)
    return views.Program(
        name=program.name,
        namespace=Names().of(program.name),
        title=_title(program),
        text=tuple(str(program).splitlines()),
        mesh=str(program.mesh),
        axes=tuple(views.Axis(name, size) for name, size in program.mesh.axes),
        world=program.mesh.size,
        inputs=inputs,
        outputs=outputs,
        sizes=tuple(sizes.values()),
        parts=tuple(_part(program, integers, name) for name in part_names(flat) if _whole(name).is_int),
        flags=tuple(views.Flag(member, membership(mesh, program.mesh.size), str(mesh)) for mesh, member in shared.flags.items()),
        coordinates=_coordinates(integers, body),
        routes=tuple(shared.routes.values()),
        teams=tuple(shared.teams.values()),
        streams=tuple(shared.streams.values()),
        events=tuple(shared.events.values()),
        plans=tuple(replace(plan, on=shared.flag_of_plan(key)) for key, plan in shared.plans.items()),
        temporaries=_temporaries(shared),
        memory=_memory(shared, emitter),
        kernels=tuple(kernel.view for kernel in shared.kernels.values()),
        sources=tuple(map(_source, {source.function: source for source in program.sources}.values())),
        functions=functions,
        body=body,
        requirements=tuple(_requirements(flat, integers)),
        headers=_headers(shared),
        source_headers=_source_headers(flat, shared),
    )


def _function(block: ir.HostProgram, shared: Shared) -> views.Function:
    emitter = Emitter(block, shared, block.name)
    body, integers = emitter.body(block.body), shared.integers

    def param(parameter: ir.Parameter) -> str:
        buffer = emitter.buffers[parameter.name]
        name = buffer.text if parameter.name in emitter.used else f"/*{buffer.text}*/"
        return f"{'const ' if buffer.read_only else ''}{buffer.type.dtype.cpp}* {name}"

    return views.Function(
        name=shared.blocks[block.name],
        comment=_signature(block),
        params=(*map(param, (*block.inputs, *block.outputs)), f"cudaStream_t {CALLER}"),
        sizes=tuple(integers.sizes.values()) if _words(body) & set(integers.sizes.values()) else (),
        coordinates=_coordinates(integers, body),
        body=body,
        plan=shared.memory_of[block.name],
        memory=emitter.memory(),
        memory_sizes=tuple(integers.sizes.values()) if _words(emitter.memory()) & set(integers.sizes.values()) else (),
    )


def _coordinates(integers: Integers, body: views.Body) -> tuple[views.Coordinate, ...]:
    """The places of this rank that a body names, computed once."""
    words = _words(body)
    return tuple(
        views.Coordinate(name, coordinate(mesh, axis) if axis else RANK)
        for (mesh, axis), name in integers.coordinates.items()
        if name in words
    )


def _words(view: object) -> set[str]:
    """Every name in the C++ of a view."""
    if isinstance(view, str):
        return set(re.findall(r"[A-Za-z_]\w*", view))
    if isinstance(view, tuple):
        return {word for item in view for word in _words(item)}
    return {word for f in fields(view) for word in _words(getattr(view, f.name))} if isinstance(view, views.InstructionView) else set()


def _title(program: ir.HostProgram) -> str:
    return f"{program.name}: {_signature(program)} on {program.mesh}"


def _signature(program: ir.HostProgram) -> str:
    inputs, outputs = (", ".join(f"{p.name}: {p.type}" for p in parameters) for parameters in (program.inputs, program.outputs))
    return f"({inputs}) -> ({outputs})"


def _memory(shared: Shared, emitter: Emitter) -> views.Body:
    """What `prepare` tells the arena."""
    workspace = (views.Reserve(WORKSPACE, "hw::kWorkspaceBytes"),) if shared.needs_workspace else ()
    return (*workspace, *emitter.memory())


def _temporaries(shared: Shared) -> tuple[views.Temporary, ...]:
    workspace = views.Temporary(f"char* {WORKSPACE} = nullptr", WORKSPACE, "", "of the matmuls on the caller's stream")
    return (*((workspace,) if shared.needs_workspace else ()), *shared.temporaries.values())


def _headers(shared: Shared) -> tuple[str, ...]:
    """What program.h includes for its members."""
    optional = (
        ("matmul.h", shared.plans),
        ("streams.h", shared.streams or shared.events),
        ("types.h", shared.temporaries or shared.blocks),
    )
    return tuple(sorted(["arena.h", "rank.h", "tensor.h", *(header for header, needed in optional if needed)]))


def _source_headers(flat: ir.HostProgram, shared: Shared) -> tuple[str, ...]:
    """What program.cpp includes for its calls."""
    has_group = any(isinstance(i, ir.GROUPED) for i in ir.walk(flat.body))
    has_parts = bool(part_names(flat))
    optional = (
        ("group.h", has_group),
        ("index.h", shared.integers.calls_runtime),
        ("mesh.h", not all(map(is_run, shared.flags))),
        ("route.h", shared.routes),
        ("shards.h", has_parts),
        ("types.h", not (shared.temporaries or shared.blocks)),
    )
    runtime = sorted(["check.h", *(header for header, needed in optional if needed)])
    return (*(f"hostweave/{header}" for header in runtime), *(("kernels.h",) if shared.kernels or flat.sources else ()))


# --- arguments and the sizes that they tell ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Binding:
    """The dim of an input that tells a symbolic size: the size is the dim times the number of its shards, if those are even."""

    name: str
    dim: int
    shards: int
    from_whole: bool = False  # what this rank holds does not tell it


def _inputs(program: ir.HostProgram, emitter: Emitter) -> tuple[views.Argument, ...]:
    """The inputs in order: each tells the sizes that those before it do not."""
    known = {name for name in part_names(program) if _whole(name).is_int}
    result = []
    for parameter in program.inputs:
        bindings: list[_Binding] = []
        for dim, extent in enumerate(program.local_type(parameter).shape):
            binding = _binding(program, dim, extent)
            if binding and parameter.type.mesh:
                binding = replace(binding, from_whole=True)
            if binding and binding.name not in {*known, *(b.name for b in bindings)}:
                bindings.append(binding)
        result.append(_argument(program, parameter, emitter, known, bindings))
        for binding in bindings:
            known.update((binding.name, *(name for name in part_names(program) if str(_whole(name)) == binding.name)))
    for name in program.symbols():
        if name not in known:
            raise ProgramError(
                f"@{program.name}: no input has a dim {name}, so nothing tells its size; give it to an input, or write an int"
            )
    return tuple(result)


def _binding(program: ir.HostProgram, dim: int, extent: Extent) -> _Binding | None:
    """What a local extent such as `M/8` or `part(M, x)` tells."""
    if len(extent.names) != 1 or extent.coefficient != 1:
        return None
    if held := part_of(extent.names[0]):
        size, axes, _ = held
        ranks = mesh_of_part(extent.names[0], program.mesh).size_of(axes)
        return None if size.is_int else _Binding(str(size), dim, ranks, from_whole=True)
    return _Binding(extent.names[0], dim, extent.divisor)


def _argument(
    program: ir.HostProgram, parameter: ir.Parameter, emitter: Emitter, known: set[str], bindings: list[_Binding] | None = None
) -> views.Argument:
    type, integers = program.local_type(parameter), emitter.integers
    field = emitter.buffers[parameter.name].text
    is_open = [not set(extent.symbols) <= known for extent in type.shape]
    return views.Argument(
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
        on=emitter.shared.flag(parameter.type.mesh) if parameter.type.mesh else "",
    )


def _size(program: ir.HostProgram, binding: _Binding, field: str, integers: Integers) -> views.Size:
    multiple, dim = integers.multiples.get(binding.name, 1), f"in.{field}.dim({binding.dim})"
    is_multiple = binding.shards % multiple == 0 and not binding.from_whole
    if binding.from_whole:
        dim = f"in.{field}.whole_dim({binding.dim}, {binding.shards})"
    elif binding.shards > 1:
        dim += f" * {binding.shards}"
    return views.Size(
        label=binding.name,
        name=integers.sizes[binding.name],
        value=dim,
        divisor=1 if is_multiple else multiple,
        parts=tuple(_part(program, integers, name) for name in part_names(program) if str(_whole(name)) == binding.name),
    )


def _requirements(program: ir.HostProgram, integers: Integers) -> Iterator[str]:
    """Calls that check what is computed from sizes: differences, and sums that ranks share."""
    for extent in not_negative(program):
        yield f'hw::expect_room("{str(extent).strip("()")}", {integers.alone(extent)})'
    for name, multiple in integers.multiples.items():
        if is_sum(name) and multiple > 1:
            yield f'hw::expect_divisible("{name.strip("()")}", {integers.sum(name).strip("()")}, {multiple})'


def _source(source: Source) -> views.Source:
    declaration = source.signature
    assert declaration is not None
    cpu = _text(source.cpu, source.cpu_location, source.function) if source.cpu else None
    return views.Source(source.function, declaration, _text(source.lines, source.location, source.function), cpu)


def _text(lines: Sequence[str], location: Location | None, function: str) -> views.Text:
    """The lines with those blank that belong before the namespace."""
    is_include = [line.lstrip().startswith("#include") for line in lines]
    kept = tuple("" if included else line for line, included in zip(lines, is_include, strict=True))
    file, line = (location.file, location.line) if location else (f"the source of {function}", 1)
    return views.Text(tuple(line for line, included in zip(lines, is_include, strict=True) if included), kept, line, file)


# --- what follows from sizes ------------------------------------------------------------------------------------------


def part_names(program: ir.HostProgram) -> tuple[str, ...]:
    """The extents `ceil(M/8)` and `part(M, x)` of a program, in order of appearance."""
    names = [name for extent in _extents(program, ir.walk) for name in extent.names]
    names += [leaf.name for i in ir.walk(program.body) if isinstance(i, ir.Section) for leaf in leaves(i.start) if isinstance(leaf, Size)]
    return tuple(name for name in dict.fromkeys(names) if block_of(name) or part_of(name))


def _whole(name: str) -> Extent:
    """The size of which `ceil(M/8)` or `part(M, x)` is a part."""
    found = block_of(name) or part_of(name)
    assert found is not None
    return found[0]


def _part_name(name: str, program: Mesh) -> str:
    """`M_block_8`, `M_x` and `M_x_of_ranks_2_3`; of an int `block_8_of_10` and `x_of_10`."""
    size = _whole(name)
    if block := block_of(name):
        along = f"block_{block[1]}"
    else:
        _, axes, mesh = part_of(name) or ((), (), "")
        along = "_".join((*axes, *(("of", label(mesh_of_part(name, program))) if mesh else ())))
    return f"{along}_of_{size}" if size.is_int else f"{size}_{along}"


def _part_value(mesh: Mesh, name: str, size: str) -> str:
    """`hw::part(M, 8, rank_.index())`"""
    if block := block_of(name):
        return f"hw::block({size}, {block[1]})"
    held, mesh = part_of(name), mesh_of_part(name, mesh)
    assert held is not None
    return f"hw::part({size}, {mesh.size_of(held[1])}, {place(mesh, held[1])})"


def _part(program: ir.HostProgram, integers: Integers, name: str) -> views.Part:
    return views.Part(integers.sizes[name], _part_value(program.mesh, name, integers.extent(_whole(name))))


def multiples(program: ir.HostProgram) -> dict[str, int]:
    """What must divide each symbolic size for every dim and trip count of the program to be whole."""
    result: dict[str, int] = {}
    for extent in _extents(program, ir.walk_at_any_size):
        if len(extent.names) == 1:
            result[extent.names[0]] = lcm(result.get(extent.names[0], 1), extent.divisor)
    return result


def _extents(program: ir.HostProgram, walk: Walk) -> Iterator[Extent]:
    for type in types_in(program, walk):
        yield from type.shape
    yield from trip_counts(program, walk)
