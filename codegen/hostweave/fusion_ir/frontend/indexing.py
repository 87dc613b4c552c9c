"""Lowers Python's basic indexing, such as `x[2:5, ..., None, -1]`, to ops."""

from __future__ import annotations

from fractions import Fraction
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.frontend.recording import record
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType

if TYPE_CHECKING:
    from hostweave.fusion_ir.frontend.trace import Tensor

IndexKey = int | slice | EllipsisType | None

LARGE_SIZE = 720720 << 20  # value of symbols in comparisons of bounds; divisible by all numbers up to 16


def indexed(x: Tensor, key: IndexKey | tuple[IndexKey, ...]) -> Tensor:
    """Part of x that the keys select. A key is a slice with a positive step, an int (drops a dim), `None` (adds a dim) or `...`. The end of
    a slice may be a size as text: `x[:"M/2"]`.

    A slice must be within its dim, and must not be empty. If the size of the dim is symbolic, tracing checks both rules for large sizes
    only. Each call of the program then checks that the slice fits, and that the step divides the length if the length is symbolic. For
    `x[1::2]`, the step must divide the size of the dim instead. In a call, a slice may be empty.
    """
    keys = _spread(x.type, key if isinstance(key, tuple) else (key,))
    cuts = [k for k in keys if k is not None]
    for axis in range(len(cuts) - 1, -1, -1):
        cut = cuts[axis]
        x = _selected(x, axis, cut) if isinstance(cut, int) else _sliced(x, axis, cut)
    new = tuple(i for i, k in enumerate(k for k in keys if not isinstance(k, int)) if k is None)
    return record("expand_dims", x, axis=new) if new else x


def _spread(type: TensorType, keys: tuple[Any, ...]) -> list[slice | int | None]:
    """Expands `...` and missing keys to `:`."""
    for key in keys:
        if isinstance(key, bool) or not (key is None or isinstance(key, int | slice | EllipsisType)):
            raise ProgramError.here(f"indexing: {key!r} is neither an int, a slice, None nor '...'; {_instead_of(key)}")
    given = sum(isinstance(key, int | slice) for key in keys)
    if given > len(type.dims):
        raise ProgramError.here(f"indexing: {given} keys for the {len(type.dims)} dims of {type}; leave some out")
    if sum(key is ... for key in keys) > 1:
        raise ProgramError.here("indexing: '...' is given twice; write ':' for each dim instead")
    spread: list[slice | int | None] = []
    for key in keys if any(key is ... for key in keys) else (*keys, ...):
        spread.extend([slice(None)] * (len(type.dims) - given) if isinstance(key, EllipsisType) else [key])
    return spread


def _instead_of(key: Any) -> str:
    """Remedy for a key that is neither an int, a slice, None nor `...`."""
    kind = getattr(getattr(key, "dtype", None), "kind", "")
    if kind == "bool":
        return "choose by values with hw.where(condition, x, 0)"
    if kind and hasattr(key, "type"):
        return "to select rows by a tensor of indices, use hw.take(x, ids, 0)"
    return "use hw.stack([x[i], ...]) for known indices"


def _selected(x: Tensor, axis: int, index: int) -> Tensor:
    size = x.type.shape[axis]
    if size.is_int:
        if not -int(size) <= index < int(size):
            raise ProgramError.here(f"indexing: {index} is outside dim {axis} of {x.type}; indices go from {-int(size)} to {int(size) - 1}")
        index %= int(size)
    return record("select", x, axis=axis, index=index)


def _sliced(x: Tensor, axis: int, key: slice) -> Tensor:
    def fail(message: str) -> ProgramError:
        bounds = (key.start, key.stop) if key.step is None else (key.start, key.stop, key.step)
        text = ":".join("" if bound is None else str(bound) for bound in bounds)
        return ProgramError.here(f"indexing: [{text}] of dim {axis} of {x.type} {message}")

    whole, step, end = x.type.shape[axis], 1 if key.step is None else key.step, key.stop
    if isinstance(end, str):
        try:
            end = Size.of(str(end))
        except ValueError as error:
            raise fail(f"has no valid bound: {error}") from None
    for bound in (key.start, None if isinstance(end, Size) else end, step):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise fail("has a bound or step that is not an int; write an int, or split the dim with hw.reshape")
    if step < 1:
        raise fail(f"has {'a negative step' if step else 'step 0'}; use a step of at least 1")
    start, stop = (
        default if bound is None else bound if isinstance(bound, Size) else whole + bound if bound < 0 else Size(bound)
        for bound, default in ((key.start, Size(0)), (end, whole))
    )
    least, most, size = map(_if_large, (start, stop, whole))
    if not 0 <= least <= size or not 0 <= most <= size:
        raise fail(f"is out of range; bounds go from -{whole} to {whole}")
    if least >= most:
        raise fail(f"is empty{'' if (stop - start).is_int else f' for a large {whole}'}; take at least one element")
    taken = _length(start, stop, whole, step)
    if taken == whole and step == 1:
        return x
    first = int(start) if start.is_int else key.start
    dims = tuple(dim if i != axis else type(dim)(taken) for i, dim in enumerate(x.type.dims))
    return record("slice", x, target=TensorType(x.dtype, dims), axis=axis, start=first, step=step)


def _if_large(size: Size) -> Fraction:
    """Value of a size if all its symbols are LARGE_SIZE. May be a fraction, because only calls check divisibility."""
    return size.estimate(lambda atom: LARGE_SIZE if isinstance(atom, str) else atom.bind(dict.fromkeys(atom.size.symbols, LARGE_SIZE)))


def _length(start: Size, stop: Size, whole: Size, step: int) -> Size:
    """Number of indices from `start` to before `stop`, by `step`."""
    length = stop - start
    if length.is_int:
        return Size(-(-int(length) // step))
    return (whole if stop == whole and start.is_int and int(start) < step else length) // step
