"""Live ranges of the temporaries of a host program, for the arena that `prepare` lays out and for reports.

An allocate in a stream block is one buffer for each of the streams, anywhere else it is one buffer. It lives until its
deallocate, else to the end of the body that it stands in, and what a block allocates does so in each of its calls. What begins
after that, in the order of the text, may have its bytes; while streams are not joined, those of a stream's own buffer are for
what the same stream allocates next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hostweave.host_ir import ir
from hostweave.host_ir.expr import Var
from hostweave.types.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Begin:
    """Of `slots` buffers, one for each of the first streams of the pool that `block` runs on, or of one where there is no block."""

    allocate: ir.Allocate
    block: ir.OnStream | None = None
    slots: int = 1


@dataclass(frozen=True)
class End:
    of: Begin


@dataclass(frozen=True)
class Joined:
    stream: str


@dataclass(frozen=True)
class Called:
    """A block, with all that it allocates."""

    block: str


@dataclass(frozen=True)
class OnRanks:
    """Of the ranks of a mesh alone."""

    mesh: Mesh
    steps: Steps


Step = Begin | End | Joined | Called | OnRanks
Steps = tuple[Step, ...]


def live_ranges(program: ir.HostProgram, is_block: bool = False) -> Steps:
    """Every temporary's begin and, where another one begins after it, its end; of a block always, because another call may follow."""
    return _needed(_Walk(program).body(program.body, {}, None, is_nested=is_block), follows=is_block)


def allocating_blocks(program: ir.HostProgram) -> set[str]:
    """The blocks that allocate, or call such."""
    found: set[str] = set()
    for block in program.blocks:
        if any(isinstance(i, ir.Allocate) or (isinstance(i, ir.Call) and i.block in found) for i in ir.walk(block.body)):
            found.add(block.name)
    return found


@dataclass
class _Walk:
    program: ir.HostProgram
    counts: dict[str, int] = field(default_factory=dict)  # of the steps of loops, where known
    allocating: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.allocating = allocating_blocks(self.program)

    def body(self, body: ir.Body, outer: dict[str, Begin], block: ir.OnStream | None, is_nested: bool = True) -> Steps:
        known, own = dict(outer), dict[str, Begin]()
        steps = self.steps(body, known, own, block)
        return (*steps, *map(End, own.values())) if is_nested else steps

    def steps(self, body: ir.Body, known: dict[str, Begin], own: dict[str, Begin], block: ir.OnStream | None) -> Steps:
        """Of the instructions of a body; `own` is what has begun in it, and stays where that was on some of the ranks."""
        steps: list[Step] = []
        for i in body:
            match i:
                case ir.OnMesh():
                    steps.append(OnRanks(i.mesh, self.steps(i.body, known, own, block)))
                case ir.Allocate():
                    own[i.out] = known[i.out] = Begin(i, block, self.slots(block) if block else 1)
                    steps.append(known[i.out])
                case ir.Deallocate():
                    own.pop(i.src, None)
                    steps.append(End(known[i.src]))
                case ir.OnStream():
                    steps.extend(self.body(i.body, known, i))
                case ir.For():
                    if i.count.is_int:
                        self.counts[i.out] = int(i.count)
                    steps.extend(self.body(i.body, known, block))
                case ir.If():
                    steps.extend((*self.body(i.body, known, block), *self.body(i.orelse, known, block)))
                case ir.Join():
                    steps.append(Joined(i.stream))
                case ir.Call() if i.block in self.allocating:
                    steps.append(Called(i.block))
        return tuple(steps)

    def slots(self, block: ir.OnStream) -> int:
        """How many of its streams a block runs on, at most."""
        streams = next(pool.count for pool in self.program.streams if pool.name == block.stream)
        return min(streams, self.counts.get(block.index.name, streams)) if isinstance(block.index, Var) else streams


def _needed(steps: Steps, follows: bool, pools: frozenset[str] = frozenset()) -> Steps:
    """Without ends that nothing begins after, or that a join says again, and joins of streams that have nothing of their own."""
    pools |= {begin.block.stream for begin in begins(steps) if begin.block}
    joined: set[str] = set()  # before anything begins
    result: list[Step] = []
    for step in reversed(steps):
        match step:
            case Begin() | Called():
                follows = True
                joined.clear()
            case OnRanks(mesh, inner):
                if not (inner := _needed(inner, follows, pools)):
                    continue
                step = OnRanks(mesh, inner)
                if _begins_any(inner):
                    follows = True
                    joined.clear()
            case End(begin):
                if not follows or (begin.block and begin.block.stream in joined):
                    continue
            case Joined(stream):
                if not follows or stream not in pools:
                    continue
                joined.add(stream)
        result.append(step)
    return tuple(reversed(result))


def _begins_any(steps: Steps) -> bool:
    return any(isinstance(step, Begin | Called) or _begins_any(_inside(step)) for step in steps)


def _inside(step: Step) -> Steps:
    return step.steps if isinstance(step, OnRanks) else ()


def begins(steps: Steps) -> tuple[Begin, ...]:
    return tuple(begin for step in steps for begin in ((step,) if isinstance(step, Begin) else begins(_inside(step))))
