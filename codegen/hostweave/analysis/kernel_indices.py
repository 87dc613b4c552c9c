"""Index space of a kernel: the loop index of each dim of each value, and the reduced indices."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hostweave.base.unchanged import fact
from hostweave.fusion_ir.index_map import ONE, Labels
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS, index_map, operand_types
from hostweave.host_ir import tree
from hostweave.host_ir.ir import Function, Kernel, Parameter, analysis
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType

DimOfValue = tuple[str, int]  # name of a value, and number of one of its dims


class NotOneKernel(Exception):
    """One kernel cannot compute the ops. The message states the reason."""


@dataclass(frozen=True)
class OperandRange:
    """Range that an operand of a concat or pad fills along one dim of the result."""

    dim: int
    index: str | None  # index of the result's dim
    part: str  # name of the operand's dim, which is a part
    whole: str  # name of the result's dim if this dim is a part too, otherwise ""
    start: Size
    end: Size


@dataclass(frozen=True)
class Iteration:
    """Index space of a kernel. `indices` maps each value to the indices of its dims. A dim without a loop has None.

    A reduction reads values that have all indices. Its result has only the `kept` indices. Each result of the kernel has all indices, or
    exactly the `kept` indices.

    A part is a dim of an operand of a concat or pad along which the op joins or pads. A part has a name, and the index of the result's dim.
    """

    sizes: dict[str, Size]  # size of each index, in the order of values and their dims
    indices: dict[str, Labels]
    kept: tuple[str, ...]  # kept indices, in the order of the last result's dims
    reduced: tuple[str, ...]
    fibers: dict[str, int]  # value -> its dim without a loop: data indexes the dim, or an op needs the whole dim
    parts: dict[str, dict[str, str]]  # value -> index -> name of the part
    joined: dict[str, tuple[tuple[OperandRange, ...], ...]]  # result of a concat or pad -> ranges of every operand

    def is_whole(self, value: str) -> bool:
        """True if a value varies along a reduced index."""
        return any(index in self.reduced for index in self.indices[value])


def iteration(kernel: Kernel) -> Iteration:
    """Index space of a kernel. Raises NotOneKernel if one kernel cannot compute the ops."""
    found = _index_space(kernel)
    if isinstance(found, str):
        raise NotOneKernel(found)
    return found


@analysis
def _index_space(kernel: Kernel) -> Iteration | str:
    """Index space of a kernel, or the reason why one kernel cannot compute the ops."""
    try:
        return _iteration(kernel)
    except NotOneKernel as reason:
        return str(reason)


class _Dims:
    """Union-find over dims that share an index. Also maps each part to the dim that contains it."""

    def __init__(self) -> None:
        self.same: dict[DimOfValue, DimOfValue] = {}
        self.whole: dict[DimOfValue, DimOfValue] = {}

    def first(self, dim: DimOfValue) -> DimOfValue:
        while dim in self.same:
            dim = self.same[dim]
        return dim

    def join(self, dims: list[DimOfValue]) -> None:
        one = self.first(dims[0])
        self.same.update((other, one) for other in map(self.first, dims[1:]) if other != one)

    def contain(self, part: DimOfValue, whole: DimOfValue) -> None:
        """Records that `part` is a part of `whole`. Call `join` first.

        Raises NotOneKernel if `part` would be a part of two dims, or of itself.
        """
        part, whole = self.first(part), self.first(whole)
        if self.whole.setdefault(part, whole) != whole or self.outermost(whole, part) == part:
            raise NotOneKernel(f"%{part[0]} is a part of two values")

    def outermost(self, dim: DimOfValue, last: DimOfValue | None = None) -> DimOfValue:
        """Follows `whole` from `dim` to the outermost dim. Stops at `last`."""
        dim = self.first(dim)
        while dim in self.whole and dim != last:
            dim = self.whole[dim]
        return dim

    def part(self, dim: DimOfValue) -> str:
        """Name of a dim that is a part, otherwise ""."""
        return _label(self.first(dim)) if self.first(dim) in self.whole else ""


def _label(dim: DimOfValue) -> str:
    return "{}.{}".format(*dim)


def _iteration(kernel: Kernel) -> Iteration:
    types = kernel.types
    shared = _Dims()
    joined = [  # operands of concats and pads, each with its start along every joined or padded dim
        (op, *pair)
        for op in kernel.ops
        if (begin := OPS[op.kind].parts)
        for pair in zip(op.tensors, begin(operand_types(op, types), op), strict=True)
    ]
    fibers, walked = _walked(kernel, types, shared)
    for op, name, starts in joined:
        for i in starts:
            walked.update(((name, i), (op.result.name, i)))
            shared.contain((name, i), (op.result.name, i))
    update = _update_of(kernel)
    _check_fibers(kernel, fibers, walked)
    sizes, indices, parts = _labelled(types, fibers, shared, update)
    spans: dict[str, tuple[tuple[OperandRange, ...], ...]] = {}
    for op, name, starts in joined:
        made = op.result.name
        ends = {i: start + types[name].shape[i] for i, start in starts.items()}
        found = (
            OperandRange(i, indices[made][i], shared.part((name, i)), shared.part((made, i)), start, ends[i]) for i, start in starts.items()
        )
        spans[made] = (*spans.get(made, ()), tuple(found))
    return _checked(Iteration(sizes, indices, (), (), fibers, parts, spans), kernel)


def _walked(kernel: Kernel, types: Mapping[str, TensorType], shared: _Dims) -> tuple[dict[str, int], set[DimOfValue]]:
    """Joins dims that share an index. Returns the `fibers` of the Iteration, and the dims that were joined."""
    fibers: dict[str, int] = {}
    walked: set[DimOfValue] = set()
    for op in kernel.ops:
        if op.operands:
            groups, unwalked = _joined(op, types)
            if twice := next((name for name, dim in unwalked.items() if fibers.get(name, dim) != dim), None):
                raise NotOneKernel(f"%{twice} is read at data-dependent positions along two dims")
            fibers |= unwalked
            for dims in groups:
                walked.update(dims)
                shared.join(dims)
    return fibers, walked


def _check_fibers(kernel: Kernel, fibers: dict[str, int], walked: set[DimOfValue]) -> None:
    """Raises NotOneKernel in three cases:

    - an op on whole fibers shares the kernel with other ops, except the iota of a scatter
    - a loop iterates over a dim of `fibers`
    - `fibers` has a value other than inputs, results of ops on whole fibers, and iotas that the kernel does not return
    """
    whole = {op.result.name: op.tensors for op in kernel.ops if OPS[op.kind].fiber}
    for name, operands in whole.items():
        *others, rows = operands
        is_alone = rows not in others and kernel.made.keys() <= {name, rows} and OPS[kernel.made[name].kind].splits_fibers
        if len(kernel.ops) > 1 and not is_alone:
            raise NotOneKernel(f"%{name} needs all elements along a dim at once")
    written = {result.name for result in kernel.results}
    numbers = {op.result.name for op in kernel.ops if OPS[op.kind].is_range} - written  # A result needs loops over all its dims.
    apart = numbers | {*whole, *(p.name for p in kernel.inputs)}
    for name, dim in fibers.items():
        if (name, dim) in walked or name not in apart:
            raise NotOneKernel(f"%{name} is read at data-dependent positions")


def _labelled(
    types: Mapping[str, TensorType], fibers: dict[str, int], shared: _Dims, update: Op | None
) -> tuple[dict[str, Size], dict[str, Labels], dict[str, dict[str, str]]]:
    """Size of each index, indices of each value's dims, and `parts` of the Iteration."""
    sizes: dict[str, Size] = {}
    indices: dict[str, Labels] = {}
    parts: dict[str, dict[str, str]] = {}
    for name, type in types.items():
        # The updated operand has no indices. The result has the indices of the written part.
        if update is not None and name in (update.tensors[0], update.result.name):
            indices[name] = (None,) * len(type.dims) if name == update.tensors[0] else indices[update.tensors[1]]
            continue
        own: list[str | None] = []
        for i, size in enumerate(type.shape):
            index = None if size == ONE or fibers.get(name) == i else _label(shared.outermost((name, i)))
            own.append(index)
            if index is not None and (part := shared.part((name, i))):
                parts.setdefault(name, {})[index] = part
                sizes.setdefault(index, size)  # Keeps the order of indices. The size of the whole dim replaces the size of the part.
            elif index is not None:
                sizes[index] = size
        indices[name] = tuple(own)
        if len(set(own) - {None}) < sum(index is not None for index in own):
            raise NotOneKernel(f"two dims of %{name} would have one index")
    return sizes, indices, parts


def _joined(op: Op, types: Mapping[str, TensorType]) -> tuple[list[list[DimOfValue]], dict[str, int]]:
    """Lists of dims that share one index of the op, and the op's `fibers` of the Iteration. Cached, because `fuse_kernels`
    analyses each op in many kernels."""
    return fact(op, _joined_dims, [types[name] for name in op.tensors], _joined_dims, op, types)


def _joined_dims(op: Op, types: Mapping[str, TensorType]) -> tuple[list[list[DimOfValue]], dict[str, int]]:
    walked = index_map(op, operand_types(op, types))
    if OPS[op.kind].updates:  # The loop covers the written part, not the whole tensor.
        starts = ((start, i) for start in op.tensors[2::2] for i in range(len(types[start].dims)))
        return [[(op.tensors[1], i), (start, i)] for start, i in starts], dict.fromkeys(op.tensors[3::2], 0)
    if walked.outer:
        raise NotOneKernel(f"%{op.result.name} splits or merges dims")
    by_label: dict[str, list[DimOfValue]] = {}
    fibers: dict[str, int] = {}
    for name, labels in zip((*op.operands, op.result.name), (*walked.operands, walked.result), strict=True):
        for i, label in enumerate(labels):
            if label in walked.unwalked and isinstance(name, str):
                fibers[name] = i
            elif label is not None and isinstance(name, str):
                by_label.setdefault(label, []).append((name, i))
    return list(by_label.values()), fibers


def _update_of(kernel: Kernel) -> Op | None:
    """The op that writes a part of its operand in place, or None. Raises NotOneKernel if other ops or results prevent the update."""
    update = next((op for op in kernel.ops if OPS[op.kind].updates), None)
    if update is None:
        return None
    used = [name for op in kernel.ops for name in op.tensors]
    x, is_input = update.tensors[0], update.tensors[0] in {p.name for p in kernel.inputs}
    if len(kernel.results) > 1 or update is not kernel.ops[-1] or used.count(x) > 1 or not is_input:
        raise NotOneKernel(f"%{update.result.name} is written in parts")
    if reducing := next((op.result.name for op in kernel.ops if OPS[op.kind].combine), None):
        raise NotOneKernel(f"%{reducing} is reduced, and %{update.result.name} is written in parts")
    return update


def updated(i: tree.Instruction, kernels: Mapping[str, Kernel], functions: Iterable[Function]) -> list[tuple[int, int]]:
    """Index of each operand that a launch or call updates in place, and index of the updated result."""
    pairs = []
    for kernel in (kernels[name] for name in tree.names(i, "launch") if name in kernels):
        names = [p.name for p in kernel.inputs]
        pairs += [(names.index(op.tensors[0]), 0) for op in kernel.ops if OPS[op.kind].updates]
    for function in (function for function in functions if function.name in tree.names(i, "call")):
        names = [p.name for p in function.inputs]
        pairs += [(names.index(p.memory), number) for number, p in enumerate(function.outputs) if p.memory]
    return pairs


def _checked(space: Iteration, kernel: Kernel) -> Iteration:
    """Verifies an index space. Fills in the kept and the reduced indices."""
    sizes, indices = space.sizes, space.indices
    reduced: set[str] = set()
    whole = {result.name for result in kernel.results} | {op.tensors[0] for op in kernel.ops if OPS[op.kind].combine}
    whole |= {op.tensors[1] for op in kernel.ops if OPS[op.kind].updates}
    whole |= {op.result.name for op in kernel.ops if op is kernel.exchanges or (OPS[op.kind].gathers and len(op.tensors) == 1)}
    if alone := next((name for name, operands in space.joined.items() for spans in operands for span in spans if span.index is None), None):
        raise NotOneKernel(f"%{alone} has one element along a joined dim")
    if both := sorted(whole & space.parts.keys()):
        raise NotOneKernel(f"%{both[0]} is a part of another value")
    for op in kernel.ops:
        gone = reduced_indices(op, indices)
        if gone and reduced and gone != reduced:
            raise NotOneKernel(f"%{op.result.name} is reduced over other dims")
        reduced |= gone
    for op in kernel.ops:
        if reduced_indices(op, indices) and set(indices[op.tensors[0]]) - {None} != set(sizes):
            raise NotOneKernel(f"%{op.result.name} is reduced from fewer dims")
    for result in kernel.results:
        own = set(indices[result.name]) - {None}
        if own not in (set(sizes), set(sizes) - reduced):
            raise NotOneKernel(f"%{result.name} lacks a dim of the values that it is computed from")
    kept = tuple(index for index in indices[kernel.results[-1].name] if index is not None and index not in reduced)
    return replace(space, kept=kept, reduced=tuple(index for index in sizes if index in reduced))


def reduced_indices(op: Op, indices: dict[str, Labels]) -> set[str]:
    if not OPS[op.kind].combine:
        return set()
    return {index for index in indices[op.tensors[0]] if index is not None} - set(indices[op.result.name])


def may_overwrite(i: tree.Instruction, kernels: Mapping[str, Kernel], read: str, written: str) -> bool:
    """True if `written` may share the memory of `read`: no element is written before its last read. False for user kernels."""
    sources, result = tree.names(i, "read"), tree.names(i, "write").index(written)
    for name in tree.names(i, "launch"):
        read_at = [number for number, source in enumerate(sources) if source == read]
        return name in kernels and all(reads_own_index(kernels[name], number, result) for number in read_at)
    field = getattr(i, i.in_place, ())
    return sources.count(read) == 1 and read in ((field,) if isinstance(field, str) else field)


def reads_own_index(kernel: Kernel, source: int, result: int) -> bool:
    """True if a result may share memory with an input. The last read of element i of the input must precede the write of element i of the
    result.

    A reduction finishes its reads before the kernel writes. If the result has only the kept dims, other threads may still read while one
    thread writes an element. So inputs that several threads read are excluded.
    """
    read, written = kernel.inputs[source], kernel.results[result]
    if kernel.exchanges and read.name in kernel.exchanges.tensors:  # Any thread may send any element of the operand.
        return False
    if any(read.name in op.tensors for op in kernel.products):
        return False
    kernel = epilogue(kernel)  # A matmul kernel reads inputs of other ops only after the products are computed.
    try:
        walked, update = iteration(kernel), _update_of(kernel)
    except NotOneKernel:
        return False
    if update is not None:
        return read.name == update.tensors[0]
    if read.name in (*walked.fibers, *walked.parts) or read.type.shape != written.type.shape:
        return False
    same = walked.indices[read.name] == walked.indices[written.name]
    return same and (not walked.reduced or walked.is_whole(written.name) or not _is_walked_by_all(read.name, kernel, walked))


def epilogue(kernel: Kernel) -> Kernel:
    """The ops of a kernel after its matmuls. The products are the first inputs. Returns a kernel without matmuls unchanged."""
    products = kernel.products
    if not products:
        return kernel
    made = (Parameter(op.result.name, op.result.type) for op in products)
    ops = tuple(op for op in kernel.ops if op not in products)
    used, operands = ({name for op in some for name in op.tensors} for some in (ops, products))
    others = (p for p in kernel.inputs if p.name in used or p.name not in operands)
    return Kernel(kernel.name, (*made, *others), ops, kernel.returned)


def _is_walked_by_all(read: str, kernel: Kernel, walked: Iteration) -> bool:
    """True if a value that depends on the input `read` varies along the reduced dims. All threads of a reduction then read the input."""
    made = {read}
    for op in kernel.ops:
        if not made.isdisjoint(op.tensors):
            if walked.is_whole(op.result.name):
                return True
            made.add(op.result.name)
    return False
