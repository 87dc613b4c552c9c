"""Software pipelining: issues the first communication of an iteration before the later communications of the previous iteration.

    for %i in 0..4 {                                  for %j in 0..5 {
      stream ring[%i] {                                 if %j < 4 {
        all_gather %x_i -> %xg_i on dp                    stream ring[%j] { all_gather %x_j -> %xg_j on dp }
        matmul %xg_i, %w -> %h_i                        }
        all_reduce sum %h_i -> %y_i on tp    becomes    if %j > 0 {
      }                                                   %i = %j - 1
    }                                                     stream ring[%i] {
                                                            matmul %xg_i, %w -> %h_i
                                                            all_reduce sum %h_i -> %y_i on tp
                                                          }
                                                        }
                                                      }

Communications on different channels run in the order of issue (`serialize_channels`). In the new order, the all_gather of an iteration
overlaps with the computation of the previous iteration. The order on each stream, and of each kind of operation on a channel, does not
change.
"""

from collections import deque
from dataclasses import replace
from itertools import pairwise

from hostweave.base.errors import ProgramError
from hostweave.base.names import claim_unique
from hostweave.check.channel_order import unordered_instructions
from hostweave.check.happens_before import order, run
from hostweave.check.match_collectives import match_communications
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import sizes_to_check
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import names_in, renamed
from hostweave.host_ir.expr import Var, binary
from hostweave.options import Options

NAMES = ("view", "index")  # instructions with these roles may be duplicated


def software_pipeline(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    if not any(_on_streams(i, program) for i in tree.walk(program.body)) or not (in_turn := unordered_instructions(program)):
        return program
    ahead = _Ahead(program, in_turn)
    pipelined = replace(program, body=tree.rewrite(program.body, ahead.loop))
    return pipelined if ahead.changed and _terminates(pipelined) else program


def _on_streams(i: tree.Instruction, program: ir.HostProgram) -> tuple[ir.For, ir.OnStream] | None:
    """A loop and its stream block. None if consecutive iterations use one stream, if the trip count is symbolic or 1, or if the block
    follows anything but views and lets."""
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


_Halves = tuple[tree.Body, tree.Body]  # instructions that are issued one iteration ahead, and the rest


class _Ahead:
    def __init__(self, program: ir.HostProgram, in_turn: set[tree.Instruction]):
        self.program, self.in_turn = program, in_turn
        self.taken = names_in(program)
        self.changed = False

    def loop(self, i: tree.Instruction) -> ir.For | None:
        if not (found := _on_streams(i, self.program)):
            return None
        (loop, block), before = found, found[0].body[:-1]
        if any(i.orders or tree.names(i, "call") for i in tree.walk(loop.body)) or (halves := self.halves(block.body)) is None:
            return None
        self.changed = True
        index, count = self.index(loop.out), int(loop.count)
        first = (*before, replace(block, body=halves[0]))
        then = (ir.Let(loop.out, Var(index) - 1), *before, replace(block, body=halves[1]))
        steps = (
            ir.If(Var(index).less(count), self.copied_for(tree.eliminate_dead_code(first, NAMES), loop.out, index), location=loop.location),
            ir.If(binary(">", Var(index), 0), tree.eliminate_dead_code(then, NAMES), location=loop.location),
        )
        return replace(loop, out=index, count=loop.count + 1, body=steps)

    def halves(self, body: tree.Body) -> _Halves | None:
        ranks = [rank for i in body if i.ranks for rank in i.ranks.all_ranks]
        if not all(i.ranks or _only_names(i) for i in body) or len(set(ranks)) < len(ranks):
            return self.cut(body)
        cuts = [(i, self.cut(tree.bodies(i)[0]) if i.ranks else None) for i in body]
        parts = [tuple(_half(i, halves, part) for i, halves in cuts if halves or part or not i.ranks) for part in (0, 1)]
        return (parts[0], parts[1]) if any(halves for _, halves in cuts) else None

    def cut(self, body: tree.Body) -> _Halves | None:
        """Splits before the first computation between two communications. None if no split is possible."""
        places = [place for place, i in enumerate(body) if any(inner in self.in_turn for inner in tree.walk((i,)))]
        last = next((a for a, b in pairwise(places) if any(i.work == "compute" for i in tree.walk(body[a:b]))), None)
        if last is None or any(tree.names(i, "allocate", "free") for i in body):
            return None
        first, then = body[: last + 1], body[last + 1 :]
        if _posted(first) & _posted(then):
            return None
        return first, (*filter(_only_names, first), *then)

    def index(self, beside: str) -> str:
        return claim_unique(next((letter for letter in "ijkl" if letter not in self.taken), beside), self.taken)

    def copied_for(self, body: tree.Body, old: str, new: str) -> tree.Body:
        """Copies a body for another index, with new names."""
        names = {old: new}
        for i in tree.walk(body):
            for name in tree.names(i, "define", "index"):
                names[name] = claim_unique(f"{name.removesuffix(f'_{old}')}_{new}", self.taken)
        return renamed(body, names)


def _half(i: tree.Instruction, halves: _Halves | None, part: int) -> tree.Instruction:
    return tree.with_bodies(i, lambda _: halves[part]) if halves else i


def _only_names(i: tree.Instruction) -> bool:
    return not i.calls and bool(tree.names(i, *NAMES))


def _posted(body: tree.Body) -> set[tuple[str, str]]:
    """Pairs of a channel and a kind of communication. Communications of a pair match in the order of posting."""
    return {(i.channel, i.posts) for i in tree.walk(body) if isinstance(i, ir.Communication)}
