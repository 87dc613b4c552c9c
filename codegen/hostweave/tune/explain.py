"""Text of `Program.explain`: how communication, attention and some matmuls are executed, with alternatives and reasons."""

from collections.abc import Iterator, Mapping, Sequence, Set

from hostweave.analysis.def_use import def_use
from hostweave.communication.algorithms import transport_of
from hostweave.fusion_ir.choice import IN_SEQUENCE, Alternative, Choice
from hostweave.fusion_ir.ir import ChunkLoop, Fusion, Op
from hostweave.fusion_ir.ops import OPS, communicates
from hostweave.fusion_ir.ops.attention import is_by_kernels, why_composed
from hostweave.fusion_ir.ops.attributes import COMPOSED, KEY_BLOCKS, MESH_AXES
from hostweave.fusion_ir.ops.calls import is_gathered_by_call
from hostweave.fusion_ir.ops.scaled import MULTIPLE, WHY_DTYPES, WHY_MACHINE, is_composed, scaling
from hostweave.fusion_ir.rewriting import consumers
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.options import Options
from hostweave.transports.transport import DEFAULT, SIGNALS
from hostweave.tune.cost import most_in_kernel, seconds
from hostweave.tune.overlaps import HIDDEN_SECONDS, Candidate, candidates, hidden_beside, min_gain
from hostweave.types.tensor import TensorType, f32


def explained(fusion: Fusion, host: ir.HostProgram, options: Options) -> str:
    """A line for each communication, each attention, and each split or composed matmul. `fusion` is the last stage before the host IR
    `host`."""
    lines = [f"{fusion.name} on {fusion.mesh}", *(f"  {line}" for line in _basis(options))]
    in_kernels = {kernel.exchanges.result.name for kernel in host.kernels if kernel.exchanges}
    programs = {each.name: each for each in bodies(host)}
    for body in (*fusion.functions, fusion):
        chosen = {choice.value: choice for choice in host.choices if choice.function == body.name}
        lines_of_body = [f"  {line}" for line in (*_lines(body, chosen, options, in_kernels), *_split(programs[body.name]))]
        lines += [f"@{body.name}", *lines_of_body] if lines_of_body else []
    return "\n".join(lines) + "\n"


def _basis(options: Options) -> Iterator[str]:
    sizes = ", ".join(f"{name}={size}" for name, size in sorted(options.sizes.items()))
    other = f"; there are no figures of {options.figures.stands_for}: run hostweave calibrate" if options.figures.stands_for else ""
    yield f"times predicted from the figures of {options.figures.name}, at {sizes or 'no stated sizes'}{other}"
    faster = options.transport_carrying(SIGNALS)
    if faster is None:
        yield f'only two-sided transport, because of transport="{DEFAULT}"'
    elif why := faster.why_not(options.figures):
        yield f"only two-sided transport: {why}"
    else:
        yield f"transport {faster.name} where it is faster"


def _lines(body: Fusion, chosen: Mapping[str, Choice], options: Options, in_kernels: Set[str]) -> Iterator[str]:
    found = list(candidates(body, options.sizes))
    possible = {candidate.reshard.result.name: candidate for candidate in found}
    with_keys = {candidate.keys.values.result.name: candidate.reshard.result.name for candidate in found if candidate.keys}
    types, times, users = body.types, seconds(body, options.sizes, options.figures, options.tf32), consumers(body)
    for choice in chosen.values():
        if choice.value not in types:
            yield f"%{choice.value}, the gather of keys in zigzag order, and the gather of their values: in sequence{times_of(choice)}"
    for position, op in enumerate(body.ops):
        name = op.result.name
        if name in with_keys:
            yield f"%{name} = all_gather of %{op.tensors[0]}: like %{with_keys[name]}, with which it would share a loop"
        elif is_gathered_by_call(op, users[name]):
            yield f"%{name} = all_gather of %{op.tensors[0]}: each call gathers the tensor of the next call{_by(chosen.get(name), options)}"
        elif communicates(op) and not op.callee:
            how = _how(op, body.loop_of.get(name), chosen.get(name), possible.get(name), options, _hidden(body, position, times))
            if name in in_kernels:
                most = most_in_kernel(options.figures, op.kind, body.mesh.size_of(op[MESH_AXES].names))
                how = f"up to {most} bytes by an exchange in the consuming kernel; above that, {how}"
            yield f"%{name} = {op.kind} of %{op.tensors[0]}: {how}"
        elif op.kind == "attention":
            joined = "; each rank attends to its own keys, and the results are combined by log-sum-exps" if op[KEY_BLOCKS] else ""
            if op.result.stream:
                joined = f"; the keys of {op[KEY_BLOCKS]} ranks are used as they arrive, and the results are combined by log-sum-exps"
            is_own = is_by_kernels(op, *(types[name] for name in op.tensors[:3]))
            by = f"a kernel of this package{', without tensor cores' * (types[name].dtype == f32)}" if is_own else "one call of the library"
            yield f"%{name} = attention: {by}, which does not store the matrix of scores{joined}"
        elif is_composed(op):
            yield f"%{name} = scaled_matmul: composed of casts, a matmul and multiplications, because {_why_composed(op, types, options)}"
        elif _makes_scores(op, body.ops[position + 1 :], types):
            why = why_composed(types[op.tensors[0]], types[op.tensors[0]]) or "it has dropout, or a mask of another dtype"
            yield f"%{name} = matmul: attention is composed of matmuls and a softmax, because {why}"


def _by(choice: Choice | None, options: Options) -> str:
    """The transport of a gather for the next call, and the predicted times."""
    if choice is None:
        return ""
    by = f" by {choice.chosen.algorithm}, {transport_of(choice.chosen, options).name}" if choice.chosen.chunks else ""
    return f"{by}{times_of(choice)}"


def _makes_scores(op: Op, later: Sequence[Op], types: Mapping[str, TensorType]) -> bool:
    """True for the first matmul of composed attention: a second matmul multiplies the softmax of its result."""
    made, weights = {op.result.name}, set[str]()  # values computed from the result, and those that depend on its powers
    if not OPS[op.kind].is_plain_product or len(types[op.tensors[1]].dims) < 3:
        return False
    for other in later:
        if OPS[other.kind].is_product:
            if other.tensors[0] in weights:
                return True
        elif not made.isdisjoint(other.tensors):
            made.add(other.result.name)
            if other.kind == "exp" or not weights.isdisjoint(other.tensors):
                weights.add(other.result.name)
    return False


def _split(program: ir.HostProgram) -> Iterator[str]:
    uses = def_use(program)
    for i in tree.walk(program.body):
        if rest_sizes := getattr(i, "rest", ()):
            (a, b, *_), (name,) = tree.names(i, "read"), tree.names(i, "write")
            (rows, terms), columns = uses.types[a].shape[-2:], uses.types[b].shape[-1]
            for _ in filter(None, rest_sizes[1:]):  # Each split dim of the result adds a slice.
                (name,) = tree.names(uses.views[name].instruction, "alias")
            words = zip((terms, rows, columns), rest_sizes, ("terms", "rows", "columns"), strict=True)
            counts = (f"{size} and {rest} {word}" for size, rest, word in words if rest)
            yield f"%{name} = matmul: split into {', and '.join(counts)}, because unaligned matmuls are slower"


def _why_composed(op: Op, types: Mapping[str, TensorType], options: Options) -> str:
    if op[COMPOSED] == WHY_MACHINE:
        return dict(options.figures.no_scales)[scaling(*(types[name].shape for name in op.tensors))]
    if op[COMPOSED] == WHY_DTYPES:
        return "cuBLASLt has no product of f8e5m2 by f8e5m2; use f8e4m3 for one operand"
    return f"cuBLASLt multiplies 8-bit floats only if the local K and N, also in a chunk, are multiples of {MULTIPLE}; pad them"


def _hidden(body: Fusion, position: int, times: Mapping[str, float]) -> str:
    """Text about a communication that runs in sequence because other ops could hide too little of the communication. Otherwise ""."""
    could, own = hidden_beside(body.ops, position, times)[1], times[body.ops[position].result.name]
    if body.ops[position].result.is_async or could >= HIDDEN_SECONDS:
        return ""
    return f"; other ops could hide {1e6 * could:.1f} us of its {1e6 * own:.1f} us, but at least {1e6 * HIDDEN_SECONDS:.0f} us are needed"


def _how(op: Op, loop: ChunkLoop | None, choice: Choice | None, candidate: Candidate | None, options: Options, hidden: str) -> str:
    alone = "overlapped with other ops on a separate stream" if op.result.is_async else "in sequence"
    if choice:
        text = alone if choice.chosen.algorithm == IN_SEQUENCE else _loop(choice.chosen, options)
        if op.result.is_async and choice.chosen.chunks:
            by_shards = ", and multiplied shard by shard" if choice.chosen.chunks > 1 else ""
            by = f"{choice.chosen.algorithm}, {transport_of(choice.chosen, options).name}"
            text = f"overlapped with other ops on a separate stream by {by}{by_shards}"
        return f"{text}{times_of(choice)}"
    if loop and (algorithm := op.result.walked.algorithm):
        return f"{_loop(Alternative(algorithm, 0 if loop.drops_dim else int(loop.trips), 0.0), options)}, as the program states"
    return f"{alone}: {_why_not(loop, candidate, options, hidden)}"


def times_of(choice: Choice) -> str:
    others = ", ".join(f"{one.name} {one.micros:.1f} us" for one in choice.alternatives[1:])
    if not others:
        return ""
    text = f", {'measured' if choice.is_measured else 'predicted'} {choice.chosen.micros:.1f} us; instead of {others}"
    best = min(choice.alternatives, key=lambda one: one.micros)
    if best.micros >= choice.chosen.micros:
        return text
    gain, wanted = choice.chosen.micros - best.micros, min_gain(choice.chosen.micros)
    is_by_gain = choice.chosen.algorithm == IN_SEQUENCE and gain < wanted
    why = f"at least {wanted:.1f} us are needed" if is_by_gain else "this one was requested"
    return f"{text}; {best.name} would gain {gain:.1f} us, but {why}"


def _loop(alternative: Alternative, options: Options) -> str:
    chunks = f"{alternative.chunks} chunks" if alternative.chunks else "one index at a time"
    return f"{chunks} by {alternative.algorithm}, {transport_of(alternative, options).name}"


def _why_not(loop: ChunkLoop | None, candidate: Candidate | None, options: Options, hidden: str) -> str:
    if loop:
        return "in a loop that does not communicate"
    if options.overlap == "off":
        return 'overlap="off"'
    if candidate is None:
        of_keys = "no attention with a causal mask or without a mask reads the result as keys"
        return f"no adjacent matmul gathers or reduces along its outermost dim before other ops read the result, and {of_keys}{hidden}"
    if candidate.unknown:
        text_of_sizes = ", ".join(f'"{name}": ...' for name in candidate.unknown)
        return f"sizes are unknown; state them to allow a chunk loop: hw.Options(sizes={{{text_of_sizes}}})"
    return f"its matmul is in the loop of another communication{hidden}"
