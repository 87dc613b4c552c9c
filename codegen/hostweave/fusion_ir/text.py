"""Parser of fusions: `parse_fusion(str(f)) == f`. Also parses the ops of kernels in the host IR."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from hostweave.base.errors import Location, did_you_mean
from hostweave.fusion_ir.choice import parse_choice
from hostweave.fusion_ir.ir import CHUNKINGS, ROTATIONS, AttributeValue, ChunkLoop, Fusion, MeshAxes, Op, Scalar, Stream, Value
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.rewriting import map_functions
from hostweave.fusion_ir.user_kernel import UserKernel, parse_user_kernel
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.transports.transport import NAMES
from hostweave.types.blocks import Transfer
from hostweave.types.group import ParameterGroup
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType
from hostweave.types.text import Reader

T = TypeVar("T")
Defined = TypeVar("Defined", UserKernel, Fusion)


def parse_fusion(text: str) -> Fusion:
    """Parses and verifies the text of a fusion. Raises ParseError for a malformed text, and ProgramError for an invalid program."""
    reader, user_kernels, functions = Reader(text), dict[str, UserKernel](), dict[str, Fusion]()

    def define(into: dict[str, Defined], word: str, parse: Callable[[], Defined]) -> None:
        at, made = reader.at + 1, parse()
        if made.name in into:
            reader.fail(f"{word} @{made.name} is defined twice; rename one", at)
        into[made.name] = made

    reader.repeated("user_kernel", lambda: define(user_kernels, "user_kernel", lambda: parse_user_kernel(reader)))
    reader.repeated("function", lambda: define(functions, "function", lambda: _parse_body(reader, "function", functions, user_kernels)))
    reader.expect("fusion")
    fusion = _parse_body(reader, "fusion", functions, user_kernels)
    if reader.peek():
        reader.fail(f"expected the end of the text, found {reader.found()}")
    fusion = map_functions(fusion, lambda body: replace(body, mesh=fusion.mesh))  # the text states the mesh once
    verify_fusion(fusion)
    return fusion


def _parse_body(reader: Reader, word: str, functions: Mapping[str, Fusion], user_kernels: Mapping[str, UserKernel]) -> Fusion:
    name = reader.global_name(f"the {word}")
    inputs = reader.enclosed(lambda: Value(*reader.typed_name(), pinned=True, group=reader.group()))
    mesh = reader.mesh() if reader.peek() == "mesh" else Mesh()
    reader.expect("{")
    known = {value.name for value in inputs}
    body: list[Op | ChunkLoop] = []

    def op() -> Op:
        made = parse_op(reader, known, functions, user_kernels)
        known.add(made.result.name)
        return made

    while reader.peek() not in ("return", "choice"):
        body.append(_parse_loop(reader, known, op) if reader.accept("loop") else op())
    choices = reader.repeated("choice", lambda: parse_choice(reader))
    reader.expect("return")

    def output() -> tuple[str, str, ParameterGroup | None]:
        return _parse_use(reader, known), _parse_use(reader, known) if reader.accept("in") else "", reader.group()

    returned = reader.separated(output)
    reader.expect("}")
    outputs, donated, groups = zip(*returned, strict=True) if returned else ((), (), ())
    donated, groups = (given if any(given) else () for given in (donated, groups))
    return Fusion(name, mesh, inputs, tuple(body), outputs, donated, choices, groups)


def _parse_loop(reader: Reader, known: set[str], op: Callable[[], Op]) -> ChunkLoop:
    """Parses the rest of `loop 8 chunks by_shard local_first { ... }`."""

    def one_of(words: Sequence[str]) -> str:
        if reader.peek() not in words:
            reader.fail(f"expected {' or '.join(words)}, found {reader.found()}")
        return reader.take()

    trips, drops_dim, chunking = reader.size(), one_of(("chunks", "indices")) == "indices", one_of(CHUNKINGS)
    rotation = reader.take() if reader.peek() in ROTATIONS else None
    gathered = _parse_use(reader, known) if reader.accept("of") else ""
    reader.expect("{")
    ops = [op()]
    while not reader.accept("}"):
        ops.append(op())
    return ChunkLoop(tuple(ops), trips, drops_dim, chunking, rotation, gathered)


def parse_op(
    reader: Reader,
    known: set[str] | None = None,
    functions: Mapping[str, Fusion] = MappingProxyType({}),
    user_kernels: Mapping[str, UserKernel] = MappingProxyType({}),
) -> Op:
    """Parses an op. `known` has the names that operands may have. None allows any name."""
    location = Location("text", reader.line())
    result = parse_value(reader)
    reader.expect("=")
    at = reader.at
    kind = reader.word("the name of an op")
    if kind not in OPS:
        reader.fail(f"unknown op {kind!r}; {did_you_mean(kind, OPS)}", at)
    is_called = kind in ("call", "repeat") or (kind == "output" and reader.peek() == "@")
    callee = _parse_named(reader, functions, "function") if is_called else None
    user_kernel = _parse_named(reader, user_kernels, "user_kernel") if kind == "kernel" else None
    operands: list[str | Scalar] = []
    attributes: list[tuple[str, AttributeValue]] = []

    def item() -> None:
        if reader.peek(1) == "=":
            name = reader.word("the name of an attribute")
            reader.expect("=")
            is_size = any(attribute.name == name and attribute.type is Size for attribute in OPS[kind].attributes)
            attributes.append((name, reader.size() if is_size else _parse_attribute(reader)))
        else:
            operands.append(_parse_use(reader, known) if reader.peek() == "%" else _parse_number(reader))

    reader.enclosed(item)
    return Op(kind, tuple(operands), result, tuple(attributes), location, callee=callee, user_kernel=user_kernel)


def _parse_named(reader: Reader, defined: Mapping[str, T], what: str) -> T:
    reader.expect("@")
    at = reader.at
    name = reader.word(f"the name of a {what}")
    if name not in defined:
        known = ", ".join(f"@{other}" for other in defined) or "none"
        reader.fail(f"there is no {what} @{name} above; the {what}s here: {known}", at)
    return defined[name]


def _parse_use(reader: Reader, known: set[str] | None) -> str:
    at = reader.at
    name = reader.named()
    if known is not None and name not in known:
        reader.fail(f"%{name} is used before it is defined; define it above this line", at)
    return name


def parse_value(reader: Reader) -> Value:
    name, type = reader.typed_name()
    pinned, is_async = reader.accept("pinned"), reader.accept("async")
    transport = next((word for word in NAMES if is_async and reader.accept(word)), "")
    return Value(name, type, _parse_stream(reader, type) if reader.accept("stream") else None, pinned, is_async, transport)


def _parse_stream(reader: Reader, type: TensorType) -> Stream:
    reader.expect("(")
    at = reader.at
    axis = reader.take()
    try:
        dim = type.dim(int(axis) if axis.isdigit() and len(axis) < 4 else axis)
    except ValueError as error:
        reader.fail(str(error), at)
    chunks = chunking = by = None
    while reader.accept(","):
        word = reader.peek()
        if word.isdigit() and chunks is None:
            chunks = reader.integer()
        elif word in CHUNKINGS and chunking is None:
            chunking = reader.take()
        elif word.isidentifier() and word not in CHUNKINGS and by is None:
            by = reader.take()
        else:
            reader.fail(f"expected a number of chunks, {', '.join(CHUNKINGS)} or an algorithm, once each, found {reader.found()}")
    reader.expect(")")
    return Stream(dim, chunks, chunking, by)


def _parse_attribute(reader: Reader) -> AttributeValue:
    if reader.accept("["):
        return _parse_transfer(reader)
    if reader.accept("("):
        return MeshAxes(reader.list_of(lambda: reader.word("a mesh axis"), ")")) if reader.peek().isidentifier() else _parse_ints(reader)
    if reader.peek() in ("true", "false", "inf", "nan") or not reader.peek().isidentifier():
        return _parse_number(reader)
    return reader.word("a value")


def _parse_transfer(reader: Reader) -> Transfer:
    """Parses the rest of `[(1, 1) to (2, 1): 0[0] -> 2[0], 1[0] -> 2[1]]`."""

    def cuts(end: str) -> tuple[int, ...]:
        reader.expect("(")
        numbers = _parse_ints(reader)
        reader.expect(end)
        return numbers

    return Transfer(cuts("to"), cuts(":"), reader.list_of(reader.route, "]"))


def _parse_ints(reader: Reader) -> tuple[int, ...]:
    """Parses the rest of `(0,)` or `(0, -1)`."""
    return reader.list_of(lambda: (-1 if reader.accept("-") else 1) * reader.integer(), ")")


def _parse_number(reader: Reader) -> Scalar:
    return reader.take() == "true" if reader.peek() in ("true", "false") else reader.number("a %value or a number")
