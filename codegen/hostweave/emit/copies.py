"""Copies and fills that do not stem from an op of the fusion: row by row, or by a kernel for other strides."""

from __future__ import annotations

from dataclasses import dataclass

from hostweave.emit.kernel_loops import ONE, Dim, merged
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir
from hostweave.host_ir.strides import strides_of
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


@dataclass(frozen=True)
class Rows:
    """A copy of rows of contiguous elements, whose beginnings lie `pitch` elements apart."""

    rows: Size
    elements: Size
    src_pitch: Size
    dst_pitch: Size


def copied(src: BufferType, dst: BufferType) -> Rows | None:
    """How a copy goes row by row, or None where its elements are scattered more than that."""
    strides = zip(strides_of(src), strides_of(dst), strict=True)
    dims = merged([Dim(size, pair) for size, pair in zip(src.shape, strides, strict=True)])
    if not dims or dims[-1].strides != (ONE, ONE):
        dims.append(Dim(ONE, (ONE, ONE)))
    if len(dims) == 1:
        dims.insert(0, Dim(ONE, (dims[0].size, dims[0].size)))
    return Rows(dims[0].size, dims[1].size, *dims[0].strides) if len(dims) == 2 else None


def copy_kernel(name: str, buffer: BufferType) -> ir.Kernel:
    """A kernel that copies between strided views of this shape."""
    type = unsharded(buffer)
    return ir.Kernel(name, (ir.Parameter("src", type),), (Op("copy", ("src",), Value("dst", type)),))


def fill_kernel(name: str, buffer: BufferType, value: float) -> ir.Kernel:
    """A kernel that sets every element of a view."""
    return ir.Kernel(name, (), (Op("fill", (), Value("dst", unsharded(buffer)), (("value", value),)),))
