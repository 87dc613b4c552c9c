"""Host to host: a rank's own chunk is used where it lies, if other ranks' chunks alone are communicated.

    if %p == rank.x {                              if %p != rank.x {
      copy %x -> %xg                                 group { recv %xg from %p on x; send %x to %q on x }
    } else {                                       }
      group {                                      %x_chunk = choose %x if %p == rank.x else %xg
        recv %xg from %p on x           becomes    matmul %x_chunk, %w -> %y_i
        send %x to %q on x
      }
    }
    matmul %xg, %w -> %y_i

and, where the copy is of what the body computed before,

    matmul %x_i, %w -> %h                          %h_chunk = choose %landing_i if %p == rank.x else %h
    if %p == rank.x {                              matmul %x_i, %w -> %h_chunk
      copy %h -> %landing_i             becomes    if %p != rank.x {
    } else {                                         group { recv %landing_i from %q on x; send %h to %p on x }
      group { ... }                                }
    }

It comes after the passes that ask which one buffer a name is. A copy stays where the layouts differ, and where anything else reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.base.names import claim_unique
from hostweave.host_ir import ir
from hostweave.host_ir.calls import renamed
from hostweave.host_ir.dead_code import indices_in
from hostweave.host_ir.expr import opposite
from hostweave.options import Options

Edits = dict[int, ir.Body]


def propagate_copies(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    uses, edits = def_use(program), Edits()
    taken = {*uses.types, *uses.indices}
    for place in uses.places:
        if copy := _copy(uses, place):
            found = copy.reading_source(taken) or copy.writing_destination(taken)
            edits |= found if found.keys().isdisjoint(edits) else {}
    return replace(program, body=ir.edited(program.body, edits)) if edits else program


def _copy(uses: DefUse, place: Place) -> _Copy | None:
    """A branch of a stream block in a loop that copies one buffer to another of its layout, and else communicates."""
    match place.instruction:
        case ir.If(body=(*views, ir.Copy() as copy), orelse=(_, *_)) as branch if place.block and place.loop:
            if all(isinstance(i, ir.View) for i in views) and uses.types[copy.src] == uses.types[copy.dst]:
                return _Copy(uses, place, place.loop, branch, tuple(views), copy)
    return None


@dataclass(frozen=True)
class _Copy:
    uses: DefUse
    place: Place
    loop: ir.For
    branch: ir.If
    views: ir.Body  # before the copy
    copy: ir.Copy

    @property
    def src(self) -> str:
        return self.copy.src

    @property
    def dst(self) -> str:
        return self.copy.dst

    def choice(self, src: str, other: str, taken: set[str]) -> ir.Choose:
        name = claim_unique(f"{self.uses.root(self.src)}_chunk", taken)
        return ir.Choose(name, src, self.branch.condition, other, location=self.branch.location)

    def remote(self) -> ir.If:
        """What is left of the branch."""
        return replace(self.branch, condition=opposite(self.branch.condition), body=self.branch.orelse, orelse=())

    def touching(self, root: str, *roles: str) -> Iterator[tuple[ir.Instruction, str]]:
        """What touches a parameter or allocation, with the name by which it does."""
        for place in self.uses.touches[root]:
            for name in ir.names(place.instruction, *roles):
                if self.uses.root(name) == root:
                    yield place.instruction, name

    # --- what reads the copy reads the source ---

    def reading_source(self, taken: set[str]) -> Edits:
        """The edits by which what comes later in the body reads the source; none where anything else reads the copy."""
        later = self.place.body[self.place.index + 1 :]
        root, copied = self.uses.root(self.dst), self._views_in(later, self.dst)
        at, results = self._overwritten(later, copied)
        inside, until = ({id(i) for i in ir.walk(body)} for body in (later, later[: at + 1]))
        if root not in self.uses.allocates or self.uses.root(self.src) in self.uses.writes((self.loop,)):
            return {}
        reads = list(self.touching(root, "read"))
        if any(id(i) not in inside or name not in copied or (name in results) == (id(i) in until) for i, name in reads):
            return {}
        # Another chunk of that memory is written only while this one is sent, so that they have no byte in common.
        sends = [set(map(id, i.body)) for i in ir.walk(later) if isinstance(i, ir.Group) and copied & set(_names((i,), "read"))]
        writes = [(i, name) for i, name in self.touching(root, "write") if id(i) in inside]
        if any(name in copied or not any(id(i) in group for group in sends) for i, name in writes if name not in results):
            return {}
        users = [i for i in later if self.dst in _names((i,), "read", "alias") and results.isdisjoint(ir.names(i, "define"))]
        if not users or any(results & set(_names(inner, "define")) for i in later for inner in ir.bodies(i)):
            return {}
        choice = self.choice(self.src, self.dst, taken)
        edits = {id(i): renamed((i,), {self.dst: choice.out}) for i in users}
        edits[id(users[0])] = (choice, *edits[id(users[0])])
        return {**edits, id(self.branch): (*self.views, self.remote())}

    def _overwritten(self, later: ir.Body, copied: set[str]) -> tuple[int, set[str]]:
        """The kernel that first writes its result over all of the copy, and the views that are that result; none otherwise."""
        for at, i in enumerate(later):
            if names := copied & set(_names((i,), "write")):
                if isinstance(i, ir.Launch) and self.dst not in names and all(map(self.uses.is_whole, names)):
                    return at, {view for name in names for view in self._views_in(later, name)}
                break
        return len(later), set()

    def _views_in(self, body: ir.Body, name: str) -> set[str]:
        """A buffer and its views that a body defines."""
        found = {name}
        for i in ir.walk(body):
            if isinstance(i, ir.View) and i.src in found:
                found.add(i.out)
        return found

    # --- what computes the source writes where it is copied to ---

    def writing_destination(self, taken: set[str]) -> Edits:
        """The edits by which what comes before in the body computes the source where it belongs; none where it may not be there yet."""
        root, names = self.uses.root(self.dst), _names
        users = [k for k, i in enumerate(self.place.body[: self.place.index]) if self.src in names((i,), "read", "write", "alias")]
        if self.src not in self.uses.allocates or not users:
            return {}
        before = self.place.body[users[0] : self.place.index]
        inside = {id(i) for i in ir.walk((*before, *self.branch.orelse))} | {id(self.copy)}
        if any(id(i) not in inside for i, _ in self.touching(self.src, "read", "write")):
            return {}
        if (self._views_in(before, self.src) - {self.src}) & set(names(self.branch.orelse, "read", "write", "alias")):
            return {}
        is_free = root not in self.uses.reads((self.loop,)) | self.uses.writes(before) and not any(i.orders for i in ir.walk(before))
        moved = self._made_for_choice(before)
        if not is_free or moved is None:
            return {}
        choice = self.choice(self.dst, self.src, taken)
        edits = {id(i): renamed((i,), {self.src: choice.out}) for i in before if self.src in names((i,), "read", "write", "alias")}
        edits[id(before[0])] = (*moved, *self.views, choice, *edits[id(before[0])])
        return {**edits, **{id(i): () for i in moved}, id(self.branch): (self.remote(),)}

    def _made_for_choice(self, before: ir.Body) -> ir.Body | None:
        """The indices and views among these that the choice needs; None where it needs anything else of them."""
        needed = {self.dst, *indices_in(self.branch), *_names(self.views, "alias"), *(name for i in self.views for name in indices_in(i))}
        moved: list[ir.Instruction] = []
        for i in reversed(before):
            if needed.isdisjoint(ir.names(i, "define", "index")):
                continue
            if not isinstance(i, ir.Let | ir.View):
                return None
            moved.insert(0, i)
            needed.update((*ir.names(i, "alias"), *indices_in(i)))
        return None if self.src in needed else tuple(moved)


def _names(body: ir.Body, *roles: str) -> list[str]:
    return [name for i in ir.walk(body) for name in ir.names(i, *roles)]
