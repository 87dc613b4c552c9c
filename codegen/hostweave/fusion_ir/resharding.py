"""From one layout to another: what one communication can change, and the sequence of them that moves the fewest bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from itertools import permutations
from math import prod

from hostweave.base.errors import Location, ProgramError
from hostweave.fusion_ir.sharding import Axes, Layout, divides, layout, partial_axes, with_layout
from hostweave.types.mesh import Mesh
from hostweave.types.routes import transfer
from hostweave.types.tensor import TensorType

# In the order of preference where bytes and steps are equal.
KINDS = ("shard", "all_gather", "collective_permute", "all_to_all", "all_reduce", "reduce_scatter", "reduce", "transfer")
DEFAULT_SIZE = 4096  # of a dim that has no size yet


@dataclass(frozen=True)
class ReshardStep:
    """What one reshard does over mesh `axes`.

    `dim` is the one gathered, scattered or sliced; an all_to_all takes the axes from it to dim `to`. A collective permute gives each
    rank the block of another, so that the dims end up split along the axes in `layout`. A reduce leaves the result on the rank at
    place `root` of each process group, and a transfer moves what is whole to another mesh: both say the `target`.
    """

    kind: str
    axes: Axes
    dim: int | None = None
    to: int | None = None
    layout: Layout | None = None
    root: int | None = None
    target: TensorType | None = None

    def applied(self, type: TensorType) -> TensorType:
        """The type after it."""
        if self.target is not None:
            return self.target
        if self.layout is not None:
            return with_layout(type, self.layout, type.partial)
        axes = list(layout(type))
        if self.dim is not None and self.kind in ("all_gather", "all_to_all"):
            axes[self.dim] = axes[self.dim][: -len(self.axes)]
        gains = self.to if self.kind == "all_to_all" else self.dim if self.kind in ("shard", "reduce_scatter") else None
        if gains is not None:
            axes[gains] = (*axes[gains], *self.axes)
        partial = type.partial
        if partial and self.kind in ("all_reduce", "reduce_scatter"):
            left = tuple(axis for axis in partial.axes if axis not in self.axes)
            partial = replace(partial, axes=left) if left else None
        return with_layout(type, tuple(axes), partial)

    def received(self, held: Fraction, mesh: Mesh) -> Fraction:
        """How much of the data reaches a rank of that mesh that held so much before."""
        ranks = mesh.size_of(self.axes)
        others = Fraction(ranks - 1, ranks)
        times = {"shard": Fraction(0), "all_gather": Fraction(ranks - 1), "collective_permute": Fraction(1), "all_reduce": 2 * others}
        return held * times.get(self.kind, others)


def reshard_step(source: TensorType, target: TensorType, mesh: Mesh) -> ReshardStep | None:
    """The one change that takes a layout to another, or None where it takes several or none. `mesh` is the program's."""
    if source.mesh != target.mesh:
        return _step_across_meshes(source, target, mesh)
    return next((change for change in _moves(source, target, mesh) if change.applied(source) == target), None)


def plan(
    source: TensorType, target: TensorType, mesh: Mesh, sizes: Mapping[str, int], location: Location | None
) -> tuple[ReshardStep, ...]:
    """The changes that take one layout to another and move the fewest bytes; none where the layouts are equal.

    `sizes` are those of dims that are known by name alone; ties go to fewer steps, then to the order of KINDS and of dims. Raises
    ProgramError where there is no way.
    """
    steps = _plan(source, target, mesh, tuple(sorted(sizes.items())))
    if steps is None:
        raise ProgramError(
            f"reshard: {source} cannot become {target}: what is partial in it was reduced before; leave {target.partial} out", location
        )
    return steps


@lru_cache(maxsize=4096)
def _plan(source: TensorType, target: TensorType, mesh: Mesh, sizes: tuple[tuple[str, int], ...]) -> tuple[ReshardStep, ...] | None:
    if source == target:
        return ()
    if (only := reshard_step(source, target, mesh)) is not None:
        return (only,)  # several never move less
    if source.mesh != target.mesh:
        return _plan_across(source, target, mesh)
    known = dict(sizes)
    on = source.mesh_in(mesh)
    found = 0
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
        held = _held(type, mesh, known)
        for change in _moves(type, target, mesh):
            found += 1  # keeps the heap from comparing types
            preferred = (*kinds, (KINDS.index(change.kind), -1 if change.dim is None else change.dim))
            total = moved + change.received(held, on)
            heappush(queue, (total, len(steps) + 1, preferred, found, change.applied(type), (*steps, change)))
    return None


# --- to another mesh --------------------------------------------------------------------------------------------------


def _step_across_meshes(source: TensorType, target: TensorType, program: Mesh) -> ReshardStep | None:
    """A transfer of what is whole, or the reduce of what is partial to one rank of each process group."""
    if source.partial is None:
        return None if target.partial else ReshardStep("transfer", (), target=target)
    return next((change for change in _reduces(source, target, program) if change.target == target), None)


def _reduces(source: TensorType, target: TensorType, program: Mesh) -> Iterator[ReshardStep]:
    """A partial to the ranks at one place of their groups: the target where they are its ranks, else they keep the other mesh axes."""
    mesh, axes = source.mesh_in(program), partial_axes(source)
    kept = tuple((name, size) for name, size in mesh.axes if name not in axes)
    for root in range(mesh.size_of(axes)):
        owners = tuple(rank for rank in mesh.all_ranks if mesh.rank_in_group(rank, axes) == root)
        whole = replace(source, partial=None, mesh=Mesh(kept, owners))
        blocks = transfer(whole, target, program)
        is_target = not blocks.moved and set(blocks.sent) | set(blocks.received) <= {1} and target.mesh_in(program).size == len(owners)
        yield ReshardStep("reduce", axes, root=root, target=target if is_target else whole)


def _plan_across(source: TensorType, target: TensorType, program: Mesh) -> tuple[ReshardStep, ...] | None:
    """What is partial is reduced where it is: to one rank of each process group, or scattered as the target has it; then it is moved."""
    if target.partial:
        return None
    mesh, axes = source.mesh_in(program), partial_axes(source)
    copies = Fraction(mesh.size, mesh.size_of((*source.axes, *axes)))  # of each process group
    ways: list[tuple[Fraction, int, int, tuple[ReshardStep, ...]]] = []
    firsts = [ReshardStep("all_reduce", axes), *(ReshardStep("reduce_scatter", axes, i) for i in _scattered(source, target, program))]
    for first in (*firsts, *_reduces(source, target, program)):
        whole = first.applied(source)
        after = transfer(whole, target, program)
        steps = (first, *((ReshardStep("transfer", (), target=target),) if whole != target else ()))
        moved = copies * mesh.size_of(axes) * first.received(Fraction(1), mesh) + after.share  # in multiples of the tensor
        ways.append((moved, 1 + bool(after.moved), len(ways), steps))
    return min(ways)[-1]


def _scattered(source: TensorType, target: TensorType, program: Mesh) -> Iterator[int]:
    """The dims that the target splits, and of which the terms of a sum can be split as well without a rank going short."""
    ranks = source.mesh_in(program).size_of(partial_axes(source))
    for i, (dim, wanted) in enumerate(zip(source.dims, target.dims, strict=True)):
        split = ranks * source.mesh_in(program).size_of(dim.axes)
        is_even = int(dim.extent) % split == 0 if dim.extent.is_int else target.mesh_in(program).size_of(wanted.axes) % split == 0
        if is_even:
            yield i


def _held(type: TensorType, mesh: Mesh, sizes: Mapping[str, int]) -> Fraction:
    """Elements that a rank holds."""
    held = Fraction(1)
    for size in type.local_shape(mesh):
        factors = (sizes.get(factor, DEFAULT_SIZE) if isinstance(factor, str) else DEFAULT_SIZE for factor in size.factors)
        held *= Fraction(size.coefficient * prod(factors), size.divisor)
    return held


def _moves(now: TensorType, target: TensorType, mesh: Mesh) -> Iterator[ReshardStep]:
    """Every change that can be a step on the way to the target, on the same mesh."""
    mesh = now.mesh_in(mesh)
    if now.partial and target.partial and now.partial.op != target.partial.op:
        return
    open_axes = tuple(axis for axis in partial_axes(now) if axis not in partial_axes(target))
    free = tuple(axis for axis in target.axes if axis not in (*now.axes, *partial_axes(now)))

    def can_gain(i: int, axes: Axes) -> bool:
        """Blocks of a dim that some axes split unevenly are not those that more axes split further."""
        dim = now.dims[i]
        split = (*dim.axes, *axes)
        return divides(split, dim, mesh) or (not dim.axes and split == target.dims[i].axes)

    for i, dim in enumerate(now.dims):
        for axes in _orders(free):
            if can_gain(i, axes):
                yield ReshardStep("shard", axes, i)
        for axes in _orders(open_axes):
            if can_gain(i, axes):
                yield ReshardStep("reduce_scatter", axes, i)
        for inner in (dim.axes[k:] for k in range(len(dim.axes) if divides(dim.axes, dim, mesh) else 1)):
            yield ReshardStep("all_gather", inner, i)
            for j in range(len(now.dims)):
                if j != i and can_gain(j, inner):
                    yield ReshardStep("all_to_all", inner, i, j)
    if open_axes:
        yield ReshardStep("all_reduce", open_axes)
    yield from _permutes(now, target, mesh)


def _orders(axes: Axes) -> Iterator[Axes]:
    for count in range(len(axes)):
        yield from permutations(axes, count + 1)


def _permutes(now: TensorType, target: TensorType, mesh: Mesh) -> Iterator[ReshardStep]:
    """To the target, and to other orders of one dim's axes: every dim is split into as many blocks as before."""
    have, want = layout(now), layout(target)
    layouts = [(*have[:i], order, *have[i + 1 :]) for i, axes in enumerate(have) for order in permutations(axes)]
    if all(mesh.size_of(a) == mesh.size_of(b) for a, b in zip(have, want, strict=True)) and not set(partial_axes(now)) & set(target.axes):
        layouts.append(want)
    for axes in layouts:
        if axes != have:
            changed = [axis for a, b in zip(have, axes, strict=True) if a != b for axis in (*a, *b)]
            yield ReshardStep("collective_permute", tuple(dict.fromkeys(changed)), layout=axes)


def sources_of(change: ReshardStep, source: TensorType, mesh: Mesh) -> tuple[int, ...]:
    """For a collective permute: from which place in the process group each place gets its block, itself where it has it already."""
    assert change.layout is not None
    mesh = source.mesh_in(mesh)
    group = mesh.process_group(mesh.all_ranks[0], change.axes)
    have = [_block(mesh, rank, layout(source)) for rank in group]
    want = [_block(mesh, rank, change.layout) for rank in group]
    holders: dict[tuple[int, ...], list[int]] = {}
    for place, block in enumerate(have):
        if want[place] != block:
            holders.setdefault(block, []).append(place)
    return tuple(place if have[place] == block else holders[block].pop(0) for place, block in enumerate(want))


def _block(mesh: Mesh, rank: int, axes: Layout) -> tuple[int, ...]:
    """Which block of each dim a rank holds."""
    return tuple(mesh.rank_in_group(rank, a) for a in axes)
