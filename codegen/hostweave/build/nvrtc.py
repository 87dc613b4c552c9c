"""Compiles kernels with NVRTC, which needs a tenth of nvcc's time and comes with the pip wheels.

Each unit, usually one kernel, becomes a cubin in the module of a program, or in a runtime library. There, the name of a kernel denotes a
`hw::JitKernel` (hostweave/jit.h).
"""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hostweave.base.errors import BuildError
from hostweave.emit.cpp import quoted

# -prec-div=false: divisions have errors of up to 2 ulp, because exact division is slower.
# -diag-suppress=186: no warning if an op such as relu compares an unsigned number with zero.
OPTIONS = ("-std=c++20", "-default-device", "-prec-div=false", "-diag-suppress=186")
_INTEGERS = {8: "char", 16: "short", 32: "int", 64: "long"}  # the same types as in the host compiler


def _integers() -> str:
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


# Texts of headers. NVRTC has no standard headers. The text of kernels.h is empty, because the real file includes headers for the host.
_HEADERS = {
    "kernels.h": "",
    "cmath": "#define INFINITY __int_as_float(0x7f800000)\n#define NAN __int_as_float(0x7fffffff)",
    "cstdint": _integers(),
}
_FLOATS_OF_8_BITS = "hostweave/f8.h"  # parsing this header takes as long as parsing all other headers
_INSTANCES = "// Each paragraph below is compiled separately.\n\n"
_USERS, _USERS_INCLUDE = "user_kernels", '#include "user_kernels.cuh"\n'


@dataclass(frozen=True)
class Unit:
    """Compilation unit: one kernel of kernels.cu, all user kernels, one paragraph of a runtime file, or a whole file."""

    name: str
    line: int  # line of the file at which the text begins
    before: str  # text that precedes `text`
    text: str

    @property
    def source(self) -> str:
        return f'{self.before}#line {self.line} "kernels.cu"\n{self.text}'


def units_of(kernels: str) -> list[Unit]:
    """Splits the text of kernels.cu into one unit per kernel, and one unit of all user kernels, if any. Each kernel begins with comments
    that list its ops. A text of another form is one unit."""
    body, closing, _ = kernels.rpartition("\n}  // namespace")
    head, *texts = re.split(r"\n\n(?=// %)", body.rstrip())
    names = [_kernel_in(text) for text in texts]
    if not closing or "__global__" in head or not all(names):
        return [Unit("kernels", 1, "", kernels)]
    lines = [kernels[: kernels.index(text)].count("\n") + 1 for text in texts]
    head = head.replace('#include "kernels.h"\n', "") + "\n"  # kernels.h declares all kernels, so each change would recompile all
    before = head.replace(_USERS_INCLUDE, "")
    units = [Unit(name, line, before, f"{text}\n}}\n") for name, line, text in zip(names, lines, texts, strict=True)]
    return [*([Unit(_USERS, 1, "", f"{head}}}\n")] if before != head else []), *units]


def units_of_runtime(name: str, text: str) -> list[Unit]:
    """Splits a runtime file into units. Each unit contains the text before the line `_INSTANCES`, one paragraph after this line, and the
    last paragraph. A file without the line is one unit."""
    before, line, paragraphs = text.partition(_INSTANCES)
    if not line:
        return [Unit(name, 1, "", text)]
    *instances, end = paragraphs.rstrip().split("\n\n")
    return [Unit(f"{name}_{n}", text[: text.index(own)].count("\n") + 1, before, f"{own}\n{end}\n") for n, own in enumerate(instances)]


def _kernel_in(text: str) -> str:
    """Name of the only kernel of a text, or ""."""
    before, _, kernel = text.partition("__global__ void")
    name = re.match(r"\s+(?:__launch_bounds__\(.*?\)\s+)?(\w+)\(", kernel)
    is_all = kernel.endswith("\n}") and kernel.count("\n}") == 1 and "\n}" not in before
    return name[1] if name and is_all else ""


@dataclass(frozen=True)
class Nvrtc:
    library: Path
    arch: str  # "sm_90a"
    include_folders: tuple[Path, ...]

    def compile(self, unit: Unit, folder: Path) -> bytes:
        """Compiles a unit to a cubin. Finds headers of the unit in `folder` first. Messages go to `build.log` in `folder`."""
        folders = [f"-I{path}" for path in (folder, *self.include_folders)]
        options = [f"-arch={self.arch}", *OPTIONS, *folders]
        headers = _HEADERS if unit.name == _USERS or "f8" in unit.text else {**_HEADERS, _FLOATS_OF_8_BITS: ""}
        for builtins in self.library.parent.glob("libnvrtc-builtins.so.*"):  # the NVRTC of the wheel does not find this library
            ctypes.CDLL(str(builtins))
        nvrtc, program = ctypes.CDLL(str(self.library)), ctypes.c_void_p()
        arguments = (len(headers), _strings(list(headers.values())), _strings(list(headers)))
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), unit.source.encode(), b"kernels.cu", *arguments)
        try:
            status = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
            log = _output(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            with open(folder / "build.log", "a") as file:
                file.write(f"nvrtc {' '.join(options)} {unit.name}\n{log}")
            if status != 0:
                lines = log.splitlines() or [f"nvrtc error {status}"]
                first = next((line for line in lines if "error" in line), lines[0])
                first = re.sub(r"^([^()]+)\((\d+)\): ", r"\1:\2: ", first)  # file:line, as from other compilers
                raise BuildError(f"nvrtc failed: {first}")
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


def loader(cubins: Mapping[str, Path]) -> str:
    """C++ that embeds cubins, and defines a `hw::JitKernel` for each kernel of the cubins. Sections .nv.constant0 have the kernel names."""
    data, kernels = [], []
    for unit, path in cubins.items():
        symbol = f"hw_cubin_{unit}"
        names = sorted({name.decode() for name in re.findall(rb"\0\.nv\.constant0\.(\w+)(?=\0)", path.read_bytes())})
        data += [".balign 64", f"{symbol}: .incbin {quoted(str(path))}"]
        kernels += [f"extern const char {symbol}[];", *(f'hw::JitKernel {name}{{{symbol}, "{name}"}};' for name in names)]
    section = "\n    ".join(quoted(f"{line}\n") for line in (".pushsection .rodata", *data, ".popsection"))
    definitions = "\n".join(kernels)
    return f"""// Kernels compiled by NVRTC. In program.cpp the name of a kernel denotes its hw::JitKernel.
#include "hostweave/jit.h"

asm({section});

extern "C" {{
{definitions}
}}
"""
