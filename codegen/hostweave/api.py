"""`hw.compile`, and the class `Program` that it returns."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.base.forks import importing, reset_after_fork
from hostweave.base.garbage import without_garbage_collection
from hostweave.base.interrupts import interruptibly
from hostweave.base.signatures import checked
from hostweave.check.sizes import minimal_sizes
from hostweave.compiled import Compiled, compiled
from hostweave.emit import Wheel, export
from hostweave.fusion_ir.choice import Choice
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.size_requirements import are_divided
from hostweave.options import Options, options_of
from hostweave.pipeline import lower, reference_of
from hostweave.targets.target import NAMES, Target, find_target
from hostweave.timeline.measure import measured
from hostweave.timeline.predict import predicted
from hostweave.timeline.report import Report
from hostweave.tune.explain import explained
from hostweave.types.machine import Machine
from hostweave.types.mesh import Mesh

if TYPE_CHECKING:  # imported on first use, see Program._running
    from hostweave.running import Running, Variants
    from hostweave.runtime.arguments import BoundInputs
    from hostweave.runtime.graphs import Captured
    from hostweave.runtime.group import Group
    from hostweave.runtime.team import Timing

_VERSION = r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+\w+(\.\w+)*)?"  # PEP 440


@checked
def compile(program: Fusion | HostProgram, target: str = "cpu", options: Options | None = None) -> Program:
    """Compiles a fusion for `target` "cpu" or "cuda". A host program is compiled unchanged.

    Lowers the program and verifies it after every pass. `Options.check` turns the check for races, deadlocks and wrong results on or off.
    The C++ is compiled when first needed, or by `Program.build`.

    Raises ProgramError if an argument is invalid, or if the program has a fault or is not supported. The message names the line in the
    user's source, if the line is known.

    Example: `program = hw.compile(ag_matmul, target="cuda", options=hw.Options(streams=2))`.
    """
    if not isinstance(program, Fusion | HostProgram):
        raise ProgramError(f"compile: {program!r} is neither a fusion nor a host program; mark a function with @hw.fusion(...)")
    options = options_of(options, program.name)
    if target not in NAMES:
        raise ProgramError(f"{program.name}: there is no target {target!r}; the targets are {' and '.join(NAMES)}")
    options = options if options.machine else replace(options, machine=find_target(target).machine(program.mesh.size))
    with without_garbage_collection():
        made = compiled(program, target, options)
        return Program(_searched(made) if options.overlap == "search" else made)


def _searched(made: Compiled) -> Compiled:
    with importing:
        from hostweave.runtime.search import search

    options = made.options
    stated = (str(sorted(given.items())) for given in (options.sizes, options.choices))
    key = (options.figures.name, made.target.name, options.transport, *stated)
    choices = search(made.host, options.sizes, key, lambda chosen: Program(made.otherwise(choices=chosen)))
    if not choices:
        return made
    found = made.otherwise(choices={choice.name: choice.chosen.name for choice in choices})
    return replace(found, host=replace(found.host, choices=choices))


class Program:
    """A compiled program: the result of `hw.compile`.

    `run` takes global arrays and runs all ranks in this process. Calling the program takes local arrays and runs only the rank of the
    calling process or thread.

    Example: `y = hw.compile(ag_matmul).run(x, w=w)`.
    """

    def __init__(self, compiled: Compiled, running: Running | None = None, bound: BoundInputs | None = None):
        self.compiled, self._made, self._bound = compiled, running, bound
        self._making = reset_after_fork(threading.Lock())

    def __repr__(self) -> str:
        bound = f" with {len(self._bound.arrays)} inputs bound" if self._bound else ""
        return f"<hostweave program {self.name} for {self.target.name} on {self.mesh}{bound}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        return f"<details><summary>{escape(repr(self))}</summary><pre>{escape(self.host_ir)}</pre></details>"

    def __reduce__(self) -> NoReturn:
        raise ProgramError(f"{self.name}: a compiled program cannot be pickled; pickle the fusion, and compile it after loading")

    @property
    def target(self) -> Target:
        return self.compiled.target

    @property
    def host(self) -> HostProgram:
        """The host program after all passes. `host_ir` is its text."""
        return self.compiled.host

    @property
    def name(self) -> str:
        """Name of the traced function, or of the host program."""
        return self.host.name

    @property
    def mesh(self) -> Mesh:
        """Mesh of the ranks that the program runs on."""
        return self.host.mesh

    @property
    def fusion_ir(self) -> str:
        """Text of the fusion IR before all passes. Raises ProgramError if the program was compiled from host IR."""
        if not isinstance(self.compiled.given, Fusion):
            raise ProgramError(f"{self.name}: was compiled from host IR and has no fusion IR; see host_ir")
        return str(self.compiled.given)

    @cached_property
    def host_ir(self) -> str:
        """Text of the host IR, after all passes."""
        return str(self.host)

    @property
    def figures(self) -> Machine:
        """Speeds and limits of a machine, from which the cost model predicts times."""
        return self.compiled.options.figures

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Choices of the compiler: algorithms, chunks and overlap, with predicted or measured times. `explain` shows the choices as
        text."""
        return self.host.choices

    @property
    def sources(self) -> Mapping[str, str]:
        """Generated files: a mapping from path to text. The files depend on `figures`, but not on the target."""
        return self.compiled.sources

    @property
    def source(self) -> str:
        """Text of the generated host program, program.cpp."""
        return self.sources["program.cpp"]

    @property
    def folder(self) -> Path:
        """Folder with the sources, the compiler's log and the built module. Builds the module if needed."""
        return self.compiled.folder

    @property
    def module(self) -> ModuleType:
        """The Python extension module. Builds the module if needed, and raises the errors of `build`."""
        return self.compiled.module

    def explain(self) -> str:
        """Explains the compiler's choices.

        Each communication has a line that says how the communication runs. If the compiler had alternatives, the line has their times.
        Attention ops have a line too, and so do matmuls that the compiler splits or composes. Raises ProgramError if the program was
        compiled from host IR.

        Example: `print(hw.compile(f, options=hw.Options(sizes={"M": 8192, "K": 8192, "N": 7168})).explain())`.
        """
        if not isinstance(self.compiled.given, Fusion):
            raise ProgramError(f"{self.name}: was compiled from host IR, so there are no choices to explain; see host_ir")
        stages: list[Fusion] = []
        lower(self.compiled.given, self.compiled.options, lambda _, stage: stages.append(stage) if isinstance(stage, Fusion) else None)
        return explained(stages[-1], self.host, self.compiled.options)

    @checked
    def predict(
        self,
        sizes: Mapping[str, int] | None = None,
        *,
        machine: Machine | None = None,
        ranks: int | Mapping[str, int] | None = None,
    ) -> Report:
        """Predicts the timeline of a call on all ranks. The program does not run, so the machine need not exist.

        `sizes` are global sizes by name. A missing size is taken from `Options(sizes=...)`, or is 4096, rounded up to a possible size.
        `machine` has the figures for the prediction, by default the figures of the options. `ranks` is another number of ranks, or other
        sizes of mesh axes by name. The compiler then makes its choices again; stated choices of "none" remain. For more than 8 ranks, the
        machine needs a `network` between hosts. The prediction ignores the time in which hosts enqueue work. `print(report)` shows the
        totals, and `report.save("f.html")` writes a page.

        Raises ArgumentError for invalid `sizes`, and ProgramError if the prediction is impossible; the message says why.

        Example: `hw.compile(mlp).predict({"M": 8192}, ranks=16).predicted.micros`.
        """
        figures = machine or self.figures
        made, known = self.compiled.on_ranks(ranks, figures).for_call("predict", sizes or {})
        return made.report(predicted(made.host, known, figures))

    def build(self) -> None:
        """Compiles the C++ unless it is in the cache, and loads the module.

        Raises BuildError if the module cannot be built. The message names the missing part, or quotes the compiler.
        """
        _ = self.module

    @checked
    def check(self, **sizes: int) -> tuple[str, ...]:
        """Proves that at the global `sizes` no rank has races, deadlocks or unmatched communication. Also compares the results with those
        of the fusion, if there is one.

        Sizes that are not given are small. Vector clocks over the operations of all ranks prove the order (Fidge 1988, Mattern 1989). The
        inputs of the comparison are random numbers of a finite field (Schwartz 1980, Zippel 1979). Returns texts about the parts that the
        comparison does not cover, such as a line that did not run. Raises ProgramError for the first fault, with rank and instruction if
        known, and ArgumentError for invalid `sizes`.

        Example: `program.check(M=8192, N=4096)`.
        """
        self.compiled.expect_sizes("check", sizes)
        made = self.compiled if are_divided(self.host, sizes) else self.compiled.in_sequence
        return made.check({**minimal_sizes(made.host), **sizes})

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Parts of the program that the check at compile time did not cover, as texts."""
        return self.compiled.unchecked

    @checked
    def bind(self, **arrays: Any) -> Program:
        """Returns a program that has `arrays` as bound inputs. Calls of the new program take only the unbound inputs, by position or name.

        Bound arrays are checked only once, so calls are faster. If you call the program, bind local arrays. If you use `run`, bind global
        arrays. A call reads a bound array in place, so later writes to the array have an effect. `run` may ignore later writes, because it
        keeps the local arrays that its first call cut from a bound array. The two programs share memory and streams. Closing one program
        closes both.

        Raises ArgumentError for an unknown or already bound name, for a donated input, and for an array that does not fit. Checks that
        depend on the rank or on unbound inputs follow at the first call.

        Example: `model = program.bind(**weights)`, then `y = model(x)`.
        """
        return Program(self.compiled, self._running, self._running.bind(self._bound, arrays))

    def __call__(
        self,
        *arrays: Any,
        out: Any = None,
        stream: Any = None,
        group: Group | None = None,
        sizes: Mapping[str, int] | None = None,
        **named: Any,
    ) -> Any:
        """Runs the rank of this process or thread on local arrays. After `hw.init`, all ranks of the group make the same calls in the same
        order.

        `arrays` are inputs in order, and `named` are the remaining inputs by name. Arrays are contiguous local blocks on the rank's device.
        The call does not copy inputs. Returns the local output, or a tuple of outputs, as arrays of the first unbound input's library. If
        `out` is given, writes the outputs to the arrays of `out`, and returns `out`. Arrays of `out` must not overlap each other, or inputs
        that are not donated. `group` is by default the group "default" of this process or thread.

        If ranks are processes, each rank assumes that sharded dims are split evenly, unless `Options.verify_calls` is set. If a dim is
        split unevenly, pass the global sizes of all sharded dims by name in `sizes`. `sizes` also gives the sizes that the rank's own
        arrays do not determine. If a rank is not in the mesh of an input, the rank passes None for this input. If a rank is not in the mesh
        of an output, the rank gets None.

        On CUDA the call is enqueued on `stream`: a cudaStream_t as an int, or a stream of PyTorch, CuPy or another library. The default is
        the current stream of the arrays' library. The call is ordered with the other work on `stream`. On the CPU target the call returns
        when its work is done.

        Raises ArgumentError for arrays that do not fit. Raises ExecutionError if a rank fails or times out, in this call or in an earlier
        one.

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
        """Captures a call with these arrays as a CUDA graph. Returns a callable that launches the graph and has the `outputs`.

        All ranks capture the call together. Takes the arguments of a call, and first makes an ordinary call on `stream`. Each launch reads
        the current contents of the same input arrays and writes to the same output arrays. Launches are ordered like calls of the program.
        The callable keeps the arrays alive. On the CPU target, a launch repeats the call.

        All ranks launch the graph together. Only with transport `peer`, a rank may make an ordinary call while other ranks launch.
        Capturing the transport one_sided needs NCCL 2.30.7 or later.

        Alternatively, call the program inside a capture of the caller, such as `torch.cuda.graph`. The call becomes part of the caller's
        graph. Before such a capture, call the program once with arrays of the same shapes.

        Raises the errors of a call. Raises CaptureError if the call cannot be captured; the group remains usable.

        Example: `step = program.capture(x, w)`, then `x.copy_(new)` and `y = step()`.
        """
        captured: Captured = self._running.call(self._bound, (arrays, named), out, stream, group, sizes, captures=True)
        return captured

    def prepare(self, *sizes: Mapping[str, int], group: Group | None = None) -> None:
        """Prepares the rank of this process or thread for calls at each of the global `sizes`. All ranks of the group call `prepare`
        together.

        Without `prepare`, the first call builds and connects, and a call at new sizes may allocate, plan, and wait for all work on the
        rank's device. After `prepare`, calls at these sizes, in any order, need none of these steps. Each matmul keeps the plans of its
        last 4096 shapes, and each attention the plans of its last 128 shapes. Memory is allocated for the largest call. Sizes that bound
        inputs determine may be omitted. Sharded dims of bound inputs are then assumed to be split evenly.

        Raises ArgumentError for sizes that are unknown, missing or invalid, and the errors of a call.

        Example: `program.bind(**weights).prepare(*({"T": tokens} for tokens in range(1, 2049)))`.
        """
        self._running.prepare(self._bound, sizes, group)

    def run(self, *arrays: Any, ranks: bool = False, **named: Any) -> Any:
        """Runs all ranks in this process on global arrays, given by position or name, and waits for the result.

        Arrays are NumPy, PyTorch, CuPy or JAX arrays of the declared dtypes and global shapes. Returns the global output, or a tuple of
        outputs, as arrays of the first unbound input's library. With `ranks`, returns a list with the local output, or tuple of outputs, of
        every rank. A rank outside the mesh of an output has None for this output. Raises ArgumentError for arrays that do not fit, and
        ExecutionError if a rank fails or times out.

        Example: `y = program.run(x, w=w)`.
        """
        (call,) = self._running.run(self._bound, [(arrays, named)])
        return call.local_results() if ranks else call.global_results()

    @checked
    def run_in_flight(self, calls: Sequence[Mapping[str, Any]], *, poison: bool = False) -> list[list[Any]]:
        """Makes several calls with arrays of equal shapes. Waits after each call only on CUDA, if outputs are in host memory.

        With `poison`, all bytes of outputs and temporaries are 0xff before each call, which is NaN in floats. An unexpected NaN in a result
        then shows a missing dependency. Returns a list with the results of each call, in the form of `run(ranks=True)`.
        """
        if len(calls) == 0:
            return []
        return [call.local_results() for call in self._running.run(self._bound, [((), arrays) for arrays in calls], poison)]

    def measure(self, *arrays: Any, warmups: int = 3, repetitions: int = 20, **named: Any) -> list[list[Timing]]:
        """Measures `repetitions` calls on every rank, after `warmups` unmeasured calls. All ranks start each call at the same time.
        On CUDA, the first of all calls is an exception: its time includes launch overhead. So `warmups` should be at least 1.

        Returns for each rank a list with a Timing per repetition. Raises ArgumentError and ExecutionError as `run` does.
        """
        return self._running.measure("measure", self._bound, (arrays, named), warmups, repetitions)[1]

    def timeline(self, *arrays: Any, warmups: int = 3, repetitions: int = 20, machine: Machine | None = None, **named: Any) -> Report:
        """Measures the timeline of a call with these global arrays on all ranks, and predicts the timeline for comparison.

        A separate build records a mark before and after each instruction that computes or communicates. A mark takes about a microsecond.
        `repetitions` calls follow `warmups` calls, and the report shows the call with the median time.
        `machine` has the figures for the prediction, by default those of the options.

        Raises ArgumentError and ExecutionError as `run` does, and ProgramError if the prediction is impossible.

        Example: `hw.compile(f, target="cuda").timeline(x, w).save("f.html")`.
        """
        compiled, times = self._running.measure("timeline", self._bound, (arrays, named), warmups, repetitions)
        sizes = self._running.sizes_of(self._bound, arrays, named)
        known = {name: size for name, size in sizes.items() if name in compiled.host.given_sizes()} | compiled.host.depths()
        calls = sorted(zip(*times, strict=True), key=lambda call: max(time.total_ms for time in call))
        marks = [time.marks_ms for time in calls[len(calls) // 2]]
        figures = machine or compiled.options.figures
        basis = f"measured on {self.target.device_name()}, the median of {repetitions} calls"
        return compiled.report(predicted(compiled.host, known, figures), measured(compiled.host, known, figures, basis, marks))

    def as_jax_ffi(self) -> Callable[..., Any]:
        """Returns the program as a JAX function for use inside jax.jit: an XLA custom call on the only JAX device of this process.

        The function takes the rank's local arrays by position, and returns the local output or a tuple of outputs. Ranks are processes that
        have called `hw.init`, and sharded dims are even. On CUDA the call runs on XLA's stream. Calls run in the order of the jitted
        function, even if they are independent. The function has no gradient and no batching rule. Use jax.custom_vjp to attach a program
        that computes gradients.

        Raises an error of `hw.errors`, also during tracing, if JAX cannot call the program in this process; the message says why. Tracing
        also raises ArgumentError for arrays of wrong dtype or shape. If a call fails, JAX raises an error of its choice with Hostweave's
        message.

        Example: `mlp = program.as_jax_ffi()`, then `jax.jit(lambda x, w: mlp(jax.nn.relu(x), w).sum())(x, w)`.
        """
        from hostweave.runtime.jax_ffi import jax_call

        return jax_call(self)

    @checked
    def export(self, folder: str | Path, *, wheel: str = "", version: str = "0.1.0") -> None:
        """Writes a CMake project that builds and runs the program without Python, on the CPU or on GPUs.

        The project also has a test that compares the results of all ranks with a computation on one device, if one device can do the
        computation. With `wheel="cpu"` or "cuda", the folder is also a Python package for this target. `pip wheel --no-deps` builds a
        wheel of version `version` from the folder. The wheel does not need Hostweave.

        Raises ArgumentError for an unknown `wheel` or an invalid `version`. Also raises ArgumentError for a folder that cannot be written
        or has other files with names of the project. Raises ProgramError if the program cannot be exported; the message says why.

        Example: `program.export("ag_matmul/")`.
        """
        if wheel not in ("", *NAMES):
            raise ArgumentError(f"{self.name}: export: wheel={wheel!r} is not a target; write one of {', '.join(NAMES)}")
        if wheel and not re.fullmatch(_VERSION, version):
            raise ArgumentError(f"{self.name}: export: version={version!r} is not a version of a Python package; write one such as 1.0")
        if self.host.windows:
            why = f"the arrays of {', '.join(self.host.windows)} must be in windows, which only a group in Python can allocate"
            raise ProgramError(f"{self.name}: export: {why}; omit Options(windows=...)")
        try:
            reference, dtypes = reference_of(self.compiled.given, self.compiled.options)
            made = None
            if wheel:
                on = find_target(wheel)
                needed = ("numpy>=1.26", *on.wheel_requirements), ("scikit-build-core>=0.10", *on.wheel_build_requirements)
                made = Wheel(wheel, version, *needed)
            export(self.host, Path(folder), reference, dtypes, self.compiled.options.figures, made)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            raise ArgumentError(f"{self.name}: export: {why}; choose a writable folder") from None

    def close(self) -> None:
        """Frees the memory of the program on its devices. A closed program cannot run."""
        self._running.close()

    @property
    def variants(self) -> Variants:
        """Variants of the program that calls have needed so far, for example for sizes that the chunks of a loop do not divide.

        Example: `[one.compiled.variant for one in program.variants]` is `["in sequence"]` after a call with such sizes.
        """
        return self._running.variants

    @property
    def _running(self) -> Running:
        """Runner, shared with programs that `bind` returns. Created at the first use, because compiling with check=False needs no NumPy."""
        return self._made or interruptibly(self._make)

    def _make(self) -> Running:
        with importing:
            from hostweave.running import Running

        with self._making:
            self._made = self._made or Running(self.compiled)
            return self._made
