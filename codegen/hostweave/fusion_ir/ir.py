"""The fusion IR: math on global tensors in static single assignment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any, Generic, NoReturn, TypeVar, cast

from hostweave.base.errors import Location, ProgramError
from hostweave.base.signatures import checked
from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.choice import Choice
from hostweave.fusion_ir.user_kernel import UserKernel, print_user_kernel
from hostweave.types.blocks import Transfer
from hostweave.types.group import ParameterGroup, one_by_one
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType


@dataclass(frozen=True)
class MeshAxes:
    """Names of mesh axes, as an attribute of an op: `(x, y)`."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"({', '.join(self.names)})"


AttributeValue = int | float | bool | str | tuple[int, ...] | MeshAxes | Transfer | Size | None
Scalar = int | float | bool
T = TypeVar("T")


@dataclass(frozen=True)
class Attribute(Generic[T]):
    """An attribute of ops, required if the default is None."""

    name: str
    type: type[T]
    default: T | None = None


def attributes(**values: AttributeValue) -> tuple[tuple[str, AttributeValue], ...]:
    """Attributes of an op, without values None and False."""
    return tuple((name, value) for name, value in values.items() if value is not None and value is not False)


MAX_TRIPS = 2**12  # maximum int number of iterations of a chunk loop, because some passes compare all pairs of iterations
CHUNKINGS = ("by_shard", "across_shards")
ROTATIONS = ("local_first", "local_last")


@dataclass(frozen=True)
class Stream:
    """The dim along which a chunk loop computes a value, and the `algorithm` of a reshard in the loop.

    Before the pass `choose_overlap`, a stream also requests these properties of a `ChunkLoop`:

    - `chunks`: number of iterations. If None, an iteration computes one index of the dim, or of each shard, and no loop value has the dim.
    - `chunking`: `by_shard`, `across_shards`, or None if not chosen yet.
    """

    dim: int
    chunks: int | None = None
    chunking: str | None = None
    algorithm: str | None = None

    def of(self, type: TensorType) -> str:
        """Text for a tensor of this type: `stream(M, 8)`."""
        name = str(type.shape[self.dim])
        is_name = name.isidentifier() and sum(str(size) == name for size in type.shape) == 1
        words = [name if is_name else str(self.dim), self.chunks, self.chunking, self.algorithm]
        return f"stream({', '.join(str(word) for word in words if word is not None)})"

    def too_many(self, size: Size) -> str:
        """Error text if a dim of this size gives too many iterations, or ""."""
        trips = self.chunks if self.chunks is not None else int(size) if size.is_int else 0
        return f"{trips} iterations are more than {MAX_TRIPS}, the maximum of a loop; give fewer chunks" if trips > MAX_TRIPS else ""


@dataclass(frozen=True)
class Value:
    """A named tensor.

    If `pinned`, no pass may change the sharding. If `is_async`, the value is the result of a communication on a separate stream, through
    `transport` if `transport` is not "". `group` is set for an input that is a parameter group.
    """

    name: str
    type: TensorType
    stream: Stream | None = None
    pinned: bool = False
    is_async: bool = False
    transport: str = ""
    group: ParameterGroup | None = None

    @property
    def walked(self) -> Stream:
        assert self.stream is not None
        return self.stream

    def __str__(self) -> str:
        """Text: `%y: bf16[M@x, N] pinned stream(M, 8, by_shard, p2p)`."""
        words = [f"%{self.name}: {self.type}", "pinned" * self.pinned, "async" * self.is_async, self.transport]
        return " ".join(filter(None, [*words, self.stream.of(self.type) if self.stream else ""]))


@dataclass(frozen=True)
class Op:
    """One operation: `%result = kind(%operand, ..., attribute=...)`. `ops/` defines all kinds.

    An operand is the name of a value, or a number in the dtype of the last tensor operand. Operands and attributes are compared as text,
    because 0.0 == -0.0 and 1 == True.
    """

    kind: str
    operands: tuple[str | Scalar, ...] = field(compare=False)
    result: Value
    attributes: tuple[tuple[str, AttributeValue], ...] = field(default=(), compare=False)
    compared: str = field(init=False, repr=False)
    location: Location | None = field(default=None, compare=False)
    callee: Fusion | None = field(default=None, repr=False, kw_only=True)
    user_kernel: UserKernel | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compared", repr((self.operands, self.attributes)))

    def __getitem__(self, attribute: Attribute[T]) -> T:
        value: Any = dict(self.attributes).get(attribute.name, attribute.default)
        if value is None:
            raise ValueError(f"{self.kind}: attribute {attribute.name} is missing")
        return cast(T, value)

    @property
    def called(self) -> Fusion:
        """The function that a call or a repeat calls."""
        assert self.callee is not None
        return self.callee

    def with_attribute(self, attribute: Attribute[T], value: T) -> Op:
        new: Any = value
        return replace(self, attributes=tuple((name, new if name == attribute.name else old) for name, old in self.attributes))

    def renamed(self, names: Mapping[str, str]) -> Op:
        return replaced(self, operands=tuple([names.get(o, o) if isinstance(o, str) else o for o in self.operands]))

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Operands that are not numbers."""
        return tuple(operand for operand in self.operands if isinstance(operand, str))

    def __str__(self) -> str:
        """Text: `%y: bf16[M, N] stream(M, 8) = matmul(%x, %w)`."""
        operands = [f"%{operand}" if isinstance(operand, str) else _number(operand) for operand in self.operands]
        named = [f"{name}={_number(value) if isinstance(value, int | float) else value}" for name, value in self.attributes]
        named_of = self.callee or self.user_kernel
        kind = f"{self.kind} @{named_of.name}" if named_of else self.kind
        return f"{self.result} = {kind}({', '.join(operands + named)})"


@dataclass(frozen=True)
class ChunkLoop:
    """A loop over the chunks of a dim. Each iteration computes one chunk of every op.

    - `trips`: number of iterations. If `drops_dim`, a chunk is one index of the dim, or of each shard, and no loop value has the dim.
    - `chunking`: `by_shard` (chunk i is block i of the global dim) or `across_shards` (chunk i has slice i of every shard).
    - `rotation`, in a loop by shard: a rank computes its own block first (`local_first`), last (`local_last`), or in the common order
      (None).
    - `gathered`: name of an async all-gather, of which each iteration uses one shard, or "".
    """

    ops: tuple[Op, ...]
    trips: Size
    drops_dim: bool
    chunking: str
    rotation: str | None = None
    gathered: str = ""

    @property
    def communication(self) -> Op | None:
        return next((op for op in self.ops if op.result.walked.algorithm), None)

    @property
    def by_block(self) -> bool:
        """True if a communication by shard determines the order of the chunks."""
        return self.chunking == "by_shard" and self.communication is not None

    def makes(self, name: str) -> bool:
        return any(op.result.name == name for op in self.ops)

    def __str__(self) -> str:
        """Text: `loop 8 chunks by_shard local_first {`, the ops, and `}`."""
        of = f"of %{self.gathered}" if self.gathered else ""
        words = ("loop", str(self.trips), "indices" if self.drops_dim else "chunks", self.chunking, self.rotation, of, "{")
        return "\n".join((" ".join(filter(None, words)), *(f"  {op}" for op in self.ops), "}"))


@dataclass(frozen=True)
class Fusion:
    """A program, or a function of a program.

    `donated` and `returned` are empty, or have one entry per output. An entry of `donated` is the input whose memory the output reuses, or
    "". An entry of `returned` is the parameter group of the output, or None. `choices` are the compiler's choices for reshards.
    """

    name: str
    mesh: Mesh
    inputs: tuple[Value, ...]
    body: tuple[Op | ChunkLoop, ...]
    outputs: tuple[str, ...]
    donated: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    returned: tuple[ParameterGroup | None, ...] = ()

    def __repr__(self) -> str:
        inputs = ", ".join(f"{value.name}: {value.type}" for value in self.inputs)
        results = ", ".join(map(str, self.output_types))
        return f"<hostweave fusion {self.name}({inputs}) -> {results} on {self.mesh}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __call__(self, *_: object, **__: object) -> NoReturn:
        remedy = "use hw.compile(fusion).run(...), or hw.block for a function that fusions call"
        raise ProgramError.here(f"@{self.name}: a fusion is not a function of arrays or tensors; {remedy}")

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for item in self.body for op in (item.ops if isinstance(item, ChunkLoop) else (item,)))

    @cached_property
    def loop_of(self) -> dict[str, ChunkLoop]:
        return {op.result.name: item for item in self.body if isinstance(item, ChunkLoop) for op in item.ops}

    @cached_property
    def made(self) -> Mapping[str, Op]:
        return {op.result.name: op for op in self.ops}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        return {name: value.type for name, value in self.values().items()}

    def values(self) -> Mapping[str, Value]:
        return self._values

    @cached_property
    def _values(self) -> dict[str, Value]:
        return {value.name: value for value in (*self.inputs, *(op.result for op in self.ops))}

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        return tuple(self.types[name] for name in self.outputs)

    @property
    def arguments(self) -> tuple[Value, ...]:
        """Tensors that a caller passes: the inputs, with each parameter group replaced by its tensors."""
        return tuple(_alone(value, number, name) for value, number, name in one_by_one(self.inputs))

    @property
    def results(self) -> tuple[Value, ...]:
        """Tensors that a caller gets: the outputs, with each parameter group replaced by its tensors."""
        return tuple(_alone(value, number, name) for value, number, name in one_by_one(self._grouped_outputs))

    @property
    def numbered_results(self) -> tuple[tuple[str, int | None], ...]:
        """For each entry of `results`: the name of the output, and the index in the output's parameter group or None."""
        return tuple((value.name, number) for value, number, _ in one_by_one(self._grouped_outputs))

    @property
    def _grouped_outputs(self) -> Iterator[Value]:
        values, groups = self.values(), self.returned or (None,) * len(self.outputs)
        return (replace(values[name], group=group) for name, group in zip(self.outputs, groups, strict=True))

    @cached_property
    def depths(self) -> dict[str, int]:
        """Maps each symbol that is the first dim of a parameter group to the number of tensors of the group."""
        grouped = (
            (value.type.shape[:1], value.group)
            for value in (*self.inputs, *(self._grouped_outputs if self.returned else ()))
            if value.group
        )
        return {size.name: len(group.names) for (size,), group in grouped if size.name}

    @cached_property
    def functions(self) -> tuple[Fusion, ...]:
        """Functions that the fusion calls, also indirectly, each after its callees."""
        found: dict[str, Fusion] = {}
        for op in self.ops:
            if op.callee and op.callee.name not in found:
                found |= {function.name: function for function in (*op.callee.functions, op.callee)}
        return tuple(found.values())

    @property
    def all_ops(self) -> Iterator[Op]:
        """Ops of the functions, then of the fusion."""
        return (op for body in (*self.functions, self) for op in body.ops)

    @property
    def user_kernels(self) -> tuple[UserKernel, ...]:
        return tuple(dict.fromkeys(op.user_kernel for op in self.all_ops if op.user_kernel))

    def __str__(self) -> str:
        user_kernels = "".join(f"{line}\n" for user_kernel in self.user_kernels for line in print_user_kernel(user_kernel))
        functions = "".join(function._text("function") for function in self.functions)
        return user_kernels + functions + self._text("fusion", f" {self.mesh}" if self.mesh.axes else "")

    def _text(self, word: str, mesh: str = "") -> str:
        inputs = ", ".join(f"%{value.name}: {value.type}" + (f" {value.group}" if value.group else "") for value in self.inputs)
        lines = [f"  {line}\n" for item in (*self.body, *self.choices) for line in str(item).split("\n")]
        donated = self.donated or ("",) * len(self.outputs)
        groups = self.returned or (None,) * len(self.outputs)
        ends = ((f" in %{into}" if into else "") + (f" {group}" if group else "") for into, group in zip(donated, groups, strict=True))
        returned = ", ".join(f"%{name}{end}" for name, end in zip(self.outputs, ends, strict=True))
        return f"{word} @{self.name}({inputs}){mesh} {{\n{''.join(lines)}  return {returned}\n}}\n"

    @staticmethod
    @checked
    def parse(text: str) -> Fusion:
        """Parses the text of a fusion.

        Raises ParseError with a line and column if the text is malformed, and ProgramError if the program is invalid.
        """
        from hostweave.fusion_ir.text import parse_fusion

        return parse_fusion(text)


def _alone(value: Value, number: int | None, name: str) -> Value:
    return value if number is None else replace(value, name=name, type=replace(value.type, dims=value.type.dims[1:]), group=None)


def _number(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
