"""Removes unused names from host programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from hostweave.host_ir import ir
from hostweave.host_ir.expr import Expr, Var, leaves

MEMORY = (ir.Allocate, ir.View)


def eliminate_dead_code(body: ir.Body, kinds: tuple[type[ir.Instruction], ...] = MEMORY) -> ir.Body:
    """A body without the instructions of these kinds whose names nothing uses, nor what they alone used."""
    while True:
        used = {name for i in ir.walk(body) for name in ir.names(i, "read", "write", "alias")}
        if ir.Let in kinds:
            used.update(name for i in ir.walk(body) for name in indices_in(i))
        unused = [i for i in ir.walk(body) if isinstance(i, kinds) and used.isdisjoint(ir.names(i, "define", "index"))]
        if not unused:
            return body
        body = ir.edited(body, {id(i): () for i in unused})


def launched(kernels: Iterable[ir.Kernel], body: ir.Body) -> tuple[ir.Kernel, ...]:
    """The kernels that something in a body launches."""
    names = {i.kernel for i in ir.walk(body) if isinstance(i, ir.Launch)}
    return tuple(kernel for kernel in kernels if kernel.name in names)


def indices_in(i: ir.Instruction) -> Iterator[str]:
    """The indices that the expressions of an instruction name."""
    for expr in (getattr(i, f.name) for f in fields(i)):
        if isinstance(expr, Expr):
            yield from (leaf.name for leaf in leaves(expr) if isinstance(leaf, Var))
