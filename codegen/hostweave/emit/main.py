"""Values for the templates of an exported project, such as main.cpp, which runs, checks and times the library."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hostweave.emit import context
from hostweave.emit.arguments import CheckedArgument
from hostweave.emit.cpp import CppExprPrinter
from hostweave.emit.layout import braced
from hostweave.emit.meshes import coordinate, membership, rank_in_group
from hostweave.emit.program import ProgramSources
from hostweave.emit.structs import Structs
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies, dedupe_functions
from hostweave.host_ir.size_requirements import multiples
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import DType, TensorType, f16, f32
from hostweave.types.zigzag import Zigzag

SIZE = 64  # default of a symbolic size, which is rounded up to a multiple of the divisor that the program needs
RANK, INDEX = "r", "i"
# Names that CMake, the runtime or the build folder use.
_OF_CMAKE = """
CMakeFiles all clean edit_cache help hostweave_cpu_device install list_install_components package rebuild_cache runtime test
"""


class RankChannel:
    """C++ expressions for rank r in a channel. Ranks with equal `color` form a process group, in the order of `rank_in_group`."""

    def __init__(self, of: context.ChannelMember, program: Mesh):
        mesh, axes = of.ir.mesh, of.ir.axes
        others = tuple(name for name, _ in mesh.axes if name not in axes)
        self.of, self.color, self.rank_in_group = of, rank_in_group(mesh, others, RANK), rank_in_group(mesh, axes, RANK)
        self.on = _condition(mesh, program)  # C++ condition: rank r is in the channel's mesh


@dataclass(frozen=True)
class SampleTensor:
    label: str  # C++ of the user's name
    cpp: str
    dtype: str
    dims: str
    twin: str  # C++ of the rank whose shard rank r compares with: the first rank with the same shard, or r itself if there is no formula
    on: str  # C++ condition: rank r has a shard


# Tensors of one field of Inputs or Outputs. For an array of structs: its length, and the tensors of one struct. Otherwise: 0, and one
# tensor.
Field = tuple[int, tuple[SampleTensor, ...]]


class Reference:
    """Reference for the results: a separate program for the same computation on one device. The two programs round differently. The
    tolerance therefore depends on the coarsest of `dtypes` and of the matmul precisions."""

    def __init__(self, program: ProgramSources, dtypes: Iterable[DType]):
        floats = [dtype for dtype in dtypes if dtype.kind == "float"]
        matmuls = [i for body in bodies(program.ir) for i in tree.walk(body.body) if isinstance(i, ir.Matmul)]
        floats += [f16 for i in matmuls if i.precision]  # TF32 has the significand of f16.
        coarsest = max(floats, key=lambda dtype: dtype.roundoff, default=f32)
        self.program, self.coarsest, self.roundoff = program, coarsest.name, coarsest.roundoff.hex()
        self.roundoffs = 4**coarsest.itemsize  # tolerance in units of roundoff


class Main:
    """Values for the templates of an exported project. `reference` is the reference program, or the reason why there is none."""

    def __init__(self, view: ProgramSources, reference: Reference | str):
        program, mesh = view.ir, view.mesh
        divisors = multiples(dedupe_functions(program))
        named = list(zip(program.given_sizes(), view.sizes, strict=False))
        integers = CppExprPrinter(mesh, {label: f"sizes.{name}" for label, name in named}, divisors)
        types = {p.name: p.type for p in (*program.arguments, *program.results)}

        def fields(arguments: Iterable[CheckedArgument]) -> Iterator[Field]:
            for x in view.fields(arguments):
                if isinstance(x, Structs):
                    members = ((member, x.label(member.parameter, INDEX)) for member in view.members(x))
                    yield x.count, tuple(_tensor(types[member.name], member, label, mesh, integers) for member, label in members)
                else:
                    yield 0, (_tensor(types[x.name], x, x.label, mesh, integers),)

        self.executable, self.reference = executable_of(program.name), reference
        self.folder = f"programs/{view.namespace}/"
        self.programs = {self.folder: view} | ({"reference/": reference.program} if isinstance(reference, Reference) else {})
        # the user's name, the C++ name and the default value of each symbolic size
        self.sizes = tuple((label, name, -(-SIZE // (own := divisors.get(label, 1))) * own) for label, name in named)
        self.channels = tuple(RankChannel(channel, mesh) for channel in view.channels)
        self.inputs, self.outputs = tuple(fields(view.inputs)), tuple(fields(view.outputs))

    @property
    def has_reference(self) -> bool:
        return isinstance(self.reference, Reference)

    @property
    def settings(self) -> tuple[str, ...]:
        """Command-line settings, as C++ pairs of a name and an address."""
        sizes = (f'{{"{label}", &shared.sizes.{name}}}' for label, name, _ in self.sizes)
        return (*sizes, *(f'{{"{name}", &shared.{name}}}' for name in ("repetitions", *(("roundoffs",) if self.has_reference else ()))))

    @property
    def defaults(self) -> tuple[str, ...]:
        return tuple(f".{name} = {value}" for _, name, value in self.sizes)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Files with kernels, which are compiled as CUDA or as C++."""
        return tuple(f"{folder}kernels.cu" for folder, program in self.programs.items() if program.kernel_names)

    @property
    def sources(self) -> tuple[str, ...]:
        own = ("c_api.cpp", "join.cpp", "program.cpp", *(("kernels.cu",) if self.programs[self.folder].kernel_names else ()))
        return tuple(self.folder + path for path in own)

    @property
    def sources_of_reference(self) -> tuple[str, ...]:
        files = [path for path in self.kernels if not path.startswith(self.folder)]
        return ("reference/program.cpp", *files) if self.has_reference else ()


def _tensor(type: TensorType, argument: CheckedArgument, label: str, mesh: Mesh, integers: CppExprPrinter) -> SampleTensor:
    own = type.mesh_in(mesh)
    shards = [(str(own.size_of(dim.axes)), rank_in_group(own, dim.axes, RANK)) if dim.axes else () for dim in type.dims]
    shards = [(*of, "true") if isinstance(dim.axes, Zigzag) else of for of, dim in zip(shards, type.dims, strict=True)]
    dims = braced(braced((integers.size(dim.size), *of)) for dim, of in zip(type.dims, shards, strict=True))
    return SampleTensor(label, type.dtype.cpp, argument.dtype, dims, _twin(type, mesh), _condition(own, mesh))


def executable_of(program: str) -> str:
    """Name of the executable. The name is never in `_OF_CMAKE`."""
    return f"{program}_program" if program in _OF_CMAKE.split() else program


def _condition(mesh: Mesh, program: Mesh) -> str:
    """C++ condition that rank r is in a mesh. Empty for the program's mesh."""
    return "" if mesh is program else membership(mesh, program.size, RANK)


def _twin(type: TensorType, program: Mesh) -> str:
    """C++ of the first rank with the same shard of a tensor as rank r. If there is no formula, C++ of rank r itself."""
    mesh = type.mesh_in(program)
    if not type.axes:
        return str(mesh.all_ranks[0])
    text = RANK
    for at, (axis, size) in enumerate(mesh.axes):
        if axis not in type.axes and size > 1:
            inner = mesh.size_of(tuple(name for name, _ in mesh.axes[at + 1 :]))
            own = coordinate(mesh, axis, RANK)
            text += f" - {own}" + (f" * {inner}" if inner > 1 else "")
    return text if mesh.is_run else RANK
