"""One call of a program on global arrays: checks them, splits them into the ranks' blocks, and joins the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hostweave.base.errors import ArgumentError
from hostweave.host_ir.ir import HostProgram, Parameter
from hostweave.runtime.arguments import accept, expect_writable, in_order
from hostweave.runtime.arrays import Array, Library, View, view
from hostweave.targets.target import CPU_DEVICE, Target
from hostweave.types.mesh import Mesh
from hostweave.types.shards import bind_sizes, block_of, block_shape, global_shape, holds
from hostweave.types.tensor import TensorType


@dataclass(frozen=True)
class Result:
    """Where a global output goes."""

    library: Library
    device: int
    array: Array = None  # what was donated for it, and as the caller gave it
    given: Array = None


LocalArrays = tuple[tuple[View, ...], ...]  # [rank][parameter]


@dataclass(frozen=True)
class Call:
    """The local arrays of one call, and what is needed to make global results of them."""

    program: HostProgram
    sizes: Mapping[str, int]
    inputs: LocalArrays
    outputs: LocalArrays
    results: tuple[Result, ...]  # of each output

    def for_glue(self) -> tuple[list[list[Any]], list[list[Any]]]:
        return [[v[:-1] for v in rank] for rank in self.inputs], [[v[:-1] for v in rank] for rank in self.outputs]

    def local_results(self) -> list[Any]:
        """Of every rank its local output, or a tuple of them where there are several; None for one that it does not have."""
        return [
            _bare(tuple(None if v.array is None else to.library.give(v.array) for v, to in zip(rank, self.results, strict=True)))
            for rank in self.outputs
        ]

    def global_results(self) -> Any:
        """The global output, or a tuple of them where there are several. Of replicated ones a rank's copy; donated arrays hold theirs."""
        return _bare(tuple(self._global_result(i, p) for i, p in enumerate(self.program.outputs)))

    def hand_back(self) -> None:
        """Has donated arrays hold the results."""
        for i, parameter in enumerate(self.program.outputs):
            if parameter.memory:
                self._global_result(i, parameter)

    def _global_result(self, index: int, parameter: Parameter) -> Array:
        ranks, to = parameter.type.mesh_in(self.program.mesh).all_ranks, self.results[index]
        if not parameter.type.axes and (parameter.type.mesh is None or to.device in (CPU_DEVICE, *ranks)):
            own = self.outputs[to.device if to.device in ranks else ranks[0]][index].array  # a copy that is where the result goes
            if to.array is None:
                return to.library.give(own)
            ranks = ranks[:1]
        shape = global_shape(parameter.type, self.sizes)
        result = to.library.empty(shape, parameter.type.dtype, to.device) if to.array is None else to.array
        for rank in ranks:
            result[block_of(parameter.type, self.program.mesh, rank, shape)] = self.outputs[rank][index].array
        to.library.wait(to.device)
        return to.library.give(result) if to.array is None else to.given


def make_call(program: HostProgram, target: Target, given: Sequence[Array], named: Mapping[str, Array]) -> Call:
    """A call with these global arrays, the first ones by position and others by name.

    Raises ArgumentError with the program's and the argument's name where an array is missing, unknown, of another dtype,
    number of dims, device or size than the program's types say.
    """
    expected = {p.name: p.type for p in program.inputs}
    arrays = in_order(program.name, program.inputs, given, named)
    taken = {name: accept(program.name, target, name, expected[name], array) for name, array in zip(expected, arrays, strict=True)}
    libraries = {name: library for name, (library, _) in taken.items()}
    accepted = {name: array for name, (_, array) in taken.items()}
    sizes = bind_sizes(program.name, program.mesh, expected, {name: tuple(array.shape) for name, array in accepted.items()}, program.uneven)
    _check_outputs(program, sizes)
    given_by_name = dict(zip(expected, arrays, strict=True))
    results = tuple(_result_of(program, p, libraries, accepted, given_by_name) for p in program.outputs)
    ranks = range(program.mesh.size)
    inputs = tuple(
        tuple(_block(libraries[name], accepted[name], type_, program.mesh, rank) for name, type_ in expected.items()) for rank in ranks
    )
    outputs = tuple(
        tuple(_local(to, p.type, program.mesh, rank, sizes) for p, to in zip(program.outputs, results, strict=True)) for rank in ranks
    )
    for name, used in libraries.items():
        used.wait(used.device(accepted[name]))
    for to in results:
        for rank in ranks if to.device != CPU_DEVICE else ():
            to.library.wait(rank)
    return Call(program, sizes, inputs, outputs, results)


def _block(library: Library, array: Array, type_: TensorType, mesh: Mesh, rank: int) -> View:
    if not holds(type_, mesh, rank):
        return View(tuple(array.shape))
    block = array[block_of(type_, mesh, rank, array.shape)] if type_.axes else array
    return view(library, library.contiguous(block), type_.dtype, tuple(array.shape))


def _check_outputs(program: HostProgram, sizes: Mapping[str, int]) -> None:
    for parameter in program.outputs:
        try:
            global_shape(parameter.type, sizes)
        except ValueError as error:
            raise ArgumentError(f"{program.name}: output {parameter.name}: {error}; pass a size that it divides") from None


def _result_of(
    program: HostProgram, output: Parameter, libraries: Mapping[str, Library], accepted: Mapping[str, Array], given: Mapping[str, Array]
) -> Result:
    """Where an output goes: to what was donated for it, else to a new array in the library of the first input."""
    name = output.memory or program.inputs[0].name
    library, array = libraries[name], accepted[name]
    if not output.memory:
        return Result(library, library.device(array))
    expect_writable(f"{program.name}: {name}", library, array)
    others = [p.memory for p in program.outputs if p.memory not in ("", name)]
    if twice := [other for other in others if libraries[other].address(accepted[other]) == library.address(array) != 0]:
        raise ArgumentError(f"{program.name}: {name} and {twice[0]} are one array, and both are donated; pass an array for each")
    return Result(library, library.device(array), array, given[name])


def _local(to: Result, type_: TensorType, mesh: Mesh, rank: int, sizes: Mapping[str, int]) -> View:
    shape = global_shape(type_, sizes)
    if not holds(type_, mesh, rank):
        return View(shape)
    device = CPU_DEVICE if to.device == CPU_DEVICE else rank
    return view(to.library, to.library.empty(block_shape(type_, mesh, rank, shape), type_.dtype, device), type_.dtype, shape)


def _bare(results: tuple[Array, ...]) -> Any:
    return results[0] if len(results) == 1 else results
