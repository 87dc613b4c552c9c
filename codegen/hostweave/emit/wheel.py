"""Files for a Python wheel of an exported program. The module of the wheel calls the C API, and does not need Hostweave."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hostweave.base.paths import RUNTIME
from hostweave.emit.arguments import CheckedArgument
from hostweave.emit.program import ProgramSources
from hostweave.emit.structs import Structs
from hostweave.host_ir.ir import Parameter
from hostweave.types.tensor import TensorType, holds
from hostweave.types.zigzag import Zigzag


@dataclass(frozen=True)
class Wheel:
    target: str  # cpu or cuda
    version: str
    dependencies: tuple[str, ...]
    build_requirements: tuple[str, ...]

    def files(self, program: ProgramSources) -> dict[str, str]:
        """The Python module, the description of the program, and the CMake and C++ files of the wheel, as path -> text."""
        layouts: dict[str, int] = {}
        about = {"name": program.namespace, "target": self.target, "ranks": program.mesh.size}
        for side, arguments, given in (("inputs", program.inputs, program.ir.arguments), ("outputs", program.outputs, program.ir.results)):
            positions = {name: at for at, name in enumerate(_names(program, arguments))}
            about[side] = [[*_about(program, p, layouts), positions[p.name]] for p in given]
        about["layouts"] = [json.loads(layout) for layout in layouts]
        module = f"python/{program.namespace}/"
        native = {f"runtime/wheel/{name}": (RUNTIME / "wheel" / name).read_text() for name in ("wheel.cmake", "wheel.cpp")}
        return native | {
            f"{module}__init__.py": (RUNTIME / "wheel" / "program.py").read_text(),
            f"{module}program.json": json.dumps(about) + "\n",
            f"{module}py.typed": "",
        }


def _names(program: ProgramSources, arguments: Iterable[CheckedArgument]) -> Iterator[str]:
    """Names of the tensors, in the order of the C API's struct."""
    for x in program.fields(arguments):
        if isinstance(x, Structs):
            yield from (group.names[i] for i in range(x.count) for group in x.groups.values())
        else:
            yield x.parameter


def _about(program: ProgramSources, parameter: Parameter, layouts: dict[str, int]) -> list[Any]:
    """Description of a parameter: name, type, dtype, index of the layout in `layouts`, and name of the donated input."""
    blocks = json.dumps([_blocks(program, parameter.type, rank) for rank in range(program.mesh.size)])
    layout = layouts.setdefault(blocks, len(layouts))
    return [parameter.name, str(parameter.type), parameter.type.dtype.long_name, layout, parameter.memory]


def _blocks(program: ProgramSources, type: TensorType, rank: int) -> list[tuple[int, tuple[int, ...]]] | None:
    """For each dim, the number of blocks and the indices of the blocks that a rank has. None if the rank has no part of the tensor."""
    mesh = type.mesh_in(program.mesh)
    if not holds(type, program.mesh, rank):
        return None
    result = list[tuple[int, tuple[int, ...]]]()
    for dim in type.dims:
        ranks, own = mesh.size_of(dim.axes), mesh.rank_in_group(rank, dim.axes)
        in_zigzag = isinstance(dim.axes, Zigzag) and ranks > 1
        result.append((2 * ranks, (own, 2 * ranks - 1 - own)) if in_zigzag else (ranks, (own,)))
    return result
