"""A call of a program on global arrays: checks and splits the arrays, and joins the local results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hostweave.base.errors import ArgumentError
from hostweave.host_ir.ir import HostProgram, Parameter
from hostweave.host_ir.size_requirements import expect_divided
from hostweave.runtime.arguments import BoundInputs, accept, block, expect_writable, ordered_inputs
from hostweave.runtime.arrays import Array, ArrayLibrary, ArrayView, view
from hostweave.targets.target import CPU_DEVICE, Target
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Shape, TensorType, bind_sizes, block_of, block_shape, global_shape, holds


@dataclass(frozen=True)
class GlobalResult:
    """Destination of a global output: a new array or a donated array."""

    library: ArrayLibrary
    device: int
    array: Array = None  # the donated array in the form of `ArrayLibrary.accept`; `given` is the caller's object
    given: Array = None


LocalArrays = tuple[tuple[ArrayView, ...], ...]  # [rank][parameter]


@dataclass(frozen=True)
class GlobalCall:
    """One call: the local arrays of all ranks, and the destinations of the global results."""

    program: HostProgram
    sizes: Mapping[str, int]
    inputs: LocalArrays
    outputs: LocalArrays
    results: tuple[GlobalResult, ...]  # one per output

    def global_shapes(self) -> list[Shape]:
        return [view.global_shape for view in self.inputs[0]]

    def memory_blocks(self, rank: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Address, size in bytes and device of each input and of each output of a rank."""
        inputs, outputs = ([(view.address, view.bytes, view.device) for view in views[rank]] for views in (self.inputs, self.outputs))
        return inputs, outputs

    def expect_shapes_of(self, other: GlobalCall) -> None:
        for i, parameter in enumerate(self.program.arguments):
            if any(own[i].shape != others[i].shape for own, others in zip(self.inputs, other.inputs, strict=True)):
                raise ArgumentError(f"{self.program.name}: {parameter.name}: shapes differ between calls of one run; make them equal")

    def local_results(self) -> list[Any]:
        """Local output, or tuple of outputs, of every rank. None for an output that a rank does not have. Also copies the outputs to
        donated arrays."""
        for i, parameter in enumerate(self.program.results):
            if parameter.memory:
                self._global_result(i, parameter)
        return [
            _unwrapped(tuple(None if v.array is None else to.library.give(v.array) for v, to in zip(rank, self.results, strict=True)))
            for rank in self.outputs
        ]

    def global_results(self) -> Any:
        """Global output, or tuple of outputs. If an output reuses a donated input, the result is the caller's array, or a new array if the
        shapes differ."""
        return _unwrapped(tuple(self._global_result(i, p) for i, p in enumerate(self.program.results)))

    def _global_result(self, index: int, parameter: Parameter) -> Array:
        ranks, to = parameter.type.mesh_in(self.program.mesh).all_ranks, self.results[index]
        if not parameter.type.axes and (parameter.type.mesh is None or to.device in (CPU_DEVICE, *ranks)):
            own = self.outputs[to.device if to.device in ranks else ranks[0]][index].array  # if possible on the same device
            if to.array is None:
                return to.library.give(own)
            ranks = ranks[:1]
        shape = global_shape(parameter.type, self.sizes)
        fits = to.array is not None and tuple(to.array.shape) == shape
        result = to.array if fits else to.library.empty(shape, parameter.type.dtype, to.device)
        for rank in ranks:
            result[block_of(parameter.type, self.program.mesh, rank, shape)] = self.outputs[rank][index].array
        if to.array is not None and not fits:  # the donated array has another shape
            to.array[...] = result.reshape(tuple(to.array.shape))
        to.library.wait(to.device)
        return to.given if fits else to.library.give(result)


def make_call(program: HostProgram, target: Target, bound: BoundInputs, given: Sequence[Array], named: Mapping[str, Array]) -> GlobalCall:
    """Call with the given global arrays, by position or name, and with the bound arrays. Raises LoopsDoNotDivide; see `expect_divided`."""
    expected = {p.name: p.type for p in program.arguments}
    arrays = ordered_inputs(program.name, bound.unbound, bound.arrays, given, named)
    new_arrays = {p.name: accept(program.name, target, p.name, p.type, array) for p, array in zip(bound.unbound, arrays, strict=True)}
    shapes = {**bound.shapes(), **{name: tuple(array.shape) for name, (_, array) in new_arrays.items()}}
    expect_divided(program, [shapes[name] for name in expected])
    sizes = bind_sizes(program.name, program.mesh, expected, shapes, program.uneven)
    output_shapes = [_shape_of_output(program, parameter, sizes) for parameter in program.results]
    accepted, given_by_name = {**bound.arrays, **new_arrays}, {p.name: array for p, array in zip(bound.unbound, arrays, strict=True)}
    if not expected:
        raise ArgumentError(f"{program.name}: run: there are no inputs, and outputs use the library of an input; add an input")
    first = next(iter(new_arrays or bound.arrays))
    _expect_separate(program, {p.memory: accepted[p.memory] for p in program.results if p.memory})
    results = tuple(_result_of(program, p.memory or first, accepted, given_by_name if p.memory else {}) for p in program.results)
    ranks = range(program.mesh.size)
    blocks = [
        held | {name: block(*library_and_array, expected[name], program.mesh, rank) for name, library_and_array in new_arrays.items()}
        for rank, held in enumerate(bound.blocks)
    ]
    inputs = tuple(tuple(of_rank[name] for name in expected) for of_rank in blocks)
    outputs = tuple(
        tuple(_local(to, p.type, program.mesh, rank, shape) for p, to, shape in zip(program.results, results, output_shapes, strict=True))
        for rank in ranks
    )
    devices = {(type(library), library.device(array)): library for library, array in accepted.values()}
    for (_, device), library in devices.items():
        library.wait(device)
    for to in results:
        for rank in ranks if to.device != CPU_DEVICE else ():
            to.library.wait(rank)
    return GlobalCall(program, sizes, inputs, outputs, results)


def _shape_of_output(program: HostProgram, parameter: Parameter, sizes: Mapping[str, int]) -> Shape:
    try:
        return global_shape(parameter.type, sizes)
    except ValueError as error:
        raise ArgumentError(f"{program.name}: output {parameter.name}: {error}; pass a size that is divisible") from None


def _expect_separate(program: HostProgram, donated: Mapping[str, tuple[ArrayLibrary, Array]]) -> None:
    """Refuses two donated arrays with the same address, except 0, which empty arrays may have."""
    names: dict[int, str] = {}
    for name, (library, array) in donated.items():
        address = library.address(array)
        if address != 0 and names.setdefault(address, name) != name:
            raise ArgumentError(
                f"{program.name}: {names[address]} and {name} are the same array, and both are donated; pass separate arrays"
            )


def _result_of(
    program: HostProgram, name: str, accepted: Mapping[str, tuple[ArrayLibrary, Array]], given: Mapping[str, Array]
) -> GlobalResult:
    """Destination of an output: the donated input `name`, or a new array of this input's library."""
    library, array = accepted[name]
    if not given:
        return GlobalResult(library, library.device(array))
    expect_writable(f"{program.name}: {name}", library, array)
    return GlobalResult(library, library.device(array), array, given[name])


def _local(to: GlobalResult, type_: TensorType, mesh: Mesh, rank: int, shape: Shape) -> ArrayView:
    if not holds(type_, mesh, rank):
        return ArrayView(shape)
    device = CPU_DEVICE if to.device == CPU_DEVICE else rank
    return view(to.library, to.library.empty(block_shape(type_, mesh, rank, shape), type_.dtype, device), type_.dtype, shape)


def _unwrapped(results: tuple[Array, ...]) -> Any:
    return results[0] if len(results) == 1 else results
