"""A host program in the form that the templates need: the members of the C++ class, and the bodies of the functions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hostweave.base.errors import Location, ProgramError
from hostweave.emit.arena import arena_plan, calls_functions
from hostweave.emit.arguments import CheckedArgument, argument, checks_of, inputs_of, requirements_of
from hostweave.emit.context import WORKSPACE, ChannelMember, ProgramContext, Temporary
from hostweave.emit.cpp import CppExprPrinter
from hostweave.emit.instructions import Emitter
from hostweave.emit.kernels import C_FUNCTIONS
from hostweave.emit.layout import lay_out
from hostweave.emit.meshes import RANK, coordinate, membership, share_name, shares_of
from hostweave.emit.names import CppNames, is_reserved
from hostweave.emit.structs import Structs
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies, dedupe_functions
from hostweave.host_ir.size_requirements import multiples
from hostweave.types.machine import H200, Machine
from hostweave.types.size import Atom, FirstIndex, LocalSize


class EmittedFunction:
    """A function of the host program as a C++ member function that enqueues the work."""

    def __init__(self, function: ir.HostProgram, context: ProgramContext):
        emitter, integers = Emitter(function, context, function.name), context.integers
        parameters, passed = (*function.inputs, *function.outputs), context.passed[function.name]
        of_struct = {at: each for each in passed for at in each.members}
        self.name = context.functions[function.name]
        with integers.noting() as used:
            self.body = emitter.body(function.body)
        self.plan = context.memory_of[function.name]  # C++ member function that plans the memory
        with integers.noting() as used_by_memory:
            self.memory = arena_plan(emitter.memory_events, context)

        def param(at: int, parameter: ir.Parameter) -> str:
            if at in of_struct:
                return f"const {of_struct[at].structs.struct}& {of_struct[at].parameter}"
            buffer = emitter.buffers[parameter.name]
            name = buffer.text if parameter.name in emitter.used else f"/*{buffer.text}*/"
            return f"{'const ' if buffer.read_only else ''}{buffer.type.dtype.cpp}* {name}"

        self.params = (*dict.fromkeys(param(at, parameter) for at, parameter in enumerate(parameters)), f"cudaStream_t {ir.CALLER}")
        self.members = tuple(  # pointers to the struct members that the body uses
            lay_out("argument", member=f"{each.parameter}.{each.structs.members[group]}", buffer=emitter.buffers[parameters[at].name])
            for each in passed
            for at, group in each.members.items()
            if parameters[at].name in emitter.used
        )
        # The C++ function takes either all sizes of the program or no sizes.
        sizes = tuple(name for size, name in integers.sizes.items() if size not in integers.depths)
        self.sizes, self.memory_sizes = (sizes if names & {*sizes} else () for names in (used, used_by_memory))
        self.memory_takes_sizes = bool(self.memory_sizes) or calls_functions(emitter.memory_events)
        self.coordinates = _coordinates(integers, used)


@dataclass(frozen=True)
class Text:
    """C++ source of a user kernel, and its position in the user's file. The includes are separate, because they precede the namespace."""

    includes: tuple[str, ...]
    lines: tuple[str, ...]
    line: int
    file: str


class UserFunction:
    def __init__(self, source: UserKernel):
        assert source.signature is not None
        self.name, self.declaration = source.function, source.signature
        self.text = _text(source.lines, source.location, source.function)
        self.cpu = _text(source.cpu, source.cpu_location, source.function) if source.cpu else None


class ProgramSources:
    def __init__(self, program: ir.HostProgram, machine: Machine = H200):
        names, flat = CppNames(taken=map(_function_of, program.user_kernels)), dedupe_functions(program)
        depths: dict[Atom, str] = {name: str(count) for name, count in program.depths().items()}
        sizes: dict[Atom, str] = {name: names.of(name, "size", C_FUNCTIONS) for name in program.given_sizes()}
        sizes |= {share: names.of(share_name(share), f"size {share}") for share in shares_of(flat)}
        integers = CppExprPrinter(program.mesh, sizes | depths, multiples(flat), depths=program.depths())
        self.ir, self.name, self.namespace, self.mesh = program, program.name, CppNames().of(program.name, apart=C_FUNCTIONS), program.mesh
        self.machine = machine
        self.context = context = ProgramContext(program, names, integers, machine)
        self.functions = tuple(EmittedFunction(function, context) for function in bodies(program)[:-1])
        emitter = Emitter(program, context)
        with integers.noting() as used:
            self.body = emitter.body(program.body, ends_scope=False)
        self.inputs = inputs_of(flat, emitter)
        self.checks = checks_of(self.inputs, context)
        self.outputs = tuple(argument(program, p, emitter, {*sizes, *depths}) for p in program.outputs)
        new_outputs = [y for y in self.outputs if not y.memory]
        self.checks_of_outputs = checks_of(new_outputs, context)
        self.taken_over = checks_of([y for y in self.outputs if y.memory], context)  # outputs in donated memory
        self.sizes = tuple(sizes.values())
        self.sizes_of_outputs = self.sizes if any(not size.is_int for y in new_outputs for size in y.buffer.type.shape) else ()
        self.sizes_of_body = self.sizes if used & {*self.sizes} else ()
        # The input that binds a named size declares the shares of the size.
        shares = {share: (sizes[share], context.share_value(share)) for share in shares_of(flat) if not share.size.name}
        self.shares, self.shares_of_sums = ([shares[share] for share in shares if share.size.is_int == fixed] for fixed in (True, False))
        self.has_first_indices = any(isinstance(share, FirstIndex) for share in shares_of(flat))
        self.sizes_of_ranks = [sizes[share] for share in shares_of(flat) if isinstance(share, LocalSize) and share.mesh]
        self.coordinates, self.coordinates_of_plans = _coordinates(integers, used), _coordinates(integers, context.used_by_plans)
        workspace = Temporary(f"char* {WORKSPACE} = nullptr", WORKSPACE, "hw::kWorkspaceBytes", "cuBLASLt workspace of the caller's stream")
        workspaces = (workspace,) if context.needs_workspace else ()
        self.temporaries = (*workspaces, *context.temporaries.values())
        told = [f"memory.allocate({each.member}, {each.count});\n" for each in workspaces]
        self.memory = "".join(told) + arena_plan(emitter.memory_events, context)  # C++ in `prepare` that plans the arena
        self.kernels = tuple(context.kernels.values())
        self.user_kernels = tuple(map(UserFunction, {source.function: source for source in program.user_kernels}.values()))
        self.requirements = tuple(requirements_of(flat, integers))  # These checks come after all sizes are bound.
        plans = {plan.kind for plan in context.plans.values()}
        optional = (
            ("attention.h", bool(plans & {"AttentionPlan", "AttentionBackwardPlan"})),
            ("grouped.h", "GroupedPlan" in plans),
            ("matmul.h", "MatmulPlan" in plans),
            ("streams.h", context.streams or context.events),
            ("term_exchange.h", context.exchanges),
            ("types.h", context.temporaries or context.functions),
        )
        arena = "window.h" if self.window_channels else "arena.h"
        self.headers = tuple(sorted([arena, "optional.h", "rank.h", "tensor.h", *(header for header, needed in optional if needed)]))
        self.source_headers = _source_headers(flat, context)

    def fields(self, arguments: Iterable[CheckedArgument]) -> Iterable[CheckedArgument | Structs]:
        return dict.fromkeys(self.context.struct_of.get(x.parameter, x) for x in arguments)

    def members(self, structs: Structs) -> Iterable[CheckedArgument]:
        return (x for x in (*self.inputs, *self.outputs) if x.parameter in structs.groups)

    @property
    def kernel_names(self) -> list[str]:
        return [*(kernel.name for kernel in self.kernels), *(kernel.name for kernel in self.user_kernels)]

    @property
    def files(self) -> tuple[str, ...]:
        kernels, own = ("kernels.h", "kernels.cu") if self.kernel_names else (), ("user_kernels.cuh",) if self.user_kernels else ()
        return ("program.h", "program.cpp", *kernels, *own)

    @property
    def texts(self) -> Iterable[UserFunction]:
        """One user kernel per source text: a text may define several kernels."""
        return {(kernel.text, kernel.cpu): kernel for kernel in self.user_kernels}.values()

    @property
    def channels(self) -> list[ChannelMember]:
        return list(self.context.channels.values())

    @property
    def window_channels(self) -> list[str]:
        return [channel.member for channel in self.channels if channel.ir.transport.registers_arena]

    @property
    def prepares_together(self) -> bool:
        """True if all ranks must call `prepare` together, because the ranks exchange addresses in `prepare`."""
        return bool(self.window_channels or self.context.exchanges)

    @property
    def arena(self) -> str:
        return "WindowArena" if self.window_channels else "Arena"

    @property
    def own(self) -> list[tuple[str, str, str, str]]:
        """Some members of the C++ class, in order of construction: type, name, constructor arguments, comment."""
        context, windows = self.context, ", ".join(f"&{channel}" for channel in self.window_channels)
        calls, peers = "hw::TermExchange::calls(rank)" if context.exchanges else "", "peers access this memory"
        by_ranks = sorted(context.flags.values(), key=lambda known: tuple(known[1].all_ranks))
        flags = [(flag, membership(mesh, self.mesh.size, "rank.index()"), mesh) for flag, mesh in by_ranks]
        return [
            *(("const bool", flag, is_in, f"this rank is in {mesh}") for flag, is_in, mesh in flags),
            *(("const hw::Channel&", channel.member, _lookup(channel), _ranks_of(channel)) for channel in self.channels),
            *(("hw::Streams", context.streams[p.name], f'rank, "{p.name}", {p.count}', _counted(p, "stream")) for p in self.ir.streams),
            *(("hw::Events", context.events[p.name], f"{p.count}", _counted(p, "event")) for p in self.ir.events),
            *((f"hw::{plan.kind}", plan.member, ", ".join(("rank", *plan.made_with)), "") for plan in context.plans.values()),
            *(("hw::TermExchange", member, f"rank, {channel}", f"of {channel}") for channel, member in context.exchanges.items()),
            (f"hw::{self.arena}", "arena_", *((f"{{{windows}}}", peers) if windows else (calls, ""))),
        ]


def _lookup(channel: ChannelMember) -> str:
    found = f"rank.channel({channel.key}, {channel.ir.size}{channel.transport})"
    return f"{channel.flag} ? {found} : hw::no_channel()" if channel.flag else found


def _counted(pool: ir.Pool, word: str) -> str:
    return f"{pool.count} {word}{'s' * (pool.count != 1)}"


def _ranks_of(channel: ChannelMember) -> str:
    return f"{channel.ir.size} ranks along {channel.along}" + (f" of {channel.ir.mesh}" if channel.flag else "")


def _coordinates(integers: CppExprPrinter, used: set[str]) -> list[tuple[str, str]]:
    return [(name, coordinate(mesh, axis) if axis else RANK) for (mesh, axis), name in integers.coordinates.items() if name in used]


def _source_headers(flat: ir.HostProgram, context: ProgramContext) -> tuple[str, ...]:
    instructions = list(tree.walk(flat.body))
    optional = (
        ("blocks.h", any(i.packed for i in instructions)),
        ("collectives.h", any(isinstance(i, ir.Collective) and i.is_shared for i in instructions)),
        ("group.h", any(i.grouped for i in instructions)),
        ("marks.h", any(i.marks for i in instructions)),
        ("index.h", context.integers.calls_runtime or shares_of(flat) or not all(mesh.is_run for _, mesh in context.flags.values())),
        ("types.h", not (context.temporaries or context.functions)),
    )
    runtime = sorted(["check.h", *(header for header, needed in optional if needed)])
    return (*(f"hostweave/{header}" for header in runtime), *(("kernels.h",) if context.kernels or flat.user_kernels else ()))


def _function_of(source: UserKernel) -> str:
    """Function of a user kernel. Raises ProgramError if generated code uses the name of the function."""
    if is_reserved(source.function) or source.function in ("rank", *C_FUNCTIONS):
        raise ProgramError(f"kernel: generated code uses the name {source.function}; rename the function", source.location)
    return source.function


def _text(lines: Sequence[str], location: Location | None, function: str) -> Text:
    """Splits the source of a user kernel into includes and the rest. Blank lines replace the includes, so line numbers stay."""
    includes = tuple(line for line in lines if line.lstrip().startswith("#include"))
    file, line = (location.file, location.line) if location else (f"the source of {function}", 1)
    return Text(includes, tuple("" if line in includes else line for line in lines), line, file)
