"""One call of a program on global arrays: checks them, splits them into the ranks' blocks, and joins the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hostweave.base.errors import ArgumentError
from hostweave.host_ir.ir import HostProgram, Parameter
from hostweave.runtime.arguments import accept, in_order
from hostweave.runtime.arrays import Array, Library, View, view
from hostweave.runtime.bound import Bound, block
from hostweave.targets.target import CPU_DEVICE, Target
from hostweave.types.mesh import Mesh
from hostweave.types.shards import bind_sizes, block_of, block_shape, global_shape, holds
from hostweave.types.tensor import TensorType

LocalArrays = tuple[tuple[View, ...], ...]  # [rank][parameter]


@dataclass(frozen=True)
class Call:
    """The local arrays of one call, and what is needed to make global results of them."""

    program: HostProgram
    sizes: Mapping[str, int]
    library: Library
    device: int  # where global results go
    inputs: LocalArrays
    outputs: LocalArrays

    def for_glue(self) -> tuple[list[list[Any]], list[list[Any]]]:
        return [[v[:-1] for v in rank] for rank in self.inputs], [[v[:-1] for v in rank] for rank in self.outputs]

    def local_results(self) -> list[Any]:
        """Of every rank its local output, or a tuple of them where there are several; None for one that it does not have."""
        return [_bare(tuple(None if v.array is None else self.library.give(v.array) for v in rank)) for rank in self.outputs]

    def global_results(self) -> Any:
        """The global output, or a tuple of them where there are several. Of replicated ones a rank's copy."""
        return _bare(tuple(self.library.give(self._global_result(i, p)) for i, p in enumerate(self.program.outputs)))

    def _global_result(self, index: int, parameter: Parameter) -> Array:
        ranks = parameter.type.mesh_in(self.program.mesh).all_ranks
        if not parameter.type.axes and (parameter.type.mesh is None or self.device in (CPU_DEVICE, *ranks)):
            return self.outputs[self.device if self.device in ranks else ranks[0]][index].array  # a copy that is where the result goes
        shape = global_shape(parameter.type, self.sizes)
        result = self.library.empty(shape, parameter.type.dtype, self.device)
        for rank in ranks:
            result[block_of(parameter.type, self.program.mesh, rank, shape)] = self.outputs[rank][index].array
        self.library.wait(self.device)
        return result


def make_call(program: HostProgram, target: Target, bound: Bound, given: Sequence[Array], named: Mapping[str, Array]) -> Call:
    """A call with these global arrays beside those that are bound, the first ones by position and others by name.

    Raises ArgumentError with the program's and the argument's name where an array is missing, unknown, of another dtype,
    number of dims, device or size than the program's types say.
    """
    expected = {p.name: p.type for p in program.inputs}
    arrays = in_order(program.name, bound.free, bound.arrays, given, named)
    taken = {p.name: accept(program.name, target, p.name, p.type, array) for p, array in zip(bound.free, arrays, strict=True)}
    shapes = {**bound.shapes(), **{name: tuple(array.shape) for name, (_, array) in taken.items()}}
    sizes = bind_sizes(program.name, program.mesh, expected, shapes, program.uneven)
    _check_outputs(program, sizes)
    library, first = next(iter((taken or bound.arrays).values()))
    device = library.device(first)
    ranks = range(program.mesh.size)
    own = ({name: block(*one, expected[name], program.mesh, rank) for name, one in taken.items()} for rank in ranks)
    blocks = [{**held, **given_blocks} for held, given_blocks in zip(bound.blocks, own, strict=True)]
    inputs = tuple(tuple(of_rank[name] for name in expected) for of_rank in blocks)
    outputs = tuple(
        tuple(_result(library, p.type, program.mesh, rank, sizes, CPU_DEVICE if device == CPU_DEVICE else rank) for p in program.outputs)
        for rank in ranks
    )
    places = {(type(one), one.device(array)): one for one, array in (*taken.values(), *bound.arrays.values())}
    for (_, on), used in places.items():
        used.wait(on)
    for rank in ranks if device != CPU_DEVICE else ():
        library.wait(rank)
    return Call(program, sizes, library, device, inputs, outputs)


def _check_outputs(program: HostProgram, sizes: Mapping[str, int]) -> None:
    for parameter in program.outputs:
        try:
            global_shape(parameter.type, sizes)
        except ValueError as error:
            raise ArgumentError(f"{program.name}: output {parameter.name}: {error}; pass a size that it divides") from None


def _result(library: Library, type_: TensorType, mesh: Mesh, rank: int, sizes: Mapping[str, int], device: int) -> View:
    shape = global_shape(type_, sizes)
    if not holds(type_, mesh, rank):
        return View(shape)
    array = library.empty(block_shape(type_, mesh, rank, shape), type_.dtype, device)
    return view(library, array, type_.dtype, shape)


def _bare(results: tuple[Array, ...]) -> Any:
    return results[0] if len(results) == 1 else results
