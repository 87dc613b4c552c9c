"""Fuses a kernel with the kernel that reads its result. The intermediate value then stays in registers.

    launch @negative_h %x -> %h
    launch @multiply_y %h, %x -> %y

becomes

    launch @negative_multiply_y %x -> %y

with `kernel @negative_multiply_y(%x) { %h = negative(%x); %y = multiply(%h, %x) }`. If other instructions read %h, the fused kernel also
writes %h, or each reader recomputes %h.

Also merges two kernels that read the same elements, if the later launch can move to the earlier launch. The field `ends` of each kernel
states why the kernel was not fused further.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from hostweave.analysis.def_use import Place, def_use
from hostweave.analysis.kernel_indices import Iteration, NotOneKernel, iteration
from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.communication.dataflow import expr_of
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const
from hostweave.options import Options
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType

CHEAP = 10  # number of additions that take as long as a read of one element
MAX_SHORT_COLUMN = 8  # longest column, in elements, that one thread reads twice in less time than a second launch takes
MAX_SHORT_ROW = 1 << 14  # longest row, in elements, that one thread block reads in less time than a second launch takes
_number = attrgetter("number")


def fuse_kernels(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    links = Links(_unshared(program))
    # Kernels whose results are cheap to recompute come first.
    while links.fuse(links.is_free) or links.fuse() or links.join():
        pass
    return finished(links)


def finished(links: "Links") -> ir.HostProgram:
    program = _explained(links.fused(), links)
    return _named(replace(program, kernels=tuple(map(_without_repeats, program.kernels))))


# --- producers and consumers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FusedLaunch:
    consumer: Place
    launch: ir.Launch
    kernel: ir.Kernel


class Links:
    """The launches of a program, and the accesses to their buffers. `fuse` and `join` change launches and accesses. `fused` returns the new
    program."""

    def __init__(self, program: ir.HostProgram):
        self._program, self.uses = program, def_use(program)
        self.types, self.root = self.uses.types, self.uses.root
        self.kernels = {kernel.name: kernel for kernel in program.kernels}
        self.outputs = {parameter.name for parameter in program.outputs}
        self.launches = {place: launch for place, launch in self.uses.instructions(ir.Launch) if launch.kernel in self.kernels}
        self._touches = dict(self.uses.touches)
        self._signals = [place.number for place in self.uses.places if tree.names(place.instruction, "record", "fork")]
        self._waits = [place.number for place in self.uses.places if _waits(place.instruction)]
        self._changes: dict[int, tree.Instruction | tree.Body] = {}  # number of an instruction -> its replacement
        self._tried: dict[tuple[ir.Launch, ir.Launch, tuple[str, ...]], _FusedLaunch | str] = {}
        self._moved: dict[int, int] = {}  # number of a definition -> number of the launch before which the definition moves

    def fuse(self, fits: Callable[[Place], bool] = lambda _: True) -> bool:
        """Fuses launches for which `fits` is true into their consumers, from last to first. Returns True if a launch was fused."""
        before = len(self.launches)
        waiting = sorted((place for place in self.launches if fits(place)), key=_number)
        while waiting:
            producer = waiting.pop()  # The fused kernel comes next, because a consumer may absorb the fused kernel too.
            if isinstance(union := self.union(producer), str):
                continue
            self._change(producer, None)
            for merged in union:
                self._change(merged.consumer, merged)
            waiting += [merged.consumer for merged in union if fits(merged.consumer)]
        return len(self.launches) < before

    def join(self) -> bool:
        """Merges launches that read the same elements, at the position of the earlier launch. Returns True if launches were merged."""
        before = len(self.launches)
        while near := self._joined():
            self.fuse(near.__contains__)
        return len(self.launches) < before

    def _joined(self) -> set[Place]:
        """Merges two launches. Returns the places that access memory of the merged launch. Empty if no two launches can be merged."""
        readers: dict[str, dict[Place, None]] = {}
        for place, launch in self.launches.items():
            for src in launch.srcs:
                readers.setdefault(src, {})[place] = None
        for first, launch in self.launches.items():
            others = {place for src in launch.srcs for place in readers[src] if place.body is first.body and place.number > first.number}
            for later in sorted(others, key=_number):
                if found := _beside(self, first, later):
                    merged, moved = found
                    self._change(first, merged)
                    self._change(later, None)
                    self._moved.update((place.number, min(first.number, self._moved.get(place.number, first.number))) for place in moved)
                    return set(self._accesses(self.roots(merged.launch, "read", "write")))
        return set()

    def _change(self, place: Place, merged: _FusedLaunch | None) -> None:
        launch = merged.launch if merged else None
        old, new = (self.uses.roots_of(i, "read", "write") if i else {} for i in (self.launches[place], launch))
        for root in old.keys() - new.keys():
            self._touches[root] = [touch for touch in self._touches[root] if touch is not place]
        for root in new.keys() - old.keys():
            self._touches[root] = sorted([*self._touches[root], place], key=_number)
        self._changes[place.number] = launch or ()
        if merged:
            self.launches[place], self.kernels[merged.kernel.name] = merged.launch, merged.kernel
        else:
            del self.launches[place]

    def fused(self) -> ir.HostProgram:
        edits = self._changes | dict.fromkeys(self._moved, ())
        for number, before in sorted(self._moved.items(), reverse=True):
            now = edits[before]
            edits[before] = (self.uses.places[number].instruction, *(now if isinstance(now, tuple) else (now,)))
        body = tree.eliminate_dead_code(tree.edited(self._program.body, edits))
        launched = dict.fromkeys(name for i in tree.walk(body) for name in tree.names(i, "launch") if name in self.kernels)
        return replace(self._program, body=body, kernels=tuple(self.kernels[name] for name in launched))

    def is_before(self, place: Place, other: Place) -> bool:
        """True if the instruction at `place` is before the launch at `other`, or was moved before this launch."""
        return self._moved.get(place.number, place.number) <= other.number

    def instruction(self, place: Place) -> tree.Instruction:
        return self.launches.get(place, place.instruction)

    def called(self, buffer: str) -> str:
        """Name of a buffer. A chunk with a variable index has the name of the whole buffer."""
        chunk = self.uses.chunk(self.uses.views[buffer]) if buffer in self.uses.views else None
        return self.root(buffer) if chunk and not isinstance(chunk[1], Const) else buffer

    def roots(self, instruction: tree.Instruction, *roles: str) -> set[str]:
        return {self.root(name) for name in tree.names(instruction, *roles)}

    def others(self, producer: Place, *results: str) -> list[Place]:
        """Instructions except `producer` that access the given results of `producer`, in program order."""
        return [place for place in self._accesses({self.root(result) for result in results}) if place is not producer]

    def _accesses(self, roots: set[str]) -> list[Place]:
        touching = {place for root in roots for place in self._touches.get(root, ())}
        return sorted(touching, key=_number)

    def waits(self, first: Place, last: Place) -> bool:
        """True if an instruction between two places may wait for other streams."""
        return bisect_left(self._waits, first.number) < bisect_left(self._waits, last.number)

    def between(self, first: Place, last: Place, roots: set[str]) -> list[tree.Instruction]:
        """Instructions between two places that access these alias roots."""
        return [self.instruction(place) for place in self._accesses(roots) if first.number < place.number < last.number]

    def path(self, name: str, start: str) -> list[tree.Instruction] | None:
        """Views from `start` to `name`. None if there is no path, or if a view omits elements of its source."""
        views: list[tree.Instruction] = []
        while name != start:
            source = self.uses.roots.source(name)
            if source is None or not self.uses.views[name].instruction.shows:
                return None
            views.append(self.uses.views[name].instruction)
            name = source
        return views[::-1]

    # --- reasons why kernels are not fused ---

    def union(self, producer: Place) -> list[_FusedLaunch] | str:
        """Fused launches of all consumers if each may recompute the results, otherwise the fused launch of the first consumer.

        Returns the reason as text if nothing can be fused.
        """
        dsts = self.launches[producer].dsts
        others = self.others(producer, *dsts)
        made = {self.root(dst) for dst in dsts}
        for other in others:
            i = self.instruction(other)
            partly = (self.roots(i, "write") - self.roots(i, "read")) & made
            if partly and not tree.names(i, "guard") and not self._writes_beside(other, producer):
                return f"%{min(partly)} is written in parts"
        others = [other for other in others if self.roots(self.instruction(other), "read") & made]
        launches = [other for other in others if other in self.launches]
        if not launches:
            return f"{others[0].instruction.syntax.split()[0]} uses %{self._called(producer, others[0])}" if others else ""
        if launches[0].number < producer.number:
            return f"%{self._called(producer, launches[0])} is used before, in a loop"
        if len(launches) == len(others) and self.is_free(producer):
            consumers, kept = launches, list[str]()
        else:
            consumers = launches[:1]
            elsewhere = {self.root(dst): [x for x in self.others(producer, dst) if x is not consumers[0]] for dst in dsts}
            kept = [dst for dst in dsts if self.root(dst) in self.outputs or elsewhere[self.root(dst)]]
        found = []
        for consumer in consumers:
            if why := self._why_apart(producer, consumer, kept):
                return why
            if isinstance(merged := self.merged(producer, consumer, kept), str):
                return merged
            found.append(merged)
        return found

    def merged(self, producer: Place, consumer: Place, kept: list[str]) -> _FusedLaunch | str:
        """The consumer's launch after fusion with the producer, or the reason why the kernels do not fuse."""
        given = self.launches[producer], self.launches[consumer], tuple(kept)
        if given not in self._tried:
            merged = fused_launch(self, producer, consumer, kept)
            self._tried[given] = self.why_slow(merged.kernel) or merged
        return self._tried[given]

    def _writes_beside(self, other: Place, producer: Place) -> bool:
        """True if `other` is a launch that writes the slices next to the producer's slices, in every buffer that both launches write."""
        if other not in self.launches:
            return False
        pairs = ((a, b) for a in self.launches[producer].dsts for b in self.launches[other].dsts if self.root(a) == self.root(b))
        return all(self._are_beside(a, b) or self._are_beside(b, a) for a, b in pairs)

    def _are_beside(self, first: str, second: str) -> bool:
        """True if the second view begins at the end of the first view, along one dim of one buffer."""
        one, other = (self.uses.views[name].instruction if name in self.uses.views else None for name in (first, second))
        if not isinstance(one, ir.PartialView) or not isinstance(other, ir.PartialView) or one.src != other.src:
            return False
        (dim, start, size), (other_dim, other_start, _) = one.span, other.span
        return dim == other_dim and start + expr_of(size) == other_start

    def is_free(self, producer: Place) -> bool:
        """True if each consumer may recompute the results of a launch."""
        launch = self.launches[producer]
        return not any(self.root(dst) in self.outputs for dst in launch.dsts) and _is_free(self.kernels[launch.kernel])

    def _called(self, producer: Place, user: Place) -> str:
        """Name of the result that `user` accesses, in the producer's kernel."""
        launch = self.launches[producer]
        pairs = zip(launch.dsts, self.kernels[launch.kernel].results, strict=True)
        return next(result.name for dst, result in pairs if user in self.others(producer, dst))

    def _why_apart(self, producer: Place, consumer: Place, kept: list[str]) -> str:
        """Reason why the producer cannot move to the consumer, or cannot write the kept results at the consumer. "" if there is no
        reason."""
        result, first, last = self._called(producer, consumer), self.launches[producer], self.launches[consumer]
        made = {self.root(dst): dst for dst in first.dsts}
        if producer.body is not consumer.body:
            return f"another loop uses %{result}"
        if any(self.root(src) in made and self.path(src, made[self.root(src)]) is None for src in last.srcs):
            return f"parts of %{result} are used"
        read, written = {self.root(src) for src in first.srcs}, {self.root(dst) for dst in kept}
        if any(read & self.roots(i, "write") for i in (*self.between(producer, consumer, read), last)):
            return f"an operand of %{result} is overwritten"
        signals = bisect_left(self._signals, producer.number) < bisect_left(self._signals, consumer.number)
        if signals and (kept or self._is_written_after(producer, read)):
            return f"other streams continue before %{result} is used"
        for i in self.between(producer, consumer, written):
            if early := self.roots(i, "read", "write") & written:
                return f"{i.syntax.split()[0]} uses %{min(early)} before the next kernel"
        return ""

    def _is_written_after(self, place: Place, roots: set[str]) -> bool:
        """True if an instruction may write the buffers after `place`. A later iteration of a loop counts."""
        loops = {around for around in place.around if around.instruction.trips is not None}
        later = (touch for touch in self._accesses(roots) if touch.number > place.number or not loops.isdisjoint(touch.around))
        return any(self.roots(self.instruction(touch), "write") & roots for touch in later)

    def why_slow(self, kernel: ir.Kernel) -> str:
        try:
            walked = iteration(kernel)
        except NotOneKernel as reason:
            return str(reason)
        row = product(tuple(walked.sizes[index] for index in walked.reduced))
        is_fast = bool(walked.kept) or (row.is_int and int(row) <= MAX_SHORT_ROW)
        is_column = bool(walked.kept) and row.is_int and int(row) <= MAX_SHORT_COLUMN
        for result in kernel.results:
            if walked.reduced and walked.is_whole(result.name):
                inner = {[i for i in walked.indices[p.name] if i][-1] for p in kernel.inputs if any(walked.indices[p.name])}
                if not is_fast or not (is_column or inner & set(walked.reduced)):
                    return f"few threads would compute all of %{result.name}"
        costly = [op.result.name for op in kernel.ops if OPS[op.kind].cost > CHEAP and not _divides_by_constant(op)]
        again = next((name for name in costly if _is_repeated(name, walked)), None)
        return f"%{again} would be computed repeatedly" if again else ""


def _is_free(kernel: ir.Kernel) -> bool:
    """True if a recomputation takes about as long as a load of the result, or less. Casts that do not narrow qualify. Cheap
    formulas qualify if they have no inputs, or inputs of fewer bytes than the result."""
    inputs, ops, (result, *others) = kernel.inputs, kernel.ops, (result.type for result in kernel.results)
    if len(inputs) == 1 and not others and all(OPS[op.kind].is_cast for op in ops):
        return inputs[0].type.dtype.itemsize <= result.dtype.itemsize
    whole = sum(p.type.dtype.itemsize for p in inputs if product(p.type.shape) == product(result.shape))
    is_short = not others and result.dtype.kind == "float" and 0 < whole < result.dtype.itemsize
    is_formula = is_short and not any(OPS[op.kind].combine for op in ops)
    return (is_formula or not inputs) and sum(OPS[op.kind].cost for op in ops) <= CHEAP


def _is_repeated(name: str, walked: Iteration) -> bool:
    """True if a kernel would compute a value repeatedly: the value lacks an index of the kernel, and the indices of the value are not
    exactly the kept indices."""
    own = {index for index in walked.indices[name] if index is not None}
    return own != set(walked.sizes) and not (walked.reduced and own == set(walked.kept))


def _divides_by_constant(op: Op) -> bool:
    """True for an integer division that a multiplication and a shift can compute."""
    return op.kind == "floor_divide" and op.result.type.dtype.kind in ("int", "uint") and not isinstance(op.operands[1], str)


def _waits(i: tree.Instruction) -> bool:
    return bool(tree.names(i, "wait", "join") or (i.orders and not tree.names(i, "fork")))


# --- kernels that read the same elements ------------------------------------------------------------------------------


def _beside(links: Links, first: Place, later: Place) -> tuple[_FusedLaunch, list[Place]] | None:
    """Merges `later` into `first`. Returns the merged launch, and the definitions that must move before the first launch."""
    one, other, types = links.launches[first], links.launches[later], links.types
    walked, walked_later = (iteration(links.kernels[launch.kernel]) for launch in (one, other))
    whole = product(tuple(walked.sizes.values()))
    is_read_twice = any(src in one.srcs and product(types[src].shape) == whole for src in other.srcs)
    if not is_read_twice or len({types[dst].shape for dst in (*one.dsts, *other.dsts)}) > 1:
        return None
    if _sizes(walked) != _sizes(walked_later) or any(walked.is_whole(result.name) for result in links.kernels[one.kernel].results):
        return None
    read, written = links.roots(other, "read"), links.roots(other, "write")
    if any(read & links.roots(i, "write") for i in (one, *links.between(first, later, read))) or links.waits(first, later):
        return None
    if any(written & links.roots(i, "read", "write") for i in (one, *links.between(first, later, written))):
        return None
    needed, moved = {*other.srcs, *other.dsts}, list[Place]()
    for place in reversed(links.uses.places[first.number + 1 : later.number]):
        is_needed = place.body is first.body and not needed.isdisjoint(tree.names(place.instruction, "define"))
        if is_needed and not links.is_before(place, first):
            if place.instruction.calls:
                return None
            moved.insert(0, place)
            needed.update(tree.names(place.instruction, "alias"))
    if any(place.instruction.calls or tree.names(place.instruction, "index") for place in moved):
        return None
    merged = links.merged(first, later, list(one.dsts))
    return None if isinstance(merged, str) else (merged, moved)


def _sizes(walked: Iteration) -> list[list[Size]]:
    return [[walked.sizes[index] for index in indices] for indices in (walked.kept, walked.reduced)]


# --- merging two kernels ----------------------------------------------------------------------------------------------


def fused_launch(links: Links, place: Place, into: Place, kept: list[str]) -> _FusedLaunch:
    """Fuses the launch at `place` into the launch at `into`.

    The fused kernel also writes the `kept` results, and has the value names of the consumer's kernel.
    """
    producer, consumer = links.launches[place], links.launches[into]
    first, second = links.kernels[producer.kernel], links.kernels[consumer.kernel]
    # buffer -> name of its value in the consumer's kernel
    called = {src: parameter.name for src, parameter in zip(consumer.srcs, second.inputs, strict=True)}
    taken = {*called.values(), *(op.result.name for op in second.ops)}
    given = tuple(zip(producer.srcs, first.inputs, strict=True))
    renamed = {parameter.name: called.get(src) or claim_unique(parameter.name, taken) for src, parameter in given}
    made = {result.name: dst for result, dst in zip(first.results, producer.dsts, strict=True)}
    for name in (op.result.name for op in first.ops):
        dst = made.get(name)
        renamed[name] = called[dst] if dst in called else claim_unique(links.root(dst) if dst else name, taken)
    ops = [_renamed(op, renamed) for op in first.ops]
    inputs = {src: replace(p, name=renamed[p.name]) for src, p in given}
    handed = {links.root(dst): (dst, renamed[name]) for name, dst in made.items()}
    for src, parameter in zip(consumer.srcs, second.inputs, strict=True):
        if links.root(src) in handed:
            dst, name = handed[links.root(src)]
            ops.extend(viewed(links.path(src, dst) or [], name, parameter.name, links.types, taken))
        else:
            inputs[src] = parameter
    returned = (*(renamed[name] for name, dst in made.items() if dst in kept), *(result.name for result in second.results))
    name = f"{producer.kernel} {consumer.kernel}"
    kernel = ir.Kernel(name, tuple(inputs.values()), (*ops, *second.ops), returned if len(returned) > 1 else ())
    return _FusedLaunch(into, replace(consumer, kernel=kernel.name, srcs=tuple(inputs), dsts=(*kept, *consumer.dsts)), kernel)


def _without_repeats(kernel: ir.Kernel) -> ir.Kernel:
    """Removes repeated ops, which arise if one producer is fused into several operands of a kernel."""
    if len(kernel.ops) < 2:
        return kernel
    # Two ops with equal operands may differ: one op reads a vector along rows, and the other op along columns or at a computed index.
    walked = iteration(kernel)
    results = {result.name for result in kernel.results}
    first: dict[object, str] = {}
    names: dict[str, str] = {}
    ops = []
    for op in kernel.ops:
        renamed = op.renamed(names)
        what = replace(renamed, result=Value("", op.result.type)), walked.indices[op.result.name], walked.fibers.get(op.result.name)
        same = first.setdefault(what, op.result.name)
        if same != op.result.name and op.result.name not in results:
            names[op.result.name] = same
        else:
            ops.append(renamed)
    return replace(kernel, ops=tuple(ops))


def _renamed(op: Op, names: dict[str, str]) -> Op:
    return replaced(op.renamed(names), result=replaced(op.result, name=names[op.result.name]))


def viewed(path: list[tree.Instruction], source: str, name: str, types: dict[str, BufferType], taken: set[str]) -> Iterator[Op]:
    """Converts the views from `source` to `name` into ops of a kernel. The last op computes `name`."""
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
    links = Links(program)
    kernels: dict[str, ir.Kernel] = {}
    changes: dict[int, ir.Launch] = {}
    for place, launch in links.launches.items():
        kernel = links.kernels[launch.kernel]
        if kernel.name in kernels:
            taken: set[str] = set()
            buffers = zip((*kernel.inputs, *kernel.results), (*launch.srcs, *launch.dsts), strict=True)
            names = {parameter.name: claim_unique(links.called(buffer), taken) for parameter, buffer in buffers}
            inputs = tuple(replace(p, name=names[p.name]) for p in kernel.inputs)
            ops = tuple(replace(_renamed(op, names), location=launch.location) for op in kernel.ops)
            kernel = ir.Kernel(f"{kernel.name} {len(kernels)}", inputs, ops)
            changes[place.number] = replace(launch, kernel=kernel.name)
        kernels[kernel.name] = kernel
    return replace(program, kernels=tuple(kernels.values()), body=tree.edited(program.body, changes))


def _named(program: ir.HostProgram) -> ir.HostProgram:
    """Names kernels after their ops. Merges kernels that differ only in names, and gives the merged kernel names that fit all its uses."""
    equal: dict[ir.Kernel, list[ir.Kernel]] = {}
    for kernel in program.kernels:
        equal.setdefault(replace(_with_names(kernel, map(str, range(len(kernel.types)))), name=""), []).append(kernel)
    names: dict[str, str] = {}
    taken: set[str] = set()
    kernels = [_with_names(same[0], _shared_names(same)) for same in equal.values()]
    kernels = [replace(kernel, name=claim_unique(kernel.descriptive_name, taken)) for kernel in kernels]
    for kernel, same in zip(kernels, equal.values(), strict=True):
        names |= dict.fromkeys((other.name for other in same), kernel.name)
    body = tree.rewrite(program.body, lambda i: tree.with_names(i, names, "launch"))
    return replace(program, body=body, kernels=tuple(kernels))


def _with_names(kernel: ir.Kernel, names: Iterable[str]) -> ir.Kernel:
    new = dict(zip(kernel.types, names, strict=True))
    inputs = tuple(replace(p, name=new[p.name]) for p in kernel.inputs)
    ops = tuple(_renamed(op, new) for op in kernel.ops)
    return replace(kernel, inputs=inputs, ops=ops, returned=tuple(new[name] for name in kernel.returned))


def _shared_names(kernels: list[ir.Kernel]) -> Iterator[str]:
    """Names of the values of equal kernels: the words that the names of all kernels share, such as `scattered` for `dk_scattered` and
    `dv_scattered`. A value without such words is named after its op, and an input `x`."""
    taken: set[str] = set()
    for name, *others in zip(*(kernel.types for kernel in kernels), strict=True):
        words = [word for word in name.split("_") if all(word in other.split("_") for other in others)]
        shared, made = "_".join(words), kernels[0].made.get(name)
        yield claim_unique(shared if shared.isidentifier() else made.kind if made else "x", taken)


def _explained(program: ir.HostProgram, links: Links) -> ir.HostProgram:
    reasons: dict[str, dict[str, None]] = {}
    for place, launch in links.launches.items():
        reasons.setdefault(launch.kernel, {})[str(links.union(place))] = None
    kernels = tuple(replace(k, ends="; ".join(filter(None, reasons[k.name]))) for k in program.kernels)
    return replace(program, kernels=kernels)
