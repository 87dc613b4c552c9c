"""Ops of Hostweave in traced graphs. Many replace ATen ops in training: ATen's derivatives select kernels for one device, and flatten
leading dims, which then cannot be sharded. Most ops have no kernels: AOTAutograd traces them, and Hostweave compiles them."""

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

from hostweave.base.errors import ProgramError
from hostweave.torch.state import is_same

Gradients = tuple[torch.Tensor | None, ...]
LIBRARY: Any = torch.library.Library("hostweave", "FRAGMENT")  # type: ignore[no-untyped-call]
ops = torch.ops.hostweave


def define(schema: str, function: Callable[..., Any], key: str = "Meta") -> str:
    """Defines an op with one implementation, for fake tensors or for the dispatch key `key`. Returns the op's full name."""
    name = f"hostweave::{schema.partition('(')[0]}"
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, key)
    return name


def _no_second(*_: Any) -> Gradients:
    raise NotImplementedError("derivatives of gradients are not compiled")


def _op(
    schema: str,
    shapes: Callable[..., Any],
    backward: Callable[..., Gradients] = _no_second,
    saved: Callable[..., tuple[Any, ...]] = lambda *_: (),
) -> None:
    """Defines an op by its results for fake tensors, its gradients, and the values that the gradients read. Ops without `backward` are
    parts of derivatives."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep(ctx, saved(inputs, output))

    def gradients(ctx: Any, *given: torch.Tensor) -> Gradients:
        return backward(ctx.needs_input_grad, given[0], *kept(ctx))

    torch.library.register_autograd(define(schema, shapes), gradients, setup_context=setup, lib=LIBRARY)


def keep(ctx: Any, values: Sequence[Any]) -> None:
    """Saves values for a derivative. `kept` returns the saved values."""
    ctx.save_for_backward(*(value for value in values if isinstance(value, torch.Tensor)))
    ctx.others = [None if isinstance(value, torch.Tensor) else (value,) for value in values]


def kept(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if other is None else other[0] for other in ctx.others]


def _inputs(inputs: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
    return inputs


# --- products ---------------------------------------------------------------------------------------------------------


def _linear_shape(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_backward(needed: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, *scaling: str) -> Gradients:
    of_rows = ops.scaled_product_of_rows if scaling else ops.matmul_of_rows
    return (
        (ops.scaled_product(dy, weight.t(), *scaling) if scaling else matmul(dy, weight)) if needed[0] else None,
        of_rows(dy, x, *scaling) if needed[1] else None,
        dy.sum(tuple(range(dy.ndim - 1))) if needed[2] else None,
        *(None for _ in scaling),
    )


def _matmul_backward(needed: Any, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: bool) -> Gradients:
    if b.ndim == 2:
        of_b = ops.matmul_of_rows(a, dy) if needed[1] else None
    else:
        of_b = ops.matmul(a, dy, True, False).sum_to_size(b.shape) if needed[1] else None
    return ops.matmul(dy, b, False, True).sum_to_size(a.shape) if needed[0] else None, of_b, None, None


def _matmul_shape(a: torch.Tensor, b: torch.Tensor, turned_a: bool, turned_b: bool) -> torch.Tensor:
    rows, columns = a.shape[-1 if turned_a else -2], b.shape[-2 if turned_b else -1]
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    return a.new_empty((*leading, rows, columns))


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = ops.matmul(a, b, False, False)
    return made


_op("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear_shape, _linear_backward, _inputs)
_op("matmul(Tensor a, Tensor b, bool turned_a, bool turned_b) -> Tensor", _matmul_shape, _matmul_backward, _inputs)
_op("matmul_of_rows(Tensor a, Tensor b) -> Tensor", lambda a, b: a.new_empty((a.shape[-1], b.shape[-1])))
_op("scaled_linear(Tensor x, Tensor weight, Tensor? bias, str scaling) -> Tensor", _linear_shape, _linear_backward, _inputs)


def _frozen(*_: Any) -> Gradients:
    raise ProgramError("a linear whose weights are 8-bit floats is frozen; train with weights of 16 bits and fp8=")


_op("quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? bound, str scaling) -> Tensor", _linear_shape, _frozen)
_op("scaled_product(Tensor dy, Tensor weight, str scaling) -> Tensor", _linear_shape)
_op("scaled_product_of_rows(Tensor dy, Tensor x, str scaling) -> Tensor", lambda dy, x, _: x.new_empty((dy.shape[-1], x.shape[-1])))


def _attention_backward(needed: Any, dy: torch.Tensor, q: Any, k: Any, v: Any, *rest: Any) -> Gradients:
    bias, causal, scale, gqa, y, lse = rest
    found = [*ops.attention_backward(dy, q, k, v, y, lse, bias, causal, scale, gqa), None][:4]
    return (*(gradient if wanted else None for gradient, wanted in zip(found, needed, strict=False)), None, None, None)


_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float? scale, bool gqa) -> (Tensor, Tensor)",
    lambda q, k, v, *_: (q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)),
    _attention_backward,
    lambda inputs, output: (*inputs, *output),
)
_op(
    "attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor? bias, bool causal, float? scale, "
    "bool gqa) -> Tensor[]",
    lambda dy, q, k, v, y, lse, bias, *_: [x.new_empty(x.shape) for x in (q, k, v, bias) if x is not None],
)


def composed_attention(q: Any, k: Any, v: Any, mask: Any, p: float, causal: bool, scale: float | None, gqa: bool, seed: Any) -> Any:
    """Attention that stores the scores. Supports dropout and any mask."""
    if gqa and q.shape[-3] != k.shape[-3]:
        k, v = (x.unsqueeze(-3).expand(*x.shape[:-2], q.shape[-3] // x.shape[-3], *x.shape[-2:]).flatten(-4, -3) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = matmul(q, k.transpose(-2, -1)).to(wide) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    softmax = torch.softmax if mask is None else torch._safe_softmax  # rows that see no key get weights of 0
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = softmax(scores, -1).to(q.dtype)
    return matmul(ops.dropout(weights, seed, p) if p else weights, v)


_op(
    "rotary(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    lambda needed, dy, cos, sin, back: (ops.rotary(dy, cos, sin, not back), None, None, None),
    lambda i, _: i[1:],
)
_op(
    "dropout(Tensor x, Tensor seed, float p) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    lambda needed, dy, seed, p: (ops.dropout(dy, seed, p), None, None),
    lambda i, _: i[1:],
)
define(
    "random(Tensor seed, Tensor? like, SymInt[] size, ScalarType dtype, str kind, int low, int high) -> Tensor",
    lambda seed, like, size, dtype, *_: seed.new_empty(size if like is None else like.shape, dtype=dtype),
)
_op(
    "reshard(Tensor x, str layout) -> Tensor",
    lambda x, _: x.new_empty(x.shape),
    lambda needed, dy, layout: (ops.reshard(dy, layout), None),
    lambda i, _: i[1:],
)
define("complex(Tensor re, Tensor im) -> Tensor", torch.complex, "CompositeExplicitAutograd")
define("detach(Tensor x) -> Tensor", torch.clone, "CompositeExplicitAutograd")  # for constants


# --- functions with custom derivatives --------------------------------------------------------------------------------


@dataclass
class _Called:
    """A torch.autograd.Function with the arguments of a call, except tensors."""

    function: Any
    leaves: list[Any]
    spec: Any
    is_single: bool = True

    def equals(self, other: "_Called") -> bool:
        return self.function is other.function and self.spec == other.spec and is_same(self.leaves, other.leaves)

    def apply(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Calls torch's `apply`, which records the derivative."""
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if leaf is None else leaf[0] for leaf in self.leaves], self.spec)
        made = super(_SingleLevelFunction, self.function).apply(*args, **kwargs)  # type: ignore[misc]
        self.is_single = isinstance(made, torch.Tensor)
        return [made] if self.is_single else list(made)


def call_recorded(given: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    return _CALLED[number].apply(given)


# The exported graph keeps its functions alive.
_CALLED: MutableMapping[int, _Called] = WeakValueDictionary()
_numbers = count()
define("function(Tensor[] given, int number) -> Tensor[]", call_recorded, "CompositeExplicitAutograd")


def call_function(known: dict[int, _Called], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records a torch.autograd.Function as one op, and adds it to the functions `known` of the graph. Equal calls have equal numbers, so
    that equal layers have equal graphs."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    called = _Called(function, [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves], spec)
    number = next((at for at, other in known.items() if called.equals(other)), None)
    if number is None:
        number = next(_numbers)
        known[number] = _CALLED[number] = called
    made = ops.function([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], number)
    return made[0] if known[number].is_single else tuple(made)


class Silu(torch.autograd.Function):
    """torch's silu, but the derivative uses the number 1 in place of ATen's tensor of ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.nn.functional.silu(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        made: torch.Tensor = dy * (s * (1 + x * (1 - s)))
        return made
