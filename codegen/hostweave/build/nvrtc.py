"""Compiles generated kernels by NVRTC, which takes a tenth of nvcc's time and is in the pip wheels.

The kernels become a cubin inside the program's module. There each kernel's name stands for a `hw::JitKernel`; see hostweave/jit.h.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

from hostweave.errors import BuildError

_INTEGERS = {8: "char", 16: "short", 32: "int", 64: "long"}  # as the C++ compiler of the host has them


def _integers() -> str:
    """What <cstdint> has."""
    lines = []
    for bits, name in _INTEGERS.items():
        largest = 2 ** (bits - 1) - 1
        lines += [
            f"using int{bits}_t = signed {name};",
            f"using uint{bits}_t = unsigned {name};",
            f"#define INT{bits}_MAX {largest}",
            f"#define INT{bits}_MIN (-{largest} - 1)",
            f"#define UINT{bits}_MAX {2 * largest + 1}{'u' if bits >= 32 else ''}",
        ]
    return "\n".join([*lines, "using uintptr_t = uint64_t;"])


# NVRTC has no standard headers, and the declarations in kernels.h are for the host.
_HEADERS = {"kernels.h": "", "cmath": "#define INFINITY __int_as_float(0x7f800000)", "cstdint": _integers()}


def compile_kernels(library: Path, source: Path, arch: str, include_folders: Sequence[Path]) -> str:
    """Compiles `source` to `kernels.cubin` beside it, and gives the text of the C++ file that takes it into the module.

    Raises BuildError where it does not compile; what NVRTC said is in `build.log`.
    """
    folders = [f"-I{folder}" for folder in (source.parent, *include_folders)]
    # A quotient is within 2 units in the last place: an exact one takes as long as the rest of most kernels.
    options = [f"-arch={arch}", "-std=c++20", "-default-device", "-prec-div=false", *folders]
    cubin = _compile(ctypes.CDLL(str(library)), source, options)
    source.with_suffix(".cubin").write_bytes(cubin)
    names = re.findall(rb"\0\.text\.(\w+)(?=\0)", cubin)
    return _loader(sorted({name.decode() for name in names}))


def _compile(nvrtc: ctypes.CDLL, source: Path, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    headers, names = _strings(list(_HEADERS.values())), _strings(list(_HEADERS))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), len(_HEADERS), headers, names)
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
        log = _output(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        with open(source.parent / "build.log", "a") as file:
            file.write(f"nvrtc {' '.join(options)} {source.name}\n{log}")
        if status != 0:
            lines = log.splitlines() or [f"nvrtc error {status}"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise BuildError("nvrtc failed: " + re.sub(r"^([^()]+)\((\d+)\): ", r"\1:\2: ", first))  # the place as other compilers say it
        return _output(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _output(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    nvrtc[f"nvrtcGet{what}"](program, buffer)
    return buffer.raw


def _strings(texts: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def _loader(kernels: list[str]) -> str:
    definitions = "\n".join(f'hw::JitKernel {name}{{hw_cubin, "{name}"}};' for name in kernels)
    return f"""// The kernels of kernels.cu, compiled by NVRTC. What program.cpp calls a kernel is one of these.
#include "hostweave/jit.h"

asm(".pushsection .rodata\\n"
    ".balign 64\\n"
    "hw_cubin: .incbin \\"kernels.cubin\\"\\n"
    ".popsection");

extern "C" {{
extern const char hw_cubin[];
{definitions}
}}
"""
