"""Parser of host programs: `parse_host(str(p)) == p`."""

import re
from collections.abc import Callable
from typing import Any, get_type_hints

from hostweave.base.errors import Location, did_you_mean
from hostweave.fusion_ir.choice import parse_choice
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.text import parse_op
from hostweave.fusion_ir.user_kernel import parse_user_kernel
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import COMPARISONS, OPERATORS, Binary, Const, Coordinate, Expr, Rank, Symbol, Var
from hostweave.transports.transport import NAMES, find_transport
from hostweave.types.blocks import Cut, Cuts
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType
from hostweave.types.text import Reader


def parse_host(text: str) -> ir.HostProgram:
    """Parses the text of a host program without verification. Raises ParseError if the text is malformed."""
    reader = Reader(text)
    user_kernels = reader.repeated("user_kernel", lambda: parse_user_kernel(reader))
    kernels = reader.repeated("kernel", lambda: parse_kernel(reader))
    functions = reader.repeated("function", lambda: ir.Function(*_parse_head(reader, "the function"), _parse_body(reader)))
    choices = reader.repeated("choice", lambda: parse_choice(reader))
    reader.expect("host")
    name, inputs, outputs = _parse_head(reader, "the program")
    mesh = reader.mesh()
    channels = _parse_channels(reader, mesh)
    streams = tuple(ir.Streams(*pool) for pool in _parse_pools(reader, "streams"))
    events = tuple(ir.Events(*pool) for pool in _parse_pools(reader, "events"))
    uneven = reader.enclosed(lambda: reader.word("a size")) if reader.accept("uneven") else ()
    body = _parse_body(reader)
    if reader.peek():
        reader.fail(f"expected the end of the text, found {reader.found()}")
    return ir.HostProgram(name, mesh, inputs, outputs, channels, streams, events, kernels, body, uneven, functions, user_kernels, choices)


def _parse_head(reader: Reader, what: str) -> tuple[str, tuple[ir.Parameter, ...], tuple[ir.Parameter, ...]]:
    """Parses `@name(inputs) -> (outputs)`."""
    name, inputs = reader.global_name(what), _parse_parameters(reader)
    reader.expect("->")
    return name, inputs, _parse_parameters(reader)


def _parse_parameters(reader: Reader) -> tuple[ir.Parameter, ...]:
    def parameter() -> ir.Parameter:
        name, type = reader.typed_name()
        if not reader.accept("in"):
            return ir.Parameter(name, type, group=reader.group())
        in_window = reader.accept("window")
        return ir.Parameter(name, type, "" if in_window else reader.named(), in_window, reader.group())

    return reader.enclosed(parameter)


def _parse_channels(reader: Reader, program: Mesh) -> tuple[ir.Channel, ...]:
    def channel() -> ir.Channel:
        name = reader.word("the name of a channel")
        reader.expect(":")
        axes = reader.mesh_axes()
        mesh = reader.mesh() if reader.accept("on") else program
        word = reader.peek()
        if word not in NAMES:
            reader.fail(f"unknown transport {reader.found()}; use one of {', '.join(NAMES)}")
        return ir.Channel(name, mesh, axes, find_transport(reader.take()))

    return reader.enclosed(channel) if reader.accept("channels") else ()


def _parse_pools(reader: Reader, word: str) -> tuple[tuple[str, int], ...]:
    def pool() -> tuple[str, int]:
        return reader.word(f"the name of {word}"), reader.within(reader.integer, "[]")

    return reader.enclosed(pool) if reader.accept(word) else ()


def parse_kernel(reader: Reader) -> ir.Kernel:
    """Parses a kernel after the word `kernel`."""
    name, inputs, ops = reader.global_name("a kernel"), _parse_parameters(reader), list[Op]()
    reader.expect("{")
    returned: tuple[str, ...] = ()
    while not reader.accept("}"):
        if reader.accept("return"):
            returned = reader.list_of(reader.named, "}")
            break
        ops.append(parse_op(reader))
    return ir.Kernel(name, inputs, tuple(ops), returned)


def _parse_body(reader: Reader) -> tree.Body:
    reader.expect("{")
    body: list[tree.Instruction] = []
    with reader.inside():
        while not reader.accept("}"):
            body.append(_parse_instruction(reader))
    return tuple(body)


def _parse_instruction(reader: Reader) -> tree.Instruction:
    defines = reader.peek() == "%"
    word = reader.peek(3) if defines else reader.peek()
    kind = _BY_WORD.get((defines, word), ir.Let if defines else None)
    if kind is None:
        if not word:
            reader.fail("the text ends inside a program: is it complete?")
        reader.fail(f"unknown instruction {word!r}; {did_you_mean(word, sorted(known for _, known in _BY_WORD))}")
    values: dict[str, Any] = {"location": Location("text", reader.line())}
    for literal, name in tree.syntax_of(kind):
        tokens = _TOKENS.findall(literal.replace("%", "") if name in tree.roles(kind) else literal)
        if name in tree.defaults_of(kind) and reader.peek() != tokens[0]:
            continue
        for token in tokens:
            reader.expect(token)
        if name:
            values[name] = _parse_field(reader, kind, name, _field_types(kind)[name])
    return kind(**values)


_field_types = tree.per_kind(get_type_hints)


def _parse_field(reader: Reader, kind: type[tree.Instruction], name: str, hint: Any) -> Any:
    if name == "body":
        return _parse_body(reader)
    if name == "orelse":
        return _parse_body(reader) if reader.accept("else") else ()
    if hint is str and f"%{{{name}}}" in kind.syntax:
        return reader.named()
    if name in tree.roles(kind) and hint is not str:  # a list of buffers
        return reader.separated(reader.named) if reader.peek() == "%" else ()
    return _FIELD_PARSERS[hint](reader)


def _bracketed(item: Callable[[Reader], Any]) -> Callable[[Reader], Any]:
    return lambda reader: reader.enclosed(lambda: item(reader), "[]")


def _parse_cut(reader: Reader) -> Cut:
    """Parses `4 of M`."""
    start, blocks = reader.at, reader.integer()
    if blocks < 1:
        reader.fail("a dim has at least one block", start)
    reader.expect("of")
    return Cut(blocks, reader.size())


_parse_cuts = _bracketed(_parse_cut)


def _parse_expr(reader: Reader, precedence: int = 1) -> Expr:
    left = _parse_atom(reader)
    # At the beginning of a line, `%` is not a remainder, but begins the next instruction.
    while (op := reader.peek()) in OPERATORS and OPERATORS[op][0] >= precedence and reader.line() == reader.line(reader.at - 1):
        reader.take()
        left = Binary(op, left, _parse_expr(reader, OPERATORS[op][0] + 1))
        if {op, reader.peek()} <= COMPARISONS:
            reader.fail("a comparison cannot be compared: write one `if` inside of another, or parentheses")
    return left


def _parse_atom(reader: Reader) -> Expr:
    if reader.accept("("):
        with reader.inside():
            inner = _parse_expr(reader)
        reader.expect(")")
        return inner
    if reader.peek() == "%":
        return Var(reader.named())
    if reader.accept("-"):
        return Const(-reader.integer())
    if reader.peek().isdigit():
        return Const(reader.integer())
    if reader.accept("rank"):
        return Coordinate(reader.word("a mesh axis")) if reader.accept(".") else Rank()
    return Symbol(reader.atom("an expression"))


_TOKENS = re.compile(r"->|\.\.|\w+|[^\s\w]")
_FIELD_PARSERS: dict[Any, Callable[[Reader], Any]] = {
    int: Reader.integer,
    int | None: Reader.integer,
    Cuts: _parse_cuts,
    int | Cuts: lambda reader: _parse_cuts(reader) if reader.peek() == "[" else reader.integer(),
    str: lambda reader: reader.word("a name"),
    float: lambda reader: float(reader.number("a number")),
    int | float: lambda reader: reader.number("a number"),
    Expr: _parse_expr,
    Expr | None: _parse_expr,
    Size: Reader.size,
    BufferType: lambda reader: BufferType(reader.dtype(), reader.enclosed(reader.size, "[]")),
    tuple[Size, ...]: _bracketed(Reader.size),
    tuple[int, ...]: _bracketed(Reader.integer),
    Mesh: Reader.mesh,
    ir.Routes: _bracketed(Reader.route),
    ir.Sources: _bracketed(lambda reader: None if reader.accept("none") else reader.integer()),
}
_BY_WORD: dict[tuple[bool, str], type[tree.Instruction]] = {}
for _kind in vars(ir).values():
    if isinstance(_kind, type) and issubclass(_kind, tree.Instruction) and _kind.syntax and _kind is not ir.Let:
        _defines = _kind.syntax.startswith("%")
        _BY_WORD[_defines, _kind.syntax.split()[2 if _defines else 0]] = _kind
WORDS = sorted({word for _kind in _BY_WORD.values() for word in re.findall(r"[a-z_]+", re.sub(r"\{\w+\}", " ", _kind.syntax))})
