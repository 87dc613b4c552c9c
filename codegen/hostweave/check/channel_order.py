"""Finds communications of one rank that must be ordered and are not. They use different channels, or their signals share a counter.

A device may start unordered communications in another order on every rank. If a transport occupies multiprocessors, each communication
keeps part of the device while it waits for its peers. Signals are only counted, so a signal that overtakes another is mistaken for it.
Element counts are exchanged through memory that all streams of a rank share. The branches of a CUDA graph may run as one queue, in any
order that its edges allow. Signals and waits must keep their order of issue in each of these orders.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from hostweave.check.happens_before import Clock, Task, order, run
from hostweave.check.match_collectives import ChannelGroup, channel_of
from hostweave.check.operations import Instances, Operation
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import sizes_to_check
from hostweave.host_ir import ir, tree


class PostedCommunications:
    """The last communication that each rank has posted, by channel and stream. It comes after all earlier ones.

    A library orders its own communications of one channel, but not kernels that exchange data themselves.
    """

    def __init__(self) -> None:
        self._last: dict[int, dict[tuple[int, tuple[ChannelGroup, bool]], Task]] = defaultdict(dict)  # by rank

    def unordered(self, task: Task, clock: Clock) -> list[Operation]:
        """Records the posts of a task that starts at `clock`. Returns earlier posts of other channels that may still run."""
        channels = {(channel_of(part), part.instruction.exchanges) for part in task.operation.communications if part.takes_turns}
        if not channels:
            return []
        last = self._last[task.operation.rank]
        found = [
            earlier.operation
            for (stream_id, channel), earlier in last.items()
            if clock[stream_id] < earlier.number and (channels != {channel} or channel[1])
        ]
        last.update({(task.stream_id, channel): task for channel in channels})
        return found


def takes_turns(part: Operation) -> bool:
    """True for a signal and for a wait, which a rank issues one after another."""
    return isinstance(part.instruction, ir.Signalled)


class InTurn:
    """The last signal or wait of each rank."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Task, Operation]] = {}

    def unordered(self, task: Task, clock: Clock) -> Iterator[tuple[Operation, Operation]]:
        """Records the posts of a task that starts at `clock`. Yields pairs of an earlier operation that may still run, and a later one."""
        for part in filter(takes_turns, task.operation.communications):
            if part.rank in self._last:
                last, earlier = self._last[part.rank]
                if clock[last.stream_id] < last.number:
                    yield part, earlier
            self._last[part.rank] = task, part


def unordered(instances: Instances) -> Iterator[tuple[Operation, Operation]]:
    """Pairs of communications that must be ordered, but that no stream or event of their rank orders: (earlier, later)."""
    alike = {_shape(operations): operations for operations in reversed(instances.ranks)}
    for operations in reversed(alike.values()):  # one rank at a time: a clock has an entry for each stream of each rank
        posted, started = PostedCommunications(), dict[Operation, tuple[Task, Clock]]()
        for task, clock in run(order(replace(instances, ranks=(operations,)), [])):
            if any(map(takes_turns, task.operation.communications)):
                started[task.operation] = task, clock.copy()
            for earlier in posted.unordered(task, clock):
                yield earlier, task.operation
        in_turn = InTurn()
        for task, clock in (started[operation] for operation in operations if operation in started):  # in the order of issue
            yield from ((earlier, part) for part, earlier in in_turn.unordered(task, clock))


def _shape(operations: tuple[Operation, ...]) -> tuple[object, ...]:
    """Key of a rank's order. It is equal for two ranks that differ in their peers only."""
    numbers, peers = {operation: k for k, operation in enumerate(operations)}, dict[int | None, int]()
    return tuple(
        [
            (
                operation.instruction,
                operation.stream,
                tuple([numbers[waited] for waited in operation.waits]),
                tuple([(part.instruction, peers.setdefault(part.peer, len(peers))) for part in operation.communications]),
            )
            for operation in operations
        ]
    )


@ir.analysis
def unordered_instructions(program: ir.HostProgram) -> set[tree.Instruction]:
    """The communications and groups that are not ordered with another one on some rank, although they must be."""
    used = [program.channel(name) for name in {i.channel for i in tree.walk(program.body) if isinstance(i, ir.Communication)}]
    if sum(channel.takes_turns for channel in used) < 2 and not program.has_signals:
        return set()
    pairs = (pair for sizes in sizes_to_check(program) for pair in unordered(instantiate(program, sizes)))
    found = {operation.instruction for pair in pairs for operation in pair}
    return found.intersection(tree.walk(program.body))  # a called function orders its own communications
