"""User kernels: CUDA C++ as an op of a fusion, `hw.kernel`."""

import math
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostweave.base.errors import Location, ProgramError, is_of_package
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend.recording import record, stated
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.user_kernel import KernelArgument, UserKernel
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Dim, TensorType

MAX_BLOCK = 1024  # largest number of threads in a block

# C++ element types that a kernel may use for each dtype, besides `DType.cpp`.
ALIASES = {
    "f16": ("__half", "half"),
    "bf16": ("__nv_bfloat16", "nv_bfloat16"),
    "f8e4m3": ("__nv_fp8_e4m3",),
    "f8e5m2": ("__nv_fp8_e5m2",),
    "i64": ("long", "std::int64_t"),
    "i32": ("int", "std::int32_t"),
    "i16": ("short", "std::int16_t"),
    "i8": ("signed char", "std::int8_t"),
    "u64": ("unsigned long", "std::uint64_t"),
    "u32": ("unsigned", "unsigned int", "std::uint32_t"),
    "u16": ("unsigned short", "std::uint16_t"),
    "u8": ("unsigned char", "std::uint8_t"),
}


@checked
def kernel(
    source: str | Path,
    name: str,
    grid: int | str | Sequence[int | str],
    args: Sequence[Tensor | TensorType | str | int | float],
    *,
    block: int = 256,
    per: int = 1,
    cpu: str | Path | None = None,
) -> Any:
    """Launches `name`, a `__global__ void` function in the CUDA C++ `source` (text, or the path of a file), and returns the outputs.

    `args` are the arguments of the function, in order:

    - a tensor becomes a pointer to the rank's block;
    - a spec such as `hw.bf16["M@x", "N"]` becomes a pointer to an output of that type;
    - a dim such as "M@x" or "N" becomes its local size, an int64_t;
    - a Python number is passed unchanged.

    Tensors keep a sharding that an input's type or a `reshard` states. Other tensors are gathered first.

    `grid` is a dim or several dims. The product of their local sizes is the number of elements. A thread block has `block` threads and
    handles `per` elements, so there are `ceil(elements / per)` thread blocks.

    On the CPU target, one thread runs the kernel. `cpu` is the text or path of C++ for this target, with a function of the same name and
    parameters. Without `cpu`, `source` is compiled for both targets. The source may then use functions of hostweave/kernel.h, such as
    hw::over_grid, but nothing that refers to threads of a GPU, such as threadIdx, __shared__ or atomicAdd.

    Returns a tensor, or a tuple for several outputs.

    Raises ProgramError if the source cannot be read or has no function `name`, or if an argument is invalid.

    Example:

        ```python
        y = hw.kernel(source="scale.cu", name="scale", grid="M@x", args=[x, 2.0, "M@x", "N", hw.f32["M@x", "N"]])
        ```
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors:
        raise ProgramError.here(f"kernel: {name} takes no tensor of this fusion; pass one in args")
    mesh = tensors[0].type.mesh_in(tensors[0]._trace.mesh)
    arguments = tuple(_argument(arg, mesh) for arg in args)
    dims = tuple(stated(Dim.of, dim, "kernel") for dim in ((grid,) if isinstance(grid, int | str) else grid))
    lines, location = _text(source)
    cpu_lines, cpu_location = ((), None) if cpu is None else _text(cpu)
    made = UserKernel(name, name, arguments, dims, per, block, lines, cpu_lines, location, cpu_location)
    _check(made)
    result = record("kernel", *tensors, target=made.outputs[0], user_kernel=tensors[0]._trace.source(made))
    rest = (record("output", result, target=type, index=i) for i, type in enumerate(made.outputs[1:], 1))
    return (result, *rest) if len(made.outputs) > 1 else result


def _argument(arg: object, mesh: Mesh) -> KernelArgument:
    if isinstance(arg, Tensor):
        return KernelArgument("in", type=arg.type)
    if isinstance(arg, TensorType):
        if arg.mesh not in (None, mesh):
            raise ProgramError.here(f"kernel: {arg}: outputs are on the mesh of its tensors, {mesh}; remove .on, and reshard the output")
        return KernelArgument("out", type=replace(arg, mesh=None))
    if isinstance(arg, str):
        return KernelArgument("size", dim=stated(Dim.of, arg, "kernel"))
    if isinstance(arg, int | float) and not isinstance(arg, bool) and math.isfinite(arg):
        return KernelArgument("number", number=arg)
    raise ProgramError.here(f"kernel: {arg!r} is not an argument; pass a tensor, a spec such as hw.f32['M'], a dim such as 'M' or a number")


def _text(source: str | Path) -> tuple[tuple[str, ...], Location]:
    """Lines of a source, and the location of the first line. Text that is not found in the caller's file has the location of the call."""
    if isinstance(source, Path) or re.fullmatch(r"[^\n;{}]+\.(cu|cuh|cpp|cc|h|hpp)", source):
        path = Path(source)
        try:
            return tuple(path.read_text().splitlines()), Location(path.name, 1)
        except OSError as error:
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            raise ProgramError.here(f"kernel: {path}: {error.strerror}{where}; give the path of a file of CUDA C++") from None
        except UnicodeDecodeError:
            raise ProgramError.here(f"kernel: {path}: is not UTF-8; give the path of a file of CUDA C++") from None
    frame = sys._getframe(1)
    while frame.f_back is not None and is_of_package(frame):
        frame = frame.f_back
    path, found = Path(frame.f_code.co_filename), ""
    with suppress(OSError, UnicodeDecodeError):
        before, found, _ = path.read_text().partition(source) if source.strip() else ("", "", "")
    return tuple(source.splitlines()), Location(path.name, before.count("\n") + 1) if found else Location.of_caller()


def _check(source: UserKernel) -> None:
    name = source.function
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ProgramError.here(f"kernel: name={name!r} is not the name of a C++ function; set name= to the function to launch")
    if not source.outputs:
        raise ProgramError.here(f"kernel: {name} writes nothing; put the spec of an output, such as hw.f32['M'], in args")
    if not 1 <= source.block <= MAX_BLOCK or source.per < 1 or not source.grid:
        limits = f"block={source.block} must be 1 to {MAX_BLOCK} threads, per={source.per} at least 1"
        raise ProgramError.here(f"kernel: {limits}, and grid at least one dim")
    declared = source.signature
    if declared is None:
        raise ProgramError.here(f"kernel: the source has no `__global__ void {name}(...)`; set name= to the function to launch")
    if source.cpu and not re.search(rf"\bvoid\s+{name}\s*\(", "\n".join(source.cpu)):
        raise ProgramError.here(f"kernel: the source for the CPU has no `void {name}(...)`; define it with the same parameters")
    parameters = [p.strip() for p in declared[declared.index("(") + 1 : -1].split(",") if p.strip()]
    if len(parameters) != len(source.arguments):
        raise ProgramError.here(f"kernel: {name} takes {len(parameters)} parameters, but {len(source.arguments)} args are given")
    for parameter, argument in zip(parameters, source.arguments, strict=True):
        _check_parameter(name, parameter, argument)
    known = {dim for a in source.arguments if a.type for dim in a.type.dims}
    for dim in (*source.grid, *(a.dim for a in source.arguments if a.dim)):
        if not dim.size.is_int and dim not in known:
            wanted = ", ".join(dict.fromkeys(str(d) for d in known if not d.size.is_int)) or "none"
            raise ProgramError.here(f"kernel: {dim} is not a dim of the tensors of {name}; theirs are {wanted}")


def _check_parameter(name: str, parameter: str, argument: KernelArgument) -> None:
    pointee, star, _ = parameter.partition("*")
    if argument.type is None:
        if star:
            raise ProgramError.here(f"kernel: `{parameter}` of {name} is a pointer, and its arg is {argument}; pass a tensor or a spec")
        return
    element = " ".join(word for word in pointee.split() if word not in ("const", "volatile"))
    is_const = "const" in pointee.split()
    wanted = f"{'const ' if argument.role == 'in' else ''}{argument.type.dtype.cpp}*"
    if not star or element not in (argument.type.dtype.cpp, *ALIASES.get(argument.type.dtype.name, ())):
        raise ProgramError.here(f"kernel: `{parameter}` of {name} takes {argument.type}; write {wanted}")
    if is_const != (argument.role == "in"):
        what = "is read" if argument.role == "in" else "is written"
        raise ProgramError.here(f"kernel: `{parameter}` of {name} takes {argument.type}, which {what}; write {wanted}")
