"""User kernels in CUDA C++, and their text in both IRs.

    user_kernel @scale = scale(in bf16[M@x, N], 2.0, size M@x, out bf16[M@x, N]) grid(M@x) block(256) {
      "__global__ void scale(const hw::bf16* x, float factor, int64_t rows, hw::bf16* y) {"
      ...
      "}"
    }

`} cpu {`, a function for the CPU target and `}` may replace the last line.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hostweave.base.errors import Location, ProgramError
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size, product
from hostweave.types.tensor import Dim, TensorType, f32
from hostweave.types.text import Reader

INDENT = "  "


@dataclass(frozen=True)
class KernelArgument:
    """Argument of a kernel: an input tensor (in), an output tensor (out), a local size, or a number."""

    role: str  # in, out, size or number
    type: TensorType | None = None
    dim: Dim | None = None
    number: int | float = 0

    def __str__(self) -> str:
        if self.role == "number":
            return repr(self.number)
        return f"{self.role} {self.type if self.type else self.dim}"


@dataclass(frozen=True)
class UserKernel:
    """A kernel that the user wrote. The number of thread blocks is the product of the local sizes of `grid`, divided by `per`, and rounded
    up."""

    name: str
    function: str  # name of the C++ function
    arguments: tuple[KernelArgument, ...]
    grid: tuple[Dim, ...]
    per: int
    block: int  # threads per block
    lines: tuple[str, ...]
    cpu: tuple[str, ...] = ()  # function for the CPU target, if different from `lines`
    location: Location | None = field(default=None, compare=False)  # location of the first line
    cpu_location: Location | None = field(default=None, compare=False)

    @property
    def inputs(self) -> tuple[TensorType, ...]:
        return tuple(a.type for a in self.arguments if a.role == "in" and a.type)

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        return tuple(a.type for a in self.arguments if a.role == "out" and a.type)

    @property
    def signature(self) -> str | None:
        """C++ signature: `__global__ void scale(const float* x, float* y)`. None if the source has no function of this name."""
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", "\n".join(self.lines), flags=re.S)
        text = re.sub(r"__launch_bounds__\s*\([^)]*\)", " ", text)
        found = re.search(rf'((?:extern\s+"C"\s+)?)__global__\s+void\s+{self.function}\s*\(([^)]*)\)', text)
        return " ".join(f"{found[1]}__global__ void {self.function}({found[2].strip()})".split()) if found else None


_OF_MANY_THREADS = re.compile(r"\b(threadIdx|blockIdx|blockDim|gridDim|warpSize|__shared__|__sync\w+|__shfl\w+|atomic[A-Z]\w*|asm)\b")


def expect_one_thread(kernel: UserKernel) -> None:
    """Raises ProgramError if the kernel uses threads of a GPU, and has no function for the CPU target."""
    if kernel.cpu:
        return
    for number, line in enumerate(kernel.lines):
        if found := _OF_MANY_THREADS.search(line.partition("//")[0]):
            location = Location(kernel.location.file, kernel.location.line + number) if kernel.location else None
            why = f"{kernel.function} uses {found[1]}, but on the CPU target one thread runs a kernel"
            raise ProgramError(f"kernel: {why}; pass cpu= with a function for that target, or iterate by hw::over_grid", location)


def local_size(dim: Dim, mesh: Mesh, uneven: Sequence[str]) -> Size:
    return TensorType(f32, (dim,)).local_shape(mesh, uneven)[0]


def elements(kernel: UserKernel, mesh: Mesh, uneven: Sequence[str]) -> Size:
    """Product of the local sizes of `grid`."""
    return product(tuple(local_size(dim, mesh, uneven) for dim in kernel.grid))


def print_user_kernel(kernel: UserKernel) -> list[str]:
    per = f" by {kernel.per}" if kernel.per != 1 else ""
    head = f"user_kernel @{kernel.name} = {kernel.function}({', '.join(map(str, kernel.arguments))})"
    lines = [f"{head} grid({', '.join(map(str, kernel.grid))}{per}) block({kernel.block}) {{", *_quoted(kernel.lines), "}"]
    if kernel.cpu:
        lines[-1:] = ["} cpu {", *_quoted(kernel.cpu), "}"]
    return lines


def _quoted(lines: Sequence[str]) -> list[str]:
    return [INDENT + json.dumps(line, ensure_ascii=False) for line in lines]


def parse_user_kernel(reader: Reader) -> UserKernel:
    name = reader.global_name("a kernel")
    reader.expect("=")
    function = reader.word("the name of a C++ function")
    arguments = reader.enclosed(lambda: _parse_argument(reader))
    reader.expect("grid")
    grid, per = reader.within(lambda: (reader.separated(reader.dim), reader.integer() if reader.accept("by") else 1))
    reader.expect("block")
    block = reader.within(reader.integer)
    lines = _parse_lines(reader)
    cpu = _parse_lines(reader) if reader.accept("cpu") else ()
    return UserKernel(name, function, arguments, grid, per, block, lines, cpu)


def _parse_argument(reader: Reader) -> KernelArgument:
    if reader.peek() in ("in", "out"):
        return KernelArgument(reader.take(), type=reader.tensor_type())
    if reader.accept("size"):
        return KernelArgument("size", dim=reader.dim())
    return KernelArgument("number", number=reader.number("in, out, size or a number"))


def _parse_lines(reader: Reader) -> tuple[str, ...]:
    reader.expect("{")
    lines = []
    while not reader.accept("}"):
        if not reader.peek().startswith('"'):
            reader.fail(f"expected a line of C++ between quotation marks, found {reader.found()}")
        lines.append(json.loads(reader.take()))
    return tuple(lines)
