"""What a plan of attention is made with, and prepared with."""

from collections.abc import Callable

from hostweave.emit.cpp import CUDA_TYPES, CppExprPrinter
from hostweave.host_ir import ir
from hostweave.host_ir.expr import Const
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType

EitherAttention = ir.Attention | ir.AttentionBackward


def made_with(i: EitherAttention, type: BufferType, blind: str, streams: int) -> tuple[str, str]:
    """The type of its elements, the pattern, and on how many streams it runs at once: what holds for every size."""
    pattern = {
        "scale": repr(i.scale) if i.scale != 1 else "",
        "causal": i.diagonal is not None,
        "window": str(i.window) if i.window else "",
        "has_lse": bool(i.lse),
        "has_lengths": bool(i.lengths),
        "from_end": bool(i.corner),
        "has_bias": bool(i.bias),
        "is_packed": bool(i.offsets),
        "blind_zeros": bool(blind),
        "streams": str(streams) if streams > 1 else "",
        "kernels": f"&hw::attention_{i.kernels}" if i.kernels else "",
    }
    words = [f".{name} = {'true' if value is True else value}" for name, value in pattern.items() if value]
    return CUDA_TYPES[type.dtype.name], f"{{{', '.join(words)}}}"


def prepared_with(
    i: EitherAttention,
    operands: tuple[str, ...],
    dbias: tuple[str, ...],
    type_of: Callable[[str], BufferType],
    integers: CppExprPrinter,
) -> tuple[str, ...]:
    """The shapes of its operands, the diagonal, and what lies beside."""

    def view(name: str) -> str:
        return f"hw::Strided{integers.strided(type_of(name)).removeprefix('hw::Strided')}"

    beside = [f".bias = {view(name)}" for name in i.bias]
    beside += [f".sequences = {integers.size(type_of(name).shape[-1] - Size(1))}" for name in i.offsets]
    beside += [f".bias_gradient = {view(name)}" for name in dbias]
    diagonal = [integers.expr(i.diagonal or Const(0))] if beside or i.diagonal not in (None, Const(0)) else []
    shapes = (integers.strided(type_of(name)) for name in operands)
    return (*shapes, *diagonal, *([f"{{{', '.join(beside)}}}"] if beside else []))
