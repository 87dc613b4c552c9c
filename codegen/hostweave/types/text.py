"""Parser of tensor types for the text of both IRs."""

import re

from hostweave.types.blocks import Route
from hostweave.types.group import ParameterGroup
from hostweave.types.size import SizeReader
from hostweave.types.tensor import DTYPES, Dim, DType, Partial, TensorType
from hostweave.types.zigzag import ZIGZAG, Zigzag


class Reader(SizeReader):
    def __init__(self, text: str):
        super().__init__(text)
        # Names of axes: in `M@dp,tp, K`, an axis follows the first comma, and a dim the second.
        self.axes = {axis for mesh in re.findall(r"\bmesh\(([^)]*)\)", text) for axis in re.findall(r"(\w+)\s*=", mesh)}

    def dtype(self) -> DType:
        if self.peek() not in DTYPES:
            self.fail(f"unknown dtype {self.found()}; use one of {', '.join(DTYPES)}")
        return DTYPES[self.take()]

    def dim(self) -> Dim:
        size = self.size()
        axes: list[str] = []
        if self.accept("@"):
            if self.peek() == ZIGZAG and self.peek(1) == "(":
                self.take()
                return Dim(size, Zigzag(self.enclosed(lambda: self.word("a mesh axis"))))
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

    def route(self) -> Route:
        """Parses `0[1] -> 2[0]`."""
        sent = self.integer(), self.within(self.integer, "[]")
        self.expect("->")
        return Route(*sent, self.integer(), self.within(self.integer, "[]"))

    def group(self) -> ParameterGroup | None:
        """Parses `as w_0 to w_31 of layers`. Returns None if the next token is not `as`."""
        if not self.accept("as"):
            return None
        start, first = self.at, self.word("the name of a tensor")
        self.expect("to")
        last = self.word("the name of a tensor")
        self.expect("of")
        group = ParameterGroup(first, last, self.word("the name of an array"))
        if not group.names:
            wanted = "the names must differ in one increasing number, as in w_0 to w_31"
            self.fail(f"{first} to {last} is not a range of names; {wanted}", start)
        return group

    def typed_name(self) -> tuple[str, TensorType]:
        """Parses `%x: bf16[M@x, K]`."""
        name = self.named()
        self.expect(":")
        return name, self.tensor_type()
