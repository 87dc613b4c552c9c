"""Predicts the timeline of a host program: simulates its operations at given sizes, with the speeds of a machine."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from hostweave.base.errors import ProgramError
from hostweave.check.happens_before import Rendezvous
from hostweave.check.match_collectives import match_communications
from hostweave.check.operations import Operation, Root, instruction_text
from hostweave.check.simulate import instantiate
from hostweave.host_ir import ir, tree
from hostweave.timeline.events import Event, Timeline
from hostweave.timeline.simulate import SimulatedTask, simulate, tasks_of
from hostweave.types.machine import GPUS_PER_HOST, Machine
from hostweave.types.mesh import Sizes
from hostweave.types.tensor import holds


def predicted(program: ir.HostProgram, sizes: Sizes, machine: Machine) -> Timeline:
    """Timeline of one call that all ranks start at the same time, without the time that hosts take to enqueue work."""
    if program.mesh.size > GPUS_PER_HOST and machine.network is None:
        why = f"{program.mesh} has more ranks than one host has GPUs, and the figures of {machine.name} have no network"
        example = "machine=dataclasses.replace(figures, network=hw.Network(bandwidth=45e9, latency=5e-6, source=...))"
        raise ProgramError(f"{program.name}: predict: {why}; give {example}, or --network 45e9,5e-6 on the command line")
    instances = instantiate(program, sizes)
    ranks = tasks_of(instances, match_communications(instances), machine)
    simulate(ranks)
    network = f" and {machine.network.bandwidth / 1e9:g} GB/s between hosts ({machine.network.source})" if machine.network else ""
    found = timeline_of(program, sizes, f"predicted from the figures of {machine.name}{network}", ranks)
    absent = {p.name for p in (*program.inputs, *program.outputs) if not holds(p.type, program.mesh, 0)}
    roots = {name: root for name, root in instances.roots[0].items() if name not in absent}
    return replace(found, memory=tuple(_memory(ranks[0], roots)))


def _memory(tasks: list[SimulatedTask], roots: Mapping[str, Root]) -> Iterator[tuple[float, int]]:
    """Yields the memory of a rank as (time, bytes from then on). Inputs and outputs always count. Temporaries count from allocate to
    deallocate."""
    live_bytes = sum(root.size for root in roots.values() if root.role != "allocation")
    live: set[str] = set()
    yield 0.0, live_bytes
    for task in sorted(tasks, key=lambda task: task.start):
        i = task.operation.instruction
        for access in task.operation.accesses if tree.names(i, "allocate", "free") else ():
            name, begins = access.region.root, bool(tree.names(i, "allocate"))
            if begins != (name in live):
                live_bytes += roots[name].size if begins else -roots[name].size
                live ^= {name}
                yield 1e6 * task.start, live_bytes


def timeline_of(program: ir.HostProgram, sizes: Sizes, basis: str, ranks: list[list[SimulatedTask]]) -> Timeline:
    """Timeline of tasks with known times. Contains only tasks that compute, communicate or wait for a signal."""
    shown = [task for tasks in ranks for task in tasks if task.work.engine or task.operation.instruction.posts == "wait_signal"]
    numbers = {task: number for number, task in enumerate(shown)}

    @cache
    def predecessors(task: SimulatedTask) -> tuple[int, ...]:
        """Indices of the events for which a task waits. If a predecessor is not shown, its own predecessors replace it."""
        found = ((numbers[each],) if each in numbers else predecessors(each) for each, _ in task.needs_end_of)
        return tuple(dict.fromkeys(number for numbers_of_task in found for number in numbers_of_task))

    @cache
    def numbers_of(rendezvous: Rendezvous[SimulatedTask]) -> tuple[int, ...]:
        return tuple(numbers[other] for other in rendezvous.tasks if other in numbers)

    events = tuple(_event(task, predecessors(task), _joined([*map(numbers_of, task.meets)])) for task in shown)
    streams = (ir.CALLER, *(f"{pool.name}[{k}]" for pool in program.streams for k in range(pool.count)))
    used = {event.stream for event in events}
    shown_streams = tuple(stream for stream in streams if stream in used)
    return Timeline(program.name, str(program.mesh), dict(sizes), basis, events, tuple(range(len(ranks))), shown_streams)


def _joined(indices: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Concatenates the indices of an operation's members. Keeps the tuple of a single member, which all ranks of a collective share."""
    return indices[0] if len(indices) == 1 else tuple(dict.fromkeys(number for each in indices for number in each))


def _event(task: SimulatedTask, after: tuple[int, ...], meets: tuple[int, ...]) -> Event:
    operation = task.operation
    stream = f"{operation.stream[0]}[{operation.stream[1]}]" if operation.stream else ir.CALLER
    start, end = 1e6 * task.start, 1e6 * task.end
    location = str(operation.instruction.location or "")
    return Event(
        operation.rank, stream, name_of(operation), task.work.kind, start, end, task.work.sent, _text(operation), location, after, meets
    )


def name_of(operation: Operation) -> str:
    """Name of an operation for users, such as `matmul y_i`, or the names of a group's members."""
    if operation.members:
        return ", ".join(dict.fromkeys(map(name_of, operation.members)))
    i = operation.instruction
    if kernel := tree.names(i, "launch"):
        return kernel[0]
    names = tree.names(i, "write") or tree.names(i, "read", "alias")
    return " ".join([instruction_text(i).split()[0], *names[:1]])


def _text(operation: Operation) -> str:
    iteration = "".join(f"%{name} = {value}: " for name, value in operation.iteration)
    members = [instruction_text(member.instruction) for member in operation.members or (operation,)]
    return f"{iteration}{'; '.join(members)}"
