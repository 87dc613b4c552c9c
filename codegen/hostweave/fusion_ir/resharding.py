"""Plans of reshards: the steps, and the sequence of steps that moves the fewest bytes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, permutations
from math import prod
from typing import Any

from hostweave.base.errors import Location, ProgramError
from hostweave.fusion_ir.ir import MeshAxes, Op, Value, attributes
from hostweave.fusion_ir.ops import OPS, RESHARD_STEPS
from hostweave.fusion_ir.ops.definition import Mismatch
from hostweave.fusion_ir.sharding import Axes, divides, layout, partial_axes, with_layout
from hostweave.transports.transport import DEFAULT, find_transport
from hostweave.types.blocks import Transfer, transfer
from hostweave.types.mesh import Mesh
from hostweave.types.size import Atom
from hostweave.types.tensor import Partial, TensorType
from hostweave.types.zigzag import Zigzag

DEFAULT_SIZE = 4096  # assumed value of an unknown size symbol


@dataclass(frozen=True)
class ReshardStep:
    """A step of a reshard: kind and attributes of the step's op.

    - An all_gather, reduce_scatter or shard changes the axes of `dim`. An all_to_all moves the axes from `dim` to dim `to`.
    - In a permute_shards, rank i of a process group gets the shard of rank `sources[i]`.
    - A reduce leaves the result on rank `root` of each process group.
    - A transfer moves a tensor to another mesh, by the routes of `blocks`.
    - `target` is the result type of a permute_shards, reduce or transfer. For other kinds, the attributes determine the type.
    """

    kind: str
    axes: Axes = ()
    dim: int | None = None
    to: int | None = None
    reduction: str = ""
    root: int | None = None
    sources: tuple[int, ...] | None = None  # None in a plan, where the types determine the sources
    target: TensorType | None = None
    blocks: Transfer | None = None  # None in a plan

    def op(self, source: str, type: TensorType, result: Value, mesh: Mesh, location: Location | None) -> Op:
        sources = _sources(self.axes, type, result.type, mesh) if self.kind == "permute_shards" else None
        axes = MeshAxes(self.axes) if self.axes else None
        reduction, blocks = self.reduction or None, transfer(type, result.type, mesh) if self.kind == "transfer" else None
        facts = attributes(dim=self.dim, to=self.to, axes=axes, reduction=reduction, root=self.root, sources=sources, blocks=blocks)
        return Op(self.kind, (source,), result, facts, location)

    @property
    def loses(self) -> int | None:
        """Dim that loses its innermost axes."""
        return self.dim if self.kind in ("all_gather", "all_to_all") else None

    @property
    def gains(self) -> int | None:
        """Dim that gains axes."""
        return self.to if self.kind == "all_to_all" else self.dim if self.kind in ("shard", "reduce_scatter") else None

    def applied(self, type: TensorType, mesh: Mesh) -> TensorType:
        """Type after the step. Raises Mismatch if the step does not fit the type."""
        on, partial, after, axes = type.mesh_in(mesh), type.partial, list(layout(type)), MeshAxes(self.axes)
        if self.kind != "transfer" and (not self.axes or len(set(self.axes) & dict(on.axes).keys()) < len(self.axes)):
            raise Mismatch(f"{axes} are not axes of {on}, each named once")
        if self.reduction:
            if partial is None or partial.op != self.reduction or not set(self.axes) <= set(partial.axes):
                raise Mismatch(f"{type} is not {Partial(self.reduction, self.axes)}; write the reduction and axes of a partial operand")
            left = tuple(axis for axis in partial.axes if axis not in self.axes)
            partial = replace(partial, axes=left) if left else None
        if self.kind in ("transfer", "reduce") and is_in_zigzag(type):
            raise Mismatch(f"{type} is in zigzag, and cannot move to another mesh")
        if self.target is not None:
            if not self._leads_to(self.target, type, mesh):
                raise Mismatch(f"it does not lead from {type} to {self.target}")
            return self.target
        if self.loses is not None:
            dim = type.dims[self.loses]
            after[self.loses] = dim.axes[: -len(self.axes)]
            if dim.axes != (*after[self.loses], *self.axes) or (after[self.loses] and not divides(dim.axes, dim, on)):
                raise Mismatch(f"{axes} are not the innermost axes that split dim {self.loses} of {type} evenly")
        if self.gains is not None:
            dim = type.dims[self.gains]
            after[self.gains] = (*dim.axes, *self.axes)
            if (
                isinstance(dim.axes, Zigzag)
                or (dim.axes and not divides(after[self.gains], dim, on))
                or (self.kind == "shard" and set(self.axes) & set(partial_axes(type)))
            ):
                raise Mismatch(f"{axes} cannot split dim {self.gains} of {type} further")
        return with_layout(type, tuple(after), partial)

    def _leads_to(self, target: TensorType, type: TensorType, mesh: Mesh) -> bool:
        if self.kind == "transfer":
            is_move = not type.partial and not target.partial and type.mesh != target.mesh
            return is_move and (self.blocks is None or self.blocks.leads(type, target, mesh))
        if self.kind == "reduce":
            return self in _reduces(type, target, mesh)
        if self.sources is None:
            return True
        have, want = dict(enumerate(_shards(type, self.axes, mesh))), _shards(target, self.axes, mesh)
        is_permute = replace(self, sources=None) in _permutes(type, target, type.mesh_in(mesh))
        return is_permute and [have.get(source) for source in self.sources] == want

    def received(self, share: Fraction, mesh: Mesh) -> Fraction:
        """Estimated amount of data that a rank receives, if each rank holds `share` before the step."""
        ranks = mesh.size_of(self.axes)
        others = Fraction(ranks - 1, ranks)
        times = {"shard": Fraction(0), "all_gather": Fraction(ranks - 1), "permute_shards": Fraction(1), "all_reduce": 2 * others}
        return share * times.get(self.kind, others)


def step_of(op: Op) -> ReshardStep:
    facts: dict[str, Any] = {name: value.names if isinstance(value, MeshAxes) else value for name, value in op.attributes}
    return ReshardStep(op.kind, **facts, target=op.result.type if OPS[op.kind].target else None)


def reshard_step(source: TensorType, target: TensorType, mesh: Mesh) -> ReshardStep | None:
    """The single step from one type to another, or None."""
    if source.mesh != target.mesh and source.partial:
        return next((change for change in _reduces(source, target, mesh) if change.target == target), None)
    if source.mesh != target.mesh:
        return None if target.partial else ReshardStep("transfer", target=target)
    return next((change for change in _moves(source, target, mesh) if change.applied(source, mesh) == target), None)


def plan(
    source: TensorType, target: TensorType, mesh: Mesh, sizes: Mapping[str, int], location: Location | None
) -> tuple[ReshardStep, ...]:
    """Steps from one type to another that move the fewest bytes. A change to or from zigzag is planned as two reshards (`in_rank_order`).

    If several sequences move equal bytes, prefers fewer steps, then in each step earlier kinds of RESHARD_STEPS and lower dims. Raises
    ProgramError if there is no sequence.
    """
    if source.mesh != target.mesh and (is_in_zigzag(source) or is_in_zigzag(target)):
        why = f"{source} cannot become {target}: a zigzag sharding cannot move between meshes"
        raise ProgramError(f"reshard: {why}; reshard on the first mesh before the move, or on the other mesh after it", location)
    legs = [_plan(*ends, mesh, tuple(sorted(sizes.items()))) for ends in in_rank_order(source, target)]
    if None in legs:
        raise ProgramError(f"reshard: {source} cannot become {target}: no steps lead to {target.partial}; remove it", location)
    return tuple(step for steps in legs for step in steps or ())


def is_in_zigzag(type: TensorType) -> bool:
    return any(isinstance(axes, Zigzag) for axes in layout(type))


def zigzag_changes(source: TensorType, target: TensorType) -> list[int]:
    """Dims whose axes differ, with a zigzag in at least one of the types."""
    pairs = enumerate(zip(layout(source), layout(target), strict=True))
    return [i for i, (have, want) in pairs if have != want and (isinstance(have, Zigzag) or isinstance(want, Zigzag))]


def in_rank_order(source: TensorType, target: TensorType) -> list[tuple[TensorType, TensorType]]:
    """Splits a reshard that changes dims to or from zigzag into two reshards, as pairs of types. All other reshards stay one pair.

    The first pair ends, and the second begins, with the changed dims unsharded. Between the pairs, each rank reorders the pieces of the
    dims. In the pairs, plain axes stand for zigzag axes, because both pieces of a rank move together.
    """
    changed = zigzag_changes(source, target)
    if not changed:
        return [(source, target)]

    def with_dims(type: TensorType, axes_of: Callable[[Axes], Axes]) -> TensorType:
        axes = tuple(axes_of(axes) if i in changed else axes for i, axes in enumerate(layout(type)))
        return with_layout(type, axes, type.partial)

    nearer = target if any(isinstance(layout(source)[i], Zigzag) for i in changed) else source
    between = with_dims(nearer, lambda axes: ())
    return [(with_dims(source, tuple), between), (between, with_dims(target, tuple))]


@lru_cache(maxsize=4096)
def _plan(source: TensorType, target: TensorType, mesh: Mesh, sizes: tuple[tuple[str, int], ...]) -> tuple[ReshardStep, ...] | None:
    if source == target:
        return ()
    if (only := reshard_step(source, target, mesh)) is not None:
        return (only,)  # several steps never move fewer bytes than one
    if source.mesh != target.mesh:
        return _plan_across(source, target, mesh)
    known, on, numbers = dict(sizes), source.mesh_in(mesh), count(1)  # unique numbers for the heap, because types cannot be compared
    queue: list[tuple[Fraction, int, tuple[tuple[int, int], ...], int, TensorType, tuple[ReshardStep, ...]]] = [
        (Fraction(0), 0, (), 0, source, ())
    ]
    done: set[TensorType] = set()
    while queue:
        moved, _, kinds, _, type, steps = heappop(queue)
        if type == target:
            return steps
        if type in done:
            continue
        done.add(type)
        share = prod(local_dims(type, mesh, known), start=Fraction(1))
        for change in _moves(type, target, mesh):
            preferred = (*kinds, (RESHARD_STEPS.index(change.kind), -1 if change.dim is None else change.dim))
            total = moved + change.received(share, on)
            heappush(queue, (total, len(steps) + 1, preferred, next(numbers), change.applied(type, mesh), (*steps, change)))
    return None


# --- to another mesh --------------------------------------------------------------------------------------------------


def _reduces(source: TensorType, target: TensorType, program: Mesh) -> Iterator[ReshardStep]:
    """Yields reductions of a partial value to one rank of each process group. If the receiving ranks and their shards match the target,
    the result has the target's type. Otherwise the result is on a mesh of the receiving ranks."""
    assert source.partial is not None
    mesh, op, axes = source.mesh_in(program), source.partial.op, source.partial.axes
    kept = tuple((name, size) for name, size in mesh.axes if name not in axes)
    for root in range(mesh.size_of(axes)) if op in find_transport(DEFAULT).reduces else ():
        owners = tuple(rank for rank in mesh.all_ranks if mesh.rank_in_group(rank, axes) == root)
        reduced = replace(source, partial=None, mesh=Mesh(kept, owners))
        blocks = transfer(reduced, target, program)
        is_target = not blocks.moved and set(blocks.sent) | set(blocks.received) <= {1} and target.mesh_in(program).size == len(owners)
        yield ReshardStep("reduce", axes, reduction=op, root=root, target=target if is_target else reduced)


def _plan_across(source: TensorType, target: TensorType, program: Mesh) -> tuple[ReshardStep, ...] | None:
    if target.partial:
        return None
    assert source.partial is not None
    mesh, op, axes = source.mesh_in(program), source.partial.op, source.partial.axes
    copies = Fraction(mesh.size, mesh.size_of((*source.axes, *axes)))
    plans: list[tuple[Fraction, int, int, tuple[ReshardStep, ...]]] = []
    scattered = (ReshardStep("reduce_scatter", axes, i, reduction=op) for i in _scattered(source, target, program))
    for first in (ReshardStep("all_reduce", axes, reduction=op), *scattered, *_reduces(source, target, program)):
        reduced = first.target or first.applied(source, program)
        after = transfer(reduced, target, program)
        steps = (first, *((ReshardStep("transfer", target=target),) if reduced != target else ()))
        here = copies * mesh.size_of(axes) * first.received(Fraction(1), mesh)  # unit: the tensor's size
        moved = here + after.share(reduced.mesh_in(program).size_of(reduced.axes))
        plans.append((moved, 1 + bool(after.moved), len(plans), steps))
    return min(plans)[-1]


def _scattered(source: TensorType, target: TensorType, program: Mesh) -> Iterator[int]:
    """Dims along which a partial value can be reduce-scattered before a transfer. The new number of shards must divide the size or, if the
    size is symbolic, the number of shards in the target."""
    ranks = source.mesh_in(program).size_of(partial_axes(source))
    if source.partial and source.partial.op not in find_transport(DEFAULT).reduces:
        return
    for i, (dim, wanted) in enumerate(zip(source.dims, target.dims, strict=True)):
        split = ranks * source.mesh_in(program).size_of(dim.axes)
        if (int(dim.size) if dim.size.is_int else target.mesh_in(program).size_of(wanted.axes)) % split == 0:
            yield i


def cost(source: TensorType, target: TensorType, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[Fraction, int]:
    """Bytes that a rank receives in a reshard on one mesh, and the number of steps that communicate."""
    moved, count = Fraction(0), 0
    for now, end in in_rank_order(source, target):
        for step in plan(now, end, mesh, sizes, None):
            moved += now.dtype.itemsize * step.received(prod(local_dims(now, mesh, sizes), start=Fraction(1)), now.mesh_in(mesh))
            count += not OPS[step.kind].is_view
            now = step.applied(now, mesh)
    return moved, count


def local_dims(type: TensorType, mesh: Mesh, sizes: Mapping[str, int]) -> list[Fraction]:
    """Typical local size of each dim. Unknown symbols count as DEFAULT_SIZE."""

    def typical(atom: Atom) -> Fraction:
        if isinstance(atom, str):
            return Fraction(sizes.get(atom, DEFAULT_SIZE))
        return atom.size.estimate(typical) / atom.ranks_in(mesh)

    return [size.estimate(typical) for size in type.local_shape(mesh)]


def _moves(now: TensorType, target: TensorType, mesh: Mesh) -> Iterator[ReshardStep]:
    mesh = now.mesh_in(mesh)
    if now.partial and target.partial and now.partial.op != target.partial.op:
        return
    reduction = now.partial.op if now.partial else ""
    is_scattered = reduction in find_transport(DEFAULT).reduces  # otherwise the value can only be all-reduced
    open_axes = tuple(axis for axis in partial_axes(now) if axis not in partial_axes(target))
    free = tuple(axis for axis in target.axes if axis not in (*now.axes, *partial_axes(now)))

    def can_gain(i: int, axes: Axes) -> bool:
        """True if `axes` can split a dim further. Uneven shards cannot be split again: a direct split by all axes gives other blocks."""
        dim = now.dims[i]
        split = (*dim.axes, *axes)
        if isinstance(dim.axes, Zigzag):
            return False
        return divides(split, dim, mesh) or (not dim.axes and split == target.dims[i].axes)

    for i, dim in enumerate(now.dims):
        for axes in _orders(free):
            if can_gain(i, axes):
                yield ReshardStep("shard", axes, i)
        for axes in _orders(open_axes):
            if is_scattered and can_gain(i, axes):
                yield ReshardStep("reduce_scatter", axes, i, reduction=reduction)
        if isinstance(dim.axes, Zigzag):
            continue
        for inner in (dim.axes[k:] for k in range(len(dim.axes) if divides(dim.axes, dim, mesh) else 1)):
            yield ReshardStep("all_gather", inner, i)
            for j in range(len(now.dims)):
                if j != i and can_gain(j, inner):
                    yield ReshardStep("all_to_all", inner, i, j)
    if open_axes:
        yield ReshardStep("all_reduce", open_axes, reduction=reduction)
    yield from _permutes(now, target, mesh)


def _orders(axes: Axes) -> Iterator[Axes]:
    for length in range(1, len(axes) + 1):
        yield from permutations(axes, length)


def _permutes(now: TensorType, target: TensorType, mesh: Mesh) -> Iterator[ReshardStep]:
    """Yields permutations of shards that lead to the target's layout, or reorder the axes of one dim."""
    have, want = layout(now), layout(target)
    orders = [(i, order) for i, axes in enumerate(have) if not isinstance(axes, Zigzag) for order in permutations(axes)]
    layouts = [(*have[:i], order, *have[i + 1 :]) for i, order in orders]
    if all(mesh.size_of(a) == mesh.size_of(b) for a, b in zip(have, want, strict=True)) and not set(partial_axes(now)) & set(target.axes):
        layouts.append(want)
    for axes in layouts:
        if axes != have:
            changed = [axis for a, b in zip(have, axes, strict=True) if a != b for axis in (*a, *b)]
            yield ReshardStep("permute_shards", tuple(dict.fromkeys(changed)), target=with_layout(now, axes, now.partial))


def _sources(axes: Axes, source: TensorType, target: TensorType, program: Mesh) -> tuple[int, ...]:
    """For each rank of a process group: the source of the rank's new shard, or the rank itself if it has the shard already."""
    have, want = _shards(source, axes, program), _shards(target, axes, program)
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, shard in enumerate(have):
        if want[rank] != shard:
            holders.setdefault(shard, []).append(rank)
    return tuple(rank if have[rank] == shard else holders[shard].pop(0) for rank, shard in enumerate(want))


def _shards(type: TensorType, axes: Axes, program: Mesh) -> list[tuple[int, ...]]:
    """Shard indices of the ranks of the first process group along `axes`."""
    mesh = type.mesh_in(program)
    return [tuple(mesh.rank_in_group(rank, dim.axes) for dim in type.dims) for rank in mesh.process_group(mesh.all_ranks[0], axes)]
