"""Fuses a kernel with the consumer of its result. The intermediate value stays in registers.

    launch @negative_h %x -> %h
    launch @multiply_y %h, %x -> %y

becomes

    launch @negative_multiply_y %x -> %y

with `kernel @negative_multiply_y(%x) { %h = negative(%x); %y = multiply(%h, %x) }`. It also writes %h if something else reads it.

Kernels that read the same elements are fused too, if the later one can move to the first. Fusion works on launches, so it sees chunks of
loops and communication. A kernel that is not fused further states the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hostweave.analysis.def_use import Place, def_use
from hostweave.analysis.kernel_indices import Iteration, NotOneKernel, iteration
from hostweave.base.names import claim_unique
from hostweave.communication.steps import expr_of
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.types.size import product
from hostweave.types.tensor import BufferType

CHEAP = 10  # additions that take about as long as reading an element
SHORT = 1 << 14  # elements that one thread block reduces and computes sooner than a second kernel starts


def fuse_kernels(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    """Fuses kernels until none can absorb the kernel that computes its operand."""
    program = _unshared(program)
    while True:
        links = Links(program)
        launches = list(reversed(links.launches))
        free = [producer for producer in launches if links.is_free(producer)]  # before it becomes a part of a kernel that is not free
        kernels = {kernel.name: kernel for kernel in program.kernels}
        changes = _unions(links, free, kernels) or _unions(links, launches, kernels) or _neighbour(links, kernels)
        if not changes:
            program = _explained(program, links)
            return _named(replace(program, kernels=tuple(map(_without_repeats, program.kernels))))
        body = tree.eliminate_dead_code(tree.edited(program.body, changes))
        launched = dict.fromkeys(name for i in tree.walk(body) for name in tree.names(i, "launch") if name in kernels)
        program = replace(program, body=body, kernels=tuple(kernels[name] for name in launched))


# --- producers and consumers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Merged:
    """A consumer's launch that absorbs its producer, and the fused kernel."""

    consumer: Place
    launch: ir.Launch
    kernel: ir.Kernel


class Links:
    """The launches of a program, and the consumers of their results."""

    def __init__(self, program: ir.HostProgram):
        self.uses = def_use(program)
        self.types, self.root = self.uses.types, self.uses.root
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.outputs = {parameter.name for parameter in program.outputs}
        instructions = ((place, place.instruction) for place in self.uses.places)
        self.launches = {place: i for place, i in instructions if isinstance(i, ir.Launch) and i.kernel in self.kernels}

    def called(self, buffer: str) -> str:
        """Name of the value in a buffer. A chunk has the name of the whole."""
        is_chunk = buffer in self.uses.views and self.uses.chunk(self.uses.views[buffer])
        return self.root(buffer) if is_chunk else buffer

    def roots(self, instruction: tree.Instruction, *roles: str) -> set[str]:
        return {self.root(name) for name in tree.names(instruction, *roles)}

    def others(self, producer: Place, *results: str) -> list[Place]:
        """Other instructions that access these results of a launch, in program order."""
        touching = {place for result in results for place in self.uses.touches[self.root(result)]} - {producer}
        return sorted(touching, key=lambda place: place.number)

    def path(self, name: str, start: str) -> list[tree.Instruction] | None:
        """Views from `start` to `name`, or None if one of them does not cover all elements."""
        steps: list[tree.Instruction] = []
        while name != start:
            source = self.uses.roots.source(name)
            if source is None or not self.uses.views[name].instruction.shows:
                return None
            steps.append(self.uses.views[name].instruction)
            name = source
        return steps[::-1]

    # --- reasons for which kernels end ---

    def union(self, producer: Place) -> list[_Merged] | str:
        """The consumers with a launch fused into them, or the reason why its kernel ends. "" if no kernel uses its results."""
        dsts = self.launches[producer].dsts
        others = self.others(producer, *dsts)
        made = {self.root(dst) for dst in dsts}
        for other in others:
            parts = (self.roots(other.instruction, "write") - self.roots(other.instruction, "read")) & made
            if parts and not self._writes_beside(other, producer):
                return f"%{min(parts)} is written in parts"
        others = [other for other in others if self.roots(other.instruction, "read") & made]
        launches = [other for other in others if other in self.launches]
        if not launches:
            return f"{others[0].instruction.syntax.split()[0]} uses %{self._called(producer, others[0])}" if others else ""
        if launches[0].number < producer.number:
            return f"%{self._called(producer, launches[0])} is used before, in a loop"
        if len(launches) == len(others) and self.is_free(producer):  # each consumer can recompute it
            consumers, kept = launches, list[str]()
        else:
            consumers = launches[:1]
            elsewhere = {self.root(dst): [x for x in self.others(producer, dst) if x is not consumers[0]] for dst in dsts}
            kept = [dst for dst in dsts if self.root(dst) in self.outputs or elsewhere[self.root(dst)]]
        found = []
        for consumer in consumers:
            if why := self._why_apart(producer, consumer, kept):
                return why
            merged = fused_launch(self, producer, consumer, kept)
            if why := self.why_slow(merged.kernel):
                return why
            found.append(merged)
        return found

    def _writes_beside(self, other: Place, producer: Place) -> bool:
        """True if both are launches, and what both write in one buffer are slices of it, one behind the other."""
        if other not in self.launches:
            return False
        pairs = ((a, b) for a in self.launches[producer].dsts for b in self.launches[other].dsts if self.root(a) == self.root(b))
        return all(self._are_beside(a, b) or self._are_beside(b, a) for a, b in pairs)

    def _are_beside(self, first: str, second: str) -> bool:
        """True if the second view begins where the first one ends, along a dim of the same buffer."""
        one, other = (self.uses.views[name].instruction if name in self.uses.views else None for name in (first, second))
        if not isinstance(one, ir.PartialView) or not isinstance(other, ir.PartialView) or one.src != other.src:
            return False
        (dim, start, size), (other_dim, other_start, _) = one.span, other.span
        return dim == other_dim and start + expr_of(size) == other_start

    def is_free(self, producer: Place) -> bool:
        """True if all consumers of a launch's results may recompute them."""
        launch = self.launches[producer]
        return not any(self.root(dst) in self.outputs for dst in launch.dsts) and _is_free(self.kernels[launch.kernel])

    def _called(self, producer: Place, user: Place) -> str:
        """Name in the kernel of the result that `user` accesses."""
        launch = self.launches[producer]
        pairs = zip(launch.dsts, self.kernels[launch.kernel].results, strict=True)
        return next(result.name for dst, result in pairs if user in self.others(producer, dst))

    def _why_apart(self, producer: Place, consumer: Place, kept: list[str]) -> str:
        """Reason why the producer cannot move to the consumer, or the consumer cannot write the kept results. "" if it can."""
        result, first, last = self._called(producer, consumer), self.launches[producer], self.launches[consumer]
        made = {self.root(dst): dst for dst in first.dsts}
        if producer.body is not consumer.body:
            return f"another loop uses %{result}"
        if any(self.root(src) in made and self.path(src, made[self.root(src)]) is None for src in last.srcs):
            return f"parts of %{result} are used"
        between = list(tree.walk(producer.body[producer.index + 1 : consumer.index]))
        read = {self.root(src) for src in first.srcs}
        if any(read & self.roots(i, "write") for i in (*between, last)):
            return f"what %{result} is computed from is overwritten"
        if any(tree.names(i, "record", "fork") for i in between) and (kept or self._is_written_after(producer, read)):
            return f"other streams go on before %{result} is used"
        for i in between:
            if early := self.roots(i, "read", "write") & {self.root(dst) for dst in kept}:
                return f"{i.syntax.split()[0]} uses %{min(early)} before"
        return ""

    def _is_written_after(self, place: Place, roots: set[str]) -> bool:
        """True if another stream may write the buffers after an instruction has read them."""
        loops = {around for around in place.around if around.instruction.trips is not None}
        touches = (touch for root in roots for touch in self.uses.touches[root])
        later = (touch for touch in touches if touch.number > place.number or not loops.isdisjoint(touch.around))
        return any(self.roots(touch.instruction, "write") & roots for touch in later)

    def why_slow(self, kernel: ir.Kernel) -> str:
        try:
            walked = iteration(kernel)
        except NotOneKernel as reason:
            return str(reason)
        row = product(tuple(walked.sizes[index] for index in walked.reduced))
        is_fast = bool(walked.kept) or (row.is_int and int(row) <= SHORT)
        for result in kernel.results:
            if walked.reduced and walked.is_whole(result.name):
                inner = {[i for i in walked.indices[p.name] if i][-1] for p in kernel.inputs if any(walked.indices[p.name])}
                if not is_fast or not inner & set(walked.reduced):
                    return f"few threads would compute all of %{result.name}"
        costly = [op.result.name for op in kernel.ops if OPS[op.kind].cost > CHEAP]
        again = next((name for name in costly if _is_repeated(name, walked)), None)
        return f"%{again} would be computed again and again" if again else ""


def _is_free(kernel: ir.Kernel) -> bool:
    """True if recomputing the result in other kernels reads no more bytes: a cast to a dtype that is not narrower, or a cheap formula."""
    if not kernel.inputs:
        return sum(OPS[op.kind].cost for op in kernel.ops) <= CHEAP
    sizes = [parameter.type.dtype.itemsize for parameter in (*kernel.inputs, *kernel.results)]
    return len(sizes) == 2 and sizes[0] <= sizes[1] and all(op.kind == "astype" for op in kernel.ops)


def _is_repeated(name: str, walked: Iteration) -> bool:
    """True if a kernel would compute a value repeatedly, since the value lacks an index. Once per row is fine."""
    own = {index for index in walked.indices[name] if index is not None}
    return own != set(walked.sizes) and not (walked.reduced and own == set(walked.kept))


def _unions(links: Links, producers: list[Place], kernels: dict[str, ir.Kernel]) -> dict[int, tree.Instruction | tree.Body]:
    """Replacements, by instruction number, that fuse launches into all consumers of their results. Adds the fused kernels to `kernels`."""
    changes: dict[int, tree.Instruction | tree.Body] = {}
    waiting: set[int] = set()  # launches that wait until their consumers are fused; fusing into them now might be in the way
    for producer in producers:
        near = {place.number for place in (producer, *links.others(producer, *links.launches[producer].dsts))}
        if near & (changes.keys() | waiting):
            waiting.add(producer.number)
            continue
        union = links.union(producer)
        if isinstance(union, str):
            continue
        changes[producer.number] = ()
        for merged in union:
            changes[merged.consumer.number] = merged.launch
            kernels[merged.kernel.name] = merged.kernel
    return changes


# --- kernels with common operands ---


def _neighbour(links: Links, kernels: dict[str, ir.Kernel]) -> dict[int, tree.Instruction | tree.Body]:
    """Replacements that let one launch also compute a later one on the same elements. Adds the fused kernel to `kernels`."""
    for first in links.launches:
        for later in links.launches:
            if first.body is later.body and first.number < later.number and (found := _beside(links, first, later)):
                merged, moved = found
                kernels[merged.kernel.name] = merged.kernel
                names = tuple(place.instruction for place in moved)
                gone: dict[int, tree.Instruction | tree.Body] = {place.number: () for place in (*moved, later)}
                return gone | {first.number: (*names, merged.launch)}
    return {}


def _beside(links: Links, first: Place, later: Place) -> tuple[_Merged, list[Place]] | None:
    """Both launches fused at the first one, with the instructions that must move before it. None if impossible or if no read is saved."""
    one, other, types = links.launches[first], links.launches[later], links.types
    shape = types[one.dsts[0]].shape
    is_read_twice = any(src in one.srcs and types[src].shape == shape for src in other.srcs)
    if not is_read_twice or any(types[dst].shape != shape for dst in (*one.dsts, *other.dsts)):
        return None
    between = first.body[first.index + 1 : later.index]
    written = {root for i in tree.walk(between) for root in links.roots(i, "write")} | links.roots(one, "write")
    touched = {root for i in tree.walk((one, *between)) for root in links.roots(i, "read", "write")}
    waits = any(tree.names(i, "wait", "join") or (i.orders and not tree.names(i, "fork")) for i in between)
    if waits or not written.isdisjoint(links.roots(other, "read")) or not touched.isdisjoint(links.roots(other, "write")):
        return None
    needed, moved = {*other.srcs, *other.dsts}, list[Place]()
    for place in reversed([place for place in links.uses.places if place.body is first.body and first.index < place.index < later.index]):
        if not needed.isdisjoint(tree.names(place.instruction, "define")):
            if place.instruction.calls:
                return None
            moved.insert(0, place)
            needed.update(tree.names(place.instruction, "alias"))
    if any(place.instruction.calls or tree.names(place.instruction, "index") for place in moved):
        return None
    merged = fused_launch(links, first, later, list(one.dsts))
    walked = [iteration(kernel) for kernel in (links.kernels[one.kernel], links.kernels[other.kernel])]
    is_pointwise = not any(each.reduced for each in walked)
    return (merged, moved) if is_pointwise and not links.why_slow(merged.kernel) else None


# --- merging two kernels ----------------------------------------------------------------------------------------------


def fused_launch(links: Links, place: Place, into: Place, kept: list[str]) -> _Merged:
    """Fuses two launches at the consumer, with its names. The fused launch still writes the producer's kept results."""
    producer, consumer = links.launches[place], links.launches[into]
    first, second = links.kernels[producer.kernel], links.kernels[consumer.kernel]
    # buffer -> its name in the consumer
    called = {src: parameter.name for src, parameter in zip(consumer.srcs, second.inputs, strict=True)}
    taken = {*called.values(), *(op.result.name for op in second.ops)}
    renamed = {
        parameter.name: called.get(src) or claim_unique(parameter.name, taken)
        for src, parameter in zip(producer.srcs, first.inputs, strict=True)
    }
    made = {result.name: dst for result, dst in zip(first.results, producer.dsts, strict=True)}
    for name in (op.result.name for op in first.ops):
        dst = made.get(name)
        renamed[name] = called[dst] if dst in called else claim_unique(links.root(dst) if dst else name, taken)
    ops = [_renamed(op, renamed) for op in first.ops]
    inputs = {src: replace(p, name=renamed[p.name]) for src, p in zip(producer.srcs, first.inputs, strict=True)}
    handed = {links.root(dst): (dst, renamed[name]) for name, dst in made.items()}
    for src, parameter in zip(consumer.srcs, second.inputs, strict=True):
        if links.root(src) in handed:
            dst, name = handed[links.root(src)]
            ops.extend(_viewed(links.path(src, dst) or [], name, parameter.name, links.types, taken))
        else:
            inputs[src] = parameter
    returned = (*(renamed[name] for name, dst in made.items() if dst in kept), *(result.name for result in second.results))
    kernel = ir.Kernel(
        name=f"{producer.kernel} {consumer.kernel}",
        inputs=tuple(inputs.values()),
        ops=(*ops, *second.ops),
        returned=returned if len(returned) > 1 else (),
    )
    return _Merged(into, replace(consumer, kernel=kernel.name, srcs=tuple(inputs), dsts=(*kept, *consumer.dsts)), kernel)


def _without_repeats(kernel: ir.Kernel) -> ir.Kernel:
    """Removes repeated ops of a kernel, which arise if several operands absorbed the same op."""
    # equal vectors differ if one is along rows and the other along columns
    indices = iteration(kernel).indices if len(kernel.ops) > 1 else {}
    results = {result.name for result in kernel.results}
    first: dict[object, str] = {}
    names: dict[str, str] = {}
    ops = []
    for op in kernel.ops:
        renamed = op.renamed(names)
        what = replace(renamed, result=Value("", op.result.type)), indices.get(op.result.name)
        same = first.setdefault(what, op.result.name)
        if same != op.result.name and op.result.name not in results:
            names[op.result.name] = same
        else:
            ops.append(renamed)
    return replace(kernel, ops=tuple(ops))


def _renamed(op: Op, names: dict[str, str]) -> Op:
    return replace(op.renamed(names), result=replace(op.result, name=names[op.result.name]))


def _viewed(path: list[tree.Instruction], source: str, name: str, types: dict[str, BufferType], taken: set[str]) -> Iterator[Op]:
    """Views on the way to a buffer, as ops. The last one has the buffer's name."""
    for view in path:
        (out,) = tree.names(view, "view")
        value = Value(name if view is path[-1] else claim_unique(out, taken), unsharded(types[out]))
        if isinstance(view, ir.Permute):
            yield Op("permute_dims", (source,), value, (("axes", view.order),), view.location)
        else:
            yield Op("reshape", (source,), value, location=view.location)
        source = value.name


# --- names ------------------------------------------------------------------------------------------------------------


def _unshared(program: ir.HostProgram) -> ir.HostProgram:
    """Gives each launch a kernel of its own, with the launch's location and its buffers' names."""
    links = Links(program)
    kernels: list[ir.Kernel] = []
    changes: dict[int, ir.Launch] = {}
    for place, launch in links.launches.items():
        kernel = links.kernels[launch.kernel]
        if any(kernel.name == other.name for other in kernels):
            taken: set[str] = set()
            buffers = zip((*kernel.inputs, *kernel.results), (*launch.srcs, *launch.dsts), strict=True)
            names = {parameter.name: claim_unique(links.called(buffer), taken) for parameter, buffer in buffers}
            inputs = tuple(replace(p, name=names[p.name]) for p in kernel.inputs)
            ops = tuple(replace(_renamed(op, names), location=launch.location) for op in kernel.ops)
            kernel = ir.Kernel(f"{kernel.name} {len(kernels)}", inputs, ops)
            changes[place.number] = replace(launch, kernel=kernel.name)
        kernels.append(kernel)
    return replace(program, kernels=tuple(kernels), body=tree.edited(program.body, changes))


def _named(program: ir.HostProgram) -> ir.HostProgram:
    """Names kernels after their ops, and merges kernels that differ only in names."""
    first: dict[ir.Kernel, ir.Kernel] = {}
    names: dict[str, str] = {}
    taken: set[str] = set()
    for kernel in program.kernels:
        values = [p.name for p in kernel.inputs] + [op.result.name for op in kernel.ops]
        numbers = {name: str(i) for i, name in enumerate(values)}
        inputs = tuple(replace(p, name=numbers[p.name]) for p in kernel.inputs)
        returned = tuple(numbers[name] for name in kernel.returned)
        key = ir.Kernel("", inputs, tuple(_renamed(op, numbers) for op in kernel.ops), returned)
        if key not in first:
            first[key] = replace(kernel, name=claim_unique(kernel.telling_name, taken))
        names[kernel.name] = first[key].name
    body = tree.rewrite(program.body, lambda i: tree.with_names(i, names, "launch"))
    return replace(program, body=body, kernels=tuple(first.values()))


def _explained(program: ir.HostProgram, links: Links) -> ir.HostProgram:
    """Adds to each kernel the reason for which it ends."""
    reasons: dict[str, dict[str, None]] = {}
    for place, launch in links.launches.items():
        reasons.setdefault(launch.kernel, {})[str(links.union(place))] = None
    kernels = tuple(replace(k, ends="; ".join(filter(None, reasons[k.name]))) for k in program.kernels)
    return replace(program, kernels=kernels)
