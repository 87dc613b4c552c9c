"""Converts complex numbers to pairs of real numbers, and Fourier transforms to matmuls."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from hostweave.base.errors import ProgramError
from hostweave.torch.graph import recorded, refused
from hostweave.torch.nodes import location, op_of
from hostweave.torch.ops import ops

aten = torch.ops.aten


class Pair(NamedTuple):
    re: Any
    im: Any


def of_pairs(program: ExportedProgram, decompositions: dict[Any, Callable[..., Any]]) -> ExportedProgram:
    """Replaces complex ops of a program by real ops. An op `hostweave.complex` computes each complex result of the program.

    y: c64[4] = mul(a: c64[4], b: c64[4]) becomes re: f32[4] = sub(mul(a_re, b_re), mul(a_im, b_im)), im: f32[4] = add(...)
    """
    nodes = list(program.graph.nodes)
    if not any(map(_makes_complex, nodes)):
        return program
    placeholders = [node for node in nodes if node.op == "placeholder"]
    given = [node.meta["val"] for node in placeholders]
    with preserve_node_meta(), detect_fake_mode(given) or nullcontext():  # new constants need the fake mode
        made = recorded(_Pairs(program.graph_module).run, given, decompositions)
    made.graph.eliminate_dead_code()
    for old, new in zip(placeholders, made.graph.find_nodes(op="placeholder"), strict=True):
        new.name = new.target = old.name
    for node in made.graph.nodes:
        if node.op == "get_attr":
            program.graph_module.register_buffer(node.target, getattr(made, node.target))
    program.graph_module.graph = made.graph
    return program


def _makes_complex(node: Node) -> bool:
    return any(isinstance(one, torch.Tensor) and one.is_complex() for one in pytree.tree_leaves(node.meta.get("val")))


class _Pairs(Interpreter):
    """Runs a graph in which a `Pair` replaces each complex tensor."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().placeholder(target, args, kwargs)
        return _pair(value) if isinstance(value, torch.Tensor) and value.is_complex() else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = aten.reshape.default if target is aten.view.default else target  # view() may not fit the strides of the parts
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_pair)
        node = self._node
        if not any(map(_is_pair, leaves)) and not _makes_complex(node):
            return super().call_function(target, args, kwargs)
        word = op_of(node).partition(".")[0]
        if word in _TABLE:
            return _TABLE[word](*args, **kwargs)
        if word in _BY_COMPONENT and any(map(_is_pair, leaves)):
            return _by_component(target, args, kwargs)
        why = f"aten.{op_of(node)} of complex numbers is not supported: compute with real and imaginary parts"
        raise refused(ProgramError(why, location(node)), [node])

    def run_node(self, n: Node) -> Any:
        self._node = n
        return super().run_node(n)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return [ops.complex(*value) if _is_pair(value) else value for value in args[0]]


def _pair(x: torch.Tensor) -> Pair:
    components = aten.view_as_real(x)
    return Pair(components.select(-1, 0), components.select(-1, 1))


def _is_pair(value: Any) -> bool:
    return isinstance(value, Pair)


def _as_pair(value: Any) -> Pair:
    if isinstance(value, Pair):
        return value
    if isinstance(value, complex):
        return Pair(value.real, value.imag)
    return Pair(value, torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0)


# Ops that apply to both parts separately.
_WORDS = """
view reshape _unsafe_view permute transpose t expand slice select unsqueeze squeeze cat stack clone alias detach contiguous index
index_select gather roll flip split split_with_sizes unbind sum mean cumsum as_strided lift_fresh_copy repeat flatten unflatten diagonal
unfold tril triu expand_copy permute_copy view_copy copy neg _neg_view index_put slice_scatter select_scatter chunk
"""
_BY_COMPONENT = set(_WORDS.split())


def _by_component(target: Any, args: Any, kwargs: Any) -> Any:
    tensors = pytree.tree_map_only(torch.Tensor, _as_pair, args[0], is_leaf=_is_pair)  # a list may have real and complex tensors
    kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}

    def of_component(number: int) -> Any:
        return target(*pytree.tree_map(lambda one: one[number] if _is_pair(one) else one, (tensors, *args[1:]), is_leaf=_is_pair), **kwargs)

    re, im = of_component(0), of_component(1)
    return [Pair(*both) for both in zip(re, im, strict=True)] if isinstance(re, list | tuple) else Pair(re, im)


def _add(a: Any, b: Any, alpha: Any = 1) -> Pair:
    a, b = _as_pair(a), _mul(_as_pair(b), alpha)
    return Pair(a.re + b.re, a.im + b.im)


def _where(condition: Any, a: Any, b: Any) -> Pair:
    return Pair(*(torch.where(condition, *pairs) for pairs in zip(_as_pair(a), _as_pair(b), strict=True)))


def _padded(x: Pair, pad: Sequence[int], value: Any = 0) -> Pair:
    return Pair(*(aten.constant_pad_nd(each, pad, own) for each, own in zip(x, _as_pair(value), strict=True)))


def _mul(a: Any, b: Any) -> Pair:
    a, b = (_as_pair(one) if isinstance(one, complex) else one for one in (a, b))
    if not _is_pair(a) or not _is_pair(b):
        pair, other = (a, b) if _is_pair(a) else (b, a)
        return Pair(pair.re * other, pair.im * other)
    return Pair(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


def _reciprocal(x: Pair) -> Pair:
    """1 / x. First divides x by the larger magnitude of the two parts of x, so that squares do not overflow."""
    scale = torch.maximum(x.re.abs(), x.im.abs())
    re, im = x.re / scale, x.im / scale
    norm = (re * re + im * im) * scale
    return Pair(re / norm, -im / norm)


def _div(a: Any, b: Any) -> Any:
    if isinstance(b, complex):
        return _mul(a, 1 / b)
    return _mul(a, _reciprocal(b)) if _is_pair(b) else Pair(a.re / b, a.im / b)


def _abs(x: Pair) -> Any:
    return torch.hypot(x.re, x.im)


def _exp(x: Pair) -> Pair:
    size = torch.exp(x.re)
    return Pair(size * torch.cos(x.im), size * torch.sin(x.im))


def _log(x: Pair) -> Pair:
    return Pair(torch.log(_abs(x)), torch.atan2(x.im, x.re))


def _pow(x: Any, exponent: Any) -> Any:
    if isinstance(exponent, int | float) and exponent == 2:
        return _mul(x, x)
    if isinstance(exponent, int | float) and exponent == -1:
        return _reciprocal(x)
    return _exp(_mul(_log(_as_pair(x)), exponent))


def _sgn(x: Pair) -> Pair:
    size = _abs(x)
    return _mul(x, torch.where(size == 0, 0.0, 1 / size))


def _product(target: Callable[..., Any], a: Any, b: Any) -> Any:
    a, b = _as_pair(a), _as_pair(b)
    return Pair(target(a.re, b.re) - target(a.im, b.im), target(a.re, b.im) + target(a.im, b.re))


def _cast(x: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Any:
    if dtype is None:
        return x
    if not dtype.is_complex:
        return (x.re if _is_pair(x) else x).to(dtype)
    x, real = _as_pair(x if _is_pair(x) else x.to(dtype.to_real())), dtype.to_real()
    return Pair(x.re.to(real), x.im.to(real))


def _full(shape: Any, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Pair:
    real = (dtype or torch.complex64).to_real()
    return Pair(*(torch.full(shape, each, dtype=real, device=device) for each in _as_pair(value)))


def _equal(a: Any, b: Any) -> Any:
    a, b = _as_pair(a), _as_pair(b)
    return (a.re == b.re) & (a.im == b.im)


# --- Fourier transforms -----------------------------------------------------------------------------------------------


def _waves(rows: int, columns: int, size: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [rows, columns] of the angles 2 pi row column / size."""
    positions = torch.arange(rows, device=like.device)[:, None] * torch.arange(columns, device=like.device) % size
    angles = positions.to(torch.float64) * (2 * math.pi / size)
    return torch.cos(angles).to(like.dtype), torch.sin(angles).to(like.dtype)


def _scale(sizes: Sequence[int], normalization: int) -> float:
    return 1.0 if normalization == 0 else math.prod(sizes) ** (-0.5 if normalization == 1 else -1)


def _along(x: Any, dim: int, matrix: torch.Tensor) -> Any:
    """Multiplies the elements along a dim by a matrix [size, new size]."""
    return torch.matmul(x.movedim(dim, -1), matrix).movedim(-1, dim)


def _transformed(x: Pair, dim: int, sign: int) -> Pair:
    """Fourier transform: element k is the sum over j of x[j] exp(sign 2 pi i j k / size)."""
    size = x.re.shape[dim]
    cos, sin = _waves(size, size, size, x.re)
    re, im = (Pair(_along(each, dim, cos), _along(each, dim, sin)) for each in x)
    return Pair(re.re - sign * im.im, im.re + sign * re.im)


def _c2c(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Pair:
    x, scale = _as_pair(x), _scale([_as_pair(x).re.shape[dim] for dim in dims], normalization)
    for dim in dims:
        x = _transformed(x, dim, -1 if forward else 1)
    return _mul(x, scale) if scale != 1 else x


def _r2c(x: Any, dims: Sequence[int], normalization: int, onesided: bool) -> Pair:
    *others, last = dims
    size, scale = x.shape[last], _scale([x.shape[dim] for dim in dims], normalization)
    cos, sin = _waves(size, size // 2 + 1 if onesided else size, size, x)
    return _c2c(Pair(_along(x, last, cos * scale), -_along(x, last, sin * scale)), others, 0, True)


def _c2r(x: Any, dims: Sequence[int], normalization: int, size: int) -> Any:
    """Inverse transform with a real result. x has the first size // 2 + 1 terms; the missing terms are conjugates of these terms."""
    x, (*others, last) = _as_pair(x), dims
    scale = _scale([*(x.re.shape[dim] for dim in others), size], normalization)
    terms = size // 2 + 1
    x = Pair(*(each.narrow(last, 0, terms) for each in _c2c(x, others, 0, False)))
    cos, sin = _waves(terms, size, size, x.re)
    number = torch.arange(terms, device=x.re.device)
    weight = torch.where((number == 0) | (number * 2 == size), scale, 2 * scale).to(x.re.dtype)[:, None]
    return _along(x.re, last, cos * weight) - _along(x.im, last, sin * weight)


_TABLE: dict[str, Callable[..., Any]] = {
    "complex": Pair,
    "polar": lambda size, angle: Pair(size * torch.cos(angle), size * torch.sin(angle)),
    "view_as_complex": lambda x: Pair(x.select(-1, 0), x.select(-1, 1)),
    "view_as_real": lambda x: torch.stack((x.re, x.im), -1),
    "real": lambda x: x.re,
    "imag": lambda x: x.im,
    **dict.fromkeys(("_conj", "_conj_physical", "conj_physical"), lambda x: Pair(x.re, -x.im)),
    **dict.fromkeys(("resolve_conj", "resolve_neg"), lambda x: x),
    "_assert_tensor_metadata": lambda *_, **__: None,
    "mul": _mul,
    "div": _div,
    "reciprocal": _reciprocal,
    "abs": _abs,
    "angle": lambda x: torch.atan2(x.im, x.re),
    "exp": _exp,
    "log": _log,
    "pow": _pow,
    "sgn": _sgn,
    "eq": _equal,
    "ne": lambda a, b: ~_equal(a, b),
    "isnan": lambda x: torch.isnan(x.re) | torch.isnan(x.im),
    **{name: partial(_product, getattr(torch, name)) for name in ("mm", "bmm", "matmul", "mv", "dot")},
    **dict.fromkeys(("_to_copy", "to"), _cast),
    "full": _full,
    "zeros": lambda shape, **named: _full(shape, 0, **named),
    "ones": lambda shape, **named: _full(shape, 1, **named),
    "scalar_tensor": lambda value, **named: _full((), value, **named),
    "constant_pad_nd": _padded,
    "add": _add,
    "sub": lambda a, b, alpha=1: _add(a, b, -alpha),
    "rsub": lambda a, b, alpha=1: _add(b, a, -alpha),
    "where": _where,
    "_fft_c2c": _c2c,
    "_fft_r2c": _r2c,
    "_fft_c2r": _c2r,
}
