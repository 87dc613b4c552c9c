"""Host programs with functions: splits a program into bodies, joins bodies, and inlines calls."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from hostweave.base.errors import Location
from hostweave.base.names import claim_unique, unique_name
from hostweave.base.unchanged import is_same
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Expr, Var, with_leaves
from hostweave.host_ir.instructions.inlined import AsGiven, Returned, TakeOver


@ir.analysis
def bodies(program: ir.HostProgram) -> tuple[ir.HostProgram, ...]:
    """Every function as a separate program, callees before callers, then the main program. If there are functions, each program declares
    only its kernels and uneven sizes, and the events that the program and earlier functions need."""
    if not program.functions:
        return (program,)
    functions = [
        replace(program, name=f.name, inputs=f.inputs, outputs=f.outputs, body=f.body, functions=program.functions[:i])
        for i, f in enumerate(program.functions)
    ]
    return tuple(map(_without_unused, (*functions, program)))


def _without_unused(program: ir.HostProgram) -> ir.HostProgram:
    # Analyses inline callees, and so need the events of callees.
    events = events_of(program.body).union(*(events_of(function.body) for function in program.functions))
    return replace(
        program,
        kernels=launched(program.kernels, program.body),
        events=tuple(pool for pool in program.events if pool.name in events),
        uneven=tuple(name for name in program.uneven if name in program.symbols()),
    )


def launched(kernels: Iterable[ir.Kernel], body: tree.Body) -> tuple[ir.Kernel, ...]:
    names = {name for i in tree.walk(body) for name in tree.names(i, "launch")}
    return tuple(kernel for kernel in kernels if kernel.name in names)


def registered(kernels: dict[str, ir.Kernel], kernel: ir.Kernel, wanted: str) -> str:
    """Name of a kernel in `kernels`. Adds the kernel, with a number after `wanted` if this name is taken, unless an equal kernel exists."""
    same = next((name for name, other in kernels.items() if other == replace(kernel, name=name)), None)
    name = same or unique_name(wanted, kernels)
    kernels.setdefault(name, replace(kernel, name=name))
    return name


def events_of(body: tree.Body) -> set[str]:
    return {name for i in tree.walk(body) for name in tree.names(i, "record", "wait")}


def channels_of(program: ir.HostProgram) -> set[str]:
    return {i.channel for i in program.instructions() if isinstance(i, ir.Communication)}


def names_in(program: ir.HostProgram) -> set[str]:
    parameters = {parameter.name for parameter in (*program.inputs, *program.outputs)}
    return parameters.union(*(tree.names(i, "define", "index") for i in tree.walk(program.body)))


def without_unused_channels(program: ir.HostProgram) -> ir.HostProgram:
    used = channels_of(program)
    return replace(program, channels=tuple(channel for channel in program.channels if channel.name in used))


def joined(programs: Sequence[ir.HostProgram]) -> ir.HostProgram:
    """Inverse of `bodies`. If there are several bodies, merges equal kernels, and removes unused channels. If two event pools, or two
    different kernels, have one name, renames the second pool or kernel. A pool of streams gets the largest size that a body declares."""
    *functions, main = programs
    if not functions:
        return main
    kernels: dict[str, ir.Kernel] = {}
    events: dict[str, ir.Events] = {}
    renamed = []
    for program in programs:
        names: dict[str, str] = {}
        for kernel in program.kernels:
            others = {name for name, other in kernels.items() if other != replace(kernel, name=name)}
            names[kernel.name] = name = unique_name(kernel.name, others)
            kernels.setdefault(name, replace(kernel, name=name))
        pools: dict[str, str] = {}
        own = events_of(program.body)
        for pool in (pool for pool in program.events if pool.name in own):
            pools[pool.name] = unique_name(pool.name, events)
            events[pools[pool.name]] = replace(pool, name=pools[pool.name])

        def rename(i: tree.Instruction, kernels: dict[str, str] = names, events: dict[str, str] = pools) -> tree.Instruction:
            return tree.with_names(tree.with_names(i, kernels, "launch"), events, "record", "wait")

        renamed.append(tree.rewrite(program.body, rename))
    streams: dict[str, ir.Streams] = {}
    for declared in (pool for program in programs for pool in program.streams):
        streams[declared.name] = max(streams.get(declared.name, declared), declared, key=lambda pool: pool.count)
    main = replace(
        main,
        streams=tuple(streams.values()),
        events=tuple(events.values()),
        kernels=tuple(kernels.values()),
        body=renamed[-1],
        functions=tuple(ir.Function(p.name, p.inputs, p.outputs, body) for p, body in zip(functions, renamed[:-1], strict=True)),
    )
    return without_unused_channels(main)


def on_each_body(program: ir.HostProgram, apply: Callable[[ir.HostProgram], ir.HostProgram]) -> ir.HostProgram:
    """Applies `apply` to every body. Returns the program itself if no body changes."""
    programs = bodies(program)
    changed = [apply(body) for body in programs]
    return program if is_same(programs, changed) else joined(changed)


@ir.analysis
def inlined(program: ir.HostProgram) -> ir.HostProgram:
    """Inlines all calls, for analyses that read only the main body.

    Buffer `%h` of `@layer` becomes `%layer_h`, and `%layer_h_2` in the second call. Memory that the function does not free is deallocated
    after each call, so the next call can reuse the memory. If the function has donated inputs, its inputs become `as_given` views, and
    results in donated memory become `take_over` views. Arguments replace all other parameters.
    """
    return _Inlining(program).program() if program.functions else program


@ir.analysis
def dedupe_functions(program: ir.HostProgram) -> ir.HostProgram:
    """Inlines the first call of each function, and removes the other calls. The result serves analyses that need each instruction once."""
    return _Inlining(program, only_first=True).program() if program.functions else program


class _Inlining:
    def __init__(self, program: ir.HostProgram, only_first: bool = False):
        self.host_program, self.only_first = program, only_first
        self.inlined_functions: set[str] = set()
        self.functions = {function.name: function for function in program.functions}
        self.used_names = names_in(program)

    def program(self) -> ir.HostProgram:
        return replace(self.host_program, body=self.body(self.host_program.body), functions=())

    def body(self, body: tree.Body) -> tree.Body:
        return tree.rewrite(body, lambda i: self.called(i) if tree.names(i, "call") else None)

    def called(self, call: tree.Instruction) -> tree.Body:
        (name,) = tree.names(call, "call")
        function = self.functions[name]
        if self.only_first and function.name in self.inlined_functions:
            return ()
        self.inlined_functions.add(function.name)
        parameters = [parameter.name for parameter in (*function.inputs, *function.outputs)]
        names = dict(zip(parameters, tree.names(call, "read", "write"), strict=True))
        before, after = self.contents(function, names, call.location)
        for i in tree.walk(function.body):
            for name in tree.names(i, "define", "index"):
                names[name] = claim_unique(f"{function.name}_{name}", self.used_names)
        return (*before, *self.body(renamed((*function.body, *missing_deallocations(function.body, function.body)), names)), *after)

    def contents(self, function: ir.Function, names: dict[str, str], location: Location | None) -> tuple[tree.Body, tree.Body]:
        """Instructions before and after the inlined body. There are no instructions if no input is donated. Renames parameters in `names`
        to the new views."""
        donated = [p for p in function.outputs if p.memory]
        before: list[tree.Instruction] = []
        for kind, parameters in ((AsGiven, function.inputs if donated else ()), (TakeOver, donated)):
            for p in parameters:
                out = claim_unique(f"{function.name}_{p.name}", self.used_names)
                before.append(kind(out, names[p.name], location=location))
                names[p.name] = out
        return tuple(before), tuple(Returned(names[p.name], location=location) for p in donated)


def missing_deallocations(body: tree.Body, around: tree.Body) -> Iterator[ir.Deallocate]:
    """Yields a `deallocate` for each top-level allocation of `body` that no instruction of `around` frees."""
    freed = set[str]()
    for i in tree.walk(around):
        freed.difference_update(tree.names(i, "allocate"))  # An earlier body may have freed a buffer of this name.
        freed.update(tree.names(i, "free"))
    for i in body:
        yield from (ir.Deallocate(name, location=i.location) for name in tree.names(i, "allocate") if name not in freed)


def renamed(body: tree.Body, names: Mapping[str, str], values: Mapping[str, Expr] = MappingProxyType({})) -> tree.Body:
    """Renames the buffers and indices that are keys of `names`. Replaces the indices that are keys of `values` by expressions."""

    def index(expr: Expr) -> Expr:
        return values.get(expr.name, Var(names.get(expr.name, expr.name))) if isinstance(expr, Var) else expr

    def rename(i: tree.Instruction) -> tree.Instruction:
        return tree.with_names(tree.with_expressions(i, lambda expr: with_leaves(expr, index)), names, *tree.NAMED)

    return tree.rewrite(body, rename)
