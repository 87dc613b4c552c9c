"""Sizes of dims that are known at compile time only as products of names: `M`, `M/8`, `8*M*K`.

Two names stand for what follows from a size where ranks cannot share it evenly: `ceil(M/8)` is the block of each of 8 ranks, and
`part(M, x)` what this rank holds of M along mesh axis x: a block, of which the last ranks have less or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod


@dataclass(frozen=True)
class Extent:
    """coefficient * product(names) / divisor, kept in lowest terms with sorted names, so equal sizes compare equal."""

    coefficient: int = 1
    names: tuple[str, ...] = ()
    divisor: int = 1

    def __post_init__(self) -> None:
        common = gcd(self.coefficient, self.divisor) or 1
        object.__setattr__(self, "coefficient", self.coefficient // common)
        object.__setattr__(self, "divisor", self.divisor // common if self.coefficient else 1)
        object.__setattr__(self, "names", tuple(sorted(self.names)) if self.coefficient else ())

    @staticmethod
    def of(value: int | str | Extent) -> Extent:
        """An extent from an int, a name, or text such as `M/8`, `8*M` and `K*M/4`."""
        if isinstance(value, Extent):
            return value
        if isinstance(value, int):
            return Extent(value)
        match = re.fullmatch(rf"({_FACTOR}(?:\*{_FACTOR})*)(?:/(\d+))?", value.replace(" ", ""))
        factors = [_spaced(factor) for factor in match[1].split("*")] if match else []
        if not match:
            raise ValueError(f"not an extent: {value!r}; write a name, an int, or a product such as 8*M/4")
        coefficient = prod(int(factor) for factor in factors if factor.isdigit())
        return Extent(coefficient, tuple(f for f in factors if not f.isdigit()), int(match[2] or 1))

    @property
    def is_int(self) -> bool:
        return not self.names and self.divisor == 1

    def __int__(self) -> int:
        if not self.is_int:
            raise ValueError(f"{self} is not known at compile time")
        return self.coefficient

    def __mul__(self, other: int | Extent) -> Extent:
        other = Extent.of(other)
        return Extent(self.coefficient * other.coefficient, self.names + other.names, self.divisor * other.divisor)

    def __floordiv__(self, other: int) -> Extent:
        """The exact quotient: that `other` divides the size is checked when the size is known."""
        return Extent(self.coefficient, self.names, self.divisor * other)

    def divided_by(self, other: Extent) -> Extent | None:
        """The quotient by another extent, or None where it has no such form."""
        names = list(self.names)
        for name in other.names:
            if name not in names:
                return None
            names.remove(name)
        return Extent(self.coefficient * other.divisor, tuple(names), self.divisor * other.coefficient)

    def bind(self, sizes: Mapping[str, int]) -> int:
        """The size when every name has its own. Raises ValueError where the divisor does not divide it."""
        total = self.coefficient * prod(sizes[name] for name in self.names)
        if total % self.divisor:
            raise ValueError(f"{self}: {self.divisor} does not divide {total}")
        return total // self.divisor

    def replaced(self, values: Mapping[str, Extent]) -> Extent:
        """With extents in place of some names."""
        if not any(name in values for name in self.names):
            return self
        kept = Extent(self.coefficient, tuple(name for name in self.names if name not in values), self.divisor)
        return product((kept, *(values[name] for name in self.names if name in values)))

    def __str__(self) -> str:
        factors = ([str(self.coefficient)] if self.coefficient != 1 or not self.names else []) + list(self.names)
        return "*".join(factors) + (f"/{self.divisor}" if self.divisor != 1 else "")


_FACTOR = r"(?:\d+|[A-Za-z_]\w*|ceil\(\w+/\d+\)|part\(\w+(?:,\w+)+\))"
_BLOCK = re.compile(r"ceil\((\w+)/(\d+)\)")
_PART = re.compile(r"part\((\w+), (.*)\)")


def _spaced(factor: str) -> str:
    return factor.replace(",", ", ")


def block(size: Extent, ranks: int) -> Extent:
    """What each of so many ranks holds of a size, but for the last ones: `ceil(M/8)`."""
    return Extent(-(-int(size) // ranks)) if size.is_int else Extent(1, (f"ceil({size}/{ranks})",))


def part(size: Extent, axes: tuple[str, ...]) -> Extent:
    """What this rank holds of a size along mesh axes: `part(M, x)`."""
    return Extent(1, (f"part({', '.join((str(size), *axes))})",))


def block_of(name: str) -> tuple[Extent, int] | None:
    """The size and ranks of a name such as `ceil(M/8)`."""
    match = _BLOCK.fullmatch(name)
    return (_size(match[1]), int(match[2])) if match else None


def part_of(name: str) -> tuple[Extent, tuple[str, ...]] | None:
    """The size and mesh axes of a name such as `part(M, dp, tp)`."""
    match = _PART.fullmatch(name)
    return (_size(match[1]), tuple(match[2].split(", "))) if match else None


def _size(text: str) -> Extent:
    return Extent(int(text)) if text.isdigit() else Extent(1, (text,))


def product(extents: tuple[Extent, ...]) -> Extent:
    total = Extent()
    for extent in extents:
        total = total * extent
    return total
