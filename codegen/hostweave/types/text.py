"""The types in the text of both IRs: sizes, dims, meshes, tensors."""

from __future__ import annotations

import re

from hostweave.base.errors import ParseError, ProgramError
from hostweave.base.lexer import Lexer
from hostweave.types.mesh import MAX_RANKS, Mesh
from hostweave.types.routes import Route
from hostweave.types.size import Atom, CeilDiv, LocalSize, Size, summed
from hostweave.types.tensor import DTYPES, MAX_SIZE, Dim, DType, Partial, TensorType


def parse_size(text: str) -> Size:
    """The size that a text says and nothing else. Raises ValueError."""
    try:
        reader = Reader(text)
        size = reader.size()
        if not reader.peek() and "#" not in text:
            return size
    except ParseError:
        pass
    raise ValueError(f"not a size: {text!r}; write a name, an int, or a product such as 8*M/4")


class Reader(Lexer):
    def __init__(self, text: str):
        super().__init__(text)
        # `M@dp,tp, K`: a comma goes on with axes where a mesh axis follows, so the axes must be known before the dims.
        self.axes = {axis for mesh in re.findall(r"\bmesh\(([^)]*)\)", text) for axis in re.findall(r"(\w+)\s*=", mesh)}

    def size(self) -> Size:
        """`M`, `8*M/4` or `(M + 2)*K`"""
        start = self.at
        size = self._product()
        if self.accept("/"):
            size = size // self._divisor(size, start)
        if max(abs(size.coefficient), size.divisor) > MAX_SIZE:
            self.fail(f"{size} is more than {MAX_SIZE}, the largest size", start)
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
        """A name, `ceil(M/8)` or `local(M, x)`."""
        start, name = self.at, self.word(what)
        if name not in ("ceil", "local") or not self.accept("("):
            return name
        with self.inside():
            size = self._product()
        if name == "ceil":
            self.expect("/")
            ranks = self._divisor(size, start)
            self.expect(")")
            return CeilDiv(size, ranks)
        self.expect(",")
        axes, mesh = self.mesh_axes(), None
        if self.accept("on"):
            mesh = self.mesh() if self.peek() == "mesh" else self._line(axes[0])
        self.expect(")")
        return LocalSize(size, axes, mesh)

    def dtype(self) -> DType:
        if self.peek() not in DTYPES:
            self.fail(f"unknown dtype {self.found()}; one of {', '.join(DTYPES)}")
        return DTYPES[self.take()]

    def dim(self) -> Dim:
        size = self.size()
        axes: list[str] = []
        if self.accept("@"):
            axes.append(self.word("a mesh axis"))
            while self.peek() == "," and self.peek(1) in self.axes:
                self.take()
                axes.append(self.take())
        return Dim(size, tuple(axes))

    def tensor_type(self) -> TensorType:
        dtype, dims, partial = self.dtype(), self.enclosed(self.dim, "[]"), None
        if self.accept("partial"):
            self.expect("(")
            op = self.word("a reduction")
            self.expect(",")
            partial = Partial(op, self.mesh_axes())
            self.expect(")")
        return TensorType(dtype, dims, partial, self.mesh() if self.accept("on") else None)

    def mesh(self) -> Mesh:
        """`mesh(dp=2, tp=4)`, or `mesh(x=2 of ranks 4, 5)` and `mesh(x=4 of ranks 4..8)` of some ranks of the program."""
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
            self.fail(f"{mesh} has {mesh.size} places for {len(mesh.all_ranks)} ranks; give every rank one")
        return mesh

    def route(self) -> Route:
        """`0[1] -> 2[0]`"""
        numbers = []
        for sign in ("->", ""):
            numbers.append(self.integer())
            self.expect("[")
            numbers.append(self.integer())
            self.expect("]")
            if sign:
                self.expect(sign)
        return Route(*numbers)

    def mesh_axes(self) -> tuple[str, ...]:
        return self.separated(lambda: self.word("a mesh axis"))

    def typed_name(self) -> tuple[str, TensorType]:
        """`%x: bf16[M@x, K]`"""
        name = self.named()
        self.expect(":")
        return name, self.tensor_type()

    def _line(self, axis: str) -> Mesh:
        """`ranks 2, 3`, along one axis"""
        start, ranks = self.at, self._ranks()
        return self._mesh_of(((axis, len(ranks)),), ranks, start)

    def _mesh_of(self, axes: tuple[tuple[str, int], ...], members: tuple[int, ...] | None, start: int) -> Mesh:
        try:
            return Mesh(axes, members)
        except ProgramError as error:
            self.fail(str(error), start)

    def _ranks(self) -> tuple[int, ...]:
        """`ranks 0, 1` or `ranks 4..8`."""
        self.expect("ranks")
        first, *others = self.separated(self.integer)
        if others or not self.accept(".."):
            return (first, *others)
        end = self.integer()
        if not first < end <= MAX_RANKS:
            self.fail(f"ranks go from one to a greater one, {MAX_RANKS} at most, not from {first} to {end}", self.at - 1)
        return tuple(range(first, end))
