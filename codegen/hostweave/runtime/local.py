"""A program on this rank of a group: what `program(*local_arrays)` does."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hostweave.base.errors import ArgumentError, CaptureError, ExecutionError, HostweaveError
from hostweave.build.cache import key_of
from hostweave.host_ir.calls import dedupe_functions
from hostweave.host_ir.chosen_loops import LoopsDoNotDivide, expect_divided
from hostweave.host_ir.ir import Communication, HostProgram, Parameter
from hostweave.host_ir.text import print_instruction
from hostweave.host_ir.tree import walk
from hostweave.options import Options
from hostweave.runtime.algorithms import Measured
from hostweave.runtime.arguments import accept, expect_writable, local_part
from hostweave.runtime.arrays import Array, Library, NumpyLibrary, library_of, states_of
from hostweave.runtime.bound import Bound
from hostweave.runtime.captured import Captured
from hostweave.runtime.cpu import Schedule, schedule
from hostweave.runtime.lifetime import calls as native_calls
from hostweave.runtime.meeting import CallSignature, Shape, Span
from hostweave.runtime.taken import Table, Taken
from hostweave.runtime.windows import places_of
from hostweave.targets.target import CPU_DEVICE, Target
from hostweave.types.shards import block_shape, global_shape, holds, shape_of_global

if TYPE_CHECKING:
    from hostweave.runtime.group import Group

T = TypeVar("T")

Output = tuple[Library, Array] | None  # None where this rank has none of it

_building = threading.Lock()  # ranks that are threads want the module at the same time
_MOST_TAKEN = 64  # sets of arrays, with one that is bound


class CompiledProgram(Protocol):
    """What a rank needs of a `Program`."""

    target: Target

    @property
    def module(self) -> ModuleType: ...


class LocalProgram:
    """A program, ready on this rank. All ranks of the group make it at the same time."""

    def __init__(self, program: CompiledProgram, host: HostProgram, options: Options, group: Group, stream: int):
        """Raises ArgumentError where the group cannot run the program, ExecutionError where its ranks do not agree on it,
        CaptureError where the stream of the first call is being captured."""
        group.expect_working()
        self._host, self._target, self._group = host, program.target, group
        self._meets = group.count > 1 and (group.in_process or options.verify_calls)
        self._graphs = options.graph == "auto"
        if self._meets and not group.can_meet:
            where = f"{host.name}: verify_calls: the ranks of group {group.name!r} have nowhere to meet"
            raise ArgumentError(f"{where}; use a provider with a store, or leave it out")
        if options.tune and group.count > 1 and not (group.in_process or group.can_meet):
            where = f"{host.name}: tune: the ranks of group {group.name!r} have nowhere to agree on algorithms"
            raise ArgumentError(f"{where}; use a provider with a store, or leave it out")
        self._on_parts = any(p.type.mesh for p in (*host.inputs, *host.outputs))  # some ranks have nothing of some
        self._makes = [self._holds(output) and not output.memory for output in host.outputs]
        self._waits_for = _first_communication(host)
        self._intent = CallSignature(host.name, str(host.mesh), key_of(host.code, repr(options), program.target.name))
        self._ready_for: Any = None  # the shapes of the last call
        self._bound_spans: tuple[Span, ...] = ()  # of all ranks, in the last call
        self._apart: deque[tuple[tuple[Span, ...], ...]] = deque(maxlen=2)  # that were found to be, of this rank and of all
        self._tables: weakref.WeakKeyDictionary[Bound, Table] = weakref.WeakKeyDictionary()
        self._outputs: list[Shape] = []
        self._native_schedule: tuple[Schedule, Any] | None = None

        def on_this_rank() -> tuple[Any, Any]:
            self._check_group()
            with _building:
                module = program.module
            if stream and module.is_captured(stream):
                raise CaptureError(f"{host.name}: the stream is being captured, and this is the first call; call the program once before")
            return module, group.member(module, self._target)

        (self._module, self._member), _ = self._agreed(on_this_rank, group.timeout)
        self._device = self._target.device_of_arrays(self._member)
        self._native: Any = group.connected(self._member, self._module, options.tune)
        self.out_of_reach: str = self._module.out_of_reach(self._member)  # why its ranks cannot reach each other's memory; the same on all
        self._measured = Measured(self._module, self._target.device_name()) if options.tune else None

    @property
    def progress(self) -> tuple[str, int, int, float]:
        """The program's name, calls made, calls done, and for how many seconds the first of the others has been waited for."""
        native = self._native
        return self._host.name, *(native.progress() if native else (0, 0, 0.0))

    def close(self) -> None:
        """Frees what the program holds on the rank."""
        self._native = self._member = None
        self._tables.clear()

    def __call__(self, bound: Bound, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None) -> Any:
        """Calls the program with the rank's arrays, as `Program` says."""
        _, outputs, _ = self._call(bound, arrays, out, stream, sizes)
        return self._given_back(bound, arrays, outputs) if out is None else out

    def prepare(self, bound: Bound, sizes: Sequence[Mapping[str, int]]) -> None:
        """Makes what calls of these global sizes need, as `Program.prepare` says."""

        mesh, rank = self._host.mesh, self._group.rank

        def step() -> bool:
            bound_shapes = (self._tables.get(bound) or self._table(bound)).shapes
            global_shapes = [self._global_shapes_for(one, bound_shapes, "prepare") for one in sizes]
            global_shapes.sort(key=lambda shapes: -sum(map(prod, shapes)))  # so that memory is taken once
            for shapes in global_shapes:
                expect_divided(self._host, shapes)
            with native_calls, self._measuring():
                for shapes in global_shapes:
                    pairs = zip(self._host.inputs, shapes, strict=True)
                    local = [block_shape(p.type, mesh, rank, shape) if self._holds(p) else () for p, shape in pairs]
                    self._native.prepare(local, shapes, 0)
            return True

        self._group.expect_working()
        self._ready_for = None
        self._agreed(step, self._group.timeout) if self._meets else step()

    def capture(self, bound: Bound, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None) -> Captured:
        """Calls the program, and captures that call."""
        taken, outputs, addresses = self._call(bound, arrays, out, stream, sizes)
        name, native, member = self._host.name, self._native, self._member

        def make() -> Any:
            return self._group.run(name, member, lambda: native.capture(taken.table.native, taken.addresses, addresses))

        graph = self._agreed(make, self._group.call_timeout)[0] if self._meets else make()

        def launch(stream: Any) -> None:
            self._group.expect_working()
            if self._native is not native:
                raise ExecutionError(f"{name}: the program is closed; compile it again")
            handle = self._handle(stream, taken.library)
            if self._meets and not self._target.is_asynchronous:  # which would take a rank that is late for one that never comes
                self._agreed(lambda: taken, self._group.call_timeout)
            self._group.run(name, member, lambda: native.launch(graph, handle, self._schedule()))

        return Captured(launch, (bound, taken, arrays), lambda: self._given_back(bound, arrays, outputs) if out is None else out)

    def _call(
        self, bound: Bound, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None
    ) -> tuple[Taken, Sequence[Output], tuple[int, ...]]:
        """Makes a call. Returns also the outputs that were made for it, and where all of them are."""
        group = self._group
        group.expect_working()

        def take() -> Taken:
            return self._take(bound, arrays, out, stream, sizes)

        taken = self._ready_together(take) if self._meets else self._ready_alone(take)
        outputs, addresses = self._outputs_of(taken, stream is not None)
        arguments = taken.table.native, taken.addresses, addresses, taken.stream, self._schedule(), self._graphs
        group.run(self._host.name, self._member, lambda: self._native.run(*arguments))
        return taken, outputs, addresses

    def _given_back(self, bound: Bound, arrays: Sequence[Array], outputs: Sequence[Output]) -> Any:
        """What the caller gets: of a donated input the array that he gave."""
        given = dict(zip((p.name for p in bound.free), arrays, strict=True))
        results = tuple(
            given[p.memory] if p.memory else output[0].give(output[1]) if output else None
            for p, output in zip(self._host.outputs, outputs, strict=True)
        )
        return results[0] if len(results) == 1 else results

    def _outputs_of(self, taken: Taken, on_given_stream: bool) -> tuple[Sequence[Output], tuple[int, ...]]:
        try:
            if taken.given is None:
                made = self._made(taken, on_given_stream)
                return made, tuple(map(int.__or__, taken.donated, _places(made)[0]))
            self._expect_fitting(taken.given[1])
            return (), taken.given[0]
        except BaseException as error:
            if self._meets:  # the others are on their way
                self._group.fail(f"rank {self._group.rank}: {error}")
            raise

    def _ready_alone(self, take: Callable[[], Taken]) -> Taken:
        taken = take()
        ready_for = taken.table.digest, taken.shapes, taken.sizes
        if self._ready_for != ready_for:
            before, self._ready_for = self._ready_for, None
            try:
                self._prepare(taken, self._global_shapes(taken))
            except (CaptureError, LoopsDoNotDivide):  # nothing was done
                self._ready_for = before
                raise
            self._ready_for = ready_for
        return taken

    # --- with the other ranks

    def _ready_together(self, take: Callable[[], Taken]) -> Taken:
        """Ranks tell each other what they have bound only when that has changed."""
        timeout = self._group.call_timeout
        taken, signatures = self._agreed(take, timeout)
        ready_for = tuple((signature.bound, signature.shapes) for signature in signatures)
        changed = self._ready_for != ready_for
        if changed:
            self._ready_for = None
            shapes_of_all = [signature.shapes for signature in signatures]
            self._bound_spans = ()
            if any(signature.bound for signature in signatures):
                table = taken.table
                _, everything = self._agreed(lambda: replace(taken, shapes=taken.all_shapes, spans=table.spans), timeout)
                shapes_of_all = [signature.shapes for signature in everything]
                self._bound_spans = tuple(span for signature in everything for span in signature.spans)
        if self._group.in_process:
            self._expect_apart(self._bound_spans, tuple(span for signature in signatures for span in signature.spans))
        if changed:
            self._agreed(lambda: self._prepare(taken, self._global_shapes_of(shapes_of_all)), timeout)
            self._ready_for = ready_for
        return taken

    def _agreed(self, step: Callable[[], T], timeout: float) -> tuple[T, list[CallSignature]]:
        """Does what may fail on some ranks only, and tells the others. Either all go on, or all raise."""
        result, error = None, None
        try:
            result = step()
        except HostweaveError as problem:
            error = problem
        signature = replace(self._intent, error=str(error) if error else "")
        if isinstance(result, Taken):
            spans = result.spans if self._group.in_process else ()
            signature = replace(signature, shapes=result.shapes, spans=spans, bound=result.table.digest, windows=result.windows)
        signatures = self._group.agree(signature, self._waits_for, timeout, error)
        assert result is not None
        return result, signatures

    def _check_group(self) -> None:
        group, name, mesh = self._group, self._host.name, self._host.mesh
        if group.count != mesh.size:
            raise ArgumentError(f"{name}: is for the {mesh.size} ranks of {mesh}, and group {group.name!r} has {group.count}")
        if self._target.needs_one_host and group.hosts > 1:
            raise ArgumentError(
                f"{name}: is for the target {self._target.name}, whose ranks share the memory of one host; group {group.name!r} "
                f"is on {group.hosts} hosts: compile for cuda, or start all ranks on one"
            )

    # --- inputs

    def _take(self, bound: Bound, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None) -> Taken:
        table = self._tables.get(bound) or self._table(bound)
        outs = None if out is None else (out,) if len(self._host.outputs) == 1 else tuple(out)
        states, known = states_of((*arrays, *(outs or ()))), tuple((sizes or {}).items())
        key = states and (states, len(arrays), outs is None, known, self._group.windows.made)
        taken = table.taken.get(key) if key else None
        if taken is None:
            taken = self._checked_arrays(table, bound.free, arrays, outs, known)
            if key:
                if len(table.taken) == _MOST_TAKEN:
                    table.taken.clear()
                table.taken[key] = taken
        handle = self._handle(stream, taken.library)
        return taken if taken.stream == handle else replace(taken, stream=handle)

    def _checked_arrays(
        self,
        table: Table,
        parameters: Sequence[Parameter],
        arrays: Sequence[Array],
        outs: Sequence[Array] | None,
        sizes: tuple[tuple[str, int], ...],
    ) -> Taken:
        """What is taken of arrays that fit the program, each by itself and all together."""
        name = self._host.name
        if len(arrays) != len(parameters):
            signature = ", ".join(f"{p.name}: {p.type}" for p in parameters)
            raise ArgumentError(f"{name}: takes {len(parameters)} arrays ({signature}), not {len(arrays)}")
        accepted = [self._accepted(parameter, array) for parameter, array in zip(parameters, arrays, strict=True)]
        library = next((one[0] for one in accepted if one), table.library)
        by_name = dict(zip((p.name for p in parameters), accepted, strict=True))
        donated = tuple(by_name[p.memory] if p.memory else None for p in self._host.outputs)
        for p, one in zip(self._host.outputs, donated, strict=True):
            if one:
                expect_writable(f"{name}: {p.memory}", *one)
        given = None if outs is None else self._given(outs, donated)
        taken_for = {p.memory for p in self._host.outputs}
        new = [None if p.memory else one for p, one in zip(self._host.outputs, given or (), strict=False)]
        spans = (
            *self._spans(parameters, accepted, [p.name in taken_for for p in parameters]),
            *self._spans(self._host.outputs, new, [True] * len(new)),
        )
        self._expect_apart(table.spans, spans)
        where = None if given is None else (_places(given)[0], tuple(tuple(one[1].shape) if one else None for one in given))
        windows = places_of(self._group.windows, self._host, (*table.spans, *spans), outs is not None)
        taken = Taken(table, library, *_places(accepted), sizes, 0, where, _places(donated)[0], spans, windows)
        if sizes and self._meets:
            self._global_shapes(taken)  # what the ranks find out together is to be what the caller says
        return taken

    def _table(self, bound: Bound) -> Table:
        """What the rank has bound. Raises ArgumentError where an array is not one for this rank."""
        parameters = [parameter for parameter in self._host.inputs if parameter.name in bound.arrays]
        held = [self._on_this_rank(parameter, *bound.arrays[parameter.name]) for parameter in parameters]
        addresses, shapes = _places(held)
        places = dict(zip((parameter.name for parameter in parameters), zip(addresses, shapes, strict=True), strict=True))
        of_all = [places.get(parameter.name) for parameter in self._host.inputs]
        native = self._module.Table([place and place[0] for place in of_all])
        library = next((one[0] for one in held if one), NumpyLibrary() if self._device == CPU_DEVICE else None)
        digest = key_of(*map(str, places.items())) if places else ""
        shapes_of_all = tuple(place and place[1] for place in of_all)
        spans = tuple(self._spans(parameters, held, [False] * len(held)))
        made = self._tables[bound] = Table(library, shapes_of_all, spans, digest, native)
        return made

    def _global_shapes(self, taken: Taken) -> tuple[Shape, ...] | None:
        """The shapes of the global arrays, where this rank knows more than its own shapes."""
        if not taken.sizes and not (self._on_parts and not self._meets):
            return None
        return self._global_shapes_for(dict(taken.sizes), taken.all_shapes)

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
        array = local_part(self._host.name, parameter.name, parameter.type, self._host.mesh, array)
        return self._on_this_rank(parameter, *accept(self._host.name, self._target, parameter.name, parameter.type, array))

    def _on_this_rank(self, parameter: Parameter, library: Library, array: Array) -> tuple[Library, Array]:
        where = f"{self._host.name}: {parameter.name}"
        if not self._holds(parameter):
            raise ArgumentError(f"{where}: rank {self._group.rank} has nothing of {parameter.type}; pass None, and do not bind it here")
        if (device := library.device(array)) != self._device:
            here = "in host memory" if device == CPU_DEVICE else f"on GPU {device}"
            raise ArgumentError(f"{where}: is {here}, and rank {self._group.rank} is on GPU {self._device}; move it there")
        if not library.is_contiguous(array):
            raise ArgumentError(f"{where}: is not contiguous, and a call copies nothing; pass a contiguous copy")
        return library, array

    def _prepare(self, taken: Taken, global_shapes: Sequence[Shape] | None) -> bool:
        shapes = taken.all_shapes
        expect_divided(self._host, global_shapes or list(map(self._if_even, self._host.inputs, shapes)))
        with native_calls, self._measuring():
            self._outputs = self._native.prepare(shapes, global_shapes or [()] * len(shapes), taken.stream)
        return True

    def _if_even(self, parameter: Parameter, shape: Shape) -> Shape:
        """The shape of the global array of which this rank holds a block of that shape, as all others do."""
        mesh = parameter.type.mesh_in(self._host.mesh)
        return tuple(size * mesh.size_of(dim.axes) for dim, size in zip(parameter.type.dims, shape, strict=bool(shape)))

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Inside, plans are made. Ranks that are processes all take what one of them has measured, now or before."""
        alone = self._group.count == 1 or self._group.in_process
        if self._measured and not alone:
            self._measured.agree(self._gathered)
        yield
        if self._measured:
            if not alone:
                self._measured.agree(self._gathered)
            self._measured.keep()

    def _gathered(self, record: str) -> list[str]:
        signature = CallSignature(f"{self._host.name}: tune", str(self._host.mesh), "", bound=record)
        return [one.bound for one in self._group.agree(signature, "", self._group.timeout)]

    def _global_shapes_of(self, shapes_of_all: Sequence[Sequence[Shape]]) -> list[Shape]:
        """The shapes of the global inputs of which the ranks hold these blocks. Raises ArgumentError where they do not fit together."""
        global_shapes = []
        for index, parameter in enumerate(self._host.inputs):
            shapes = [shapes[index] for shapes in shapes_of_all]
            global_shapes.append(shape_of_global(parameter.type, self._host.mesh, shapes))
            held = [rank for rank in range(len(shapes)) if self._holds(parameter, rank)]
            if any(shapes[rank] != block_shape(parameter.type, self._host.mesh, rank, global_shapes[-1]) for rank in held):
                usual = max((shapes[rank] for rank in held), key=shapes.count)
                odd = next(rank for rank in held if shapes[rank] != usual)
                raise ArgumentError(
                    f"{self._host.name}: {parameter.name}: rank {odd} passes {list(shapes[odd])}, and rank {shapes.index(usual)} "
                    f"{list(usual)}; pass blocks of one {parameter.type}"
                )
        return global_shapes

    def _global_shapes_for(self, sizes: Mapping[str, int], shapes: Sequence[Shape | None], what: str = "sizes=") -> tuple[Shape, ...]:
        """The shapes of the global inputs, for sizes that the caller knows, and local shapes, None where there is no array yet; sharded
        dims are even where nothing is said."""
        known, pairs = dict(sizes), [(p, s) for p, s in zip(self._host.inputs, shapes, strict=True) if s is not None and self._holds(p)]
        trusted = not sizes or None in shapes  # a call with sizes names all of the sharded dims
        for parameter, shape in pairs:
            mesh = parameter.type.mesh_in(self._host.mesh)
            for dim, size in zip(parameter.type.dims, shape, strict=True):
                if not dim.size.is_int and (trusted or not dim.axes):
                    known.setdefault(str(dim.size), size * mesh.size_of(dim.axes))
        if missing := {name for p in self._host.inputs for dim in p.type.dims for name in dim.size.symbols} - known.keys():
            raise ArgumentError(f"{self._host.name}: {what}: no size of {', '.join(sorted(missing))}; give the global one")
        try:
            global_shapes = {p.name: global_shape(p.type, known) for p in self._host.inputs}
        except ValueError as error:
            raise ArgumentError(f"{self._host.name}: {what}: {error}") from None
        for parameter, shape in pairs:
            of_all = global_shapes[parameter.name]
            if shape != (block := block_shape(parameter.type, self._host.mesh, self._group.rank, of_all)):
                raise ArgumentError(
                    f"{self._host.name}: {parameter.name}: rank {self._group.rank} passes {list(shape)}; "
                    f"its block of {list(of_all)} is {list(block)}"
                )
        return tuple(global_shapes.values())

    # --- outputs

    def _made(self, taken: Taken, on_given_stream: bool) -> list[Output]:
        """New outputs, for use on the stream of the call; None for those that take over an input."""
        held, library = self._makes, taken.library
        if library is None:
            if any(held):
                why = f"rank {self._group.rank} passes no array, so nothing says of which library its outputs are to be"
                raise ArgumentError(f"{self._host.name}: {why}; pass them as out=")
            return [None] * len(held)
        with library.on_stream(taken.stream if on_given_stream else None, self._device):
            return [
                (library, library.empty(shape, parameter.type.dtype, self._device)) if here else None
                for parameter, shape, here in zip(self._host.outputs, self._outputs, held, strict=True)
            ]

    def _given(self, arrays: Sequence[Array], donated: Sequence[Output]) -> tuple[Output, ...]:
        parameters = self._host.outputs
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

    def _expect_fitting(self, given: Sequence[Shape | None]) -> None:
        for parameter, shape, here in zip(self._host.outputs, self._outputs, given, strict=True):
            if here is not None and here != shape:
                where = f"{self._host.name}: out=: {parameter.name}"
                raise ArgumentError(f"{where}: expected the local shape {list(shape)}, got {list(here)}")

    def _spans(self, parameters: Sequence[Parameter], arrays: Sequence[Output], written: Sequence[bool]) -> Iterator[Span]:
        for parameter, one, is_written in zip(parameters, arrays, written, strict=False):
            if one and (bytes_ := prod(one[1].shape) * parameter.type.dtype.itemsize):
                begin = one[0].address(one[1])
                yield Span(begin, begin + bytes_, self._group.rank, parameter.name, is_written)

    def _expect_apart(self, bound: tuple[Span, ...], taken: tuple[Span, ...]) -> None:
        """Raises ArgumentError where a given output, or a donated input, shares memory with an input or another one: programs write
        before they have read.
        """
        if not any(span.written for span in taken) or (bound, taken) in self._apart:
            return
        last = last_written = Span(0, 0, 0, "", False)  # of those that begin before, the one that ends last
        for span in sorted((*bound, *taken)):
            other = last if span.written else last_written
            if span.begin < other.end:
                pair = sorted((other, span), key=lambda one: not one.written)
                names = [one.name if span.rank == other.rank else f"{one.name} of rank {one.rank}" for one in pair]
                what = f"{pair[0].name}, which is donated" if pair[0].name in {p.memory for p in self._host.outputs} else "out="
                raise ArgumentError(f"{self._host.name}: {what}: {' and '.join(names)} overlap in memory; pass an array of its own")
            last = max(last, span, key=lambda one: one.end)
            last_written = max(last_written, span, key=lambda one: one.end) if span.written else last_written
        self._apart.append((bound, taken))

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
        if wanted.is_special and not self._group.in_process:
            raise ArgumentError(
                f"{self._host.name}: seeded schedules, buffered sends and the check of dependencies are of ranks that are threads of one "
                f"process; group {self._group.name!r} has {self._group.count} processes: use hw.Threads or program.run for them"
            )
        if self._native_schedule is None or self._native_schedule[0] is not wanted:
            self._native_schedule = wanted, self._module.Schedule(**vars(wanted))
        return self._native_schedule[1]


def stream_of_call(target: Target, stream: Any, arrays: Sequence[Array]) -> int:
    """The native stream of a call with these arrays, 0 where there is no telling before it is checked."""
    try:
        if (handle := target.stream(stream)) is not None:
            return handle
        for array in arrays:
            library = library_of(array)
            if (device := library.device(array)) != CPU_DEVICE:
                return library.stream(device)
    except (TypeError, AttributeError):
        pass
    return 0


def _places(arrays: Sequence[Output]) -> tuple[tuple[int, ...], tuple[Shape, ...]]:
    """Addresses and shapes of a rank's arrays."""
    return tuple(one[0].address(one[1]) if one else 0 for one in arrays), tuple(tuple(one[1].shape) if one else () for one in arrays)


def _first_communication(host: HostProgram) -> str:
    """What a rank waits at where others do not come."""
    instruction = next((i for i in walk(dedupe_functions(host).body) if isinstance(i, Communication)), None)
    if instruction is None:
        return ""
    channel = host.channel(instruction.channel)
    text = " ".join(line.strip() for line in print_instruction(instruction))
    place = f" ({instruction.location})" if instruction.location else ""
    return f"; `{text}`{place} needs all ranks of its channel along {', '.join(channel.axes)} of {channel.mesh}"
