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
    """Matching communications of several ranks: a send and its recv, a signal and its wait, or a collective of all ranks, in process group
    order."""

    operations: tuple[Operation, ...]

    def sources(self, member: Operation) -> tuple[Operation, ...]:
        if self.is_signal:
            return self.operations[:1] if member is self.operations[1] else ()
        if not any(access.writes for access in member.accesses):
            return ()
        return member.instruction.senders(member.process_group.index(member.rank), self.readers)

    @property
    def is_signal(self) -> bool:
        return self.operations[0].instruction.posts == "signal"

    @property
    def counter(self) -> tuple[object, ...]:
        """Counter that the signal increments: channel, sender, receiver and signal number."""
        one, _ = self.operations
        return channel_of(one), one.rank, one.peer, getattr(one.instruction, "signal", None)

    def awaited(self, member: Operation) -> tuple[Operation, ...]:
        assert member.channel is not None
        return self.operations if member.channel.transport.is_rendezvous else self.sources(member)

    @cached_property
    def readers(self) -> tuple[Operation, ...]:
        return tuple([member for member in self.operations if any(access.reads for access in member.accesses)])


def match_communications(instances: Instances) -> list[MatchedCommunications]:
    """All matched communications of the simulated calls. Raises ProgramError if communications have no match, or disagree."""
    program = instances.program
    # (channel, sender, receiver, signal number) -> operations of the sender, and of the receiver
    pairs: dict[object, tuple[list[Operation], list[Operation]]] = defaultdict(lambda: ([], []))
    collectives: dict[ChannelGroup, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for member in (member for operations in instances.ranks for operation in operations for member in operation.communications):
        posts = member.instruction.posts
        if posts == "collective":
            collectives[channel_of(member)][member.rank].append(member)
        elif posts in _UNMATCHED:
            is_sender = posts in ("send", "signal")
            sender, receiver = (member.rank, member.peer) if is_sender else (member.peer, member.rank)
            pairs[channel_of(member), sender, receiver, getattr(member.instruction, "signal", None)][not is_sender].append(member)
    matches = [_pair(program, *pair) for both in pairs.values() for pair in zip_longest(*both)]
    for (_, ranks), by_rank in collectives.items():
        columns = zip_longest(*(by_rank[rank] for rank in ranks))
        matches.extend(_collective(program, ranks, number, column) for number, column in enumerate(columns, 1))
    return matches


def channel_of(member: Operation) -> ChannelGroup:
    assert member.channel is not None
    return member.channel.name, member.process_group


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


def _collective(program: ir.HostProgram, ranks: tuple[int, ...], number: int, found: tuple[Operation | None, ...]) -> MatchedCommunications:
    present = [member for member in found if member is not None]
    first = present[0]
    if len(present) < len(found):
        absent = next(rank for rank, member in zip(ranks, found, strict=True) if member is None)
        remedy = "issue the same collectives in the same order on every rank"
        raise _fault(program, first, f"is collective {number} of its process group, and rank {absent} has only {number - 1}", remedy)
    for member in present[1:]:
        if _kind(member) != _kind(first):
            remedy = "issue the same collectives in the same order, with equal counts, on every rank"
            raise _fault(
                program, first, f"is collective {number} of its process group, but another rank calls a different one", remedy, member
            )
    matched = MatchedCommunications(tuple(present))
    if _may_differ(first):
        number_of = {member: number for number, member in enumerate(present)}
        all_sent, all_received = ([_exchanged(member, sends) for member in present] for sends in (True, False))
        for member, numbered in number_of.items():
            for source in matched.sources(member):
                sent, received = all_sent[number_of[source]][numbered], all_received[numbered][number_of[source]]
                if sent != received:
                    differ = f"sends {sent} elements to rank {member.rank}, which expects {received}"
                    raise _fault(program, source, differ, "make them equal", member)
    return matched


def _may_differ(member: Operation) -> bool:
    return isinstance(member.instruction, ir.Collective) and member.instruction.may_differ


def _exchanged(member: Operation, sends: bool) -> tuple[int, ...]:
    """Numbers of elements that the rank sends to each rank of the process group, or receives from each rank."""
    instruction, layout = member.instruction, member.accesses[0 if sends else -1].region.layout
    assert isinstance(instruction, ir.Collective)
    along, ranks = instruction.sent_along if sends else instruction.received_along, len(member.process_group)
    return (layout.count,) * ranks if along is None else _blocks(tuple(layout.shape), along, ranks)


@lru_cache
def _blocks(shape: tuple[int, ...], along: int, ranks: int) -> tuple[int, ...]:
    return tuple([len(share(shape, along, ranks, number)) for number in range(ranks)])


def _kind(member: Operation) -> tuple[object, ...]:
    """Key of a collective. All ranks must have the same key."""
    instruction = member.instruction
    moved = member.accesses[-1 if instruction.at_root == "src" else 0].region.layout  # not the buffer that only the root has
    stated = tuple(getattr(instruction, name, None) for name in ("op", "sources", "sent_along", "received_along"))
    return type(instruction), stated, member.peer, None if _may_differ(member) else moved.count, moved.dtype


def _fault(program: ir.HostProgram, member: Operation, reason: str, remedy: str, other: Operation | None = None) -> ProgramError:
    which = f", {other}" if other else ""
    return failure(program, f"{member}: {reason}{which}: {remedy}", member.instruction)


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
    match_of = {member: matched for matched in matches for member in matched.operations}
    waited_before = {after.operations[0]: before.operations[1] for before, after in pairwise(signals) if before.counter == after.counter}
    reached: set[Operation] = set()
    positions = [0] * len(instances.ranks)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, operations in enumerate(instances.ranks):
            while positions[rank] < len(operations):
                members = operations[positions[rank]].communications
                # The queue posts a communication, and then waits for the matching communication. A signal is posted only when the queue
                # proceeds.
                matched_here = [(member, match_of[member]) for member in members if member in match_of]
                reached.update(member for member, matched in matched_here if not matched.is_signal)
                awaited = [other for member, matched in matched_here for other in matched.awaited(member)]
                awaited.extend(waited_before[member] for member in members if member in waited_before)
                if not reached.issuperset(awaited):
                    break
                reached.update(members)
                positions[rank] += 1
                has_moved = True
    stuck = [operations[position] for position, operations in zip(positions, instances.ranks, strict=True) if position < len(operations)]
    for member in (member for operation in stuck for member in operation.communications):
        if member in waited_before and waited_before[member] not in reached:
            why = f"is sent again before rank {member.peer} has waited for the previous signal, so that a CUDA graph waits forever"
            raise failure(instances.program, f"{member}: {why}; add that wait first, or use another signal number", member.instruction)
    if stuck:
        first = stuck[0]
        matched_first = [(member, match_of[member]) for member in first.communications if member in match_of]
        awaited = [other for member, matched in matched_first for other in matched.awaited(member) if other not in reached]
        ranks = sorted({other.rank for other in awaited})
        peers = f"ranks {' and '.join(map(str, ranks))} wait" if len(ranks) > 1 else f"rank {ranks[0]} waits"
        why = "waits forever if a device runs all streams of a rank as one queue (CUDA_DEVICE_MAX_CONNECTIONS=1)"
        raise failure(instances.program, f"{first}: {why}; before it, issue the operations that {peers} for", first.instruction)
