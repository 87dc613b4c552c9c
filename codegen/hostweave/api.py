"""`hw.compile`, and the program that it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.base.forks import importing, renewed
from hostweave.base.interrupts import interruptibly
from hostweave.base.signatures import checked
from hostweave.check.sizes import minimal_sizes
from hostweave.compiled import Compiled, compiled
from hostweave.fusion_ir.choice import Choice
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.size_requirements import are_divided
from hostweave.options import Options
from hostweave.pipeline import lower, reference_of
from hostweave.targets.target import NAMES, Target, find_target
from hostweave.tune.explain import explained
from hostweave.types.machine import Machine
from hostweave.types.mesh import Mesh

if TYPE_CHECKING:  # see Program._running
    from hostweave.running import Running
    from hostweave.runtime.arguments import Bound
    from hostweave.runtime.group import Group
    from hostweave.runtime.local import Captured
    from hostweave.runtime.session import Timing
    from hostweave.timeline.report import Report


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
    made = compiled(program, target, options)
    return Program(_searched(made) if options.overlap == "search" else made)


def _searched(made: Compiled) -> Compiled:
    """The program with the ways that are the fastest here, as measured now or before."""
    with importing:
        from hostweave.runtime.search import search

    options = made.options
    key = (options.figures.name, made.target.name, options.transport, str(sorted(options.sizes.items())), str(sorted(options.ways.items())))
    choices = search(made.host, options.sizes, key, lambda ways: Program(made.otherwise(ways=ways)))
    if not choices:
        return made
    found = made.otherwise(ways={choice.name: choice.taken.name for choice in choices})
    return replace(found, host=replace(found.host, choices=choices))


class Program:
    """A compiled program, made by `hw.compile`.

    `run` runs all ranks in this process on global arrays; calling the program runs this process's or thread's rank on local arrays.

    Example: `y = hw.compile(ag_matmul).run(x, w=w)`.
    """

    def __init__(self, compiled: Compiled, running: Running | None = None, bound: Bound | None = None):
        self._compiled, self._made, self._bound = compiled, running, bound
        self._making = renewed(threading.Lock())

    def __repr__(self) -> str:
        bound = f" with {len(self._bound.arrays)} inputs bound" if self._bound else ""
        return f"<hostweave program {self.name} for {self.target.name} on {self.mesh}{bound}>"

    def __reduce__(self) -> NoReturn:
        raise ProgramError(f"{self.name}: a program belongs to its process; pickle the fusion, and compile that there: it is in the cache")

    @property
    def target(self) -> Target:
        """What it is compiled for."""
        return self._compiled.target

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
        if not isinstance(self._compiled.given, Fusion):
            raise ProgramError(f"{self.name}: was compiled from host IR and has no fusion IR; see host_ir")
        return str(self._compiled.given)

    @cached_property
    def host_ir(self) -> str:
        """The text of the host IR, after all passes."""
        return str(self._host)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What the compiler has chosen for reshards beside matmuls, with the other ways and their times. See `explain`."""
        return self._host.choices

    @property
    def sources(self) -> Mapping[str, str]:
        """The generated files: a mapping of paths to texts, the same for both targets."""
        return self._compiled.sources

    @property
    def source(self) -> str:
        """The text of the generated host program, program.cpp."""
        return self.sources["program.cpp"]

    @property
    def folder(self) -> Path:
        """The folder with the sources, the compiler's log and the built module, which is built first if needed."""
        return self._compiled.folder

    @property
    def module(self) -> ModuleType:
        """The program as a Python extension module, compiled and loaded if needed. Raises BuildError as `build` does."""
        return self._compiled.module

    def explain(self) -> str:
        """What was chosen, and why: a line for each communication with its algorithm, transport, chunks and time, and the other ways
        with theirs; and for each attention whether it is one call of the library.

        Raises ProgramError for a program that was compiled from host IR, where nothing was chosen.

        Example: `print(hw.compile(f, options=hw.Options(sizes={"M": 8192, "K": 8192, "N": 7168})).explain())`.
        """
        if not isinstance(self._compiled.given, Fusion):
            raise ProgramError(f"{self.name}: was compiled from host IR, where nothing is chosen; see host_ir")
        stages: list[Fusion] = []
        lower(self._compiled.given, self._compiled.options, lambda _, stage: stages.append(stage) if isinstance(stage, Fusion) else None)
        return explained(stages[-1], self._host, self._compiled.options)

    @checked
    def predict(
        self,
        sizes: Mapping[str, int] | None = None,
        *,
        machine: Machine | None = None,
        ranks: int | Mapping[str, int] | None = None,
    ) -> Report:
        """Predicts when each rank does what in a call, on a machine that need not be there: nothing is built or run.

        `sizes` are global, by name; those that are left out are as in `Options(sizes=...)`, or 4096. `machine` has the figures, by
        default those of the options. `ranks` compiles the program for another number of ranks, or for other sizes of mesh axes by
        name. The time of the hosts is not in it. Returns a report: `print` shows totals, `save("f.html")` writes the page.

        Raises ArgumentError for sizes that the program does not have, ProgramError where they do not divide, or where the program
        cannot be on so many ranks.

        Example: `hw.compile(mlp).predict({"M": 8192}, ranks=16).predicted.micros`.
        """
        from hostweave.timeline.predict import predicted
        from hostweave.timeline.report import Report

        made = self._compiled if ranks is None else self._compiled.on_ranks(ranks)
        made, known = made.for_call("predict", sizes or {})
        return Report(predicted(made.host, known, machine or made.options.figures))

    def build(self) -> None:
        """Compiles and loads the module, or takes it from the cache.

        Raises BuildError if the toolchain is not complete or the compiler fails.
        """
        _ = self.module

    @checked
    def check(self, **sizes: int) -> tuple[str, ...]:
        """Proves the program free of races, deadlocks and unmatched communication on every rank, and checks its results, at these `sizes`.

        Sizes that are not given are small ones. The order is proven by vector clocks over the operations of all ranks (Fidge 1988, Mattern
        1989). The results are compared with those of the fusion by random numbers over a finite field (Schwartz 1980, Zippel 1979).
        Returns what the comparison leaves out, a text each: lines of the host program that did not run, and kernels of the user.
        Raises ProgramError for the first fault, with rank and instruction, ArgumentError for sizes that the program does not have.

        Example: `program.check(M=8192, N=4096)`.
        """
        self._compiled.expect_sizes("check", sizes)
        made = self._compiled if are_divided(self._host, sizes) else self._compiled.in_sequence
        return made.check({**minimal_sizes(made.host), **sizes})

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Texts of all that the check at compile left out: lines that did not run, user kernels, or everything."""
        return self._compiled.unchecked

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
        return Program(self._compiled, self._running, self._running.bind(self._bound, arrays))

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
        return self._running.call(self._bound, (arrays, named), out, stream, group, sizes, captures=False)

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
        does the same. All ranks launch it together, too: with one-sided communication, which takes version 2.30.7 of the library
        then, a launch of one rank does not meet a call of another.

        A program may also be called where the caller captures, as inside `torch.cuda.graph`, after one call with arrays of the same
        shapes: then it is part of that graph.

        Raises what a call raises, and CaptureError where the call cannot be captured; the group can be used all the same.

        Example: `step = program.capture(x, w)`, then `x.copy_(new)` and `y = step()`.
        """
        captured: Captured = self._running.call(self._bound, (arrays, named), out, stream, group, sizes, captures=True)
        return captured

    def prepare(self, *sizes: Mapping[str, int], group: Group | None = None) -> None:
        """Gets this process's or thread's rank ready for calls at each of these global sizes. All ranks call it together.

        A call at sizes that are new to the rank builds, connects, allocates and plans first, and for that waits for what its device has
        in flight. After this none of these sizes does, in any order: of each matmul the plans of the last 4096 shapes are kept, and
        memory for the largest. Sizes that bound inputs determine may be left out; sharded dims are taken to be even where they are.

        Raises ArgumentError for sizes that the program does not have, that are missing or that do not fit, and what a call raises.

        Example: `program.bind(**weights).prepare(*({"T": tokens} for tokens in range(1, 2049)))`.
        """
        self._running.prepare(self._bound, sizes, group)

    def run(self, *arrays: Any, ranks: bool = False, **named: Any) -> Any:
        """Runs all ranks in this process on global arrays, by position or name, and waits for the result.

        Arrays are NumPy, PyTorch, CuPy or JAX, of the declared dtypes and global shapes. Returns the global output, or a tuple of
        outputs, as arrays of the first input's library. With `ranks`, returns a list of every rank's local output or tuple of
        outputs, with None for an output on a mesh that the rank is not in. Raises ArgumentError for arrays that do not fit,
        ExecutionError if a rank fails or times out.

        Example: `y = program.run(x, w=w)`.
        """
        (call,) = self._running.run(self._bound, [(arrays, named)])
        if ranks:
            call.hand_back()
        return call.local_results() if ranks else call.global_results()

    @checked
    def run_in_flight(self, calls: Sequence[Mapping[str, Any]], *, poison: bool = False) -> list[list[Any]]:
        """Runs several calls, with arrays of the same shapes, back to back: the host does not wait for the device in between.

        With `poison`, outputs and temporaries are filled with NaN on the caller's stream before each call, so that a missing dependency
        shows. Returns for every call what `run(ranks=True)` returns.
        """
        if len(calls) == 0:
            return []
        made = self._running.run(self._bound, [((), arrays) for arrays in calls], poison)
        for call in made:
            call.hand_back()
        return [call.local_results() for call in made]

    def measure(self, *arrays: Any, warmups: int = 3, repetitions: int = 20, **named: Any) -> list[list[Timing]]:
        """Times `repetitions` calls after `warmups` others on every rank; the ranks start each call together.

        Returns a list per rank of a Timing per repetition. Raises ArgumentError and ExecutionError as `run` does.
        """
        return self._running.measure(self._bound, (arrays, named), warmups, repetitions)

    def timeline(self, *arrays: Any, warmups: int = 3, repetitions: int = 20, machine: Machine | None = None, **named: Any) -> Report:
        """Measures when each rank does what in a call with these global arrays, and predicts the same.

        Takes what `run` takes. The program is built anew with a mark before and after each instruction that works or communicates, which
        costs a few microseconds each; calls of the program itself pay nothing. Of `repetitions` calls after `warmups` others the
        report has the one of the median time. `machine` has the figures for the prediction, by default those of the options.

        Raises ArgumentError and ExecutionError as `run` does.

        Example: `hw.compile(f, target="cuda").timeline(x, w).save("f.html")`.
        """
        from hostweave.timeline.measure import measured
        from hostweave.timeline.predict import predicted
        from hostweave.timeline.report import Report

        compiled, times = self._running.timeline(self._bound, (arrays, named), warmups, repetitions)
        sizes = self._running.sizes_of(self._bound, arrays, named)
        known = {name: size for name, size in sizes.items() if name in compiled.host.symbols()}
        calls = sorted(zip(*times, strict=True), key=lambda call: max(time.total_ms for time in call))
        marks = [time.marks_ms for time in calls[len(calls) // 2]]
        figures = machine or compiled.options.figures
        basis = f"measured on {self.target.device_name()}, the median of {repetitions} calls"
        return Report(predicted(compiled.host, known, figures), measured(compiled.host, known, figures, basis, marks))

    def as_jax_ffi(self) -> Callable[..., Any]:
        """The program as a function of JAX, for use inside jax.jit: a custom call of XLA on this process's one device.

        It takes the rank's local arrays by position, and gives the local output, or a tuple of outputs. Ranks are processes, after
        `hw.init`; sharded dims are even. On CUDA it runs on XLA's stream. Calls that do not depend on each other run in the order of the
        jitted function, the same in all processes. There is no gradient and no batching: jax.custom_vjp connects a program of its own.

        Raises MissingPackage without JAX; ArgumentError where JAX has several devices here, or none of the target, for a program that
        donates inputs, and, as the function is traced, for arrays of another dtype or shape; ExecutionError without a group. What fails
        at a call is raised by JAX, with the message that the call would have raised.

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
            export(self._host, Path(folder), *reference_of(self._compiled.given, self._compiled.options))
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            raise ArgumentError(f"{self.name}: export: {why}; give a folder that is yours to write") from None

    def close(self) -> None:
        """Frees the memory and streams of the program on its devices. It cannot run again."""
        self._running.close()

    @property
    def _running(self) -> Running:
        """What runs it, and those that have inputs of it bound: with NumPy and the rendezvous, which compiling does not import."""
        return self._made or interruptibly(self._make)

    def _make(self) -> Running:
        with importing:
            from hostweave.running import Running

        with self._making:
            self._made = self._made or Running(self._compiled)
            return self._made

    @property
    def _host(self) -> HostProgram:
        return self._compiled.host
