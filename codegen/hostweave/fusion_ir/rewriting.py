"""Helpers for passes over fusions."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from hostweave.base.errors import ProgramError
from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import AttributeValue, ChunkLoop, Fusion, Op, Value
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXIS, INDEX, START
from hostweave.fusion_ir.ops.definition import elementwise
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, TensorType


def eliminate_dead_code(ops: Sequence[Op], outputs: tuple[str, ...]) -> tuple[Op, ...]:
    needed = set(outputs)
    for op in reversed(ops):
        if op.result.name in needed:
            needed.update(op.tensors)
    return tuple(op for op in ops if op.result.name in needed)


def is_pointwise(op: Op) -> bool:
    """True for an elementwise op that kernels can compute. The result must be unsharded, not partial, not streamed, and on the
    program's mesh."""
    entry, type = OPS[op.kind], op.result.type
    is_plain = entry.map is elementwise and bool(entry.cpp) and entry.target in ("", "dtype")
    return is_plain and not (op.result.stream or type.axes or type.partial or type.mesh)


def consumers(fusion: Fusion) -> dict[str, list[Op | None]]:
    """Uses of each value: ops, and None for a use as a result."""
    result: dict[str, list[Op | None]] = {name: [] for name in fusion.values()}
    for op in fusion.ops:
        for name in op.tensors:
            result[name].append(op)
    for name in fusion.outputs:
        result[name].append(None)
    return result


def in_order(fusion: Fusion, ops: Sequence[Op]) -> Fusion:
    """Reorders the body to `ops`. A loop moves to the position of its first op."""
    firsts = {loop.ops[0].result.name for loop in fusion.loop_of.values()}
    kept = (op for op in ops if op.result.name in firsts or op.result.name not in fusion.loop_of)
    return replaced(fusion, body=tuple(fusion.loop_of.get(op.result.name, op) for op in kept))


def without_loops(fusion: Fusion, choices: Container[str] = ()) -> Fusion:
    """Replaces chunk loops by streams, from which `choose_overlap` forms loops again. Ops of a loop over a gathered value get no stream.
    Removes the `choices`, by name, with their loops and their async transfers."""

    def apart(body: Fusion) -> Fusion:
        loops, removed = body.loop_of, {choice.value for choice in body.choices if choice.name in choices}

        def streamed(op: Op) -> Op:
            if op.result.name in removed:
                op = replace(op, result=replace(op.result, is_async=False, transport=""))
            if (loop := loops.get(op.result.name)) is None:
                return op
            given, chunks = op.result.walked, None if loop.drops_dim else int(loop.trips)
            is_removed = loop.gathered or any(map(loop.makes, removed))
            return replace(
                op, result=replace(op.result, stream=None if is_removed else replace(given, chunks=chunks, chunking=loop.chunking))
            )

        kept = tuple(choice for choice in body.choices if choice.value not in removed)
        return replace(body, body=tuple(map(streamed, body.ops)), choices=kept)

    return map_functions(fusion, apart) if any(body.loop_of or body.choices for body in (*fusion.functions, fusion)) else fusion


def names_of_choices(fusion: Fusion) -> dict[str, str]:
    """Name of each recorded choice, and of its alternative."""
    return {choice.name: choice.chosen.name for body in (*fusion.functions, fusion) for choice in body.choices}


def views_of_inputs_first(fusion: Fusion) -> Fusion:
    """Moves views of inputs to the front, so that views do not separate ops of a loop."""
    known, first, rest = {value.name for value in fusion.inputs}, list[Op](), list[Op]()
    for op in fusion.ops:
        is_first = OPS[op.kind].is_view and known.issuperset(op.tensors)
        (first if is_first else rest).append(op)
        known |= {op.result.name} if is_first else set()
    return replace(fusion, body=(*first, *rest))


def map_functions(fusion: Fusion, apply: Callable[[Fusion], Fusion]) -> Fusion:
    """Applies `apply` to every function, callees first, then to the fusion. Callers get the rewritten callees."""
    done: dict[str, Fusion] = {}

    def linked(item: Op | ChunkLoop) -> Op | ChunkLoop:
        return replaced(item, callee=done[item.callee.name]) if isinstance(item, Op) and item.callee else item

    for body in (*fusion.functions, fusion):
        done[body.name] = result = apply(replaced(body, body=tuple(map(linked, body.body))))
    return result


def at_sizes(fusion: Fusion, sizes: Mapping[str, int], outputs: Sequence[TensorType]) -> Fusion:
    """Replaces symbolic sizes by ints. Results other than parameter groups get the shardings of `outputs`. Raises ProgramError if a
    quotient is not an int."""

    def known(type: TensorType) -> TensorType:
        dims = tuple(Dim(dim.size.at(sizes), dim.axes) for dim in type.dims)
        if broken := next((dim for dim in dims if not dim.size.factors and dim.size.divisor > 1), None):
            raise ProgramError(f"{type}: {broken.size} is not an int; choose sizes that are multiples of {broken.size.divisor}")
        return replace(type, dims=dims)

    def bound(body: Fusion) -> Fusion:
        inputs = tuple(replace(value, type=known(value.type)) for value in body.inputs)
        ops = tuple(replace(op, result=replace(op.result, type=known(op.result.type))) for op in body.ops)
        types = {value.name: value.type for value in (*inputs, *(op.result for op in ops))}
        return replace(body, inputs=inputs, body=tuple(replace(op, attributes=attributes_of(op, types)) for op in ops))

    def attributes_of(op: Op, types: Mapping[str, TensorType]) -> tuple[tuple[str, AttributeValue], ...]:
        """Replaces known sizes by ints, and negative indices by the equivalent indices from the start if the dim's size is an int."""
        made = {name: value.at(sizes) if isinstance(value, Size) else value for name, value in op.attributes}
        if first := {"select": INDEX, "slice": START}.get(op.kind):
            size = types[op.tensors[0]].shape[op[AXIS]]
            made[first.name] = op[first] + int(size) if op[first] < 0 and size.is_int else op[first]
        return tuple(made.items())

    made = map_functions(without_loops(fusion), bound)
    taken = set(made.values())
    groups = made.returned or (None,) * len(made.outputs)  # a reshard cannot read a parameter group
    returned = zip(made.outputs, outputs, groups, strict=True)
    results = {name: Value(claim_unique(name, taken), known(type), pinned=True) for name, type, group in returned if not group}
    ops = (Op("reshard", (name,), result) for name, result in results.items())
    return replace(made, body=(*made.ops, *ops), outputs=tuple(results[name].name if name in results else name for name in made.outputs))


def on_mesh(fusion: Fusion, mesh: Mesh) -> Fusion:
    """The traced program on another mesh with the same axes. Raises ProgramError if a tensor names ranks by number."""
    if on_ranks := [value for body in (*fusion.functions, fusion) for value in body.values().values() if value.type.mesh]:
        why = f"%{on_ranks[0].name} is on {on_ranks[0].type.mesh}, which names ranks by number"
        raise ProgramError(f"{fusion.name}: cannot be on {mesh}: {why}; write the program for {mesh}")
    return map_functions(without_loops(fusion, names_of_choices(fusion)), lambda body: replace(body, mesh=mesh))


# --- single-device reference of exported projects --------------------------------------------------------------------


def needs_ranks(fusion: Fusion) -> str:
    """Reason why one device cannot compute the fusion on global tensors, or ""."""
    if fusion.user_kernels:
        return f"@{fusion.user_kernels[0].name}, a kernel of the user, is written for the blocks of one rank"
    return next((f"each rank has a different term of {value.name}" for value in fusion.inputs if value.type.partial), "")


def on_one_device(fusion: Fusion) -> Fusion:
    """The same math on global tensors: copies in place of reshards, without shardings and loops."""

    def unsharded(value: Value) -> Value:
        dims = tuple(Dim(dim.size) for dim in value.type.dims)
        return Value(value.name, replace(value.type, dims=dims, partial=None, mesh=None), group=value.group)

    def alone(op: Op) -> Op:
        return replace(op, kind="copy" if op.kind == "reshard" else op.kind, result=unsharded(op.result))

    def body(given: Fusion) -> Fusion:
        return replace(given, mesh=Mesh(), inputs=tuple(map(unsharded, given.inputs)), body=tuple(map(alone, given.ops)))

    return map_functions(replace(fusion, name=f"{fusion.name}_reference"), body)
