"""Floats over dual numbers, for which exp of a sum is the product of the exps. A merge of softmaxes by log-sum-exps relies on this rule.

An element is a + b e, where a and b are elements of the field and e * e = 0. exp(a + b e) is defined as 1 + a e. A logarithm also stores
its argument, which sums and selections keep: exp(log(y) + x) is y exp(x). The definition of exp does not use b, so exp can lose a
difference in b. The shadows (f64 values) are therefore compared too.
"""

from collections.abc import Callable
from functools import reduce
from typing import ClassVar, Self

import numpy as np

from hostweave.check.results import field
from hostweave.check.results.field import P
from hostweave.check.results.functions import Functions
from hostweave.check.results.samples import Component, Real, Samples, zeros_are_exact

TOLERANCE = 1e-6  # largest difference of the shadows of equal floats, relative to 1 + the magnitude of a shadow


class Dual(Real):
    """A float with five components: shadow, a, b, c and d. If the float is a logarithm (possibly negated), or a sum with such a logarithm,
    its exp is c + d e. Otherwise c is 0."""

    __slots__ = ()
    count: ClassVar[int] = 5

    @classmethod
    def from_components(cls, shadow: Component, element: Component) -> Self:
        return cls.without_argument(shadow, element, np.zeros_like(element))

    @classmethod
    def without_argument(cls, shadow: Component, a: Component, b: Component) -> Self:
        return cls(shadow, a, b, np.zeros_like(a), np.zeros_like(a))

    def _exponential(self) -> tuple[Component, Component]:
        """exp(self): c + d e if c is not 0, otherwise 1 + a e."""
        _, a, _, c, d = self.components
        return np.where(c != 0, c, field.ONE), np.where(c != 0, d, a)

    def add(self, other: Real) -> Real:
        shadow, a, b, c, _ = self.components
        shadow_, a_, b_, c_, _ = other.components
        has_argument = (c != 0) | (c_ != 0)
        (x, y), (z, w) = self._exponential(), Dual(*other.components)._exponential()
        exponential = (np.where(has_argument, component, field.ZERO) for component in (x * z % P, (x * w + y * z) % P))
        a, b = field.sum_of(a, a_), field.sum_of(b, b_)
        return Dual(zeros_are_exact(shadow + shadow_, a | b, lambda: np.abs(shadow) + np.abs(shadow_)), a, b, *exponential)

    def negative(self) -> Real:
        shadow, a, b, c, d = self.components
        inverse = field.inverse(c)
        return Dual(-shadow, field.negative(a), field.negative(b), inverse, field.negative(d * (inverse * inverse % P) % P))

    def multiply(self, other: Real) -> Real:
        shadow, a, b, *_ = self.components
        shadow_, a_, b_, *_ = other.components
        return Dual.without_argument(shadow * shadow_, a * a_ % P, (a * b_ + b * a_) % P)

    def inverse(self) -> Real:
        shadow, a, b, *_ = self.components
        inverse = field.inverse(a)
        return Dual.without_argument(1 / shadow, inverse, field.negative(b * (inverse * inverse % P) % P))

    def matmul(self, other: Real) -> Real:
        shadow, a, b, *_ = self.components
        shadow_, a_, b_, *_ = other.components
        total, rest = field.matmul(a, a_), (field.matmul(a, b_) + field.matmul(b, a_)) % P
        exact = zeros_are_exact(np.matmul(shadow, shadow_), total | rest, lambda: np.matmul(np.abs(shadow), np.abs(shadow_)))
        return Dual.without_argument(exact, total, rest)

    def sum(self, axes: tuple[int, ...], keepdims: bool) -> Real:
        total = super().sum(axes, keepdims)
        if not self.components[3].any():
            return total
        kept = [i for i in range(self.components[0].ndim) if i not in axes]
        rows = self.map(lambda component: np.transpose(component, (*kept, *axes)).reshape(*(component.shape[i] for i in kept), -1))
        columns: list[Real] = [Dual(*(component[..., i] for component in rows.components)) for i in range(rows.components[0].shape[-1])]
        carried = reduce(lambda x, y: x.add(y), columns)
        return Dual(*total.components[:3], *(component.reshape(total.components[0].shape) for component in carried.components[3:]))

    def apply_linear(self, function: Callable[..., Component]) -> Real:
        shadow, a, b, *_ = self.components
        a, b = field.reduced(function(a)), field.reduced(function(b))
        return Dual.without_argument(zeros_are_exact(function(shadow), a | b, lambda: function(np.abs(shadow))), a, b)

    def exp(self) -> Real:
        shadow = np.exp(np.minimum(self.value, 80))
        a, b = (np.where(shadow == 0, field.ZERO, component) for component in self._exponential())
        return Dual.without_argument(shadow, a, b)

    def log(self) -> Real:
        return Dual(*self.random_function("log", np.log(np.abs(self.value))).components[:3], *self.components[1:3])

    def random_function(self, word: str, shadow: Component, *others: Real) -> Real:
        arguments = [component for x in (self, *others) for component in x.components[1:3]]
        return Dual.without_argument(shadow, field.hashed(word, *arguments), field.hashed(f"{word} b", *arguments))

    def equals(self, other: Real) -> Component:
        same: Component = (self.components[1] == other.components[1]) & (self.components[2] == other.components[2])
        return same

    def differs(self, other: Samples) -> Component:
        (x, y), (z, w) = self._exponential(), Dual(*other.components)._exponential()
        has_arguments = (self.components[3] != 0) & (other.components[3] != 0)
        is_near = np.abs(self.value - other.value) <= TOLERANCE * (1 + np.abs(other.value))
        is_finite = np.isfinite(self.value) & np.isfinite(other.value)
        same = np.where(has_arguments, (x == z) & (y == w), self.equals(Dual(*other.components))) & is_near
        differ: Component = ~np.where(is_finite, same, (self.value == other.value) | (np.isnan(self.value) & np.isnan(other.value)))
        return differ


DUAL = Functions(Dual)
