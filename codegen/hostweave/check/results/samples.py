"""Arrays with several samples. A sample is the copy of an array for one seed, or for one rank and one seed.

An array consists of components, which are NumPy arrays. The first dim of each component is the sample. Shapes and axes omit this dim. A
function that needs a Python number, for example for a branch, raises NeedsSingleSample. `apply` then calls the function once per sample.

Integers and bools are exact, and have one component. A float is a `Real` with a shadow in f64 and an element of a finite field. In random
inputs, shadow and element are independent. The shadow decides comparisons of numbers with different elements, sort orders, casts to
integers, and whether a number is finite. Sums and products of elements are exact. A function that the field lacks, such as sqrt, is a
random function of the element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from hostweave.check.results import field

Component = NDArray[Any]
ScalarLike = int | float | bool | np.generic

ROUNDING_TOLERANCE = 1e-9  # relative error at which a shadow counts as an integer, or a sum as 0


class NeedsSingleSample(Exception):
    """The function needs a Python number, and must be called once per sample."""


class Samples(NDArrayOperatorsMixin):
    """An array with samples. A constant has one sample, which broadcasts."""

    __slots__ = ("components",)
    functions: ClassVar[Any]  # defined in functions.py
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *components: Component):
        self.components = components

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **_: Any) -> Any:
        """Computes an operator, such as +, by the function of functions.py."""
        return getattr(self.functions, ufunc.__name__)(*operands)

    @property
    def samples(self) -> int:
        return len(self.components[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.components[0].shape[1:]

    @property
    def ndim(self) -> int:
        return self.components[0].ndim - 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.components[0].dtype

    @property
    def value(self) -> Component:
        """The first component: integers, bools or shadows."""
        return self.components[0]

    def map(self, function: Callable[[Component], Component]) -> Samples:
        """Applies a function to all components. The function must not compute with elements, but may select, copy and reorder them."""
        return type(self)(*map(function, self.components))

    def sample(self, number: int) -> Samples:
        return self if self.samples == 1 else self.map(lambda component: component[number : number + 1])

    def single_sample(self) -> Component:
        if self.samples > 1:
            raise NeedsSingleSample
        value: Component = self.value[0]
        return value

    def __len__(self) -> int:
        return self.shape[0]

    def __int__(self) -> int:
        return int(self.single_sample())

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self.single_sample())

    def __getitem__(self, key: Any) -> Samples:
        key = key_of(key)
        return self.map(lambda component: component[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        key = key_of(key)
        for component, new in zip(self.components, self.of(value).components, strict=True):
            component[key] = new

    @classmethod
    def of(cls, value: Any) -> Samples:
        raise NotImplementedError

    def reshape(self, *shape: Any) -> Samples:
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return self.map(lambda component: component.reshape(len(component), *shape))

    def ravel(self) -> Samples:
        return self.reshape(self.size)

    def copy(self) -> Samples:
        return self.map(np.copy)

    def astype(self, dtype: Any, copy: bool = True) -> Samples:
        raise NotImplementedError

    def differs(self, other: Samples) -> Component:
        raise NotImplementedError


def key_of(key: Any) -> tuple[Any, ...]:
    keys = key if isinstance(key, tuple) else (key,)
    return (slice(None), *(each.single_sample() if isinstance(each, Samples) else each for each in keys))


class Exact(Samples):
    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> Samples:
        return value if isinstance(value, Samples) else cls(np.asarray(value)[None])

    def astype(self, dtype: Any, copy: bool = True) -> Samples:
        if np.dtype(dtype).kind == "f":
            return Real.of(self)
        return Exact(self.value.astype(dtype))

    def differs(self, other: Samples) -> Component:
        differ: Component = self.value != other.value
        return differ


class Real(Samples):
    """Floats, each with a shadow and an element of the field. `exp` is a random function of the element with exp(0) = 1. If the shadow of
    the result underflows to 0, the element of the result is 0 too."""

    __slots__ = ()
    dtype = np.dtype(np.float64)
    count: ClassVar[int] = 2  # number of components

    @classmethod
    def of(cls, value: Any) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, int | float):
            return cls.constant(value)
        if isinstance(value, Real):
            return cls.from_components(*value.components)
        array = value.value if isinstance(value, Samples) else np.asarray(value)[None]
        if array.dtype.kind == "b":
            array = array.astype(np.int64)
        shadow = array.astype(np.float64)
        return cls.from_components(shadow, field.of_integers(array) if array.dtype.kind in "iu" else field.of_floats(shadow))

    @classmethod
    @lru_cache(maxsize=4096)
    def constant(cls, number: float) -> Self:
        return cls.of(np.asarray(number, np.float64))

    @classmethod
    def from_components(cls, shadow: Component, element: Component) -> Self:
        """Numbers with the given shadow and element. Subclasses derive further components."""
        return cls(shadow, element)

    @property
    def element(self) -> Component:
        return self.components[1]

    def astype(self, dtype: Any, copy: bool = True) -> Samples:
        dtype = np.dtype(dtype)
        if dtype.kind == "f":
            return self
        if dtype.kind == "b":
            return Exact(self.value != 0)
        with np.errstate(all="ignore"):
            return Exact(np.trunc(rounded_if_near(self.value)).astype(np.int64).astype(dtype))

    # In arithmetic, `self` and `other` have one class, and the same number of dims, unless one operand is a scalar constant.

    def add(self, other: Real) -> Real:
        element = field.sum_of(self.element, other.element)
        return Real(zeros_are_exact(self.value + other.value, element, lambda: np.abs(self.value) + np.abs(other.value)), element)

    def negative(self) -> Real:
        return Real(-self.value, field.negative(self.element))

    def multiply(self, other: Real) -> Real:
        return Real(self.value * other.value, field.product_of(self.element, other.element))

    def inverse(self) -> Real:
        return Real(1 / self.value, field.inverse(self.element))

    def matmul(self, other: Real) -> Real:
        element = field.matmul(self.element, other.element)
        size = lambda: np.matmul(np.abs(self.value), np.abs(other.value))  # noqa: E731
        return Real(zeros_are_exact(np.matmul(self.value, other.value), element, size), element)

    def sum(self, axes: tuple[int, ...], keepdims: bool) -> Real:
        return self.apply_linear(lambda component, **how: np.asarray(np.sum(component, axis=axes, keepdims=keepdims, **how)))

    def apply_linear(self, function: Callable[..., Component]) -> Real:
        """Applies a sum or a cumulative sum to all components."""
        element = field.reduced(function(self.element))
        return Real(zeros_are_exact(function(self.value), element, lambda: function(np.abs(self.value))), element)

    def exp(self) -> Real:
        shadow = np.exp(np.minimum(self.value, 80))
        element = np.where(self.element == 0, field.ONE, field.hashed("exp", self.element))
        return Real(shadow, np.where(shadow == 0, field.ZERO, element))

    def log(self) -> Real:
        return self.random_function("log", np.log(np.abs(self.value)))

    def random_function(self, word: str, shadow: Component, *others: Real) -> Real:
        return Real(shadow, field.hashed(word, self.element, *(other.element for other in others)))

    def equals(self, other: Real) -> Component:
        same: Component = self.element == other.element
        return same

    def differs(self, other: Samples) -> Component:
        """True for each element that differs. The shadows decide for infinities and NaN."""
        is_finite = np.isfinite(self.value) & np.isfinite(other.value)
        same = (self.value == other.value) | (np.isnan(self.value) & np.isnan(other.value))
        differ: Component = ~np.where(is_finite, self.equals(type(self)(*other.components)), same)
        return differ


def zeros_are_exact(shadow: Component, element: Component, size: Callable[[], Component]) -> Component:
    """Sets the shadow of a sum to 0 if the element is 0 and the shadow is a rounding error. Otherwise inverses and signs would depend on
    the order of the sum. `size` sums the absolute values."""
    is_error = (element == 0) & (shadow != 0)
    return np.where(is_error & (np.abs(shadow) < ROUNDING_TOLERANCE * size()), 0.0, shadow) if is_error.any() else shadow


def rounded_if_near(shadow: Component) -> Component:
    with np.errstate(all="ignore"):
        nearest = np.rint(shadow)
        rounded_if_near: Component = np.where(np.abs(shadow - nearest) <= ROUNDING_TOLERANCE * (1 + np.abs(shadow)), nearest, shadow)
        return rounded_if_near


def is_float(x: Any) -> bool:
    if isinstance(x, Samples):
        return isinstance(x, Real)
    return isinstance(x, float | np.floating) or (isinstance(x, np.ndarray) and x.dtype.kind == "f")


def aligned(xs: Sequence[Samples]) -> list[Samples]:
    """Gives all arrays except scalar constants the same number of dims, so that they broadcast from the right."""
    max_ndim = max([x.components[0].ndim for x in xs])
    return [
        x
        if x.components[0].ndim == max_ndim or x.components[0].shape == (1,)
        else x.map(lambda component: component.reshape(len(component), *(1,) * (max_ndim - component.ndim), *component.shape[1:]))
        for x in xs
    ]


def as_reals(*xs: Any) -> list[Any]:
    kind = widest_real(xs)
    return aligned([x if type(x) is kind else kind.of(x) for x in xs])


def widest_real(xs: Iterable[Any]) -> type[Real]:
    """The class with the most components among the floats."""
    kind: type[Real] = Real
    for x in xs:
        if isinstance(x, Real) and x.count > kind.count:
            kind = type(x)
    return kind


def values_of(*xs: Any) -> list[Any]:
    """Values of integers and bools. Python ints stay, because they have no dtype."""
    operands = [x if isinstance(x, int) and not isinstance(x, bool) else Exact.of(x) for x in xs]
    arrays = iter(aligned([x for x in operands if isinstance(x, Samples)]))
    return [next(arrays).value if isinstance(x, Samples) else x for x in operands]


def has_samples(xs: Iterable[Any]) -> bool:
    return any(isinstance(x, Samples) or (isinstance(x, list | tuple) and has_samples(x)) for x in xs)


def inner_axis(axis: int, ndim: int) -> int:
    """Axis of a component. The first axis of a component is the sample."""
    return axis % ndim + 1


def inner_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    axes = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(inner_axis(each, ndim) for each in axes)


def apply(function: Callable[..., Any], *operands: Any) -> Any:
    """Calls a function for all samples at once, or for each sample if the function raises NeedsSingleSample."""
    try:
        return _in_samples(function(*operands))
    except NeedsSingleSample:
        samples = max(x.samples for x in operands if isinstance(x, Samples))
        single_sample = [[x.sample(i) if isinstance(x, Samples) else x for x in operands] for i in range(samples)]
        return joined_samples([_in_samples(function(*single)) for single in single_sample])


def _in_samples(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_in_samples, result))
    return result if isinstance(result, Samples) else Real.of(result) if is_float(result) else Exact.of(result)


def joined_samples(results: Sequence[Any]) -> Any:
    if isinstance(results[0], tuple):
        return tuple(joined_samples(each) for each in zip(*results, strict=True))
    return type(results[0])(*(np.concatenate(components) for components in zip(*(x.components for x in results), strict=True)))
