"""Checked arguments of a call on a rank: bound inputs, and the arrays of the call."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from hostweave.base.errors import ArgumentError
from hostweave.build.cache import key_of
from hostweave.host_ir.ir import HostProgram, Parameter
from hostweave.runtime.arguments import BoundInputs, accept, expect_count, expect_writable, local_shard
from hostweave.runtime.arrays import Array, ArrayLibrary, NumpyLibrary, states_of
from hostweave.runtime.coordinator import ByteRange
from hostweave.runtime.windows import WindowPosition, Windows, window_positions
from hostweave.targets.target import CPU_DEVICE, Target
from hostweave.types.tensor import Shape, block_shape, global_shape, holds, shape_of_global

MadeOutput = tuple[ArrayLibrary, Array] | None  # None if the rank has no block, or if an output reuses a donated input

_MAX_CACHED_CALLS = 64  # maximum number of cached argument lists per table


@dataclass(frozen=True)
class BoundTable:
    library: ArrayLibrary | None  # library of the first bound array; without bound arrays, NumPy on the CPU target, otherwise None
    shapes: tuple[Shape | None, ...]  # None for an input that calls pass
    spans: tuple[ByteRange, ...]
    digest: str  # digest of the bound inputs, or ""
    native: Any
    # keys of arrays -> checked arguments of an earlier call
    checked_calls: dict[Any, CheckedCall] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class CheckedCall:
    """Addresses and shapes of the checked arrays of a call. Keeps no array alive."""

    table: BoundTable
    library: ArrayLibrary | None  # library of the first array that the call passes on this rank, otherwise the library of the table
    addresses: tuple[int, ...]
    shapes: tuple[Shape, ...]
    sizes: tuple[tuple[str, int], ...]  # sizes= of the caller
    stream: int  # cudaStream_t
    out: tuple[tuple[int, ...], tuple[Shape | None, ...]] | None  # addresses and local shapes of the arrays of out=
    donated: tuple[int, ...]  # for each output, the address of the donated input or 0
    spans: tuple[ByteRange, ...]  # memory of inputs and of outputs that the caller passes
    windows: tuple[WindowPosition, ...]  # positions of the arguments that `Options.windows` names

    @property
    def all_shapes(self) -> tuple[Shape, ...]:
        """Shapes of all inputs: bound inputs, and inputs that the call passes."""
        rest = iter(self.shapes)
        return tuple(next(rest) if shape is None else shape for shape in self.table.shapes)


class Arguments:
    """Checks the arrays of calls on a rank. Arrays must fit their parameters and the caller's sizes, and a written array must not overlap
    another array."""

    def __init__(
        self,
        host: HostProgram,
        target: Target,
        rank: int,
        device: int,
        native_table: Callable[[Any], Any],
        verifies_calls: bool,
        windows: Windows,
    ):
        """With `verifies_calls`, ranks compare shapes before every call."""
        self._host, self._target, self._rank, self._device = host, target, rank, device
        self._native_table, self._verifies_calls, self._windows = native_table, verifies_calls, windows
        self._on_submeshes = any(p.type.mesh for p in (*host.arguments, *host.results))  # some arguments exist only on some ranks
        # the latest two sets of arguments without overlap, of this rank or of all ranks
        self._disjoint: deque[tuple[tuple[ByteRange, ...], ...]] = deque(maxlen=2)
        self.tables: weakref.WeakKeyDictionary[BoundInputs, BoundTable] = weakref.WeakKeyDictionary()

    def check_call(
        self, bound: BoundInputs, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None
    ) -> CheckedCall:
        """Checks the arrays of a call. Arrays that have the keys of an earlier call are not checked again (`ArrayLibrary.state`)."""
        table = self.table(bound)
        outs = None if out is None else (out,) if len(self._host.results) == 1 else tuple(out)
        states, known = states_of((*arrays, *(outs or ()))), tuple((sizes or {}).items())
        key = states and (states, len(arrays), outs is None, known, self._windows.allocated)
        checked_call = table.checked_calls.get(key) if key else None
        if checked_call is None:
            checked_call = self._checked_arrays(table, bound.unbound, arrays, outs, known)
            if key:
                if len(table.checked_calls) == _MAX_CACHED_CALLS:
                    table.checked_calls.clear()
                table.checked_calls[key] = checked_call
        handle = self.handle(stream, checked_call.library)
        return checked_call if checked_call.stream == handle else replace(checked_call, stream=handle)

    def _checked_arrays(
        self,
        table: BoundTable,
        parameters: Sequence[Parameter],
        arrays: Sequence[Array],
        outs: Sequence[Array] | None,
        sizes: tuple[tuple[str, int], ...],
    ) -> CheckedCall:
        name = self._host.name
        expect_count(name, parameters, arrays)
        accepted = [self._accepted(parameter, array) for parameter, array in zip(parameters, arrays, strict=True)]
        library = next((one[0] for one in accepted if one), table.library)
        by_name = dict(zip((p.name for p in parameters), accepted, strict=True))
        donated = tuple(by_name[p.memory] if p.memory else None for p in self._host.results)
        for p, one in zip(self._host.results, donated, strict=True):
            if one:
                expect_writable(f"{name}: {p.memory}", *one)
        given = None if outs is None else self._given(outs, donated)
        donated_names = {p.memory for p in self._host.results}
        new = [None if p.memory else one for p, one in zip(self._host.results, given or (), strict=False)]
        spans = (
            *self._spans(parameters, accepted, [p.name in donated_names for p in parameters]),
            *self._spans(self._host.results, new, [True] * len(new)),
        )
        self.expect_disjoint(table.spans, spans)
        out_arrays = (
            None if given is None else (addresses_and_shapes(given)[0], tuple(tuple(one[1].shape) if one else None for one in given))
        )
        shared = window_positions(self._windows, self._host, (*table.spans, *spans), outs is not None)
        checked_call = CheckedCall(
            table, library, *addresses_and_shapes(accepted), sizes, 0, out_arrays, addresses_and_shapes(donated)[0], spans, shared
        )
        if sizes and self._verifies_calls:
            self.global_shapes(checked_call)  # checks the caller's sizes against the local shapes
        return checked_call

    def table(self, bound: BoundInputs) -> BoundTable:
        if table := self.tables.get(bound):
            return table
        parameters = [parameter for parameter in self._host.arguments if parameter.name in bound.arrays]
        checked_arrays = [self._on_this_rank(parameter, *bound.arrays[parameter.name]) for parameter in parameters]
        addresses, shapes = addresses_and_shapes(checked_arrays)
        memory = dict(zip((parameter.name for parameter in parameters), zip(addresses, shapes, strict=True), strict=True))
        of_all = [memory.get(parameter.name) for parameter in self._host.arguments]
        native = self._native_table([each and each[0] for each in of_all])
        library = next((one[0] for one in checked_arrays if one), NumpyLibrary() if self._device == CPU_DEVICE else None)
        digest = key_of(*map(str, memory.items())) if memory else ""
        shapes_of_all = tuple(each and each[1] for each in of_all)
        spans = tuple(self._spans(parameters, checked_arrays, [False] * len(checked_arrays)))
        table = self.tables[bound] = BoundTable(library, shapes_of_all, spans, digest, native)
        return table

    def holds(self, parameter: Parameter, rank: int | None = None) -> bool:
        """True if `rank`, by default this rank, has a block of the parameter."""
        return holds(parameter.type, self._host.mesh, self._rank if rank is None else rank)

    def _accepted(self, parameter: Parameter, array: Array) -> tuple[ArrayLibrary, Array] | None:
        """Returns the checked array, or None if this rank has no block of the parameter."""
        where, rank = f"{self._host.name}: {parameter.name}", self._rank
        if array is None:
            if self.holds(parameter):
                raise ArgumentError(f"{where}: is None, but rank {rank} has a block of {parameter.type}; pass the block")
            return None
        if not self.holds(parameter):
            raise ArgumentError(f"{where}: rank {rank} has no block of {parameter.type}; pass None")
        array = local_shard(self._host.name, parameter.name, parameter.type, self._host.mesh, array)
        return self._on_this_rank(parameter, *accept(self._host.name, self._target, parameter.name, parameter.type, array))

    def _on_this_rank(self, parameter: Parameter, library: ArrayLibrary, array: Array) -> tuple[ArrayLibrary, Array]:
        where = f"{self._host.name}: {parameter.name}"
        if not self.holds(parameter):
            raise ArgumentError(f"{where}: rank {self._rank} has no block of {parameter.type}; pass None, and do not bind it on this rank")
        if (device := library.device(array)) != self._device:
            here = "in host memory" if device == CPU_DEVICE else f"on GPU {device}"
            raise ArgumentError(f"{where}: is {here}, but rank {self._rank} is on GPU {self._device}; move it there")
        if not library.is_contiguous(array):
            raise ArgumentError(f"{where}: is not contiguous, but calls do not copy; pass a contiguous copy")
        return library, array

    def _given(self, arrays: Sequence[Array], donated: Sequence[MadeOutput]) -> tuple[MadeOutput, ...]:
        parameters = self._host.results
        if len(arrays) != len(parameters):
            raise ArgumentError(f"{self._host.name}: out=: {len(arrays)} arrays for {len(parameters)} outputs; pass one per output")
        pairs = zip(parameters, arrays, donated, strict=True)
        outputs = tuple(one if p.memory and array is None else self._accepted(p, array) for p, array, one in pairs)
        for parameter, output, one in zip(parameters, outputs, donated, strict=True):
            if output and one and output[0].address(output[1]) != one[0].address(one[1]):
                where = f"{self._host.name}: out=: {parameter.name}: is returned in {parameter.memory}, which is donated"
                raise ArgumentError(f"{where}; pass None, or the array of {parameter.memory}")
            if output and not output[0].is_writable(output[1]):
                raise ArgumentError(f"{self._host.name}: out=: {parameter.name}: is read-only; pass a writable array, or omit out=")
        return outputs

    def _spans(self, parameters: Sequence[Parameter], arrays: Sequence[MadeOutput], written: Sequence[bool]) -> Iterator[ByteRange]:
        for parameter, one, is_written in zip(parameters, arrays, written, strict=False):
            if one and (bytes_ := prod(one[1].shape) * parameter.type.dtype.itemsize):
                begin = one[0].address(one[1])
                yield ByteRange(begin, begin + bytes_, self._rank, parameter.name, is_written)

    def expect_disjoint(self, bound: tuple[ByteRange, ...], checked_call: tuple[ByteRange, ...]) -> None:
        """Raises ArgumentError if a written array overlaps another argument."""
        if not any(span.written for span in checked_call) or (bound, checked_call) in self._disjoint:
            return
        last = last_written = ByteRange(0, 0, 0, "", False)  # largest end so far, among all spans and among written spans
        for span in sorted((*bound, *checked_call)):
            other = last if span.written else last_written
            if span.begin < other.end:
                pair = sorted((other, span), key=lambda one: not one.written)
                names = [one.name if span.rank == other.rank else f"{one.name} of rank {one.rank}" for one in pair]
                what = f"{pair[0].name}, which is donated" if pair[0].name in {p.memory for p in self._host.results} else "out="
                raise ArgumentError(f"{self._host.name}: {what}: {' and '.join(names)} overlap in memory; pass separate arrays")
            last = max(last, span, key=lambda one: one.end)
            last_written = max(last_written, span, key=lambda one: one.end) if span.written else last_written
        self._disjoint.append((bound, checked_call))

    def handle(self, stream: Any, library: ArrayLibrary | None) -> int:
        try:
            handle = self._target.stream(stream)
        except TypeError as error:
            raise ArgumentError(f"{self._host.name}: {error}") from None
        if handle is None:
            return library.stream(self._device) if library else 0
        return handle

    def global_shapes(self, checked_call: CheckedCall) -> tuple[Shape, ...] | None:
        """Shapes of the global inputs. Computes these shapes if the caller passes sizes, or if some arguments exist only on some ranks and
        the ranks do not compare shapes. Otherwise None."""
        if not checked_call.sizes and not (self._on_submeshes and not self._verifies_calls):
            return None
        return self.global_shapes_for(dict(checked_call.sizes), checked_call.all_shapes)

    def global_shapes_of(self, shapes_of_all: Sequence[Sequence[Shape]]) -> list[Shape]:
        """Shapes of the global inputs, computed from the blocks of all ranks."""
        global_shapes = []
        for index, parameter in enumerate(self._host.arguments):
            shapes = [shapes[index] for shapes in shapes_of_all]
            global_shapes.append(shape_of_global(parameter.type, self._host.mesh, shapes))
            holders = [rank for rank in range(len(shapes)) if self.holds(parameter, rank)]
            if any(shapes[rank] != block_shape(parameter.type, self._host.mesh, rank, global_shapes[-1]) for rank in holders):
                most_common = max((shapes[rank] for rank in holders), key=shapes.count)
                differing = next(rank for rank in holders if shapes[rank] != most_common)
                raise ArgumentError(
                    f"{self._host.name}: {parameter.name}: rank {differing} passes {list(shapes[differing])}, "
                    f"and rank {shapes.index(most_common)} {list(most_common)}; pass blocks of one array {parameter.type}"
                )
        return global_shapes

    def global_shapes_for(self, sizes: Mapping[str, int], shapes: Sequence[Shape | None], what: str = "sizes=") -> tuple[Shape, ...]:
        """Shapes of the global inputs, from global sizes and local shapes. A local shape is None if there is no array yet. Dims are assumed
        to be split evenly if there are no sizes, or if a shape is None."""
        known, pairs = dict(sizes), [(p, s) for p, s in zip(self._host.arguments, shapes, strict=True) if s is not None and self.holds(p)]
        infers = not sizes or None in shapes  # a call that passes sizes must pass the sizes of all sharded dims
        for parameter, shape in pairs:
            mesh = parameter.type.mesh_in(self._host.mesh)
            for dim, size in zip(parameter.type.dims, shape, strict=True):
                if not dim.size.is_int and (infers or not dim.axes):
                    known.setdefault(str(dim.size), size * mesh.size_of(dim.axes))
        if missing := {name for p in self._host.arguments for dim in p.type.dims for name in dim.size.symbols} - known.keys():
            raise ArgumentError(f"{self._host.name}: {what}: the size {', '.join(sorted(missing))} is missing; pass its global value")
        try:
            global_shapes = {p.name: global_shape(p.type, known) for p in self._host.arguments}
        except ValueError as error:
            raise ArgumentError(f"{self._host.name}: {what}: {error}") from None
        for parameter, shape in pairs:
            of_all = global_shapes[parameter.name]
            if shape != (block := block_shape(parameter.type, self._host.mesh, self._rank, of_all)):
                raise ArgumentError(
                    f"{self._host.name}: {parameter.name}: rank {self._rank} passes {list(shape)}; "
                    f"its block of {list(of_all)} is {list(block)}"
                )
        return tuple(global_shapes.values())


def addresses_and_shapes(arrays: Sequence[MadeOutput]) -> tuple[tuple[int, ...], tuple[Shape, ...]]:
    """Addresses and shapes of a rank's arrays, with 0 and () for missing arrays."""
    return tuple(one[0].address(one[1]) if one else 0 for one in arrays), tuple(tuple(one[1].shape) if one else () for one in arrays)
