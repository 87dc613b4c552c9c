"""Inputs that a program holds, so that calls take only the others: `Program.bind`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from hostweave.base.errors import ArgumentError, did_you_mean
from hostweave.host_ir.ir import HostProgram, Parameter
from hostweave.runtime.arguments import accept
from hostweave.runtime.arrays import Array, Library, View, view
from hostweave.targets.target import Target
from hostweave.types.mesh import Mesh
from hostweave.types.rank_sizes import local_range
from hostweave.types.shards import Shape, block_of, holds
from hostweave.types.tensor import TensorType


class Bound:
    """The arrays that a program holds, by name, and the inputs that are left to its calls.

    They are checked here as far as that needs neither the other inputs nor the rank's device, and for the rest in the first call.
    """

    def __init__(self, host: HostProgram, target: Target, arrays: Mapping[str, Array], before: Bound | None = None):
        """Raises ArgumentError for an array that the program does not take, has already, or that does not fit."""
        self._host = host
        types = {parameter.name: parameter.type for parameter in host.inputs}
        self.arrays: dict[str, tuple[Library, Array]] = dict(before.arrays) if before else {}  # as their library works with them
        for name, array in arrays.items():
            where = f"{host.name}: bind: {name}"
            if name in self.arrays:
                raise ArgumentError(f"{where}: is bound already; leave it out, or bind the program that has it not bound")
            if name in {output.memory for output in host.outputs}:
                raise ArgumentError(f"{where}: is donated, so that a call leaves a result in it; pass it to each call")
            if name not in types:
                raise ArgumentError(f"{where}: no such input; {did_you_mean(name, types)}")
            library, accepted = accept(f"{host.name}: bind", target, name, types[name], array)
            _check_sizes(where, types[name], host.mesh, tuple(accepted.shape))
            self.arrays[name] = library, accepted
        self.free: tuple[Parameter, ...] = tuple(parameter for parameter in host.inputs if parameter.name not in self.arrays)

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(array.shape) for name, (_, array) in self.arrays.items()}

    @cached_property
    def blocks(self) -> list[dict[str, View]]:
        """What every rank has of them, where they are global arrays."""
        types = {parameter.name: parameter.type for parameter in self._host.inputs}
        ranks = range(self._host.mesh.size)
        return [{name: block(*held, types[name], self._host.mesh, rank) for name, held in self.arrays.items()} for rank in ranks]


def block(library: Library, array: Array, type_: TensorType, mesh: Mesh, rank: int) -> View:
    """What a rank has of a global array."""
    if not holds(type_, mesh, rank):
        return View(tuple(array.shape))
    own = array[block_of(type_, mesh, rank, array.shape)] if type_.axes else array
    return view(library, library.contiguous(own), type_.dtype, tuple(array.shape))


def _check_sizes(where: str, type_: TensorType, mesh: Mesh, shape: Shape) -> None:
    """Of dims that the type gives a number: it is that, or in an array of one rank the size of some rank's block."""
    mesh = type_.mesh_in(mesh)
    for index, (dim, size) in enumerate(zip(type_.dims, shape, strict=True)):
        if not dim.size.is_int:
            continue
        whole, ranks = dim.size.bind({}), mesh.size_of(dim.axes)
        of_ranks = {len(local_range(whole, ranks, rank)) for rank in range(ranks)}
        if size != whole and size not in of_ranks:
            wanted = f"{whole}" + (f", or {' or '.join(map(str, sorted(of_ranks)))} on a rank," if ranks > 1 else "")
            raise ArgumentError(f"{where}: dim {index} is {size}; {wanted} is wanted: pass an array of type {type_}")
