"""Finds matmuls with rows that do not begin and end at multiples of 16 bytes. cuBLASLt computes such matmuls much more slowly."""

from collections.abc import Mapping
from dataclasses import dataclass

from hostweave.host_ir import ir, tree
from hostweave.types.machine import Machine
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, is_matrix, strides_of

ALIGNMENT_BYTES = 16  # cuBLASLt is fast, and multiplies 8-bit floats at all, if rows begin and end at multiples
SIDES = {"a": ("m", "k"), "b": ("k", "n"), "dst": ("m", "n")}  # dims of each matrix


@dataclass(frozen=True)
class Unaligned:
    """A matmul of known sizes with unaligned rows."""

    matmul: ir.Matmul
    multiple: int  # a size that is a multiple of this number of elements is aligned in each matrix
    sizes: Mapping[str, int]  # m, n and k
    dims: tuple[str, ...]  # unaligned dims among k, m and n: contiguous in a matrix, and not a multiple of 16 bytes there
    pitched: tuple[str, ...]  # fields of the matrices in which the distance of rows is not a multiple of 16 bytes
    gain: float  # seconds that an aligned matmul saves, minus the seconds of the matmuls for the remainders of unaligned dims


def rows_of(type: BufferType) -> tuple[int, int]:
    """The contiguous dim of a matrix, -1 or -2, and the other dim."""
    return (-1, -2) if strides_of(type)[-1] == Size() else (-2, -1)


def takes_padded_rows(i: tree.Instruction, types: Mapping[str, BufferType]) -> bool:
    """True for a matmul without scales if each of its matrices has contiguous rows or columns according to `types`."""
    return isinstance(i, ir.Matmul) and not i.scales and all(is_matrix(types[getattr(i, field)]) for field in SIDES)


def unaligned(i: tree.Instruction, types: Mapping[str, BufferType], machine: Machine) -> Unaligned | None:
    """Describes a matmul of 16-bit floats or in TF32 that is slow because of unaligned rows. None for all other instructions, for unknown
    sizes or strides, and if an unaligned dim is smaller than `multiple`."""
    if not isinstance(i, ir.Matmul):
        return None
    matrices = {field: types[getattr(i, field)] for field in SIDES}
    a, b, dst = matrices.values()
    known = [size for type in matrices.values() for size in (*type.shape, *strides_of(type))]
    if i.scales or not (a.dtype.itemsize == 2 or i.precision) or not all(size.is_int for size in known):
        return None
    m, n, k = (int(size) for size in (a.shape[-2], b.shape[-1], a.shape[-1]))
    sizes = {"m": m, "n": n, "k": k}
    ragged, pitched = set[str](), list[str]()
    for field, type in matrices.items():
        multiple = ALIGNMENT_BYTES // type.dtype.itemsize
        row, other = rows_of(type)
        if sizes[SIDES[field][row]] % multiple:
            ragged.add(SIDES[field][row])
        if int(strides_of(type)[other]) % multiple and type.shape[other] != Size():
            pitched.append(field)
    multiple = ALIGNMENT_BYTES // min(a.dtype.itemsize, dst.dtype.itemsize)
    if not (ragged or pitched) or any(sizes[dim] < multiple for dim in ragged):
        return None
    batch = int(product(dst.shape[:-2]))
    moved = {"m": k * n, "n": m * k, "k": 2 * m * n}  # dim -> elements of whole matrices that the matmul for the dim's remainder accesses
    rests = sum(machine.launch + machine.wave + batch * moved[dim] * a.dtype.itemsize / machine.memory for dim in ragged)
    gain = 2 * batch * m * n * k / machine.flops * (machine.unaligned - 1) - rests
    return Unaligned(i, multiple, sizes, tuple(dim for dim in "kmn" if dim in ragged), tuple(pitched), gain)
