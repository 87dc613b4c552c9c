"""Host to host: a matrix of which a peer sends half is multiplied half by half, the own one where it lies.

    stream comm[0] {                                        stream comm[0] {
      put %w -> %w_block at (rank.x + 1) % 2 ...              put %w -> %w_block at (rank.x + 1) % 2 ...
      record arrived[0]                                       record arrived[0]
    }                                                       }
    stream copies[0] {
      wait arrived[0]
      copy %w -> %w_block                          becomes  %x_own = chunk %x[1: rank.x of 2]
      record ready[0]                                       matmul %x_own, %w -> %y
    }                                                       wait arrived[0]
    wait ready[0]                                           %x_other = chunk %x[1: (rank.x + 1) % 2 of 2]
    matmul %x, %w_gathered -> %y                            %w_other = select %w_by_rank[0: (rank.x + 1) % 2]
                                                            matmul %x_other, %w_other accumulate %y -> %y

Nothing is copied, and the first half of the product need not wait. Of more ranks the own shard is a smaller part, and there would be more
products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.base.names import claim_unique
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Expr
from hostweave.options import Options
from hostweave.types.size import Size

HALVES = Size(2)


def multiply_shards(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    uses, edits = def_use(program), dict[int, tree.Body]()
    taken = {*uses.types, *uses.indices}
    for place in uses.places:
        if gathered := _gathered(uses, place):
            edits |= gathered.edits(taken)
    if not edits:
        return program
    body = tree.edited(program.body, edits)
    used = {name for i in tree.walk(body) for name in tree.names(i, "stream", "record")}
    streams = tuple(pool for pool in program.streams if pool.name in used)
    return replace(program, body=body, streams=streams, events=tuple(pool for pool in program.events if pool.name in used))


@dataclass(frozen=True)
class _Gathered:
    """A matrix of two halves: the copy of the own one, and what reads both."""

    copy: Place  # or the stream block that does nothing else
    shard: str  # what is copied
    by_rank: str  # the view with a half a rank
    own: Expr  # the number of the own one
    arrived: tree.Slot  # the event of the other one
    wait: Place  # for both
    products: list[ir.Matmul]
    places: list[Place]

    def edits(self, taken: set[str]) -> dict[int, tree.Body]:
        products = {place.number: tuple(self.halves(product, taken)) for place, product in zip(self.places, self.products, strict=True)}
        first = self.places[0].number
        *own, rest = products[first]
        arrived = ir.Wait(*self.arrived, location=self.wait.instruction.location)
        at = next(number for number, i in enumerate(own) if i.calls) + 1
        return products | {self.copy.number: (), self.wait.number: (), first: (*own[:at], arrived, *own[at:], rest)}

    def halves(self, product: ir.Matmul, taken: set[str]) -> Iterator[tree.Instruction]:
        other = (self.own + 1) % 2
        names = [claim_unique(name, taken) for name in (f"{product.a}_own", f"{product.a}_other", f"{self.shard}_other")]
        x_own, x_other, w_other = names
        yield ir.Chunk(x_own, product.a, 1, self.own, HALVES, location=product.location)
        yield replace(product, a=x_own, b=self.shard, bias=(), activation="")
        yield ir.Chunk(x_other, product.a, 1, other, HALVES, location=product.location)
        yield ir.Select(w_other, self.by_rank, 0, other, location=product.location)
        yield replace(product, a=x_other, b=w_other, accumulate=(product.dst,))


def _gathered(uses: DefUse, place: Place) -> _Gathered | None:
    """What a copy of the own half makes, if products on the caller's stream alone read it."""
    if not place.instruction.copies:
        return None
    (shard,), (block,) = tree.names(place.instruction, "read"), tree.names(place.instruction, "write")
    whole, view = uses.root(block), uses.views.get(block)
    chunk, (by_rank, *_) = (uses.chunk(view), tree.names(view.instruction, "alias")) if view else (None, ("",))
    is_half = chunk is not None and chunk[0] == 0 and chunk[2] == HALVES and uses.is_whole(by_rank)
    if chunk is None or not is_half or whole not in uses.allocates or len(uses.types[whole].shape) != 2:
        return None
    touches = [p for p in uses.touches[whole] if p is not place]
    sent = [p for p in touches if isinstance(p.instruction, ir.OneSided)]
    places = [p for p in touches if p not in sent]
    products = [p.instruction for p in places if isinstance(p.instruction, ir.Matmul) and not p.around]
    if not sent or len(products) != len(places) or not products or not all(_is_read(uses, product, whole) for product in products):
        return None
    own = place.block
    arrived, ready = _marked(sent[-1].block), _marked(own or sent[-1].block)
    waits = [p for p in uses.places if ready and tree.slot(p.instruction, "wait") == ready]
    if arrived is None or len(waits) != 1 or waits[0].around or waits[0].number > places[0].number:
        return None
    return _Gathered(own or place, shard, by_rank, chunk[1], arrived, waits[0], products, places)


def _is_read(uses: DefUse, product: ir.Matmul, whole: str) -> bool:
    """Whether a product of matrices is with all of it."""
    return len(uses.types[product.a].shape) == 2 and product.b == whole and uses.root(product.a) != whole


def _marked(block: Place | None) -> tree.Slot | None:
    """The event of the end of a stream block."""
    body = tree.bodies(block.instruction)[0] if block else ()
    return tree.slot(body[-1], "record") if body else None
