"""Instructions of the host IR that allocate or free memory, or define a view of memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from hostweave.host_ir.expr import Const, Expr
from hostweave.host_ir.tree import Alias, Allocated, Freed, Instruction, Viewed
from hostweave.types.size import Size, product
from hostweave.types.tensor import BufferType, row_major, strided, strides_of


@dataclass(frozen=True)
class Allocate(Instruction):
    """Allocates a temporary in the arena."""

    out: Allocated
    type: BufferType
    calls = False
    syntax = "%{out} = allocate {type}"

    def defined(self, types: Mapping[str, BufferType]) -> dict[str, BufferType]:
        return {self.out: self.type}


@dataclass(frozen=True)
class AllocateWindow(Allocate):
    """Allocates a temporary that peers access, at the same offset in the windows of all ranks."""

    syntax = "%{out} = allocate_window {type}"
    in_window = True


@dataclass(frozen=True)
class Deallocate(Instruction):
    src: Freed
    syntax = "deallocate %{src}"


@dataclass(frozen=True)
class View(Instruction):
    """A view of elements of a buffer, or of one of two buffers."""

    out: Viewed
    src: Alias
    calls = False

    def type_of(self, source: BufferType) -> BufferType:
        """Type of the view, without a check of its bounds. Raises ValueError if the view is not possible."""
        raise NotImplementedError

    def defined(self, types: Mapping[str, BufferType]) -> dict[str, BufferType]:
        return {self.out: self.type_of(types[self.src])}

    @property
    def offset(self) -> Expr:
        """First element of the view, in units of `stride`."""
        return Const(0)

    def stride(self, source: BufferType) -> Size:
        """Elements per unit of `offset`."""
        return Size()


class PartialView(View):
    """A view of some indices of one dim."""

    dim: int

    @property
    def span(self) -> tuple[int, Expr, Size]:
        raise NotImplementedError

    @property
    def offset(self) -> Expr:
        return self.span[1]

    def stride(self, source: BufferType) -> Size:
        return strides_of(source)[self.dim]


@dataclass(frozen=True)
class Select(PartialView):
    """The source at one index of a dim. The view lacks the dim."""

    dim: int
    index: Expr
    syntax = "%{out} = select %{src}[{dim}: {index}]"

    def chunk_of(self, source: BufferType) -> tuple[int, Expr, Size]:
        return self.dim, self.index, source.shape[self.dim]

    def type_of(self, source: BufferType) -> BufferType:
        shape, strides, dim = source.shape, strides_of(source), self.dim
        return strided(source, shape[:dim] + shape[dim + 1 :], strides[:dim] + strides[dim + 1 :])

    @property
    def span(self) -> tuple[int, Expr, Size]:
        return self.dim, self.index, Size()


@dataclass(frozen=True)
class Chunk(View):
    """Chunk `index` of `count` equal chunks of a dim."""

    dim: int
    index: Expr
    count: Size
    syntax = "%{out} = chunk %{src}[{dim}: {index} of {count}]"

    def chunk_of(self, source: BufferType) -> tuple[int, Expr, Size]:
        return self.dim, self.index, self.count

    def type_of(self, source: BufferType) -> BufferType:
        if self.count == Size(0):
            raise ValueError("the number of chunks must be at least 1: correct it")
        chunk = source.shape[self.dim].divided_by(self.count)
        if chunk is None or (not chunk.factors and chunk.divisor != 1):
            raise ValueError(f"cannot cut {source.shape[self.dim]} into {self.count} chunks")
        return strided(source, _with(source.shape, self.dim, chunk), strides_of(source))

    @property
    def offset(self) -> Expr:
        return self.index

    def stride(self, source: BufferType) -> Size:
        return self.type_of(source).shape[self.dim] * strides_of(source)[self.dim]


@dataclass(frozen=True)
class Slice(PartialView):
    """`size` consecutive indices of a dim, starting at `start`."""

    dim: int
    size: Size
    start: Expr
    syntax = "%{out} = slice %{src}[{dim}: {size} from {start}]"

    def type_of(self, source: BufferType) -> BufferType:
        return strided(source, _with(source.shape, self.dim, self.size), strides_of(source))

    @property
    def span(self) -> tuple[int, Expr, Size]:
        return self.dim, self.start, self.size


@dataclass(frozen=True)
class Strided(Slice):
    """`size` indices of a dim, starting at `start`, with distance `step`."""

    step: int
    syntax = "%{out} = strided %{src}[{dim}: {size} from {start} by {step}]"

    def type_of(self, source: BufferType) -> BufferType:
        if self.step < 1:
            raise ValueError(f"the step is {self.step}: it must be at least 1")
        strides, dim = strides_of(source), self.dim
        return strided(source, _with(source.shape, dim, self.size), _with(strides, dim, strides[dim] * self.step))

    @property
    def span(self) -> tuple[int, Expr, Size]:
        return self.dim, self.start, (self.size - 1) * self.step + 1


@dataclass(frozen=True)
class Reshape(View):
    """The elements of the source in the same order, with another shape."""

    shape: tuple[Size, ...]
    syntax = "%{out} = reshape %{src} to {shape}"
    shows = "in order"

    def type_of(self, source: BufferType) -> BufferType:
        return strided(source, self.shape, _reshaped_strides(source.shape, strides_of(source), self.shape))


@dataclass(frozen=True)
class Permute(View):
    """The elements of the source, with the dims in another order: dim i is dim `order[i]` of the source."""

    order: tuple[int, ...]
    syntax = "%{out} = permute %{src} by {order}"
    shows = "all"

    def type_of(self, source: BufferType) -> BufferType:
        if sorted(self.order) != list(range(len(source.shape))):
            raise ValueError("the order must name each of its dims once")
        strides = strides_of(source)
        return strided(source, tuple(source.shape[i] for i in self.order), tuple(strides[i] for i in self.order))


@dataclass(frozen=True)
class Choose(View):
    """`src` if the condition is true, otherwise `other`, which has the same type."""

    condition: Expr
    other: Alias
    syntax = "%{out} = choose %{src} if {condition} else %{other}"

    @property
    def chosen_by(self) -> Expr:
        return self.condition

    def type_of(self, source: BufferType) -> BufferType:
        return source

    def defined(self, types: Mapping[str, BufferType]) -> dict[str, BufferType]:
        if types[self.other] != types[self.src]:
            raise ValueError(f"%{self.other} is {types[self.other]}: both buffers must have the same type and layout")
        return super().defined(types)


def _with(values: tuple[Size, ...], dim: int, value: Size) -> tuple[Size, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


@lru_cache(maxsize=4096)
def _reshaped_strides(shape: tuple[Size, ...], strides: tuple[Size, ...], wanted: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides with which the shape `wanted` has the same elements. Raises ValueError if there are no such strides, or if symbolic sizes do
    not determine the strides."""
    if product(shape) == product(wanted) == Size(0):
        return row_major(wanted)
    result: list[Size] = []
    source = [(e, s) for e, s in zip(shape, strides, strict=True) if e != Size()]
    target = list(wanted)
    i = j = 0
    while j < len(target):
        if target[j] == Size():
            result.append(Size())
            j += 1
            continue
        if i == len(source):
            raise ValueError("a reshape keeps the number of elements: correct the shape")
        have, want = source[i][0], target[j]
        i_end, j_end = i + 1, j + 1
        while have != want:  # Extends the source if `have` divides `want`, or if the target has no more dims. Otherwise extends the target.
            quotient = want.divided_by(have)
            grow_source = (quotient is not None and quotient.divisor == 1) or j_end == len(target)
            if grow_source and i_end < len(source) and source[i_end - 1][1] == source[i_end][1] * source[i_end][0]:
                have, i_end = have * source[i_end][0], i_end + 1
            elif not grow_source:
                want, j_end = want * target[j_end], j_end + 1
            else:
                raise ValueError("these dims are not contiguous in memory, or the number of elements differs")
        result += (source[i_end - 1][1] * step for step in row_major(tuple(target[j:j_end])))
        i, j = i_end, j_end
    if i != len(source):
        raise ValueError("a reshape keeps the number of elements: correct the shape")
    return tuple(result)
