"""Common subexpression elimination: computes equal ops once, including reshards.

    %a: f32[M@x, K] = multiply(%x, %s)
    %b: f32[M@x, K] = multiply(%x, %s)
    %y: f32[M@x, K] = add(%a, %b)

becomes

    %a: f32[M@x, K] = multiply(%x, %s)
    %y: f32[M@x, K] = add(%a, %a)
"""

from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.rewriting import consumers
from hostweave.options import Options


def share_equal_ops(fusion: Fusion, options: Options) -> Fusion:
    """Merges equal ops. Skips copies, user kernels, calls of functions with user kernels, ops in chunk loops, and ops with results that
    chunk loops read.

    A later equal op with a returned result becomes a copy, unless its kind is `output`. Ops without operands, such as iota, are merged only
    if all consumers are local slices. Otherwise each kernel recomputes the values of these ops.
    """
    uses = consumers(fusion)
    same: dict[str, str] = {}  # removed value -> value that replaces it
    known: dict[object, str] = {}
    ops: list[Op] = []
    for op in fusion.ops:
        name = op.result.name
        op = op.renamed(same)
        is_alone = op.result.stream or any(user and user.result.stream for user in uses[name])
        is_made_apart = not op.operands and any(not user or user.kind != "shard" for user in uses[name])
        if not is_made_apart and op.kind not in ("kernel", "copy") and not is_alone and not (op.callee and op.callee.user_kernels):
            key = op.kind, op.compared, op.result.type, op.callee and op.callee.name
            before = known.setdefault(key, name)
            if before != name and None not in uses[name]:
                same[name] = before
                continue
            if before != name and op.kind != "output":
                op = Op("copy", (before,), op.result, location=op.location)
        ops.append(op)
    return replaced(fusion, body=tuple(ops))
