"""Host to host: moves each view to its first use, inside the stream block or branch with all of its uses.

    %h = slice %x[1: 4 from 4]                launch @negative_t %x -> %t
    launch @negative_t %x -> %t           becomes    %h = slice %x[1: 4 from 4]
    copy %h -> %y                               copy %h -> %y

What is the same in every step of a loop stays before the loop, and before the fork of its streams.
"""

from __future__ import annotations

from dataclasses import replace

from hostweave.host_ir import ir, tree
from hostweave.options import Options


def sink_views(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    return replace(program, body=_sunk(program.body))


def _sunk(body: tree.Body) -> tree.Body:
    lines: _Lines = []
    for i in reversed(body):
        if tree.names(i, "view"):
            _place(i, lines)
        else:
            lines.insert(0, _line(tree.with_bodies(i, _sunk)))
    return tuple(instruction for instruction, _ in lines)


_Line = tuple[tree.Instruction, set[str]]  # with the buffers that it and what is in its bodies name
_Lines = list[_Line]


def _line(i: tree.Instruction) -> _Line:
    return i, {name for inner in tree.walk((i,)) for name in tree.names(inner, "read", "write", "alias")}


def _place(view: tree.Instruction, lines: _Lines) -> None:
    """Puts a view into what follows it, before the other views that stand where it belongs."""
    (out,) = tree.names(view, "view")
    users = [k for k, (_, uses) in enumerate(lines) if out in uses]
    at = users[0] if users else 0
    if len(users) == 1 and (inside := _inside(view, lines[at][0])):
        lines[at] = _line(inside)
        return
    is_loop = bool(lines) and lines[at][0].trips is not None
    while at > 0 and tree.names(lines[at - 1][0], "view", *(("fork", "record") if is_loop else ())):
        at -= 1
    lines.insert(at, _line(view))


def _inside(view: tree.Instruction, user: tree.Instruction) -> tree.Instruction | None:
    """The only user of a view with the view in its body, where that is one of those that run once."""
    (out,) = tree.names(view, "view")

    def uses(body: tree.Body) -> bool:
        return any(out in _line(i)[1] for i in body)

    def placed(body: tree.Body) -> tree.Body:
        lines = [_line(i) for i in body]
        _place(view, lines)
        return tuple(instruction for instruction, _ in lines)

    runs_once = user.trips is None and not user.grouped
    if not runs_once or sum(map(uses, tree.bodies(user))) != 1:
        return None
    return tree.with_bodies(user, lambda body: placed(body) if uses(body) else body)
