"""The index space of a kernel: which dims of its values share an index, and which indices are reduced."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hostweave.fusion_ir.index_map import ONE, Labels
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS, index_map, operand_types
from hostweave.host_ir import tree
from hostweave.host_ir.ir import Function, Kernel, Parameter
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType

Dim = tuple[str, int]  # a value and the number of its dim


class NotOneKernel(Exception):
    """Ops that no single kernel computes, and why."""


@dataclass(frozen=True)
class Iteration:
    """The loops of a kernel.

    `indices` gives every dim of every value its index, None to a dim of one element. Every reduction takes all values
    along `kept` and `reduced` to one value along `kept`; each result has the former or the latter.
    """

    sizes: dict[str, Size]  # of every index, in the order in which the inputs name them
    indices: dict[str, Labels]
    kept: tuple[str, ...]  # in the order of the last result's dims
    reduced: tuple[str, ...]
    lanes: dict[str, int]  # by value the dim that no loop walks

    def is_whole(self, value: str) -> bool:
        """Whether the value differs along what is reduced."""
        return any(index in self.reduced for index in self.indices[value])


def iteration(kernel: Kernel) -> Iteration:
    """The loops of a kernel. Raises NotOneKernel."""
    types = {parameter.name: parameter.type for parameter in kernel.inputs}
    same: dict[Dim, Dim] = {}
    lanes: dict[str, int] = {}
    walked: set[Dim] = set()

    def first(dim: Dim) -> Dim:
        while dim in same:
            dim = same[dim]
        return dim

    for op in kernel.ops:
        if op.operands:
            joined, unwalked = _joined(op, types)
            if twice := next((name for name, dim in unwalked.items() if lanes.get(name, dim) != dim), None):
                raise NotOneKernel(f"%{twice} is read along two of its dims where data say")
            lanes |= unwalked
            for dims in joined:
                walked.update(dims)
                for other in dims[1:]:
                    if first(dims[0]) != first(other):
                        same[first(other)] = first(dims[0])
        types[op.result.name] = op.result.type
    if len(kernel.ops) > 1 and (whole := next((op.result.name for op in kernel.ops if OPS[op.kind].lane), None)):
        raise NotOneKernel(f"%{whole} takes all along a dim together")
    update = _update_of(kernel)
    written = {result.name for result in kernel.results}
    numbers = {op.result.name for op in kernel.ops if op.kind == "iota"} - written  # what is written is walked
    apart = numbers | {op.result.name for op in kernel.ops if OPS[op.kind].lane} | {p.name for p in kernel.inputs}
    for name, dim in lanes.items():
        if (name, dim) in walked or name not in apart:
            raise NotOneKernel(f"%{name} is read where data say")
    sizes: dict[str, Size] = {}
    indices: dict[str, Labels] = {}
    for name, type in types.items():
        if update is not None and name in (update.tensors[0], update.result.name):  # it has the indices of what is written
            indices[name] = (None,) * len(type.dims) if name == update.tensors[0] else indices[update.tensors[1]]
            continue
        own = [None if size == ONE or lanes.get(name) == i else "{}.{}".format(*first((name, i))) for i, size in enumerate(type.shape)]
        indices[name] = tuple(own)
        sizes.update({index: size for index, size in zip(own, type.shape, strict=True) if index is not None})
        if len(set(own) - {None}) < sum(index is not None for index in own):
            raise NotOneKernel(f"two dims of %{name} would be one")
    return _checked(sizes, indices, lanes, kernel)


def _joined(op: Op, types: dict[str, TensorType]) -> tuple[list[list[Dim]], dict[str, int]]:
    """The dims of operands and result that are one index of the op, and by operand the one that no loop walks."""
    walked = index_map(op, operand_types(op, types))
    if OPS[op.kind].updates:  # what is written is walked, not what it is written to
        starts = ((start, i) for start in op.tensors[2::2] for i in range(len(types[start].dims)))
        return [[(op.tensors[1], i), (start, i)] for start, i in starts], dict.fromkeys(op.tensors[3::2], 0)
    if walked.outer:
        raise NotOneKernel(f"%{op.result.name} splits or merges dims")
    by_label: dict[str, list[Dim]] = {}
    lanes: dict[str, int] = {}
    for name, labels in zip((*op.operands, op.result.name), (*walked.operands, walked.result), strict=True):
        for i, label in enumerate(labels):
            if label in walked.unwalked and isinstance(name, str):
                lanes[name] = i
            elif label is not None and isinstance(name, str):
                by_label.setdefault(label, []).append((name, i))
    return list(by_label.values()), lanes


def _update_of(kernel: Kernel) -> Op | None:
    """The op that writes some elements of its operand in place, which nothing else of the kernel touches."""
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
    """The numbers of what an instruction reads, each with that of what it writes in the same memory, maybe a part of it."""
    pairs = []
    for kernel in (kernels[name] for name in tree.names(i, "launch") if name in kernels):
        names = [p.name for p in kernel.inputs]
        pairs += [(names.index(op.tensors[0]), 0) for op in kernel.ops if OPS[op.kind].updates]
    for function in (function for function in functions if function.name in tree.names(i, "call")):
        names = [p.name for p in function.inputs]
        pairs += [(names.index(p.memory), number) for number, p in enumerate(function.outputs) if p.memory]
    return pairs


def _checked(sizes: dict[str, Size], indices: dict[str, Labels], lanes: dict[str, int], kernel: Kernel) -> Iteration:
    reduced: set[str] = set()
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
            raise NotOneKernel(f"%{result.name} lacks a dim of what it is computed from")
    kept = tuple(index for index in indices[kernel.results[-1].name] if index is not None and index not in reduced)
    return Iteration(sizes, indices, kept, tuple(index for index in sizes if index in reduced), lanes)


def reduced_indices(op: Op, indices: dict[str, Labels]) -> set[str]:
    """What an op reduces: nothing where all of it is dims of one element."""
    if not OPS[op.kind].combine:
        return set()
    return {index for index in indices[op.tensors[0]] if index is not None} - set(indices[op.result.name])


def may_overwrite(i: tree.Instruction, kernels: Mapping[str, Kernel], read: str, written: str) -> bool:
    """Whether an instruction may write one buffer over another, element by element. What a kernel of the user reads where is not known."""
    sources, result = tree.names(i, "read"), tree.names(i, "write").index(written)
    for name in tree.names(i, "launch"):
        read_at = [number for number, source in enumerate(sources) if source == read]
        return name in kernels and all(reads_own_index(kernels[name], number, result) for number in read_at)
    field = getattr(i, i.in_place, ())
    return sources.count(read) == 1 and read in ((field,) if isinstance(field, str) else field)


def reads_own_index(kernel: Kernel, source: int, result: int) -> bool:
    """Whether a kernel reads an input, for each element of a result, at that element's index alone: the result may lie over it.

    What a kernel reduces it has read before it writes, but not what differs along the kept dims alone: other threads may still
    read that.
    """
    read, written = kernel.inputs[source], kernel.results[result]
    if kernel.exchanges and read.name in kernel.exchanges.tensors:  # it is sent by whatever threads there are
        return False
    products = [op for op in kernel.ops if op.kind == "matmul"]
    operands = {name for op in products for name in op.tensors}
    if read.name in operands:
        return False
    if products:  # of which it is read when they are added up
        made = (Parameter(op.result.name, op.result.type) for op in products)
        inputs = (*(p for p in kernel.inputs if p.name not in operands), *made)
        kernel = Kernel(kernel.name, inputs, tuple(op for op in kernel.ops if op not in products), kernel.returned)
    try:
        walked, update = iteration(kernel), _update_of(kernel)
    except NotOneKernel:
        return False
    if update is not None:
        return read.name == update.tensors[0]
    same = (
        read.name not in walked.lanes
        and read.type.shape == written.type.shape
        and walked.indices[read.name] == walked.indices[written.name]
    )
    return same and (not walked.reduced or walked.is_whole(written.name))
