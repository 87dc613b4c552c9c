"""From a host program to the view of it that the templates lay out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hostweave.base.errors import Location, ProgramError
from hostweave.emit import kernel_views, program_views
from hostweave.emit.arena import arena_plan
from hostweave.emit.arguments import argument, inputs_of, requirements_of
from hostweave.emit.cpp import CppExprPrinter
from hostweave.emit.instructions import CALLER, Emitter
from hostweave.emit.kernels import C_FUNCTIONS
from hostweave.emit.meshes import RANK, coordinate, is_run, membership
from hostweave.emit.names import Names, is_reserved
from hostweave.emit.parts import multiples, part, part_name, part_names, whole
from hostweave.emit.shared import WORKSPACE, Shared
from hostweave.emit.templates import lay_out
from hostweave.fusion_ir.user_kernel import Source
from hostweave.host_ir import ir
from hostweave.host_ir.calls import bodies, dedupe_functions


def program_view(program: ir.HostProgram) -> program_views.Program:
    """Everything that the generated sources say. Raises ProgramError for what has no C++."""
    names, flat = Names(taken=map(_function_of, program.sources)), dedupe_functions(program)
    sizes = {name: names.of(name, "size", C_FUNCTIONS) for name in program.symbols()}
    sizes |= {name: names.of(part_name(name, program.mesh), "size") for name in part_names(flat)}
    integers = CppExprPrinter(program.mesh, sizes, multiples(flat))
    shared = Shared(program, names, integers)
    functions = tuple(_function(block, shared) for block in bodies(program)[:-1])
    emitter = Emitter(program, shared)
    body = emitter.body(program.body)
    inputs, outputs = inputs_of(flat, emitter), tuple(argument(program, p, emitter, set(sizes)) for p in program.outputs)
    return program_views.Program(
        name=program.name,
        namespace=Names().of(program.name),
        title=_title(program),
        text=tuple(str(program).splitlines()),
        mesh=str(program.mesh),
        axes=tuple(program_views.Axis(name, size) for name, size in program.mesh.axes),
        world=program.mesh.size,
        inputs=inputs,
        outputs=outputs,
        sizes=tuple(sizes.values()),
        parts=tuple(part(program, integers, name) for name in part_names(flat) if whole(name).is_int),
        flags=tuple(program_views.Flag(member, membership(mesh, program.mesh.size), str(mesh)) for mesh, member in shared.flags.items()),
        coordinates=_coordinates(integers, body),
        routes=tuple(shared.routes.values()),
        channels=tuple(shared.channels.values()),
        streams=tuple(shared.streams.values()),
        events=tuple(shared.events.values()),
        plans=tuple(replace(plan, on=shared.flag_of_plan(key)) for key, plan in shared.plans.items()),
        temporaries=_temporaries(shared),
        memory=_memory(shared, emitter),
        kernels=tuple(kernel.view for kernel in shared.kernels.values()),
        sources=tuple(map(_source, {source.function: source for source in program.sources}.values())),
        functions=functions,
        body=body,
        requirements=tuple(requirements_of(flat, integers)),
        headers=_headers(shared),
        source_headers=_source_headers(flat, shared),
    )


def _function(block: ir.HostProgram, shared: Shared) -> program_views.Function:
    emitter = Emitter(block, shared, block.name)
    body, integers = emitter.body(block.body), shared.integers
    memory = arena_plan(emitter.steps, shared)

    def param(parameter: ir.Parameter) -> str:
        buffer = emitter.buffers[parameter.name]
        name = buffer.text if parameter.name in emitter.used else f"/*{buffer.text}*/"
        return f"{'const ' if buffer.read_only else ''}{buffer.type.dtype.cpp}* {name}"

    return program_views.Function(
        name=shared.blocks[block.name],
        comment=_signature(block),
        params=(*map(param, (*block.inputs, *block.outputs)), f"cudaStream_t {CALLER}"),
        sizes=tuple(integers.sizes.values()) if _words(body) & set(integers.sizes.values()) else (),
        coordinates=_coordinates(integers, body),
        body=body,
        plan=shared.memory_of[block.name],
        memory=memory,
        memory_sizes=tuple(integers.sizes.values()) if _words(memory) & set(integers.sizes.values()) else (),
    )


def _coordinates(integers: CppExprPrinter, body: str) -> tuple[program_views.Coordinate, ...]:
    """The places of this rank that a body names, computed once."""
    words = _words(body)
    return tuple(
        program_views.Coordinate(name, coordinate(mesh, axis) if axis else RANK)
        for (mesh, axis), name in integers.coordinates.items()
        if name in words
    )


def _words(text: str) -> set[str]:
    """Every name in C++ that is no member's."""
    return set(re.findall(r"(?<![\w.:])[A-Za-z_]\w*", re.sub("//.*", "", text)))


def _title(program: ir.HostProgram) -> str:
    return f"{program.name}: {_signature(program)} on {program.mesh}"


def _signature(program: ir.HostProgram) -> str:
    inputs, outputs = (", ".join(f"{p.name}: {p.type}" for p in parameters) for parameters in (program.inputs, program.outputs))
    return f"({inputs}) -> ({outputs})"


def _memory(shared: Shared, emitter: Emitter) -> str:
    """What `prepare` tells the arena."""
    workspace = lay_out("memory_allocate", member=WORKSPACE, count="hw::kWorkspaceBytes") if shared.needs_workspace else ""
    return workspace + arena_plan(emitter.steps, shared)


def _temporaries(shared: Shared) -> tuple[program_views.Temporary, ...]:
    workspace = program_views.Temporary(f"char* {WORKSPACE} = nullptr", WORKSPACE, "", "of the matmuls on the caller's stream")
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


# --- kernels of the user -----------------------------------------------------------------------------------------------


def _function_of(source: Source) -> str:
    """The name that its C++ gives it, which has to stay."""
    if is_reserved(source.function) or source.function in ("rank", *C_FUNCTIONS):
        raise ProgramError(f"kernel: generated code uses the name {source.function}; rename the function", source.location)
    return source.function


def _source(source: Source) -> kernel_views.Source:
    declaration = source.signature
    assert declaration is not None
    cpu = _text(source.cpu, source.cpu_location, source.function) if source.cpu else None
    return kernel_views.Source(source.function, declaration, _text(source.lines, source.location, source.function), cpu)


def _text(lines: Sequence[str], location: Location | None, function: str) -> kernel_views.Text:
    """The lines with those blank that belong before the namespace."""
    is_include = [line.lstrip().startswith("#include") for line in lines]
    kept = tuple("" if included else line for line, included in zip(lines, is_include, strict=True))
    file, line = (location.file, location.line) if location else (f"the source of {function}", 1)
    return kernel_views.Text(tuple(line for line, included in zip(lines, is_include, strict=True) if included), kept, line, file)
