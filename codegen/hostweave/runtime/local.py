"""A program on this rank of a group: what `program(*local_arrays)` does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hostweave.base.errors import ArgumentError, HostweaveError
from hostweave.build.cache import key_of
from hostweave.host_ir.calls import dedupe_functions
from hostweave.host_ir.ir import Communication, HostProgram, Parameter
from hostweave.host_ir.text import print_instruction
from hostweave.host_ir.tree import walk
from hostweave.runtime.arguments import accept, expect_writable
from hostweave.runtime.arrays import Array, Library, NumpyLibrary
from hostweave.runtime.cpu import Schedule, schedule
from hostweave.runtime.lifetime import calls as native_calls
from hostweave.runtime.meeting import CallSignature, Shape, Span
from hostweave.targets.target import CPU_DEVICE, Target
from hostweave.types.shards import block_shape, global_shape, holds, whole_shape

if TYPE_CHECKING:
    from hostweave.runtime.group import Group

T = TypeVar("T")

Output = tuple[Library, Array] | None  # None where this rank has none of it

_building = threading.Lock()  # ranks that are threads want the module at the same time


@dataclass(frozen=True)
class Taken:
    """The inputs of a call."""

    library: Library | None  # of the first that this rank has
    addresses: tuple[int, ...]
    shapes: tuple[Shape, ...]
    wholes: tuple[Shape, ...] | None  # of the global arrays, where this rank knows more than its own shapes
    stream: int  # cudaStream_t
    given: tuple[Output, ...] | None  # as out=
    donated: tuple[Output, ...]  # for each output
    spans: tuple[Span, ...]  # of what is taken and given


class CompiledProgram(Protocol):
    """What a rank needs of a `Program`."""

    target: Target

    @property
    def host_ir(self) -> str: ...
    @property
    def module(self) -> ModuleType: ...


class LocalProgram:
    """A program, ready on this rank. All ranks of the group make it at the same time."""

    def __init__(self, program: CompiledProgram, host: HostProgram, options: str, group: Group, verify_calls: bool):
        """Raises ArgumentError where the group cannot run the program, ExecutionError where its ranks do not agree on it."""
        group.expect_working()
        self._host, self._target, self._group = host, program.target, group
        self._meets = group.count > 1 and (group.in_process or verify_calls)
        if self._meets and not group.can_meet:
            where = f"{host.name}: verify_calls: the ranks of group {group.name!r} have nowhere to meet"
            raise ArgumentError(f"{where}; use a provider with a store, or leave it out")
        inputs = [parameter.name for parameter in host.inputs]
        self._donated = [inputs.index(p.memory) if p.memory else None for p in host.outputs]  # the number of the input of each output
        self._on_parts = any(p.type.mesh for p in (*host.inputs, *host.outputs))  # some ranks have nothing of some
        self._waits_for = _first_communication(host)
        self._intent = CallSignature(host.name, str(host.mesh), key_of(program.host_ir, options, program.target.name))
        self._ready_for: Any = None  # the shapes of the last call
        self._outputs: list[Shape] = []
        self._native_schedule: tuple[Schedule, Any] | None = None

        def on_this_rank() -> tuple[Any, Any]:
            self._check_group()
            with _building:
                module = program.module
            return module, group.member(module, self._target)

        (self._module, self._member), _ = self._agreed(on_this_rank, group.timeout)
        self._device = self._target.device_of_arrays(self._member)
        self._native: Any = group.connected(self._member, self._module)

    @property
    def progress(self) -> tuple[str, int, int, float]:
        """The program's name, calls made, calls done, and for how many seconds the first of the others has been waited for."""
        native = self._native
        return self._host.name, *(native.progress() if native else (0, 0, 0.0))

    def close(self) -> None:
        """Frees what the program holds on the rank."""
        self._native = self._member = None

    def __call__(self, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None) -> Any:
        """Calls the program with the rank's arrays, as `Program` says."""
        group = self._group
        group.expect_working()
        if self._meets:
            taken, signatures = self._agreed(lambda: self._take(arrays, out, stream, sizes), group.call_timeout)
            if group.in_process:
                self._expect_apart(span for signature in signatures for span in signature.spans)
            shapes_of_all = tuple(signature.shapes for signature in signatures)
            if self._ready_for != shapes_of_all:
                self._ready_for = None
                self._agreed(lambda: self._prepare(taken, self._whole_shapes(shapes_of_all)), group.call_timeout)
                self._ready_for = shapes_of_all
        else:
            taken = self._take(arrays, out, stream, sizes)
            if self._ready_for != (taken.shapes, taken.wholes):
                self._ready_for = None
                self._prepare(taken, taken.wholes)
                self._ready_for = taken.shapes, taken.wholes
        try:
            outputs = self._made(taken, stream is not None) if taken.given is None else self._fitting(taken.given)
        except BaseException as error:
            if self._meets:  # the others are on their way
                group.fail(f"rank {group.rank}: {error}")
            raise
        addresses = [output[0].address(output[1]) if output else 0 for output in outputs]
        group.run(self._host.name, self._member, lambda: self._native.run(taken.addresses, addresses, taken.stream, self._schedule()))
        if out is not None:
            return out
        results = tuple(
            arrays[number] if number is not None else output[0].give(output[1]) if output else None
            for number, output in zip(self._donated, outputs, strict=True)
        )
        return results[0] if len(results) == 1 else results

    # --- with the other ranks

    def _agreed(self, step: Callable[[], T], timeout: float) -> tuple[T, list[CallSignature]]:
        """Does what may fail on some ranks only, and tells the others. Either all go on, or all raise."""
        result, error = None, None
        try:
            result = step()
        except HostweaveError as problem:
            error = problem
        signature = replace(self._intent, error=str(error) if error else "")
        if isinstance(result, Taken):
            signature = replace(signature, shapes=result.shapes, spans=result.spans if self._group.in_process else ())
        signatures = self._group.agree(signature, self._waits_for, timeout, error)
        assert result is not None
        return result, signatures

    def _check_group(self) -> None:
        group, name, mesh = self._group, self._host.name, self._host.mesh
        if group.count != mesh.size:
            raise ArgumentError(f"{name}: is for the {mesh.size} ranks of {mesh}, and group {group.name!r} has {group.count}")
        if self._target.needs_one_process and not group.in_process:
            raise ArgumentError(
                f"{name}: is for the target {self._target.name}, whose ranks are threads of one process; group {group.name!r} "
                f"has {group.count} processes: compile for cuda, or use hw.Threads"
            )

    # --- inputs

    def _take(self, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None) -> Taken:
        name, parameters = self._host.name, self._host.inputs
        if len(arrays) != len(parameters):
            signature = ", ".join(f"{p.name}: {p.type}" for p in parameters)
            raise ArgumentError(f"{name}: takes {len(parameters)} arrays ({signature}), not {len(arrays)}")
        accepted = [self._accepted(parameter, array) for parameter, array in zip(parameters, arrays, strict=True)]
        library = next((one[0] for one in accepted if one), NumpyLibrary() if self._device == CPU_DEVICE else None)
        addresses = tuple(one[0].address(one[1]) if one else 0 for one in accepted)
        shapes = tuple(tuple(one[1].shape) if one else () for one in accepted)
        wholes = self._whole_shapes_for(sizes or {}, shapes) if sizes or (self._on_parts and not self._meets) else None
        donated = tuple(None if number is None else accepted[number] for number in self._donated)
        for number, one in zip(self._donated, donated, strict=True):
            if number is not None and one:
                expect_writable(f"{name}: {parameters[number].name}", *one)
        given = None if out is None else self._given(out, donated)
        is_own = [number is None for number in self._donated]
        spans = tuple(
            span
            for parameters_, arrays_, written in (
                (parameters, accepted, [number in self._donated for number in range(len(parameters))]),
                (self._host.outputs, [one if own else None for one, own in zip(given or (), is_own, strict=False)], is_own),
            )
            for span in self._spans(parameters_, arrays_, written)
        )
        self._expect_apart(spans)
        return Taken(library, addresses, shapes, wholes, self._handle(stream, library), given, donated, spans)

    def _holds(self, parameter: Parameter, rank: int | None = None) -> bool:
        """Whether a rank, by default this one, has anything of an input or output."""
        return holds(parameter.type, self._host.mesh, self._group.rank if rank is None else rank)

    def _accepted(self, parameter: Parameter, array: Array) -> tuple[Library, Array] | None:
        """The array, or None where this rank has none of it."""
        if self._holds(parameter) == (array is not None):
            return self._checked(parameter, array) if array is not None else None
        where, rank = f"{self._host.name}: {parameter.name}", self._group.rank
        if array is None:
            raise ArgumentError(f"{where}: is None, and rank {rank} has a block of {parameter.type}; pass it")
        raise ArgumentError(f"{where}: rank {rank} has nothing of {parameter.type}; pass None")

    def _checked(self, parameter: Parameter, array: Array) -> tuple[Library, Array]:
        library, array = accept(self._host.name, self._target, parameter.name, parameter.type, array)
        where = f"{self._host.name}: {parameter.name}"
        if (device := library.device(array)) != self._device:
            here = "in host memory" if device == CPU_DEVICE else f"on GPU {device}"
            raise ArgumentError(f"{where}: is {here}, and rank {self._group.rank} is on GPU {self._device}; move it there")
        if not library.is_contiguous(array):
            raise ArgumentError(f"{where}: is not contiguous, and a call copies nothing; pass a contiguous copy")
        return library, array

    def _prepare(self, taken: Taken, wholes: Sequence[Shape] | None) -> bool:
        with native_calls:
            self._outputs = self._native.prepare(taken.shapes, wholes or [()] * len(taken.shapes))
        return True

    def _whole_shapes(self, shapes_of_all: Sequence[Sequence[Shape]]) -> list[Shape]:
        """The shapes of the global inputs of which the ranks hold these blocks. Raises ArgumentError where they do not fit together."""
        wholes = []
        for index, parameter in enumerate(self._host.inputs):
            shapes = [shapes[index] for shapes in shapes_of_all]
            wholes.append(whole_shape(parameter.type, self._host.mesh, shapes))
            held = [rank for rank in range(len(shapes)) if self._holds(parameter, rank)]
            if any(shapes[rank] != block_shape(parameter.type, self._host.mesh, rank, wholes[-1]) for rank in held):
                usual = max((shapes[rank] for rank in held), key=shapes.count)
                odd = next(rank for rank in held if shapes[rank] != usual)
                raise ArgumentError(
                    f"{self._host.name}: {parameter.name}: rank {odd} passes {list(shapes[odd])}, and rank {shapes.index(usual)} "
                    f"{list(usual)}; pass blocks of one {parameter.type}"
                )
        return wholes

    def _whole_shapes_for(self, sizes: Mapping[str, int], shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """The shapes of the global inputs, for sizes that the caller knows; where that are none, ranks share evenly."""
        known = dict(sizes)
        for parameter, shape in zip(self._host.inputs, shapes, strict=True):
            mesh = parameter.type.mesh_in(self._host.mesh)
            for dim, size in zip(parameter.type.dims, shape, strict=True) if self._holds(parameter) else ():
                if not dim.size.is_int and not (dim.axes and sizes):
                    known.setdefault(str(dim.size), size * mesh.size_of(dim.axes))
        if missing := {name for p in self._host.inputs for dim in p.type.dims for name in dim.size.symbols} - known.keys():
            raise ArgumentError(f"{self._host.name}: sizes=: no size of {', '.join(sorted(missing))}; give the global one")
        wholes = tuple(global_shape(parameter.type, known) for parameter in self._host.inputs)
        for parameter, shape, whole in zip(self._host.inputs, shapes, wholes, strict=True):
            if self._holds(parameter) and shape != (block := block_shape(parameter.type, self._host.mesh, self._group.rank, whole)):
                raise ArgumentError(
                    f"{self._host.name}: {parameter.name}: rank {self._group.rank} passes {list(shape)}; "
                    f"its block of {list(whole)} is {list(block)}"
                )
        return wholes

    # --- outputs

    def _made(self, taken: Taken, on_given_stream: bool) -> list[Output]:
        """New outputs, for use on the stream of the call, and those that were donated."""
        held = [self._holds(parameter) and number is None for parameter, number in zip(self._host.outputs, self._donated, strict=True)]
        library = taken.library
        if library is None:
            if any(held):
                why = f"rank {self._group.rank} passes no array, so nothing says of which library its outputs are to be"
                raise ArgumentError(f"{self._host.name}: {why}; pass them as out=")
            return list(taken.donated)
        with library.on_stream(taken.stream if on_given_stream else None, self._device):
            return [
                (library, library.empty(shape, parameter.type.dtype, self._device)) if here else donated
                for parameter, shape, here, donated in zip(self._host.outputs, self._outputs, held, taken.donated, strict=True)
            ]

    def _given(self, out: Any, donated: Sequence[Output]) -> tuple[Output, ...]:
        parameters = self._host.outputs
        arrays = (out,) if len(parameters) == 1 else tuple(out)
        if len(arrays) != len(parameters):
            raise ArgumentError(f"{self._host.name}: out=: {len(arrays)} arrays for {len(parameters)} outputs")
        pairs = zip(parameters, arrays, donated, strict=True)
        outputs = tuple(one if p.memory and array is None else self._accepted(p, array) for p, array, one in pairs)
        for parameter, output, one in zip(parameters, outputs, donated, strict=True):
            if output and one and output[0].address(output[1]) != one[0].address(one[1]):
                where = f"{self._host.name}: out=: {parameter.name}: is returned in {parameter.memory}, which is donated"
                raise ArgumentError(f"{where}; pass None for it, or that array")
            if output and not output[0].is_writable(output[1]):
                raise ArgumentError(
                    f"{self._host.name}: out=: {parameter.name}: cannot be written to; pass another array, or leave out= away"
                )
        return outputs

    def _fitting(self, given: Sequence[Output]) -> Sequence[Output]:
        for parameter, shape, output in zip(self._host.outputs, self._outputs, given, strict=True):
            if output and tuple(output[1].shape) != shape:
                where = f"{self._host.name}: out=: {parameter.name}"
                raise ArgumentError(f"{where}: expected the local shape {list(shape)}, got {list(output[1].shape)}")
        return given

    def _spans(self, parameters: Sequence[Parameter], arrays: Sequence[Output], written: Sequence[bool]) -> Iterator[Span]:
        for parameter, one, is_written in zip(parameters, arrays, written, strict=False):
            if one and (bytes_ := prod(one[1].shape) * parameter.type.dtype.itemsize):
                begin = one[0].address(one[1])
                yield Span(begin, begin + bytes_, self._group.rank, parameter.name, is_written)

    def _expect_apart(self, spans: Iterable[Span]) -> None:
        """Raises ArgumentError where a given output, or a donated input, shares memory with an input or another one: programs write
        before they have read.
        """
        last = last_written = Span(0, 0, 0, "", False)  # of those that begin before, the one that ends last
        for span in sorted(spans):
            other = last if span.written else last_written
            if span.begin < other.end:
                pair = sorted((other, span), key=lambda one: not one.written)
                names = [one.name if span.rank == other.rank else f"{one.name} of rank {one.rank}" for one in pair]
                what = f"{pair[0].name}, which is donated" if pair[0].name in {p.memory for p in self._host.outputs} else "out="
                raise ArgumentError(f"{self._host.name}: {what}: {' and '.join(names)} overlap in memory; pass an array of its own")
            last = max(last, span, key=lambda one: one.end)
            last_written = max(last_written, span, key=lambda one: one.end) if span.written else last_written

    # --- how it runs

    def _handle(self, stream: Any, library: Library | None) -> int:
        try:
            handle = self._target.stream(stream)
        except TypeError as error:
            raise ArgumentError(f"{self._host.name}: {error}") from None
        if handle is None:
            return library.stream(self._device) if library else 0
        return handle

    def _schedule(self) -> Any:
        wanted = schedule()
        if self._native_schedule is None or self._native_schedule[0] is not wanted:
            self._native_schedule = wanted, self._module.Schedule(**vars(wanted))
        return self._native_schedule[1]


def _first_communication(host: HostProgram) -> str:
    """What a rank waits at where others do not come."""
    instruction = next((i for i in walk(dedupe_functions(host).body) if isinstance(i, Communication)), None)
    if instruction is None:
        return ""
    channel = host.channel(instruction.channel)
    text = " ".join(line.strip() for line in print_instruction(instruction))
    place = f" ({instruction.location})" if instruction.location else ""
    return f"; `{text}`{place} needs all ranks of its channel along {', '.join(channel.axes)} of {channel.mesh}"
