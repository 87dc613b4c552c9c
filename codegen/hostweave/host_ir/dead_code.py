"""Removes unused names from host programs."""

from collections.abc import Iterable, Iterator

from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Var, leaves


def eliminate_dead_code(body: tree.Body, roles: tuple[str, ...] = ("allocate", "view")) -> tree.Body:
    """A body without what only gives names, in fields of these roles, that nothing uses, nor what they alone used."""
    while True:
        used = {name for i in tree.walk(body) for name in tree.names(i, "read", "write", "alias")}
        if "index" in roles:
            used.update(name for i in tree.walk(body) for name in indices_in(i))
        defined = ((number, tree.names(i, *roles)) for number, i in enumerate(tree.walk(body)) if not i.calls)
        unused = [number for number, names in defined if names and used.isdisjoint(names)]
        if not unused:
            return body
        body = tree.edited(body, dict.fromkeys(unused, ()))


def launched(kernels: Iterable[ir.Kernel], body: tree.Body) -> tuple[ir.Kernel, ...]:
    """The kernels that something in a body launches."""
    names = {name for i in tree.walk(body) for name in tree.names(i, "launch")}
    return tuple(kernel for kernel in kernels if kernel.name in names)


def indices_in(i: tree.Instruction) -> Iterator[str]:
    """The indices that the expressions of an instruction name."""
    return (leaf.name for expr in tree.expressions(i) for leaf in leaves(expr) if isinstance(leaf, Var))
