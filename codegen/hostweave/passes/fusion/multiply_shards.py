"""Turns a matmul into a loop over shards if its second matrix is gathered in chunks along the columns.

    %w_gathered: bf16[K, N] async peer = all_gather(%w, dim=1, axes=(x))
    %h: bf16[M@x, N] = matmul(%x, %w_gathered)
    %y: bf16[M@x, N] = add(%h, %r)
    choice %w_gathered of @layer predicted: put(2) 18.7 us, put(1) 33.2 us, none 91.2 us

becomes

    %w_gathered: bf16[K, N] async peer = all_gather(%w, dim=1, axes=(x))
    loop 2 chunks by_shard local_first of %w_gathered {
      %h: bf16[M@x, N] stream(N) = matmul(%x, %w_gathered)
      %y: bf16[M@x, N] stream(N) = add(%h, %r)
    }
    choice %w_gathered of @layer predicted: put(2) 18.7 us, put(1) 33.2 us, none 91.2 us

The first iteration reads the rank's own shard and need not wait. The other iterations read the buffer that receives the shards of peers.
The gather keeps its position, and overlaps with the ops before the loop.
"""

from collections.abc import Iterator
from dataclasses import replace

from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import ChunkLoop, Fusion, Op, Stream
from hostweave.fusion_ir.rewriting import consumers
from hostweave.host_ir import ir
from hostweave.options import Options
from hostweave.tune.overlaps import product_by_shards
from hostweave.types.size import Size

EPILOGUES = ("add", *ir.ACTIVATIONS)  # ops that can be the epilogue of a matmul, also in a chunk loop


def multiply_shards(fusion: Fusion, options: Options) -> Fusion:
    """Forms loops for gathers that `overlap_communication` splits into chunks."""
    done = {loop.gathered for loop in fusion.loop_of.values()}  # gathers that already have a loop, as in a parsed program
    chunks = {choice.value: choice.chosen.chunks for choice in fusion.choices if choice.value not in done}
    loops: dict[str, ChunkLoop] = {}  # matmul -> loop of the matmul and its epilogues
    for op in fusion.ops:
        if op.kind == "all_gather" and op.result.is_async and chunks.get(op.result.name, 0) > 1:
            product = product_by_shards(op, fusion)
            assert product
            columns = Stream(len(product.result.type.dims) - 1)
            members = (product, *_epilogues(product, fusion))
            ops = tuple(replace(each, result=replace(each.result, stream=columns)) for each in members)
            loops[product.result.name] = ChunkLoop(ops, Size(chunks[op.result.name]), False, "by_shard", "local_first", op.result.name)
    later = {op.result.name for loop in loops.values() for op in loop.ops[1:]}
    items = (item for item in fusion.body if isinstance(item, ChunkLoop) or item.result.name not in later)
    return replaced(fusion, body=tuple(item if isinstance(item, ChunkLoop) else loops.get(item.result.name, item) for item in items))


def _epilogues(product: Op, fusion: Fusion) -> Iterator[Op]:
    """Chain of ops that can be the epilogue of a matmul. Operands from outside of the chain exist before the matmul."""
    known = {value.name for value in fusion.inputs} | {op.result.name for op in fusion.ops[: fusion.ops.index(product)]}
    uses, last = consumers(fusion), product
    while len(users := uses[last.result.name]) == 1 and (user := users[0]):
        others = [name for name in user.tensors if name != last.result.name]
        if user.kind not in EPILOGUES or user.result.type != product.result.type or user.result.stream or not known.issuperset(others):
            return
        yield user
        last = user
