"""An instruction of the host IR, whatever its kind: what is asked of it, and how bodies of instructions are walked and rewritten.

The roles of its fields say what it does to what they name; traits are class variables, or what a class answers about itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from itertools import count
from typing import Annotated, Any, ClassVar, Concatenate, ParamSpec, TypeVar, get_origin, get_type_hints

from hostweave.base.errors import Location
from hostweave.host_ir.expr import Expr, Var, leaves
from hostweave.types.blocks import Cuts
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType

P = ParamSpec("P")
T = TypeVar("T")
INDENT = "  "

# The roles of fields: what the instruction does to what they name. `names` finds it.
Allocated = Annotated[str, "allocate"]  # the name of memory that the instruction defines
Viewed = Annotated[str, "view"]  # of a view
Index = Annotated[str, "index"]  # the name of an integer that it introduces
Read = Annotated[str, "read"]  # a buffer whose bytes it reads
Reads = Annotated[tuple[str, ...], "read"]
Write = Annotated[str, "write"]
Writes = Annotated[tuple[str, ...], "write"]
Update = Annotated[str, "update"]  # reads and writes
Alias = Annotated[str, "alias"]  # a buffer that is named but whose bytes are not touched
Freed = Annotated[str, "free"]  # the same, of memory whose bytes others may have from here on
Launched = Annotated[str, "launch"]  # a kernel
Called = Annotated[str, "call"]  # a function
Forked = Annotated[str, "fork"]  # streams
Joined = Annotated[str, "join"]
Stream = Annotated[str, "stream"]  # the stream of the field `index`, on which its body runs
Recorded = Annotated[str, "record"]  # the event of the field `index`
Awaited = Annotated[str, "wait"]
RemoteRead = Annotated[str, "remote_read"]  # a buffer of which the bytes that a peer has are read
RemoteWrite = Annotated[str, "remote_write"]
Guarded = Annotated[str, "guard"]  # a buffer that is not touched, and whose other uses come before or after the instruction

INCLUDED = {  # what a role is besides: all ranks run one program, so that a buffer of a peer is used as its own is
    "update": ("read", "write"),
    "remote_read": ("read",),
    "remote_write": ("write",),
    "guard": ("write",),
    "allocate": ("define",),
    "view": ("define",),
    "free": ("alias",),
}
NAMED = ("define", "index", "read", "write", "alias")  # of buffers and indices


@dataclass(frozen=True)
class Instruction:
    """What is asked of instructions stands here and on the classes below: effects by the roles of fields, traits as class variables."""

    syntax: ClassVar[str] = ""  # the words before a field are left out with it where it has its default value
    calls: ClassVar[bool] = True  # False: it names memory or an integer, and nothing runs
    shows: ClassVar[str] = ""  # of a view of all elements: "all", or "in order" where they are in their order
    copies: ClassVar[bool] = False  # it is nothing where src and dst are the same bytes
    work: ClassVar[str] = ""  # of this rank alone, on the stream that it stands on: to "compute", or to "move" what is there
    orders: ClassVar[bool] = False  # streams, one after another: no work is moved past it
    marks: ClassVar[bool] = False  # when a stream comes to it
    grouped: ClassVar[bool] = False  # it posts sends and recvs in a group
    posts: ClassVar[str] = ""  # of a communication: send, recv, collective, signal, wait_signal, which meet their own in order; or get
    exchanges: ClassVar[bool] = False  # kernels of several ranks wait for one another in it, which no library puts in order
    in_window: ClassVar[bool] = False  # what it allocates is memory that peers read and write
    at_root: ClassVar[str] = ""  # the field whose buffer only the root of a collective touches
    not_at_root: ClassVar[str] = ""  # and the one that only the others do
    in_place: ClassVar[str] = ""  # whose bytes dst may have: the field "src" or "accumulate", or the own "block of src", "block of dst"
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    # What an instruction of no class in particular says of itself.

    @property
    def libraries(self) -> tuple[str, ...]:
        """What a program with it is linked with, beside what all are."""
        return ()

    def defined(self, types: Mapping[str, BufferType]) -> dict[str, BufferType]:
        """The types of what it defines, from those of the buffers before it. Raises ValueError where there is no such view."""
        return {}

    @property
    def span(self) -> tuple[int, Expr, Size] | None:
        """Of a view of some indices of a dim: the dim, the first one, and over how many they spread."""
        return None

    def chunk_of(self, source: BufferType) -> tuple[int, Expr, Size] | None:
        """Of a view of one of equal chunks: the dim, the number of the chunk, and how many there are."""
        return None

    @property
    def chosen_by(self) -> Expr | None:
        """Whether a view of one of two buffers is of the first that it names or of the second one; None: it has one."""
        return None

    def senders(self, rank_in_group: int, readers: tuple[T, ...]) -> tuple[T, ...]:
        """Those whose data a rank of the process group gets from a communication, of all that read."""
        return readers

    @property
    def packed(self) -> Cuts:
        """How a tensor is cut whose blocks, one after another, are in what it names; nothing where none is."""
        return ()

    @property
    def ranks(self) -> Mesh | None:
        """Whose ranks alone do its body, along whose axes; None: those that come to it. What the body allocates stays."""
        return None

    @property
    def trips(self) -> Size | None:
        """How many times its body runs, one after another; None: once."""
        return None

    @property
    def condition_of_body(self) -> Expr | None:
        """Whether its first body runs or the second one; None: each."""
        return None

    def lines(self, indent: str = "") -> list[str]:
        """Its text: more than one line where it has a body."""
        text, defaults, buffers = indent, defaults_of(type(self)), roles(type(self))
        for literal, name in syntax_of(type(self)):
            value = getattr(self, name) if name else None
            if name in defaults and value == defaults[name]:
                continue
            text += literal
            if name in ("body", "orelse"):
                if value or name == "body":
                    lines = "".join(f"{line}\n" for line in body_lines(value or (), indent + INDENT))
                    text += f"{' else ' if name == 'orelse' else ''}{{\n{lines}{indent}}}"
            elif name:
                is_buffers = isinstance(value, tuple) and name in buffers
                text = text + field_text(value, is_buffers) if value != () or not is_buffers else text.rstrip()
        return text.split("\n")

    def __str__(self) -> str:
        return "\n".join(self.lines())


Body = tuple[Instruction, ...]


def per_kind(function: Callable[Concatenate[type[Instruction], P], T]) -> Callable[Concatenate[type[Instruction], P], T]:
    """`function`, worked out once for each kind of instruction."""
    return cache(function)  # type: ignore[return-value]


def body_lines(body: Body, indent: str = INDENT) -> Iterator[str]:
    """The text of a body."""
    return (line for instruction in body for line in instruction.lines(indent))


def field_text(value: Any, is_buffers: bool) -> str:
    if is_buffers:
        return ", ".join(f"%{name}" for name in value)
    if isinstance(value, tuple):
        words = ("none" if item is None else str(item) for item in value)
        return ", ".join(value) if value and isinstance(value[0], str) else f"[{', '.join(words)}]"
    return repr(value) if isinstance(value, float) else str(value)


@per_kind
def syntax_of(kind: type[Instruction]) -> tuple[tuple[str, str], ...]:
    """(literal text, field that follows it or "") pairs."""
    pieces = re.split(r"\{(\w+)\}", kind.syntax)
    return tuple((literal, pieces[i + 1] if i + 1 < len(pieces) else "") for i, literal in enumerate(pieces) if i % 2 == 0)


@per_kind
def defaults_of(kind: type[Instruction]) -> dict[str, Any]:
    """The value of each optional field, which is left out with the words before it."""
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING and f.name != "orelse"}


@per_kind
def roles(kind: type[Instruction]) -> dict[str, str]:
    """The role of every field that has one, by the field's name."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name].__metadata__[0] for f in fields(kind) if get_origin(hints[f.name]) is Annotated}


@per_kind
def _fields_of(kind: type[Instruction], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The fields of a class that have one of the wanted roles, or one that includes it."""
    return tuple(name for name, role in roles(kind).items() if not {role, *INCLUDED.get(role, ())}.isdisjoint(wanted))


def names(instruction: Instruction, *wanted: str) -> tuple[str, ...]:
    """The names in the fields of the wanted roles, and of those that include them."""
    if not (fields := _fields_of(type(instruction), wanted)):
        return ()
    found: list[str] = []
    for name in fields:
        value = getattr(instruction, name)
        found.extend(value) if isinstance(value, tuple) else found.append(value)
    return tuple(found)


def with_names(instruction: Instruction, new: Mapping[str, str], *wanted: str) -> Instruction:
    """The same under new names, as far as there are, in the fields of the wanted roles; itself where that changes none."""
    changed: dict[str, Any] = {}
    for name in _fields_of(type(instruction), wanted):
        old = getattr(instruction, name)
        changed[name] = tuple(new.get(each, each) for each in old) if isinstance(old, tuple) else new.get(old, old)
    return replace(instruction, **changed) if any(getattr(instruction, name) != value for name, value in changed.items()) else instruction


def with_names_at(instruction: Instruction, new: Mapping[int, str], *wanted: str) -> Instruction:
    """The same with other names at these numbers of what `names` finds."""
    changed: dict[str, Any] = {}
    number = count()
    for name in _fields_of(type(instruction), wanted):
        old = getattr(instruction, name)
        named = tuple([new.get(next(number), each) for each in (old if isinstance(old, tuple) else (old,))])
        changed[name] = named if isinstance(old, tuple) else named[0]
    return replace(instruction, **changed)


Slot = tuple[str, Expr]  # a stream or event: the name of its pool, and which it is


def slot(instruction: Instruction, role: str) -> Slot | None:
    """The stream on which its body runs, the event that it records or that it waits for; None where it has no field of the role."""
    return next(((pool, getattr(instruction, "index")) for pool in names(instruction, role)), None)  # noqa: B009


def expressions(instruction: Instruction) -> list[Expr]:
    return [value for value in vars(instruction).values() if isinstance(value, Expr)]


def with_expressions(instruction: Instruction, change: Callable[[Expr], Expr]) -> Instruction:
    """The same with each expression changed; itself where none is."""
    given = {name: value for name, value in vars(instruction).items() if isinstance(value, Expr)}
    changed: dict[str, Any] = {name: new for name, value in given.items() if (new := change(value)) != value}
    return replace(instruction, **changed) if changed else instruction


@per_kind
def _body_fields(kind: type[Instruction]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.name in ("body", "orelse"))


def bodies(instruction: Instruction) -> tuple[Body, ...]:
    return tuple([getattr(instruction, name) for name in _body_fields(type(instruction))])


def with_bodies(instruction: Instruction, change: Callable[[Body], Body]) -> Instruction:
    """The same with each body in it changed; itself where none is."""
    if not (names := _body_fields(type(instruction))):
        return instruction
    inner = {name: (body := getattr(instruction, name), change(body)) for name in names}
    changed = {name: new for name, (old, new) in inner.items() if new is not old}
    return replace(instruction, **changed) if changed else instruction  # type: ignore[arg-type]


def together(instructions: Iterable[Instruction], of: Callable[[Instruction], object] = lambda i: i.ranks) -> Body:
    """Neighbours on one mesh in one `on` body, or those that share what `of` says of their bodies."""
    result: list[Instruction] = []
    for i in instructions:
        if of(i) and result and of(result[-1]) == of(i):
            further = iter(bodies(i))
            result[-1] = with_bodies(result[-1], lambda body, further=further: body + next(further))  # type: ignore[misc]
        else:
            result.append(i)
    return tuple(result)


def walk(body: Body) -> Iterator[Instruction]:
    """Every instruction, outer before inner, in program order."""
    for instruction in body:
        yield instruction
        for name in _body_fields(type(instruction)):
            yield from walk(getattr(instruction, name))


def of_kind(table: Mapping[type[Instruction], T], kind: type[Instruction]) -> T:
    """What a table has for a class of instructions, or for the nearest class above it."""
    return next(table[base] for base in kind.__mro__ if base in table)


Outcome = Instruction | Body | None  # of a rule: None keeps, () deletes, a tuple replaces
Edits = Mapping[int, Instruction | Body]  # by the numbers of instructions in `walk`


def rewrite(body: Body, rule: Callable[[Instruction], Outcome]) -> Body:
    """Applies `rule` to every instruction, inner before outer: it sees what has become of a body inside. Itself where nothing changes."""
    result: list[Instruction] = []
    for old in body:
        new = with_bodies(old, lambda inner: rewrite(inner, rule))
        outcome = rule(new)
        result.extend((new,) if outcome is None else outcome if isinstance(outcome, tuple) else (outcome,))
    return unless_same(body, result)


def edited(body: Body, edits: Edits) -> Body:
    """Replaces the instructions of these numbers. What an edit keeps of its instruction has the edits inside of it, too.

    Raises KeyError for an edit that would have no effect: the body has no such instruction, or it stands in one that is replaced.
    """
    walked = 0

    def after(body: Body) -> Body:
        nonlocal walked
        result: list[Instruction] = []
        for old in body:
            number, walked = walked, walked + 1
            new, edit = with_bodies(old, after), edits.get(number, (old,))
            edit = (edit,) if isinstance(edit, Instruction) else edit
            if not any(i is old for i in edit) and not edits.keys().isdisjoint(range(number + 1, walked)):
                raise KeyError(f"an edit replaces an instruction in which others are edited: {old}")
            result.extend(new if i is old else i for i in edit)
        return unless_same(body, result)

    result = after(body)
    if outside := [edit for number, edit in edits.items() if not 0 <= number < walked]:
        raise KeyError(f"an edit names no instruction of the body; it gives {outside[0]}")
    return result


def unless_same(body: Body, result: list[Instruction]) -> Body:
    """What has become of a body; the body itself where that is the same."""
    is_same = len(result) == len(body) and all(new is old for new, old in zip(result, body, strict=True))
    return body if is_same else tuple(result)


def eliminate_dead_code(body: Body, roles: tuple[str, ...] = ("allocate", "view")) -> Body:
    """A body without what only gives names, in fields of these roles, that nothing uses, nor what they alone used."""
    while True:
        used = {name for i in walk(body) for name in names(i, "read", "write", "alias")}
        if "index" in roles:
            used.update(name for i in walk(body) for name in indices_in(i))
        defined = ((number, names(i, *roles)) for number, i in enumerate(walk(body)) if not i.calls)
        unused = [number for number, names in defined if names and used.isdisjoint(names)]
        if not unused:
            return body
        body = edited(body, dict.fromkeys(unused, ()))


def indices_in(i: Instruction) -> Iterator[str]:
    """The indices that the expressions of an instruction name."""
    return (leaf.name for expr in expressions(i) for leaf in leaves(expr) if isinstance(leaf, Var))


# --- alias roots ------------------------------------------------------------------------------------------------------
# The parameters or allocations behind a view, through any number of views: more than one where a view chooses.


class AliasRoots:
    """The names that a walk over a program has come to. Bodies side by side may use one name for two buffers: the last one counts."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}  # of each view, the first of two
        self._roots: dict[str, tuple[str, ...]] = {}  # of each view

    def define(self, instruction: Instruction) -> None:
        """Notes what an instruction defines, if anything."""
        for name in names(instruction, "define"):
            self._sources.pop(name, None)
            self._roots.pop(name, None)
            if sources := names(instruction, "alias"):
                self._sources[name] = sources[0]
                self._roots[name] = tuple(dict.fromkeys(root for source in sources for root in self.all_of(source)))

    def put(self, name: str, source: str) -> None:
        """Makes a name a view of another one."""
        self._sources[name], self._roots[name] = source, self.all_of(source)

    def source(self, name: str) -> str | None:
        """What a view was made of, the first of two; None for a parameter or an allocation."""
        return self._sources.get(name)

    def of(self, name: str) -> str:
        """The parameter or allocation that a name is, or is a view of; the first of several."""
        while name in self._sources:
            name = self._sources[name]
        return name

    def all_of(self, name: str) -> tuple[str, ...]:
        """All parameters and allocations that a name may be a view of."""
        return self._roots.get(name, (name,))
