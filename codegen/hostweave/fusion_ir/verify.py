"""Verifies fusions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hostweave.base.errors import Location, ProgramError
from hostweave.base.unchanged import fact
from hostweave.fusion_ir.ir import CHUNKINGS, MAX_TRIPS, ROTATIONS, ChunkLoop, Fusion, MeshAxes, Op
from hostweave.fusion_ir.ops import OPS, RESHARDS, infer_type, operand_types
from hostweave.fusion_ir.ops.attributes import AXIS, EACH, INDEX, LAGGED, SOURCES, VALUE
from hostweave.fusion_ir.ops.calls import is_gathered_by_call, is_repeat
from hostweave.fusion_ir.ops.definition import Mismatch
from hostweave.fusion_ir.resharding import plan, step_of
from hostweave.fusion_ir.rewriting import consumers
from hostweave.fusion_ir.sharding import flow, layout, partial_of, with_layout
from hostweave.types.blocks import Transfer
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, TensorType
from hostweave.types.zigzag import Zigzag, inverse, order_of_pieces

# Levels of strictness. "input" is for traced fusions. A further level is the name of a pass, and adds rules that hold after this pass.
LEVELS = ("input", "insert_reshards", "decompose_reshards", "choose_overlap")

# Example values of required attributes by type, for error messages.
EXAMPLES = {tuple: "(0,)", int: "0", float: "0.5", str: "sum", MeshAxes: "(x)", Transfer: "[(1,) to (1,): 0[0] -> 1[0]]"}


def verify_fusion(fusion: Fusion, after: str = "input") -> None:
    """Verifies a fusion and its functions, at one of LEVELS. Raises ProgramError for the first violation."""
    level = LEVELS.index(after)
    for function in fusion.functions:
        _verify_body(function, f"function @{function.name}", level)
        _verify_function(function, fusion)
    _verify_body(fusion, f"fusion @{fusion.name}", level)


def _verify_body(fusion: Fusion, here: str, level: int) -> None:
    types: dict[str, TensorType] = {}
    for value in fusion.inputs:
        _define(value.name, value.type, types, None)
        value.type.check(None, fusion.mesh)
        if value.stream:
            raise ProgramError(f"{here}: input %{value.name} is streamed; stream a copy of it")
        if value.type.partial:
            raise ProgramError(f"{here}: input %{value.name} is partial; pass its terms along a sharded dim, and sum over this dim")
    known = {name for value in fusion.inputs for size in value.type.shape for name in size.symbols} | fusion.depths.keys()
    for op in fusion.ops:
        in_loop = op.result.name in fusion.loop_of
        _once(_verify_sharded, op, types, fusion.mesh, known, in_loop, level >= LEVELS.index("insert_reshards"))
        if op.kind == "reshard" and level >= LEVELS.index("decompose_reshards"):
            steps = [step.kind for step in plan(types[op.tensors[0]], op.result.type, fusion.mesh, {}, op.location)]
            raise ProgramError(f"reshard: its steps are missing; write {' and '.join(steps) or 'copy'} instead", op.location)
        if op.result.stream and not in_loop and level >= LEVELS.index("choose_overlap"):
            raise ProgramError(f"stream of %{op.result.name}: it is in no loop; put its op into a loop", op.location)
    _verify_loops(fusion)
    _verify_groups(fusion)
    _verify_further_results(fusion)
    _verify_outputs(fusion, here, types, level)


def _once(verify: Callable[..., None], op: Op, types: dict[str, TensorType], *context: object) -> None:
    """Verifies an op, unless the op has passed with equal operand types and context. Always defines the op's result."""
    fact(op, verify, ([types.get(name) for name in op.tensors], context), verify, op, types, *context)
    _define(op.result.name, op.result.type, types, op.location)


def _verify_sharded(op: Op, types: dict[str, TensorType], mesh: Mesh, known: set[str], in_loop: bool, is_sharded: bool) -> None:
    _verify_op(op, types)
    op.result.type.check(op.location, mesh)
    for type in (*op.user_kernel.inputs, *op.user_kernel.outputs) if op.user_kernel else ():
        type.check(op.location, op.result.type.mesh_in(mesh))
    for name in (name for size in op.result.type.shape for name in size.symbols if name not in known):
        why = f"no input has a dim {name}, which %{op.result.name} has, so its size is unknown"
        raise ProgramError(f"{op.kind}: {why}; add it to an input, or write an int", op.location)
    _verify_stream(op, in_loop)
    if is_sharded:
        _verify_sharding(op, types, mesh)


def _verify_groups(body: Fusion) -> None:
    groups = {value.name: value.group for value in body.inputs if value.group}
    for name, group in (*groups.items(), *zip(body.outputs, body.returned, strict=bool(body.returned))):
        depth = body.types[name].dims[:1]
        if group and (not depth or depth[0].axes or not depth[0].size.name or body.depths.get(depth[0].size.name) != len(group.names)):
            raise ProgramError(
                f"%{name}: a parameter group of {len(group.names)} tensors needs an unsharded symbolic size as its first dim, such as L, "
                "and no group with another number of tensors may have this size"
            )
        if group and (maker := body.made.get(name)) and maker.callee is None:
            why = f"only a repeat returns a parameter group; return a {maker.kind} as one tensor"
            raise ProgramError(f"%{name}: {why}", maker.location)
    users = consumers(body) if groups else {}
    for op in body.ops if groups else ():
        for at, operand in enumerate(op.operands):
            reads_one = (is_repeat(op) and at in (*op[EACH], *op[LAGGED])) or (op.kind == "select" and op[AXIS] == 0)
            reads_one = reads_one or is_gathered_by_call(op, users[op.result.name])
            if operand in groups and not reads_one:
                why = "is a parameter group, whose tensors are separate; repeat over it, or select one"
                raise ProgramError(f"{op.kind}: %{operand} {why}", op.location)


def _verify_function(function: Fusion, fusion: Fusion) -> None:
    if function.mesh != fusion.mesh:
        raise ProgramError(f"function @{function.name} is on {function.mesh}, but fusion @{fusion.name} on {fusion.mesh}; use one mesh")
    for op in fusion.all_ops:
        if op.callee and op.callee.name == function.name and op.callee != function:
            raise ProgramError(f"call: two functions are named @{function.name}; give one of them another name", op.location)


def verify_ops(inputs: Iterable[tuple[str, TensorType]], ops: Sequence[Op]) -> None:
    """Verifies the ops of a kernel on local tensors."""
    types: dict[str, TensorType] = {}
    for name, type in inputs:
        _define(name, type, types, None)
    for op in ops:
        _once(_verify_op, op, types)


def _define(name: str, type: TensorType, types: dict[str, TensorType], location: Location | None) -> None:
    if name in types:
        raise ProgramError(f"%{name} is defined twice; give one of them another name", location)
    types[name] = type


def _verify_op(op: Op, types: dict[str, TensorType]) -> None:
    if op.kind not in OPS:
        raise ProgramError(f"unknown op {op.kind!r}; use one of {', '.join(OPS)}", op.location)
    definition = OPS[op.kind]
    if op.callee and op.kind not in ("call", "repeat", "output"):
        raise ProgramError(f"{op.kind}: only calls, repeats and their outputs name a function; remove @{op.callee.name}", op.location)
    if op.user_kernel and op.kind != "kernel":
        raise ProgramError(f"{op.kind}: only a kernel names a user kernel; remove @{op.user_kernel.name}", op.location)
    if (op.kind in ("call", "repeat") and not op.callee) or (op.kind == "kernel" and not op.user_kernel):
        raise ProgramError(f"{op.kind}: no {'user kernel' if op.kind == 'kernel' else 'function'} is named; name one", op.location)
    if len(op.operands) != definition.arity and (definition.arity is not None or not op.operands):
        wanted = "one or more" if definition.arity is None else definition.arity
        raise ProgramError(f"{op.kind}: takes {wanted} operands, not {len(op.operands)}", op.location)
    for name, value in op.attributes:
        if not any(a.name == name and (type(value) is a.type or (a is VALUE and type(value) is int)) for a in definition.attributes):
            known = ", ".join(f"{attribute.name} ({attribute.type.__name__})" for attribute in definition.attributes) or "none"
            raise ProgramError(f"{op.kind}: there is no attribute {name}={value}; its attributes: {known}", op.location)
    for attribute in definition.attributes:
        if attribute.default is None and attribute.name not in dict(op.attributes):
            example = f"{attribute.name}={EXAMPLES[attribute.type]}"
            raise ProgramError(f"{op.kind}: attribute {attribute.name} is missing; write {example}", op.location)
    for operand in op.tensors:
        if operand not in types:
            raise ProgramError(f"{op.kind}: %{operand} is used before it is defined; define it above", op.location)
    derived, stated = infer_type(op, operand_types(op, types)), op.result.type
    if (derived.dtype, derived.shape, derived.mesh) != (stated.dtype, stated.shape, stated.mesh):
        raise ProgramError(f"{op.kind}: %{op.result.name} is {stated}, but its operands give {derived}; correct its type", op.location)


def _verify_further_results(body: Fusion) -> None:
    made = {op.result.name: op.user_kernel for op in body.ops}
    calls = {op.result.name: op.callee for op in body.ops if op.kind in ("call", "repeat")}
    taken = [(op.tensors[0], op[INDEX]) for op in body.ops if op.kind == "output"]
    for op in (op for op in body.ops if op.kind == "output"):
        source, index = made.get(op.tensors[0]), op[INDEX]
        if taken.count((op.tensors[0], index)) > 1:
            raise ProgramError(f"output: output {index} of %{op.tensors[0]} is named twice; use the first name", op.location)
        if op.callee and calls.get(op.tensors[0]) != op.callee:
            raise ProgramError(f"output: %{op.tensors[0]} is not a call of @{op.callee.name}; correct it", op.location)
        if not op.callee:
            wanted = dict(enumerate(source.outputs)).get(index) if source and index else None
            if wanted != replace(op.result.type, mesh=None):  # outputs are on the mesh of the operands
                raise ProgramError(f"output: %{op.tensors[0]} has no output {index} of {op.result.type}; correct it", op.location)


def _verify_stream(op: Op, in_loop: bool) -> None:
    stream, here = op.result.stream, f"stream of %{op.result.name}"
    if in_loop and (stream is None or stream.chunks is not None or stream.chunking):
        raise ProgramError(f"{here}: the loop states the chunks, and the op only its dim and its algorithm; write stream(0)", op.location)
    if stream is None:
        return
    if not 0 <= stream.dim < len(op.result.type.dims):
        raise ProgramError(f"{here}: {op.result.type} has no dim {stream.dim}", op.location)
    if stream.chunking is not None and stream.chunking not in CHUNKINGS:
        raise ProgramError(f"{here}: {stream.chunking!r} is not one of {', '.join(CHUNKINGS)}", op.location)
    if op.callee:
        raise ProgramError(f"{here}: it is made by the function @{op.callee.name}; stream a tensor in the function", op.location)
    if stream.chunks is not None and stream.chunks < 1:
        raise ProgramError(f"{here}: chunks={stream.chunks} is not at least 1", op.location)
    if why := "" if in_loop else stream.too_many(op.result.type.shape[stream.dim]):
        raise ProgramError(f"{here}: {why}", op.location)
    if in_loop and stream.algorithm and op.kind not in RESHARDS:
        why = f"it has the algorithm {stream.algorithm}, but a {op.kind} does not communicate"
        raise ProgramError(f"{here}: {why}; stream the reshard", op.location)


def _verify_loops(fusion: Fusion) -> None:
    for loop in (item for item in fusion.body if isinstance(item, ChunkLoop)):
        if why := _wrong_loop(loop, fusion) or (_wrong_gather(loop, fusion) if loop.gathered else ""):
            raise ProgramError(f"loop of %{loop.ops[0].result.name}: {why}", loop.ops[0].location)


def _wrong_loop(loop: ChunkLoop, fusion: Fusion) -> str:
    first, values = loop.ops[0], fusion.values()
    dim, types = first.result.walked.dim, [first.result.type, *(values[name].type for name in first.tensors if first.kind in RESHARDS)]
    size, shards = types[0].shape[dim], max(type.mesh_in(fusion.mesh).size_of(type.dims[dim].axes) for type in types)
    for value, known in ((loop.chunking, CHUNKINGS), (loop.rotation, (None, *ROTATIONS))):
        if value not in known:
            return f"{value!r} is not one of {', '.join(filter(None, known))}"
    if loop.trips.is_int and not 1 <= int(loop.trips) <= MAX_TRIPS:
        return f"it has {loop.trips} iterations; use 1 to {MAX_TRIPS}"
    if loop.drops_dim:
        wanted = size if loop.chunking == "by_shard" else size // shards
        return "" if loop.trips == wanted else f"it has {loop.trips} iterations for {wanted} indices; write {wanted} indices"
    return "" if loop.trips.is_int else f"its number of chunks, {loop.trips}, is not an int; write an int"


def _wrong_gather(loop: ChunkLoop, fusion: Fusion) -> str:
    made = {item.result.name: item for item in fusion.body if isinstance(item, Op)}
    gather = made.get(loop.gathered)
    if gather is None or gather.kind != "all_gather" or not gather.result.is_async or not OPS[loop.ops[0].kind].is_plain_product:
        return f"%{loop.gathered} is not an async all_gather whose shards a matmul reads"
    ranks = fusion.mesh.size_of(step_of(gather).axes)
    return "" if loop.trips == Size(ranks) else f"it has {loop.trips} iterations; write one per shard, {ranks}"


def _verify_sharding(op: Op, types: dict[str, TensorType], mesh: Mesh) -> None:
    operands = operand_types(op, types)
    if op.kind in RESHARDS:
        _verify_reshard(op, operands[0], mesh)
        return
    if op.kind == "renumber":
        _verify_renumber(op, operands[0], mesh)
    passed = flow(op, operands, mesh)
    derived = with_layout(op.result.type, passed.result, partial_of(op, operands, passed))
    if derived != op.result.type:
        raise ProgramError(f"{op.kind}: %{op.result.name} is {op.result.type}, but its operands give {derived}; reshard them", op.location)
    for name, type, needed in zip(op.operands, operands, passed.operands(passed.result), strict=True):
        if layout(type) != needed:
            raise ProgramError(f"{op.kind}: %{name} is {type}, but {with_layout(type, needed)} is needed; reshard it", op.location)


def _verify_renumber(op: Op, source: TensorType, mesh: Mesh) -> None:
    have, want = (type.dims[op[AXIS]].axes for type in (source, op.result.type))
    order = order_of_pieces(source.mesh_in(mesh).size_of(have))
    order = order if isinstance(have, Zigzag) else inverse(order)
    if isinstance(have, Zigzag) == isinstance(want, Zigzag) or op[SOURCES] != order:
        why = f"sources={op[SOURCES]} do not convert {source} to {op.result.type}"
        raise ProgramError(f"renumber: {why}; a change to or from zigzag needs {order}", op.location)


def _verify_reshard(op: Op, source: TensorType, mesh: Mesh) -> None:
    if op.kind == "reshard":
        plan(source, op.result.type, mesh, {}, op.location)
        return
    try:
        derived = step_of(op).applied(source, mesh)
    except Mismatch as mismatch:
        raise ProgramError(f"{op.kind}: {mismatch}", op.location) from None
    if derived != op.result.type:
        why = f"%{op.result.name} is {op.result.type}, but the {op.kind} of {source} is {derived}"
        raise ProgramError(f"{op.kind}: {why}; correct the type of %{op.result.name}", op.location)


def _verify_outputs(fusion: Fusion, here: str, types: dict[str, TensorType], level: int) -> None:
    made = {op.result.name for op in fusion.ops}
    if not fusion.outputs:
        raise ProgramError(f"{here} returns nothing; return at least one tensor")
    for name in fusion.outputs:
        if name not in made:
            raise ProgramError(f"{here}: %{name} is returned, but no op makes it; return a copy of it")
        if types[name].partial:
            raise ProgramError(f"{here}: %{name} is {types[name]}; a partial tensor cannot be returned; reshard it first")
    if len(set(fusion.outputs)) != len(fusion.outputs):
        raise ProgramError(f"{here} returns one tensor twice; return a copy of it")
    _verify_donated(fusion, here, types, level)


def _verify_donated(fusion: Fusion, here: str, types: dict[str, TensorType], level: int) -> None:
    inputs = [value.name for value in fusion.inputs]
    for name, into in zip(fusion.outputs, fusion.donated, strict=True) if fusion.donated else ():
        if into and into not in inputs:
            raise ProgramError(f"{here}: %{name} is returned in %{into}, which is not an input; return it in one of {', '.join(inputs)}")
        if fusion.donated.count(into) > 1 and into:
            raise ProgramError(f"{here}: two results are returned in %{into}; donate an input for each")
        given, wanted = types[name], types[into] if into else types[name]
        if level < LEVELS.index("insert_reshards"):  # before this level, shardings are not final
            given, wanted = (replace(type, dims=tuple(map(Dim, type.shape))) for type in (given, wanted))
        if not given.fills(wanted):
            why = f"the result %{name} is {given}, but the donated input %{into} is {wanted}"
            raise ProgramError(f"{here}: {why}; give both the same dtype, mesh and dims, in any order")
