"""`hw.compile` and what it gives."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from hostweave.base.errors import ArgumentError, ExecutionError, ProgramError
from hostweave.base.signatures import checked
from hostweave.build.toolchain import MODULE_FILE, TARGETS
from hostweave.check.check import check
from hostweave.check.sizes import minimal_sizes
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.user_kernel import expect_one_thread
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.mesh import Mesh

if TYPE_CHECKING:  # compiling needs neither NumPy nor what runs programs: they are imported when a program first runs
    from hostweave.runtime.group import Group
    from hostweave.runtime.local import LocalProgram
    from hostweave.runtime.session import Session, Timing

MAX_CHECKED_RANKS = 16  # of programs that are checked without being asked to
OPTIONS_OF_RUN = ("ranks", "warmups", "repetitions")  # take arrays by name beside these


@checked
def compile(program: Fusion | HostProgram, target: str = "cpu", options: Options | None = None) -> Program:
    """Lowers a fusion, or takes a host program as it is, for `target` "cpu" or "cuda".

    Needs no compiler yet: the C++ is compiled at the first run, or by `Program.build`. Raises ProgramError with the place in
    the user's source where the program means nothing, cannot be lowered, or has a race or a deadlock on some rank.
    """
    if not isinstance(program, Fusion | HostProgram):
        raise ProgramError(f"compile: {program!r} is neither a fusion nor a host program; mark a function with @hw.fusion(...)")
    if not isinstance(options, Options | None):
        raise ProgramError(f"{program.name}: options must be hw.Options, got {type(options).__name__}; write hw.Options(streams=4)")
    if target not in TARGETS:
        raise ProgramError(f"{program.name}: no target {target!r}; the targets are {' and '.join(TARGETS)}")
    options = options or Options()
    host = lower(program, options)
    if target == "cpu":
        for source in host.sources:
            expect_one_thread(source)
    for parameter in host.inputs:
        if parameter.name in OPTIONS_OF_RUN:
            raise ProgramError(f"{host.name}: input {parameter.name} has the name of an option of run or measure; choose another name")
    if options.check if options.check is not None else host.mesh.size <= MAX_CHECKED_RANKS:
        check(host)
    return Program(program, host, target, options)


class Program:
    """A compiled program. Made by `hw.compile`."""

    def __init__(self, given: Fusion | HostProgram, host: HostProgram, target: str, options: Options):
        self._given = given
        self._host = host
        self._options = options
        self._session: Session | None = None
        self._locals: WeakSet[LocalProgram] = WeakSet()  # where this process's ranks have called it
        self._closed = False
        self._lock = threading.Lock()
        self.target = target

    def __repr__(self) -> str:
        return f"<hostweave program {self.name} for {self.target} on {self.mesh}>"

    @property
    def name(self) -> str:
        return self._host.name

    @property
    def mesh(self) -> Mesh:
        return self._host.mesh

    @property
    def fusion_ir(self) -> str:
        """The fusion as it was given. Raises ProgramError for a program that was compiled from host IR."""
        if not isinstance(self._given, Fusion):
            raise ProgramError(f"{self.name}: was compiled from host IR and has no fusion IR; see host_ir")
        return str(self._given)

    @cached_property
    def host_ir(self) -> str:
        return str(self._host)

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """The generated files, path -> text. The same for both targets."""
        from hostweave.emit import render

        return render(self._host)

    @property
    def source(self) -> str:
        """The generated host program, program.cpp."""
        return self.sources["program.cpp"]

    @cached_property
    def folder(self) -> Path:
        """Where the sources, the compiler's log and the built module are; builds them where they are not there yet."""
        from hostweave.build.program import build

        return build(self.name, self.host_ir, repr(self._options), self.target, lambda: self.sources)

    @cached_property
    def module(self) -> ModuleType:
        """The program as a Python extension module."""
        from hostweave.build.loader import load

        return load(self.folder / MODULE_FILE, self.target)

    def build(self) -> None:
        """Compiles and loads the module, or takes it from the cache.

        Raises BuildError where the toolchain is not complete or the compiler fails.
        """
        _ = self.module

    def check(self, **sizes: int) -> None:
        """Raises ProgramError for the first race, deadlock or unmatched communication on some rank.

        The program is looked at for these `sizes`, and small ones where none are given. Raises ArgumentError for names that it
        does not have.
        """
        if unknown := sizes.keys() - set(self._host.symbols()):
            known = ", ".join(self._host.symbols()) or "none"
            raise ArgumentError(f"{self.name}: check: no size named {', '.join(sorted(unknown))}; the sizes of the program: {known}")
        if wrong := [f"{name}={size!r}" for name, size in sizes.items() if not isinstance(size, Integral) or size < 0]:
            raise ArgumentError(f"{self.name}: check: {', '.join(wrong)}: a size is an int of at least 0")
        check(self._host, {**minimal_sizes(self._host), **sizes})

    def __call__(
        self,
        *arrays: Any,
        out: Any = None,
        stream: Any = None,
        group: Group | None = None,
        sizes: Mapping[str, int] | None = None,
        **named: Any,
    ) -> Any:
        """Runs this thread's or process's rank of a group on its local arrays, after `hw.init`: all ranks make the same calls.

        `arrays` are the inputs in order, `named` others by name; contiguous and on the rank's device; nothing is copied. Gives
        the local output, or a tuple of them, in the library of the first input, or in `out`, which may hold arrays to write to,
        apart from each other and from the inputs. Without `group` it is the default one. Ranks that are processes take it that
        sharded dims are even; `sizes` gives the global size of those that are not, by name, and of those that the rank's own
        arrays do not tell. A rank that is not in the mesh of an input passes None for it, and gets None for such an output.

        On CUDA the call is ordered after what `stream` holds (an int, or a stream of PyTorch, CuPy or another library; by
        default the library's current one), and later work on it after the call; nothing waits. On the CPU target the call
        returns when it is done.

        Raises ArgumentError for arrays that do not fit, ExecutionError where the ranks do not get through, or did not earlier.
        """
        from hostweave.runtime.arguments import in_order
        from hostweave.runtime.group import current
        from hostweave.runtime.local import LocalProgram

        if self._closed:
            raise ExecutionError(f"{self.name}: the program is closed; compile it again")
        group = group or current()
        if group is None:
            raise ExecutionError(f"{self.name}: this process has not joined a group; call hw.init first, or run all ranks here with .run")
        local = group.programs.get(self)
        if local is None:
            local = LocalProgram(self, self._host, repr(self._options), group, self._options.verify_calls)
            group.programs[self] = local
            self._locals.add(local)
        return local(in_order(self.name, self._host.inputs, arrays, named) if named else arrays, out, stream, sizes)

    def run(self, *arrays: Any, ranks: bool = False, **named: Any) -> Any:
        """Runs all ranks in this process on global arrays, given in order or by name, and waits for the result.

        Gives the global output, or a tuple of them where there are several, as arrays of the first input's library; of a
        replicated output a rank's copy. With `ranks`, gives a list of every rank's local output or tuple of outputs, None for
        what is on a mesh that the rank is not in.
        Raises ArgumentError for arrays that do not fit, ExecutionError where the ranks do not get through.
        """
        from hostweave.runtime.call import make_call
        from hostweave.runtime.cpu import schedule

        call = make_call(self._host, self.target, arrays, named)
        self._ready().run([call], schedule(), poison=False)
        return call.local_results() if ranks else call.global_results()

    def run_in_flight(self, calls: Sequence[Mapping[str, Any]], *, poison: bool = False) -> list[list[Any]]:
        """Runs several calls, with arrays of the same shapes, back to back: nothing waits for the device in between.

        With `poison`, outputs and temporaries are filled with NaN on the caller's stream before each call. Gives for every
        call what `run(ranks=True)` gives. This is how tests see a missing dependency.
        """
        from hostweave.runtime.call import make_call
        from hostweave.runtime.cpu import schedule

        made = [make_call(self._host, self.target, (), arrays) for arrays in calls]
        self._ready().run(made, schedule(), poison=poison)
        return [call.local_results() for call in made]

    def measure(self, *arrays: Any, warmups: int = 3, repetitions: int = 20, **named: Any) -> list[list[Timing]]:
        """The times of `repetitions` calls on every rank, [rank][repetition]; ranks begin each call together.

        Raises ArgumentError and ExecutionError as `run` does.
        """
        from hostweave.runtime.call import make_call
        from hostweave.runtime.cpu import schedule

        if warmups < 0 or repetitions < 1:
            raise ArgumentError(f"{self.name}: measure: warmups={warmups}, repetitions={repetitions}: at least 0 and 1 are wanted")
        call = make_call(self._host, self.target, arrays, named)
        return self._ready().measure(call, schedule(), warmups, repetitions)

    def export(self, folder: str | Path) -> None:
        """Writes a CMake project that builds and runs the program without Python, on both targets.

        Raises ArgumentError where the folder cannot be written or has other files of these names, ProgramError for what has no C++.
        """
        from hostweave.emit import export

        try:
            export(self._host, Path(folder))
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            raise ArgumentError(f"{self.name}: export: {why}; give a folder that is yours to write") from None

    def close(self) -> None:
        """Frees all that the program holds on its devices. It cannot run again."""
        with self._lock:
            self._closed = True
            if self._session:
                self._session.close()
                self._session = None
            for local in self._locals:
                local.close()

    def _ready(self) -> Session:
        """The program on every rank of a world that works."""
        from hostweave.runtime.session import Session

        with self._lock:
            if self._closed:
                raise ExecutionError(f"{self.name}: the program is closed; compile it again")
            if self._session is None or self._session.broken:
                self._session = None
                self._session = Session(self.module, self.target, self.mesh.size)
            return self._session
