"""main.cpp of an exported project."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from hostweave.base.errors import ProgramError
from hostweave.emit import context
from hostweave.emit.arguments import Argument
from hostweave.emit.cpp import CppExprPrinter
from hostweave.emit.meshes import coordinate, membership, place
from hostweave.emit.parts import multiples
from hostweave.emit.program import Program
from hostweave.host_ir.calls import dedupe_functions
from hostweave.host_ir.ir import HostProgram, Parameter
from hostweave.types.mesh import Mesh
from hostweave.types.size import Factor

SIZE = 64  # of every symbolic dim, where the user gives no other: the next multiple that the program takes
RANK = "r"
# Targets that are CMake's own or the runtime's, and folders of a build.
_OF_CMAKE = (
    "CMakeFiles",
    "all",
    "clean",
    "edit_cache",
    "help",
    "hostweave_cpu_device",
    "install",
    "list_install_components",
    "package",
    "rebuild_cache",
    "runtime",
    "test",
)


@dataclass(frozen=True)
class DefaultSize:
    label: str
    name: str
    value: int


@dataclass(frozen=True)
class Channel:
    """How rank r finds its channel: ranks of one color are a channel, in the order of their place."""

    key: str  # the mesh and the axes
    color: str
    place: str
    size: int
    on: str  # the condition that rank r is in its mesh


@dataclass(frozen=True)
class Tensor:
    field: str
    cpp: str
    dtype: str
    shape: str


@dataclass(frozen=True)
class Input(Tensor):
    seed: str


@dataclass(frozen=True)
class Output(Tensor):
    name: str
    twin: str  # the first rank that holds the same
    on: str  # the condition that rank r has it


@dataclass(frozen=True)
class Main:
    executable: str
    sizes: tuple[DefaultSize, ...]
    channels: tuple[Channel, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]

    @property
    def settings(self) -> tuple[str, ...]:
        """What may be set when it is called: the name, and where the value is."""
        return (*(f'{{"{size.label}", &shared.sizes.{size.name}}}' for size in self.sizes), '{"repetitions", &shared.repetitions}')

    @property
    def defaults(self) -> tuple[str, ...]:
        return tuple(f".{size.name} = {size.value}" for size in self.sizes)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Initializers of the members that hold them."""
        return tuple(f"{x.field}({x.dtype}, {x.shape})" for x in (*self.inputs, *self.outputs))

    @property
    def input_tensors(self) -> tuple[str, ...]:
        return tuple(f"tensors.{x.field}" for x in self.inputs)

    @property
    def output_tensors(self) -> tuple[str, ...]:
        return tuple(f"tensors.{y.field}" for y in self.outputs)


def main_view(view: Program) -> Main:
    """What main.cpp says beside the program itself."""
    program, mesh = view.ir, view.mesh
    divisors = _divisors(dedupe_functions(program))
    integers = CppExprPrinter(mesh, {label: f"sizes.{name}" for label, name in zip(program.symbols(), view.sizes, strict=False)}, divisors)

    def tensor(parameter: Parameter, argument: Argument) -> tuple[str, str, str, str]:
        cpp = "uint8_t" if argument.cpp == "bool" else argument.cpp  # a std::vector<bool> has no data()
        return argument.field, cpp, argument.dtype, integers.extents(parameter.type.local_shape(mesh))

    return Main(
        executable=executable_of(program.name),
        sizes=tuple(
            DefaultSize(label, name, -(-SIZE // divisors.get(label, 1)) * divisors.get(label, 1))
            for label, name in zip(program.symbols(), view.sizes, strict=False)
        ),
        channels=tuple(_channel(channel, mesh) for channel in view.channels),
        inputs=tuple(
            Input(*tensor(parameter, x), _seed(number, parameter, mesh))
            for number, (parameter, x) in enumerate(zip(program.inputs, view.inputs, strict=True))
        ),
        outputs=tuple(
            Output(*tensor(parameter, y), y.name, _twin(parameter, mesh), _condition(parameter.type.mesh_in(mesh), mesh))
            for parameter, y in zip(program.outputs, view.outputs, strict=True)
        ),
    )


def executable_of(program: str) -> str:
    """The name of the program's executable."""
    return f"{program}_program" if program in _OF_CMAKE else program


def _divisors(program: HostProgram) -> dict[Factor, int]:
    """What divides the sizes that main.cpp takes: there all ranks hold as much, also where the program would take less."""
    result = multiples(program)
    for parameter in (*program.inputs, *program.outputs):
        for dim in parameter.type.dims:
            ranks = parameter.type.mesh_in(program.mesh).size_of(dim.axes)
            if dim.extent.is_uneven(ranks, ()):
                padded = -(-int(dim.extent) // ranks) * ranks
                raise ProgramError(f"export: %{parameter.name}: main.cpp shares dim {dim} evenly by {ranks} ranks; pad it to {padded}")
            if len(dim.extent.factors) == 1 and isinstance(name := dim.extent.factors[0], str):
                result[name] = lcm(result.get(name, 1), ranks)
    return result


def _channel(channel: context.Channel, program: Mesh) -> Channel:
    mesh, axes = channel.ir.mesh, channel.ir.axes
    others = tuple(name for name, _ in mesh.axes if name not in axes)
    key = f'"{mesh}", "{channel.along}"' if channel.flag else f'kMesh, "{channel.along}"'
    return Channel(key, place(mesh, others, RANK), place(mesh, axes, RANK), channel.ir.size, _condition(mesh, program))


def _condition(mesh: Mesh, program: Mesh) -> str:
    """Whether rank r is in a mesh, nothing where all are."""
    return "" if mesh is program else membership(mesh, program.size, RANK)


def _seed(number: int, parameter: Parameter, mesh: Mesh) -> str:
    """Ranks that hold the same block of an input make the same numbers."""
    own = place(parameter.type.mesh_in(mesh), parameter.type.axes, RANK)
    if own == "0":
        return str(number)
    apart = f"{mesh.size} * " + (f"({own})" if " " in own else own)
    return f"{number} + {apart}" if number else apart


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
