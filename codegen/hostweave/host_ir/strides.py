"""The strides of buffers and of views, in elements, and their types."""

from __future__ import annotations

from functools import lru_cache

from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


@lru_cache(maxsize=4096)
def row_major(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """The strides of a contiguous buffer, in elements."""
    strides: list[Size] = []
    step = Size()
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def strides_of(buffer: BufferType) -> tuple[Size, ...]:
    return row_major(buffer.shape) if buffer.strides is None else buffer.strides


def strided(buffer: BufferType, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> BufferType:
    """A view's type, without strides where it is contiguous. The stride of a dim of size 1 has no effect."""
    contiguous = all(e == Size() or s == c for e, s, c in zip(shape, strides, row_major(shape), strict=True))
    return BufferType(buffer.dtype, shape, None if contiguous else strides)


def _with(values: tuple[Size, ...], dim: int, value: Size) -> tuple[Size, ...]:
    """The same with another one for a dim."""
    return (*values[:dim], value, *values[dim + 1 :])


def _reshaped_strides(shape: tuple[Size, ...], strides: tuple[Size, ...], wanted: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides of the same elements under another shape: each run of dims that is split or merged must be contiguous in itself."""
    result: list[Size] = []
    source = [(e, s) for e, s in zip(shape, strides, strict=True) if e != Size()]
    target = list(wanted)
    i = j = 0
    while j < len(target):
        if target[j] == Size():
            result.append(Size())
            j += 1
            continue
        if i == len(source):
            raise ValueError("a reshape keeps the number of elements")
        have, want = source[i][0], target[j]
        i_end, j_end = i + 1, j + 1
        while have != want:  # grow the smaller side; where names hide which that is, the target first
            quotient = want.divided_by(have)
            grow_source = (quotient is not None and quotient.divisor == 1) or j_end == len(target)
            if grow_source and i_end < len(source) and source[i_end - 1][1] == source[i_end][1] * source[i_end][0]:
                have, i_end = have * source[i_end][0], i_end + 1
            elif not grow_source:
                want, j_end = want * target[j_end], j_end + 1
            else:
                raise ValueError("these dims are not contiguous in memory, or the number of elements differs")
        result += (source[i_end - 1][1] * step for step in row_major(tuple(target[j:j_end])))
        i, j = i_end, j_end
    if i != len(source):
        raise ValueError("a reshape keeps the number of elements")
    return tuple(result)
