"""Moves memory into windows if one-sided transfers access it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from hostweave.host_ir import ir, tree
from hostweave.host_ir.builder import Builder
from hostweave.host_ir.expr import Const
from hostweave.types.size import CeilDiv, Factor, LocalSize, Size, product
from hostweave.types.tensor import BufferType


def with_reached(program: ir.HostProgram, functions: Mapping[str, ir.HostProgram]) -> ir.HostProgram:
    """Keeps `in_window` only for parameters that peers access, in this program or in called functions."""
    named = [name for i in tree.walk(program.body) for name in tree.names(i, "remote_read", "remote_write")]
    for i in tree.walk(program.body):
        for function in tree.names(i, "call"):
            pairs = zip(tree.names(i, "read"), functions[function].inputs, strict=True)
            named += [name for name, parameter in pairs if parameter.in_window]
    roots = roots_of(program.body, named)
    inputs, outputs = (
        tuple(replace(p, in_window=p.in_window and p.name in roots) for p in parameters) for parameters in (program.inputs, program.outputs)
    )
    return replace(program, inputs=inputs, outputs=outputs)


def roots_of(body: tree.Body, names: Iterable[str]) -> set[str]:
    roots = tree.AliasRoots()
    for i in tree.walk(body):
        roots.define(i)
    return {root for name in names for root in roots.all_of(name)}


def _window(b: Builder, name: str, type: BufferType) -> Iterator[tree.Instruction]:
    """Yields the allocation of a window that has the same size on all ranks. If ranks need different sizes, also yields views. The last
    view, `name`, is the part that this rank needs."""
    count, mesh = product(type.shape), b.present_mesh
    shared = [local for local in count.factors if isinstance(local, LocalSize)]
    largest: dict[Factor, Size] = {local: Size(1, (CeilDiv(local.size, local.ranks_in(mesh)),)) for local in shared}
    if not largest:
        yield ir.AllocateWindow(name, type)
        return
    window, own = b.name(f"{name}_window"), b.name(f"{name}_elements")
    yield ir.AllocateWindow(window, BufferType(type.dtype, (count.replaced(largest),)))
    yield ir.Slice(own, window, 0, count, Const(0))
    yield ir.Reshape(name, own, type.shape)


def with_windows(b: Builder) -> tree.Body:
    """Moves memory into windows if peers access it, or if a put needs a registered source. All ranks allocate each window, even if only an
    `on` body uses it."""
    body = b.body()

    def in_window(i: ir.OneSided) -> tuple[str, ...]:
        return tree.names(i, "read" if b.channels[i.channel].transport.puts_from_windows else "remote_read", "remote_write")

    roots = roots_of(body, (name for i in tree.walk(body) if isinstance(i, ir.OneSided) for name in in_window(i)))
    on_some: list[tree.Instruction] = []
    made: set[tree.Instruction] = set()

    def moved(i: tree.Instruction) -> tree.Instruction | tree.Body | None:
        if i.ranks and (windows := [inner for inner in tree.bodies(i)[0] if inner in made]):
            on_some.extend(windows)
            i = tree.with_bodies(i, lambda inner: tuple(each for each in inner if each not in made))
            return i if any(tree.bodies(i)) else ()
        (name,) = tree.names(i, "allocate") or ("",)
        if name not in roots:
            return None
        window = tuple(replace(each, location=i.location) for each in _window(b, name, i.defined({})[name]))
        made.update(window)
        return window

    rest = tree.rewrite(body, moved)
    return (*on_some, *rest)
