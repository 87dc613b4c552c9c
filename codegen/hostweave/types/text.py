"""The types in the text of both IRs: sizes, dims, meshes, tensors."""

from __future__ import annotations

import re

from hostweave.base.errors import ProgramError
from hostweave.base.lexer import Lexer
from hostweave.types.mesh import MAX_RANKS, Mesh
from hostweave.types.rank_sizes import mesh_of_part
from hostweave.types.size import Extent, part_of
from hostweave.types.tensor import DTYPES, MAX_SIZE, Dim, DType, Partial, TensorType


class Reader(Lexer):
    def __init__(self, text: str):
        super().__init__(text)
        # `M@dp,tp, K`: a comma goes on with axes where a mesh axis follows, so the axes must be known before the dims.
        self.axes = {axis for mesh in re.findall(r"\bmesh\(([^)]*)\)", text) for axis in re.findall(r"(\w+)\s*=", mesh)}

    def extent(self) -> Extent:
        start = self.at
        text = self.factor()
        while self.peek() in ("*", "/"):
            text += self.take() + self.factor()
        return self.as_extent(text, start)

    def as_extent(self, text: str, start: int) -> Extent:
        """The extent of a text that began at that token."""
        try:
            extent = Extent.of(text)
            for name in extent.names:
                if part_of(name):
                    mesh_of_part(name, Mesh())
        except ValueError as error:
            self.fail(str(error), start)
        if max(extent.coefficient, extent.divisor) > MAX_SIZE:
            self.fail(f"{extent} is more than {MAX_SIZE}, the largest size", start)
        return extent

    def factor(self) -> str:
        """A number, a name, `ceil(M/8)`, `part(M, x)` or `(M + 2)`."""
        text = str(self.integer()) if self.peek().isdigit() else self.take()
        if text in ("ceil", "part") and self.accept("("):
            text += "("
        if text.endswith("("):
            while text.count(")") < text.count("("):
                text += str(self.integer()) if self.peek().isdigit() else self.take()
        return text

    def dtype(self) -> DType:
        if self.peek() not in DTYPES:
            self.fail(f"unknown dtype {self.found()}; one of {', '.join(DTYPES)}")
        return DTYPES[self.take()]

    def dim(self) -> Dim:
        extent = self.extent()
        axes: list[str] = []
        if self.accept("@"):
            axes.append(self.word("a mesh axis"))
            while self.peek() == "," and self.peek(1) in self.axes:
                self.take()
                axes.append(self.take())
        return Dim(extent, tuple(axes))

    def tensor_type(self) -> TensorType:
        dtype = self.dtype()
        self.expect("[")
        dims = self.list_of(self.dim, "]")
        partial = None
        if self.accept("partial"):
            self.expect("(")
            op = self.word("a reduction")
            self.expect(",")
            over = [self.word("a mesh axis")]
            while self.accept(","):
                over.append(self.word("a mesh axis"))
            self.expect(")")
            partial = Partial(op, tuple(over))
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
        try:
            mesh = Mesh(tuple(axes), members)
        except ProgramError as error:
            self.fail(str(error), start)
        if len(mesh.all_ranks) != mesh.size:
            self.fail(f"{mesh} has {mesh.size} places for {len(mesh.all_ranks)} ranks; give every rank one")
        return mesh

    def _ranks(self) -> tuple[int, ...]:
        """`ranks 0, 1` or `ranks 4..8`."""
        self.expect("ranks")
        ranks = [self.integer()]
        if self.accept(".."):
            end = self.integer()
            if not ranks[0] < end <= MAX_RANKS:
                self.fail(f"ranks go from one to a greater one, {MAX_RANKS} at most, not from {ranks[0]} to {end}", self.at - 1)
            return tuple(range(ranks[0], end))
        while self.accept(","):
            ranks.append(self.integer())
        return tuple(ranks)
