"""Replaces selects from a stack by the selected values, except selects that are returned, that change the sharding, or that are in chunk
loops. Removes the stack if no op reads it any more.

    %a_1: f32[1, M] = expand_dims(%a, axis=(0,))
    %b_1: f32[1, M] = expand_dims(%b, axis=(0,))
    %s: f32[2, M] = concat(%a_1, %b_1, axis=0)
    %c: f32[M] = select(%s, axis=0, index=1)
    %y: f32[M] = exp(%c)

becomes

    %y: f32[M] = exp(%b)
"""

from collections.abc import Mapping
from dataclasses import replace

from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops.attributes import AXES, AXIS, INDEX
from hostweave.fusion_ir.rewriting import eliminate_dead_code
from hostweave.options import Options


def unstack(fusion: Fusion, options: Options) -> Fusion:
    same: dict[str, str] = {}
    ops: list[Op] = []
    for op in fusion.ops:
        op = op.renamed(same)
        source = _stacked(op, fusion.made)
        is_itself = source is not None and fusion.types[source] == op.result.type and not op.result.stream
        if source is not None and is_itself and op.result.name not in fusion.outputs:
            same[op.result.name] = same.get(source, source)
        else:
            ops.append(op)
    return replace(fusion, body=eliminate_dead_code(ops, fusion.outputs)) if same else fusion


def _stacked(op: Op, made: Mapping[str, Op]) -> str | None:
    """Value that a select takes from a stack. None if `op` is not such a select."""
    stack = made.get(op.tensors[0]) if op.kind == "select" else None
    if stack is None or stack.kind != "concat" or stack[AXIS] != op[AXIS] or stack.result.stream:
        return None
    made_of = [made.get(name) for name in stack.tensors]
    if not all(each and each.kind == "expand_dims" and each[AXES] == (op[AXIS],) and not each.result.stream for each in made_of):
        return None
    each = made_of[op[INDEX]]
    return each.tensors[0] if each else None
