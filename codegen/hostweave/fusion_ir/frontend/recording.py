"""Records ops in the trace of their operands."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeVar

from hostweave.base.errors import Location, ProgramError
from hostweave.base.signatures import shown, with_ints
from hostweave.fusion_ir.frontend.remedies import SizeName
from hostweave.fusion_ir.ir import AttributeValue, Fusion, Op, Scalar, Value, attributes
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.types.tensor import TensorType

if TYPE_CHECKING:
    from hostweave.fusion_ir.frontend.trace import Tensor, _Trace

Axis = int | str
Given = TypeVar("Given")
Made = TypeVar("Made")

being_traced: ContextVar[_Trace | None] = ContextVar("being_traced", default=None)


class Unary(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


class BinaryOp(Protocol):
    def __call__(self, a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor: ...


class ReductionOp(Protocol):
    def __call__(self, x: Tensor, axis: Axis | tuple[Axis, ...] | None = None, keepdims: bool = False) -> Tensor: ...


def record(
    kind: str,
    *operands: Tensor | Scalar,
    target: TensorType | None = None,
    beside: Tensor | None = None,
    callee: Fusion | None = None,
    user_kernel: UserKernel | None = None,
    written: str = "",
    **values: AttributeValue,
) -> Tensor:
    """Records an op and returns its result. `target` states the type of the result, or some of the type's properties.

    An op without operands is recorded in the trace of `beside`, or of the function that is being traced. `written` is the name of an op
    without operands in error messages, by default `kind`.

    Raises ProgramError if the op is not valid.
    """
    location, operands = Location.of_caller(), with_ints(operands)
    for operand in operands:
        if not isinstance(operand, int | float) and not hasattr(operand, "_trace"):
            why = "neither a tensor of this fusion nor a Python number; make it an input"
            if isinstance(operand, SizeName):
                why = "a size that is known only at a call, not a number; use hw.mean for a mean, or make the number an input"
            raise ProgramError(f"{kind}: {shown(operand)} is {why}", location)
    known = [operand for operand in (*operands, beside) if operand is not None and not isinstance(operand, int | float)]
    if not known and not operands and target is not None:
        if (trace := being_traced.get()) is None:
            raise ProgramError(f"{written or kind}: no function is being traced; call it in the function of an hw.fusion", location)
        if unknown := [name for size in target.shape for name in size.symbols if name not in trace.symbols]:
            why = f"no input has a dim {unknown[0]}, so its size is unknown; add it to an input, or write an int"
            raise ProgramError(f"{written or kind}: {why}", location)
        return trace.record(Op(kind, (), Value("", target), attributes(**values), location), operands, (), target)
    if not known:
        raise ProgramError(f"{kind}: no operand is a tensor; compute with Python numbers instead", location)
    op = Op(kind, (), Value("", known[0].type), attributes(**values), location, callee=callee, user_kernel=user_kernel)
    return known[0]._trace.record(op, operands, known, target)


def stated(make: Callable[[Given], Made], given: Given, kind: str) -> Made:
    """Calls `make`, and turns its ValueError into a ProgramError at the user's line."""
    try:
        return make(given)
    except ValueError as error:
        raise ProgramError.here(f"{kind}: {error}") from None


def dim_of(tensor: Tensor, axis: Axis, kind: str) -> int:
    return stated(tensor.type.dim, axis, kind)


def dims_of(x: Tensor, axis: Axis | tuple[Axis, ...] | None, kind: str) -> tuple[int, ...]:
    """Sorted indices of the dims that `axis` names, by default all dims."""
    if not hasattr(x, "_trace"):
        raise ProgramError.here(f"{kind}: {x!r} is not a tensor of this fusion; make it an input")
    given = range(x.ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    return tuple(sorted(dim_of(x, a, kind) for a in given))
