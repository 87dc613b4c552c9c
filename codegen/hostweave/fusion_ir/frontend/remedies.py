"""Remedies for unknown names, and for arithmetic with symbolic sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from hostweave.base.errors import ProgramError, closest_word
from hostweave.types.size import Size, product

# Names in other libraries, with the equivalent in hostweave.
_OTHER_WORDS = {
    "view": "hw.reshape(x, ...)",
    "flatten": "hw.reshape(x, -1)",
    **dict.fromkeys(("permute", "swapaxes"), "hw.permute_dims(x, axes)"),
    "unsqueeze": "hw.expand_dims(x, axis)",
    "expand": "hw.broadcast_to(x, ...)",
    "cat": "hw.concat([...], axis)",
    "clone": "hw.copy(x)",
    **dict.fromkeys(("to", "type", "astype"), "hw.astype(x, dtype)"),
    "float": "hw.astype(x, hw.f32)",
    "half": "hw.astype(x, hw.f16)",
    "bfloat16": "hw.astype(x, hw.bf16)",
    "size": "x.shape",
    "dim": "x.ndim",
    **dict.fromkeys(("mm", "bmm"), "hw.matmul(a, b)"),
    "dot": "hw.matmul(a, b), or hw.sum(a * b) for vectors",
    "true_divide": "hw.divide(a, b)",
    "transpose": "hw.transpose(x, 0, 1), or x.T",
    "mT": "hw.permute_dims(x, axes), or x.T",
    "unbind": "x[i] for each i, or a loop over x",
    "topk": "hw.top_k(x, k)",
    "index_select": "hw.take(x, ids, axis)",
    "index_add": "hw.scatter_add(x, 0, ids[:, None], source)",
    **dict.fromkeys(("zeros_like", "new_zeros", "empty", "empty_like"), "hw.zeros(x.shape, x.dtype)"),
    **dict.fromkeys(("ones_like", "new_ones"), "hw.ones(x.shape, x.dtype)"),
    **dict.fromkeys(("full_like", "new_full"), "hw.full(x.shape, value, x.dtype)"),
    "eye": "hw.arange(n)[:, None] == hw.arange(n)[None, :]",
    "linspace": "hw.arange(n, dtype=hw.f32) * step + first",
    **dict.fromkeys(("item", "numpy"), "the result of the program"),
    "isnan": "x != x",
    "logsumexp": "hw.log(hw.sum(hw.exp(x - m), axis, keepdims=True)) + m, with m = hw.max(x, axis, keepdims=True)",
    "tril": "hw.where(hw.arange(m)[:, None] >= hw.arange(n)[None, :], x, 0)",
    "triu": "hw.where(hw.arange(m)[:, None] <= hw.arange(n)[None, :], x, 0)",
    "flip": "hw.take(x, n - 1 - hw.arange(n), axis)",
    "roll": "hw.concat([x[-k:], x[:-k]], 0)",
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "redistribute"), "hw.reshard(x, ...), which names the new sharding"),
    **dict.fromkeys(("all_reduce", "psum"), "hw.reshard(x, ...), or nothing: a sum over a sharded dim includes all ranks"),
    "with_sharding_constraint": "hw.reshard(x, ...)",
}


def word_for(name: str) -> str | None:
    """Remedy for a name of another library, or None."""
    return f"use {_OTHER_WORDS[name]}" if name in _OTHER_WORDS else None


def instead_of(name: str) -> str:
    import hostweave

    if known := word_for(name):
        return known
    functions = [public for public in dir(hostweave) if inspect.isfunction(getattr(hostweave, public))]
    if name in functions:
        return f"use hw.{name}"
    methods = (public for public in vars(hostweave.Tensor) if not public.startswith("_"))
    return closest_word(name, [*functions, *methods]) or "dir(hw) lists the functions"


def _refused(sign: str, reverse: bool = False) -> Callable[..., NoReturn]:
    return lambda size, other="": size._refuse(sign, other, reverse)


class SizeName(str):
    """Text of a symbolic size. Text can be appended. Sizes are equal if their texts are equal, as in types. All other arithmetic,
    comparisons and conversions raise a ProgramError, with the text of the intended size if known."""

    _extent: Size

    def __new__(cls, size: Size) -> SizeName:
        name = super().__new__(cls, str(size))
        name._extent = size
        return name

    def _refuse(self, sign: str, other: Any, reverse: bool = False) -> NoReturn:
        left, right = (other, self) if reverse else (self, other)
        why = f"{left} {sign} {right}".strip() + f": {self} is the name of a size that is known only at a call"
        raise ProgramError.here(f"{why}; {self._written(sign, other, reverse)}")

    def _written(self, sign: str, other: Any, reverse: bool) -> str:
        """Remedy: the intended size as text, if known."""
        operand = other._extent if isinstance(other, SizeName) else Size(other) if type(other) is int else None
        if operand is not None and sign in _SIZES and not (reverse and sign == "//"):
            left, right = (operand, self._extent) if reverse else (self._extent, operand)
            if (size := _SIZES[sign](left, right)) is not None:
                return f"write {str(size)!r}"
        return f"write sizes as text, such as '2*M' and 'M/2', or make {self} an int in the types of the inputs"

    def __add__(self, other: Any) -> str:
        if isinstance(other, str) and not isinstance(other, SizeName):  # "M" + "@x"
            return str.__add__(self, other)
        self._refuse("+", other)

    __radd__ = _refused("+", True)
    __mul__, __rmul__ = _refused("*"), _refused("*", True)
    __sub__, __rsub__ = _refused("-"), _refused("-", True)
    __floordiv__, __rfloordiv__ = __truediv__, __rtruediv__ = __divmod__, __rdivmod__ = _refused("//"), _refused("//", True)
    __pow__, __rpow__ = _refused("**"), _refused("**", True)
    __neg__, __pos__, __abs__ = (_refused(word, True) for word in ("-", "+", "abs"))
    __mod__ = _refused("%")
    __lt__, __le__, __gt__, __ge__ = map(_refused, ("<", "<=", ">", ">="))
    __and__, __or__ = _refused("&"), _refused("|")
    __int__, __index__, __float__ = (_refused(word, True) for word in ("int", "index", "float"))
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return self._refuse("==", other) if isinstance(other, int) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return self._refuse("!=", other) if isinstance(other, int) else super().__ne__(other)

    def __array_ufunc__(self, ufunc: Any, *_: Any, **__: Any) -> NoReturn:
        self._refuse(ufunc.__name__, "", True)

    def __rmod__(self, other: Any) -> str:
        if isinstance(other, str):  # "%s" % size
            return str.__mod__(other, self)
        self._refuse("%", other, True)


_SIZES: dict[str, Callable[[Size, Size], Size | None]] = {
    "*": lambda a, b: product((a, b)),
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "//": lambda a, b: a // int(b) if b.is_int and int(b) > 0 else a.divided_by(b),
}
