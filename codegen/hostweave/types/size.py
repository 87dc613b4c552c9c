"""Symbolic sizes of dims. A `Size` is the product of an int and factors, divided by an int without remainder: `M`, `M/8`, `8*M*K`.

A factor is the name of a symbol, or a node that contains other sizes:

- a sum such as `(M + N)` or `(M - 2)`, from concat, pad and slices;
- `ceil(M/8)`, the size of a full shard if 8 ranks cannot split M evenly;
- `local(M, x)`, the size of this rank's shard of M along mesh axis x; the last shards may be smaller or empty;
- `first(M, x)`, the index in M at which this rank's shard begins.

For a mesh of some ranks, the text is `local(M, x on ranks 2, 3)` or, with several axes, `local(M, b on mesh(a=2, b=2 of ranks 0..4))`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from math import gcd, lcm, prod
from operator import index
from typing import ClassVar

from hostweave.base.errors import ParseError, ProgramError
from hostweave.base.lexer import MAX_INT, Lexer
from hostweave.types.mesh import MAX_RANKS, Mesh, RankSizes, Sizes, listed_ranks, local_range


@dataclass(frozen=True)
class Size:
    """coefficient * product(factors) / divisor, in lowest terms. Factors are sorted, so that `M*K` equals `K*M`."""

    coefficient: int = 1
    factors: tuple[Factor, ...] = ()
    divisor: int = 1

    def __post_init__(self) -> None:
        if self.divisor == 1 and len(self.factors) <= (self.coefficient != 0):  # in lowest terms already
            return
        common = gcd(self.coefficient, self.divisor) or 1
        object.__setattr__(self, "coefficient", self.coefficient // common)
        object.__setattr__(self, "divisor", self.divisor // common if self.coefficient else 1)
        object.__setattr__(self, "factors", tuple(sorted(self.factors, key=str)) if self.coefficient else ())

    @staticmethod
    def of(value: int | str | Size) -> Size:
        """A size from an int, a name, or text such as `M/8`, `8*M` and `K*M/4`. Raises ValueError for any other text, and TypeError for any
        other object."""
        if isinstance(value, Size):
            return value
        return _parsed(value) if isinstance(value, str) else Size(index(value))

    @property
    def is_int(self) -> bool:
        return not self.factors and self.divisor == 1

    @property
    def factor(self) -> Factor | None:
        """The factor if the size is a single factor, None otherwise."""
        return self.factors[0] if self.coefficient == self.divisor == len(self.factors) == 1 else None

    @property
    def name(self) -> str | None:
        """The symbol if the size is a single symbol, None otherwise."""
        return self.factor if isinstance(self.factor, str) else None

    @cached_property
    def atoms(self) -> tuple[Atom, ...]:
        """Factors that are not sums, including those inside sums."""
        return tuple(atom for factor in self.factors for atom in (factor.atoms if isinstance(factor, Sum) else (factor,)))

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        return tuple(name for atom in self.atoms for name in ((atom,) if isinstance(atom, str) else atom.size.symbols))

    def is_uneven(self, ranks: int, uneven: Container[str]) -> bool:
        """True if shards may differ in size: for an int that `ranks` does not divide, and for a single factor with a symbol in `uneven`."""
        if self.is_int:
            return int(self) % ranks > 0
        return ranks > 1 and self.factor is not None and any(name in uneven for name in self.symbols)

    def ceil_div(self, ranks: int) -> Size:
        """Size of a full shard, ceil(size / ranks)."""
        return Size(-(-int(self) // ranks)) if self.is_int else Size(1, (CeilDiv(self, ranks),))

    def __add__(self, other: int | Size) -> Size:
        return summed((self, Size.of(other)))

    def __sub__(self, other: int | Size) -> Size:
        return self + -1 * Size.of(other)

    def __int__(self) -> int:
        if not self.is_int:
            raise ValueError(f"{self} is not known at compile time")
        return self.coefficient

    def __mul__(self, other: int | Size) -> Size:
        other = Size.of(other)
        return Size(self.coefficient * other.coefficient, self.factors + other.factors, self.divisor * other.divisor)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Size:
        """Exact quotient. Divisibility is checked by `bind`."""
        return self if other == 1 else Size(self.coefficient, self.factors, self.divisor * other)

    def divided_by(self, other: Size) -> Size | None:
        """Quotient of this size by `other`. None if a factor of `other` is not a factor of this size."""
        factors = list(self.factors)
        for factor in other.factors:
            if factor not in factors:
                return None
            factors.remove(factor)
        return Size(self.coefficient * other.divisor, tuple(factors), self.divisor * other.coefficient)

    def bind(self, sizes: Sizes) -> int:
        """Value of the size if the symbols have the values `sizes`. Factors such as `local(M, x)` need `RankSizes`. Raises ValueError if
        the value is not an int."""
        total = self.coefficient * prod(bound(factor, sizes) for factor in self.factors)
        if total % self.divisor:
            raise ValueError(f"{self}: {self.divisor} does not divide {total}")
        return total // self.divisor

    def estimate(self, value_of: Callable[[Atom], Fraction | int]) -> Fraction:
        """Value of the size, possibly a fraction, from the values of its atoms."""
        total = Fraction(self.coefficient, self.divisor)
        for factor in self.factors:
            total *= sum(term.estimate(value_of) for term in factor.terms) if isinstance(factor, Sum) else value_of(factor)
        return total

    def at(self, sizes: Mapping[str, int]) -> Size:
        """Replaces symbols by numbers, except in factors such as `local(M, x)`."""

        def of_factor(factor: Factor) -> Size:
            if isinstance(factor, Sum):
                return summed(term.at(sizes) for term in factor.terms)
            return Size(sizes[factor]) if isinstance(factor, str) and factor in sizes else Size(1, (factor,))

        return product((Size(self.coefficient, (), self.divisor), *map(of_factor, self.factors)))

    def replaced(self, values: Mapping[Factor, Size]) -> Size:
        remaining = Size(self.coefficient, tuple(factor for factor in self.factors if factor not in values), self.divisor)
        return product((remaining, *(values[factor] for factor in self.factors if factor in values)))

    def __str__(self) -> str:
        factors = ([str(self.coefficient)] if self.coefficient != 1 or not self.factors else []) + list(map(str, self.factors))
        return "*".join(factors) + (f"/{self.divisor}" if self.divisor != 1 else "")


@dataclass(frozen=True, slots=True)
class CeilDiv:
    size: Size
    ranks: int

    def ranks_in(self, program: Mesh) -> int:
        return self.ranks

    def bind(self, sizes: Sizes) -> int:
        return -(-self.size.bind(sizes) // self.ranks)

    def __str__(self) -> str:
        return f"ceil({self.size}/{self.ranks})"


@dataclass(frozen=True, slots=True)
class LocalSize:
    """Size of this rank's shard along mesh axes."""

    size: Size
    axes: tuple[str, ...]
    mesh: Mesh | None = None  # None: the program's mesh
    word: ClassVar[str] = "local"  # keyword of the text form

    def mesh_in(self, program: Mesh) -> Mesh:
        return self.mesh or program

    def ranks_in(self, program: Mesh) -> int:
        return self.mesh_in(program).size_of(self.axes)

    def bind(self, sizes: Sizes) -> int:
        return len(self.indices(sizes))

    def indices(self, sizes: Sizes) -> range:
        if not isinstance(sizes, RankSizes):
            raise KeyError(str(self))
        mesh = self.mesh_in(sizes.mesh)
        # the value for a rank outside the mesh is not used
        rank_in_group = mesh.rank_in_group(sizes.rank, self.axes) if sizes.rank in mesh.all_ranks else 0
        return local_range(self.size.bind(sizes), mesh.size_of(self.axes), rank_in_group)

    def __str__(self) -> str:
        on = ""
        if self.mesh:
            on = f" on {self.mesh if len(self.mesh.axes) > 1 or self.mesh.members is None else f'ranks {listed_ranks(self.mesh.members)}'}"
        return f"{self.word}({', '.join((str(self.size), *self.axes))}{on})"


@dataclass(frozen=True, slots=True)
class FirstIndex(LocalSize):
    """Global index at which this rank's shard begins."""

    word: ClassVar[str] = "first"

    def bind(self, sizes: Sizes) -> int:
        return self.indices(sizes).start


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum of products. The terms have different factors."""

    terms: tuple[Size, ...]

    @property
    def atoms(self) -> tuple[Atom, ...]:
        return tuple(atom for term in self.terms for atom in term.atoms)

    def bind(self, sizes: Sizes) -> int:
        return sum(term.bind(sizes) for term in self.terms)

    def __str__(self) -> str:
        first, *others = self.terms
        return f"({first}{''.join(f' - {-1 * term}' if term.coefficient < 0 else f' + {term}' for term in others)})"


Share = CeilDiv | LocalSize  # size or start of a shard of a dim that may be split unevenly
Atom = str | Share
Factor = Atom | Sum


def bound(factor: Factor, sizes: Sizes) -> int:
    return sizes[factor] if isinstance(factor, str) else factor.bind(sizes)


@cache
def _parsed(text: str) -> Size:
    try:
        reader = SizeReader(text)
        size = reader.size()
        if not reader.peek() and "#" not in text:
            return size
    except ParseError:
        pass
    raise ValueError(f"not a size: {text!r}; write a name, an int, or a product such as 8*M/4")


def product(sizes: tuple[Size, ...]) -> Size:
    return prod(sizes, start=Size())


def _terms(size: Size) -> tuple[Size, ...]:
    """Expands a size to a sum of products."""
    terms: tuple[Size, ...] = (Size(size.coefficient, tuple(f for f in size.factors if not isinstance(f, Sum)), size.divisor),)
    for factor in size.factors:
        if isinstance(factor, Sum):
            terms = tuple(term * other for term in terms for other in factor.terms)
    return terms


def summed(sizes: Iterable[Size]) -> Size:
    """Canonical sum: equal sums compare equal. A sum of several terms is a `Sum` factor."""
    totals: dict[tuple[Factor, ...], Fraction] = {}
    for term in (term for size in sizes for term in _terms(size)):
        totals[term.factors] = totals.get(term.factors, Fraction(0)) + Fraction(term.coefficient, term.divisor)
    nonzero = {factors: total for factors, total in totals.items() if total}
    if len(nonzero) <= 1:
        return next((Size(total.numerator, factors, total.denominator) for factors, total in nonzero.items()), Size(0))
    fractions = [total.denominator for total in nonzero.values() if total.denominator > 1]
    divisor = lcm(*fractions) if len(fractions) > 1 else 1  # (M - 1)/2 may be an integer although M/2 is not
    scaled = {factors: total * divisor for factors, total in nonzero.items()}
    products = [Size(total.numerator, factors, total.denominator) for factors, total in scaled.items()]
    products.sort(key=lambda term: (term.coefficient < 0, not term.factors, tuple(map(str, term.factors))))
    return Size(1, (Sum(tuple(products)),), divisor)


class SizeReader(Lexer):
    """Parses sizes, and the meshes in the text of sizes."""

    def size(self) -> Size:
        """Parses a size: `M`, `8*M/4` or `(M + 2)*K`."""
        start = self.at
        size = self._product()
        if self.accept("/"):
            size = size // self._divisor(size, start)
        if max(abs(size.coefficient), size.divisor) > MAX_INT:
            self.fail(f"{size} is more than {MAX_INT}, the largest size", start)
        return size

    def _divisor(self, size: Size, start: int) -> int:
        divisor = self.integer()
        if divisor == 0:
            self.fail(f"{size} is divided by 0; divide by at least 1", start)
        return divisor

    def _product(self) -> Size:
        size = self._factor()
        while self.accept("*"):
            size = size * self._factor()
        return size

    def _factor(self) -> Size:
        if self.peek().isdigit():
            return Size(self.integer())
        if not self.accept("("):
            return Size(1, (self.atom(),))
        with self.inside():
            terms = [-1 * self.size() if self.accept("-") else self.size()]
            while self.peek() in ("+", "-"):
                terms.append((1 if self.take() == "+" else -1) * self.size())
            self.expect(")")
        return summed(terms)

    def atom(self, what: str = "a size") -> Atom:
        """Parses a name, `ceil(M/8)`, `local(M, x)` or `first(M/2, x)`."""
        start, name = self.at, self.word(what)
        if name not in ("ceil", "local", "first") or not self.accept("("):
            return name
        with self.inside():
            size = self._product() if name == "ceil" else self.size()
        while name == "ceil" and self.accept("/"):  # the last divisor is the number of ranks
            ranks = self._divisor(size, start)
            if self.accept(")"):
                return CeilDiv(size, ranks)
            size = size // ranks
        self.expect(",")
        axes, mesh = self.mesh_axes(), None
        if self.accept("on"):
            mesh = self.mesh() if self.peek() == "mesh" else self._line(axes[0])
        self.expect(")")
        return (LocalSize if name == LocalSize.word else FirstIndex)(size, axes, mesh)

    def mesh(self) -> Mesh:
        """Parses a mesh: `mesh(dp=2, tp=4)`. A mesh of some ranks is `mesh(x=2 of ranks 4, 5)` or `mesh(x=4 of ranks 4..8)`."""
        start = self.at
        self.expect("mesh")
        self.expect("(")
        axes: list[tuple[str, int]] = []
        members = None
        while not self.accept(")"):
            if self.peek(1) != "=" and self.accept("of"):
                members = self._ranks()
                self.expect(")")
                break
            if axes:
                self.expect(",")
            name = self.word("the name of a mesh axis")
            self.expect("=")
            axes.append((name, self.integer()))
        mesh = self._mesh_of(tuple(axes), members, start)
        if len(mesh.all_ranks) != mesh.size:
            self.fail(f"{mesh} has {mesh.size} positions for {len(mesh.all_ranks)} ranks; list every rank once")
        return mesh

    def mesh_axes(self) -> tuple[str, ...]:
        return self.separated(lambda: self.word("a mesh axis"))

    def _line(self, axis: str) -> Mesh:
        """Parses `ranks 2, 3` as a mesh with one axis."""
        start, ranks = self.at, self._ranks()
        return self._mesh_of(((axis, len(ranks)),), ranks, start)

    def _mesh_of(self, axes: tuple[tuple[str, int], ...], members: tuple[int, ...] | None, start: int) -> Mesh:
        try:
            return Mesh(axes, members)
        except ProgramError as error:
            self.fail(str(error).removeprefix(f"{error.location}: "), start)

    def _ranks(self) -> tuple[int, ...]:
        """Parses `ranks 0, 1` or `ranks 4..8`."""
        self.expect("ranks")
        first, *others = self.separated(self.integer)
        if others or not self.accept(".."):
            return (first, *others)
        end = self.integer()
        if not first < end <= MAX_RANKS:
            self.fail(f"a range of ranks must end above its start, and at most at {MAX_RANKS}, not {first}..{end}", self.at - 1)
        return tuple(range(first, end))
