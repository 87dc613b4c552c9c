"""Groups consecutive independent communications on one channel. A group is posted as one launch.

    all_reduce sum %a_partial -> %a on x
    launch @sum_b %y -> %b_partial
    all_reduce sum %b_partial -> %b on x

becomes

    launch @sum_b %y -> %b_partial
    group {
      all_reduce sum %a_partial -> %a on x
      all_reduce sum %b_partial -> %b on x
    }

Computation between the communications moves before the group. Instructions that only unpack received data move after the group. All these
instructions are on one stream, so the moves delay nothing.
"""

from hostweave.analysis.def_use import def_use
from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ops import OPS
from hostweave.host_ir import ir, tree
from hostweave.options import Options


def group_communications(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    """Groups only communications of one channel, because ranks may start the channels of a group in different orders."""
    return replaced(program, body=_Grouping(program).body(program.body))


class _Grouping:
    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.uses = def_use(program)
        # kernels that only move elements
        self.moving = {kernel.name for kernel in program.kernels if all(OPS[op.kind].makes for op in kernel.ops)}

    def body(self, body: tree.Body) -> tree.Body:
        result: list[tree.Instruction] = []
        posted: list[tree.Instruction] = []  # communications of the next group
        behind: list[tree.Instruction] = []  # instructions that follow a communication, and may move before the group
        laid: list[tree.Instruction] = []  # instructions that unpack received data, and move after the group
        for instruction in body:
            if posted and self.can_pass(instruction, [*posted, *laid]):
                behind.append(instruction)
            elif posted and self.can_join(instruction, posted, laid):
                result += behind
                posted.append(instruction)
                behind = []
            elif posted and (instruction.work == "move" or not self.moving.isdisjoint(tree.names(instruction, "launch"))):
                laid.append(instruction)
            else:
                result += [*_group(posted), *behind, *laid]
                posted, behind, laid = ([instruction], [], []) if _posts(instruction) else ([], [], [])
                if not posted:
                    result.append(tree.with_bodies(instruction, self.body))
        return (*result, *_group(posted), *behind, *laid)

    def can_pass(self, instruction: tree.Instruction, posted: list[tree.Instruction]) -> bool:
        if instruction.work:
            return not self.uses.conflict(posted, [instruction])
        return not instruction.calls

    def can_join(self, instruction: tree.Instruction, posted: list[tree.Instruction], laid: list[tree.Instruction]) -> bool:
        members = [member for one in (*posted, instruction) for member in _posts(one)]
        return (
            bool(_posts(instruction))
            and len({member.channel for member in members}) == 1
            and sum(map(self.calls, members)) <= self.program.channel(members[0].channel).transport.posts_in_group
            and not self.uses.conflict([*posted, *laid], [instruction])
        )

    def calls(self, member: ir.Communication) -> int:
        """Upper bound of the number of calls that a communication makes to its transport."""
        if isinstance(member, ir.Routed):
            return len(member.routes)
        by_rank = isinstance(member, ir.Collective) and member.is_shared  # Shards differ in size between ranks.
        return (1 + member.grouped) * self.program.channel(member.channel).size if member.grouped or by_rank else 1


def _posts(instruction: tree.Instruction) -> tuple[ir.Communication, ...]:
    """Communications that an instruction posts. Empty for a barrier, which orders other work and therefore cannot join a group."""
    members = instruction.body if isinstance(instruction, ir.Group) else (instruction,)
    posted = tuple(i for i in members if isinstance(i, ir.Communication) and not isinstance(i, ir.Barrier))
    return posted if len(posted) == len(members) else ()


def _group(posted: list[tree.Instruction]) -> tree.Body:
    if len(posted) < 2:
        return tuple(posted)
    return (ir.Group(tuple(member for one in posted for member in _posts(one)), location=posted[0].location),)
