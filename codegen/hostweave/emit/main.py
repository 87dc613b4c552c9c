"""main.cpp of an exported project."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hostweave.emit import context
from hostweave.emit.arguments import Argument
from hostweave.emit.cpp import CppExprPrinter
from hostweave.emit.layers import Layers
from hostweave.emit.layout import braced
from hostweave.emit.meshes import coordinate, membership, rank_in_group
from hostweave.emit.names import Names
from hostweave.emit.program import Program
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies, dedupe_functions
from hostweave.host_ir.ir import Parameter
from hostweave.host_ir.size_requirements import multiples
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import DType, f16, f32
from hostweave.types.zigzag import Zigzag

SIZE = 64  # of every symbolic dim, where the user gives no other: the next multiple that the program takes
RANK, INDEX = "r", "i"
# Targets that are CMake's own or the runtime's, and folders of a build.
_OF_CMAKE = """
CMakeFiles all clean edit_cache help hostweave_cpu_device install list_install_components package rebuild_cache runtime test
"""


class RankChannel:
    """How rank r finds its channel: ranks of one color are a process group, in the order of their numbers in it."""

    def __init__(self, of: context.ChannelMember, program: Mesh):
        mesh, axes = of.ir.mesh, of.ir.axes
        others = tuple(name for name, _ in mesh.axes if name not in axes)
        self.of, self.color, self.rank_in_group = of, rank_in_group(mesh, others, RANK), rank_in_group(mesh, axes, RANK)
        self.on = _condition(mesh, program)  # that rank r is in its mesh


@dataclass(frozen=True)
class Tensor:
    label: str  # C++ for the user's name
    field: str
    cpp: str
    dtype: str
    dims: str
    number: int  # among the inputs
    twin: str  # the first rank that holds the same
    on: str  # the condition that rank r has it

    @property
    def initializer(self) -> str:
        return f"{self.field}({self.dtype}, part, {self.dims})"


class TensorsInTurn:
    """An array of structs that have what each call of a function takes and gives of its own."""

    def __init__(self, view: Program, arrays: Sequence[Layers], tensors: Mapping[str, Tensor]):
        fields = Names()
        sides: dict[str, list[Tensor]] = {"in": [], "out": []}
        self.members_of: dict[str, list[Tensor]] = {}  # an array of the program's inputs or outputs, by the first name that it has
        for each in arrays:
            labelled = [(tensors[name], pattern.cpp(INDEX)) for name, pattern in zip(each.names[0], each.taken.patterns, strict=True)]
            own = [replace(tensor, label=label, field=fields.of(tensor.field, tensor.label)) for tensor, label in labelled]
            self.members_of[each.names[0][0]] = own
            sides[each.side] += own
        self.struct, self.field = view.context.names.of(f"{arrays[0].base}Tensors", "struct"), arrays[0].field
        self.count, self.inputs, self.outputs = len(arrays[0].names), sides["in"], sides["out"]
        self.members = [*self.inputs, *self.outputs]


class Reference:
    """What the results are compared with: the same math on one device, emitted as a program of its own.

    With values of these dtypes. Both programs round, each in an order of its own.
    """

    def __init__(self, program: Program, dtypes: Iterable[DType]):
        floats = [dtype for dtype in dtypes if dtype.kind == "float"]
        matmuls = [i for body in bodies(program.ir) for i in tree.walk(body.body) if isinstance(i, ir.Matmul)]
        floats += [f16 for i in matmuls if i.precision]  # TF32 has the digits of f16
        coarsest = max(floats, key=lambda dtype: dtype.roundoff, default=f32)  # which says how close results are
        self.program, self.coarsest, self.roundoff = program, coarsest.name, coarsest.roundoff.hex()
        self.roundoffs = 4**coarsest.itemsize  # that are allowed


class Main:
    """What main.cpp says beside the program itself: with a reference, or why there is none."""

    def __init__(self, view: Program, reference: Reference | str):
        program, mesh = view.ir, view.mesh
        divisors = multiples(dedupe_functions(program))
        named = list(zip(program.symbols(), view.sizes, strict=False))
        integers = CppExprPrinter(mesh, {label: f"sizes.{name}" for label, name in named}, divisors)
        parameters = zip((*program.inputs, *program.outputs), (*view.inputs, *view.outputs), strict=True)
        tensors = {x.name: _tensor(number, parameter, x, mesh, integers) for number, (parameter, x) in enumerate(parameters)}
        self.executable, self.reference = executable_of(program.name), reference
        self.folder = f"programs/{view.namespace}/"
        # By their folders.
        self.programs = {self.folder: view} | ({"reference/": reference.program} if isinstance(reference, Reference) else {})
        # The user's name, that in C++, and the value by default.
        self.sizes = tuple((label, name, -(-SIZE // (own := divisors.get(label, 1))) * own) for label, name in named)
        self.channels = tuple(RankChannel(channel, mesh) for channel in view.channels)
        of_calls = groupby(sorted(view.layers, key=_calls), key=_calls)
        self.layers = tuple(TensorsInTurn(view, [*arrays], tensors) for _, arrays in of_calls)
        # Without those in arrays.
        self.inputs = tuple(tensors[x.name] for x in view.inputs if x.name not in view.context.places)
        self.outputs = tuple(tensors[y.name] for y in view.outputs if y.name not in view.context.places)

    @property
    def has_reference(self) -> bool:
        return isinstance(self.reference, Reference)

    @property
    def settings(self) -> tuple[str, ...]:
        """What may be set when it is called: the name, and where the value is."""
        sizes = (f'{{"{label}", &shared.sizes.{name}}}' for label, name, _ in self.sizes)
        return (*sizes, *(f'{{"{name}", &shared.{name}}}' for name in ("repetitions", *(("roundoffs",) if self.has_reference else ()))))

    @property
    def defaults(self) -> tuple[str, ...]:
        return tuple(f".{name} = {value}" for _, name, value in self.sizes)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The files of kernels, which are CUDA or C++."""
        return tuple(f"{folder}kernels.cu" for folder, program in self.programs.items() if program.kernel_names)

    @property
    def sources(self) -> tuple[str, ...]:
        """Those of the library."""
        own = ("c_api.cpp", "join.cpp", "program.cpp", *(("kernels.cu",) if self.programs[self.folder].kernel_names else ()))
        return tuple(self.folder + path for path in own)

    @property
    def sources_of_reference(self) -> tuple[str, ...]:
        files = [path for path in self.kernels if not path.startswith(self.folder)]
        return ("reference/program.cpp", *files) if self.has_reference else ()


def _tensor(number: int, parameter: Parameter, argument: Argument, mesh: Mesh, integers: CppExprPrinter) -> Tensor:
    cpp = parameter.type.dtype.cpp.replace("bool", "uint8_t")  # a std::vector<bool> has no data()
    own = parameter.type.mesh_in(mesh)
    shards = [(str(own.size_of(dim.axes)), rank_in_group(own, dim.axes, RANK)) if dim.axes else () for dim in parameter.type.dims]
    shards = [(*of, "true") if isinstance(dim.axes, Zigzag) else of for of, dim in zip(shards, parameter.type.dims, strict=True)]
    dims = braced(braced((integers.size(dim.size), *of)) for dim, of in zip(parameter.type.dims, shards, strict=True))
    return Tensor(argument.label, argument.member, cpp, argument.dtype, dims, number, _twin(parameter, mesh), _condition(own, mesh))


def _calls(layers: Layers) -> tuple[str, int]:
    """Of which function, and how many."""
    return layers.function, len(layers.names)


def executable_of(program: str) -> str:
    """The name of the program's executable."""
    return f"{program}_program" if program in _OF_CMAKE.split() else program


def _condition(mesh: Mesh, program: Mesh) -> str:
    """Whether rank r is in a mesh, nothing where all are."""
    return "" if mesh is program else membership(mesh, program.size, RANK)


def _twin(parameter: Parameter, program: Mesh) -> str:
    """The first rank that holds what rank r holds of an output; r itself where that is no matter of arithmetic."""
    mesh = parameter.type.mesh_in(program)
    if not parameter.type.axes:
        return str(mesh.all_ranks[0])
    text = RANK
    for at, (axis, size) in enumerate(mesh.axes):
        if axis not in parameter.type.axes and size > 1:
            inner = mesh.size_of(tuple(name for name, _ in mesh.axes[at + 1 :]))
            own = coordinate(mesh, axis, RANK)
            text += f" - {own}" + (f" * {inner}" if inner > 1 else "")
    return text if mesh.is_run else RANK
