"""Software pipelining: issues the first communications of an iteration before the later communications of the previous iteration.

    for %i in 0..4 {                                  stream loop[0] { all_gather %x_first -> %xg_first on dp }
      stream loop[%i] {                               for %i in 0..4 {
        all_gather %x_i -> %xg_i on dp                  if %i < 3 {
        matmul %xg_i, %w -> %h_i                          stream loop[%i + 1] { all_gather %x_next -> %xg_next on dp }
        all_reduce sum %h_i -> %y_i on tp    becomes    }
      }                                                 stream loop[%i] {
    }                                                     matmul %xg_i, %w -> %h_i
                                                          all_reduce sum %h_i -> %y_i on tp
                                                        }
                                                      }

Communications on different channels run in the order of issue (`serialize_channels`). In the new order, the all_gather of an iteration
overlaps with the computation of the previous iteration. On each stream, the order of operations
does not change. On each channel, the order of communications of one kind does not change.

First, a loop with separate work for disjoint ranks becomes one loop for each mesh.
"""

from collections import deque
from dataclasses import replace
from itertools import pairwise

from hostweave.base.errors import ProgramError
from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.check.channel_order import unordered_instructions
from hostweave.check.happens_before import order, run
from hostweave.check.match_collectives import match_communications
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import sizes_to_check
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import names_in, renamed
from hostweave.host_ir.expr import Const, Coordinate, Expr, Var, leaves
from hostweave.options import Options

NAMES = ("view", "index")  # instructions with these roles may be duplicated


def software_pipeline(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    program = replaced(program, body=tree.rewrite(program.body, _by_ranks))
    if not any(_on_streams(i, program) for i in tree.walk(program.body)) or not (in_turn := unordered_instructions(program)):
        return program
    pipelined = replaced(program, body=tree.rewrite(program.body, _Ahead(program, in_turn).loop))
    return pipelined if pipelined is program or _terminates(pipelined) else program


def _by_ranks(loop: tree.Instruction) -> tree.Body | None:
    """Splits a loop over a stream block with `on` bodies if no rank executes two of these bodies. Coordinates in an `on` body refer to the
    mesh of the body, so the rest of the loop may not use coordinates."""
    if loop.trips is None or not tree.names(block := tree.bodies(loop)[0][-1], "stream"):
        return None
    before, (body,) = tree.bodies(loop)[0][:-1], tree.bodies(block)
    on_bodies, others = [i for i in body if i.ranks], [*before, *(i for i in body if not i.ranks)]
    has_coordinates = any(isinstance(leaf, Coordinate) for i in others for expr in tree.expressions(i) for leaf in leaves(expr))
    if len(on_bodies) < 2 or has_coordinates or not all(map(_only_names, others)) or not tree.are_on_disjoint_ranks(on_bodies):
        return None

    def alone(on_body: tree.Instruction) -> tree.Instruction:
        own = tuple(inner for i in body if i is on_body or not i.ranks for inner in (tree.bodies(i)[0] if i is on_body else (i,)))
        needed = tree.eliminate_dead_code((*before, tree.with_bodies(block, lambda _: own)), NAMES)
        return tree.with_bodies(on_body, lambda _: (tree.with_bodies(loop, lambda _: needed),))

    return tuple(map(alone, on_bodies))


def _on_streams(i: tree.Instruction, program: ir.HostProgram) -> tuple[ir.For, ir.OnStream] | None:
    """A loop and its stream block. None unless the loop index selects one of several streams, the trip count is an int above 1, and only
    views and lets precede the block."""
    if not isinstance(i, ir.For) or not isinstance(block := i.body[-1], ir.OnStream) or not all(map(_only_names, i.body[:-1])):
        return None
    streams = next(pool.count for pool in program.streams if pool.name == block.stream)
    return (i, block) if streams > 1 and block.index == Var(i.out) and i.count.is_int and int(i.count) > 1 else None


def _terminates(program: ir.HostProgram) -> bool:
    """True if the program ends although each rank runs its communications one after another, as `serialize_channels` requires."""
    try:
        for instances in (instantiate(program, sizes) for sizes in sizes_to_check(program)):
            deque(run(order(instances, match_communications(instances))), maxlen=0)
    except ProgramError:
        return False
    return True


class _Ahead:
    def __init__(self, program: ir.HostProgram, in_turn: set[tree.Instruction]):
        self.program, self.in_turn = program, in_turn
        self.taken = names_in(program)

    def loop(self, i: tree.Instruction) -> tree.Body | None:
        if not (found := _on_streams(i, self.program)):
            return None
        (loop, block), before = found, found[0].body[:-1]
        if any(i.orders or tree.names(i, "call") for i in tree.walk(loop.body)) or (halves := self.halves(block.body)) is None:
            return None
        index, last = Var(loop.out), int(loop.count) - 1
        ahead, rest = (tree.eliminate_dead_code((*before, replace(block, body=half)), NAMES) for half in halves)
        following = ir.If(index.less(last), self.copied_for(ahead, loop.out, index + 1, "next"), location=loop.location)
        return (*self.copied_for(ahead, loop.out, Const(0), "first"), replace(loop, body=(following, *rest)))

    def halves(self, body: tree.Body) -> tuple[tree.Body, tree.Body] | None:
        """Splits before the first computation between two communications. None if no split is possible."""
        positions = [position for position, i in enumerate(body) if any(inner in self.in_turn for inner in tree.walk((i,)))]
        last = next((a for a, b in pairwise(positions) if any(i.work == "compute" for i in tree.walk(body[a:b]))), None)
        if last is None or any(tree.names(i, "allocate", "free") for i in body):
            return None
        first, then = body[: last + 1], body[last + 1 :]
        if _posted(first) & _posted(then):
            return None
        return first, (*filter(_only_names, first), *then)

    def copied_for(self, body: tree.Body, index: str, value: Expr, word: str) -> tree.Body:
        """Copies a body for one value of the loop index, with new names that end in `word`."""
        old = [name for i in tree.walk(body) for name in tree.names(i, "define", "index")]
        names = {name: claim_unique(f"{name.removesuffix(f'_{index}')}_{word}", self.taken) for name in old}
        return renamed(body, names, {index: value})


def _only_names(i: tree.Instruction) -> bool:
    return not i.calls and bool(tree.names(i, *NAMES))


def _posted(body: tree.Body) -> set[tuple[str, str]]:
    """Pairs of a channel and a kind of communication. Communications of a pair match in the order of posting."""
    return {(i.channel, i.posts) for i in tree.walk(body) if isinstance(i, ir.Communication)}
