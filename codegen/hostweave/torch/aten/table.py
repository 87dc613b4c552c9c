"""Table of torch ops as functions on tensors of a fusion, with one entry per overload. Most of the ops are ATen ops.

An entry takes a `Result`, then the arguments of the op, such as tensors of the fusion, numbers, lists and None. An entry casts operands if
torch computes in another dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.frontend.recording import record
from hostweave.torch.plan import AxesOfDims
from hostweave.types.tensor import DTYPES as BY_NAME
from hostweave.types.tensor import Dim, DType, TensorType

T = TypeVar("T")
Number = int | float | bool
GivenSizes = tuple[int | str, ...]

DTYPES: dict[torch.dtype, DType] = {getattr(torch, dtype.long_name): dtype for dtype in BY_NAME.values()}
TORCH_DTYPES = {dtype: of for of, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Result:
    """Dtypes and shapes of an op's results."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[GivenSizes, ...]
    trace: hw.Tensor  # any tensor; ops without operands are recorded in the trace of this tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    @property
    def shape(self) -> GivenSizes:
        return self.shapes[0]


TABLE: dict[str, Callable[..., Any]] = {}


def aten(*names: str) -> Callable[[T], T]:
    def enter(entry: Any) -> Any:
        TABLE.update(dict.fromkeys(names, entry))
        return entry

    return enter


# Keyword arguments that `computed` does not pass to an entry.
_OF_RESULT = ("layout", "device", "pin_memory", "memory_format", "dtype")


def computed(
    op: str, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], shape_of: Callable[[torch.Tensor], GivenSizes], trace: hw.Tensor
) -> Any:
    """Computes a node by the entry for `op`. `shape_of` returns the shape of a result."""
    made = [value for value in pytree.tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor)]
    result = Result(tuple(value.dtype for value in made), tuple(map(shape_of, made)), trace)
    kwargs = {key: value for key, value in kwargs.items() if key not in _OF_RESULT}
    if op.partition(".")[0] not in _ALONG_DIM or not args or not isinstance(args[0], hw.Tensor) or args[0].ndim:
        return TABLE[op](result, *args, **kwargs)
    wide = Result(result.dtypes, tuple(shape or (1,) for shape in result.shapes), trace)
    args, kwargs = pytree.tree_map_only(hw.Tensor, lambda x: x if x.ndim else hw.reshape(x, 1), (tuple(args), kwargs))
    return pytree.tree_map_only(hw.Tensor, hw.reshape, TABLE[op](wide, *args, **kwargs))


# Ops along a dim that torch also applies to tensors without dims.
_WORDS = """
sum mean prod amax amin max min argmax argmin any all var var_mean std std_mean linalg_vector_norm softmax _softmax _safe_softmax
log_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod cummax cummin logcumsumexp sort argsort topk
kthvalue median mode flip transpose squeeze index_select index_add index_copy index_fill index_reduce gather scatter scatter_add
scatter_reduce
"""
_ALONG_DIM = set(_WORDS.split())


def refuse(why: str) -> ProgramError:
    return ProgramError.here(why)


def dtype_of(dtype: torch.dtype) -> DType:
    if dtype not in DTYPES:
        raise refuse(f"{dtype} is not supported; cast to one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}")
    return DTYPES[dtype]


def cast(x: T, dtype: torch.dtype) -> T:
    if isinstance(x, Number):
        return number_of(dtype_of(dtype), x)  # type: ignore[return-value]
    if not isinstance(x, hw.Tensor) or x.dtype == dtype_of(dtype):
        return x
    return hw.astype(x, dtype_of(dtype))  # type: ignore[return-value]


def wide(x: T, result: Result) -> T:
    """Casts x to at least f32, as torch does in norms and derivatives."""
    return cast(x, torch.promote_types(result.dtype, torch.float32))


def common_dtype(a: Any, b: Any) -> torch.dtype:
    """Dtype in which torch combines two operands."""
    operands = (torch.empty((1,) * x.ndim, dtype=TORCH_DTYPES[x.dtype]) if isinstance(x, hw.Tensor) else x for x in (a, b))
    return torch.result_type(*operands)


def resharded(x: hw.Tensor, axes: AxesOfDims) -> hw.Tensor:
    """Reshards each dim of x by the mesh axes in `axes`. Empty `axes` replicate x."""
    axes = axes or ((),) * x.ndim
    return hw.reshard(x, *(f"{size}@{','.join(of)}" if of else size for size, of in zip(x.shape, axes, strict=True)))


def number_of(dtype: DType, value: Number) -> Number:
    return float(value) if dtype.kind == "float" else bool(value) if dtype.kind == "bool" else int(value)


def full(result: Result, value: Number | hw.Tensor) -> hw.Tensor:
    dtype, shape = dtype_of(result.dtype), result.shape
    if isinstance(value, hw.Tensor):
        return hw.broadcast_to(cast(value, result.dtype), *shape) if shape else cast(value, result.dtype)
    number = number_of(dtype, value)
    if result.trace.type.mesh is None:
        return hw.full(shape, number, dtype)
    return record("fill", target=TensorType(dtype, tuple(map(Dim.of, shape))), beside=result.trace, written="full", value=number)
