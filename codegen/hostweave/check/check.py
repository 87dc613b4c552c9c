"""Proves that a host program has no races, no deadlocks and no reads of uninitialised memory, and checks the results of the program."""

from collections import defaultdict
from itertools import combinations
from typing import NoReturn

from hostweave.analysis.kernel_indices import may_overwrite
from hostweave.base.garbage import without_garbage_collection
from hostweave.check.channel_order import PostedCommunications, SignalOrder, unordered_pair
from hostweave.check.happens_before import Clock, Order, Task, order, run
from hostweave.check.match_collectives import expect_end_in_one_queue, match_communications
from hostweave.check.memory import ByteBlocks, Memory, Pieces, TaskAccess
from hostweave.check.operations import Access, ByteLayout, ByteRegion, Instances, Operation, failure
from hostweave.check.results.results import Case, Results, Stages
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import MAX_FACTOR, sizes_to_check, with_far_branches
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.types.mesh import Sizes, share

MAX_ELEMENTS = 4e6  # default of `max_elements`


def check(
    program: ir.HostProgram,
    sizes: Sizes | None = None,
    fusion: Fusion | None = None,
    stages: Stages | None = None,
    max_elements: float = MAX_ELEMENTS,
) -> tuple[str, ...]:
    """Checks a program, by default at several small sizes.

    With `fusion`, the results of all ranks are compared with the results of the fusion, over a finite field. `stages` yields the program
    after each pass, so that an error can name the first wrong pass. The comparison skips sizes at which the fusion computes more than
    `max_elements` elements. Returns descriptions of skipped sizes, of lines that never ran, and of user kernels. Without `fusion`, returns
    ().

    Raises ProgramError if any rank has one of these faults:

    - Two accesses of the same bytes, at least one of them a write, are not ordered by streams, events, signals or arriving data. The caller
      also accesses inputs and outputs, before and after the call. Accesses of one instruction, or of one `group`, count as unordered,
      unless the instruction may overwrite its operand in place.
    - Memory is freed while it is in use, used after it was freed, or reused before its last use has provably ended.
    - A communication has no match on another rank, or matching communications differ.
    - Two communications that occupy multiprocessors are unordered on a rank, unless the communication library does both on one channel.
    - An index, a slice or a peer is out of range.
    - A wait may use an event that has not been recorded.
    - Ranks wait for each other forever.
    - Memory is read before it is written, or a donated input is read after it was overwritten.
    - An output is not written completely, or differs from the result of the fusion.

    "Ordered" means happens-before, which is computed with vector clocks (Fidge 1988, Mattern 1989).

    If the program has signals, two consecutive calls are checked. Accesses of the second call must not race with the first call. Three more
    rules apply:

    - The signals and waits of a rank are totally ordered.
    - The program ends even if each device executes all streams of its rank as one queue, in the order of issue.
    - The program also ends if a signal waits until the receiver has waited for the previous signal with the same number.

    CUDA graphs need the first and the third rule.
    """
    calls = 2 if program.has_signals else 1
    checked: list[Case] = []
    results = Results(fusion, program, stages, max_elements) if fusion else None
    with without_garbage_collection():
        cases = [(program, chosen) for chosen in (sizes_to_check(program) if sizes is None else (sizes,))]
        if sizes is None and (far := with_far_branches(program, MAX_FACTOR)):
            cases.append((far, cases[0][1]))
        for checked_program, chosen_sizes in cases:
            instances = instantiate(checked_program, chosen_sizes, calls)
            matches = match_communications(instances)
            expect_end_in_one_queue(instances, matches)
            happens_before = order(instances, matches)
            checker = _Checker(instances, happens_before)
            for task, clock in run(happens_before):
                checker.check_task(task, clock)
            checker.check_end()
            if results and checked_program is program:
                checked.append((chosen_sizes, instances, matches))
        if results:
            results.compare_all(checked, has_given_sizes=sizes is not None)
    return results.unchecked() if results else ()


class _Checker:
    def __init__(self, instances: Instances, happens_before: Order):
        self.instances, self.order = instances, happens_before
        self.posted = PostedCommunications()
        self.tasks = {task.operation: task for task in happens_before.tasks}
        self.kernels = {kernel.name: kernel for kernel in instances.program.kernels}
        self.may_overwrite_cache: dict[tuple[tree.Instruction, str, str], bool] = {}
        self.memories: list[dict[str, Memory]] = []
        # First read of bytes that are uninitialised or overwritten, and the write that overwrote the bytes. The error of such a read is
        # raised at the end, because the error of a race is more specific.
        self.uninitialised: tuple[Operation, Access, range, TaskAccess | None] | None = None
        self.signal_order = SignalOrder()
        regions: dict[tuple[int, str], list[ByteRegion]] = defaultdict(list)
        for member in (one for operations in instances.ranks for operation in operations for one in operation.members or (operation,)):
            for access in member.accesses:
                regions[_rank_of(member, access), access.region.root].append(access.region)
        pieces: dict[tuple[int, frozenset[ByteBlocks]], Pieces] = {}
        for rank, (roots, caller) in enumerate(zip(instances.roots, happens_before.caller_tasks, strict=True)):
            self.memories.append({name: Memory(root, regions[rank, name], caller, pieces) for name, root in roots.items()})

    def fail(self, operation: Operation, message: str) -> NoReturn:
        raise failure(self.instances.program, f"{operation}{message}", operation.instruction)

    def check_task(self, task: Task, clock: Clock) -> None:
        task_accesses = [(member, access) for member in task.operation.members or (task.operation,) for access in member.accesses]
        for (member, access), (other, second) in combinations(task_accesses, 2):
            if (access.writes or second.writes) and self.memory(member, access) is self.memory(other, second):
                self.expect_disjoint(self.memory(member, access), member, access, other, second)
        for freed in task.operation.frees:
            by = self.tasks[freed]
            if clock[by.stream_id] < by.number:
                reused = f"may get bytes of %{freed.accesses[0].name}, which {freed} frees"
                self.fail(task.operation, f" {reused}: nothing orders them; {_remedy(task.operation, freed)}")
        # Reads come first, because a task does not read its own writes.
        for member, access in sorted(task_accesses, key=lambda task_access: task_access[1].writes):
            memory = self.memory(member, access)
            if access.reads and self.uninitialised is None and (uninitialised := memory.first_uninitialised(access.region)):
                self.uninitialised = member, access, *uninitialised
            task_access = TaskAccess(task, member, access)
            if (conflict := memory.record(task_access, clock)) is not None:
                self.race(task_access, conflict, memory)
            if access.region.generation in memory.freed:
                remedy = "move the deallocate behind this use, and out of a loop around it"
                self.fail(member, f" {_verb(member, access)} %{access.name} after its deallocate: {remedy}")
            if access.writes and tree.names(member.instruction, "free"):
                memory.freed.add(access.region.generation)
        if not task.operation.communications:
            return
        for earlier in self.posted.unordered(task, clock):
            one, other = unordered_pair(task.operation, earlier)
            library = "on one channel, but a kernel does one of them (the library orders only its own communications)"
            what = library if one.channel == other.channel else "over different channels"
            fault = f" and {other} are {what}, and nothing orders them on the rank: they can deadlock"
            self.fail(one, f"{fault}; {_remedy(one, other)}")
        for member, earlier in self.signal_order.unordered(task, clock):
            why = f" and {earlier} can occur at the same time, and a wait cannot tell signals apart"
            self.fail(member, f"{why}; {_remedy(member, earlier)}")

    def memory(self, member: Operation, access: Access) -> Memory:
        return self.memories[_rank_of(member, access)][access.region.root]

    def expect_disjoint(self, memory: Memory, member: Operation, access: Access, other: Operation, second: Access) -> None:
        """Raises ProgramError if two accesses of one task overlap, unless one instruction overwrites its operand in place and may do so."""
        if not memory.overlap(access.region, second.region):
            return
        if member is other:
            read, written = (second, access) if access.writes else (access, second)
            if self.may_reuse_in_place(member, read, written):
                return
            self.fail(member, f" writes %{written.name} over the bytes of %{read.name} that it reads: give the result separate memory")
        first, then = f" {_verb(member, access)} %{access.name}", f"{other} {_verb(other, second)} the same bytes"
        self.fail(member, f"{first} while, in the same group, {then}: put the two into separate groups")

    def may_reuse_in_place(self, member: Operation, read: Access, written: Access) -> bool:
        old, new = read.region, written.region
        match member.instruction:
            case ir.Collective(in_place="block of dst", received_along=along):
                return old.offset == new.offset + _own_block(member, new.layout, along)
            case ir.Collective(in_place="block of src", sent_along=along):
                return new.offset == old.offset + _own_block(member, old.layout, along)
        key = member.instruction, read.name, written.name
        if key not in self.may_overwrite_cache:
            self.may_overwrite_cache[key] = may_overwrite(member.instruction, self.kernels, read.name, written.name)
        return self.may_overwrite_cache[key] and (old.offset, old.layout.in_order) == (new.offset, new.layout.in_order)

    def race(self, task_access: TaskAccess, conflict: TaskAccess, memory: Memory) -> NoReturn:
        """Raises the error of a race. The message begins with the later operation, which should have waited."""
        if conflict is not memory.before and self.issue_index(conflict) > self.issue_index(task_access):
            task_access, conflict = conflict, task_access
        member, access, other = task_access.member, task_access.access, conflict.member
        if conflict is memory.before:
            user = _BEFORE[memory.root.role]
        else:
            same = "it" if conflict.access.name == access.name else f"%{conflict.access.name}, the same bytes"
            user = f"{other} {_verb(other, conflict.access)} {same}"
        self.fail(member, f" {_verb(member, access)} %{access.name} while {user}: nothing orders them; {_remedy(member, other)}")

    def issue_index(self, task_access: TaskAccess) -> int:
        return self.instances.ranks[task_access.member.rank].index(task_access.by.operation)

    def check_end(self) -> None:
        outputs = self.instances.program.outputs
        donated = {p.memory for p in outputs if p.memory}
        if self.uninitialised is not None:
            member, access, uninitialised, taken = self.uninitialised
            where = f"bytes {uninitialised.start} to {uninitialised.stop} of %{access.region.root}"
            if taken:
                why = f"after %{taken.access.name} has overwritten {where}, which is donated"
                self.fail(member, f" reads %{access.name} {why}: read %{access.name} before, or keep a copy")
            self.fail(member, f" reads %{access.name} before {where} are written: write these bytes first, or remove the read")
        owned = {p.memory or p.name: p for p in outputs}
        for rank, memories in enumerate(self.memories):
            clock = self.order.clocks[self.order.caller_tasks[rank].stream_id]
            for name, memory in memories.items():
                if (task_access := memory.unfinished_access(clock)) is not None:
                    member, access, at = task_access.member, task_access.access, task_access.access.at
                    if at is not None:
                        remedy = f"add a signal of rank {member.rank}, and a wait for it on rank {at}"
                        self.fail(member, f" may still access the memory of rank {at} when rank {at} ends its call: {remedy}")
                    pool, _ = member.stream or ("", 0)
                    user = f"{_verb(member, access)} %{access.name}, and {_AFTERWARDS[memory.root.role]}"
                    self.fail(member, f" {user}: nothing orders the caller's stream after this operation; add join {pool}")
                gap = memory.first_uninitialised(ByteRegion(name, 0, memory.root.layout, int(name in donated)))
                has_output = name in owned and rank in owned[name].type.mesh_in(self.instances.program.mesh).all_ranks
                if gap and has_output:
                    missing = f"rank {rank}: nothing writes bytes {gap[0].start} to {gap[0].stop} of the output %{owned[name].name}"
                    raise failure(self.instances.program, f"{missing}: write all of every output")


# Use of each kind of memory before and after the call.
_BEFORE = {
    "input": "the caller may still write it",
    "output": "the caller may still read it",
    "allocation": "the previous call may still use it",
}
_AFTERWARDS = {"input": "the caller may write it next", "output": "the caller reads it next", "allocation": "the next call uses it"}


def _own_block(member: Operation, blocks: ByteLayout, along: int | None) -> int:
    group = member.process_group
    return share(blocks.shape, along, len(group), group.index(member.rank)).start * blocks.dtype.itemsize


def _verb(member: Operation, access: Access) -> str:
    if tree.names(member.instruction, "free"):
        return "frees"
    if tree.names(member.instruction, "allocate"):
        return "allocates"
    return "updates" if access.reads and access.writes else "writes" if access.writes else "reads"


def _rank_of(member: Operation, access: Access) -> int:
    return member.rank if access.at is None else access.at


def _remedy(later: Operation, earlier: Operation) -> str:
    if later.rank != earlier.rank:
        return f"add a signal after the operation of rank {earlier.rank}, and wait for it before the operation of rank {later.rank}"
    if later.stream and not earlier.stream:
        return f"add fork {later.stream[0]} between them"
    if earlier.stream and not later.stream:
        return f"add join {earlier.stream[0]} between them"
    return "add record/wait or put both on one stream"
