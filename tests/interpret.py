"""NumPy interpreter of host programs. All ranks run in one thread, each in program order, without streams and events.

The interpreter defines the expected results of generated code, so it is as simple as possible. Each instruction, and each op of a kernel,
widens floats of less than 32 bits to f32, and rounds its result once. Floats in memory that was not written are NaN.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostweave.base.errors import ArgumentError, ExecutionError, ProgramError
from hostweave.check.match_collectives import MatchedCommunications, match_communications
from hostweave.check.operations import Access, Instances, Operation
from hostweave.check.simulate import instantiate
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.definition import bound_attributes
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import inlined
from hostweave.host_ir.size_requirements import not_empty
from hostweave.types.mesh import Sizes, share
from hostweave.types.numpy_dtypes import cast, numpy_dtype
from hostweave.types.tensor import bind_sizes, block_of, holds, shape_of_global

Array = NDArray[Any]

REDUCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "avg": np.add}


def interpret(program: ir.HostProgram, arrays: Mapping[str, Array | Sequence[Array]], sizes: Sizes | None = None) -> list[dict[str, Array]]:
    """Runs `program` on all ranks. Returns the outputs of each rank by name.

    An input is a global array, or a list of local arrays, with None for ranks without the input. Outputs are local. A rank has only outputs
    whose mesh contains the rank. `sizes` has the sizes that the inputs do not determine. Raises ExecutionError for user kernels,
    communications that do not match, and deadlocks.
    """
    local = {p.name: _blocks(program, p, arrays[p.name]) for p in program.arguments}
    shapes = {p.name: _global_shape(program, p, arrays[p.name]) for p in program.arguments}
    bound = bind_sizes(program.name, program.mesh, {p.name: p.type for p in program.arguments}, shapes, program.uneven)
    for p in (p for p in program.inputs if p.group):
        columns = zip(*(local[name] for name in p.group.names), strict=True)
        local[p.name] = [None if column[0] is None else np.stack(column) for column in columns]  # type: ignore[arg-type]
    local = {p.name: local[p.name] for p in program.inputs}
    bound = {**bound, **program.depths(), **(sizes or {})}
    for kind, size in not_empty(inlined(program)):
        if size.bind(bound) == 0:
            raise ArgumentError(f"{program.name}: {kind} of no elements along {size}")
    instances = instantiate(program, bound)
    try:
        met = {member: meeting for meeting in match_communications(instances) for member in meeting.operations}
    except ProgramError as error:
        raise ExecutionError(str(error)) from None
    world = World(instances, met)
    ranks = [
        Rank(world, rank, {name: blocks[rank] for name, blocks in local.items() if blocks[rank] is not None})
        for rank in range(program.mesh.size)
    ]
    _take_turns([rank.run() for rank in ranks])
    held = [{p.name: r.result(p) for p in program.outputs if holds(p.type, program.mesh, r.rank)} for r in ranks]
    return [dict(_one_by_one(program, outputs)) for outputs in held]


def _one_by_one(program: ir.HostProgram, outputs: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    for p in (p for p in program.outputs if p.name in outputs):
        yield from zip(p.group.names, outputs[p.name], strict=True) if p.group else [(p.name, outputs[p.name])]


def _blocks(program: ir.HostProgram, parameter: ir.Parameter, array: Array | Sequence[Array]) -> list[Array | None]:
    if isinstance(array, list | tuple):
        return list(array)
    whole = np.asarray(array)
    type, mesh = parameter.type, program.mesh
    return [whole[block_of(type, mesh, rank, whole.shape)] if holds(type, mesh, rank) else None for rank in range(mesh.size)]


def _global_shape(program: ir.HostProgram, parameter: ir.Parameter, array: Array | Sequence[Array]) -> tuple[int, ...]:
    if isinstance(array, list | tuple):
        return shape_of_global(parameter.type, program.mesh, [() if block is None else block.shape for block in array])
    return np.asarray(array).shape


# Execution of a rank. While a communication of the rank waits for other ranks, the execution yields this communication.
Turns = Generator[Operation, None, None]


def _take_turns(ranks: list[Turns]) -> None:
    """Runs the ranks round-robin. Each rank runs until it waits for another rank."""
    waiting: dict[Turns, Operation] = {}
    while ranks:
        before = dict(waiting)
        for rank in ranks.copy():
            at = next(rank, None)
            if at is None:
                ranks.remove(rank)
                waiting.pop(rank, None)
            else:
                waiting[rank] = at
        if ranks and waiting == before:
            raise ExecutionError("deadlock: no rank can proceed:\n" + "\n".join(f"  {operation}" for operation in waiting.values()))


@dataclass(frozen=True)
class World:
    """State that ranks share. `posted` maps each posted communication to the data that the communication sends, or to None."""

    instances: Instances
    met: dict[Operation, MatchedCommunications]
    posted: dict[Operation, Array | None] = field(default_factory=dict)
    memories: list[dict[str, Array]] = field(default_factory=list)  # for each rank, the bytes of its buffers


class Rank:
    def __init__(self, world: World, rank: int, inputs: Mapping[str, Array | None]):
        self.world, self.rank = world, rank
        self.sizes = world.instances.sizes[rank]
        self.kernels = {kernel.name: kernel for kernel in world.instances.program.kernels}
        # A float of any dtype is NaN if all its bits are set.
        self.bytes = {name: np.full(root.size, 255, np.uint8) for name, root in world.instances.roots[rank].items()}
        world.memories.append(self.bytes)
        for name, array in inputs.items():
            if array is not None:
                self.whole(name)[...] = array

    def whole(self, root: str) -> Array:
        layout = self.world.instances.roots[self.rank][root].layout
        return np.ndarray(layout.shape, numpy_dtype(layout.dtype), self.bytes[root])

    def result(self, p: ir.Parameter) -> Array:
        """Copies an output. The input whose memory the output reuses may have another shape."""
        shape = [size.bind(self.sizes) for size in self.world.instances.program.local_type(p).shape]
        return self.whole(p.memory or p.name).reshape(shape).copy()

    def array(self, access: Access) -> Array:
        layout = access.region.layout
        if not layout.count:
            return np.empty(layout.shape, numpy_dtype(layout.dtype))
        strides = [stride * layout.dtype.itemsize for stride in layout.strides]
        memory = self.bytes if access.at is None else self.world.memories[access.at]
        return np.ndarray(layout.shape, numpy_dtype(layout.dtype), memory[access.region.root], access.region.offset, strides)

    def run(self) -> Turns:
        for operation in self.world.instances.ranks[self.rank]:
            if not operation.communications:
                self.compute(operation)
                continue
            if isinstance(operation.instruction, ir.OneSided):
                while not all(source in self.world.posted for source in self.signals(operation)):
                    yield operation
                self.move(operation)
                continue
            for member in operation.communications:
                read = [self.array(access) for access in member.accesses if access.reads]
                self.world.posted[member] = read[0].copy() if read else None
            others = [other for member in operation.communications if (met := self.world.met.get(member)) for other in met.awaited(member)]
            while any(other not in self.world.posted for other in others):
                yield operation
            if operation.instruction.exchanges:
                self.exchange(operation)
                continue
            for member in operation.communications:
                for access in member.accesses:
                    if access.writes:
                        target = self.array(access)
                        target[...] = np.broadcast_to(self.received(member), target.size).reshape(target.shape)

    def signals(self, operation: Operation) -> tuple[Operation, ...]:
        """Operations of other ranks that must send signals before `operation` runs."""
        meeting = self.world.met.get(operation)
        return meeting.sources(operation) if meeting else ()

    def move(self, operation: Operation) -> None:
        """Copies the source of `operation`, if any, to the destination. The source or the destination may be on another rank. After the
        copy, sends the signal."""
        read = [access for access in operation.accesses if access.reads]
        written = [access for access in operation.accesses if access.writes]
        for source, target in zip(read, written, strict=True):
            self.array(target)[...] = self.array(source).reshape(self.array(target).shape)
        self.world.posted[operation] = None

    def received(self, member: Operation) -> Array:
        """Data that a communication brings to this rank, in element order."""
        instruction, rank_in_group = member.instruction, member.process_group.index(self.rank)
        sent = [array for source in self.world.met[member].sources(member) if (array := self.world.posted[source]) is not None]
        if isinstance(instruction, ir.Reduction):
            sent = [_reduced(instruction.op, sent)]
        if isinstance(instruction, ir.Collective) and instruction.sends_blocks:
            sent = [array.ravel()[share(array.shape, instruction.sent_along, len(member.process_group), rank_in_group)] for array in sent]
        return np.concatenate([array.ravel() for array in sent]) if sent else np.zeros(1)

    def exchange(self, operation: Operation) -> None:
        """Computes the result of a kernel that begins with a collective. The kernel reads the blocks of all ranks."""
        sent = [
            array.ravel() for source in self.world.met[operation].sources(operation) if (array := self.world.posted[source]) is not None
        ]
        own, *others = [access for access in operation.accesses if access.reads]
        (name,) = tree.names(operation.instruction, "launch")
        kernel, ranks = self.kernels[name], len(operation.process_group)
        assert kernel.exchanges
        gathers, scatters = (kernel.exchanges.kind == kind for kind in ("all_gather", "reduce_scatter"))
        got = np.concatenate(sent) if gathers else cast(_reduced("sum", sent), own.region.layout.dtype)
        got = np.split(got, ranks)[operation.process_group.index(self.rank)] if scatters else got
        got = got.reshape([size.bind(self.sizes) for size in kernel.inputs[0].type.shape])
        self.write(operation, self.launched(name, [got, *map(self.array, others)]))

    def write(self, operation: Operation, results: Iterable[Any]) -> None:
        writes = [self.array(access) for access in operation.accesses if access.writes]
        for written, result in zip(writes, results, strict=True):
            written[...] = np.reshape(result, written.shape) if np.ndim(result) else result

    def compute(self, operation: Operation) -> None:
        i = operation.instruction
        reads = [self.array(access) for access in operation.accesses if access.reads]
        if isinstance(i, ir.Compute):
            launched = [result for name in tree.names(i, "launch") for result in self.launched(name, reads)]
            self.write(operation, launched or i.computed(np, self.sizes, *map(_widened, reads)))

    def launched(self, name: str, arrays: list[Array]) -> list[Array]:
        if name not in self.kernels:
            raise ExecutionError(f"launch @{name}: NumPy cannot compute the user's C++; run the compiled program")
        kernel = self.kernels[name]
        values = {parameter.name: array for parameter, array in zip(kernel.inputs, arrays, strict=True)}
        for op in kernel.ops:
            values[op.result.name] = self.op(op, values)
        return [values[result.name] for result in kernel.results]

    def op(self, op: Op, values: Mapping[str, Array]) -> Array:
        definition, result = OPS[op.kind], op.result.type
        stated = definition.stated_type(lambda: tuple(size.bind(self.sizes) for size in result.shape), numpy_dtype(result.dtype))
        operands = [_widened(values[operand]) if isinstance(operand, str) else operand for operand in op.operands]
        if op.kind == "astype":
            return cast(np.asarray(operands[0]), result.dtype)  # saturates
        with np.errstate(all="ignore"):
            computed: Array = np.asarray(definition.numpy(np, *operands, **bound_attributes(op, self.sizes), **stated))
        return cast(computed, result.dtype)


def _reduced(op: str, arrays: list[Array]) -> Array:
    total: Array = reduce(REDUCTIONS[op], map(_widened, arrays))
    return total / len(arrays) if op == "avg" else total


def _widened(array: Array) -> Array:
    small = array.dtype.itemsize < 4 and array.dtype.kind not in "iub"
    return array.astype(np.float32) if small else array
