"""Integer expressions of host programs, over indices, rank coordinates and sizes. `/` rounds down. Divisors must be positive, so the
result of `%` is never negative."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any, ClassVar

from hostweave.types.mesh import Mesh
from hostweave.types.size import Atom


def _operator(op: str) -> Callable[[Expr, Expr | int], Expr]:
    return lambda left, right: binary(op, left, right)


@dataclass(frozen=True)
class Expr:
    """An integer, or the truth value (0 or 1) of a comparison. The operators +, -, *, // and % need an Expr as the left operand."""

    text: ClassVar[str] = ""  # format string with the names of fields
    __add__, __sub__, __mul__ = _operator("+"), _operator("-"), _operator("*")
    __floordiv__, __mod__ = _operator("/"), _operator("%")
    equals, less = _operator("=="), _operator("<")

    def __str__(self) -> str:
        return self.text.format(**vars(self))


@dataclass(frozen=True)
class Const(Expr):
    value: int
    text = "{value}"


@dataclass(frozen=True)
class Var(Expr):
    """A loop index, or an integer that a `let` defines."""

    name: str
    text = "%{name}"


@dataclass(frozen=True)
class Coordinate(Expr):
    """Coordinate of this rank along an axis of a mesh: the mesh of the enclosing `on` body, otherwise the program's mesh."""

    axis: str
    text = "rank.{axis}"


@dataclass(frozen=True)
class Rank(Expr):
    """Number of this rank in the program."""

    text = "rank"


@dataclass(frozen=True)
class Symbol(Expr):
    """A symbolic size: a name, `ceil(M/8)`, `local(M, x)` (size of the rank's block of M along x) or `first(M, x)` (start of the block)."""

    size: Atom
    text = "{size}"


OPERATORS: dict[str, tuple[int, Callable[[Any, Any], int]]] = {  # precedence, and Python function
    "==": (1, operator.eq),
    "!=": (1, operator.ne),
    "<": (1, operator.lt),
    "<=": (1, operator.le),
    ">": (1, operator.gt),
    ">=": (1, operator.ge),
    "+": (2, operator.add),
    "-": (2, operator.sub),
    "*": (3, operator.mul),
    "/": (3, operator.floordiv),
    "%": (3, operator.mod),
}
COMPARISONS = {op for op, (precedence, _) in OPERATORS.items() if precedence == 1}


@dataclass(frozen=True)
class Binary(Expr):
    op: str
    left: Expr
    right: Expr

    def __str__(self) -> str:
        precedence = OPERATORS[self.op][0]
        # A chain of *, / and % is hard to read without parentheses, unless all its operators are *. The parser refuses `0 < %i < 3`.
        left = _parenthesized(
            self.left, lambda op: OPERATORS[op][0] < precedence or (OPERATORS[op][0] == precedence != 2 and not op == self.op == "*")
        )
        right = _parenthesized(self.right, lambda op: OPERATORS[op][0] <= precedence)
        return f"{left} {self.op} {right}"


def _parenthesized(expr: Expr, needed: Callable[[str], bool]) -> str:
    return f"({expr})" if isinstance(expr, Binary) and needed(expr.op) else str(expr)


def opposite(condition: Expr) -> Expr:
    opposites = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
    if isinstance(condition, Binary) and condition.op in opposites:
        return Binary(opposites[condition.op], condition.left, condition.right)
    return Binary("==", condition, Const(0))


def binary(op: str, left: Expr | int, right: Expr | int) -> Expr:
    """Builds `left op right` in simplified form: 2 + 3 becomes 5, x * 1 becomes x, and 5 - x == 0 becomes x == 5."""
    left = Const(left) if isinstance(left, int) else left
    right = Const(right) if isinstance(right, int) else right
    if isinstance(left, Const) and isinstance(right, Const) and OPERATORS[op][0] > 1 and not (op in "/%" and right.value == 0):
        return Const(int(OPERATORS[op][1](left.value, right.value)))
    if (op in "+-" and right == Const(0)) or (op in "*/" and right == Const(1)):
        return left
    if (op == "+" and left == Const(0)) or (op == "*" and left == Const(1)):
        return right
    match op, left, right:
        case "+", Binary("*", Binary("/", whole, divisor), factor), Binary("%", other, modulus) if whole == other:
            if divisor == factor == modulus:
                return whole
        case "==" | "!=", Binary("-", Const(value), index), Const(other) if value >= other:
            return Binary(op, index, Const(value - other))
    if (op == "%" and right == Const(1)) or (op == "*" and Const(0) in (left, right)):
        return Const(0)
    return Binary(op, left, right)


def divisor_of(expr: Expr) -> int:
    """A number that divides all values of an expression."""
    match expr:
        case Const(value):
            return value
        case Binary("*", left, right):
            return divisor_of(left) * divisor_of(right)
        case Binary("+" | "-", left, right):
            return gcd(divisor_of(left), divisor_of(right))
    return 1


Range = tuple[int | None, int | None]  # lower and upper bound; None if unknown


def range_of(expr: Expr, variables: Mapping[str, Range], mesh: Mesh) -> Range:
    """Range of an expression on the ranks of `mesh`."""
    match expr:
        case Const(value):
            return value, value
        case Var(name):
            return variables.get(name, (None, None))
        case Coordinate(axis):
            return 0, mesh.axis_size(axis) - 1
        case Rank():
            return min(mesh.all_ranks), max(mesh.all_ranks)
        case Symbol():
            return 0, None
        case Binary(op, left, right):
            return _combined(op, range_of(left, variables, mesh), range_of(right, variables, mesh))
    return None, None


def _combined(op: str, a: Range, b: Range) -> Range:
    (low, high), (b_low, b_high) = a, b
    if op == "+":
        return _sum(low, b_low), _sum(high, b_high)
    if op == "-":
        return _sum(low, None if b_high is None else -b_high), _sum(high, None if b_low is None else -b_low)
    if op == "%":
        if low is not None and low >= 0 and high is not None and b_low is not None and high < b_low:
            return low, high
        return 0, None if b_high is None else b_high - 1
    if op in "*/" and low is not None and low >= 0 and b_low is not None and b_low >= 0:
        if op == "*":
            return low * b_low, None if high is None or b_high is None else high * b_high
        return 0 if b_high is None else low // max(b_high, 1), None if high is None else high // max(b_low, 1)
    return None, None


def narrowed(range: Range, op: str, value: int) -> Range:
    """Range of an expression for which the comparison `op` with a constant holds."""
    low, high = range
    if op == "!=":
        return _sum(low, int(low == value)), _sum(high, -int(high == value))
    least = {">": value + 1, ">=": value, "==": value}.get(op)
    most = {"<": value - 1, "<=": value, "==": value}.get(op)
    return max((x for x in (low, least) if x is not None), default=None), min((x for x in (high, most) if x is not None), default=None)


def remainder(expr: Expr, divisor: int, range: Range) -> Expr:
    """`expr % divisor`, given the range of `expr`. The operand of the result is at least 0, if the range has a lower bound.

    For i from 1 to 7, `(i + 7) % 8` becomes `i - 1`. For i from 0 to 7, `(i - 1) % 8` becomes `(i + 7) % 8`. For i from 0 to 1,
    `(i + 1) % 2` becomes `1 - i`. For i from 2 to 7, `i % 2` does not change.
    """
    low, high = range
    if low is None or divisor <= 0:
        return binary("%", expr, divisor)
    if low == high:
        return Const(low % divisor)
    whole, has_constant = low // divisor, any(isinstance(term, Const) for _, term in _terms(expr))
    is_within = high is not None and high // divisor == whole
    expr = _moved(expr, -whole * divisor) if whole < 0 or (whole and (is_within or has_constant)) else expr
    if is_within:
        return expr
    match expr, range:
        case Binary("+", Var() | Coordinate() as index, Const(1)), (1, 2) if divisor == 2:
            return Const(1) - index
    return binary("%", expr, divisor)


def _moved(expr: Expr, distance: int) -> Expr:
    """`expr + distance`, with one constant: `i - 1` moved by 8 is `i + 7`."""
    terms = _terms(expr)
    constant = distance + sum(sign * term.value for sign, term in terms if isinstance(term, Const))
    added, subtracted = ([term for sign, term in terms if sign == wanted and not isinstance(term, Const)] for wanted in (1, -1))
    first, *others = added or [Const(constant)]
    result = reduce(Expr.__sub__, subtracted, reduce(Expr.__add__, others, first))
    return result if not added else result + constant if constant >= 0 else result - -constant


def _terms(expr: Expr) -> list[tuple[int, Expr]]:
    """Terms of a sum, each with its sign."""
    match expr:
        case Binary("+" | "-" as op, left, right):
            return _terms(left) + [(sign if op == "+" else -sign, term) for sign, term in _terms(right)]
    return [(1, expr)]


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def simpler(expr: Expr, range: Callable[[Expr], Range]) -> Expr:
    """Simplifies an expression, given the ranges of its parts: `i / 2 == 0` becomes `i < 2`."""
    low, high = range(expr)
    if low is not None and low == high:
        return Const(low)
    match expr:
        case Binary("==" | "!=" as op, Binary("/", left, Const(divisor)), Const(0)) if (
            divisor > 0 and (low := range(left)[0]) is not None and low >= 0
        ):
            return simpler(Binary("<" if op == "==" else ">=", left, Const(divisor)), range)
        case Binary("!=" | ">=" | "<=", _, _) if isinstance(decided := simpler(opposite(expr), range), Const):
            return Const(1 - decided.value)
        case Binary("==" | "<" | ">" as op, left, right):
            (low, high), (right_low, right_high) = map(range, (left, right) if op != ">" else (right, left))
            below = high is not None and right_low is not None and high < right_low
            above = low is not None and right_high is not None and low > right_high - (op != "==")
            if below or above:
                return Const(int(below and op != "=="))
            if op == "==" and low is not None and low == high == right_low == right_high:
                return Const(1)
        case Binary("%", left, Const(divisor)) if range(left) == range(expr):
            return simpler(left, range)
    if isinstance(expr, Binary):
        return binary(expr.op, simpler(expr.left, range), simpler(expr.right, range))
    return expr


def with_leaves(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Replaces each part of `expr` that is not Binary."""
    if isinstance(expr, Binary):
        return binary(expr.op, with_leaves(expr.left, change), with_leaves(expr.right, change))
    return change(expr)


def leaves(expr: Expr) -> list[Expr]:
    """Parts of `expr` that are not Binary, from left to right."""
    return leaves(expr.left) + leaves(expr.right) if isinstance(expr, Binary) else [expr]


def divisions(expr: Expr) -> list[tuple[Binary, Expr]]:
    """Quotients and remainders in `expr`, each with its divisor."""
    if not isinstance(expr, Binary):
        return []
    return [*([(expr, expr.right)] if expr.op in ("/", "%") else []), *divisions(expr.left), *divisions(expr.right)]
