"""Moves each view to its first use. If all uses are in one stream block, branch or `on` body, the view moves into this body.

    %h = slice %x[1: 4 from 4]                launch @negative_t %x -> %t
    launch @negative_t %x -> %t    becomes    %h = slice %x[1: 4 from 4]
    copy %h -> %y                             copy %h -> %y

A loop-invariant view moves before the loop and the fork of the loop's streams. A view in a branch, or in a loop with a symbolic trip count,
stays in the loop. If several instructions of a body contain equal views, and one of the views is unconditional, one view before these
instructions remains.
"""

from collections.abc import Iterator, Sequence

from hostweave.base.unchanged import replaced
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import renamed
from hostweave.host_ir.expr import Coordinate, Rank, leaves
from hostweave.options import Options


def sink_views(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    return replaced(program, body=_sunk(program.body))


def _shared(body: tree.Body) -> tree.Body:
    """Replaces equal views by one view before the first instruction that contains one of these views. Also moves a loop-invariant view
    before its loop. At least one of equal views must be unconditional, because a condition may bound the index."""
    # view without its name -> names of all such views, each with the position in `body` of the instruction that is or contains the view
    made: dict[tree.Instruction, dict[str, int]] = {}
    for at, i in enumerate(body):
        for view in _movable(i):
            (out,) = tree.names(view, "view")
            made.setdefault(tree.with_names(view, {out: ""}, "view"), {})[out] = at
    always = {name for i in _run_always(body) for name in tree.names(i, "view")}
    names: dict[str, str] = {}
    before: dict[int, tree.Body] = {}
    for viewed, positions in made.items():
        (first, at), *_ = positions.items()
        if (body[at].trips or len({*positions.values()}) > 1) and not always.isdisjoint(positions):
            names |= dict.fromkeys(positions, first)
            at = _first_position(at, body, ())
            before[at] = (*before.get(at, ()), tree.with_names(viewed, {"": first}, "view"))
    if not names:
        return body
    others = (tree.rewrite((i,), lambda inner: None if names.keys().isdisjoint(tree.names(inner, "view")) else ()) for i in body)
    return _shared(renamed(tuple(i for at, kept in enumerate(others) for i in (*before.get(at, ()), *kept)), names))


def _run_always(body: tree.Body) -> Iterator[tree.Instruction]:
    for i in body:
        yield i
        if i.condition_of_body is None and (i.trips is None or i.trips.is_int):
            yield from (inner for own in tree.bodies(i) for inner in _run_always(own))


def _movable(i: tree.Instruction) -> Iterator[tree.Instruction]:
    """Views inside an instruction that can move before the instruction."""
    inside = list(tree.walk((i,)))
    defined = {name for inner in inside for name in tree.names(inner, "define", "index")} - {*tree.names(i, "view")}
    if not any(inner.ranks for inner in inside):
        for inner in inside:
            if tree.names(inner, "view") and defined.isdisjoint((*tree.names(inner, "alias"), *tree.indices_in(inner))):
                yield inner


def _sunk(body: tree.Body) -> tree.Body:
    lines: _Lines = []
    for i in reversed(_shared(body)):
        if tree.names(i, "view"):
            _insert(i, lines)
        else:
            lines.insert(0, _line(tree.with_bodies(i, _sunk)))
    return tuple(instruction for instruction, _ in lines)


_WithUses = tuple[tree.Instruction, set[str]]  # an instruction, and the buffers that it and its bodies use
_Lines = list[_WithUses]


def _line(i: tree.Instruction) -> _WithUses:
    return i, {name for inner in tree.walk((i,)) for name in tree.names(inner, "read", "write", "alias")}


def _insert(view: tree.Instruction, lines: _Lines) -> None:
    (out,) = tree.names(view, "view")
    users = (k for k, (_, uses) in enumerate(lines) if out in uses)
    at = next(users, 0)
    has_bodies = bool(lines) and bool(tree.bodies(lines[at][0]))
    if has_bodies and next(users, None) is None and (inside := _inside(view, lines[at][0])):
        lines[at] = _line(inside)
        return
    lines.insert(_first_position(at, [i for i, _ in lines[: at + 1]], ("view",)), _line(view))


def _first_position(at: int, body: Sequence[tree.Instruction], before: tuple[str, ...]) -> int:
    """Index at which to insert an instruction before `at`. Skips preceding instructions with a role in `before`. If `at` is a loop, also
    skips preceding forks and records."""
    is_loop = bool(body) and body[at].trips is not None
    while at > 0 and tree.names(body[at - 1], *before, *(("fork", "record") if is_loop else ())):
        at -= 1
    return at


def _inside(view: tree.Instruction, user: tree.Instruction) -> tree.Instruction | None:
    """Moves a view into the body of its only user. None for a loop or a group, and if several bodies use the view. Also None if the
    view depends on the rank and the body is an `on` body, whose coordinates refer to another mesh."""
    (out,) = tree.names(view, "view")

    def uses(body: tree.Body) -> bool:
        return any(out in _line(i)[1] for i in body)

    def placed(body: tree.Body) -> tree.Body:
        lines = [_line(i) for i in body]
        _insert(view, lines)
        return tuple(instruction for instruction, _ in lines)

    asks_for_rank = any(isinstance(leaf, Coordinate | Rank) for expr in tree.expressions(view) for leaf in leaves(expr))
    runs_once = user.trips is None and not user.grouped
    if not runs_once or (user.ranks and asks_for_rank) or sum(map(uses, tree.bodies(user))) != 1:
        return None
    return tree.with_bodies(user, lambda body: placed(body) if uses(body) else body)
