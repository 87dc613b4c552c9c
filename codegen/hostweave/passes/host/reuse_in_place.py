"""Host to host: a result takes the memory of an operand that is not needed afterwards, or an operand is computed into that of the result.

    %h = allocate bf16[M, N]                  %h = allocate bf16[M, N]
    matmul %x, %w -> %h                       matmul %x, %w -> %h
    %a = allocate bf16[M, N]         becomes  %a = reshape %h to [M, N]
    launch @gelu_a %h -> %a                   launch @gelu_a %h -> %a
    %t = allocate bf16[M, N]                  %t = reshape %y to [M, N]
    matmul %a, %v -> %t                       matmul %a, %v -> %t
    all_reduce sum %t -> %y on x              all_reduce sum %t -> %y on x

A copy from one to the other is left out. An instruction writes where it reads if each element comes of its own index alone:
kernels say that of each input, and a matmul adds so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.analysis.kernel_indices import reads_own_index
from hostweave.host_ir import ir
from hostweave.host_ir.aliases import AliasRoots
from hostweave.host_ir.dead_code import eliminate_dead_code
from hostweave.host_ir.expr import Var, leaves
from hostweave.options import Options
from hostweave.types.size import product


def reuse_in_place(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    sharing = _Sharing(def_use(program))
    for place in sharing.uses.places:
        shared: set[str] = set()
        for src, dst in sharing.candidates(place.instruction):
            if shared.isdisjoint((src, dst)) and (sharing.takes_over(place, src, dst) or sharing.begins_there(place, src, dst)):
                shared |= {src, dst}
    return replace(program, body=eliminate_dead_code(ir.edited(program.body, sharing.edits())))


@dataclass
class _Sharing:
    """What shares memory so far: `merged` leads from an allocation to the buffer that it has become a view of."""

    uses: DefUse
    merged: AliasRoots = field(default_factory=AliasRoots)
    gone: set[int] = field(default_factory=set)  # ids of instructions
    before: dict[int, ir.Body] = field(default_factory=dict)  # the id of an instruction -> what goes before it
    kernels: dict[str, ir.Kernel] = field(init=False)
    inputs: set[str] = field(init=False)
    orders: list[Place] = field(init=False)  # forks and joins
    touches: dict[str, list[Place]] = field(init=False)  # of each buffer by now, with what has become a view of it
    viewed: dict[str, list[Place]] = field(init=False)

    def __post_init__(self) -> None:
        self.touches, self.viewed = dict(self.uses.touches), dict(self.uses.viewed)
        self.orders = [place for place in self.uses.places if isinstance(place.instruction, ir.Fork | ir.Join)]
        self.inputs = {parameter.name for parameter in self.uses.program.inputs}
        self.kernels = {kernel.name: kernel for kernel in self.uses.program.kernels}

    def candidates(self, i: ir.Instruction) -> Iterator[tuple[str, str]]:
        """The operands that an instruction could write over, each with its result."""
        if isinstance(i, ir.Launch) and i.kernel in self.kernels:  # what a user's kernel reads where is not known
            roots = [self.root(src) for src in i.srcs]
            for result, dst in enumerate(i.dsts):
                for source, src in enumerate(i.srcs):
                    if roots.count(roots[source]) == 1 and reads_own_index(self.kernels[i.kernel], source, result):
                        yield src, dst
        elif isinstance(i, ir.Matmul):
            yield from ((src, i.dst) for src in i.accumulate if self.root(src) not in (self.root(i.a), self.root(i.b)))
        elif isinstance(i, ir.AllReduce | ir.Copy):
            yield i.src, i.dst

    def root(self, name: str) -> str:
        """The memory of a buffer by now."""
        return self.merged.of(self.uses.root(name))

    def takes_over(self, place: Place, src: str, dst: str) -> bool:
        """Puts the result in the operand's memory: the operand's last use is the result's first."""
        uses, old, new = self.uses, self.root(src), self.uses.root(dst)
        if old not in uses.allocates or new not in uses.allocates or self.merged.source(new) or not self._alike(src, dst):
            return False
        there, here = uses.allocates[old], uses.allocates[new]
        if not uses.is_whole(dst) or here.body is not place.body or not self._is_last(place, old) or not self._is_first(place, new):
            return False
        if any(isinstance(i, ir.For | ir.OnStream) for i in place.around[len(there.around) :]) or not self._inside(place, there):
            return False
        if not self._is_named_beside(place, new):
            return False
        early = [view for view in self.viewed.get(new, []) if view.number < place.number]
        allocate = here.instruction
        assert isinstance(allocate, ir.Allocate)
        self.gone.add(id(allocate))
        self._insert(place.statement, (ir.Reshape(new, src, allocate.type.shape, location=allocate.location), *self._moved(early)))
        self._copied(place)
        self._merge(new, old)
        return True

    def begins_there(self, place: Place, src: str, dst: str) -> bool:
        """Puts the operand in the result's memory, which nothing has touched yet."""
        uses, old, new = self.uses, self.root(src), self.root(dst)
        if old not in uses.allocates or new in self.inputs or not self._alike(src, dst):
            return False
        there = uses.allocates[old]
        if there.body is not place.body or uses.types[dst].strides is not None or old == new:
            return False
        if not self._is_last(place, old) or not self._is_first(place, new) or not self._is_alone_in_loops(place, new):
            return False
        if not self._is_named_beside(place, old):
            return False
        hoisted = self._views_after(there, dst)
        if hoisted is None or any(view.body is not place.body for view in hoisted):
            return False
        allocate = there.instruction
        assert isinstance(allocate, ir.Allocate)
        self.gone.add(id(allocate))
        self._insert(allocate, (*self._moved(hoisted), ir.Reshape(old, dst, allocate.type.shape, location=allocate.location)))
        self._copied(place)
        self._merge(old, new)
        return True

    # --- conditions ---

    def _alike(self, src: str, dst: str) -> bool:
        """Whether the operand is all of its memory, and the result has the same elements."""
        a, b = self.uses.types[src], self.uses.types[dst]
        is_apart = self.uses.is_whole(src) and self.uses.root(src) != self.uses.root(dst)
        return is_apart and a.dtype == b.dtype and product(a.shape) == product(b.shape)

    def _is_named_beside(self, place: Place, root: str) -> bool:
        """Whether all that names a buffer stands in the same `on` body: it becomes a view, and those end with it."""
        on = next((i for i in place.around if isinstance(i, ir.OnMesh)), None)
        named = (*self.touches[root], *self.viewed.get(root, ()))
        return on is None or all(any(i is on for i in other.around) for other in named)

    def _is_last(self, place: Place, root: str) -> bool:
        """Whether all else that touches a buffer has done so when an instruction runs."""
        *others, last = self.touches[root]
        return last is place and all(self._is_before(other, place) for other in others)

    def _is_before(self, other: Place, place: Place) -> bool:
        """Whether what comes earlier in the text has run, by the order of one stream, or by a join and a fork between them."""
        if other.statement is place.statement:
            return False
        there, here = other.block, place.block
        if there is here:
            return True
        since = [p for p in self.orders if other.number < p.number < place.number and p.around == place.around[: len(p.around)]]
        if there is not None:
            joins = (p.number for p in since if isinstance(p.instruction, ir.Join) and p.instruction.stream == there.stream)
            joined = next(joins, None)
            if joined is None:
                return False
            since = [p for p in since if p.number > joined]
        return here is None or any(isinstance(p.instruction, ir.Fork) and p.instruction.stream == here.stream for p in since)

    def _is_first(self, place: Place, root: str) -> bool:
        touches = self.touches[root]
        return touches[0] is place and (len(touches) < 2 or touches[1].statement is not place.statement)

    def _inside(self, place: Place, allocate: Place) -> bool:
        return place.around[: len(allocate.around)] == allocate.around

    def _is_alone_in_loops(self, place: Place, root: str) -> bool:
        """Whether the loops around an instruction touch a buffer by it alone, as far as they do not hold all of the buffer."""
        allocate = self.uses.allocates.get(root)
        depth = len(allocate.around) if allocate else 0
        loops = [i for i in place.around[depth:] if isinstance(i, ir.For)]
        others = (touch for touch in self.touches[root] if touch is not place)
        return not any(loop is i for other in others for i in other.around for loop in loops)

    def _views_after(self, allocate: Place, name: str) -> list[Place] | None:
        """The views that lead to a buffer and come after an allocate, in order; None where they cannot stand before it."""
        found: list[Place] = []
        while source := self.uses.roots.source(name):
            view = self.uses.views[name]
            if view.number > allocate.number:
                found.insert(0, view)
            name = source
        if name in self.uses.allocates and self.uses.allocates[name].number > allocate.number:
            return None
        views = [view.instruction for view in found if isinstance(view.instruction, ir.View)]
        used = {leaf.name for view in views for leaf in leaves(view.offset) if isinstance(leaf, Var)}
        return None if any(self.uses.indices[index].number > allocate.number for index in used) else found

    # --- changes ---

    def edits(self) -> ir.Edits:
        changed = (i for i in ir.walk(self.uses.program.body) if id(i) in self.gone or id(i) in self.before)
        return {id(i): (*self.before.get(id(i), ()), *(() if id(i) in self.gone else (i,))) for i in changed}

    def _insert(self, before: ir.Instruction, what: ir.Body) -> None:
        self.before[id(before)] = (*self.before.get(id(before), ()), *what)

    def _moved(self, views: list[Place]) -> ir.Body:
        """Views that another place gets, with what stood before them."""
        moved: list[ir.Instruction] = []
        for i in (view.instruction for view in views if id(view.instruction) not in self.gone):
            moved += (*self.before.pop(id(i), ()), i)
        self.gone.update(id(view.instruction) for view in views)
        return tuple(moved)

    def _copied(self, place: Place) -> None:
        """A copy to where its source lies is no copy."""
        if isinstance(place.instruction, ir.Copy):
            self.gone.add(id(place.instruction))

    def _merge(self, gone: str, into: str) -> None:
        self.merged.put(gone, into)
        touches = {id(place): place for place in (*self.touches.get(into, []), *self.touches[gone])}
        self.touches[into] = sorted(touches.values(), key=lambda place: place.number)
        self.viewed[into] = [*self.viewed.get(into, []), *self.viewed.get(gone, [])]
