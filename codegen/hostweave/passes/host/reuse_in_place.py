"""A result reuses the memory of an operand after the last use of the operand. Or an operand is computed in the memory of the result.

    %h = allocate bf16[M, N]                  %h = allocate bf16[M, N]
    matmul %x, %w -> %h                       matmul %x, %w -> %h
    %a = allocate bf16[M, N]         becomes  %a = reshape %h to [M, N]
    launch @gelu_a %h -> %a                   launch @gelu_a %h -> %a
    %t = allocate bf16[M, N]                  %t = reshape %y to [M, N]
    matmul %a, %v -> %t                       matmul %a, %v -> %t
    all_reduce sum %t -> %y on x              all_reduce sum %t -> %y on x

If the source and the destination of a copy share memory, the copy is removed. A kernel whose result is only copied moves to the copy, and
writes to the destination of the copy. `may_overwrite` decides if an instruction may write a result over an operand.

If possible, the result for a donated input is computed in the memory of this input. Otherwise a copy at the end writes this memory.
"""

from collections.abc import Iterator
from itertools import chain

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.analysis.kernel_indices import may_overwrite, updated
from hostweave.base.unchanged import replaced
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.types.size import product


def reuse_in_place(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    sharing = _Sharing(def_use(program))
    returning = ((place, (sharing.is_returned_there,)) for place in reversed(sharing.uses.places if sharing.donated else ()))
    others = ((place, (sharing.takes_over, sharing.begins_there, sharing.is_computed_there)) for place in sharing.uses.places)
    for place, ways in chain(returning, others):
        shared: set[str] = set()
        for src, dst in sharing.candidates(place.instruction):
            if shared.isdisjoint((src, dst)) and any(way(place, src, dst) for way in ways):
                shared |= {src, dst}
    return replaced(program, body=tree.eliminate_dead_code(sharing.uses.edited(sharing.gone, sharing.before)))


class _Sharing:
    """Decisions so far. For each allocation that became a view, `merged` has the buffer that contains the memory of the view."""

    def __init__(self, uses: DefUse):
        self.uses, self.merged = uses, tree.AliasRoots()
        self.gone: set[int] = set()  # numbers of removed instructions
        self.before: dict[int, tree.Body] = {}  # number of an instruction -> new instructions before it
        # Accesses and views of each buffer, and of all buffers that were merged into this buffer.
        self.touches, self.viewed = dict(uses.touches), dict(uses.viewed)
        self.orders = [place for place in uses.places if tree.names(place.instruction, "fork", "join")]
        self.inputs = {parameter.name for parameter in uses.program.inputs}
        self.donated = {parameter.memory: parameter.name for parameter in uses.program.outputs if parameter.memory}
        self.kernels = {kernel.name: kernel for kernel in uses.program.kernels}

    def candidates(self, i: tree.Instruction) -> Iterator[tuple[str, str]]:
        """Pairs (operand, result): the instruction could write the result over the operand."""
        reads = tree.names(i, "read")
        roots = [self.root(src) for src in reads]
        for dst in tree.names(i, "write") if reads and not i.at_root else ():
            for src, root in zip(reads, roots, strict=True):
                if roots.count(root) == 1 and (i.copies or self.may_overwrite(i, src, dst)):
                    yield src, dst

    def may_overwrite(self, i: tree.Instruction, src: str, dst: str) -> bool:
        pairs, result = updated(i, self.kernels, self.uses.program.functions), tree.names(i, "write").index(dst)
        read_at = (number for number, read in enumerate(tree.names(i, "read")) if read == src)
        return all((number, result) in pairs for number in read_at) or may_overwrite(i, self.kernels, src, dst)

    def root(self, name: str) -> str:
        return self.merged.of(self.uses.root(name))

    def takes_over(self, place: Place, src: str, dst: str) -> bool:
        """Puts the result into the operand's memory, if possible."""
        uses, old, new = self.uses, self.root(src), self.uses.root(dst)
        if old not in uses.allocates or new not in uses.allocates or self.merged.source(new) or not self._alike(src, dst):
            return False
        there, here = uses.allocates[old], uses.allocates[new]
        if not uses.is_whole(dst) or here.body is not place.body or not self._is_last(place, old) or not self._is_first(place, new):
            return False
        between = place.around[len(there.around) :]
        if any(p.on_stream or p.instruction.trips is not None for p in between) or place.around[: len(there.around)] != there.around:
            return False
        if not self._may_replace(place, new, old):
            return False
        early = [view for view in self.viewed.get(new, []) if view.number < place.number]
        self._merge(place, new, old, place.statement, (self._reshaped(new, src), *self._moved(early)))
        return True

    def begins_there(self, place: Place, src: str, dst: str) -> bool:
        """Puts the operand into the result's memory, if possible."""
        uses, old, new = self.uses, self.root(src), self.root(dst)
        if old not in uses.allocates or new in self.inputs or not self._alike(src, dst):
            return False
        there = uses.allocates[old]
        block = place.around[-1] if place.around and place.around[-1].on_stream else place
        if not (there.body is place.body or there.body is block.body) or uses.types[dst].strides is not None or old == new:
            return False
        if not self._is_last(place, old) or not self._is_first(place, new) or not self._is_alone_in_loops(place, new):
            return False
        if not self._may_replace(place, old, new):
            return False
        hoisted = self._views_after(there, dst)
        if hoisted is None or any(view.body is not place.body for view in hoisted):
            return False
        self._merge(place, old, new, there.number, (*self._moved(hoisted), self._reshaped(old, dst)))
        return True

    def is_returned_there(self, place: Place, src: str, dst: str) -> bool:
        """Puts the operand into the memory of a donated input, if the instruction writes its result to this memory. All further accesses of
        the input must come before the operand is first written, or after this instruction. The first writer of the operand may read the
        input if this writer may also overwrite the input."""
        uses, old, new = self.uses, self.root(src), self.root(dst)
        if old not in uses.allocates or new not in self.donated or place.loop or not (self._alike(src, dst) and uses.is_whole(dst)):
            return False
        if not self._is_last(place, old) or not self._may_replace(place, old, new):
            return False
        if any(self.root(name) == new for name in tree.names(place.instruction, "read")):
            return False
        first, others = self.touches[old][0], [touch for touch in self.touches[new] if touch is not place]
        loops = {around for around in first.around if around.instruction.trips is not None}
        for touch in others:
            is_before = touch.number < first.number and self._is_before(touch, first) and loops.isdisjoint(touch.around)
            if not (is_before or touch.number > place.number or (touch is first and self._overwrites(touch, new, old))):
                return False
        self._merge(place, old, new, uses.allocates[old].number, (self._reshaped(old, self.donated[new]),))
        return True

    def is_computed_there(self, place: Place, src: str, dst: str) -> bool:
        """Moves a kernel to the copy of its result. The kernel then writes the copy's destination. Only the copy may use the result."""
        uses, old, new = self.uses, self.root(src), self.root(dst)
        first, *users = self.touches[old]
        launch = first.instruction
        is_kernel = any(name in self.kernels for name in tree.names(launch, "launch")) and not (launch.posts or launch.exchanges)
        if not place.instruction.copies or old not in uses.allocates or users != [place] or not is_kernel:
            return False
        if tree.names(launch, "write") != (src,) or first.body is not place.body or {first.number, place.number} & self.gone:
            return False
        if self.viewed.get(old) or not (self._alike(src, dst) and uses.is_whole(dst)) or not self._overwrites(first, new, old):
            return False
        read = {self.root(name) for name in tree.names(launch, "read")}
        for between in uses.places[first.number + 1 : place.number]:
            i = between.instruction
            if i.orders or any(self.root(name) in read for name in tree.names(i, "write", "free")):
                return False
        self.before[place.number] = (*self.before.get(place.number, ()), tree.with_names(launch, {src: dst}, "write"))
        self.gone |= {uses.allocates[old].number, first.number, place.number}
        for root in read:
            self.touches[root] = sorted({*self.touches[root], place} - {first}, key=lambda place: place.number)
        return True

    def _overwrites(self, place: Place, read: str, written: str) -> bool:
        i = place.instruction
        pairs = [(src, dst) for src in tree.names(i, "read") for dst in tree.names(i, "write")]
        own = [(src, dst) for src, dst in pairs if (self.root(src), self.root(dst)) == (read, written)]
        return all(self._alike(src, dst) and self.uses.is_whole(dst) and self.may_overwrite(i, src, dst) for src, dst in own)

    def _alike(self, src: str, dst: str) -> bool:
        """True if the operand covers its memory in order, has the dtype and size of the result, and shares no memory with the result."""
        a, b = self.uses.types[src], self.uses.types[dst]
        is_apart = self.uses.is_whole(src) and self.uses.root(src) != self.uses.root(dst)
        return is_apart and a.dtype == b.dtype and product(a.shape) == product(b.shape)

    def _may_replace(self, place: Place, gone: str, into: str) -> bool:
        """True if a view of `into` at `place` can replace the allocation `gone`. All uses of `gone` must be in the view's `on` body, if
        any. If `gone` is in a window, `into` must be in a window too."""
        on, there = place.mesh_body, self.uses.allocates.get(into)
        is_reached = not self.uses.allocates[gone].instruction.in_window or bool(there and there.instruction.in_window)
        return is_reached and (on is None or all(on in other.around for other in (*self.touches[gone], *self.viewed.get(gone, ()))))

    def _is_last(self, place: Place, root: str) -> bool:
        """True if the instruction at `place` accesses a buffer last, and all earlier accesses have ended when this instruction runs."""
        *others, last = self.touches[root]
        return last is place and all(self._is_before(other, place) for other in others)

    def _is_before(self, other: Place, place: Place) -> bool:
        """True if stream order, joins and forks ensure that the instruction at `other` ends before the instruction at `place` runs."""
        if other.statement == place.statement:
            return False
        if other.block is place.block:
            return True
        there, here = other.stream, place.stream
        since = [p for p in self.orders if other.number < p.number < place.number and p.around == place.around[: len(p.around)]]
        if there is not None:
            joined = next((p.number for p in since if there[0] in tree.names(p.instruction, "join")), None)
            if joined is None:
                return False
            since = [p for p in since if p.number > joined]
        return here is None or any(here[0] in tree.names(p.instruction, "fork") for p in since)

    def _is_first(self, place: Place, root: str) -> bool:
        touches = self.touches[root]
        return touches[0] is place and (len(touches) < 2 or touches[1].statement != place.statement)

    def _is_alone_in_loops(self, place: Place, root: str) -> bool:
        """True if only the instruction at `place` accesses the buffer in the loops around `place`. Ignores loops around the allocation."""
        allocate = self.uses.allocates.get(root)
        depth = len(allocate.around) if allocate else 0
        loops = {around for around in place.around[depth:] if around.instruction.trips is not None}
        return all(loops.isdisjoint(touch.around) for touch in self.touches[root] if touch is not place)

    def _views_after(self, allocate: Place, name: str) -> list[Place] | None:
        """Views after `allocate` that lead to `name`, in order. None if these views cannot move before the allocate."""
        found: list[Place] = []
        while (source := self.uses.roots.source(name)) and name in self.uses.views:
            view = self.uses.views[name]
            if view.number > allocate.number:
                found.insert(0, view)
            name = source
        if name in self.uses.allocates and self.uses.allocates[name].number > allocate.number:
            return None
        used = {index for view in found for index in tree.indices_in(view.instruction)}
        return None if any(self.uses.indices[index].number > allocate.number for index in used) else found

    def _reshaped(self, name: str, into: str) -> tree.Instruction:
        """View that replaces a merged allocation."""
        return ir.Reshape(name, into, self.uses.types[name].shape, location=self.uses.allocates[name].instruction.location)

    def _moved(self, views: list[Place]) -> tree.Body:
        """Removes views, and instructions that were inserted before them. Returns all removed instructions."""
        moved: list[tree.Instruction] = []
        for view in (view for view in views if view.number not in self.gone):
            moved += (*self.before.pop(view.number, ()), view.instruction)
        self.gone.update(view.number for view in views)
        return tuple(moved)

    def _merge(self, place: Place, gone: str, into: str, before: int, what: tree.Body) -> None:
        """Makes the allocation `gone` a view of `into`. Inserts `what` before the instruction with number `before`."""
        self.before[before] = (*self.before.get(before, ()), *what)
        self.gone.add(self.uses.allocates[gone].number)
        if place.instruction.copies:  # A copy onto itself is removed.
            self.gone.add(place.number)
        self.merged.put(gone, into)
        self.touches[into] = sorted({*self.touches.get(into, []), *self.touches[gone]}, key=lambda place: place.number)
        self.viewed[into] = [*self.viewed.get(into, []), *self.viewed.get(gone, [])]
