"""Arrays in several lanes, one for each rank and seed, and the functions of NumPy over them.

The functions of ops and instructions take NumPy as an argument. Over `LANES` they compute all lanes at once: the lane is the first dim of
every part, which shapes and axes do not show. A function that decides by a value, such as `int(x)`, raises Apart: `apply` then calls it
for one lane after the other.

Integers and bools are what they are. A float is a `Real`: a shadow in f64, which decides comparisons, maxima, orders, casts to integers
and infinities; and an element of a finite field, random and independent of the shadow, in which sums and products are exact. Functions
that the field does not have, such as sqrt, are random functions of the element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from hostweave.check.results import field
from hostweave.check.results.field import P

Part = NDArray[Any]
Number = int | float | bool | np.generic

NEAR = 1e-9  # an integer: shadows differ by rounding


class Apart(Exception):
    """A function decides by a value, so that lanes have to be computed one after the other."""


class Lanes:
    """An array in each lane. A constant has one lane, which stands for all."""

    __slots__ = ("parts",)
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *parts: Part):
        self.parts = parts

    @property
    def lanes(self) -> int:
        return len(self.parts[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape[1:]

    @property
    def ndim(self) -> int:
        return self.parts[0].ndim - 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    @property
    def value(self) -> Part:
        """The part that decides comparisons: the shadow of a float."""
        return self.parts[0]

    def map(self, function: Callable[[Part], Part]) -> Lanes:
        """Applies a function that moves elements to all parts."""
        return type(self)(*map(function, self.parts))

    def lane(self, number: int) -> Lanes:
        return self if self.lanes == 1 else self.map(lambda part: part[number : number + 1])

    def alone(self) -> Part:
        """Returns the value of the only lane. Raises Apart if there are several."""
        if self.lanes > 1:
            raise Apart
        value: Part = self.value[0]
        return value

    def __len__(self) -> int:
        return self.shape[0]

    def __int__(self) -> int:
        return int(self.alone())

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self.alone())

    def any(self) -> bool:
        return bool(self.value.any())

    @property
    def flat(self) -> Any:
        return self.value.flat

    def __getitem__(self, key: Any) -> Lanes:
        key = _key(key)
        return self.map(lambda part: part[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        key = _key(key)
        for part, new in zip(self.parts, self.like(value).parts, strict=True):
            part[key] = new

    def like(self, value: Any) -> Lanes:
        """Converts a value to this class."""
        return type(self).of(value)

    @classmethod
    def of(cls, value: Any) -> Lanes:
        raise NotImplementedError

    def reshape(self, *shape: Any) -> Lanes:
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return self.map(lambda part: part.reshape(len(part), *shape))

    def ravel(self) -> Lanes:
        return self.reshape(self.size)

    def copy(self) -> Lanes:
        return self.map(np.copy)

    def astype(self, dtype: Any, copy: bool = True) -> Lanes:
        raise NotImplementedError

    def differs(self, other: Lanes) -> Part:
        """Returns True at the elements that differ."""
        raise NotImplementedError

    # Operators, by the functions below.
    def __neg__(self) -> Any:
        return LANES.negative(self)

    def __invert__(self) -> Any:
        return LANES.bitwise_invert(self)

    def __abs__(self) -> Any:
        return LANES.abs(self)


def _operator(name: str, function: str) -> None:
    setattr(Lanes, f"__{name}__", lambda self, other: getattr(LANES, function)(self, other))
    setattr(Lanes, f"__r{name}__", lambda self, other: getattr(LANES, function)(other, self))


for _name, _function in {
    **{"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide", "mod": "remainder"},
    **{
        "pow": "power",
        "and": "bitwise_and",
        "or": "bitwise_or",
        "xor": "bitwise_xor",
        "lshift": "bitwise_left_shift",
        "rshift": "bitwise_right_shift",
    },
    **{"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal"},
}.items():
    _operator(_name, _function)


def _key(key: Any) -> tuple[Any, ...]:
    keys = key if isinstance(key, tuple) else (key,)
    return (slice(None), *(each.alone() if isinstance(each, Lanes) else each for each in keys))


class Exact(Lanes):
    """Integers or bools."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> Lanes:
        return value if isinstance(value, Lanes) else cls(np.asarray(value)[None])

    def astype(self, dtype: Any, copy: bool = True) -> Lanes:
        if np.dtype(dtype).kind == "f":
            return Real.of(self)
        return Exact(self.value.astype(dtype))

    def differs(self, other: Lanes) -> Part:
        differ: Part = self.value != other.value
        return differ


class Real(Lanes):
    """Floats: a shadow, and an element of the field. `exp` is a random function whose value at 0 is 1."""

    __slots__ = ()
    dtype = np.dtype(np.float64)
    count: ClassVar[int] = 2  # of its parts

    @classmethod
    def of(cls, value: Any) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, int | float):
            return cls.constant(value)
        if isinstance(value, Real):
            return cls.exactly(*value.parts)
        array = value.value if isinstance(value, Lanes) else np.asarray(value)[None]
        if array.dtype.kind == "b":
            array = array.astype(np.int64)
        shadow = array.astype(np.float64)
        return cls.exactly(shadow, field.of_integers(array) if array.dtype.kind in "iu" else field.of_floats(shadow))

    @classmethod
    @lru_cache(maxsize=4096)
    def constant(cls, number: float) -> Self:
        return cls.of(np.asarray(number, np.float64))

    @classmethod
    def exactly(cls, shadow: Part, element: Part) -> Self:
        """Returns numbers that carry nothing besides shadow and element."""
        return cls(shadow, element)

    @property
    def element(self) -> Part:
        return self.parts[1]

    def astype(self, dtype: Any, copy: bool = True) -> Lanes:
        dtype = np.dtype(dtype)
        if dtype.kind == "f":
            return self
        if dtype.kind == "b":
            return Exact(self.value != 0)
        with np.errstate(all="ignore"):
            return Exact(np.trunc(_snapped(self.value)).astype(np.int64).astype(dtype))

    # --- arithmetic: `self` and `other` of one kind and number of dims ---

    def added(self, other: Real) -> Real:
        return Real(self.value + other.value, field.sum_of(self.element, other.element))

    def negated(self) -> Real:
        return Real(-self.value, field.negative(self.element))

    def times(self, other: Real) -> Real:
        return Real(self.value * other.value, field.product_of(self.element, other.element))

    def inverse(self) -> Real:
        return Real(1 / self.value, field.inverse(self.element))

    def matmul(self, other: Real) -> Real:
        return Real(np.matmul(self.value, other.value), field.matmul(self.element, other.element))

    def summed(self, axes: tuple[int, ...], keepdims: bool) -> Real:
        return self.moduli(lambda part, **how: np.asarray(np.sum(part, axis=axes, keepdims=keepdims, **how)))

    def moduli(self, function: Callable[..., Part]) -> Real:
        """Applies a sum to all parts."""
        return Real(function(self.value), field.reduced(function(self.element)))

    def exp(self) -> Real:
        shadow = np.exp(np.minimum(self.value, 80))
        element = np.where(self.element == 0, field.ONE, field.hashed("exp", self.element))
        return Real(shadow, np.where(shadow == 0, field.ZERO, element))

    def log(self) -> Real:
        return self.opaque("log", np.log(np.abs(self.value)))

    def opaque(self, word: str, shadow: Part, *others: Real) -> Real:
        """Returns a random function of elements, with this shadow."""
        return Real(shadow, field.hashed(word, self.element, *(other.element for other in others)))

    def is_same(self, other: Real) -> Part:
        """Returns True where two numbers are equal in the field."""
        same: Part = self.element == other.element
        return same

    def differs(self, other: Lanes) -> Part:
        """Returns True at the elements that differ. Infinities and NaN are compared by their shadows."""
        is_finite = np.isfinite(self.value) & np.isfinite(other.value)
        same = (self.value == other.value) | (np.isnan(self.value) & np.isnan(other.value))
        differ: Part = ~np.where(is_finite, self.is_same(type(self)(*other.parts)), same)
        return differ


def _snapped(shadow: Part) -> Part:
    """Rounds shadows that are close to an integer to it."""
    with np.errstate(all="ignore"):
        nearest = np.rint(shadow)
        snapped: Part = np.where(np.abs(shadow - nearest) <= NEAR * (1 + np.abs(shadow)), nearest, shadow)
        return snapped


# --- operands of one kind ---------------------------------------------------------------------------------------------


def _is_float(x: Any) -> bool:
    if isinstance(x, Lanes):
        return isinstance(x, Real)
    return isinstance(x, float | np.floating) or (isinstance(x, np.ndarray) and x.dtype.kind == "f")


def _aligned(xs: Sequence[Lanes]) -> list[Lanes]:
    """Gives all arrays the same number of dims, so that they broadcast from the right."""
    most = max(x.parts[0].ndim for x in xs)
    return [
        x if x.parts[0].ndim == most else x.map(lambda part: part.reshape(len(part), *(1,) * (most - part.ndim), *part.shape[1:]))
        for x in xs
    ]


def _reals(*xs: Any) -> list[Any]:
    kind = _kind(xs)
    return _aligned([kind.of(x) for x in xs])


def _kind(xs: Iterable[Any]) -> type[Real]:
    """Returns the class of floats with the most parts among the arrays."""
    return max((type(x) for x in xs if isinstance(x, Real)), key=lambda kind: kind.count, default=Real)


def _values(*xs: Any) -> list[Any]:
    """Returns the values of integers and bools. Python's numbers stay as they are, because they have no dtype."""
    known = [x if isinstance(x, int) and not isinstance(x, bool) else Exact.of(x) for x in xs]
    arrays = iter(_aligned([x for x in known if isinstance(x, Lanes)]))
    return [next(arrays).value if isinstance(x, Lanes) else x for x in known]


def _has_lanes(xs: Iterable[Any]) -> bool:
    return any(isinstance(x, Lanes) or (isinstance(x, list | tuple) and _has_lanes(x)) for x in xs)


def _inner(axis: int, ndim: int) -> int:
    """The axis of a part."""
    return axis % ndim + 1


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    axes = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(_inner(each, ndim) for each in axes)


# --- the functions of NumPy -------------------------------------------------------------------------------------------


# Functions of NumPy that the field does not have, and how elements come into the range in which they are defined.
_ANYWHERE = ("sin", "cos", "tan", "sinh", "cosh", "tanh", "arctan", "arcsinh", "expm1", "exp2", "arctan2", "hypot", "copysign")
_OPAQUE: dict[str, Callable[[Part], Part]] = {
    **dict.fromkeys(_ANYWHERE, lambda x: x),
    **dict.fromkeys(("log1p", "log2", "log10"), np.abs),
    **dict.fromkeys(("arcsin", "arccos", "arctanh"), lambda x: x / (1 + np.abs(x))),
    "arccosh": lambda x: 1 + np.abs(x),
}


class Functions:
    """NumPy for operands that may have lanes. Functions that are not defined here are NumPy's own, and take none."""

    def __init__(self, real: type[Real] = Real):
        self.real = real
        self.add = _Add()
        self.bitwise_and, self.bitwise_or, self.bitwise_xor = (_Bits(name) for name in ("bitwise_and", "bitwise_or", "bitwise_xor"))

    def __getattr__(self, name: str) -> Any:
        if name in _OPAQUE:
            return lambda *xs: self._opaque(name, *_aligned(_reals(*xs)))
        function = getattr(np, name)
        if not callable(function) or isinstance(function, type):
            return function

        def plain(*args: Any, **kw: Any) -> Any:
            if _has_lanes((*args, *kw.values())):
                raise NotImplementedError(f"the check of results has no np.{name}: add it to lanes.py")
            return function(*args, **kw)

        return plain

    # --- of two elements ---

    @staticmethod
    def subtract(x: Any, y: Any) -> Any:
        if _is_float(x) or _is_float(y):
            x, y = _reals(x, y)
            return x.added(y.negated())
        x, y = _values(x, y)
        return Exact(x - y)

    @staticmethod
    def multiply(x: Any, y: Any) -> Any:
        if _is_float(x) or _is_float(y):
            x, y = _reals(x, y)
            return x.times(y)
        x, y = _values(x, y)
        return Exact(x * y)

    @staticmethod
    def divide(x: Any, y: Any) -> Any:
        x, y = _reals(x, y)
        result = x.times(y.inverse())
        return type(result)(x.value / y.value, *result.parts[1:])

    @staticmethod
    def negative(x: Any) -> Any:
        return x.negated() if isinstance(x, Real) else Exact(-x.value)

    def floor_divide(self, x: Any, y: Any) -> Any:
        if _is_float(x) or _is_float(y):
            x, y = _reals(x, y)
            return self._integer(np.floor, x, x.value / y.value)
        return Exact(np.floor_divide(*_values(x, y)))

    def remainder(self, x: Any, y: Any) -> Any:
        if _is_float(x) or _is_float(y):
            return x - self.floor_divide(x, y) * y
        return Exact(np.remainder(*_values(x, y)))

    def power(self, x: Any, y: Any) -> Any:
        """Returns a product for integer powers, else a random function of both operands."""
        if not (_is_float(x) or _is_float(y)):
            return Exact(np.power(*_values(x, y)))
        number = y if isinstance(y, int | float) else y.item() if isinstance(y, np.ndarray | np.generic) and y.size == 1 else None
        if number is not None and number == int(number) and 0 <= number <= 64:
            return reduce(lambda total, _: self.multiply(total, x), range(int(number)), self.multiply(x, 0.0) + 1.0)
        x, y = _reals(x, y)
        return x.opaque("pow", np.power(np.abs(x.value), y.value), y)

    def maximum(self, x: Any, y: Any) -> Any:
        return self._chosen(np.maximum, np.greater, x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        return self._chosen(np.minimum, np.less, x, y)

    def _chosen(self, function: Any, is_first: Any, x: Any, y: Any) -> Any:
        if not (_is_float(x) or _is_float(y)):
            return Exact(function(*_values(x, y)))
        x, y = _reals(x, y)
        return self.where(Exact(is_first(x.value, y.value) | np.isnan(x.value)), x, y)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        return self.minimum(self.maximum(x, low), high)

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        if _is_float(x) or _is_float(y):
            c, x, y = _aligned([Exact.of(condition), *_reals(x, y)])
            return type(x)(*(np.where(c.value, a, b) for a, b in zip(x.parts, y.parts, strict=True)))
        return Exact(np.where(*_values(condition, x, y)))

    def fmod(self, x: Any, y: Any) -> Any:
        if _is_float(x) or _is_float(y):
            x, y = _reals(x, y)
            return x - self._integer(np.trunc, x, x.value / y.value) * y
        return Exact(np.fmod(*_values(x, y)))

    @staticmethod
    def _opaque(name: str, x: Any, *others: Any) -> Any:
        """A function that the field does not have; of elements where NumPy's is not defined it is that of others."""
        with np.errstate(all="ignore"):
            inside = _OPAQUE[name](x.value)
            return x.opaque(name, getattr(np, name)(inside, *(other.value for other in others)), *others)

    # --- of one element ---

    def exp(self, x: Any) -> Any:
        return _reals(x)[0].exp()

    def log(self, x: Any) -> Any:
        return _reals(x)[0].log()

    def sqrt(self, x: Any) -> Any:
        if isinstance(x, Number):
            return np.sqrt(x)
        return x.opaque("sqrt", np.sqrt(np.abs(x.value)))

    @staticmethod
    def vectorize(function: Callable[[float], float], otypes: Any = None) -> Callable[[Any], Any]:
        return lambda x: x.opaque(function.__name__, np.vectorize(function, otypes=[np.float64])(x.value))

    def abs(self, x: Any) -> Any:
        return self.where(x > 0, x, -x)

    def sign(self, x: Any) -> Any:
        return self._integer(np.sign, x) if isinstance(x, Real) else Exact(np.sign(x.value))

    def floor(self, x: Any) -> Any:
        return self._integer(np.floor, x)

    def ceil(self, x: Any) -> Any:
        return self._integer(np.ceil, x)

    def trunc(self, x: Any) -> Any:
        return self._integer(np.trunc, x)

    def round(self, x: Any) -> Any:
        return self._integer(np.round, x)

    @staticmethod
    def _integer(function: Callable[[Part], Part], x: Real, of: Part | None = None) -> Lanes:
        return type(x).of(Exact(function(_snapped(x.value if of is None else of))))

    @staticmethod
    def isneginf(x: Any) -> Any:
        return Exact(np.isneginf(x.value))

    @staticmethod
    def isnan(x: Any) -> Any:
        return Exact(np.isnan(x.value))

    @staticmethod
    def isfinite(x: Any) -> Any:
        return Exact(np.isfinite(x.value))

    @staticmethod
    def bitwise_invert(x: Any) -> Any:
        return Exact(~x.value)

    @staticmethod
    def logical_not(x: Any) -> Any:
        return Exact(np.logical_not(x.value))

    # --- of whole dims ---

    @staticmethod
    def sum(x: Any, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Any:
        axes = _axes(axis, x.ndim)
        return (
            x.summed(axes, keepdims)
            if isinstance(x, Real)
            else Exact(np.asarray(np.sum(x.value, axis=axes, keepdims=keepdims, dtype=dtype)))
        )

    def mean(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return self.sum(x, axis, keepdims) / float(math.prod(x.parts[0].shape[each] for each in _axes(axis, x.ndim)))

    def prod(self, x: Any, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Any:
        if not isinstance(x, Real):
            return Exact(np.asarray(np.prod(x.value, axis=_axes(axis, x.ndim), keepdims=keepdims, dtype=dtype)))
        rows, shape = _as_rows(x, axis, keepdims)
        product = reduce(lambda total, i: self.multiply(total, rows[..., i]), range(rows.shape[-1]), self.ones(rows.shape[:-1]))
        return product.reshape(shape)

    def max(self, x: Any, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Any:
        return self._extreme(np.max, np.argmax, x, axis, keepdims, initial)

    def min(self, x: Any, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Any:
        return self._extreme(np.min, np.argmin, x, axis, keepdims, initial)

    def _extreme(self, function: Any, place: Any, x: Any, axis: Any, keepdims: bool, initial: Any) -> Any:
        if not isinstance(x, Real):
            given = {} if initial is None else {"initial": initial}
            return Exact(np.asarray(function(x.value, axis=_axes(axis, x.ndim), keepdims=keepdims, **given)))
        rows, shape = _as_rows(x, axis, keepdims)
        if not rows.shape[-1]:
            return self.full(shape, initial, np.float64)
        at = place(rows.value, axis=-1)[..., None]
        return rows.map(lambda part: np.take_along_axis(part, at, -1)).reshape(shape)

    @staticmethod
    def argmax(x: Any, axis: int, keepdims: bool = False) -> Any:
        return Exact(np.argmax(x.value, axis=_inner(axis, x.ndim), keepdims=keepdims))

    @staticmethod
    def argsort(x: Any, axis: int = -1, stable: bool = True) -> Any:
        values = x.value if isinstance(x, Lanes) else np.asarray(x)[None]
        return Exact(np.argsort(values, axis=_inner(axis, values.ndim - 1), stable=stable))

    @staticmethod
    def cumsum(x: Any, axis: int, dtype: Any = None) -> Any:
        along = _inner(axis, x.ndim)
        return x.moduli(lambda part: np.cumsum(part, along)) if isinstance(x, Real) else Exact(np.cumsum(x.value, along, dtype))

    @staticmethod
    def matmul(x: Any, y: Any) -> Any:
        if _is_float(x) or _is_float(y):
            x, y = _reals(x, y)
            return x.matmul(y)
        return Exact(np.matmul(*_values(x, y)))

    # --- elements at other places ---

    @staticmethod
    def ndim(x: Any) -> int:
        return x.ndim if isinstance(x, Lanes) else np.ndim(x)

    @staticmethod
    def asarray(x: Any, dtype: Any = None) -> Any:
        if isinstance(x, Lanes):
            return x if dtype is None else x.astype(dtype)
        return np.asarray(x, dtype)

    @staticmethod
    def copy(x: Any) -> Any:
        return x.copy()

    @staticmethod
    def reshape(x: Any, shape: Any) -> Any:
        return x.reshape(shape)

    @staticmethod
    def transpose(x: Any, axes: Sequence[int]) -> Any:
        order = (0, *(axis + 1 for axis in axes))
        return x.map(lambda part: np.transpose(part, order))

    @staticmethod
    def swapaxes(x: Any, one: int, other: int) -> Any:
        return x.map(lambda part: np.swapaxes(part, _inner(one, x.ndim), _inner(other, x.ndim)))

    @staticmethod
    def expand_dims(x: Any, axis: tuple[int, ...]) -> Any:
        return x.map(lambda part: np.expand_dims(part, tuple(each + 1 for each in axis)))

    @staticmethod
    def broadcast_to(x: Any, shape: tuple[int, ...]) -> Any:
        if not isinstance(x, Lanes):
            return np.broadcast_to(x, shape)
        missing = (1,) * (len(shape) - x.ndim)
        return x.map(lambda part: np.broadcast_to(part.reshape(len(part), *missing, *part.shape[1:]), (len(part), *shape)))

    def broadcast_arrays(self, *xs: Any) -> list[Any]:
        shape = np.broadcast_shapes(*(x.shape for x in xs))
        return [self.broadcast_to(Exact.of(x), shape) for x in xs]

    @staticmethod
    def repeat(x: Any, count: int, axis: int) -> Any:
        return x.map(lambda part: np.repeat(part, count, _inner(axis, x.ndim)))

    @staticmethod
    def flip(x: Any, axis: int) -> Any:
        return x.map(lambda part: np.flip(part, _inner(axis, x.ndim)))

    @staticmethod
    def take(x: Any, indices: Any, axis: int) -> Any:
        return x.map(lambda part: np.take(part, indices, _inner(axis, x.ndim)))

    @staticmethod
    def take_along_axis(x: Any, indices: Any, axis: int) -> Any:
        at, along = Exact.of(indices).value, _inner(axis, x.ndim)
        lanes = max(len(at), x.lanes)
        at = np.broadcast_to(at, (lanes, *at.shape[1:]))
        return x.map(lambda part: np.take_along_axis(np.broadcast_to(part, (lanes, *part.shape[1:])), at, along))

    def concatenate(self, xs: Sequence[Any], axis: int = 0) -> Any:
        return _joined(xs, lambda parts, ndim: np.concatenate(parts, _inner(axis, ndim)))

    def stack(self, xs: Sequence[Any]) -> Any:
        return _joined(xs, lambda parts, ndim: np.stack(parts, 1))

    def split(self, x: Any, count: int, axis: int = 0) -> list[Any]:
        pieces = [np.split(part, count, _inner(axis, x.ndim)) for part in x.parts]
        return [type(x)(*parts) for parts in zip(*pieces, strict=True)]

    @staticmethod
    def pad(x: Any, widths: Sequence[tuple[int, int]], constant_values: Any = 0) -> Any:
        values = x.like(constant_values).parts
        return type(x)(*(np.pad(part, [(0, 0), *widths], constant_values=value[0]) for part, value in zip(x.parts, values, strict=True)))

    def full(self, shape: Any, value: Any, dtype: Any = None) -> Any:
        array = np.full(shape, value, dtype)
        return self.real.of(array) if array.dtype.kind == "f" else Exact(array[None])

    def zeros(self, shape: Any, dtype: Any = float) -> Any:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Any, dtype: Any = float) -> Any:
        return self.full(shape, 1, dtype)

    def zeros_like(self, x: Any) -> Any:
        return self.zeros(x.shape, x.dtype)

    def ones_like(self, x: Any) -> Any:
        return self.ones(x.shape, x.dtype)

    @staticmethod
    def nonzero(x: Any) -> Any:
        return np.nonzero(x.alone() if isinstance(x, Lanes) else x)


def _joined(xs: Sequence[Any], function: Callable[[list[Part], int], Part]) -> Lanes:
    kind: type[Lanes] = _kind(xs) if any(map(_is_float, xs)) else Exact
    arrays = [kind.of(x) for x in xs]
    lanes = max(x.lanes for x in arrays)
    of_each = zip(*(x.parts for x in arrays), strict=True)
    return type(arrays[0])(
        *(function([np.broadcast_to(part, (lanes, *part.shape[1:])) for part in parts], arrays[0].ndim) for parts in of_each)
    )


def _as_rows(x: Real, axis: Any, keepdims: bool) -> tuple[Real, tuple[int, ...]]:
    """Returns the array with the reduced dims as its last one, and the shape of the result."""
    axes = _axes(axis, x.ndim)
    whole = x.parts[0].shape
    kept = [i for i in range(1, len(whole)) if i not in axes]
    count = math.prod(whole[i] for i in axes)
    rows = x.map(lambda part: np.transpose(part, (0, *kept, *axes)).reshape(len(part), *(whole[i] for i in kept), count))
    shape = tuple(1 if i in axes else whole[i] for i in range(1, len(whole)) if keepdims or i not in axes)
    return rows, shape  # type: ignore[return-value]


class _Add:
    """numpy.add: the sum, and `at`, which adds at indices."""

    def __call__(self, x: Any, y: Any) -> Any:
        if _is_float(x) or _is_float(y):
            x, y = _reals(x, y)
            return x.added(y)
        x, y = _values(x, y)
        return Exact(x + y)

    @staticmethod
    def at(x: Lanes, where: tuple[Any, ...], y: Any) -> None:
        key = _key(where)
        added = x.like(y)
        if added.lanes > x.lanes:  # of which x has one, and it is written to in place
            raise Apart
        for part, new in zip(x.parts, added.parts, strict=True):
            np.add.at(part, key, new)
            if isinstance(x, Real) and part is not x.value:
                part %= P


class _Bits:
    """numpy.bitwise_and and its like: a function of two operands, and its reduction."""

    def __init__(self, name: str):
        self.function = getattr(np, name)

    def __call__(self, x: Any, y: Any) -> Any:
        return Exact(self.function(*_values(x, y)))

    def reduce(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return Exact(np.asarray(self.function.reduce(x.value, axis=_axes(axis, x.ndim), keepdims=keepdims)))


def _comparison(name: str, is_strict: bool) -> Callable[[Any, Any], Any]:
    """Compares shadows. Numbers with equal elements are equal: they are one number, computed in two ways."""
    function = getattr(np, name)

    def compared(x: Any, y: Any) -> Any:
        if not (_is_float(x) or _is_float(y)):
            return Exact(function(*_values(x, y)))
        x, y = _reals(x, y)
        same = x.is_same(y) & (np.isfinite(x.value) == np.isfinite(y.value))
        return Exact(function(x.value, y.value) & ~same if is_strict else function(x.value, y.value) | same)

    return staticmethod(compared)


for _name in ("less", "greater", "not_equal", "less_equal", "greater_equal", "equal"):
    setattr(Functions, _name, _comparison(_name, _name in ("less", "greater", "not_equal")))


def _exact(name: str) -> Callable[[Any, Any], Any]:
    return staticmethod(lambda x, y: Exact(getattr(np, name)(*_values(x, y))))


for _name in ("logical_and", "logical_or", "logical_xor", "bitwise_left_shift", "bitwise_right_shift"):
    setattr(Functions, _name, _exact(_name))

LANES = Functions()


def apply(function: Callable[..., Any], *operands: Any) -> Any:
    """Calls a function for all lanes at once, or for one lane after the other if it raises Apart."""
    try:
        return _in_lanes(function(*operands))
    except Apart:
        lanes = max(x.lanes for x in operands if isinstance(x, Lanes))
        alone = [[x.lane(i) if isinstance(x, Lanes) else x for x in operands] for i in range(lanes)]
        return joined_lanes([_in_lanes(function(*own)) for own in alone])


def _in_lanes(result: Any) -> Any:
    """Returns a constant as an array of one lane."""
    if isinstance(result, tuple):
        return tuple(map(_in_lanes, result))
    return result if isinstance(result, Lanes) else Real.of(result) if _is_float(result) else Exact.of(result)


def joined_lanes(results: Sequence[Any]) -> Any:
    """Concatenates the lanes of arrays, or of each element of tuples."""
    if isinstance(results[0], tuple):
        return tuple(joined_lanes(each) for each in zip(*results, strict=True))
    return type(results[0])(*(np.concatenate(parts) for parts in zip(*(x.parts for x in results), strict=True)))
