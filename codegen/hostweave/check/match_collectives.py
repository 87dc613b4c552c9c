"""Matches the communications of each channel. The n-th send of rank a to rank b matches the n-th recv of b from a. Signals of one number
match waits in the same way. The n-th collectives of all ranks of a process group match."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, zip_longest

from hostweave.base.errors import ProgramError
from hostweave.check.operations import Instances, Operation, failure
from hostweave.host_ir import ir
from hostweave.types.mesh import share

ChannelGroup = tuple[str, tuple[int, ...]]  # name of a channel, and global ranks of one of its process groups


@dataclass(frozen=True)
class MatchedCommunications:
    """Matching communications of several ranks: a send and its recv, a signal and its wait, or the parts of a collective in process group
    order."""

    parts: tuple[Operation, ...]

    def sources(self, part: Operation) -> tuple[Operation, ...]:
        if self.is_signal:
            return self.parts[:1] if part is self.parts[1] else ()
        if not any(access.writes for access in part.accesses):
            return ()
        return part.instruction.senders(part.process_group.index(part.rank), self.readers)

    @property
    def is_signal(self) -> bool:
        return self.parts[0].instruction.posts == "signal"

    @property
    def counter(self) -> tuple[object, ...]:
        """Counter that the signal increments: channel, sender, receiver and signal number."""
        one, _ = self.parts
        return channel_of(one), one.rank, one.peer, getattr(one.instruction, "signal", None)

    def awaited(self, part: Operation) -> tuple[Operation, ...]:
        assert part.channel is not None
        return self.parts if part.channel.transport.is_rendezvous else self.sources(part)

    @cached_property
    def readers(self) -> tuple[Operation, ...]:
        return tuple([part for part in self.parts if any(access.reads for access in part.accesses)])


def match_communications(instances: Instances) -> list[MatchedCommunications]:
    """All matched communications of the simulated calls. Raises ProgramError if communications have no match, or disagree."""
    program = instances.program
    # (channel, sender, receiver, signal number) -> operations of the sender, and of the receiver
    pairs: dict[object, tuple[list[Operation], list[Operation]]] = defaultdict(lambda: ([], []))
    collectives: dict[ChannelGroup, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for part in (part for operations in instances.ranks for operation in operations for part in operation.communications):
        posts = part.instruction.posts
        if posts == "collective":
            collectives[channel_of(part)][part.rank].append(part)
        elif posts in _UNMATCHED:
            is_sender = posts in ("send", "signal")
            sender, receiver = (part.rank, part.peer) if is_sender else (part.peer, part.rank)
            pairs[channel_of(part), sender, receiver, getattr(part.instruction, "signal", None)][not is_sender].append(part)
    matches = [_pair(program, *pair) for both in pairs.values() for pair in zip_longest(*both)]
    for (_, ranks), by_rank in collectives.items():
        columns = zip_longest(*(by_rank[rank] for rank in ranks))
        matches.extend(_collective(program, ranks, number, parts) for number, parts in enumerate(columns, 1))
    return matches


def channel_of(part: Operation) -> ChannelGroup:
    assert part.channel is not None
    return part.channel.name, part.process_group


_UNMATCHED = {  # fault if the matching communication is missing, and remedy for the fault
    "send": ("posts no recv for it", "add the recv, or drop this send"),
    "recv": ("posts no send for it", "add the send, or drop this recv"),
    "signal": ("does not wait for it, so its next wait would match this signal", "add the wait"),
    "wait_signal": ("sends no such signal", "add the signal, or drop this wait"),
}


def _pair(program: ir.HostProgram, one: Operation | None, other: Operation | None) -> MatchedCommunications:
    if one is None or other is None:
        unmatched = one or other
        assert unmatched is not None
        reason, remedy = _UNMATCHED[unmatched.instruction.posts]
        raise _fault(program, unmatched, f"rank {unmatched.peer} {reason}", remedy)
    if one.instruction.posts == "send":
        sent, received = one.accesses[0].region.layout, other.accesses[0].region.layout
        if (sent.count, sent.dtype) != (received.count, received.dtype):
            differ = f"sends {sent.count} {sent.dtype}, not the {received.count} {received.dtype} of the matching recv"
            raise _fault(program, one, differ, "make them equal", other)
    return MatchedCommunications((one, other))


def _collective(program: ir.HostProgram, ranks: tuple[int, ...], number: int, parts: tuple[Operation | None, ...]) -> MatchedCommunications:
    present = [part for part in parts if part is not None]
    first = present[0]
    if len(present) < len(parts):
        absent = next(rank for rank, part in zip(ranks, parts, strict=True) if part is None)
        remedy = "issue the same collectives in the same order on every rank"
        raise _fault(program, first, f"is collective {number} of its process group, and rank {absent} has only {number - 1}", remedy)
    for part in present[1:]:
        if _kind(part) != _kind(first):
            remedy = "issue the same collectives in the same order, with equal counts, on every rank"
            raise _fault(
                program, first, f"is collective {number} of its process group, but another rank calls a different one", remedy, part
            )
    matched = MatchedCommunications(tuple(present))
    if _may_differ(first):
        number_of = {part: number for number, part in enumerate(present)}
        all_sent, all_received = ([_exchanged(part, sends) for part in present] for sends in (True, False))
        for part, numbered in number_of.items():
            for source in matched.sources(part):
                sent, received = all_sent[number_of[source]][numbered], all_received[numbered][number_of[source]]
                if sent != received:
                    differ = f"sends {sent} elements to rank {part.rank}, which expects {received}"
                    raise _fault(program, source, differ, "make them equal", part)
    return matched


def _may_differ(part: Operation) -> bool:
    return isinstance(part.instruction, ir.Collective) and part.instruction.may_differ


def _exchanged(part: Operation, sends: bool) -> tuple[int, ...]:
    """Numbers of elements that the rank sends to each rank of the process group, or receives from each rank."""
    instruction, layout = part.instruction, part.accesses[0 if sends else -1].region.layout
    assert isinstance(instruction, ir.Collective)
    along, ranks = instruction.sent_along if sends else instruction.received_along, len(part.process_group)
    return (layout.count,) * ranks if along is None else _blocks(tuple(layout.shape), along, ranks)


@lru_cache
def _blocks(shape: tuple[int, ...], along: int, ranks: int) -> tuple[int, ...]:
    return tuple([len(share(shape, along, ranks, number)) for number in range(ranks)])


def _kind(part: Operation) -> tuple[object, ...]:
    """Key of a collective. All ranks must have the same key."""
    instruction = part.instruction
    moved = part.accesses[-1 if instruction.at_root == "src" else 0].region.layout  # not the buffer that only the root has
    stated = tuple(getattr(instruction, name, None) for name in ("op", "sources", "sent_along", "received_along"))
    return type(instruction), stated, part.peer, None if _may_differ(part) else moved.count, moved.dtype


def _fault(program: ir.HostProgram, part: Operation, reason: str, remedy: str, other: Operation | None = None) -> ProgramError:
    which = f", {other}" if other else ""
    return failure(program, f"{part}: {reason}{which}: {remedy}", part.instruction)


def expect_end_in_one_queue(instances: Instances, matches: list[MatchedCommunications]) -> None:
    """Raises ProgramError if ranks of a program with signals would wait forever when each device executes all streams as one queue, and
    signals do not accumulate.

    A queue executes in the order of issue, so a wait for a signal blocks the queue. Several streams may share a queue. With
    CUDA_DEVICE_MAX_CONNECTIONS=1, all streams share one queue. In a CUDA graph, signals do not accumulate: a sender may signal again only
    after the receiver has waited for the previous signal.
    """
    signals = [matched for matched in matches if matched.is_signal]
    if not signals:
        return
    match_of = {part: matched for matched in matches for part in matched.parts}
    waited_before = {after.parts[0]: before.parts[1] for before, after in pairwise(signals) if before.counter == after.counter}
    reached: set[Operation] = set()
    positions = [0] * len(instances.ranks)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, operations in enumerate(instances.ranks):
            while positions[rank] < len(operations):
                parts = operations[positions[rank]].communications
                # The queue posts a communication, and then waits for the matching communication. A signal is posted only when the queue
                # proceeds.
                matched_here = [(part, match_of[part]) for part in parts if part in match_of]
                reached.update(part for part, matched in matched_here if not matched.is_signal)
                awaited = [other for part, matched in matched_here for other in matched.awaited(part)]
                awaited.extend(waited_before[part] for part in parts if part in waited_before)
                if not reached.issuperset(awaited):
                    break
                reached.update(parts)
                positions[rank] += 1
                has_moved = True
    stuck = [operations[position] for position, operations in zip(positions, instances.ranks, strict=True) if position < len(operations)]
    for part in (part for operation in stuck for part in operation.communications):
        if part in waited_before and waited_before[part] not in reached:
            why = f"is sent again before rank {part.peer} has waited for the previous signal, so that a CUDA graph waits forever"
            raise failure(instances.program, f"{part}: {why}; add that wait first, or use another signal number", part.instruction)
    if stuck:
        first = stuck[0]
        awaited = [other for part in first.communications for other in match_of[part].awaited(part) if other not in reached]
        ranks = sorted({other.rank for other in awaited})
        peers = f"ranks {' and '.join(map(str, ranks))} wait" if len(ranks) > 1 else f"rank {ranks[0]} waits"
        why = "waits forever if a device runs all streams of a rank as one queue (CUDA_DEVICE_MAX_CONNECTIONS=1)"
        raise failure(instances.program, f"{first}: {why}; before it, issue the operations that {peers} for", first.instruction)
