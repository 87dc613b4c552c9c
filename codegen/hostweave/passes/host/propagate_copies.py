"""Removes the copy of a rank's own chunk in a loop that communicates the chunks of other ranks.

    if %i == 0 {                                   if %i != 0 {
      copy %x -> %xg                                 group { recv %xg from %p on x; send %x to %q on x }
    } else {                                       }
      group {                                      %x_chunk = choose %x if %i == 0 else %xg
        recv %xg from %p on x           becomes    matmul %x_chunk, %w -> %y_i
        send %x to %q on x
      }
    }
    matmul %xg, %w -> %y_i

If the loop body computes the source of the copy, the computation writes directly to the destination:

    matmul %x_i, %w -> %h                          %h_chunk = choose %landing_i if %i >= 7 else %h
    if %i >= 7 {                                   matmul %x_i, %w -> %h_chunk
      copy %h -> %landing_i             becomes    if %i < 7 {
    } else {                                         group { recv %landing_i from %q on x; send %h to %p on x }
      group { ... }                                }
    }

If the gathered value is read after the loop, the copy moves to the end of the body. At this point, no instruction waits for the copy:

    matmul %x_chunk, %w -> %y_i
    if %i == 0 {
      copy %x -> %xg
    }

A `choose` view has two alias roots. Most passes need one root per name, and therefore run before this pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.base.names import claim_unique
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import renamed
from hostweave.host_ir.expr import Expr, opposite
from hostweave.host_ir.tree import indices_in
from hostweave.options import Options

BodyEdits = dict[int, tree.Body]
NAMED = ("read", "write", "alias")


def propagate_copies(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    uses, edits = def_use(program), BodyEdits()
    taken, changed = {*uses.types, *uses.indices}, set[int]()
    for place in uses.places:
        if copy := _copy(uses, place):
            found = copy.reading_source(taken) or copy.writing_destination(taken)
            inside = {p.number for p in uses.places if not found.keys().isdisjoint((p.number, p.statement, *(a.number for a in p.around)))}
            if inside.isdisjoint(changed):
                edits |= found
                changed |= inside
    return propagate_copies(replace(program, body=tree.edited(program.body, edits)), options) if edits else program


def _copy(uses: DefUse, place: Place) -> _Copy | None:
    """Last copy in a branch of a loop. None if the pass may not remove this copy."""
    condition = place.instruction.condition_of_body
    if not condition or not place.loop or place.around[-1].instruction.condition_of_body:
        return None
    own, others = tree.bodies(place.instruction)
    if not own or not own[-1].copies or not all(i.copies or tree.names(i, "view") for i in own[:-1]):
        return None
    views, copies = (tuple(i for i in own[:-1] if i.copies == is_copy) for is_copy in (False, True))
    (src,), (dst,) = tree.names(own[-1], "read"), tree.names(own[-1], "write")
    beside = [p for p in uses.places if place.around[-1] in p.around]
    same_layout = uses.types[src] == uses.types[dst]
    return _Copy(uses, place, place.loop, condition, views, copies, others, src, dst, beside) if same_layout else None


@dataclass(frozen=True)
class _Copy:
    uses: DefUse
    place: Place
    loop: Place
    condition: Expr  # condition of the copy
    views: tree.Body  # views before the copy
    copies: tree.Body  # earlier copies in the branch
    others: tree.Body  # instructions of the branch without the copy
    src: str
    dst: str
    beside: list[Place]  # all instructions of the body that contains the branch, nested ones included

    def edits(self, users: list[Place], own: str, name: str, views: tree.Body, kept: tree.Body, taken: set[str]) -> BodyEdits:
        """Edits that replace the buffer `name` by a `choose` view after `views`, and the copy by `kept`."""
        location, choice = self.place.instruction.location, claim_unique(f"{self.uses.root(self.src)}_chunk", taken)
        edits = {p.number: renamed((p.instruction,), {name: choice}) for p in users}
        first = self.child(users[0])
        named = edits.get(first, (self.uses.places[first].instruction,))
        edits[first] = (*views, ir.Choose(choice, own, self.condition, name, location=location), *named)
        left = ir.If(self.condition, self.copies, self.others) if self.copies else ir.If(opposite(self.condition), self.others)
        edits[self.place.number] = (*kept, replace(left, location=location)) if self.copies or self.others else kept
        return edits

    def child(self, place: Place) -> int:
        return (*place.around, place)[len(self.place.around)].statement

    def touching(self, root: str, *roles: str) -> Iterator[tuple[Place, str]]:
        """Accesses of a parameter or allocation, each with the name of the buffer or view."""
        for place in self.uses.touches[root]:
            yield from ((place, name) for name in tree.names(place.instruction, *roles) if self.uses.root(name) == root)

    def reading_source(self, taken: set[str]) -> BodyEdits:
        """Edits that make later readers in the body read the source. If the destination is read after the loop, the copy moves to the end
        of the body."""
        later = [p for p in self.beside if p.number > self.place.number and self.place not in p.around]
        root, copied = self.uses.root(self.dst), _views_in(later, self.dst)
        until, results = self._overwritten(later, copied)
        inner = (i for i in tree.walk((self.loop.instruction,)) if not tree.bodies(i))
        # Signals of the state `ready` announce only reads.
        changes = (i for i in inner if not (isinstance(i, ir.Signalled) and i.state == "ready"))
        if root not in self.uses.allocates or self.uses.root(self.src) in self.uses.writes(changes):
            return {}
        reads = list(self.touching(root, "read"))
        is_kept = any(self._follows_loop(p) for p, _ in reads)
        if is_kept and results:
            return {}
        inside = ((p, name) for p, name in reads if not self._follows_loop(p))
        if any(p not in later or name not in copied or (name in results) == (p.number <= until) for p, name in inside):
            return {}
        # While this chunk is sent, only other chunks may be written, because a send and a write of one chunk would race.
        sends = {p.statement for p in later if p.statement != p.number and not copied.isdisjoint(tree.names(p.instruction, "read"))}
        writes = [(p, name) for p, name in self.touching(root, "write") if p in later and name not in results]
        if any(name in copied or p.statement not in sends for p, name in writes):
            return {}
        users = [p for p in _naming(later, self.dst) if results.isdisjoint(tree.names(p.instruction, "view"))]
        if not users:
            return {}
        edits = self.edits(users, self.src, self.dst, (), self.views, taken)
        if is_kept:
            last = max(p.statement for p in self.beside if p.body is self.place.body)
            copied_late = ir.If(self.condition, (ir.Copy(self.src, self.dst),), location=self.place.instruction.location)
            edits[last] = (*edits.get(last, (self.uses.places[last].instruction,)), copied_late)
        return edits

    def _follows_loop(self, place: Place) -> bool:
        return place.number > self.loop.number and self.loop not in place.around

    def _overwritten(self, later: list[Place], copied: set[str]) -> tuple[int, set[str]]:
        """Number of the first kernel that overwrites the whole copy, and views of the kernel's result. Without such a kernel, a number
        above all numbers of instructions."""
        writes = ((p, copied.intersection(tree.names(p.instruction, "write"))) for p in later)
        place, names = next(((p, names) for p, names in writes if names), (self.place, set[str]()))
        is_kernel = place.instruction.work == "compute" and place.around == self.place.around
        if names and is_kernel and self.dst not in names and all(map(self.uses.is_whole, names)):
            return place.number, set().union(*(_views_in(later, name) for name in names))
        return len(self.uses.places), set()

    def writing_destination(self, taken: set[str]) -> BodyEdits:
        """Edits that compute the source in the destination. Empty if uses of the source or of the destination forbid this."""
        root, beside = self.uses.root(self.dst), self.beside
        users = _naming((p for p in beside if p.number < self.place.number), self.src)
        if self.src not in self.uses.allocates or not users or self.copies:
            return {}
        before = [p for p in beside if self.child(users[0]) <= p.number < self.place.number]
        inside = [p for p in beside if self.place in p.around]
        if any(p not in before and p not in inside for p, _ in self.touching(self.src, "read", "write")):
            return {}
        touched = self.uses.reads((self.loop.instruction,)) | self.uses.writes(p.instruction for p in before)
        if root in touched or any(_naming(inside, view) for view in _views_in(before, self.src) - {self.src}):
            return {}
        moved = self._made_for_choice(before)
        if moved is None or any(p.instruction.orders for p in before):
            return {}
        views = (*(p.instruction for p in moved), *self.views)
        return self.edits(users, self.dst, self.src, views, (), taken) | {p.number: () for p in moved}

    def _made_for_choice(self, before: list[Place]) -> list[Place] | None:
        """Instructions in `before` that define indices and views of the `choose`. None if these instructions cannot move."""
        needed = {self.dst, *indices_in(self.place.instruction), *(name for i in self.views for name in _needs(i))}
        moved: list[Place] = []
        for place in reversed(before):
            if not needed.isdisjoint(tree.names(place.instruction, "define", "index")):
                moved.insert(0, place)
                needed |= _needs(place.instruction)
        has_others = any(p.instruction.calls or tree.names(p.instruction, "allocate") for p in moved)
        return None if self.src in needed or has_others else moved


def _needs(view: tree.Instruction) -> set[str]:
    return {*tree.names(view, "alias"), *indices_in(view)}


def _naming(places: Iterable[Place], name: str) -> list[Place]:
    return [p for p in places if name in tree.names(p.instruction, *NAMED) and not tree.names(p.instruction, "free")]


def _views_in(places: list[Place], name: str) -> set[str]:
    """The buffer `name`, and the views of the buffer that the instructions at `places` define."""
    found = {name}
    for place in places:
        if not found.isdisjoint(tree.names(place.instruction, "alias")):
            found.update(tree.names(place.instruction, "view"))
    return found
