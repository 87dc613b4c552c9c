"""Sizes of dims that are known at compile time only as products of names: `M`, `M/8`, `8*M*K`.

Two names stand for what follows from a size where ranks cannot share it evenly: `ceil(M/8)` is the block of each of 8 ranks, and
`part(M, x)` what this rank holds of M along mesh axis x: a block, of which the last ranks have less or nothing. Where the axis is that of
a mesh of some of the ranks, the name says so: `part(M, x on ranks 2, 3)`, or `part(M, b on mesh(a=2, b=2 of ranks 0..4))` of several
axes. A sum or difference of sizes is a name too, `(M + N)` or `(M - 2)`: what concat, pad and slices make.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import gcd, lcm, prod


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
        if not match:
            raise ValueError(f"not an extent: {value!r}; write a name, an int, or a product such as 8*M/4")
        divisor = int(match[2] or 1)
        if divisor == 0:
            raise ValueError(f"{value!r} is divided by 0; divide by at least 1")
        return product(tuple(map(_factor, re.findall(_FACTOR, match[1])))) // divisor

    @property
    def is_int(self) -> bool:
        return not self.names and self.divisor == 1

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names, and instead of a sum those in it."""
        return tuple(symbol for name in self.names for symbol in (_symbols_of_sum(name) if is_sum(name) else (name,)))

    def __add__(self, other: int | Extent) -> Extent:
        return _summed((*_terms(self), *_terms(Extent.of(other))))

    def __sub__(self, other: int | Extent) -> Extent:
        return self + -1 * Extent.of(other)

    def __rmul__(self, other: int) -> Extent:
        return self * other

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
        total = self.coefficient * prod(_bound(name, sizes) for name in self.names)
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


_MESH = r"\(\w+=\d+(?:,\w+=\d+)*(?:ofranks[\d.,]+)?\)"  # as names are read, without spaces
_FACTOR = rf"(?:\d+|ceil\(\w+/\d+\)|part\(\w+(?:,[\w.]+)+(?:{_MESH})?\)|\([\w*/+-]+\)|[A-Za-z_]\w*)"
_BLOCK = re.compile(r"ceil\((\w+)/(\d+)\)")
_PART = re.compile(r"part\((\w+), ([^()]*?)(?: on (ranks .*|mesh\(.*\)))?\)")


def _factor(text: str) -> Extent:
    """Of text without spaces."""
    if text.isdigit():
        return Extent(int(text))
    if is_sum(text):
        return _summed(_parsed_terms(text))
    text = re.sub(r"(\d)ofranks(?=\d)", r"\1 of ranks ", text.replace("onmesh(", " on mesh("))
    return Extent(1, (re.sub(r"onranks(?=\d)", " on ranks ", text).replace(",", ", "),))


def block(size: Extent, ranks: int) -> Extent:
    """What each of so many ranks holds of a size, but for the last ones: `ceil(M/8)`."""
    return Extent(-(-int(size) // ranks)) if size.is_int else Extent(1, (f"ceil({size}/{ranks})",))


def part(size: Extent, axes: tuple[str, ...], mesh: str = "") -> Extent:
    """What this rank holds of a size along mesh axes: `part(M, x)`; `mesh` is the text of one of some of the ranks."""
    return Extent(1, (f"part({', '.join((str(size), *axes))}{f' on {mesh}' if mesh else ''})",))


def block_of(name: str) -> tuple[Extent, int] | None:
    """The size and ranks of a name such as `ceil(M/8)`."""
    match = _BLOCK.fullmatch(name)
    return (_size(match[1]), int(match[2])) if match else None


def part_of(name: str) -> tuple[Extent, tuple[str, ...], str] | None:
    """The size, the mesh axes and, of a mesh of some of the ranks, the text of a name such as `part(M, dp, tp)`."""
    match = _PART.fullmatch(name)
    return (_size(match[1]), tuple(match[2].split(", ")), match[3] or "") if match else None


def _size(text: str) -> Extent:
    return Extent(int(text)) if text.isdigit() else Extent(1, (text,))


def product(extents: tuple[Extent, ...]) -> Extent:
    total = Extent()
    for extent in extents:
        total = total * extent
    return total


# --- sums -------------------------------------------------------------------------------------------------------------


def is_sum(name: str) -> bool:
    """Whether a name is one such as `(M + N)`."""
    return name.startswith("(")


def terms_of(name: str) -> tuple[tuple[int, Extent], ...]:
    """The terms of a sum, each with its sign."""
    return tuple((1 if term.coefficient > 0 else -1, term if term.coefficient > 0 else -1 * term) for term in _parsed_terms(name))


@cache
def _parsed_terms(name: str) -> tuple[Extent, ...]:
    """`(M - 2)` is M and -2."""
    found = re.findall(r"([+-]?)([^+-]+)", name.replace(" ", "")[1:-1])
    return tuple((-1 if sign == "-" else 1) * Extent.of(text) for sign, text in found)


def _symbols_of_sum(name: str) -> tuple[str, ...]:
    return tuple(symbol for term in _parsed_terms(name) for symbol in term.names)


def _bound(name: str, sizes: Mapping[str, int]) -> int:
    return sum(term.bind(sizes) for term in _parsed_terms(name)) if is_sum(name) else sizes[name]


def _terms(extent: Extent) -> tuple[Extent, ...]:
    """The products that an extent is the sum of."""
    terms: tuple[Extent, ...] = (Extent(extent.coefficient, tuple(n for n in extent.names if not is_sum(n)), extent.divisor),)
    for name in filter(is_sum, extent.names):
        terms = tuple(term * other for term in terms for other in _parsed_terms(name))
    return terms


def _summed(terms: tuple[Extent, ...]) -> Extent:
    """Their sum: a product where it is one, else a name of its own, the same for equal sums."""
    totals: dict[tuple[str, ...], Fraction] = {}
    for term in terms:
        totals[term.names] = totals.get(term.names, Fraction(0)) + Fraction(term.coefficient, term.divisor)
    left = {names: total for names, total in totals.items() if total}
    if len(left) <= 1:
        return next((Extent(total.numerator, names, total.denominator) for names, total in left.items()), Extent(0))
    fractions = [total.denominator for total in left.values() if total.denominator > 1]
    divisor = lcm(*fractions) if len(fractions) > 1 else 1  # of (M - 1)/2, which may be whole where its terms are not
    scaled = {names: total * divisor for names, total in left.items()}
    products = [Extent(total.numerator, names, total.denominator) for names, total in scaled.items()]
    products.sort(key=lambda term: (term.coefficient < 0, not term.names, term.names))
    text = str(products[0]) + "".join(f" - {-1 * term}" if term.coefficient < 0 else f" + {term}" for term in products[1:])
    return Extent(1, (f"({text})",), divisor)
