"""Verifier rules of loops, branches, groups, streams, events, calls and meshes."""

from dataclasses import replace

from hostweave.host_ir import ir, tree
from hostweave.host_ir.rules.checker import Checker, Rule, Scope
from hostweave.types.size import LocalSize


def _group(c: Checker, i: ir.Group, scope: Scope) -> None:
    if not i.body:
        c.fail("the group is empty: remove it")
    for inner in i.body:
        if not inner.posts or inner.exchanges:
            c.current = inner
            c.fail("a group may contain only communications, no kernels: move the instruction out")
    c.inner(i.body, scope)
    transports = {c.program.channel(inner.channel).transport.name for inner in i.body if isinstance(inner, ir.Communication)}
    if len(transports) > 1:
        c.fail(f"a group must have one transport, not {' and '.join(sorted(transports))}: use a group per transport")


def _on_stream(c: Checker, i: ir.OnStream, scope: Scope) -> None:
    if scope.in_stream:
        c.fail("stream blocks cannot be nested: end the outer one first")
    c.inner(i.body, replace(scope, in_stream=True))


def _fork_or_join(c: Checker, i: ir.Fork | ir.Join, scope: Scope) -> None:
    if scope.in_stream:
        c.fail("fork and join apply to the caller's stream: move the instruction out of the stream block")
    count = next(pool.count for pool in c.program.streams if pool.name == i.stream)
    if i.first is not None and not 1 <= i.first <= count:
        c.fail(f"there are {count} streams {i.stream}, not {i.first}: give a number from 1 to {count}, or omit the number for all")


def _let(c: Checker, i: ir.Let, scope: Scope) -> None:
    c.indices.add(i.out)
    if c.depends_on_rank(i.value):
        c.rank_dependent.add(i.out)


def _for(c: Checker, i: ir.For, scope: Scope) -> None:
    c.size(i.count)
    indices, trips = set(c.indices), c.trips
    c.indices.add(i.out)
    c.trips = (*trips, i.count)
    within = replace(scope, trips=i.count) if any(isinstance(size, LocalSize) for size in i.count.atoms) else scope
    c.inner(i.body, within, is_always_run=False)
    c.indices, c.trips = indices, trips


def _if(c: Checker, i: ir.If, scope: Scope) -> None:
    condition = i.condition if c.depends_on_rank(i.condition) else scope.condition
    for body in (i.body, i.orelse):
        c.inner(body, replace(scope, condition=condition), is_always_run=False)


def _call(c: Checker, i: ir.Call, scope: Scope) -> None:
    function = next((function for function in c.program.functions if function.name == i.function), None)
    if function is None:
        known = ", ".join(f"@{function.name}" for function in c.program.functions) or "none"
        c.fail(f"there is no function @{i.function} before @{c.program.name}; known: {known}")
    for word, names, parameters in (("takes", i.srcs, function.inputs), ("gives", i.dsts, function.outputs)):
        if len(names) != len(parameters):
            c.fail(f"@{i.function} {word} {len(parameters)} buffers, not {len(names)}")
        for name, parameter in zip(names, parameters, strict=True):
            wanted = c.program.local_type(parameter)
            c.expect_type(name, wanted, f"and @{i.function} {word} {wanted} as %{parameter.name}")
            c.contiguous(name, what=", but a function needs contiguous buffers")
            if parameter.in_window and (outside := next((root for root in c.roots.all_of(name) if root not in c.windows), None)):
                c.fail(f"%{outside} is not in a window, but @{i.function} {word} %{parameter.name} in a window: use allocate_window")
    for name, parameter in zip(i.dsts, function.outputs, strict=True):
        donated = [src for src, p in zip(i.srcs, function.inputs, strict=True) if p.name == parameter.memory]
        if i.srcs.count(name) > donated.count(name) or i.dsts.count(name) > 1:
            c.fail(f"%{name} is named twice: pass a separate buffer for each output")
    if scope.in_stream:
        c.fail("a function runs on the caller's stream: move the call out of the stream block")
    if scope.condition is not None and _is_collective(function, c.program.functions):
        c.fail(f"a function with collectives is not allowed under `if {scope.condition}`, which differs between ranks")


def _is_collective(function: ir.Function, others: tuple[ir.Function, ...]) -> bool:
    called = {name for i in tree.walk(function.body) for name in tree.names(i, "call")}
    return any(i.posts == "collective" for i in tree.walk(function.body)) or any(
        _is_collective(other, others) for other in others if other.name in called
    )


def _on_mesh(c: Checker, i: ir.OnMesh, scope: Scope) -> None:
    if c.mesh is not c.program.mesh:
        c.fail("on bodies cannot be nested: end the outer one first")
    c.submesh(i.mesh)
    c.mesh = i.mesh
    c.inner(i.body, scope)
    c.mesh = c.program.mesh
    c.types.update({name: inner.defined({})[name] for inner in i.body for name in tree.names(inner, "allocate")})


RULES: dict[type[tree.Instruction], Rule] = {
    ir.Group: _group,
    ir.OnStream: _on_stream,
    ir.Fork: _fork_or_join,
    ir.Join: _fork_or_join,
    **dict.fromkeys((ir.Record, ir.Wait, ir.Mark), lambda c, i, scope: None),  # allowed on any stream
    ir.Let: _let,
    ir.For: _for,
    ir.If: _if,
    ir.Call: _call,
    ir.OnMesh: _on_mesh,
}
