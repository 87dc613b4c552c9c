"""Symbolic tensors, and the trace in which they record every op."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hostweave.base.errors import Location, ProgramError, UnknownAttribute, did_you_mean, is_of_package
from hostweave.base.signatures import checked, with_ints
from hostweave.fusion_ir.frontend.indexing import IndexKey, indexed
from hostweave.fusion_ir.frontend.recording import being_traced, dim_of, record
from hostweave.fusion_ir.frontend.remedies import SizeName, instead_of
from hostweave.fusion_ir.ir import CHUNKINGS, Fusion, Op, Scalar, Stream, Value
from hostweave.fusion_ir.ops import OPS, fits, infer_type, needs_whole, operand_types
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import INTS, DType, TensorType, f64

# (text such as "a + b", True if bitwise) -> kind of op
_KINDS = {(op.written, kind.startswith("bitwise")): kind for kind, op in OPS.items() if op.written}


def _kind(written: str, dtype: DType) -> str:
    """Kind of op for an operator on tensors of this dtype. `&` is bitwise for ints and logical for bools."""
    is_of_bits = dtype.kind in INTS
    return _KINDS.get((written, is_of_bits)) or _KINDS[written, not is_of_bits]


def _sign(written: str) -> Callable[[Tensor], Tensor]:
    return lambda x: record(_kind(written, x.dtype), x)


def _operator(written: str) -> tuple[Callable[[Tensor, Tensor | Scalar], Tensor], Callable[[Tensor, Scalar], Tensor]]:
    return lambda a, b: record(_kind(written, a.dtype), a, b), lambda b, a: record(_kind(written, b.dtype), a, b)


def _no_number(what: str) -> Callable[[Tensor], NoReturn]:
    def refuse(x: Tensor) -> NoReturn:
        why = f"{what}: the values of {x.type} are not known while a fusion is traced"
        raise ProgramError.here(f"{why}; compute with the tensor, cast by hw.astype, or pass a Python number")

    return refuse


class Tensor:
    """A symbolic tensor: a value of the program that is being traced, with a type and no data.

    A tensor supports Python's operators (`+ - * / // % ** @ & | ^ ~ << >>`, comparisons), `abs`, `divmod`, `round`, basic indexing, and the
    methods below. All other operations are functions of `hw`.
    """

    __hash__ = object.__hash__

    def __init__(self, trace: _Trace, op: Op | None, value: Value):
        self._trace, self._op, self._value = trace, op, value
        self._name: str | None = None
        self._variable: str | None = None  # the user's variable to which the tensor was assigned
        self._word: str | None = None  # replaces the op's kind in a derived name

    def __repr__(self) -> str:
        return f"Tensor({self.type})"

    @property
    def type(self) -> TensorType:
        """Dtype and global dims, and the sharding if the user stated it."""
        return self._value.type

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.type.dims)

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Global sizes: ints, or text such as `M` and `M/8` for symbolic sizes."""
        return tuple(int(size) if size.is_int else SizeName(size) for size in self.type.shape)

    @checked
    def named(self, name: str) -> Tensor:
        """Names the value in both IRs and in generated code. Returns the tensor.

        Raises ProgramError if the tensor is an input, if the name is not an ASCII identifier, or if another value has the name.

        Example: `h = hw.relu(x @ w).named("h")`.
        """
        if not (name.isidentifier() and name.isascii()):
            raise ProgramError.here(f"named: {name!r} is not a name; use ASCII letters, digits and _, and no digit first")
        if self._op is None:
            raise ProgramError.here(f"named: %{self._name} is an input; rename the parameter instead")
        if self._trace.named.get(name, self) is not self:
            raise ProgramError.here(f"named: %{name} is taken by another value; choose another name")
        self._trace.name(self, name)
        return self

    @checked
    def stream(self, dim: int | str, chunks: int | None = None, algorithm: str | None = None, chunking: str | None = None) -> Tensor:
        """Computes the tensor in a chunk loop over `dim`, on several CUDA streams. Returns the tensor.

        - `chunks` is the number of iterations. By default, an iteration computes one index of the dim. In a loop across shards, an
          iteration computes one index of each shard.
        - `chunking` is `by_shard` (a chunk is a shard, or a part of one) or `across_shards` (a chunk has a slice of every shard).
        - `algorithm` is the algorithm of the loop's communication, such as p2p, ring, put or all_gather.

        The compiler chooses `chunking` and `algorithm` if they are omitted. If the rows of a shard cannot be divided equally among its
        chunks, the last chunk may be smaller, and there may be fewer chunks. In loops by shard, ranks exchange shards in the order of ring
        collectives (Patarasuk and Yuan, 2009).

        Raises ProgramError if the tensor is streamed already, or if no loop can compute the tensor. Examples are inputs, results of
        functions, and ops that need the whole dim at once. Also raises ProgramError if `dim`, `chunks` or `chunking` is invalid. An invalid
        `algorithm` raises ProgramError in `hw.compile`.

        Example: `hw.matmul(x, w).stream("M", chunks=8)` with `x: [M@x, K]` on 8 ranks gathers x shard by shard, overlapped with the
        matmuls.
        """
        if self._op is None:
            raise ProgramError.here(f"stream: %{self._name} is an input; stream a value computed from it, or hw.copy({self._name})")
        if self._op.callee:
            why = f"the value is the result of the function @{self._op.callee.name}"
            raise ProgramError.here(f"stream: {why}; stream a tensor in the function")
        if self._value.stream is not None:
            raise ProgramError.here("stream: the value is already streamed; stream one dim only")
        number = dim_of(self, dim, "stream")
        if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
            raise ProgramError.here(f"stream: chunks={chunks!r} must be an int of at least 1")
        if why := Stream(number, chunks).too_many(self.type.shape[number]):
            raise ProgramError.here(f"stream: {why}")
        if how := needs_whole(replace(self._op, result=self._value), operand_types(self._op, self._trace.types), number):
            kind = f"{'an' if self._op.kind[0] in 'aeiou' else 'a'} {self._op.kind}"
            why = f"dim {number} of {self.type} is {how} by {kind}, so no loop can iterate over it"
            raise ProgramError.here(f"stream: {why}; stream an earlier tensor")
        if chunking is not None and chunking not in CHUNKINGS:
            raise ProgramError.here(f"stream: there is no chunking={chunking!r}; {did_you_mean(chunking, CHUNKINGS)}")
        self._value = replace(self._value, stream=Stream(number, chunks, chunking, algorithm))
        return self

    @property
    def T(self) -> Tensor:
        """Transpose of a matrix, a view: [M, N] becomes [N, M].

        Raises ProgramError if the tensor does not have two dims.
        """
        if self.ndim != 2:
            raise ProgramError.here(f"T: {self.type} has {self.ndim} dims, not 2; use hw.permute_dims(x, axes)")
        return record("permute_dims", self, axes=(1, 0))

    def __getitem__(self, key: IndexKey | tuple[IndexKey, ...]) -> Tensor:
        return indexed(self, with_ints(key))

    def __iter__(self) -> Iterator[Tensor]:
        """Iterates over the first dim, whose size must be an int."""
        return map(self.__getitem__, range(self._first_extent("a loop", "use functions of whole tensors, such as hw.sum")))

    def __len__(self) -> int:
        """Size of the first dim, which must be an int."""
        return self._first_extent("len", "use x.shape[0], the name of the size")

    def _first_extent(self, what: str, remedy: str) -> int:
        if not self.ndim or not self.type.shape[0].is_int:
            raise ProgramError.here(f"{what}: {self.type} has no first dim of known size; {remedy}")
        return int(self.type.shape[0])

    def __setitem__(self, key: Any, value: Any = None) -> NoReturn:
        raise ProgramError.here("tensors are immutable; create a new one by hw.where or hw.concat")

    __delitem__ = __setitem__

    if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # libraries probe for such names and expect AttributeError
                raise AttributeError(name)
            raise UnknownAttribute(f"x.{name}: a tensor of a fusion has no {name}; {instead_of(name)}", Location.of_caller())

    def __array_ufunc__(self, ufunc: Any, *_: Any, **__: Any) -> NoReturn:
        why = "NumPy cannot compute with a tensor of a fusion; use operators and functions of hostweave, and pass arrays as inputs"
        raise ProgramError.here(f"numpy.{ufunc.__name__}: {why}")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        why = "a tensor of a fusion holds no data; use functions of hostweave, and pass arrays as inputs"
        raise ProgramError.here(f"numpy.asarray: {why}")

    def __bool__(self) -> bool:
        raise ProgramError.here("the values of a tensor are not known while a fusion is traced; use hw.where")

    __float__, __int__, __index__ = _no_number("float"), _no_number("int"), _no_number("an index")

    def __divmod__(self, other: Tensor | Scalar) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __rdivmod__(self, other: Scalar) -> tuple[Tensor, Tensor]:
        return other // self, other % self

    def __pos__(self) -> Tensor:
        return self

    def __round__(self, digits: int | None = None) -> Tensor:
        if digits:
            raise ProgramError.here(f"round: digits={digits!r}: only digits=0 is supported; scale the tensor before and after")
        return record("round", self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return record("matmul", self, other)

    def __rmatmul__(self, other: Scalar) -> Tensor:
        return record("matmul", other, self)

    def __pow__(self, other: Tensor | Scalar) -> Tensor:
        other = with_ints(other)
        if isinstance(other, int) and other in (1, 2, 3, 4):  # multiplication is tens of times cheaper
            if other == 1:
                return self
            square = self * self
            return square if other == 2 else square * (self if other == 3 else square)
        return record("pow", self, other)

    __rpow__ = _operator("a ** b")[1]
    __add__, __radd__ = _operator("a + b")
    __sub__, __rsub__ = _operator("a - b")
    __mul__, __rmul__ = _operator("a * b")
    __truediv__, __rtruediv__ = _operator("a / b")
    __floordiv__, __rfloordiv__ = _operator("a // b")
    __mod__, __rmod__ = _operator("a % b")
    __and__, __rand__ = _operator("a & b")
    __or__, __ror__ = _operator("a | b")
    __xor__, __rxor__ = _operator("a ^ b")
    __lshift__, __rlshift__ = _operator("a << b")
    __rshift__, __rrshift__ = _operator("a >> b")
    __eq__ = _operator("a == b")[0]  # type: ignore[assignment]
    __ne__ = _operator("a != b")[0]  # type: ignore[assignment]
    __lt__ = _operator("a < b")[0]
    __le__ = _operator("a <= b")[0]
    __gt__ = _operator("a > b")[0]
    __ge__ = _operator("a >= b")[0]
    __neg__, __invert__, __abs__ = _sign("-x"), _sign("~x"), _sign("abs(x)")


class _Trace:
    """Values of a function that is being traced. Until the end of tracing, the names of the values are consecutive numbers.

    `functions` maps each called function to its fusion, or to None during its tracing. `sources` has the user kernels by name.
    """

    def __init__(self, mesh: Mesh, functions: dict[object, Fusion | None] | None = None, sources: dict[str, UserKernel] | None = None):
        self.mesh = mesh
        self.sources = {} if sources is None else sources
        self.functions = {} if functions is None else functions
        self.tensors: dict[str, Tensor] = {}
        self.named: dict[str, Tensor] = {}  # tensors that the user named
        self.frames: dict[FrameType, int] = {}  # user's frame -> number of values when the frame was first seen
        self.types: dict[str, TensorType] = {}
        self.is_traced = False

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the sizes in the types of the traced function's inputs."""
        inputs = (tensor.type for tensor in self.tensors.values() if not tensor._op)
        return frozenset(name for type in inputs for size in type.shape for name in size.symbols)

    def add(self, op: Op | None, type: TensorType, pinned: bool, name: str | None = None) -> Tensor:
        number = str(len(self.tensors))
        self.types[number] = type
        tensor = self.tensors[number] = Tensor(self, op, Value(number, type, pinned=pinned))
        if name is not None:
            self.name(tensor, name)
        return tensor

    def needed_for(self, results: Iterable[Tensor]) -> set[str]:
        """Names of the results, and of the values from which they are computed."""
        needed = {tensor._value.name for tensor in results}
        for number, tensor in reversed(self.tensors.items()):
            if number in needed and tensor._op:
                needed.update(tensor._op.tensors)
        return needed

    def record(self, op: Op, operands: Sequence[Tensor | Scalar], known: Sequence[Tensor], target: TensorType | None) -> Tensor:
        """Adds an op, and returns its result. `known` has the operands that are tensors. If no operand is a tensor, `known` may have the
        tensor `beside` of `recording.record`."""
        kind, location = op.kind, op.location
        assert location is not None
        if any(tensor._trace is not self for tensor in known):
            raise ProgramError(f"{kind}: the tensors belong to different fusions or functions; make one of them an input", location)
        if self.is_traced:
            why = f"the function that made the tensor {known[0].type} has returned"
            raise ProgramError(f"{kind}: {why}; use the tensor in the function, or use the result of run", location)
        if target is not None:
            mesh = known[0].type.mesh if known else None
            target = placed_on(target, self.mesh, location) if kind == "reshard" else replace(target, mesh=mesh)
        self.look_at_variables()
        is_float = bool(known) and known[-1].dtype.kind == "float"
        names = tuple(_weak(o, is_float) if isinstance(o, int | float) else o._value.name for o in operands)
        op = replace(op, operands=names, result=Value("", target or known[0].type))
        derived = infer_type(op, operand_types(op, self.types))
        if target is None or op.callee or kind not in ("reshard", "kernel", "output"):
            return self.add(op, derived, pinned=False)
        if kind != "reshard":
            target.check(location, self.mesh)
        return self.add(op, target, pinned=kind == "reshard")

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Tensor]) -> Any:
        outer = being_traced.set(self)
        try:
            returned = function(**arguments)
        finally:
            being_traced.reset(outer)
        self.take_variables()
        self.frames.clear()  # frames keep all their variables alive
        return returned

    def look_at_variables(self) -> None:
        """Names tensors after the variables of the user's active functions."""
        frames, frame = list[FrameType](), sys._getframe(1)
        while frame.f_back is not None and frame.f_code is not self.call.__code__:
            frames += [] if is_of_package(frame) else [frame]
            frame = frame.f_back
        for frame in reversed(frames):
            self.frames.setdefault(frame, len(self.tensors))
        self.take_variables(frames)

    def take_variables(self, frames: Iterable[FrameType] | None = None) -> None:
        """Names tensors after variables of the frames, by default of all recorded frames. Skips tensors that are older than
        the frame, such as arguments."""
        for frame in self.frames if frames is None else frames:
            for name, value in frame.f_locals.items():
                is_made_here = type(value) is Tensor and value._trace is self and int(value._value.name) >= self.frames[frame]
                word = name.strip("_")
                if is_made_here and value._variable is None and word.isascii() and word.isidentifier():
                    value._variable = word

    def source(self, source: UserKernel) -> UserKernel:
        """Records a user kernel, and returns it under a unique name."""
        names = (source.name if number == 1 else f"{source.name}_{number}" for number in count(1))
        named = (replace(source, name=name) for name in names)
        return next(one for one in named if self.sources.setdefault(one.name, one) == one)

    def name(self, tensor: Tensor, name: str) -> None:
        if tensor._name is not None:
            del self.named[tensor._name]
        tensor._name = name
        self.named[name] = tensor


def _weak(number: Scalar, is_float: bool) -> Scalar:
    """Plain Python number. If `is_float`, an int becomes a float, unless it is too large for f64."""
    if isinstance(number, bool):
        return number
    if isinstance(number, float):
        return math.nan if math.isnan(number) else float(number)
    return float(number) if is_float and fits(number, f64) else int(number)


def placed_on(type: TensorType, program: Mesh, location: Location) -> TensorType:
    """Resolves and checks the mesh of a type in a program on mesh `program`. A result on the program's mesh has mesh None."""
    mesh = type.mesh
    if mesh is not None and mesh.members is None and mesh != program:
        if mesh.size != program.size:
            raise ProgramError(f"{type}: {mesh} is not part of {program}; use ranks of the program's mesh, as mesh.ranks([0, 1])", location)
        mesh = Mesh(mesh.axes, tuple(range(mesh.size)))
    placed = replace(type, mesh=None if mesh and (mesh.axes, tuple(mesh.all_ranks)) == (program.axes, tuple(program.all_ranks)) else mesh)
    placed.check(location, program)
    return placed
