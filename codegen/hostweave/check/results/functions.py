"""NumPy's functions for arrays with samples (see samples.py). Reference implementations of ops and instructions take NumPy as an argument.
With `ON_SAMPLES` instead of NumPy, the implementations compute all samples at once."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partialmethod, reduce
from typing import Any

import numpy as np

from hostweave.check.results.field import P
from hostweave.check.results.samples import (
    Component,
    Exact,
    NeedsSingleSample,
    Real,
    Samples,
    ScalarLike,
    aligned,
    as_reals,
    has_samples,
    inner_axes,
    inner_axis,
    is_float,
    key_of,
    rounded_if_near,
    values_of,
    widest_real,
)

_ANY_DOMAIN = ("sin", "cos", "tan", "sinh", "cosh", "tanh", "arctan", "arcsinh", "expm1", "exp2", "arctan2", "hypot", "copysign")
# NumPy function that a random function of the field replaces -> map of any shadow into the domain of the NumPy function
_RANDOM_FUNCTIONS: dict[str, Callable[[Component], Component]] = {
    **dict.fromkeys(_ANY_DOMAIN, lambda x: x),
    **dict.fromkeys(("log1p", "log2", "log10"), np.abs),
    **dict.fromkeys(("arcsin", "arccos", "arctanh"), lambda x: x / (1 + np.abs(x))),
    "arccosh": lambda x: 1 + np.abs(x),
}


class Functions:
    """NumPy for operands that may have samples. Only functions of this class and of `_RANDOM_FUNCTIONS` support samples."""

    def __init__(self, real: type[Real] = Real):
        self.real = real
        self.add, self.bitwise_and, self.bitwise_or, self.bitwise_xor = map(_Ufunc, ("add", "bitwise_and", "bitwise_or", "bitwise_xor"))

    @staticmethod
    def errstate(**_: str) -> nullcontext[None]:
        """Does nothing, because a check ignores floating-point errors."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name in _RANDOM_FUNCTIONS:
            return lambda *xs: self._random_function(name, *aligned(as_reals(*xs)))
        function = getattr(np, name)
        if not callable(function) or isinstance(function, type):
            return function

        def plain(*args: Any, **kw: Any) -> Any:
            if has_samples((*args, *kw.values())):
                raise NotImplementedError(f"the check of results has no np.{name}: add it to functions.py")
            return function(*args, **kw)

        return plain

    @staticmethod
    def divide(x: Any, y: Any) -> Any:
        x, y = as_reals(x, y)
        result = x.multiply(y.inverse())
        return type(result)(x.value / y.value, *result.components[1:])

    @staticmethod
    def negative(x: Any) -> Any:
        return x.negative() if isinstance(x, Real) else Exact(-x.value)

    def power(self, x: Any, y: Any) -> Any:
        """The exact power of ints. For floats, a product if the exponent is a constant integer from 0 to 64, otherwise a random
        function."""
        if not (is_float(x) or is_float(y)):
            return Exact(np.power(*values_of(x, y)))
        exponent = y if isinstance(y, int | float) else y.item() if isinstance(y, np.ndarray | np.generic) and y.size == 1 else None
        if exponent is not None and exponent == int(exponent) and 0 <= exponent <= 64:
            return reduce(lambda total, _: self.multiply(total, x), range(int(exponent)), self.multiply(x, 0.0) + 1.0)
        x, y = as_reals(x, y)
        return x.random_function("pow", np.power(np.abs(x.value), y.value), y)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        return self.minimum(self.maximum(x, low), high)

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        if is_float(x) or is_float(y):
            c, x, y = aligned([Exact.of(condition), *as_reals(x, y)])
            return type(x)(*(np.where(c.value, a, b) for a, b in zip(x.components, y.components, strict=True)))
        return Exact(np.where(*values_of(condition, x, y)))

    @staticmethod
    def _random_function(name: str, x: Any, *others: Any) -> Any:
        """Random function in place of a function that the field lacks. Shadows use NumPy's function, after a map into its domain."""
        with np.errstate(all="ignore"):
            in_domain = _RANDOM_FUNCTIONS[name](x.value)
            return x.random_function(name, getattr(np, name)(in_domain, *(other.value for other in others)), *others)

    def sqrt(self, x: Any) -> Any:
        if isinstance(x, ScalarLike):
            return np.sqrt(x)
        return x.random_function("sqrt", np.sqrt(np.abs(x.value)))

    @staticmethod
    def vectorize(function: Callable[[float], float], otypes: Any = None) -> Callable[[Any], Any]:
        def computed(x: Any) -> Any:
            shadows = np.fromiter(map(function, x.value.ravel().tolist()), np.float64, x.value.size)  # np.vectorize takes twice as long.
            return x.random_function(function.__name__, shadows.reshape(x.value.shape))

        return computed

    def abs(self, x: Any) -> Any:
        return self.where(x > 0, x, -x)

    absolute = abs

    def sign(self, x: Any) -> Any:
        return self.integer(np.sign, x) if isinstance(x, Real) else Exact(np.sign(x.value))

    @staticmethod
    def integer(function: Callable[[Component], Component], x: Real, of: Component | None = None) -> Samples:
        return type(x).of(Exact(function(rounded_if_near(x.value if of is None else of))))

    @staticmethod
    def sum(x: Any, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Any:
        axes = inner_axes(axis, x.ndim)
        return (
            x.sum(axes, keepdims) if isinstance(x, Real) else Exact(np.asarray(np.sum(x.value, axis=axes, keepdims=keepdims, dtype=dtype)))
        )

    def mean(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return self.sum(x, axis, keepdims) / float(math.prod(x.components[0].shape[each] for each in inner_axes(axis, x.ndim)))

    def prod(self, x: Any, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Any:
        if not isinstance(x, Real):
            return Exact(np.asarray(np.prod(x.value, axis=inner_axes(axis, x.ndim), keepdims=keepdims, dtype=dtype)))
        rows, shape = _as_rows(x, axis, keepdims)
        product = reduce(lambda total, i: self.multiply(total, rows[..., i]), range(rows.shape[-1]), self.ones(rows.shape[:-1]))
        return product.reshape(shape)

    def _extreme(self, function: Any, arg_function: Any, x: Any, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Any:
        if not isinstance(x, Real):
            given = {} if initial is None else {"initial": initial}
            return Exact(np.asarray(function(x.value, axis=inner_axes(axis, x.ndim), keepdims=keepdims, **given)))
        rows, shape = _as_rows(x, axis, keepdims)
        if not rows.shape[-1]:
            return self.full(shape, initial, np.float64)
        at = arg_function(rows.value, axis=-1)[..., None]
        return rows.map(lambda array: np.take_along_axis(array, at, -1)).reshape(shape)

    max, min = partialmethod(_extreme, np.max, np.argmax), partialmethod(_extreme, np.min, np.argmin)

    @staticmethod
    def argmax(x: Any, axis: int, keepdims: bool = False) -> Any:
        return Exact(np.argmax(x.value, axis=inner_axis(axis, x.ndim), keepdims=keepdims))

    @staticmethod
    def argsort(x: Any, axis: int = -1, stable: bool = True) -> Any:
        values = x.value if isinstance(x, Samples) else np.asarray(x)[None]
        return Exact(np.argsort(values, axis=inner_axis(axis, values.ndim - 1), stable=stable))

    @staticmethod
    def cumsum(x: Any, axis: int, dtype: Any = None) -> Any:
        along = inner_axis(axis, x.ndim)
        return x.apply_linear(lambda array: np.cumsum(array, along)) if isinstance(x, Real) else Exact(np.cumsum(x.value, along, dtype))

    @staticmethod
    def ndim(x: Any) -> int:
        return x.ndim if isinstance(x, Samples) else np.ndim(x)

    @staticmethod
    def asarray(x: Any, dtype: Any = None) -> Any:
        if isinstance(x, Samples):
            return x if dtype is None else x.astype(dtype)
        return np.asarray(x, dtype)

    @staticmethod
    def broadcast_to(x: Any, shape: tuple[int, ...]) -> Any:
        if not isinstance(x, Samples):
            return np.broadcast_to(x, shape)
        missing = (1,) * (len(shape) - x.ndim)
        return x.map(lambda array: np.broadcast_to(array.reshape(len(array), *missing, *array.shape[1:]), (len(array), *shape)))

    @staticmethod
    def take_along_axis(x: Any, indices: Any, axis: int) -> Any:
        at, along = Exact.of(indices).value, inner_axis(axis, x.ndim)
        samples = max(len(at), x.samples)
        at = np.broadcast_to(at, (samples, *at.shape[1:]))
        return x.map(lambda array: np.take_along_axis(np.broadcast_to(array, (samples, *array.shape[1:])), at, along))

    def concatenate(self, xs: Sequence[Any], axis: int = 0) -> Any:
        return _joined(xs, lambda components, ndim: np.concatenate(components, inner_axis(axis, ndim)))

    def stack(self, xs: Sequence[Any]) -> Any:
        return _joined(xs, lambda components, ndim: np.stack(components, 1))

    def split(self, x: Any, count: int, axis: int = 0) -> list[Any]:
        pieces = [np.split(array, count, inner_axis(axis, x.ndim)) for array in x.components]
        return [type(x)(*components) for components in zip(*pieces, strict=True)]

    @staticmethod
    def pad(x: Any, widths: Sequence[tuple[int, int]], constant_values: Any = 0) -> Any:
        values = x.of(constant_values).components
        pairs = zip(x.components, values, strict=True)
        return type(x)(*(np.pad(array, [(0, 0), *widths], constant_values=value[0]) for array, value in pairs))

    def full(self, shape: Any, value: Any, dtype: Any = None) -> Any:
        number = np.full((), value, dtype)
        kind = self.real if number.dtype.kind == "f" else Exact
        return kind.of(number).map(lambda array: np.full((1, *np.atleast_1d(shape)), array))

    def zeros(self, shape: Any, dtype: Any = float) -> Any:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Any, dtype: Any = float) -> Any:
        return self.full(shape, 1, dtype)

    def zeros_like(self, x: Any) -> Any:
        return self.full(x.shape, 0, x.dtype)

    @staticmethod
    def nonzero(x: Any) -> Any:
        return np.nonzero(x.single_sample() if isinstance(x, Samples) else x)


def _joined(xs: Sequence[Any], function: Callable[[list[Component], int], Component]) -> Samples:
    kind: type[Samples] = widest_real(xs) if any(map(is_float, xs)) else Exact
    arrays = [kind.of(x) for x in xs]
    samples = max(x.samples for x in arrays)
    columns = zip(*(x.components for x in arrays), strict=True)
    return type(arrays[0])(
        *(function([np.broadcast_to(array, (samples, *array.shape[1:])) for array in components], arrays[0].ndim) for components in columns)
    )


def _as_rows(x: Real, axis: Any, keepdims: bool) -> tuple[Real, tuple[int, ...]]:
    """The array with the reduced dims merged into its last dim, and the shape of the result."""
    axes = inner_axes(axis, x.ndim)
    whole = x.components[0].shape
    kept = [i for i in range(1, len(whole)) if i not in axes]
    count = math.prod(whole[i] for i in axes)
    rows = x.map(lambda array: np.transpose(array, (0, *kept, *axes)).reshape(len(array), *(whole[i] for i in kept), count))
    shape = tuple(1 if i in axes else whole[i] for i in range(1, len(whole)) if keepdims or i not in axes)
    return rows, shape  # type: ignore[return-value]


class _Ufunc:
    """A ufunc of NumPy, with its methods `at`, which adds at indices, and `reduce`."""

    def __init__(self, name: str):
        self.function, self.computed = getattr(np, name), _binary(name)

    def __call__(self, x: Any, y: Any) -> Any:
        return self.computed(x, y)

    @staticmethod
    def at(x: Samples, where: tuple[Any, ...], y: Any) -> None:
        key = key_of(where)
        addend = x.of(y)
        if addend.samples > x.samples:  # An update in place cannot add samples to x.
            raise NeedsSingleSample
        for array, new in zip(x.components, addend.components, strict=True):
            np.add.at(array, key, new)
            if isinstance(x, Real) and array is not x.value:
                array %= P

    def reduce(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return Exact(np.asarray(self.function.reduce(x.value, axis=inner_axes(axis, x.ndim), keepdims=keepdims)))


# --- families of functions --------------------------------------------------------------------------------------------


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    """Compares shadows. Finite numbers with equal elements count as equal, because the shadows of equal elements may differ by rounding."""
    function, is_strict = getattr(np, name), name in ("less", "greater", "not_equal")

    def compared(x: Any, y: Any) -> Any:
        if not (is_float(x) or is_float(y)):
            return Exact(function(*values_of(x, y)))
        x, y = as_reals(x, y)
        same = x.equals(y) & np.isfinite(x.value) & np.isfinite(y.value)
        return Exact(function(x.value, y.value) & ~same if is_strict else function(x.value, y.value) | same)

    return compared


# NumPy function -> its computation for floats of one class
_OF_REALS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x.add(y),
    "subtract": lambda x, y: x.add(y.negative()),
    "multiply": lambda x, y: x.multiply(y),
    "matmul": lambda x, y: x.matmul(y),
    "floor_divide": lambda x, y: Functions.integer(np.floor, x, x.value / y.value),
    "remainder": lambda x, y: x - x // y * y,
    "fmod": lambda x, y: x - Functions.integer(np.trunc, x, x.value / y.value) * y,
    "maximum": lambda x, y: Functions.where(Exact((x.value > y.value) | np.isnan(x.value)), x, y),
    "minimum": lambda x, y: Functions.where(Exact((x.value < y.value) | np.isnan(x.value)), x, y),
}


def _binary(name: str) -> Callable[[Any, Any], Any]:
    of_reals = _OF_REALS.get(name)

    def computed(x: Any, y: Any) -> Any:
        return of_reals(*as_reals(x, y)) if of_reals and (is_float(x) or is_float(y)) else Exact(getattr(np, name)(*values_of(x, y)))

    return computed


def _add(make: Callable[[str], Callable[..., Any]], names: str) -> None:
    for name in names.split():
        setattr(Functions, name, staticmethod(make(name)))


_add(_comparison, "less greater not_equal less_equal greater_equal equal")
_add(_binary, "subtract multiply matmul floor_divide remainder fmod maximum minimum gcd logical_and logical_or logical_xor")
_add(_binary, "bitwise_left_shift bitwise_right_shift left_shift right_shift")
_add(lambda name: lambda x: Exact(getattr(np, name)(x.value)), "isneginf isnan isfinite logical_not invert")
_add(lambda name: lambda x: Functions.integer(getattr(np, name), x), "floor ceil trunc round")
_add(lambda name: lambda x: getattr(as_reals(x)[0], name)(), "exp log")
_MOVES: dict[str, Callable[..., Any]] = {
    "copy": lambda x: x.copy(),
    "reshape": lambda x, shape: x.reshape(shape),
    "transpose": lambda x, axes: x.map(lambda array: np.transpose(array, (0, *(axis + 1 for axis in axes)))),
    "expand_dims": lambda x, axis: x.map(lambda array: np.expand_dims(array, tuple(each + 1 for each in axis))),
    "swapaxes": lambda x, one, other: x.map(lambda array: np.swapaxes(array, inner_axis(one, x.ndim), inner_axis(other, x.ndim))),
    "repeat": lambda x, count, axis: x.map(lambda array: np.repeat(array, count, inner_axis(axis, x.ndim))),
    "flip": lambda x, axis: x.map(lambda array: np.flip(array, inner_axis(axis, x.ndim))),
    "take": lambda x, indices, axis: x.map(lambda array: np.take(array, indices, inner_axis(axis, x.ndim))),
}
_add(_MOVES.__getitem__, " ".join(_MOVES))

ON_SAMPLES = Samples.functions = Functions()
