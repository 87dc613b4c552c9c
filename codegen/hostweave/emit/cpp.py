"""C++ for sizes, integer expressions, literals and dtypes."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd

from hostweave.host_ir.expr import (
    OPERATORS,
    Binary,
    Const,
    Coordinate,
    Expr,
    Range,
    Rank,
    Symbol,
    Var,
    binary,
    narrowed,
    range_of,
    remainder,
)
from hostweave.types.mesh import Mesh
from hostweave.types.size import Atom, Factor, Size, Sum
from hostweave.types.tensor import DTYPES, BufferType, DType

MeshAxis = tuple[Mesh, str]  # a mesh, and one of its axes

CUDA_TYPES = {name: f"CUDA_R_{name[1:]}{name[0].upper()}" for name in DTYPES} | {
    "bf16": "CUDA_R_16BF",
    "f8e4m3": "CUDA_R_8F_E4M3",
    "f8e5m2": "CUDA_R_8F_E5M2",
    "bool": "CUDA_R_8U",
}


def quoted(text: str) -> str:
    """C++ string literal. Octal escapes replace double quotes, backslashes, and all bytes that are not printable ASCII. Assembly strings
    have the same escapes."""
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'\\"' else f"\\{b:03o}" for b in os.fsencode(text)) + '"'


# Numbers that f32 rounds to 0 and to infinity.
_LARGEST_ZERO, _LEAST_INFINITY = 2.0**-150, 2.0**128 - 2.0**103


def number(value: float, dtype: DType) -> str:
    """C++ of a constant of a dtype, for use in the compute type."""
    if dtype.kind == "bool":
        return Word("true" if value else "false")
    if dtype.kind != "float":
        return "INT64_MIN" if value == -(2**63) else f"{int(value)}{'u' if value >= 2**63 else ''}"
    if math.isnan(value):
        return Word("NAN")
    if dtype.name != "f64" and abs(value) <= _LARGEST_ZERO:  # Compilers reject literals that f32 cannot represent.
        value = math.copysign(0, value)
    if math.isinf(value) or (dtype.name != "f64" and abs(value) >= _LEAST_INFINITY):
        return Word("INFINITY") if value > 0 else "-INFINITY"
    return repr(float(value)) + ("" if dtype.name == "f64" else "f")


def compute_type(dtype: DType) -> str:
    """C++ type in which elements of a dtype are computed: float for 8-bit and 16-bit floats, otherwise the type of the dtype itself."""
    if dtype.kind == "float":
        return "double" if dtype.name == "f64" else "float"
    return dtype.cpp


class Word(str):
    """C++ that needs no parentheses because it is a single token, such as a local variable or a literal."""


@dataclass(frozen=True)
class Literal:
    """Value for the field `T` of an op's C++ template: `{T:0.5}` becomes the literal 0.5 in the compute type of a dtype."""

    dtype: DType

    def __format__(self, spec: str) -> str:
        return number(float(spec), self.dtype)


@dataclass(frozen=True)
class CFunction:
    """Value for the field `std` of an op's C++ template: `{std:exp}` becomes `expf` if the dtype is computed in float, otherwise `exp`."""

    dtype: DType

    def __format__(self, spec: str) -> str:
        return spec + ("f" if compute_type(self.dtype) == "float" else "")


def accumulator_type(dtype: DType) -> str:
    """C++ type of a reduction's accumulator: 64 bits for integers and bools, and the compute type for floats."""
    return {"float": compute_type(dtype), "int": "int64_t"}.get(dtype.kind, "uint64_t")


@dataclass
class CppExprPrinter:
    """Prints sizes and integer expressions as C++.

    - `sizes` maps symbolic sizes to C++. Factors of a product are in the order of `sizes`.
    - `multiples` has known divisors of sizes. If 8 divides M, `M*K/8` is printed as `M / 8 * K`.
    - `variables` maps loop indices and `let` variables to C++ names.
    - `coordinates` maps a mesh and an axis to the C++ name of this rank's coordinate. The axis `""` stands for the rank itself.
    - `mesh` is the mesh of the axes in printed expressions.
    """

    mesh: Mesh
    sizes: Mapping[Atom, str]
    multiples: Mapping[Factor, int]
    variables: dict[str, str] = field(default_factory=dict)
    coordinates: dict[MeshAxis, str] = field(default_factory=dict)
    ranges: dict[str, Range] = field(default_factory=dict)  # ranges of `variables`
    depths: Mapping[str, int] = field(default_factory=dict)  # symbolic size -> number of tensors of a parameter group
    program: Mesh = field(init=False)
    calls_runtime: bool = False  # True if the C++ uses hw::mod or hw::floor_div
    used: set[str] = field(default_factory=set)  # C++ names of sizes and coordinates that were printed since `noting` began

    def __post_init__(self) -> None:
        self.program = self.mesh

    @contextmanager
    def noting(self) -> Iterator[set[str]]:
        """Collects the C++ names of sizes and coordinates that the `with` block prints outside of nested `noting` blocks."""
        outer, self.used = self.used, set()
        yield self.used
        self.used = outer

    def noted(self, name: str) -> str:
        self.used.add(name)
        return name

    def size(self, dim_size: Size) -> str:
        """C++ of a size, such as `M / 8 * 3 * (K / 4)`. C++ evaluates the product from left to right, and every division is exact. A sum is
        printed without parentheses."""
        if isinstance(dim_size.factor, Sum):
            return self.sum(dim_size.factor)
        factors: list[str] = []
        divisor = dim_size.divisor
        order = list(self.sizes)
        for factor in sorted(dim_size.factors, key=lambda factor: order.index((factor.atoms if isinstance(factor, Sum) else (factor,))[0])):
            own = gcd(divisor, self.multiples.get(factor, 1))
            divisor //= own
            size = f"({self.sum(factor)})" if isinstance(factor, Sum) else self.noted(self.sizes[factor])
            text = f"{size} / {own}" if own > 1 else size
            factors.append(f"({text})" if own > 1 and factors else text)
        if dim_size.coefficient != 1 or not factors:
            factors.insert(" / " in factors[0] if factors else 0, str(dim_size.coefficient))
        return " * ".join(factors) + (f" / {divisor}" if divisor > 1 else "")

    def key(self, size: Size, atoms: Sequence[Atom]) -> tuple[object, ...]:
        """Key of a size. The C++ of sizes with equal keys differs only in names."""

        def of(factor: Factor) -> tuple[object, ...]:
            own = tuple(self.key(term, atoms) for term in factor.terms) if isinstance(factor, Sum) else (atoms.index(factor),)
            return (*own, gcd(size.divisor, self.multiples.get(factor, 1)))

        return size.coefficient, tuple(sorted(map(of, size.factors), key=repr)), size.divisor

    def sum(self, factor: Sum) -> str:
        text = ""
        for term in factor.terms:
            is_added = term.coefficient > 0
            text += (f" {'+' if is_added else '-'} " if text else "" if is_added else "-") + self.size(term if is_added else -1 * term)
        return text

    def factor(self, size: Size) -> str:
        """C++ of a size as the last factor of a product. Sums, differences and quotients are in parentheses."""
        text = self.size(size)
        return f"({text})" if {*"/+-"} & {*text.split()} else text

    def first_factor(self, size: Size) -> str:
        """C++ of a size as the first factor of a product, or as a dividend."""
        return self.factor(size) if isinstance(size.factor, Sum) else self.size(size)

    def shape(self, sizes: Iterable[Size]) -> str:
        return "{" + ", ".join(map(self.size, sizes)) + "}"

    def strided(self, type: BufferType) -> str:
        shape = self.shape(type.shape)
        return shape if type.strides is None else f"hw::Strided({shape}, {self.shape(type.strides)})"

    def define(self, variable: str, text: str, range: Range) -> str:
        """Binds a loop index or a `let` variable to its C++ name and its range."""
        self.variables[variable], self.ranges[variable] = text, range
        return text

    @contextmanager
    def given(self, condition: Expr) -> Iterator[None]:
        """Assumes that a condition holds inside the `with` block. A comparison with a constant narrows the range of a variable."""
        before = dict(self.ranges)
        match self.known(condition):
            case Binary(op, Var(name), Const(value)):
                self.ranges[name] = narrowed(self.ranges.get(name, (None, None)), op, value)
        yield
        self.ranges = before

    def rank(self) -> str:
        return self.noted(self.coordinates[self.program, ""])

    @contextmanager
    def on(self, mesh: Mesh) -> Iterator[None]:
        """Prints coordinates inside the `with` block as coordinates of `mesh`."""
        outer, self.mesh = self.mesh, mesh
        yield
        self.mesh = outer

    def expr(self, expr: Expr) -> str:
        return self._text(self.known(expr))

    def _text(self, expr: Expr) -> str:
        match expr:
            case Const(value):
                return str(value)
            case Var(name):
                return self.variables[name]
            case Coordinate(axis):
                return self.noted(self.coordinates[self.mesh, axis])
            case Rank():
                return self.rank()
            case Symbol(size):
                return self.noted(self.sizes[size])
            case Binary("%", left, right):
                return self._remainder(left, right)
            case Binary("/", left, right):
                low, _ = self.range(left)
                if low is not None and low >= 0:
                    return f"{self._operand(left, 3)} / {self._operand(right, 4)}"
                self.calls_runtime = True
                return f"hw::floor_div({self._text(left)}, {self._text(right)})"
            case Binary(op, left, right):
                precedence = OPERATORS[op][0]
                return f"{self._operand(left, precedence)} {op} {self._operand(right, precedence + (op != '+'))}"
        raise TypeError(f"not an expression: {expr!r}")

    def known(self, expr: Expr) -> Expr:
        """Replaces the sizes in `depths` by their values, and folds constants and remainders of known ranges."""
        match expr:
            case Symbol(size) if size in self.depths:
                return Const(self.depths[str(size)])
            case Binary(op, left, right):
                left, right = self.known(left), self.known(right)
                if isinstance(left, Const) and isinstance(right, Const) and OPERATORS[op][0] == 1:
                    return Const(int(OPERATORS[op][1](left.value, right.value)))
                if op == "%" and isinstance(right, Const):
                    return remainder(left, right.value, self.range(left))
                return binary(op, left, right)
        return expr

    def times(self, expr: Expr, size: Size) -> str:
        """C++ of an index times a size, such as `p * (M / 8 * K)`. Empty if the product is 0."""
        expr = self.known(expr)
        if expr == Const(0) or size == Size(0):
            return ""
        if isinstance(expr, Const):
            return self.first_factor(size * expr.value)
        index = self._text(expr)
        if size == Size():
            return index
        return f"{f'({index})' if isinstance(expr, Binary) else index} * {self.factor(size)}"

    def _operand(self, expr: Expr, precedence: int) -> str:
        text = self._text(expr)
        return f"({text})" if isinstance(expr, Binary) and OPERATORS[expr.op][0] < precedence else text

    def _remainder(self, left: Expr, right: Expr) -> str:
        """C++ of a remainder that is never negative, unlike the remainder of C++ for a negative left operand."""
        low, _ = self.range(left)
        if low is None or low < 0:
            self.calls_runtime = True
            return f"hw::mod({self._text(left)}, {self._text(right)})"
        return f"{self._operand(left, 3)} % {self._operand(right, 4)}"

    def range(self, expr: Expr) -> Range:
        return range_of(self.known(expr), self.ranges, self.mesh)
