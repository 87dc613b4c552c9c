"""Reports costs that a fusion does not show: gathers, copies for communication, and copies into donated memory."""

from collections.abc import Iterator, Mapping
from math import prod

from hostweave.base.errors import Location
from hostweave.check.sizes import default_sizes
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.ops.calls import times_called
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import inlined
from hostweave.types.mesh import RankSizes, Sizes
from hostweave.types.tensor import BufferType

MIN_SHARE = 0.1  # smallest reported cost, as a fraction of the bytes of a rank's inputs and outputs


def costly_choices(fusion: Fusion, host: ir.HostProgram, sizes: Mapping[str, int]) -> list[str]:
    """One line for each costly choice. `host` was lowered from `fusion`. Gathers by `hw.reshard` or `.stream` are not reported."""
    bound = RankSizes(default_sizes(host, sizes), host.mesh)
    total = sum(_bytes(host.local_type(p), bound) for p in (*host.inputs, *host.outputs))
    at = ", ".join(f"{name}={size}" for name, size in bound.items())
    notes = []
    for costs in (_gathers(fusion, bound), _packs(inlined(host), bound), _copies_to_donated(host, bound)):
        totals: dict[Location | None, tuple[str, int, int]] = {}  # by location, because a function may be called several times
        for location, text, size in costs:
            first, count, bytes_before = totals.get(location, (text, 0, 0))
            totals[location] = first, count + 1, bytes_before + size
        for location, (text, count, size) in totals.items():
            where, repetitions = f"{location}: " if location else "", f" in {count} instances" if count > 1 else ""
            cost = f"{size:,} bytes a rank{repetitions}, {size / total:.0%} of the program's inputs and outputs at {at}"
            notes += [f"{where}{text}: {cost}"] if size > MIN_SHARE * total else []
    return notes


def _gathers(fusion: Fusion, sizes: Sizes) -> Iterator[tuple[Location | None, str, int]]:
    types = fusion.types
    for op in fusion.ops:
        if op.callee:
            for _ in range(times_called(op, fusion.depths)):
                yield from _gathers(op.callee, sizes)
        elif op.kind == "all_gather" and not op.result.pinned and not op.result.stream:
            source = types[op.tensors[0]]
            type = BufferType(op.result.type.dtype, op.result.type.local_shape(fusion.mesh))
            text = f"%{op.tensors[0]}: {source} is gathered to {op.result.type}, which is not annotated"
            yield op.location, f"{text}; shard its consumer, or request the gather by hw.reshard", _bytes(type, sizes)


def _packs(host: ir.HostProgram, sizes: Sizes) -> Iterator[tuple[Location | None, str, int]]:
    """Yields copies between strided views and the contiguous buffers of communications."""
    posted = {
        name for i in tree.walk(host.body) if isinstance(i, ir.Communication) for name in (*tree.names(i, "read"), *tree.names(i, "write"))
    }
    types = ir.buffer_types(host)
    for copy, count in _copies(host.body, sizes, 1):
        source, result = types[copy.src], types[copy.dst]
        if copy.packed or (copy.src in posted and result.strides) or (copy.dst in posted and source.strides):
            text = f"%{copy.src} is copied to %{copy.dst}, because a communication needs contiguous memory"
            yield copy.location, f"{text}; make the sharded dim the outermost one", count * _bytes(result, sizes)


def _copies_to_donated(host: ir.HostProgram, sizes: Sizes) -> Iterator[tuple[Location | None, str, int]]:
    """Yields copies of results that could not be computed in donated memory."""
    donated, types = {p.name: p.memory for p in host.outputs if p.memory}, ir.buffer_types(host)
    for copy, count in _copies(host.body, sizes, 1):
        if copy.dst in donated:
            text = (
                f"%{donated[copy.dst]} is donated, but is read after %{copy.dst} is computed, or in the same loop, so the result is copied"
            )
            yield copy.location, f"{text}; read it earlier", count * _bytes(types[copy.dst], sizes)


def _copies(body: tree.Body, sizes: Sizes, count: int) -> Iterator[tuple[ir.Copy | ir.Pack, int]]:
    """Yields each copy, and how often it runs."""
    for i in body:
        if isinstance(i, ir.Copy | ir.Pack):
            yield i, count
        trips = 1 if i.trips is None else i.trips.bind(sizes)
        for nested in tree.bodies(i):
            yield from _copies(nested, sizes, count * trips)


def _bytes(type: BufferType, sizes: Sizes) -> int:
    """Bytes of a buffer. A size that does not divide evenly is rounded down."""
    return prod((size * size.divisor).bind(sizes) // size.divisor for size in type.shape) * type.dtype.itemsize
