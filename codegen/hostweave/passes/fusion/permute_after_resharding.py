"""Moves a reshard before the permutation that computes the reshard's operand. Shards are then sent without a transpose.

    %t: f32[K, M@x] = permute_dims(%x, axes=(1, 0))
    %t_gathered: f32[K, M] = reshard(%t)
    %g: f32[K, N@x] = matmul(%t_gathered, %dh)

becomes

    %t: f32[K, M@x] = permute_dims(%x, axes=(1, 0))
    %x_gathered: f32[M, K] = reshard(%x)
    %t_gathered: f32[K, M] = permute_dims(%x_gathered, axes=(1, 0))
    %g: f32[K, N@x] = matmul(%t_gathered, %dh)

Reuses an equal earlier reshard if there is one. Does not move slices, nor reshards that a chunk loop does or could do block by block.
"""

from dataclasses import replace

from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.key_blocks import attended_alone
from hostweave.fusion_ir.ops import RESHARDS
from hostweave.fusion_ir.ops.attributes import ORDER
from hostweave.fusion_ir.rewriting import consumers
from hostweave.options import Options
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType
from hostweave.types.zigzag import Zigzag


def permute_after_resharding(fusion: Fusion, options: Options) -> Fusion:
    taken, uses = set(fusion.values()), consumers(fusion)
    keys = {name for op, _ in attended_alone(fusion) for name in op.tensors[1:3]}
    permuted: dict[str, Op] = {}
    known: dict[tuple[str, TensorType], str] = {}  # (operand, result type) -> the reshard
    ops: list[Op] = []

    def emit(op: Op) -> None:
        ops.append(op)
        if op.kind == "permute_dims" and not op.result.stream:
            permuted[op.result.name] = op
        elif op.kind in RESHARDS and not op.result.stream:
            known.setdefault((op.tensors[0], op.result.type), op.result.name)

    for op in fusion.ops:
        turn, name = permuted.get(op.tensors[0]) if op.kind in RESHARDS else None, op.result.name
        is_in_loop = op.result.stream or any(user and user.result.stream for user in uses[name])
        if turn is None or is_in_loop or _is_in_blocks(turn.result.type, op.result.type, name in keys):
            emit(op)
            continue
        (source,), order = turn.tensors, turn[ORDER]
        dims = tuple(op.result.type.dims[order.index(dim)] for dim in range(len(order)))
        type = replace(op.result.type, dims=dims)
        if (source, type) not in known:
            end = name.removeprefix(turn.result.name) if name.startswith(turn.result.name) else "_resharded"
            emit(replace(op, operands=(source,), result=Value(claim_unique(f"{source}{end}", taken), type)))
        emit(replace(turn, operands=(known[source, type],), result=op.result, location=op.location))
    return replaced(fusion, body=tuple(ops))


def _is_in_blocks(have: TensorType, want: TensorType, is_of_keys: bool) -> bool:
    """True if a reshard is a slice, or if a chunk loop could do the reshard block by block."""
    if have.partial or have.mesh != want.mesh:
        return False
    axes = [(old.axes, new.axes) for old, new in zip(have.dims, want.dims, strict=True)]
    gathered = [i for i, (old, new) in enumerate(axes) if old != new[: len(old)]]
    in_zigzag = any(isinstance(axes[i][0], Zigzag) for i in gathered)
    is_outermost = any(all(size == Size() for size in have.shape[:i]) for i in gathered)
    return not gathered or (not in_zigzag and (is_of_keys or is_outermost))
