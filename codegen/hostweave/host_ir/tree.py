"""Base class of host IR instructions, and functions that walk and rewrite bodies.

A field with a role names a buffer, an event or another object. The role says how the instruction uses the object.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from itertools import count
from typing import Annotated, Any, ClassVar, Concatenate, ParamSpec, TypeVar, get_origin, get_type_hints

from hostweave.base.errors import Location
from hostweave.base.unchanged import is_same, replaced
from hostweave.host_ir.expr import Expr, Var, leaves
from hostweave.types.blocks import Cuts
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType

P = ParamSpec("P")
T = TypeVar("T")
Kind = TypeVar("Kind", bound="Instruction")
INDENT = "  "

# Types of fields with a role.
Allocated = Annotated[str, "allocate"]
Viewed = Annotated[str, "view"]
Index = Annotated[str, "index"]  # name of an integer that the instruction defines
Read = Annotated[str, "read"]
Reads = Annotated[tuple[str, ...], "read"]
Write = Annotated[str, "write"]
Writes = Annotated[tuple[str, ...], "write"]
Update = Annotated[str, "update"]
Alias = Annotated[str, "alias"]  # source of a view; the instruction does not access the elements
Freed = Annotated[str, "free"]  # memory that other buffers may reuse afterwards
Launched = Annotated[str, "launch"]
Called = Annotated[str, "call"]
Forked = Annotated[str, "fork"]  # pool of streams
Joined = Annotated[str, "join"]
StreamPool = Annotated[str, "stream"]  # pool of the stream that runs the body; the field `index` selects the stream
Recorded = Annotated[str, "record"]  # pool of the event; the field `index` selects the event
Awaited = Annotated[str, "wait"]
RemoteRead = Annotated[str, "remote_read"]  # buffer in the memory of a peer
RemoteWrite = Annotated[str, "remote_write"]
Guarded = Annotated[str, "guard"]  # buffer that is not accessed; accesses to the buffer must not move across the instruction

# Maps a role to the implied roles. An access to a peer's buffer counts as an access to the local buffer, because all ranks run the same
# program.
INCLUDED = {
    "update": ("read", "write"),
    "remote_read": ("read",),
    "remote_write": ("write",),
    "guard": ("write",),
    "allocate": ("define",),
    "view": ("define",),
    "free": ("alias",),
}
NAMED = ("define", "index", "read", "write", "alias")


@dataclass(frozen=True)
class Instruction:
    """An instruction of the host IR. Class variables and properties describe the kind of instruction."""

    syntax: ClassVar[str] = ""  # text format; the text omits a field with its default value, together with the words before the field
    calls: ClassVar[bool] = True  # False if the instruction only defines a name
    shows: ClassVar[str] = ""  # a view of all elements: "in order" if in the order of the source, "all" if in another order
    copies: ClassVar[bool] = False  # True if the instruction can be removed when src and dst are the same memory
    work: ClassVar[str] = ""  # "compute", or "move" for copies, packs and fills; "" if the instruction does no local work
    orders: ClassVar[bool] = False  # True if no work may move across the instruction
    marks: ClassVar[bool] = False  # True if the instruction records when a stream reaches the instruction
    log_sum_exps: ClassVar[str] = ""  # "gives" if the field `lse` is written, "takes" if it is read
    grouped: ClassVar[bool] = False  # True if the instruction posts several sends and recvs as one group
    # kind of communication: send, recv, collective, signal, wait_signal or get
    posts: ClassVar[str] = ""
    exchanges: ClassVar[bool] = False  # True if the launched kernel exchanges data with kernels of other ranks
    in_window: ClassVar[bool] = False  # True if peers access the allocated memory
    at_root: ClassVar[str] = ""  # field of a buffer that only the root of a collective uses
    not_at_root: ClassVar[str] = ""  # field of a buffer that all ranks except the root use
    # Operand that may be in the memory of dst: "src", "accumulate", or "block of src" for this rank's block of src. For "block of dst", src
    # may be this rank's block of dst.
    in_place: ClassVar[str] = ""
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def libraries(self) -> tuple[str, ...]:
        """Libraries that this instruction needs in addition to the libraries of every program."""
        return ()

    def defined(self, types: Mapping[str, BufferType]) -> dict[str, BufferType]:
        """Types of the buffers and views that the instruction defines.

        Raises ValueError if a view is not possible.
        """
        return {}

    @property
    def span(self) -> tuple[int, Expr, Size] | None:
        """(dim, first index, extent) of a view of a part of a dim. None for other instructions."""
        return None

    def chunk_of(self, source: BufferType) -> tuple[int, Expr, Size] | None:
        """(dim, index of the chunk, number of chunks) of a view of one of several equal chunks. None for other instructions."""
        return None

    @property
    def chosen_by(self) -> Expr | None:
        """Condition that selects the first of two sources of a view. None for other instructions."""
        return None

    def senders(self, rank_in_group: int, readers: tuple[T, ...]) -> tuple[T, ...]:
        """Entries of the ranks from which this rank receives data. `readers` has one entry per rank of the process group."""
        return readers

    @property
    def packed(self) -> Cuts:
        """Cuts of the tensor of a pack, an unpack or a `Routed`. Empty for other instructions, and if a `Routed` has equal blocks."""
        return ()

    @property
    def ranks(self) -> Mesh | None:
        """Mesh of an `on` body. Ranks outside of the mesh skip the body. None for other instructions."""
        return None

    @property
    def trips(self) -> Size | None:
        return None

    @property
    def condition_of_body(self) -> Expr | None:
        """Condition of a branch. None for other instructions."""
        return None

    def lines(self, indent: str = "") -> list[str]:
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
    return cache(function)  # type: ignore[return-value]


def body_lines(body: Body, indent: str = INDENT) -> Iterator[str]:
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
    """Pairs of literal text and the field after the text. The last field may be ""."""
    pieces = re.split(r"\{(\w+)\}", kind.syntax)
    return tuple((literal, pieces[i + 1] if i + 1 < len(pieces) else "") for i, literal in enumerate(pieces) if i % 2 == 0)


@per_kind
def defaults_of(kind: type[Instruction]) -> dict[str, Any]:
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING and f.name != "orelse"}


@per_kind
def roles(kind: type[Instruction]) -> dict[str, str]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name].__metadata__[0] for f in fields(kind) if get_origin(hints[f.name]) is Annotated}


@per_kind
def _fields_of(kind: type[Instruction], wanted: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name, role in roles(kind).items() if not {role, *INCLUDED.get(role, ())}.isdisjoint(wanted))


def names(instruction: Instruction, *wanted: str) -> tuple[str, ...]:
    """Names in the fields with a wanted role, or with a role that implies a wanted role."""
    found: list[str] = []
    for name in _fields_of(type(instruction), wanted):
        value = getattr(instruction, name)
        found.extend(value) if isinstance(value, tuple) else found.append(value)
    return tuple(found)


def with_names(instruction: Kind, new: Mapping[str, str], *wanted: str) -> Kind:
    """Replaces the names that `names` returns."""
    return _with_each_name(instruction, lambda name: new.get(name, name), wanted)


def with_names_at(instruction: Kind, new: Mapping[int, str], *wanted: str) -> Kind:
    """Replaces the name at index `i` of the result of `names` by `new[i]`."""
    number = count()
    return _with_each_name(instruction, lambda name: new.get(next(number), name), wanted)


def _with_each_name(instruction: Kind, change: Callable[[str], str], wanted: tuple[str, ...]) -> Kind:
    changed: dict[str, Any] = {}
    for name in _fields_of(type(instruction), wanted):
        old = getattr(instruction, name)
        changed[name] = tuple(map(change, old)) if isinstance(old, tuple) else change(old)
    return replaced(instruction, **changed)


Slot = tuple[str, Expr]  # a stream or an event: the name of its pool, and its index in the pool


def slot(instruction: Instruction, role: str) -> Slot | None:
    """Stream or event in the field with this role. None if the instruction has no such field."""
    return next(((pool, getattr(instruction, "index")) for pool in names(instruction, role)), None)  # noqa: B009


def expressions(instruction: Instruction) -> list[Expr]:
    return [value for value in vars(instruction).values() if isinstance(value, Expr)]


def with_expressions(instruction: Instruction, change: Callable[[Expr], Expr]) -> Instruction:
    given = {name: value for name, value in vars(instruction).items() if isinstance(value, Expr)}
    changed: dict[str, Any] = {name: new for name, value in given.items() if (new := change(value)) != value}
    return replace(instruction, **changed) if changed else instruction


@per_kind
def _body_fields(kind: type[Instruction]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.name in ("body", "orelse"))


def bodies(instruction: Instruction) -> tuple[Body, ...]:
    return tuple([getattr(instruction, name) for name in _body_fields(type(instruction))])


def with_bodies(instruction: Instruction, change: Callable[[Body], Body]) -> Instruction:
    """Applies `change` to each body. Returns `instruction` itself if no body changes."""
    if not (names := _body_fields(type(instruction))):
        return instruction
    return replaced(instruction, **{name: change(getattr(instruction, name)) for name in names})


def are_on_disjoint_ranks(instructions: Sequence[Instruction]) -> bool:
    """True if all instructions are `on` bodies, and no rank executes two of them."""
    ranks = [rank for i in instructions if i.ranks for rank in i.ranks.all_ranks]
    return all(i.ranks for i in instructions) and len(set(ranks)) == len(ranks)


def together(instructions: Iterable[Instruction], of: Callable[[Instruction], object] = lambda i: i.ranks) -> Body:
    """Merges consecutive instructions for which `of` returns the same value, unless this value is false. By default, merges `on` bodies of
    one mesh."""
    result: list[Instruction] = []
    for i in instructions:
        if of(i) and result and of(result[-1]) == of(i):
            further = iter(bodies(i))
            result[-1] = with_bodies(result[-1], lambda body, further=further: body + next(further))  # type: ignore[misc]
        else:
            result.append(i)
    return tuple(result)


def walk(body: Body) -> Iterator[Instruction]:
    """Yields all instructions in program order. An instruction precedes the instructions of its body."""
    for instruction in body:
        yield instruction
        for name in _body_fields(type(instruction)):
            yield from walk(getattr(instruction, name))


def of_kind(table: Mapping[type[Instruction], T], kind: type[Instruction]) -> T:
    """Entry of a class in a table. Falls back to the nearest base class."""
    return next(table[base] for base in kind.__mro__ if base in table)


Outcome = Instruction | Body | None  # None keeps the instruction, () deletes the instruction, and other results replace the instruction
Edits = Mapping[int, Instruction | Body]  # maps an instruction's index in `walk` to its replacement


def rewrite(body: Body, rule: Callable[[Instruction], Outcome]) -> Body:
    """Applies `rule` to every instruction, after the instructions of its bodies. Returns `body` itself if nothing changes."""
    result: list[Instruction] = []
    for old in body:
        new = with_bodies(old, lambda inner: rewrite(inner, rule))
        outcome = rule(new)
        result.extend((new,) if outcome is None else outcome if isinstance(outcome, tuple) else (outcome,))
    return body if is_same(body, result) else tuple(result)


def edited(body: Body, edits: Edits) -> Body:
    """Replaces instructions. `edits` maps an index in `walk` to the replacement.

    A replacement may contain the old instruction. Edits in the body of the old instruction then apply too.

    Raises KeyError for an edit that would have no effect.
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
        return tuple(result)

    result = after(body)
    if outside := [edit for number, edit in edits.items() if not 0 <= number < walked]:
        raise KeyError(f"an edit's instruction is not in the body: {outside[0]}")
    return result


def eliminate_dead_code(body: Body, roles: tuple[str, ...] = ("allocate", "view")) -> Body:
    """Removes each instruction that does nothing but define unused names with these roles."""
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
    return (leaf.name for expr in expressions(i) for leaf in leaves(expr) if isinstance(leaf, Var))


class AliasRoots:
    """Maps each buffer and view to the parameters and allocations that contain its memory. A `choose` may have several roots.
    If two bodies define the same name, the last definition counts."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}  # view -> its first source
        self._roots: dict[str, tuple[str, ...]] = {}  # view -> all its roots

    def define(self, instruction: Instruction) -> None:
        for name in names(instruction, "define"):
            self._sources.pop(name, None)
            self._roots.pop(name, None)
            if sources := names(instruction, "alias"):
                self._sources[name] = sources[0]
                self._roots[name] = tuple(dict.fromkeys(root for source in sources for root in self.all_of(source)))

    def put(self, name: str, source: str) -> None:
        self._sources[name], self._roots[name] = source, self.all_of(source)

    def source(self, name: str) -> str | None:
        """First source of a view. None for parameters and allocations."""
        return self._sources.get(name)

    def of(self, name: str) -> str:
        while name in self._sources:
            name = self._sources[name]
        return name

    def all_of(self, name: str) -> tuple[str, ...]:
        return self._roots.get(name, (name,))
