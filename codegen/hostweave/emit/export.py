"""Exports a program as a CMake project: a library with a C++ and a C API. The project needs no Python."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from hostweave.base.errors import ArgumentError
from hostweave.base.paths import HOST_IR, RUNTIME
from hostweave.emit.layout import rendered
from hostweave.emit.main import Main, Reference
from hostweave.emit.program import ProgramSources
from hostweave.emit.wheel import Wheel
from hostweave.host_ir.ir import HostProgram
from hostweave.types.machine import H200, Machine
from hostweave.types.tensor import DType

_FOLDERS = ("cmake", "cpu", "embed", "include", "sample", "src")  # folders of runtime_cpp that are copied to every project
_SUMS = ".hostweave-export"  # SHA-256 of each written file; the next export uses these digests to detect edited files


def render(program: HostProgram, machine: Machine = H200) -> dict[str, str]:
    """Renders the generated files, and returns a dict from path to text. Kernels are scheduled for `machine`.

    The files are the host IR, the Python binding, and the C++ of the program and of its kernels. Equal programs and machines give the same
    bytes. Raises ProgramError if the program cannot be emitted, for example because an op has no C++.
    """
    emitted = ProgramSources(program, machine=machine)
    return {**_sources(emitted), "binding.cpp": rendered("binding.cpp", program=emitted)}


def export(
    program: HostProgram,
    folder: Path,
    reference: HostProgram | str,
    dtypes: Iterable[DType] = (),
    machine: Machine = H200,
    wheel: Wheel | None = None,
) -> None:
    """Writes a CMake project to `folder`: the library, the sources of the runtime, and a main.cpp that runs and times the program. With
    `wheel`, `pip wheel` builds a wheel from the project.

    `reference` is a program for one device that does the same computation, or the reason why there is no such program. With a program,
    main.cpp compares the results. `dtypes` are the dtypes of the program's values. Kernels of both programs are scheduled for `machine`.

    Raises ProgramError if the program cannot be emitted. Raises ArgumentError if the export would replace or delete a file that was edited,
    or that no export wrote.
    """
    emitted = ProgramSources(program, machine)
    alone = reference if isinstance(reference, str) else ProgramSources(reference, machine)
    main = Main(emitted, alone if isinstance(alone, str) else Reference(alone, dtypes))
    texts = {path: rendered(path, program=emitted, main=main, wheel=wheel) for path in ("main.cpp", "CMakeLists.txt")}
    texts |= {main.folder + path: rendered(path, program=emitted, main=main) for path in ("join.h", "join.cpp", "c_api.h", "c_api.cpp")}
    for under, each in main.programs.items():
        texts |= {under + path: text for path, text in _sources(each).items()}
    if wheel:
        texts |= {"pyproject.toml": rendered("pyproject.toml", program=emitted, wheel=wheel), **wheel.files(emitted)}
    files = {path: text.encode() for path, text in texts.items()} | _runtime(with_attention=bool(program.libraries))
    folder.mkdir(parents=True, exist_ok=True)
    written = _written(folder)
    exported = {line.partition("  ")[2] for line in written}
    for path in dict.fromkeys((*files, *exported)):
        there = folder / path
        if there.exists() and f"{_sum(there.read_bytes())}  {path}" not in written:
            what = "was edited since it was exported" if path in exported else "was not written by an export"
            raise ArgumentError(f"{program.name}: export: {there} exists and {what}; move it, or choose another folder")
    for path in exported - files.keys():
        (folder / path).unlink(missing_ok=True)  # CMake would still compile a file of an earlier export.
    new = [f"{_sum(content)}  {path}" for path, content in files.items()]
    # An interrupted export can be repeated, because the list has the old and the new digests until all files are written.
    before, after = ("".join(f"{line}\n" for line in dict.fromkeys(lines)).encode() for lines in ((*written, *new), new))
    for path, content in ((_SUMS, before), *files.items(), (_SUMS, after)):
        there = folder / path
        if not there.exists() or there.read_bytes() != content:  # An unchanged file keeps its time stamp, so CMake does not recompile it.
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(content)


def _runtime(with_attention: bool) -> dict[str, bytes]:
    """Sources of the runtime by path. STAMP has a digest of the sources that all exported libraries share."""
    paths = [RUNTIME / "CMakeLists.txt", *(path for folder in _FOLDERS for path in sorted((RUNTIME / folder).rglob("*")) if path.is_file())]
    shared = {f"runtime/{path.relative_to(RUNTIME)}": path.read_bytes() for path in paths}
    stamp = _sum(b"".join(path.encode() + content for path, content in shared.items() if "/sample/" not in path))
    shared["runtime/STAMP"] = f"{stamp}\n".encode()
    attention = sorted((RUNTIME / "attention").rglob("*")) if with_attention else []
    return shared | {f"runtime/{path.relative_to(RUNTIME)}": path.read_bytes() for path in attention if path.is_file()}


def _sources(emitted: ProgramSources) -> dict[str, str]:
    return {HOST_IR: emitted.ir.code, **{path: rendered(path, program=emitted) for path in emitted.files}}


def _written(folder: Path) -> list[str]:
    try:
        return (folder / _SUMS).read_text().splitlines()
    except FileNotFoundError:
        return []


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
