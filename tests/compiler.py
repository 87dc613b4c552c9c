"""A command that compiles the C++ of tests faster than the plain compiler: with precompiled headers, and most files without
optimisation. Compiling a test program takes longer than running it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from hostweave.base.errors import BuildError
from hostweave.build.cuda import gpus
from hostweave.build.toolchain import ENQUEUING, INSTALLED, MODULE_FILE, Toolchain
from hostweave.targets.target import NAMES, find_target

# Headers of programs, bindings and kernels. A C++ compiler compiles kernels only for the CPU target.
HEADERS = (
    *("abi", "arena", "attention", "blocks", "check", "collectives", "group", "launch", "matmul", "optional", "rank", "streams", "tensor"),
    *("term_exchange", "types", "window"),
)
OF_KERNELS = ("kernel", "fibers", "launch", "rows", "terms", "types")
PROGRAM, KERNELS = ENQUEUING, "kernels.cu"
# Disables the special functions of <cmath>. The template instances of these functions would be a third of each kernel file.
STANDARD = "#include <cstddef>\n#undef _GLIBCXX_USE_STD_SPEC_FUNCS\n#include <array>\n#include <optional>\n"
# CUDA's headers define hundreds of static functions. Without optimisation, GCC compiles all of these functions in each file, which takes
# very long.
CUDA_STANDARD = """\
#pragma GCC push_options
#pragma GCC optimize("O1")
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#pragma GCC pop_options
"""
LIBRARY = "-fvisibility=default"  # option used only for the runtime library
HEADERS_OF = {
    ("cpu", PROGRAM): (*HEADERS, *OF_KERNELS),
    ("cpu", KERNELS): OF_KERNELS,
    ("cuda", PROGRAM): (*HEADERS, "jit"),
}

# Script that adds options to commands of known kinds, and passes other commands to the compiler unchanged. The gold linker halves the link
# time, so the script selects gold if possible.
SCRIPT = """\
#!/bin/sh
case " $* " in
*" {library} "*) exec {compiler} "$@" {library_level} ;;
{cases}
*" -o {module} ") exec {compiler} {linker} {libraries} "$@" -lgcc ;;
*" -shared "*) exec {compiler} {linker} "$@" ;;
*) exec {compiler} "$@" ;;
esac
"""
# The first call makes the precompiled header. Concurrent calls wait for the header.
CASE = """\
*{options}" -c "*)
  header={header}
  test -e "$header.gch" || flock "$header.lock" sh -c {make} "$header" || exit
  exec {compiler} -include "$header" "$@" {level} ;;"""


def with_precompiled_headers(folder: Path, name: str, optimised: Collection[str]) -> Path:
    """Writes a command to `folder` for use as CXX. The command optimises only the kinds of files in `optimised`."""
    script, compiler = folder / name, shlex.quote(str(find_target("cpu").toolchain().compiler))
    cases, library_level = "\n".join(_cases(folder, optimised)), " ".join(_level(LIBRARY, optimised))
    words = {"compiler": compiler, "linker": _linker(folder, compiler), "libraries": _libraries(), "module": MODULE_FILE}
    text = SCRIPT.format(cases=cases, library=LIBRARY, library_level=library_level, **words)
    if not script.exists() or script.read_text() != text:  # The cache identifies a compiler by its path, size and time.
        script.write_text(text)
        script.chmod(0o755)
    return script


def toolchains() -> dict[str, Toolchain]:
    """Toolchains of the targets for which this machine can compile."""
    found = {}
    for target in NAMES:
        with suppress(BuildError):
            found[target] = find_target(target).toolchain()
    return found


def _linker(folder: Path, compiler: str) -> str:
    """Option that selects the gold linker if the compiler can use gold. An installed gold may be unable to find the default libraries."""
    source = folder / "linked.cpp"
    source.write_text("#include <string>\nstd::string text() { return {}; }\n")
    command = f"{compiler} -fuse-ld=gold -shared -fPIC {shlex.quote(str(source))} -o {shlex.quote(str(folder / 'linked.so'))}"
    return "-fuse-ld=gold" if subprocess.run(shlex.split(command), capture_output=True, check=False).returncode == 0 else ""


def _libraries() -> str:
    """Option that links a program without the standard libraries, which halves the link time. The runtime library of the program needs the
    standard libraries, so the loader finds the symbols of the standard libraries. The option is empty with GPUs, and if the compiler links
    the C++ library statically."""
    runtime = next(path for path in INSTALLED if path.suffix == ".so")
    return "-nodefaultlibs" if not gpus() and b"libstdc++.so" in runtime.read_bytes() else ""


def _cases(folder: Path, optimised: Collection[str]) -> Iterator[str]:
    found = toolchains()
    for (target, what), headers in HEADERS_OF.items():
        if target not in found:
            continue
        level = _level(what, optimised)
        header = folder / f"{target}_{what}{''.join(level)}.h"
        standard = STANDARD + CUDA_STANDARD if target == "cuda" else STANDARD
        header.write_text(standard + "".join(f'#include "hostweave/{name}.h"\n' for name in headers))
        yield _case(found[target], what, str(header), level)


def _level(what: str, optimised: Collection[str]) -> list[str]:
    """Options of files that are not optimised. A file may contain kernels, which need -fwrapv. GCC omits unused functions of CUDA_STANDARD
    only with -ftoplevel-reorder."""
    return [] if what in optimised else ["-O0", "-ftoplevel-reorder", "-fwrapv"]


def _case(toolchain: Toolchain, what: str, header: str, level: list[str]) -> str:
    compiler, *options = _until_source(toolchain, what)
    same = [option for option in options if option not in ("-x", "c++")]
    command = shlex.join([compiler, *same, *level, "-x", "c++-header"])
    return CASE.format(
        options=shlex.quote(shlex.join(options)),
        header=shlex.quote(header),
        make=shlex.quote(f'test -e "$0.gch" || {{ {command} "$0" -o "$0.part" && mv "$0.part" "$0.gch"; }}'),
        compiler=shlex.quote(compiler),
        level=" ".join(level),
    )


def _until_source(toolchain: Toolchain, source: str) -> list[str]:
    return toolchain.compile(source, "")[: -len(["-c", source, "-o", ""])]
