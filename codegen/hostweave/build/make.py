"""Compiles the files that the cache lacks, in parallel, and links modules and libraries."""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from hostweave.base.errors import BuildError
from hostweave.base.interrupts import in_current_context
from hostweave.base.paths import BUILDER, RUNTIME
from hostweave.base.progress import expect_tasks, task_done
from hostweave.base.shortages import remedy_of
from hostweave.build.cache import get_or_make, lookup, name_of, root, stamp_of
from hostweave.build.nvrtc import Nvrtc, Unit, loader, units_of, units_of_runtime
from hostweave.build.processes import run, within_limit
from hostweave.build.toolchain import ENQUEUING, GLUE, LIBRARIES_FILE, MODULE_FILE, Library, Toolchain

CORES = len(os.sched_getaffinity(0))
_KERNELS, _JIT_FILE, _CUBIN = "kernels.cu", "kernels_jit.cpp", "kernel.cubin"


def make_runtime(
    folder: Path,
    files: Sequence[Path],
    toolchain: Toolchain,
    library: str,
    macros: Mapping[str, str] | None = None,
    soname: str = "",
    dependencies: tuple[Library, ...] = (),
) -> None:
    kernels, sources = ([file for file in files if (file.suffix == ".cu") == is_kernels] for is_kernels in (True, False))

    def cubin(unit: Unit) -> Path:
        assert toolchain.kernel_compiler
        output = folder / f"{unit.name}.cubin"
        output.write_bytes(_compiled(toolchain.kernel_compiler, unit, folder))
        return output

    defines = "".join(f"#define {macro} {value}\n" for macro, value in (macros or {}).items())
    definitions = (f"-D{macro}={value}" for macro, value in (macros or {}).items())
    options = ("-fvisibility=default", "-Wno-subobject-linkage", *definitions)
    files_to_compile = merge_sources(sources, folder)
    units = [replace(unit, before=defines + unit.before) for file in kernels for unit in units_of_runtime(file.stem, file.read_text())]
    with ThreadPoolExecutor(CORES) as pool:
        cubins = pool.map(in_current_context(cubin), units)
        run_together({_object(file): [*toolchain.compile(file, _object(file)), *options] for file in files_to_compile}, folder)
        found = {unit.name: output for unit, output in zip(units, cubins, strict=True)}
    if found:
        files_to_compile.append(_JIT_FILE)
        (folder / _JIT_FILE).write_text(loader(found))
        run_together({_object(_JIT_FILE): [*toolchain.compile(_JIT_FILE, _object(_JIT_FILE)), *options]}, folder)
    for other in dependencies:
        other.make()
    run_together({library: toolchain.link([*map(_object, files_to_compile)], library, dependencies, soname)}, folder)


def merge_sources(sources: Sequence[Path], folder: Path) -> list[str]:
    """Writes at most one file per core. Each file includes some of the sources, so that a core parses the common headers once."""
    largest_first = sorted(sources, key=lambda file: file.stat().st_size, reverse=True)
    units = {f"unit_{core}.cpp": largest_first[core::CORES] for core in range(min(CORES, len(sources)))}
    for unit, files in units.items():
        (folder / unit).write_text("".join(f'#include "{file}"\n' for file in files))
    return list(units)


def make_program(folder: Path, sources: Sequence[str], toolchain: Toolchain, libraries: Callable[[], tuple[Library, ...]]) -> None:
    """Builds the module from the sources in `folder`, and links it with the runtime `libraries`. Compiles only files whose objects are not
    in the cache."""
    together = [name for name in toolchain.together if name in sources]
    (folder / ENQUEUING).write_text("".join(f'#include "{name}"\n' for name in together))
    files = [ENQUEUING, *(name for name in sources if name.endswith((".cpp", ".cu")) and name not in together)]
    entries = {file: _entry(file, folder, (folder / file).read_text(), toolchain) for file in files}
    missing = [file for file in files if not lookup(entries[file])]
    _compile(folder, missing, toolchain)
    for file in missing:
        get_or_make(entries[file], partial(shutil.copy, folder / _object(file)))
        (folder / _object(file)).unlink()
    objects = [str(root() / entries[file] / _object(file)) for file in files]
    linked = libraries()
    cached = [f"{library.path.relative_to(root())}\n" for library in linked if library.soname]
    (folder / LIBRARIES_FILE).write_text("".join(cached))
    run_together({MODULE_FILE: toolchain.link([*objects, str(GLUE)], MODULE_FILE, linked)}, folder)


def run_together(commands: Mapping[str, list[str]], folder: Path) -> None:
    """Runs the command of each output in `folder`, in parallel, with output to `build.log`. Raises BuildError if a command fails."""

    expect_tasks(len(commands))

    def run_one(output: str) -> tuple[int, str]:
        result = run(commands[output], folder=folder)
        task_done(output.removesuffix(".o"))
        return result

    with ThreadPoolExecutor(CORES) as pool:
        results = list(pool.map(in_current_context(run_one), commands))
    with open(folder / "build.log", "a") as log:
        log.writelines(f"$ {' '.join(command)}\n{output}" for command, (_, output) in zip(commands.values(), results, strict=True))
    if (failed := next((output for status, output in results if status != 0), None)) is not None:
        raise BuildError(f"the compiler failed: {_first_error(failed)}")


def _object(file: str) -> str:
    return f"{file}.o"


def _entry(name: str, folder: Path, text: str, toolchain: Toolchain) -> str:
    return "objects/" + name_of(name, *_with_includes(folder, text), stamp_of(BUILDER), stamp_of(RUNTIME), toolchain.stamp)


def _with_includes(folder: Path, text: str) -> list[str]:
    """A text and the files that it includes from the program's folder, without the text of comment lines."""
    without_comments = re.sub(r"^ *//.*", "//", text, flags=re.M)
    included = [folder / name for name in re.findall(r'^#include "([^"]+)"', without_comments, re.M)]
    return [without_comments, *(each for file in included if file.is_file() for each in _with_includes(folder, file.read_text()))]


def _compile(folder: Path, files: Sequence[str], toolchain: Toolchain) -> None:
    compiler = toolchain.kernel_compiler if _KERNELS in files else None
    host_files = [file for file in files if not (compiler and file == _KERNELS)]
    with ThreadPoolExecutor(1) as pool:
        cubins = pool.submit(in_current_context(_cubins), folder, toolchain, compiler) if compiler else None
        run_together({_object(file): toolchain.compile(file, _object(file)) for file in host_files}, folder)
    if cubins:
        (folder / _JIT_FILE).write_text(loader(cubins.result()))
        run_together({_object(_KERNELS): toolchain.compile(_JIT_FILE, _object(_KERNELS))}, folder)


def _cubins(folder: Path, toolchain: Toolchain, compiler: Nvrtc) -> dict[str, Path]:
    def cubin(unit: Unit) -> Path:
        entry = _entry(unit.name, folder, unit.before + unit.text, toolchain)
        if not lookup(entry):
            code = _compiled(compiler, unit, folder)
            get_or_make(entry, lambda output: (output / _CUBIN).write_bytes(code))
        return root() / entry / _CUBIN

    units = units_of((folder / _KERNELS).read_text())
    with ThreadPoolExecutor(CORES) as pool:
        return dict(zip((unit.name for unit in units), pool.map(in_current_context(cubin), units), strict=True))


def _compiled(compiler: Nvrtc, unit: Unit, folder: Path) -> bytes:
    return within_limit(f"the compilation of {unit.name}", lambda: compiler.compile(unit, folder))


def _first_error(output: str) -> str:
    lines = output.strip().splitlines() or ["it printed nothing"]
    for line in lines:
        if remedy := remedy_of(line):
            return f"{line}; {remedy}"
    return next((line for line in lines if "error" in line or "undefined reference" in line), lines[-1])
