"""Index maps: which iteration index each dim of an op has, as in einsum. Propagation, loops and lowering use nothing else of an op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostweave.types.size import Size

Labels = tuple[str | None, ...]
Shape = tuple[Size, ...]

ONE = Size()


@dataclass(frozen=True)
class IndexMap:
    """Dims of the operands and of the result that carry the same label are the same iteration index.

    matmul is `(b0, m, k), (b0, k, n) -> (b0, m, n)`. None is a dim of one element that is broadcast, new or kept after
    a reduction, or one that is cut or joined, so that a rank needs all of it. A label that the result lacks is reduced.
    A label in `outer` joins only the outermost parts of two dims that a reshape splits or merges: enough for a sharding,
    not for a loop. So does one in `blocks`, of a dim whose blocks change places: as many ranks can share it, a block each.
    """

    operands: tuple[Labels, ...]
    result: Labels
    outer: frozenset[str] = frozenset()
    blocks: tuple[tuple[str, int], ...] = ()

    def shared_by(self, label: str, ranks: int) -> bool:
        """Whether this many ranks can share the dims of a label."""
        return dict(self.blocks).get(label, ranks) == ranks

    def operand_dim(self, operand: int, result_dim: int) -> int | None:
        """The dim of an operand that a loop over a dim of the result walks in step, or None where it is used whole."""
        label = self.result[result_dim]
        if label is None or label in self.outer or label not in self.operands[operand]:
            return None
        return self.operands[operand].index(label)


def elementwise(shapes: Sequence[Shape], result: Shape) -> IndexMap:
    """Dims aligned from the right; an operand's dim of 1 beside a larger one is broadcast."""
    labels = _numbered(result)
    return IndexMap(tuple(_aligned(shape, result, labels) for shape in shapes), labels)


def contraction(a: Shape, b: Shape, result: Shape) -> IndexMap:
    """matmul: batch dims aligned from the right, then (m, k), (k, n) -> (m, n)."""
    batch, labels = result[:-2], _numbered(result[:-2], "b")
    return IndexMap(
        ((*_aligned(a[:-2], batch, labels), "m", "k"), (*_aligned(b[:-2], batch, labels), "k", "n")),
        (*labels, "m", "n"),
    )


def reduction(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> IndexMap:
    labels = _numbered(shape)
    kept: Labels = tuple(None if i in axes else label for i, label in enumerate(labels))
    return IndexMap((labels,), kept if keepdims else tuple(label for i, label in enumerate(labels) if i not in axes))


def permutation(order: tuple[int, ...]) -> IndexMap:
    """Dim i of the result is dim `order[i]` of the operand."""
    return IndexMap((tuple(f"i{i}" for i in range(len(order))),), tuple(f"i{i}" for i in order))


def insertion(rank: int, axes: tuple[int, ...]) -> IndexMap:
    """New dims of one element at `axes` of the result."""
    labels = iter(tuple(f"i{i}" for i in range(rank)))
    return IndexMap((tuple(f"i{i}" for i in range(rank)),), tuple(None if i in axes else next(labels) for i in range(rank + len(axes))))


def cut(rank: int, axis: int, keeps_dim: bool) -> IndexMap:
    """Indices of one dim are taken; the dim stays with those, or goes where it is one."""
    labels: Labels = tuple(None if i == axis else f"i{i}" for i in range(rank))
    return IndexMap((labels,), labels if keeps_dim else (*labels[:axis], *labels[axis + 1 :]))


def joined(operands: int, rank: int, axes: tuple[int, ...]) -> IndexMap:
    """Operands that lie in one result, one after the other or inside it along `axes`."""
    labels: Labels = tuple(None if i in axes else f"i{i}" for i in range(rank))
    return IndexMap((labels,) * operands, labels)


def blocks_permuted(rank: int, axis: int, blocks: int) -> IndexMap:
    """The blocks of one dim change places."""
    labels = tuple(f"i{i}" for i in range(rank))
    return IndexMap((labels,), labels, frozenset((labels[axis],)), ((labels[axis], blocks),))


def regrouping(source: Shape, target: Shape) -> IndexMap:
    """reshape: a dim that stays keeps its label; of dims that are split or merged the outermost keep it, in `outer`."""
    have: list[str | None] = [None] * len(source)
    want: list[str | None] = [None] * len(target)
    outer = set()
    for number, (left, right) in enumerate(groups(source, target)):
        if left and right:
            have[left[0]] = want[right[0]] = label = f"i{number}"
            if len(left) > 1 or len(right) > 1:
                outer.add(label)
    return IndexMap((tuple(have),), tuple(want), frozenset(outer))


def groups(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """The runs of dims of both shapes that hold the same elements, smallest first; dims of 1 pair with each other or are left out."""
    result: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        if i < len(source) and j < len(target) and source[i] == target[j]:
            result.append(([i], [j]))
            i, j = i + 1, j + 1
        elif i < len(source) and source[i] == ONE:
            i += 1
        elif j < len(target) and target[j] == ONE:
            j += 1
        else:
            left, right, i, j = _group(source, target, i, j)
            result.append((left, right))
    return result


def _group(source: Shape, target: Shape, i: int, j: int) -> tuple[list[int], list[int], int, int]:
    left: list[int] = []
    right: list[int] = []
    have = want = ONE
    while (i < len(source) or j < len(target)) and (not left or have != want):
        grow_left = j == len(target) or (i < len(source) and not _larger(have, want))
        if grow_left:
            have, i = have * source[i], i + 1
            left.append(i - 1)
        else:
            want, j = want * target[j], j + 1
            right.append(j - 1)
    return [n for n in left if source[n] != ONE], [n for n in right if target[n] != ONE], i, j


def _larger(a: Size, b: Size) -> bool:
    """Whether a / b is known to be more than one. Names count as large."""
    ratio = a.divided_by(b)
    return ratio is not None and (bool(ratio.factors) or ratio.coefficient > ratio.divisor)


def _numbered(shape: Shape, letter: str = "i") -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(len(shape)))


def _aligned(shape: Shape, result: Shape, labels: Labels) -> Labels:
    skipped = len(result) - len(shape)
    return tuple(None if extent != result[i] else labels[i] for i, extent in enumerate(shape, skipped))
