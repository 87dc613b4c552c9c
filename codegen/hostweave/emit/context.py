"""State that all emitted bodies of a program share: C++ names, channels, streams, plans, kernels and temporaries."""

from dataclasses import dataclass

from hostweave.analysis.live_ranges import Begin
from hostweave.emit.cpp import CppExprPrinter
from hostweave.emit.kernels import C_FUNCTIONS, EmittedKernel, KernelEmitter
from hostweave.emit.layout import guarded
from hostweave.emit.meshes import rank_in_group
from hostweave.emit.names import CppNames
from hostweave.emit.plans import Products
from hostweave.emit.products import ProductEmitter
from hostweave.emit.structs import Passed, passed_to, structs_of
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.kernel_ir.name_outermost import named_sizes
from hostweave.kernel_ir.pipeline import stages
from hostweave.transports.transport import DEFAULT
from hostweave.types.machine import Machine
from hostweave.types.mesh import Mesh
from hostweave.types.size import FirstIndex, LocalSize, Share, Size
from hostweave.types.tensor import BufferType

WORKSPACE = "workspace_"


@dataclass(frozen=True)
class LaunchedKernel:
    """A kernel with its launch grid, and the sizes that a launch passes after the buffers."""

    kernel: str
    grid: str
    sizes: tuple[Size, ...]


PlanKey = tuple[object, ...]  # class of a plan, arguments of the constructor, arguments of `prepare`


@dataclass(frozen=True)
class ChannelMember:
    member: str
    ir: ir.Channel
    flag: str  # C++ member that is true if this rank is in the channel's mesh; empty for the program's mesh

    @property
    def along(self) -> str:
        return ", ".join(self.ir.axes)

    @property
    def key(self) -> str:
        return f'"{self.ir.mesh}", "{self.along}"' if self.flag else f'kMesh, "{self.along}"'

    @property
    def transport(self) -> str:
        """Last argument of the channel's lookup. Empty for the default transport."""
        return "" if self.ir.transport.name == DEFAULT else f", hw::Transport::{self.ir.transport.name}"


@dataclass(frozen=True)
class Plan:
    member: str
    kind: str  # runtime class, such as MatmulPlan
    made_with: tuple[str, ...]  # constructor arguments after the rank
    prepared_with: tuple[str, ...]


@dataclass(frozen=True)
class Temporary:
    declaration: str
    member: str
    count: str
    comment: str
    pool: str = ""  # pool in which each stream has its own copy; empty for a single buffer
    in_window: bool = False
    sizes: frozenset[str] = frozenset()  # C++ names that `count` uses


class ProgramContext:
    """Members and names of the program's C++ class, collected while bodies are emitted."""

    def __init__(self, program: ir.HostProgram, names: CppNames, integers: CppExprPrinter, machine: Machine):
        self.names, self.integers, self.machine = names, integers, machine
        self.functions = {f.name: names.of(f.name, "function") for f in program.functions}
        # C++ member function that plans the memory of a function
        self.memory_of = {f.name: names.of(f"{f.name}_memory", "function") for f in program.functions}
        for body in bodies(program)[::-1]:  # Claims the user's names before most generated names.
            for parameter in (*body.inputs, *body.outputs):
                names.of(parameter.name)
            for instruction in tree.walk(body.body):
                for name in tree.names(instruction, "define", "index"):
                    names.of(name)
        self.structs = tuple(structs_of(program, names))
        self.struct_of = {name: structs for structs in self.structs for name in structs.groups}  # parameter group -> its array of structs
        self.passed: dict[str, tuple[Passed, ...]] = {f.name: passed_to(program, f.name, self.structs) for f in program.functions}
        integers.coordinates[program.mesh, ""] = names.of("rank", "number of this rank")
        integers.coordinates.update({(program.mesh, axis): names.of(f"rank_{axis}", "coordinate") for axis, _ in program.mesh.axes})
        self.members = CppNames(("rank_", "arena_", "prepared_", WORKSPACE), suffix="_")
        self.streams = {pool.name: self.members.of(pool.name, "streams") for pool in program.streams}
        self.events = {pool.name: self.members.of(pool.name, "events") for pool in program.events}
        self.flags: dict[frozenset[int], tuple[str, Mesh]] = {}  # ranks of a submesh -> C++ flag, and a mesh with these ranks
        self.channels: dict[str, ChannelMember] = {}
        self.exchanges: dict[str, str] = {}  # C++ member of a channel -> member of the exchange that kernels on this channel use
        self.routes: dict[ir.Routes, tuple[str, list[str]]] = {}  # name and lines of each routing table
        self.plans: dict[PlanKey, Plan] = {}
        self.used_by_plans: set[str] = set()  # C++ names of sizes and coordinates in arguments of `prepare`
        self.uses_of_plan: dict[PlanKey, set[tuple[Mesh, str]]] = {}  # mesh, and C++ condition on sizes, for each use of a plan
        self.products = Products(program)
        self.declared = {kernel.name: kernel for kernel in program.kernels}
        self.user_kernels = {kernel.name: kernel for kernel in program.user_kernels}
        self.kernels: dict[tuple[object, ...], EmittedKernel] = {}  # `key` of an emitter -> emitted kernel
        self.launches: dict[tuple[ir.Kernel, tuple[BufferType, ...]], LaunchedKernel] = {}  # keyed by the arguments of `launched`
        self.temporaries: dict[Begin, Temporary] = {}
        self.needs_workspace = False  # True if the program needs a workspace for matmuls on the caller's stream

    def launched(self, kernel: ir.Kernel, buffers: tuple[BufferType, ...]) -> LaunchedKernel:
        """Launch of a kernel for buffers of the given types. Kernels that differ only in names share the definition of the first kernel."""
        if (kernel, buffers) not in self.launches:
            name = self.names.of(kernel.name, f"kernel {len(self.launches)}", C_FUNCTIONS)
            loops = stages(kernel, buffers, self.machine)[-1][1]
            emitter = (ProductEmitter if loops.products else KernelEmitter)(loops, self.integers, name)
            if emitter.key not in self.kernels:
                self.kernels[emitter.key] = emitter.emit()
            shared = self.kernels[emitter.key]
            if name != shared.name and kernel.name in self.declared:
                shared.others[kernel.name] = None
            sizes = (Size(1, (atom,)).replaced(named_sizes(emitter.ir)) for atom in emitter.atoms)
            self.launches[kernel, buffers] = LaunchedKernel(shared.name, emitter.loops.grid, tuple(sizes))
        return self.launches[kernel, buffers]

    def channel(self, channel: ir.Channel) -> ChannelMember:
        if channel.name not in self.channels:
            flag = "" if channel.mesh == self.integers.program else self.flag(channel.mesh)
            self.channels[channel.name] = ChannelMember(self.members.of(f"channel_{channel.name}", "channel"), channel, flag)
        return self.channels[channel.name]

    def exchange(self, channel: ir.Channel) -> str:
        return self.exchanges.setdefault(self.channel(channel).member, self.members.of(f"terms_on_{channel.name}", "exchange"))

    @property
    def index(self) -> str:
        """C++ loop index over the tensors of a parameter group."""
        return self.names.of("member", "number of a tensor")

    def flag(self, mesh: Mesh) -> str:
        """C++ member that is true if this rank is in a submesh."""
        ranks = frozenset(mesh.all_ranks)
        if ranks not in self.flags:
            self.flags[ranks] = self.members.of(f"on_{mesh.label}", str(mesh)), mesh
        return self.flags[ranks][0]

    def share_value(self, share: Share) -> str:
        """C++ of a local size or first index, such as `hw::local_size(M, 8, rank_.index())`. The value is 0 on ranks outside of the share's
        mesh."""
        program, function = self.integers.program, "ceil_div"
        arguments, mesh = [self.integers.size(share.size), str(share.ranks_in(program))], None
        if isinstance(share, LocalSize):
            mesh, function = share.mesh, "local_begin" if isinstance(share, FirstIndex) else "local_size"
            arguments.append(rank_in_group(share.mesh_in(program), share.axes))
        value = f"hw::{function}({', '.join(arguments)})"
        return f"{self.flag(mesh)} ? {value} : 0" if mesh else value

    def plans_prepared(self) -> str:
        plans = self.plans.items()
        return guarded((self.condition_of_plan(key), f"{plan.member}.prepare({', '.join(plan.prepared_with)});") for key, plan in plans)

    def condition_of_plan(self, key: PlanKey) -> str:
        """C++ condition under which a plan is prepared. Omits the mesh if the uses are on different meshes, and the sizes if the uses have
        different conditions on sizes."""
        ranks = {frozenset(mesh.all_ranks) for mesh, _ in self.uses_of_plan[key]}
        flag = self.flags[ranks.pop()][0] if len(ranks) == 1 and ranks.issubset(self.flags) else ""
        sizes = {condition for _, condition in self.uses_of_plan[key]}
        return " && ".join(filter(None, (flag, sizes.pop() if len(sizes) == 1 else "")))
