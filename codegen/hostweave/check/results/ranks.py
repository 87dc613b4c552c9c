"""Runs a host program on all ranks in one process, for all random inputs at once. Arrays have one sample per rank and seed (samples.py).

Each iteration runs the ready rank that has executed the fewest operations. Ranks at one instruction compute the instruction together if
their layouts, sizes and numbers of executed operations are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from hostweave.base.errors import ExecutionError
from hostweave.check.match_collectives import MatchedCommunications
from hostweave.check.operations import Access, ByteLayout, Instances, Operation
from hostweave.check.results.arithmetic import cast_in_samples, function_of, results_of_kernel
from hostweave.check.results.functions import Functions
from hostweave.check.results.samples import Exact, Samples, apply, joined_samples
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import OFFSET
from hostweave.fusion_ir.ops.definition import bound_attributes
from hostweave.host_ir import ir, tree
from hostweave.types.mesh import Sizes, share
from hostweave.types.numpy_dtypes import computing_dtype
from hostweave.types.size import LocalSize, Size
from hostweave.types.tensor import global_shape

OPS_OF_REDUCTIONS = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum", "avg": "add"}  # reduction of a collective -> op
OPS_OF_REDUCTIONS |= {word: f"bitwise_{word}" for word in ("and", "or", "xor")}


class FieldRanks:
    """Memory and progress of all ranks. `samples` is the number of samples per rank, one per seed."""

    def __init__(self, instances: Instances, matches: Sequence[MatchedCommunications], samples: int, functions: Functions):
        self.instances, self.samples, self.functions = instances, samples, functions
        self.match_of = {member: matched for matched in matches for member in matched.operations}
        self.kernels = {kernel.name: kernel for kernel in instances.program.kernels}
        self.buffers: dict[str, FieldBuffer] = {}
        self.posted: dict[Operation, Samples | None] = {}  # data that each posted communication sends
        # senders -> delivered data, reduced if the collective reduces
        self.delivered: dict[tuple[Operation, ...], list[Samples]] = {}
        self.size_values: dict[str, list[tuple[int, ...]]] = {}  # kernel -> for each rank, values of the local sizes that the kernel reads
        self.size_values_of: dict[tuple[LocalSize, ...], list[tuple[int, ...]]] = {}  # local sizes -> for each rank, values of the sizes
        self.bound_ops: dict[tuple[str, tuple[int, ...]], list[tuple[Any, ...]]] = {}  # (kernel, values of local sizes) -> ops
        self.ops_without_sizes: dict[str, dict[int, tuple[Any, ...]]] = {}  # kernel -> number of an op -> op that reads no sizes
        self.executed: set[tree.Instruction] = set()
        # Called after each write with the rank that owns the memory, the access, and the contents.
        self.on_write: Callable[[int, Access, Samples], None] | None = None

    def buffer(self, root: str) -> FieldBuffer:
        if root not in self.buffers:
            roots = [of[root] for of in self.instances.roots if root in of]
            most = max(of.layout.count for of in roots)
            self.buffers[root] = FieldBuffer(roots[0].layout, len(self.instances.ranks), self.samples, most, self.functions)
        return self.buffers[root]

    def put(self, ranks: Sequence[int], root: str, block: Samples) -> None:
        """Fills an input on ranks that hold the same block."""
        layout = self.instances.roots[ranks[0]][root].layout
        if layout.in_order in ((), ((layout.count, 1),)):
            self.buffer(root).put(ranks, block)
            return
        for rank in ranks:
            self.buffer(root).view([rank], 0, layout).fill(block)

    def view(self, ranks: Sequence[int], accesses: Sequence[Access]) -> FieldView:
        """Memory that `ranks` access. All ranks have one layout. Offsets and buffers may differ."""
        owners = [rank if access.at is None else access.at for rank, access in zip(ranks, accesses, strict=True)]
        root, offset, layout, *_ = accesses[0].region
        if all(access.region.offset == offset and access.region.root == root for access in accesses[1:]):
            return self.buffer(root).view(owners, offset, layout)
        regions = [access.region for access in accesses]
        views = (self.buffer(r.root).view([owner], r.offset, r.layout) for owner, r in zip(owners, regions, strict=True))
        return FieldView([array for view in views for array in view.arrays])

    def fill(self, ranks: Sequence[int], accesses: Sequence[Access], value: Samples) -> None:
        self.view(ranks, accesses).fill(value)
        if on_write := self.on_write:
            for rank, access in zip(ranks, accesses, strict=True):
                on_write(rank if access.at is None else access.at, access, self.view([rank], [access]).read())

    def run(self) -> None:
        queues = [_Queue(rank, operations) for rank, operations in enumerate(self.instances.ranks)]
        with np.errstate(all="ignore"):
            while remaining := [queue for queue in queues if queue.current]:
                ready = [queue for queue in remaining if self.is_ready(queue)]
                if not ready:
                    waiting = "\n".join(f"  {queue.current}" for queue in remaining)
                    raise ExecutionError(f"deadlock: no rank can proceed:\n{waiting}")
                first = min(ready, key=attrgetter("executed_count"))
                together = self.same_queues(first, ready)
                self.execute([queue.rank for queue in together], [queue.current for queue in together if queue.current], first.is_posted)
                for queue in together:
                    queue.advance()

    def same_queues(self, first: _Queue, ready: Sequence[_Queue]) -> list[_Queue]:
        """Queues that can execute the instruction of `first` together, because layouts and sizes are equal."""
        assert first.current
        instruction, accesses = first.current.instruction, first.current.accesses
        progress = first.executed_count, first.is_posted
        same = [each for each in ready if (each.executed_count, each.is_posted) == progress and each.is_at(instruction)]
        if first.communications or len(same) == 1:
            return same  # Communication runs rank by rank.
        packed, of_ranks = instruction.packed, self.instances.roots
        values = [self.local_sizes(name) for name in tree.names(instruction, "launch")]
        roots, found = of_ranks[first.rank], list[_Queue]()
        for each in same:
            if each is not first:
                has_equal_sizes = of_ranks[each.rank] is roots  # Ranks with equal sizes also have equal layouts.
                if packed and (not has_equal_sizes or any(cut.local for cut in packed)):
                    continue  # The packed blocks depend on the sizes of the rank, or on the offset of its shard.
                if any(by_rank[each.rank] != by_rank[first.rank] for by_rank in values):
                    continue
                if not has_equal_sizes and each.current and not all(map(_has_equal_layout, accesses, each.current.accesses)):
                    continue
            found.append(each)
        return found

    def local_sizes(self, name: str) -> list[tuple[int, ...]]:
        """For each rank, values of the local sizes that the ops of a kernel read, except offsets of iota."""
        if name not in self.size_values:
            ops = self.kernels[name].ops if name in self.kernels else ()
            sizes = [size for op in ops for size in _sizes_read(op)]
            local = tuple(dict.fromkeys(atom for size in sizes for atom in size.atoms if isinstance(atom, LocalSize)))
            if local not in self.size_values_of:
                self.size_values_of[local] = [tuple([size.bind(of_rank) for size in local]) for of_rank in self.instances.sizes]
            self.size_values[name] = self.size_values_of[local]
        return self.size_values[name]

    def is_ready(self, queue: _Queue) -> bool:
        """True if the rank can proceed. A rank can always post data, but receives only after all sources have posted. A one-sided operation
        also waits for its sources."""
        if not queue.communications or (not queue.is_posted and not queue.is_one_sided):
            return True
        return all(source in self.posted for source in queue.awaited(self.match_of))

    def execute(self, ranks: Sequence[int], operations: Sequence[Operation], is_posted: bool) -> None:
        instruction = operations[0].instruction
        if not operations[0].communications:
            self.compute(ranks, operations)
            return
        receive = self.exchange if instruction.exchanges else self.receive
        act = self.transfer if isinstance(instruction, ir.OneSided) else receive if is_posted else self.post
        for rank, operation in zip(ranks, operations, strict=True):
            act(rank, operation)

    def post(self, rank: int, operation: Operation) -> None:
        self.executed.add(operation.instruction)
        for member in operation.communications:
            read = next((access for access in member.accesses if access.reads), None)
            self.posted[member] = self.view([rank], [read]).read().copy() if read else None
            self.executed.add(member.instruction)

    def receive(self, rank: int, operation: Operation) -> None:
        for member in operation.communications:
            for access in member.accesses:
                if access.writes:
                    self.fill([rank], [access], self.received(rank, member))

    def received(self, rank: int, member: Operation) -> Samples:
        instruction, sources = member.instruction, self.match_of[member].sources(member)
        if sources not in self.delivered:
            sent = [self.reduce_terms(instruction.op, sources)] if isinstance(instruction, ir.Reduction) else self.sent(sources)
            is_cut = isinstance(instruction, ir.Collective) and instruction.sends_blocks
            self.delivered[sources] = sent if is_cut or len(sent) < 2 else [self.functions.concatenate([array.ravel() for array in sent])]
        arrays = self.delivered[sources]
        if isinstance(instruction, ir.Collective) and instruction.sends_blocks:
            number = member.process_group.index(rank)
            blocks = (share(array.shape, instruction.sent_along, len(member.process_group), number) for array in arrays)
            arrays = [array.ravel()[block.start : block.stop] for array, block in zip(arrays, blocks, strict=True)]
        arrays = arrays or [self.functions.zeros((1,), np.int64)]
        delivered: Samples = self.functions.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        return delivered

    def sent(self, sources: Sequence[Operation]) -> list[Samples]:
        return [array for source in sources if (array := self.posted[source]) is not None]

    def reduce_terms(self, op: str, sources: Sequence[Operation]) -> Samples:
        terms = self.sent(sources)
        total: Samples = reduce(getattr(self.functions, OPS_OF_REDUCTIONS[op]), terms)
        return self.functions.divide(total, len(terms)) if op == "avg" else total

    def exchange(self, rank: int, operation: Operation) -> None:
        _, *others = [access for access in operation.accesses if access.reads]
        (kernel,) = tree.names(operation.instruction, "launch")
        reads = [self.exchanged(rank, operation, self.kernels[kernel]), *(self.view([rank], [access]).read() for access in others)]
        self.write([rank], [operation], self.run_kernel(kernel, [rank], reads))

    def exchanged(self, rank: int, operation: Operation, kernel: ir.Kernel) -> Samples:
        """Elements that a kernel's collective delivers to a rank, as the kernel's first input."""
        assert kernel.exchanges
        sources, kind = self.match_of[operation].sources(operation), kernel.exchanges.kind
        sent = [member.ravel() for member in self.sent(sources)]
        whole = self.reduce_terms("sum", sources) if OPS[kind].reduces else self.functions.concatenate(sent)
        shape = tuple(size.bind(self.instances.sizes[rank]) for size in kernel.inputs[0].type.shape)
        first = operation.process_group.index(rank) * prod(shape) if OPS[kind].reduces_to_blocks else 0
        return whole.ravel()[first : first + prod(shape)].reshape(shape)

    def transfer(self, rank: int, operation: Operation) -> None:
        read = [access for access in operation.accesses if access.reads]
        written = [access for access in operation.accesses if access.writes]
        for source, target in zip(read, written, strict=False):
            self.fill([rank], [target], self.view([rank], [source]).read())
        self.posted[operation] = None
        self.executed.add(operation.instruction)

    def compute(self, ranks: Sequence[int], operations: Sequence[Operation]) -> None:
        operation = operations[0]
        instruction = operation.instruction
        self.executed.add(instruction)
        if not any(access.region.layout.run for access in operation.accesses if access.writes):
            return
        accesses = zip(*(each.accesses for each in operations), strict=True)
        reads = [self.view(ranks, column).read() for column in accesses if column[0].reads]
        names = tree.names(instruction, "launch")
        if names:
            results = [result for name in names for result in self.kernel_results(name, ranks, operation, reads)]
        else:
            results = apply(partial(instruction.computed, self.functions, self.instances.sizes[ranks[0]]), *reads)  # type: ignore[attr-defined]
        self.write(ranks, operations, results)

    def kernel_results(self, name: str, ranks: Sequence[int], operation: Operation, reads: Sequence[Samples]) -> tuple[Samples, ...]:
        if name in self.kernels:
            return self.run_kernel(name, ranks, reads)
        written = [access.region.layout for access in operation.accesses if access.writes]
        return results_of_kernel(name, reads, [(layout.shape, layout.dtype) for layout in written], self.functions)

    def run_kernel(self, name: str, ranks: Sequence[int], arrays: Sequence[Samples]) -> tuple[Samples, ...]:
        kernel = self.kernels[name]
        values: dict[str, Any] = {parameter.name: array for parameter, array in zip(kernel.inputs, arrays, strict=True)}
        for result, function, operands, dtype, offset in self.ops_of(name, ranks[0]):
            computed = apply(function, *[values[operand] if isinstance(operand, str) else operand for operand in operands])
            if offset:
                offsets = [offset.bind(self.instances.sizes[rank]) for rank in ranks]
                computed = computed + Exact(np.repeat(offsets, self.samples)[:, None])
            values[result] = cast_in_samples(computed, dtype, self.functions)
        return tuple(values[result.name] for result in kernel.results)

    def ops_of(self, name: str, rank: int) -> list[tuple[Any, ...]]:
        """Ops of a kernel for the sizes of a rank, each as (result, function, operands, dtype, offset or None)."""
        key = name, self.local_sizes(name)[rank]
        if key not in self.bound_ops:
            ops, sizes = self.kernels[name].ops, self.instances.sizes[rank]
            if name not in self.ops_without_sizes:
                self.ops_without_sizes[name] = {i: self.bound_op(op, sizes) for i, op in enumerate(ops) if not _sizes_read(op)}
            self.bound_ops[key] = [self.ops_without_sizes[name].get(i) or self.bound_op(op, sizes) for i, op in enumerate(ops)]
        return self.bound_ops[key]

    def bound_op(self, op: Op, sizes: Sizes) -> tuple[Any, ...]:
        definition, type = OPS[op.kind], op.result.type
        stated = definition.stated_type(partial(global_shape, type, sizes), computing_dtype(type.dtype))
        offset = _offset(op)
        bound = bound_attributes(op.with_attribute(OFFSET, Size(0)) if offset else op, sizes)
        return op.result.name, partial(function_of(op), self.functions, **bound, **stated), op.operands, type.dtype, offset

    def write(self, ranks: Sequence[int], operations: Sequence[Operation], results: Sequence[Any]) -> None:
        columns = [column for column in zip(*(each.accesses for each in operations), strict=True) if column[0].writes]
        if len(columns) > 1:  # A result may overwrite an operand of another result.
            results = [result.copy() if isinstance(result, Samples) else result for result in results]
        for column, result in zip(columns, results, strict=True):
            self.fill(ranks, column, cast_in_samples(result, column[0].region.layout.dtype, self.functions))


def _has_equal_layout(one: Access, other: Access) -> bool:
    a, b = one.region.layout, other.region.layout
    return a is b or (a.shape == b.shape and a.strides == b.strides)


def _sizes_read(op: Op) -> list[Size]:
    """Sizes that the function of an op reads. Omits the offset of an iota, which may differ between samples."""
    shape = op.result.type.shape if OPS[op.kind].target in ("shape", "type") else ()
    return [*shape, *(value for _, value in op.attributes if isinstance(value, Size) and value is not _offset(op))]


def _offset(op: Op) -> Size | None:
    offset = op[OFFSET] if OPS[op.kind].is_range else None
    return offset if isinstance(offset, Size) else None


class _Queue:
    """Operations of one rank that compute or communicate, in one call. `current` runs next."""

    def __init__(self, rank: int, operations: Sequence[Operation]):
        self.rank, self.remaining = rank, iter(operations)
        self.current: Operation | None = None
        self.communications: Sequence[Operation] = ()  # communications of `current`
        self.is_one_sided = False
        self.executed_count = -1
        self.proceed()

    def proceed(self) -> None:
        self.is_posted, self.executed_count, self.current = False, self.executed_count + 1, None
        for operation in self.remaining:
            if type(operation.instruction) is tree.Instruction:  # The next call begins.
                return
            self.communications = operation.communications
            if self.communications or operation.instruction.work:
                self.current, self.is_one_sided = operation, isinstance(operation.instruction, ir.OneSided)
                return

    def advance(self) -> None:
        """Advances by one phase. A two-sided communication has two phases: the rank posts its data, then it receives."""
        if self.communications and not self.is_one_sided and not self.is_posted:
            self.is_posted = True
        else:
            self.proceed()

    def is_at(self, instruction: tree.Instruction) -> bool:
        own = self.current and self.current.instruction
        return own is instruction or own == instruction

    def awaited(self, match_of: Mapping[Operation, MatchedCommunications]) -> Sequence[Operation]:
        """Communications that must be posted before `current` can end."""
        return [source for member in self.communications if member in match_of for source in match_of[member].sources(member)]


class FieldBuffer:
    """A buffer on all ranks. `components` are arrays [rank, sample, element]. An unwritten float is NaN, and an unwritten integer is 85."""

    def __init__(self, layout: ByteLayout, ranks: int, samples: int, count: int, functions: Functions):
        self.samples, self.count = samples, count
        self.views: dict[tuple[object, ...], FieldView] = {}
        shape = (ranks, samples, count)
        if layout.dtype.kind == "float":
            self.kind: type[Samples] = functions.real
            self.components = [np.full(shape, np.nan), *(np.empty(shape, np.uint64) for _ in range(functions.real.count - 1))]
        else:
            self.kind, self.components = Exact, [np.full(shape, 85).astype(computing_dtype(layout.dtype))]

    def put(self, ranks: Sequence[int], block: Samples) -> None:
        for array, new in zip(self.components, self.kind.of(block).components, strict=True):
            array[ranks, :, : block.size] = new.reshape(len(new), -1)

    def view(self, ranks: Sequence[int], offset: int, layout: ByteLayout) -> FieldView:
        if len(ranks) > 1 and (ranks[-1] - ranks[0] != len(ranks) - 1 or list(ranks) != sorted(ranks)):
            return FieldView([array for rank in ranks for array in self.view([rank], offset, layout).arrays])
        key = ranks[0], len(ranks), offset, layout.shape, layout.strides
        if key not in self.views:
            self.views[key] = self.new_view(ranks, offset // layout.dtype.itemsize, layout)
        return self.views[key]

    def new_view(self, ranks: Sequence[int], start: int, layout: ByteLayout) -> FieldView:
        samples = len(ranks) * self.samples
        components = []
        for array in self.components:
            size = array.itemsize
            first = (ranks[0] * self.samples * self.count + (start if layout.run else 0)) * size
            strides = (self.count * size, *[stride * size for stride in layout.strides])
            components.append(np.ndarray((samples, *layout.shape), array.dtype, array, first, strides))
        return FieldView([self.kind(*components)])


class FieldView:
    """Memory of one or more ranks: a strided array, or several arrays with consecutive samples."""

    def __init__(self, arrays: Sequence[Samples]):
        self.arrays = arrays

    def read(self) -> Samples:
        """Returns the array. Copies the elements of several arrays."""
        joined: Samples = self.arrays[0] if len(self.arrays) == 1 else joined_samples(self.arrays)
        return joined

    def fill(self, value: Samples) -> None:
        """Writes an array with the same number of elements, or one element to all positions."""
        value, at = self.arrays[0].of(value), 0
        for array in self.arrays:
            own = slice(at, at + array.samples) if value.samples > 1 else slice(None)
            for component, whole in zip(array.components, value.components, strict=True):
                new = whole[own]
                if new.shape[1:] != component.shape[1:]:
                    shape = component.shape[1:] if new[0].size == component[0].size else (1,) * (component.ndim - 1)
                    new = new.reshape(len(new), *shape)
                component[...] = new
            at += array.samples
