"""Finds communications of one rank that must be ordered but are not.

Three kinds must be ordered on a rank:

- communications on different channels, if they occupy multiprocessors
- communications on one channel that occupy multiprocessors, if a generated kernel does at least one communication
- all signals and waits

Devices may start unordered communications in a different order on every rank. Kernels that occupy multiprocessors while they wait for peers
can then deadlock. Unordered kernels that exchange data on one channel share two slots of memory, and could overwrite data there.

Ranks only count signals. A wait therefore cannot notice that a later signal has overtaken an earlier signal. A CUDA graph may execute its
branches one after another, in any order that its edges allow. The edges must therefore keep signals and waits in the order of issue.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from hostweave.check.happens_before import Clock, Task, order, run
from hostweave.check.match_collectives import ChannelGroup, channel_of
from hostweave.check.operations import Instances, Operation
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import sizes_to_check
from hostweave.host_ir import ir, tree


class PostedCommunications:
    """For each rank, channel and stream, the last posted communication that occupies multiprocessors."""

    def __init__(self) -> None:
        self._last: dict[int, dict[tuple[int, tuple[ChannelGroup, bool]], Task]] = defaultdict(dict)  # by rank

    def unordered(self, task: Task, clock: Clock) -> list[Operation]:
        """Records the communications of a task that starts at `clock`. Returns earlier communications that must precede the task and may
        still run."""
        channels = {_order_key(member) for member in task.operation.communications if member.may_be_serialised}
        if not channels:
            return []
        last = self._last[task.operation.rank]
        pending = [
            earlier.operation
            for (stream_id, channel), earlier in last.items()
            if clock[stream_id] < earlier.number and (channels != {channel} or channel[1])
        ]
        last.update({(task.stream_id, channel): task for channel in channels})
        return pending


def _order_key(member: Operation) -> tuple[ChannelGroup, bool]:
    """Channel of a communication, and True if a generated kernel exchanges the data. The library does not order such exchanges."""
    return channel_of(member), member.instruction.exchanges


def unordered_pair(later: Operation, earlier: Operation) -> tuple[Operation, Operation]:
    """First pair of communications, one of each operation, that the library does not order."""
    ordered = ([member for member in each.communications if member.may_be_serialised] for each in (later, earlier))
    return next((one, other) for one, other in product(*ordered) if _order_key(one) != _order_key(other) or one.instruction.exchanges)


def is_signal_or_wait(member: Operation) -> bool:
    return isinstance(member.instruction, ir.Signalled)


class SignalOrder:
    def __init__(self) -> None:
        self._last: dict[int, tuple[Task, Operation]] = {}

    def unordered(self, task: Task, clock: Clock) -> Iterator[tuple[Operation, Operation]]:
        """Records the signals and waits of a task that starts at `clock`. Yields (later, earlier) if the previous signal or wait of the
        rank may still run."""
        for member in filter(is_signal_or_wait, task.operation.communications):
            if member.rank in self._last:
                last, earlier = self._last[member.rank]
                if clock[last.stream_id] < last.number:
                    yield member, earlier
            self._last[member.rank] = task, member


def unordered(instances: Instances) -> Iterator[tuple[Operation, Operation]]:
    """Pairs (earlier, later) of a rank's communications that must be ordered and are not."""
    operations_by_shape = {_shape(operations): operations for operations in reversed(instances.ranks)}
    # Handles one rank at a time, because a clock has an entry for each stream of each rank.
    for operations in reversed(operations_by_shape.values()):
        posted, started = PostedCommunications(), dict[Operation, tuple[Task, Clock]]()
        for task, clock in run(order(replace(instances, ranks=(operations,)), [])):
            if any(map(is_signal_or_wait, task.operation.communications)):
                started[task.operation] = task, clock.copy()
            for earlier in posted.unordered(task, clock):
                yield earlier, task.operation
        signal_order = SignalOrder()
        for task, clock in (started[operation] for operation in operations if operation in started):  # in the order of issue
            yield from ((earlier, member) for member, earlier in signal_order.unordered(task, clock))


def _shape(operations: tuple[Operation, ...]) -> tuple[object, ...]:
    """Key of a rank's operations. Equal for ranks whose operations differ only in the numbers of peers."""
    numbers, peers = {operation: k for k, operation in enumerate(operations)}, dict[int | None, int]()
    shape = list[object]()
    for operation in operations:
        waits = tuple([numbers[waited] for waited in operation.waits])
        posted = tuple([(member.instruction, peers.setdefault(member.peer, len(peers))) for member in operation.communications])
        shape.append((operation.instruction, operation.stream, waits, posted))
    return tuple(shape)


@ir.analysis
def unordered_instructions(program: ir.HostProgram) -> set[tree.Instruction]:
    """Communications and groups that must be ordered, and that some rank leaves unordered."""
    used = [program.channel(name) for name in {i.channel for i in tree.walk(program.body) if isinstance(i, ir.Communication)}]
    if sum(channel.may_be_serialised for channel in used) < 2 and not program.has_signals:
        return set()
    pairs = (pair for sizes in sizes_to_check(program) for pair in unordered(instantiate(program, sizes)))
    found = {operation.instruction for pair in pairs for operation in pair}
    return found.intersection(tree.walk(program.body))  # A called function orders its communications itself.
