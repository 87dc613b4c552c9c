"""A program on this rank of a group. Implements `program(*local_arrays)`."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import prod
from types import ModuleType
from typing import Any, TypeVar, cast

from hostweave.base.errors import ArgumentError, CaptureError, ExecutionError, HostweaveError, reason_of
from hostweave.base.forks import reset_after_fork
from hostweave.build.cache import key_of
from hostweave.host_ir.calls import dedupe_functions
from hostweave.host_ir.ir import Communication, HostProgram
from hostweave.host_ir.size_requirements import expect_divided
from hostweave.host_ir.tree import walk
from hostweave.options import Options
from hostweave.runtime.algorithms import MeasuredAlgorithms
from hostweave.runtime.arguments import BoundInputs
from hostweave.runtime.arrays import Array, library_of
from hostweave.runtime.call import GlobalCall
from hostweave.runtime.checked_call import Arguments, CheckedCall, MadeOutput, addresses_and_shapes
from hostweave.runtime.coordinator import ByteRange, CallSignature
from hostweave.runtime.cpu import CpuSchedule, schedule
from hostweave.runtime.graphs import Captured, CommonGraphs
from hostweave.runtime.group import Group
from hostweave.runtime.lifetime import calls as native_calls
from hostweave.runtime.sizes import CallSizes, ComparedSizes, LastSizes
from hostweave.runtime.standstill import RankPosition, position_of
from hostweave.targets.target import CPU_DEVICE, Target
from hostweave.types.tensor import Shape, block_shape, holds

T = TypeVar("T")
StagedWork = Callable[[Any, Any, Any], T]  # (native program, native schedule, native staging) -> result

_build_lock = reset_after_fork(threading.Lock())  # ranks that are threads would otherwise build at the same time


class LocalProgram:
    """A program that is ready to run on this rank. All ranks construct the program together."""

    def __init__(
        self,
        host: HostProgram,
        target: Target,
        module: Callable[[], ModuleType],
        options: Options,
        group: Group,
        stream: int,
        lacks: str = "",
        family: object = None,
    ):
        """`module()` builds and loads the native module. All variants of a program share the object `family`. `lacks` is the reason why
        this rank's communication library is missing or too old, or "". If a rank's `lacks` is not empty, every rank takes this text as
        `out_of_reach`, and no channel is created."""
        group.expect_working()
        self.host, self.target, self._group = host, target, group
        self._verifies_calls = group.count > 1 and (group.in_process or options.verify_calls)
        on_all_ranks = any(channel.transport.graphs_on_all_ranks for channel in host.channels)
        self.common_graphs = CommonGraphs() if options.graph == "auto" and on_all_ranks else None
        for option, is_set in (("verify_calls", self._verifies_calls), ("tune", options.tune), ('graph="auto"', self.common_graphs)):
            if is_set and group.count > 1 and not group.can_coordinate:
                where = f"{host.name}: {option}: the ranks of group {group.name!r} have no store for messages"
                raise ArgumentError(f"{where}; use a provider with a store, or omit the option")
        self._allocates = [holds(output.type, host.mesh, group.rank) and not output.memory for output in host.results]
        self._waits_for = _first_communication(host)
        self._intent = CallSignature(host.name, str(host.mesh), key_of(host.code, repr(options), target.name))
        self._ready_for: Any = None  # shapes for which the native program is prepared
        self._staging: Any = None  # native copies of arrays, for `Program.run`
        self._bound_spans: tuple[ByteRange, ...] = ()  # memory of bound inputs on all ranks
        self._outputs: list[Shape] = []
        self._native_schedule: tuple[CpuSchedule, Any] | None = None

        def on_this_rank() -> tuple[Any, Any]:
            self._check_group()
            with _build_lock:
                loaded = module()
            if stream and loaded.is_captured(stream):
                raise CaptureError(f"{host.name}: the stream is being captured, but this is the first call; make one call before capturing")
            return loaded, group.member(loaded, self.target)

        self._intent = replace(self._intent, bound=lacks)
        group.announce()
        (self.module, self._member), signatures = self._agree(on_this_rank, group.timeout)
        self._intent, missing = replace(self._intent, bound=""), [one.bound for one in signatures if one.bound]
        graphs = self.module.Graphs
        self._graphs = graphs.noted if self.common_graphs else graphs.repeated if options.graph == "auto" else graphs.never
        self._device = self.target.device_of_arrays(self._member)
        self.arguments = Arguments(host, self.target, group.rank, self._device, self.module.Table, self._verifies_calls, group.windows)
        self.native: Any = None if missing else group.connected(self._member, self.module, options.tune)
        # Reason why this rank cannot run the program, or "": a library is missing or too old, or the memory of peers is out of reach.
        self.out_of_reach: str = missing[0] if missing else self._why_out_of_reach()
        self._measured = MeasuredAlgorithms(self.module, self.target.device_name()) if options.tune else None
        self._shares_algorithms = True  # True if the ranks share measured algorithms before the next plans
        self._compared: ComparedSizes | None = None
        if self._waits_for and group.can_coordinate and not (group.in_process or options.verify_calls):
            sizes_of = partial(_sizes_of, host, self.arguments)
            self._compared = ComparedSizes(host, group, self._intent, self._waits_for, sizes_of, LastSizes.of(group, family))
        self._run = group.run if target.is_asynchronous else group.run_and_wait

    def _why_out_of_reach(self) -> str:
        """Reason why this rank cannot access the memory of peers, or "". With optional transports, all ranks return the first reason that
        is not empty."""
        with self._group.failing():  # otherwise the other ranks would wait for this rank
            why = str(self._group.waiting(lambda: self.module.out_of_reach(self._member)))
        if not self.host.optional_transports:
            return why
        return next(filter(None, self._gather("reach", why, self._waits_for, self._group.timeout)), "")

    @property
    def progress(self) -> tuple[str, int, int, float]:
        """Name of the program, calls made, calls done, and seconds since the start of the oldest unfinished call."""
        native = self.native
        return self.host.name, *(native.progress() if native else (0, 0, 0.0))

    def position(self) -> RankPosition:
        native = self.native
        if native is None:
            return RankPosition(self.host.name, 0, 0)
        position = native.standstill()  # read before the counts, so that the counts include the described call
        return position_of(self.host.name, native.progress(), position, self.module)

    def close(self) -> None:
        self._staging = self.native = self._member = None
        self.arguments.tables.clear()

    def _open(self) -> tuple[Any, Any]:
        native, member = self.native, self._member
        if native is None or member is None:
            self._group.expect_working()
            raise ExecutionError(f"{self.host.name}: the program is closed; compile it again")
        return native, member

    def __call__(self, bound: BoundInputs, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None) -> Any:
        with self._group.calling:
            _, outputs, _ = self._call(bound, arrays, out, stream, sizes)
        return self._results_for_caller(bound, arrays, outputs) if out is None else out

    def prepare(self, bound: BoundInputs, sizes: Sequence[Mapping[str, int]]) -> None:
        mesh, rank = self.host.mesh, self._group.rank

        def prepare_all() -> None:
            bound_shapes = self.arguments.table(bound).shapes
            global_shapes = [self.arguments.global_shapes_for(one, bound_shapes, "prepare") for one in sizes]
            if self._compared:
                self._compared.compare_prepared(global_shapes)
                self._shares_algorithms = True
            global_shapes.sort(key=lambda shapes: -sum(map(prod, shapes)))  # largest first, so that memory grows once
            for shapes in global_shapes:
                expect_divided(self.host, shapes)
            native, _ = self._open()
            with native_calls, self._measuring():
                for shapes in global_shapes:
                    pairs = zip(self.host.arguments, shapes, strict=True)
                    local = [block_shape(p.type, mesh, rank, shape) if self.arguments.holds(p) else () for p, shape in pairs]
                    self._prepare_native(native, local, shapes, 0)

        with self._group.calling:
            self._group.expect_working()
            self._ready_for = None
            self._agree(prepare_all, self._group.timeout) if self._verifies_calls else prepare_all()

    def capture(self, bound: BoundInputs, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None) -> Captured:
        name = self.host.name

        def make() -> Any:
            return self._group.run(name, member, native.capture, checked_call.table.native, checked_call.addresses, addresses)

        with self._group.calling:
            native, member = self._open()
            checked_call, outputs, addresses = self._call(bound, arrays, out, stream, sizes)
            graph = self._agree(make, self._group.call_timeout)[0] if self._verifies_calls else make()

        shapes = _shapes_of(checked_call)

        def launch(stream: Any) -> None:
            with self._group.calling:
                self._group.expect_working()
                self._open()
                handle = self.arguments.handle(stream, checked_call.library)
                self._compare(checked_call, shapes)
                if self._verifies_calls and not self.target.is_asynchronous:  # on the CPU target, nothing else detects late ranks
                    self._agree(lambda: checked_call, self._group.call_timeout)
                self._launch(checked_call, name, member, native.launch, graph, handle, self._schedule())

        kept_alive = bound, checked_call, arrays
        if out is None and checked_call.library and checked_call.library.gives_copies:
            return Captured(launch, kept_alive, lambda: self._results_for_caller(bound, arrays, outputs))
        results = self._results_for_caller(bound, arrays, outputs) if out is None else out
        return Captured(launch, kept_alive, lambda: results)

    # --- for `Program.run`

    def is_prepared_for(self, call: GlobalCall) -> bool:
        return bool(self._ready_for == call.global_shapes())

    def prepare_for(self, call: GlobalCall) -> None:
        """Prepares the program for the shapes of `call`. Collective."""
        self._ready_for, shapes = None, [view.shape for view in call.inputs[self._group.rank]]
        with self._group.failing() if self.module.prepares_together else nullcontext(), self._measuring():
            self._open()[0].prepare(shapes, call.global_shapes(), 0)
        self._ready_for = call.global_shapes()

    def staged(self, calls: Sequence[GlobalCall]) -> Callable[[StagedWork[T]], T]:
        """Allocates memory for prepared calls, and copies inputs from other GPUs. Returns a function for the rank's thread, which calls
        `work`."""
        native, member = self._open()
        staging = self._staging = self._staging or self.module.Staging(member)
        staging.place([call.memory_blocks(self._group.rank) for call in calls])

        def make(work: StagedWork[T]) -> T:
            with self._group.calling:
                return self._group.run(self.host.name, member, work, native, self._schedule(), staging)

        return make

    # --- phases of a call

    def _call(
        self, bound: BoundInputs, arrays: Sequence[Array], out: Any, stream: Any, sizes: Mapping[str, int] | None
    ) -> tuple[CheckedCall, Sequence[MadeOutput], tuple[int, ...]]:
        try:
            group = self._group
            group.expect_working()
            native, member = self._open()

            def check_call() -> CheckedCall:
                self._open()
                return self.arguments.check_call(bound, arrays, out, stream, sizes)

            checked_call = self._prepare_together(check_call, native) if self._verifies_calls else self._prepare_alone(check_call, native)
            outputs, addresses = self._outputs_of(checked_call, stream is not None)
            common = self.common_graphs
            if common and common.is_due and not self.module.is_captured(checked_call.stream):
                self._decide_graphs(common, native, checked_call, addresses)
            where = checked_call.table.native, checked_call.addresses, addresses, checked_call.stream
            self._launch(checked_call, self.host.name, member, native.run, *where, self._schedule(), self._graphs)
            if common:
                common.count()
            return checked_call, outputs, addresses
        except Exception:
            raise
        except BaseException as interruption:  # an interrupt may arrive between two phases
            self._fail_group(interruption)
            raise

    def _launch(self, checked_call: CheckedCall, *call: Any) -> None:
        if self._compared:
            self._compared.begin(checked_call)
        try:
            self._run(*call)
        except CaptureError:
            if self._compared:
                self._compared.undo_begin()
            raise

    def _decide_graphs(self, common: CommonGraphs, native: Any, checked_call: CheckedCall, addresses: tuple[int, ...]) -> None:
        """Runs calls as graphs until the next vote if all ranks vote for graphs and can capture."""
        unseen = native.unseen
        are_wanted = self._all_true(common.vote(unseen))
        agrees = are_wanted and (common.agreed or self._all_true(self._can_capture(native, checked_call, addresses)))
        common.decide(agrees, unseen)
        self._graphs = self.module.Graphs.all if common.agreed else self.module.Graphs.noted

    def _all_true(self, vote: bool) -> bool:
        return set(self._gather("graphs", str(vote), self._waits_for, self._group.call_timeout)) == {str(True)}

    def _can_capture(self, native: Any, checked_call: CheckedCall, addresses: tuple[int, ...]) -> bool:
        with suppress(CaptureError), native_calls:
            native.capture(checked_call.table.native, checked_call.addresses, addresses)
            return True
        return False

    def _results_for_caller(self, bound: BoundInputs, arrays: Sequence[Array], outputs: Sequence[MadeOutput]) -> Any:
        """Results for the caller. A result in a donated input is the caller's array, reshaped if the shapes differ."""
        given = dict(zip((p.name for p in bound.unbound), arrays, strict=True))
        results = tuple(
            _reshaped(given[p.memory], shape) if p.memory else output[0].give(output[1]) if output else None
            for p, output, shape in zip(self.host.results, outputs, self._outputs, strict=True)
        )
        return results[0] if len(results) == 1 else results

    def _outputs_of(self, checked_call: CheckedCall, on_given_stream: bool) -> tuple[Sequence[MadeOutput], tuple[int, ...]]:
        try:
            if checked_call.out is None:
                made = self._new_outputs(checked_call, on_given_stream)
                return made, tuple(map(int.__or__, checked_call.donated, addresses_and_shapes(made)[0]))
            self._check_out(checked_call.out[1])
            return (), checked_call.out[0]
        except BaseException as error:
            if self._verifies_calls:  # the other ranks are about to make the call
                self._group.fail(f"rank {self._group.rank}: {reason_of(error)}")
            raise

    def _prepare_alone(self, check_call: Callable[[], CheckedCall], native: Any) -> CheckedCall:
        if self._compared and self._compared.is_first:
            checked_call, _ = self._agree(check_call, self._group.call_timeout)
            self._compared.is_first = False
        else:
            checked_call = check_call()
        ready_for = _shapes_of(checked_call)
        changed = self._ready_for != ready_for
        if changed:  # before the comparison, because if this check refuses the sizes, another variant makes the call and compares the sizes
            self._expect_divided(checked_call)
        self._compare(checked_call, ready_for)
        if changed:
            previous, self._ready_for = self._ready_for, None
            try:
                self._prepare(native, checked_call, self.arguments.global_shapes(checked_call))
            except CaptureError:  # no plan was changed
                self._ready_for = previous
                raise
            self._ready_for = ready_for
        return checked_call

    def _compare(self, checked_call: CheckedCall, shapes: object) -> None:
        if self._compared and self._compared.compare(checked_call, shapes):
            self._shares_algorithms = True

    def _prepare_together(self, check_call: Callable[[], CheckedCall], native: Any) -> CheckedCall:
        timeout = self._group.call_timeout
        checked_call, signatures = self._agree(check_call, timeout)
        ready_for = tuple((signature.bound, signature.shapes) for signature in signatures)
        changed = self._ready_for != ready_for
        if changed:
            self._ready_for, self._shares_algorithms = None, True
            shapes_of_all = [signature.shapes for signature in signatures]
            self._bound_spans = ()
            if any(signature.bound for signature in signatures):
                table = checked_call.table
                _, full_signatures = self._agree(lambda: replace(checked_call, shapes=checked_call.all_shapes, spans=table.spans), timeout)
                shapes_of_all = [signature.shapes for signature in full_signatures]
                self._bound_spans = tuple(span for signature in full_signatures for span in signature.spans)
        if self._group.in_process:
            self.arguments.expect_disjoint(self._bound_spans, tuple(span for signature in signatures for span in signature.spans))
        if changed:

            def prepare() -> None:
                global_shapes = self.arguments.global_shapes_of(shapes_of_all)
                self._expect_divided(checked_call, global_shapes)
                self._prepare(native, checked_call, global_shapes)

            self._agree(prepare, timeout)
            self._ready_for = ready_for
        return checked_call

    def _agree(self, action: Callable[[], T], timeout: float) -> tuple[T, list[CallSignature]]:
        """Runs an action that may fail on some ranks. Then either all ranks continue or all raise."""
        result, error = None, None
        try:
            result = action()
        except HostweaveError as problem:
            error = problem
        except BaseException as interruption:
            self._fail_group(interruption)
            raise
        signature = replace(self._intent, error=str(error) if error else "")
        if isinstance(result, CheckedCall):
            spans = result.spans if self._group.in_process else ()
            signature = replace(signature, shapes=result.shapes, spans=spans, bound=result.table.digest, windows=result.windows)
        signatures = self._group.agree(signature, self._waits_for, timeout, error)
        return cast(T, result), signatures

    def _fail_group(self, interruption: BaseException) -> None:
        if self._group.count > 1:
            self._group.fail(f"rank {self._group.rank}: {reason_of(interruption)}")

    def _check_group(self) -> None:
        group, name, mesh = self._group, self.host.name, self.host.mesh
        if group.count != mesh.size:
            why = f"the program is for the {mesh.size} ranks of {mesh}, but group {group.name!r} has {group.count}"
            raise ArgumentError(f"{name}: {why}; start {mesh.size} ranks, or compile for a mesh of {group.count}")
        if self.target.needs_one_host and group.hosts > 1:
            raise ArgumentError(
                f"{name}: is for the target {self.target.name}, whose ranks share the memory of one host; group {group.name!r} "
                f"is on {group.hosts} hosts; compile for cuda, or start all ranks on one host"
            )

    def _expect_divided(self, checked_call: CheckedCall, global_shapes: Sequence[Shape] | None = None) -> None:
        global_shapes = global_shapes or self.arguments.global_shapes(checked_call)
        expect_divided(self.host, global_shapes or _even_shapes(self.host, checked_call.all_shapes))

    def _prepare(self, native: Any, checked_call: CheckedCall, global_shapes: Sequence[Shape] | None) -> None:
        shapes = checked_call.all_shapes
        with native_calls, self._measuring():
            self._outputs = self._prepare_native(native, shapes, global_shapes or [()] * len(shapes), checked_call.stream)

    def _prepare_native(self, native: Any, *arguments: Any) -> list[Shape]:
        """Prepares the native program. If ranks prepare together, an ExecutionError fails the group, because other ranks may wait."""
        try:
            outputs: list[Shape] = self._group.waiting(partial(native.prepare, *arguments))
            return outputs
        except ExecutionError as error:
            if self.module.prepares_together and not isinstance(error, CaptureError):
                self._group.fail(f"rank {self._group.rank}: {reason_of(error)}")
            raise

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Context in which plans are made. In groups of processes, all ranks use the algorithms that one rank has measured. If no sizes are
        new, ranks need not share algorithms, because plans for known sizes measure nothing new."""
        gather = partial(self._gather, "tune", waits_for="", timeout=self._group.timeout)
        alone = not self._shares_algorithms or self._group.count == 1 or self._group.in_process
        if self._measured and not alone:
            self._measured.agree(gather)
        yield
        if self._measured:
            if not alone:
                self._measured.agree(gather)
            self._measured.save()
        self._shares_algorithms = False

    def _gather(self, what: str, record: str, waits_for: str, timeout: float) -> list[str]:
        signature = CallSignature(f"{self.host.name}: {what}", str(self.host.mesh), "", bound=record)
        return [one.bound for one in self._group.agree(signature, waits_for, timeout)]

    def _new_outputs(self, checked_call: CheckedCall, on_given_stream: bool) -> list[MadeOutput]:
        """Allocates the outputs. An output in a donated input, or without a block on this rank, is None."""
        held, library = self._allocates, checked_call.library
        if library is None:
            if any(held):
                why = f"rank {self._group.rank} passes no array, so the library of its output arrays is unknown"
                raise ArgumentError(f"{self.host.name}: {why}; pass the output arrays as out=")
            return [None] * len(held)
        with library.on_stream(checked_call.stream, self._device) if on_given_stream else nullcontext():
            return [
                (library, library.empty(shape, parameter.type.dtype, self._device)) if here else None
                for parameter, shape, here in zip(self.host.results, self._outputs, held, strict=True)
            ]

    def _check_out(self, given: Sequence[Shape | None]) -> None:
        for parameter, shape, here in zip(self.host.results, self._outputs, given, strict=True):
            if here is not None and here != shape:
                where = f"{self.host.name}: out=: {parameter.name}"
                raise ArgumentError(f"{where}: expected the local shape {list(shape)}, got {list(here)}; pass an array of that shape")

    def _schedule(self) -> Any:
        wanted = schedule()
        if self._native_schedule is None or self._native_schedule[0] is not wanted:
            if wanted.is_special and not self._group.in_process:
                raise ArgumentError(
                    f"{self.host.name}: seeded schedules, buffered sends and the check of dependencies need ranks that are threads of "
                    f"one process, but group {self._group.name!r} has {self._group.count} processes; use hw.Threads or program.run"
                )
            self._native_schedule = wanted, self.module.Schedule(**vars(wanted))
        return self._native_schedule[1]


def _shapes_of(checked_call: CheckedCall) -> object:
    return checked_call.table.digest, checked_call.shapes, checked_call.sizes


def _sizes_of(host: HostProgram, arguments: Arguments, checked_call: CheckedCall) -> CallSizes:
    """Sizes of a call. Not a method, because a reference cycle would keep the program alive."""
    return CallSizes(checked_call.all_shapes, arguments.global_shapes(checked_call) or tuple(_even_shapes(host, checked_call.all_shapes)))


def _even_shapes(host: HostProgram, shapes: Sequence[Shape]) -> list[Shape]:
    """Shapes of the global arrays whose blocks have the shapes `shapes` on all ranks."""
    return [
        tuple(
            int(dim.size) if dim.size.is_int else size * p.type.mesh_in(host.mesh).size_of(dim.axes)
            for dim, size in zip(p.type.dims, shape, strict=bool(shape))
        )
        for p, shape in zip(host.arguments, shapes, strict=True)
    ]


def stream_of_call(target: Target, stream: Any, arrays: Sequence[Array]) -> int:
    """Native stream of a call with these arrays, or 0 if the stream is not known before the arrays are checked."""
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


def _first_communication(host: HostProgram) -> str:
    """End of an error message: the first communication, at which a rank waits for the other ranks."""
    instruction = next((i for i in walk(dedupe_functions(host).body) if isinstance(i, Communication)), None)
    if instruction is None:
        return ""
    channel = host.channel(instruction.channel)
    text = " ".join(line.strip() for line in instruction.lines())
    where = f" ({instruction.location})" if instruction.location else ""
    return f"; `{text}`{where} needs all ranks of its channel along {', '.join(channel.axes)} of {channel.mesh}"


def _reshaped(array: Array, shape: Shape) -> Array:
    return array if array is None or tuple(array.shape) == shape else array.reshape(shape)
