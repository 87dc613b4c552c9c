"""Host to host: consecutive independent communications on one channel are posted as one group, in one launch.

    all_reduce sum %a_partial -> %a on x
    launch @sum_b %y -> %b_partial
    all_reduce sum %b_partial -> %b on x

becomes

    launch @sum_b %y -> %b_partial
    group {
      all_reduce sum %a_partial -> %a on x
      all_reduce sum %b_partial -> %b on x
    }

On one stream what is computed between them costs as much before them, and what only lays out what has arrived as much behind them. What
is posted stays as it is.
"""

from dataclasses import replace

from hostweave.analysis.def_use import def_use
from hostweave.fusion_ir.ops import OPS
from hostweave.host_ir import ir, tree
from hostweave.options import Options


def group_communications(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    """Neighbours on one stream share a group where they are of one channel: in a group nothing orders those of two."""
    return replace(program, body=_Grouping(program).body(program.body))


class _Grouping:
    def __init__(self, program: ir.HostProgram):
        self.program = program
        self.uses = def_use(program)
        self.moving = {kernel.name for kernel in program.kernels if all(OPS[op.kind].makes for op in kernel.ops)}  # elements, and no more

    def body(self, body: tree.Body) -> tree.Body:
        result: list[tree.Instruction] = []
        posted: list[tree.Instruction] = []  # communications that are to share a group
        behind: list[tree.Instruction] = []  # what stands after them and could stand before
        laid: list[tree.Instruction] = []  # what lays out what they bring
        for instruction in body:
            if posted and self.can_pass(instruction, [*posted, *laid]):
                behind.append(instruction)
            elif posted and self.can_join(instruction, posted, laid):
                result += behind
                posted.append(instruction)
                behind = []
            elif posted and self.lays_out(instruction):
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

    def lays_out(self, instruction: tree.Instruction) -> bool:
        """Whether it only moves elements on this rank."""
        return instruction.work == "move" or not self.moving.isdisjoint(tree.names(instruction, "launch"))

    def can_join(self, instruction: tree.Instruction, posted: list[tree.Instruction], laid: list[tree.Instruction]) -> bool:
        members = [member for one in (*posted, instruction) for member in _posts(one)]
        return (
            bool(_posts(instruction))
            and len({member.channel for member in members}) == 1
            and sum(map(self.calls, members)) <= self.program.channel(members[0].channel).transport.posts_in_group
            and not self.uses.conflict([*posted, *laid], [instruction])
        )

    def calls(self, member: ir.Communication) -> int:
        """How many calls of its transport a communication makes at most."""
        if isinstance(member, ir.Routed):
            return len(member.routes)
        by_rank = isinstance(member, ir.Collective) and member.is_shared  # where ranks have different shares
        return (1 + member.grouped) * self.program.channel(member.channel).size if member.grouped or by_rank else 1


def _posts(instruction: tree.Instruction) -> tuple[ir.Communication, ...]:
    """The communications that an instruction posts, and that others can be posted with: not a barrier, which is about order."""
    members = instruction.body if isinstance(instruction, ir.Group) else (instruction,)
    posted = tuple(i for i in members if isinstance(i, ir.Communication) and not isinstance(i, ir.Barrier))
    return posted if len(posted) == len(members) else ()


def _group(posted: list[tree.Instruction]) -> tree.Body:
    if len(posted) < 2:
        return tuple(posted)
    return (ir.Group(tuple(member for one in posted for member in _posts(one)), location=posted[0].location),)
