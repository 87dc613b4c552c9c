"""Candidates for overlap, and their predicted times. A candidate is a reshard that a chunk loop can hide behind matmuls or attention."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod

from hostweave.base.errors import ProgramError
from hostweave.communication.algorithms import choosable
from hostweave.communication.cost import Overlap, by_collective, by_copies
from hostweave.fusion_ir.choice import IN_SEQUENCE, Alternative, Choice
from hostweave.fusion_ir.ir import MAX_TRIPS, Fusion, Op
from hostweave.fusion_ir.key_blocks import GatheredKeys, gathered_keys
from hostweave.fusion_ir.ops import OPS, communicates, index_map, operand_types
from hostweave.fusion_ir.ops.attributes import ORDER
from hostweave.fusion_ir.ops.grouped import GROUPED
from hostweave.fusion_ir.ops.scaled import is_composed
from hostweave.fusion_ir.resharding import local_dims, step_of
from hostweave.fusion_ir.rewriting import consumers
from hostweave.options import Options
from hostweave.transports.transport import SIGNALS
from hostweave.tune.cost import (
    AttentionWork,
    Product,
    around_attention,
    attention_of,
    cost_by_shards,
    cost_of_copies,
    hosts_of,
    product_of,
    seconds,
)
from hostweave.types.machine import Machine
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType
from hostweave.types.zigzag import pieces

MAX_TIME_RATIO = 0.95  # largest accepted ratio of the time of an alternative to the sequential time
MIN_GAIN_MICROS = 5.0  # smallest accepted gain of an alternative; the cost model has errors of about 5 us
HIDDEN_SECONDS = 10e-6  # smallest hidden time that is worth a fork and a wait, which take nearly as long
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Candidate:
    """A reshard that can run in a chunk loop with matmuls. Chunks split dim `dim` of the matmuls' results.

    If the reshard gathers keys, `matmuls` has only the attention op, and `dim` is the sequence dim of the keys. The loop also gathers the
    values.
    """

    reshard: Op
    matmuls: tuple[Op, ...]
    dim: int
    ranks: int
    size: Size  # global size of `dim`
    shards: int  # number of shards of `dim` during the loop
    unknown: tuple[str, ...]  # names of sizes that the prediction needs, but the options do not state
    is_even: bool  # True if no tensor is on a mesh of some ranks, and all sharded dims divide evenly, as windows require
    keys: GatheredKeys | None = None

    @property
    def reshards(self) -> tuple[Op, ...]:
        return self.keys.gathers if self.keys else (self.reshard,)

    @property
    def streamed(self) -> tuple[Op, ...]:
        """Ops that a user would mark with `.stream()` to request the loop of the candidate."""
        return self.matmuls if not (OPS[self.reshard.kind].reduces or self.keys) else self.reshards


def candidates(fusion: Fusion, sizes: Mapping[str, int]) -> Iterator[Candidate]:
    """Yields the candidates of a body. Each reshard of the body must be a single communication."""
    finder = _Finder(fusion, sizes)
    for op in fusion.ops:
        if op.kind in KINDS and not op.result.stream and (found := finder.candidate(op)):
            yield found


class _Finder:
    """Finds the ops that can share a loop with a reshard."""

    def __init__(self, fusion: Fusion, sizes: Mapping[str, int]):
        self.fusion, self.sizes, self.uses = fusion, sizes, consumers(fusion)
        self.types = fusion.types
        self.position = {op.result.name: i for i, op in enumerate(fusion.ops)}
        self.is_on_all_ranks = all(type.mesh is None for type in self.types.values())
        self.keys = {keys.keys.result.name: keys for keys in gathered_keys(fusion)}

    def candidate(self, op: Op) -> Candidate | None:
        step = step_of(op)
        ranks = op.result.type.mesh_in(self.fusion.mesh).size_of(step.axes)
        if op.result.type.mesh or ranks < 2 or step.reduction not in ("", "sum"):
            return None
        keys = self.keys.get(op.result.name)
        matmuls, dim = ((keys.attention,), keys.dim) if keys else self.reduced(op) if OPS[op.kind].reduces else self.gathered(op)
        if not matmuls:
            return None
        types = [self.types[name] for matmul in matmuls for name in (*matmul.tensors, matmul.result.name)]
        symbols = dict.fromkeys(name for type in (*types, op.result.type) for size in type.shape for name in size.symbols)
        whole, size_dim = (self.types[op.tensors[0]], dim) if OPS[op.kind].reduces else (op.result.type, step.dim or 0)
        shards = whole.mesh_in(self.fusion.mesh).size_of(whole.dims[dim].axes) if OPS[op.kind].reduces_to_all else 1
        unknown = tuple(name for name in symbols if name not in self.sizes)
        return Candidate(op, matmuls, dim, ranks, whole.shape[size_dim], shards, unknown, self.is_on_all_ranks and self.is_even(), keys)

    def gathered(self, op: Op) -> tuple[tuple[Op, ...], int]:
        """Returns the matmuls whose rows the op gathers, and the gathered dim.

        Returns no matmuls if another op reads the gathered value before one of the matmuls. Later readers use the value after the loop.
        """
        users = self.uses[op.result.name]
        found = tuple(user for user in users if user is not None and self.has_rows_of(op, user))
        are_first = list(found) == users[: len(found)]
        return (found, step_of(op).dim or 0) if are_first else ((), 0)

    def has_rows_of(self, op: Op, user: Op) -> bool:
        """True if `user` is a matmul that the loop of a gather can compute. The rows of the matmul must be the gathered rows. All operands
        that are not gathered must exist before the first consumer of the gather."""
        dim, first = step_of(op).dim, self.uses[op.result.name][0]
        if dim is None or op.result.type.dims[dim].axes or not self.is_outermost(op, dim):
            return False
        if not self.is_plain_matmul(user) or user.operands.count(op.result.name) > 1 or user.result.type.partial:
            return False
        indices, number = index_map(user, operand_types(user, self.types)), user.operands.index(op.result.name)
        dims = [i for i in range(len(user.result.type.dims)) if indices.operand_dim(number, i) == dim]
        is_rows = number < 2 and dims == [dim] and self.is_outermost(user, dim) and indices.operand_dim(1 - number, dim) is None
        others = (self.position.get(name, -1) for name in user.tensors if name != op.result.name)
        return is_rows and all(position < (self.position[first.result.name] if first else 0) for position in others)

    def reduced(self, op: Op) -> tuple[tuple[Op, ...], int]:
        """Returns the matmul whose result the op reduces, and the chunked dim.

        Returns no matmul if a loop cannot compute the matmul, for example because another op also reads the matmul's result. A chunked
        operand must not come from a communication, a partial sum or a loop.
        """
        matmul, dim = self.fusion.made.get(op.tensors[0]), step_of(op).dim or 0
        if matmul is None or not self.is_plain_matmul(matmul) or self.uses[matmul.result.name] != [op]:
            return (), 0
        if (OPS[op.kind].reduces_to_blocks and matmul.result.type.dims[dim].axes) or not self.is_outermost(op, dim):
            return (), 0
        indices = index_map(matmul, operand_types(matmul, self.types))
        for number, name in enumerate(matmul.tensors):
            made = self.fusion.made.get(name)
            is_walked = indices.operand_dim(number, dim) is not None
            if made and is_walked and ((communicates(made) and not made.callee) or made.result.type.partial or made.result.stream):
                return (), 0
        return (matmul,), dim

    def is_plain_matmul(self, op: Op) -> bool:
        return (
            OPS[op.kind].is_product
            and op.result.type.dtype.kind == "float"
            and op.result.stream is None
            and op.result.type.mesh is None
            and len(op.tensors) == OPS[op.kind].arity
            and not is_composed(op)
            and op.kind not in GROUPED
        )

    def is_outermost(self, op: Op, dim: int) -> bool:
        """True if chunks along the dim are contiguous."""
        return all(size == Size() for size in op.result.type.shape[:dim])

    def is_even(self) -> bool:
        for type in self.types.values():
            for dim in type.dims:
                ranks = pieces(dim.axes, self.fusion.mesh)
                if ranks > 1 and (not self.sizes.keys() >= set(dim.size.symbols) or dim.size.bind(self.sizes) % ranks):
                    return False
        return True


# --- predicted times --------------------------------------------------------------------------------------------------


def alternatives(candidate: Candidate, fusion: Fusion, options: Options) -> tuple[Alternative, ...]:
    """Alternatives for a candidate, fastest first. The number of chunks divides the extent of a shard of the dim. Loops over
    keys have at most one chunk per rank."""
    op, keys = candidate.reshard, candidate.keys
    sizes, machine, tf32 = options.sizes, options.figures, options.tf32

    size = sum(_bytes(reshard, fusion, sizes) for reshard in candidate.reshards)
    products: tuple[Product | AttentionWork, ...] = tuple(
        product_of(matmul, fusion, sizes, tf32) for matmul in candidate.matmuls if not keys
    )
    extra_seconds = 0.0, 0.0
    if keys:
        products = (attention_of(keys.attention, fusion, sizes),)
        extra_seconds = around_attention(machine, candidate.ranks, size, _bytes(keys.attention, fusion, sizes))
    is_made = keys is not None or _is_made(op.tensors[0], fusion)
    is_rows = candidate.dim < len(candidate.matmuls[0].result.type.dims) - 1
    overlapped, users = _beside(op, fusion, sizes, machine, tf32), consumers(fusion)[op.result.name]
    hosts = hosts_of(op, fusion, machine)
    consumer_sums = bool(users) and all(user is not None and OPS[user.kind].cpp for user in users)
    overlap = Overlap(op.kind, candidate.ranks, size, products, is_rows, is_made, overlapped, consumer_sums, extra_seconds, hosts)
    found = [Alternative(IN_SEQUENCE, 0, _micros(overlap.outside(machine)))]
    if not OPS[op.kind].reduces and not keys and _may_copy(options, candidate.is_even):
        by = "get" if is_made else "put"
        found.append(Alternative(by, 1, _micros(overlap.outside(machine, by))))
    length, rest = divmod(candidate.size.bind(sizes), candidate.shards)
    for algorithm in choosable(op.kind, options, candidate.is_even):
        for chunks in algorithm.chunks(candidate.ranks):
            if length and not rest and length % chunks == 0 and chunks <= (candidate.ranks if keys else MAX_TRIPS):
                found.append(Alternative(algorithm.name, chunks, _micros(algorithm.seconds(overlap, machine, chunks))))
    return tuple(sorted(found, key=lambda one: one.micros))


def reaches_memory(fusion: Fusion, options: Options) -> bool:
    """True if the option `transport` is "auto", and ranks can use peer memory. All tensors must be on all ranks and divide evenly."""
    finder = _Finder(fusion, options.sizes)
    return _may_copy(options, finder.is_on_all_ranks and finder.is_even())


def _may_copy(options: Options, is_even: bool) -> bool:
    transport = options.transport_carrying(SIGNALS)
    return is_even and options.transport == "auto" and transport is not None and not transport.why_not(options.figures)


def alternatives_outside_loops(
    op: Op, fusion: Fusion, options: Options, overlaps: bool, reaches: bool, is_by_call: bool = False
) -> tuple[Alternative, ...]:
    """Alternatives for a gather or a reduce-scatter outside of loops, fastest first. Empty if none is possible, or if a size is unknown.
    With `is_by_call`, the op gathers one tensor of a stack at a time.

    A collective is always possible. Copy engines are possible if `reaches`. Copy engines use gets for reduce-scatters, and for operands
    that the program allocates. Copy engines use puts for all other operands, which are not in windows. In an alternative with one chunk per
    rank, a separate matmul reads each gathered shard.
    """
    sizes, machine = options.sizes, options.figures
    step, source = step_of(op), fusion.values()[op.tensors[0]]
    op = replace(op, result=replace(op.result, type=replace(op.result.type, dims=op.result.type.dims[1:]))) if is_by_call else op
    ranks = op.result.type.mesh_in(fusion.mesh).size_of(step.axes)
    if (
        op.kind not in ("all_gather", "reduce_scatter")
        or step.reduction not in ("", "sum")
        or ranks < 2
        or not _are_known([op.result.type], sizes)
    ):
        return ()
    size = _bytes(op, fusion, sizes)
    by = "get" if OPS[op.kind].reduces or _is_made(source.name, fusion) else "put"
    kernels = by_collective(machine, op.kind, ranks, size, overlaps, hosts_of(op, fusion, machine))
    copies = by_copies(machine, op.kind, by, ranks, size, overlaps)
    own = laid_out = 0.0
    by_shards = list[Alternative]()
    if product := _shards_product(op, fusion, sizes, ranks):
        own, laid_out = cost_of_copies(machine, ranks, size, all(outer == Size() for outer in op.result.type.shape[: step.dim]))
        extra = cost_by_shards(machine, product_of(product, fusion, sizes, options.tf32), ranks)
        by_shards = [Alternative(by, ranks, _micros(copies + extra)) if reaches else Alternative(op.kind, ranks, _micros(kernels + extra))]
    whole_tensor = [Alternative(by, 1, _micros(copies + own + laid_out))] if reaches else []
    return tuple(sorted((Alternative(IN_SEQUENCE, 0, _micros(kernels + laid_out)), *whole_tensor, *by_shards), key=lambda one: one.micros))


def product_by_shards(gather: Op, fusion: Fusion) -> Op | None:
    """The only consumer of a gather or of its transpose, if this consumer is a matmul whose columns are gathered. Otherwise None."""
    uses, types, name, dim = consumers(fusion), fusion.types, gather.result.name, step_of(gather).dim
    user = uses[name][0] if len(uses[name]) == 1 else None
    if user and user.kind == "permute_dims" and dim is not None and len(uses[user.result.name]) == 1:
        name, dim = user.result.name, user[ORDER].index(dim)
        user = uses[name][0]
    if user is None or not OPS[user.kind].is_plain_product or user.result.stream or user.operands[1] != name:
        return None
    is_last = dim == len(types[name].dims) - 1 and not types[name].dims[-1].axes
    return user if is_last and user.result.type.mesh is None and user.result.type.partial is None else None


def _shards_product(op: Op, fusion: Fusion, sizes: Mapping[str, int], ranks: int) -> Op | None:
    """Result of `product_by_shards` if sizes are known and the columns divide evenly among the ranks. Otherwise None."""
    product = None if OPS[op.kind].reduces else product_by_shards(op, fusion)
    if product is None:
        return None
    types = [fusion.types[name] for name in (*product.tensors, product.result.name)]
    return product if _are_known(types, sizes) and product.result.type.shape[-1].bind(sizes) % ranks == 0 else None


def _are_known(types: Iterable[TensorType], sizes: Mapping[str, int]) -> bool:
    return sizes.keys() >= {name for type in types for size in type.shape for name in size.symbols}


def _bytes(op: Op, fusion: Fusion, sizes: Mapping[str, int]) -> float:
    """Bytes of an op's result on one rank. For a reduce_scatter, bytes of the operand."""
    whole = fusion.values()[op.tensors[0]] if OPS[op.kind].reduces_to_blocks else op.result
    return float(prod(local_dims(whole.type, fusion.mesh, sizes)) * whole.type.dtype.itemsize)


def choice_of(reshard: Op, fusion: Fusion, possible: tuple[Alternative, ...], requested: Mapping[str, str]) -> Choice:
    """Chooses an alternative for a reshard.

    The user's choice comes first. Otherwise the fastest alternative wins if it gains enough over sequential execution. Raises ProgramError
    if the user's choice is not possible.
    """
    choice = Choice(reshard.result.name, fusion.name, possible)
    sequential = next(one for one in possible if one.algorithm == IN_SEQUENCE)
    gains_enough = sequential.micros - possible[0].micros >= min_gain(sequential.micros)
    name_chosen = requested.get(choice.name, (possible[0] if gains_enough else sequential).name)
    if name_chosen not in (names := [one.name for one in possible]):
        why = f"{name_chosen} is not possible; use one of {', '.join(names)}"
        raise ProgramError(f"Options: choices: {choice.name}: {why}", reshard.location)
    chosen = possible[names.index(name_chosen)]
    return Choice(choice.value, choice.function, (chosen, *(one for one in possible if one != chosen)))


def min_gain(sequential: float) -> float:
    """Smallest accepted gain over sequential execution, in microseconds."""
    return max(MIN_GAIN_MICROS, (1 - MAX_TIME_RATIO) * sequential)


def _beside(reshard: Op, fusion: Fusion, sizes: Mapping[str, int], machine: Machine, tf32: bool) -> float:
    """Seconds of computation that can overlap with a reshard outside of loops: ops after the operand of the reshard, and before the first
    consumer of the result."""
    times = seconds(fusion, sizes, machine, tf32)
    ops = filled(fusion.ops, times)
    position = ops.index(reshard)
    before = takewhile(lambda op: op.result.name not in reshard.tensors, reversed(ops[:position]))
    after = ops[position + 1 : _first_use(ops, position)]
    return sum(times[op.result.name] for op in (*before, *after) if not communicates(op))


def _is_made(name: str, fusion: Fusion) -> bool:
    """True if the program allocates the memory of a value. False for inputs and views of inputs."""
    while name in fusion.made and OPS[fusion.made[name].kind].is_view:
        name = fusion.made[name].tensors[0]
    return name in fusion.made


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)


# --- outside of loops -------------------------------------------------------------------------------------------------


def hidden_beside(ops: Sequence[Op], position: int, times: Mapping[str, float]) -> tuple[int, float]:
    """Returns the best earlier position for the communication at `position`, and the seconds of communication that other ops then hide."""
    first, name = _first_use(ops, position), ops[position].result.name
    waiting = _in_kernel(ops, first)
    earlier = _earliest(ops, position, times, waiting)
    beside = (op.result.name for op in ops[earlier:first] if not communicates(op))
    overlapped = sum(times[other] for other in beside if other not in waiting)
    return earlier, min(overlapped, times[name] + _in_flight(ops, position, times))


def _in_kernel(ops: Sequence[Op], at: int) -> set[str]:
    """Earlier ops that the kernel of the op at `at` may compute too, because no op before `at` reads their results otherwise."""
    found, elsewhere = set[str](), set[str]()
    needed = set(ops[at].tensors) if at < len(ops) and OPS[ops[at].kind].cpp else set[str]()
    for op in reversed(ops[:at] if needed else ()):
        name, entry = op.result.name, OPS[op.kind]
        if name in needed and name not in elsewhere and (entry.cpp or entry.is_view) and not op.result.stream:
            needed.update(op.tensors)
            found.add(name)
        else:
            elsewhere.update(op.tensors)
    return found


def _earliest(ops: Sequence[Op], position: int, times: Mapping[str, float], waiting: Container[str]) -> int:
    """Position to which the communication at `position` moves up. The ops `waiting` begin after the communication, so they hide nothing.

    The communication moves past just enough ops to hide its time, or as far as possible. The communication stays after the op that computes
    the operand, after other communications, and after pointwise ops that depend on the operand.
    """
    op, best, passed = ops[position], position, 0.0
    kernel = set(op.tensors)
    for other in ops[:position]:
        if OPS[other.kind].cpp and not other.result.stream and not kernel.isdisjoint(other.tensors):
            kernel.add(other.result.name)
    for at in range(position - 1, -1, -1):
        other = ops[at]
        if passed >= times[op.result.name] or other.result.name in kernel or communicates(other):
            break
        if other.result.name in waiting:
            continue
        passed += times[other.result.name]
        in_loop = at > 0 and other.result.stream and ops[at - 1].result.stream
        if times[other.result.name] and not in_loop:  # The position must not be inside a loop.
            best = at
    return best


def is_better_inside(gather: Op, beside: Sequence[Op], function: Fusion, options: Options, times: Mapping[str, float]) -> bool:
    """True if a function should gather a weight itself, although its caller can gather the weight ahead. Separate matmuls then read the
    gathered shards, so no copy rearranges the shards, and earlier ops of the function hide the communications `beside`."""
    possible = alternatives_outside_loops(gather, function, options, overlaps=True, reaches=reaches_memory(function, options))
    earlier = function.ops[: _first_use(function.ops, function.ops.index(gather))]
    work = sum(times[op.result.name] for op in earlier if not communicates(op))
    return bool(possible) and possible[0].chunks > 1 and work >= sum(times[op.result.name] for op in beside)


def _in_flight(ops: Sequence[Op], position: int, times: Mapping[str, float]) -> float:
    """Seconds of earlier communications that are still in flight at `position`. The op at `position` waits for these communications."""
    in_flight = (at for at, op in enumerate(ops[:position]) if op.result.is_async and _first_use(ops, at) > position)
    return sum(times[ops[at].result.name] for at in in_flight)


def _first_use(ops: Sequence[Op], position: int) -> int:
    """Position of the first op that reads the result of the op at `position`, directly or through a view."""
    views = {ops[position].result.name}
    for at in range(position + 1, len(ops)):
        if not views.isdisjoint(ops[at].tensors):
            if not OPS[ops[at].kind].is_view:
                return at
            views.add(ops[at].result.name)
    return len(ops)


def needed_by_large(ops: Sequence[Op]) -> set[str]:
    """Values on which large ops depend, directly or indirectly."""
    needed: set[str] = set()
    for op in reversed(ops):
        if _is_large(op) or op.result.name in needed:
            needed.update(op.tensors)
    return needed


def _is_large(op: Op) -> bool:
    is_large_call = op.callee is not None and any(map(_is_large, op.callee.ops))
    return communicates(op) or op.result.stream is not None or OPS[op.kind].multiplies or is_large_call


def filled(ops: Sequence[Op], times: dict[str, float]) -> list[Op]:
    """Moves matmuls that no large op needs, such as gradients of weights, down to points where ops wait for a communication.

    Ops that depend on the moved matmuls move too. A matmul passes at most two communications that large ops need, because the new position
    lengthens the live ranges of its operands.
    """
    needed = needed_by_large(ops)
    order, late, moved, aged = list[Op](), list[Op](), set[str](), 0  # `aged`: number of late ops that have passed one needed communication
    clock = link = 0.0  # end of all computation and of all communication so far, in seconds
    ends: dict[str, float] = {}  # end of each communication

    def take() -> float:
        order.append(late.pop(0))
        return clock + times[order[-1].result.name]

    for op in ops:
        name, is_view = op.result.name, OPS[op.kind].is_view
        is_free = OPS[op.kind].is_product and name not in needed and not op.result.stream and ends
        if is_free or not moved.isdisjoint(op.tensors):
            late.append(op)
            moved.add(name)
            continue
        ready = max((ends.get(source, 0.0) for source in op.tensors), default=0.0)
        if communicates(op):
            ends[name] = link = max(clock, link, ready) + times[name]
            order.append(op)
            for _ in range(aged if name in needed else 0):
                clock = take()
            aged = len(late) if name in needed else aged
            continue
        while late and ready - clock >= HIDDEN_SECONDS and not is_view:
            clock, aged = take(), max(0, aged - 1)
        if is_view:
            ends[name] = ready
        else:
            clock = max(clock, ready) + times[name]
        order.append(op)
    return [*order, *late]
