"""Writes host programs: fresh names, types of views, nested bodies. Views that say nothing are left out, equal ones are shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hostweave.errors import Location
from hostweave.fusion.extent import Extent
from hostweave.fusion.types import BufferType
from hostweave.host import ir
from hostweave.host.expr import Const, Expr

View = ir.Select | ir.Slice | ir.Section | ir.Strided | ir.Reshape | ir.Permute


class Builder:
    def __init__(self) -> None:
        self.types: dict[str, BufferType] = {}
        self.location: Location | None = None  # of the op that is being lowered
        self._taken: set[str] = set()
        self._bodies: list[list[ir.Instruction]] = [[]]
        self._permuted: dict[str, tuple[str, tuple[int, ...]]] = {}  # a permuted view -> what it was made of
        self._views: list[dict[ir.Instruction, str]] = [{}]  # a scope each, innermost last

    # --- names and bodies ---

    def name(self, wanted: str) -> str:
        """`wanted`, or with a number after it where that is taken."""
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name

    def loop_index(self) -> str:
        """i, j, k, l, then i_2 and so on."""
        free = [letter for letter in "ijkl" if letter not in self._taken]
        return self.name(free[0] if free else "i")

    def emit(self, instruction: ir.Instruction) -> None:
        self._bodies[-1].append(replace(instruction, location=self.location))

    @contextmanager
    def nested(self) -> Iterator[list[ir.Instruction]]:
        """Emits into a body of its own, which the caller puts where it belongs."""
        body: list[ir.Instruction] = []
        self._bodies.append(body)
        self._views.append({})
        yield body
        self._bodies.pop()
        self._views.pop()

    @contextmanager
    def outermost(self) -> Iterator[None]:
        """Emits before the loop that is being built: allocations and views that do not change from step to step."""
        bodies, views = self._bodies, self._views
        self._bodies, self._views = bodies[:1], views[:1]
        yield
        self._bodies, self._views = bodies, views

    def body(self) -> ir.Body:
        """The whole program, without views that nothing uses in the end."""
        body = tuple(self._bodies[0])
        used = _used(body)
        while True:
            body = ir.rewrite(body, lambda i: () if isinstance(i, ir.VIEWS) and i.out not in used else None)
            if used == (used := _used(body)):
                return body

    # --- buffers and views ---

    def parameter(self, name: str, type: BufferType) -> str:
        name = self.name(name)
        self.types[name] = type
        return name

    def allocate(self, wanted: str, type: BufferType) -> str:
        name = self.parameter(wanted, BufferType(type.dtype, type.shape))
        with self.outermost():
            self.emit(ir.Allocate(name, self.types[name]))
        return name

    def allocate_here(self, wanted: str, type: BufferType) -> str:
        """Memory that only one side of a branch needs."""
        name = self.parameter(wanted, BufferType(type.dtype, type.shape))
        self.emit(ir.Allocate(name, self.types[name]))
        return name

    def let(self, wanted: str, value: Expr) -> str:
        name = self.name(wanted)
        self.emit(ir.Let(name, value))
        return name

    def select(self, src: str, dim: int, index: Expr, wanted: str) -> str:
        return self._view(ir.Select("", src, dim, index), wanted)

    def slice(self, src: str, dim: int, index: Expr, count: Extent, wanted: str) -> str:
        if count == Extent():
            return src
        return self._view(ir.Slice("", src, dim, index, count), wanted)

    def section(self, src: str, dim: int, extent: Extent, start: Expr, wanted: str) -> str:
        if extent == self.types[src].shape[dim]:
            return src
        return self._view(ir.Section("", src, dim, extent, start), wanted)

    def strided(self, src: str, dim: int, extent: Extent, start: Expr, step: int, wanted: str) -> str:
        return self._view(ir.Strided("", src, dim, extent, start, step), wanted)

    def reshape(self, src: str, shape: tuple[Extent, ...], wanted: str) -> str:
        if shape == self.types[src].shape:
            return src
        return self._view(ir.Reshape("", src, shape), wanted)

    def permute(self, src: str, order: tuple[int, ...], wanted: str) -> str:
        if src in self._permuted:
            src, first = self._permuted[src]
            order = tuple(first[i] for i in order)
        if order == tuple(range(len(order))):
            return src
        name = self._view(ir.Permute("", src, order), wanted)
        self._permuted[name] = (src, order)
        return name

    def split(self, src: str, dim: int, outer: Extent, wanted: str) -> str:
        """Dim `dim` as two: `outer` blocks and what one holds."""
        shape = self.types[src].shape
        inner = shape[dim].divided_by(outer)
        assert inner is not None
        return self.reshape(src, (*shape[:dim], outer, inner, *shape[dim + 1 :]), wanted)

    def drop(self, src: str, dim: int, wanted: str) -> str:
        """The same without a dim of extent 1."""
        shape = self.types[src].shape
        if shape[dim] == Extent():
            return self.reshape(src, shape[:dim] + shape[dim + 1 :], wanted)
        return self.select(src, dim, Const(0), wanted)

    def is_contiguous(self, name: str) -> bool:
        return self.types[name].strides is None

    def _view(self, view: View, wanted: str) -> str:
        for scope in self._views:
            if view in scope:
                return scope[view]
        type = ir.view_type(view, self.types[view.src])
        name = self.name(wanted)
        self.types[name] = type
        self.emit(replace(view, out=name))
        self._views[-1][view] = name
        return name


def _used(body: ir.Body) -> set[str]:
    return {name for instruction in ir.walk(body) for name in ir.names(instruction, "read", "write", "alias")}
