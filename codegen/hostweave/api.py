"""`hw.compile`, and the program that it returns."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakSet

from hostweave.base.errors import ArgumentError, ExecutionError, ProgramError
from hostweave.base.signatures import checked
from hostweave.build.toolchain import MODULE_FILE
from hostweave.check.check import check
from hostweave.check.sizes import minimal_sizes
from hostweave.fusion_ir.choice import IN_SEQUENCE, Choice
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.chosen_loops import LoopsDoNotDivide, are_divided
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.size_requirements import expect_sizes
from hostweave.options import Options
from hostweave.pipeline import lower, reference_of
from hostweave.targets.target import NAMES, Target, find_target
from hostweave.transports.transport import find_transport, transport_of
from hostweave.tune.explain import explained
from hostweave.types.machine import Machine
from hostweave.types.mesh import Mesh

if TYPE_CHECKING:  # compiling needs neither NumPy nor what runs programs: they are imported when a program first runs
    from hostweave.runtime.bound import Bound
    from hostweave.runtime.call import Call
    from hostweave.runtime.group import Group
    from hostweave.runtime.local import Captured, LocalProgram
    from hostweave.runtime.session import Session, Timing

T = TypeVar("T")

MAX_CHECKED_RANKS = 16  # of programs that are checked by default
OPTIONS_OF_RUN = ("ranks", "warmups", "repetitions")  # take arrays by name beside these


@checked
def compile(program: Fusion | HostProgram, target: str = "cpu", options: Options | None = None) -> Program:
    """Compiles a fusion, or a host program as it is, for `target` "cpu" or "cuda".

    Lowers it, verifies it after every pass, and proves it free of races and deadlocks as `options` say. No C++ compiler is needed
    yet: the C++ is compiled at the first run, or by `Program.build`. Raises ProgramError, with the location in the user's source,
    for a program that is invalid, cannot be lowered, or has a race or deadlock on some rank.

    Example: `program = hw.compile(ag_matmul, target="cuda", options=hw.Options(streams=2))`.
    """
    if not isinstance(program, Fusion | HostProgram):
        raise ProgramError(f"compile: {program!r} is neither a fusion nor a host program; mark a function with @hw.fusion(...)")
    if not isinstance(options, Options | None):
        raise ProgramError(f"{program.name}: options must be hw.Options, got {type(options).__name__}; write hw.Options(streams=4)")
    if target not in NAMES:
        raise ProgramError(f"{program.name}: no target {target!r}; the targets are {' and '.join(NAMES)}")
    options = options or Options()
    options = options if options.machine else replace(options, machine=find_target(target).machine(program.mesh.size))
    made = _compiled(program, target, options)
    return _searched(made, program, target, options) if options.overlap == "search" and made.choices else made


def _compiled(program: Fusion | HostProgram, target: str, options: Options) -> Program:
    host = lower(program, options)
    _expect_ways(host, options)
    if unknown := [name for name in options.windows if name not in {p.name for p in (*host.inputs, *host.outputs)}]:
        raise ProgramError(f"{host.name}: Options: windows: there is no input or output {unknown[0]}; leave it out")
    find_target(target).expect_kernels(host.user_kernels)
    for parameter in host.inputs:
        if parameter.name in OPTIONS_OF_RUN:
            raise ProgramError(f"{host.name}: input {parameter.name} has the name of an option of run or measure; choose another name")
    if options.check if options.check is not None else host.mesh.size <= MAX_CHECKED_RANKS:
        check(host)
    return Program(program, host, find_target(target), options)


def _expect_ways(host: HostProgram, options: Options) -> None:
    known = [choice.name for choice in host.choices]
    if unknown := [name for name in options.ways if name not in known]:
        why = f"there is nothing to choose for {unknown[0]}"
        raise ProgramError(f"{host.name}: Options: ways: {why}; what can be stated: {', '.join(known) or 'nothing, at these sizes'}")


def _searched(made: Program, program: Fusion | HostProgram, target: str, options: Options) -> Program:
    """The program with the ways that are the fastest here, as measured now or before."""
    from hostweave.runtime.search import search

    machine, key = options.figures.name, (target, options.transport, str(sorted(options.sizes.items())), str(sorted(options.ways.items())))
    choices = search(made._host, options.sizes, (machine, *key), lambda ways: _compiled(program, target, replace(options, ways=ways)))
    found = _compiled(program, target, replace(options, ways={choice.name: choice.taken.name for choice in choices}))
    found._host = replace(found._host, choices=choices)
    return found


class Program:
    """A compiled program, made by `hw.compile`.

    `run` runs all ranks in this process on global arrays; calling the program runs this process's or thread's rank on local arrays.

    Example: `y = hw.compile(ag_matmul).run(x, w=w)`.
    """

    def __init__(self, given: Fusion | HostProgram, host: HostProgram, target: Target, options: Options):
        self._given = given
        self._host = host
        self._options = options
        self._session: Session | None = None
        self._locals: WeakSet[LocalProgram] = WeakSet()  # where this process's ranks have called it
        self._closed = False
        self._lock = threading.Lock()
        self._unbound: Program | None = None  # where this one has inputs bound
        self._without_puts: Program | None = None  # for ranks that cannot reach each other's memory
        self._without_loops: Program | None = None  # for sizes that chosen loops do not divide
        self._with_windows: dict[tuple[str, ...], Program] = {}  # for arguments of these names in memory that ranks share
        self.target = target

    def __repr__(self) -> str:
        bound = f" with {len(self._bound.arrays)} inputs bound" if self._unbound else ""
        return f"<hostweave program {self.name} for {self.target.name} on {self.mesh}{bound}>"

    def __copy__(self) -> Program:
        made = object.__new__(type(self))
        made.__dict__ |= self.__dict__
        return made

    def __reduce__(self) -> NoReturn:
        raise ProgramError(f"{self.name}: a program belongs to its process; pickle the fusion, and compile that there: it is in the cache")

    @property
    def name(self) -> str:
        """The name of the function that was traced."""
        return self._host.name

    @property
    def mesh(self) -> Mesh:
        """The mesh of the ranks that it runs on."""
        return self._host.mesh

    @property
    def fusion_ir(self) -> str:
        """The text of the fusion as traced. Raises ProgramError for a program that was compiled from host IR."""
        if not isinstance(self._given, Fusion):
            raise ProgramError(f"{self.name}: was compiled from host IR and has no fusion IR; see host_ir")
        return str(self._given)

    @cached_property
    def host_ir(self) -> str:
        """The text of the host IR, after all passes."""
        return str(self._host)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What the compiler has chosen for reshards beside matmuls, with the other ways and their times. See `explain`."""
        return self._host.choices

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """The generated files: a mapping of paths to texts, the same for both targets."""
        from hostweave.emit import render

        return render(self._host)

    @property
    def source(self) -> str:
        """The text of the generated host program, program.cpp."""
        return self.sources["program.cpp"]

    @cached_property
    def folder(self) -> Path:
        """The folder with the sources, the compiler's log and the built module, which is built first if needed."""
        from hostweave.build.program import build

        toolchain, wanted = self.target.toolchain(), self._host.libraries
        libraries = partial(self.target.runtime_libraries, wanted=wanted)
        return build(self.name, self._host.code, toolchain, libraries, lambda: self.sources)

    @cached_property
    def module(self) -> ModuleType:
        """The program as a Python extension module, compiled and loaded if needed. Raises BuildError as `build` does."""
        from hostweave.build.program import load

        if self._unbound:
            return self._unbound.module
        return load(self.folder / MODULE_FILE, self.target.dlopen_flags)

    def explain(self) -> str:
        """What was chosen, and why: a line for each communication with its algorithm, transport, chunks and time, and the other ways
        with theirs; and for each attention whether it is one call of the library.

        Raises ProgramError for a program that was compiled from host IR, where nothing was chosen.

        Example: `print(hw.compile(f, options=hw.Options(sizes={"M": 8192, "K": 8192, "N": 7168})).explain())`.
        """
        if not isinstance(self._given, Fusion):
            raise ProgramError(f"{self.name}: was compiled from host IR, where nothing is chosen; see host_ir")
        stages: list[Fusion] = []
        lower(self._given, self._options, lambda _, stage: stages.append(stage) if isinstance(stage, Fusion) else None)
        return explained(stages[-1], self._host, self._options)

    def build(self) -> None:
        """Compiles and loads the module, or takes it from the cache.

        Raises BuildError if the toolchain is not complete or the compiler fails.
        """
        _ = self.module

    @checked
    def check(self, **sizes: int) -> None:
        """Proves the program free of races, deadlocks and unmatched communication on every rank, at these `sizes`.

        Sizes that are not given are small ones. It is done by vector clocks over the operations of all ranks (Fidge 1988, Mattern 1989).
        Raises ProgramError for the first fault, with rank and instruction, ArgumentError for sizes that the program does not have.

        Example: `program.check(M=8192, N=4096)`.
        """
        expect_sizes(self._host, "check", sizes)
        host = self._host if are_divided(self._host, sizes) else self._in_sequence._host
        check(host, {**minimal_sizes(host), **sizes})

    @checked
    def bind(self, **arrays: Any) -> Program:
        """The program with these inputs given, so that its calls take only the others, by position or name.

        Bound arrays are checked once, and cost a call nothing. They are local arrays of this rank in a program that is called, and
        global ones in a program that is `run`. A call reads them where they lie, so it sees what was written to them; `run` may keep the
        ranks' blocks from its first call on. Both programs share memory and streams; `close` closes both.

        Raises ArgumentError for a name that is no input or is bound already, and for an array of another dtype, number of dims, fixed
        size, layout or device than the program takes, or that requires grad. What depends on the rank or on other inputs is checked in
        the first call.

        Example: `model = program.bind(**weights)`, then `y = model(x)`.
        """
        from hostweave.runtime.bound import Bound

        made = copy.copy(self)
        made._unbound = self._unbound or self
        made.__dict__["_bound"] = Bound(self._host, self.target, arrays, self._bound)
        return made

    @cached_property
    def _bound(self) -> Bound:
        from hostweave.runtime.bound import Bound

        return Bound(self._host, self.target, {})

    def __call__(
        self,
        *arrays: Any,
        out: Any = None,
        stream: Any = None,
        group: Group | None = None,
        sizes: Mapping[str, int] | None = None,
        **named: Any,
    ) -> Any:
        """Runs this process's or thread's rank of a group on its local arrays, after `hw.init`. All ranks make the same calls in order.

        `arrays` are the inputs in order, `named` others by name: contiguous local blocks on the rank's device, which are not
        copied. Returns the local output, or a tuple of outputs, in the library of the first input, or in `out`, which may hold
        arrays to write to, that overlap neither each other nor the inputs. `group` is the default one if left out. Ranks that are
        processes assume that sharded dims are even; `sizes` gives the global size, by name, of those that are not, and of sizes
        that the rank's own arrays do not determine. A rank that is not in the mesh of an input passes None for it, and gets None
        for such an output.

        On CUDA the call is enqueued: it runs after what `stream` holds (an int, or a stream of PyTorch, CuPy or another library; by
        default the library's current one), and what is enqueued there later runs after it. On the CPU target the call returns
        when it is done.

        Raises ArgumentError for arrays that do not fit, ExecutionError if a rank fails or times out, now or in an earlier call.

        Example: `y = program(x, w)`.
        """
        given = self._in_order(arrays, named)
        if sizes is not None:
            expect_sizes(self._host, "sizes=", sizes)
        return self._or_in_sequence(lambda program: program._local(group, given, stream, out)(self._bound, given, out, stream, sizes))

    def capture(
        self,
        *arrays: Any,
        out: Any = None,
        stream: Any = None,
        group: Group | None = None,
        sizes: Mapping[str, int] | None = None,
        **named: Any,
    ) -> Captured:
        """A call with these arrays as a CUDA graph: a callable that launches it, with `outputs`. All ranks call it together.

        Takes what a call takes, and makes that call once, on `stream`. Each call of what it returns reads the same input arrays, as they
        are then, and writes the same outputs; it is ordered with other calls of the program as these are among each other. It keeps
        the arrays alive, and temporaries that it uses stay where they are when later calls have larger sizes. On the CPU target it
        does the same.

        A program may also be called where the caller captures, as inside `torch.cuda.graph`, after one call with arrays of the same
        shapes: then it is part of that graph.

        Raises what a call raises, and CaptureError where the call cannot be captured; the group can be used all the same.

        Example: `step = program.capture(x, w)`, then `x.copy_(new)` and `y = step()`.
        """
        given = self._in_order(arrays, named)
        if sizes is not None:
            expect_sizes(self._host, "sizes=", sizes)
        return self._or_in_sequence(
            lambda program: program._local(group, given, stream, out).capture(self._bound, given, out, stream, sizes)
        )

    def prepare(self, *sizes: Mapping[str, int], group: Group | None = None) -> None:
        """Gets this process's or thread's rank ready for calls at each of these global sizes. All ranks call it together.

        A call at sizes that are new to the rank builds, connects, allocates and plans first, and for that waits for what its device has
        in flight. After this none of these sizes does, in any order: of each matmul the plans of the last 4096 shapes are kept, and
        memory for the largest. Sizes that bound inputs determine may be left out; sharded dims are taken to be even where they are.

        Raises ArgumentError for sizes that the program does not have, that are missing or that do not fit, and what a call raises.

        Example: `program.bind(**weights).prepare(*({"T": tokens} for tokens in range(1, 2049)))`.
        """
        for one in sizes:
            expect_sizes(self._host, "prepare", one)
        divided = [one for one in sizes if are_divided(self._host, one)]
        rest = [one for one in sizes if one not in divided]
        if divided:
            self._or_in_sequence(lambda program: program._local(group, (), None).prepare(self._bound, divided))
        if rest:
            self._in_sequence._local(group, (), None).prepare(self._bound, rest)

    def run(self, *arrays: Any, ranks: bool = False, **named: Any) -> Any:
        """Runs all ranks in this process on global arrays, by position or name, and waits for the result.

        Arrays are NumPy, PyTorch, CuPy or JAX, of the declared dtypes and global shapes. Returns the global output, or a tuple of
        outputs, as arrays of the first input's library. With `ranks`, returns a list of every rank's local output or tuple of
        outputs, with None for an output on a mesh that the rank is not in. Raises ArgumentError for arrays that do not fit,
        ExecutionError if a rank fails or times out.

        Example: `y = program.run(x, w=w)`.
        """
        (call,) = self._run([(arrays, named)], poison=False)
        if ranks:
            call.hand_back()
        return call.local_results() if ranks else call.global_results()

    def run_in_flight(self, calls: Sequence[Mapping[str, Any]], *, poison: bool = False) -> list[list[Any]]:
        """Runs several calls, with arrays of the same shapes, back to back: the host does not wait for the device in between.

        With `poison`, outputs and temporaries are filled with NaN on the caller's stream before each call, so that a missing dependency
        shows. Returns for every call what `run(ranks=True)` returns.
        """
        made = self._run([((), arrays) for arrays in calls], poison)
        for call in made:
            call.hand_back()
        return [call.local_results() for call in made]

    def measure(self, *arrays: Any, warmups: int = 3, repetitions: int = 20, **named: Any) -> list[list[Timing]]:
        """Times `repetitions` calls after `warmups` others on every rank; the ranks start each call together.

        Returns a list per rank of a Timing per repetition. Raises ArgumentError and ExecutionError as `run` does.
        """
        if any(not isinstance(count, int) or not least <= count < 2**31 for count, least in ((warmups, 0), (repetitions, 1))):
            raise ArgumentError(f"{self.name}: measure: warmups={warmups!r}, repetitions={repetitions!r}: at least 0 and 1 are wanted")
        return self._or_in_sequence(lambda program: program._ready().measure(program._call(arrays, named), warmups, repetitions))

    def as_jax_ffi(self) -> Callable[..., Any]:
        """The program as a function of JAX, for use inside jax.jit: a custom call of XLA on this process's one device.

        It takes the rank's local arrays by position, and gives the local output, or a tuple of outputs. Ranks are processes, after
        `hw.init`; sharded dims are even. On CUDA it runs on XLA's stream. Calls that do not depend on each other run in the order of the
        jitted function, the same in all processes. There is no gradient and no batching: jax.custom_vjp connects a program of its own.

        Raises ArgumentError where JAX is not installed, has several devices here, or none of the target, for a program that donates
        inputs, and, as the function is traced, for arrays of another dtype or shape; ExecutionError without a group. What fails at a call
        is raised by JAX, with the message that the call would have raised.

        Example: `mlp = program.as_jax_ffi()`, then `jax.jit(lambda x, w: mlp(jax.nn.relu(x), w).sum())(x, w)`.
        """
        from hostweave.runtime.jax_ffi import jax_call

        return jax_call(self)

    @checked
    def export(self, folder: str | Path) -> None:
        """Writes a CMake project that builds and runs the program without Python, on both targets.

        It compares the results of all ranks with those of the same math on one device, at any sizes.
        Raises ArgumentError if the folder cannot be written or has other files of these names, ProgramError for a program that has no C++.

        Example: `program.export("ag_matmul/")`.
        """
        from hostweave.emit import export

        if self._host.windows:
            why = f"{', '.join(self._host.windows)}: is compiled for a window, which a group of Python makes"
            raise ProgramError(f"{self.name}: export: {why}; leave Options(windows=...) out")
        try:
            export(self._host, Path(folder), *reference_of(self._given, self._options))
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            raise ArgumentError(f"{self.name}: export: {why}; give a folder that is yours to write") from None

    def close(self) -> None:
        """Frees the memory and streams of the program on its devices. It cannot run again."""
        if self._unbound:
            return self._unbound.close()
        with self._lock:
            self._closed = True
            if self._session:
                self._session.close()
                self._session = None
            for local in self._locals:
                local.close()
        for other in filter(None, (self._without_puts, self._without_loops, *self._with_windows.values())):
            if other is not self:
                other.close()

    def _expect_open(self) -> None:
        if self._closed:
            raise ExecutionError(f"{self.name}: the program is closed; compile it again")

    def _in_order(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        from hostweave.runtime.arguments import in_order

        return in_order(self.name, self._bound.free, self._bound.arrays, arrays, named) if named else arrays

    def _call(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> Call:
        from hostweave.runtime.call import make_call

        return make_call(self._host, self.target, self._bound, arrays, named)

    def _local(self, group: Group | None, arrays: Sequence[Any], stream: Any, out: Any = None, bound: Bound | None = None) -> LocalProgram:
        """The program on this process's or thread's rank of a group, for a call with these arrays."""
        bound = bound or self._bound
        if self._unbound:
            return self._unbound._local(group, arrays, stream, out, bound)
        from hostweave.runtime.group import Group, current

        self._expect_open()
        group = current() if group is None else group
        if group is None:
            raise ExecutionError(f"{self.name}: this process has not joined a group; call hw.init first, or run all ranks here with .run")
        if not isinstance(group, Group):
            raise ArgumentError(f"{self.name}: group={group!r} is no group; pass what hw.init or group.split gave")
        if group.hosts > 1 and self._reaches_memory:
            figures = self._options.figures.without_peers("the ranks are on several hosts")
            return self._by_sends(figures)._local(group, arrays, stream)
        if group.windows.made and (program := self._for_windows(group, bound, arrays, out)) is not self:
            return program._local(group, arrays, stream)
        local = group.programs.get(self)
        if local is None:
            from hostweave.runtime.local import LocalProgram, stream_of_call

            on = stream_of_call(self.target, stream, arrays)
            local = LocalProgram(self._host, self.target, lambda: self.module, self._options, group, on)
            group.programs[self] = local
            self._locals.add(local)
        if local.out_of_reach and self._reaches_memory:
            return self._by_sends(self._options.figures.without_puts(local.out_of_reach))._local(group, arrays, stream)
        return local

    def _for_windows(self, group: Group, bound: Bound, arrays: Sequence[Any], out: Any) -> Program:
        """The same for arguments some of which lie in memory that ranks share; itself where peers touch none of these."""
        if (
            self._options.windows
            or not isinstance(self._given, Fusion)
            or not any(channel.transport.has_windows for channel in self._host.channels)
        ):
            return self
        outs = () if out is None else (out,) if len(self._host.outputs) == 1 else out
        pairs = (*zip(bound.free, arrays, strict=False), *zip(self._host.outputs, outs, strict=False))
        names = group.windows.names(bound, pairs)
        with self._lock:
            if names and names not in self._with_windows:
                made = _compiled(self._given, self.target.name, replace(self._options, windows=names))
                known = (self, *self._with_windows.values())  # of which one may be for the same
                self._with_windows[names] = next((one for one in known if one._host.windows == made._host.windows), made)
            return self._with_windows[names] if names else self

    @property
    def _reaches_memory(self) -> bool:
        """Whether loops or kernels were chosen whose ranks reach each other's memory."""
        in_loops = (find_transport(transport_of(choice.taken.algorithm)) for choice in self.choices if choice.taken.chunks)
        return any(transport.has_windows for transport in in_loops) or any(kernel.exchanges for kernel in self._host.kernels)

    def _by_sends(self, figures: Machine) -> Program:
        """The same by figures that say what ranks cannot reach. All of them know that, so that all make it."""
        with self._lock:
            if self._without_puts is None:
                options = replace(self._options, ways={}, machine=figures)
                self._without_puts = _compiled(self._given, self.target.name, options)
            return self._without_puts

    def _or_in_sequence(self, call: Callable[[Program], T]) -> T:
        """What a call gives, of the program without chosen loops where these do not divide its sizes, which all ranks know."""
        try:
            return call(self)
        except LoopsDoNotDivide:
            return call(self._in_sequence)

    @property
    def _in_sequence(self) -> Program:
        """The same without chunk loops that were chosen."""
        if self._unbound:
            made = copy.copy(self._unbound._in_sequence)
            made._unbound, made.__dict__["_bound"] = self._unbound._in_sequence, self._bound
            return made
        with self._lock:
            made, ways = self._without_loops or self, dict[str, str]()
            while loops := [choice.name for choice in made.choices if choice.taken.chunks]:
                ways |= dict.fromkeys(loops, IN_SEQUENCE)  # which leaves matmuls to others that could be in loops
                made = _compiled(self._given, self.target.name, replace(self._options, ways=ways))
            self._without_loops = made
            return made

    def _run(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]], poison: bool) -> list[Call]:
        """Makes calls on all ranks in this process, of arrays of the same shapes."""

        def run(program: Program) -> list[Call]:
            made = [program._call(*arrays) for arrays in calls]
            program._ready().run(made, poison)
            return made

        return self._or_in_sequence(run)

    def _ready(self) -> Session:
        """The program on every rank of a world that works."""
        from hostweave.runtime.session import Session

        if self._unbound:
            return self._unbound._ready()
        if self._host.windows:
            why = f"{', '.join(self._host.windows)}: is compiled for a window of the rank's"
            raise ArgumentError(f"{self.name}: run: {why}; call the program in a group, or leave Options(windows=...) out")
        with self._lock:
            self._expect_open()
            if self._session is None or self._session.broken:
                self._session = None
                self._session = Session(self.module, self.target, self.mesh.size, self._options.tune)
            return self._session
