"""Index maps: which iteration index each dim of an op has, as in einsum. Propagation, loops and lowering use nothing else of an op."""

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
    A label in `unwalked` is of dims that no loop walks: the elements of an operand say where they are read or written, or all of them
    are taken together. An op that has such is walked by kernels alone, not by loops over chunks.
    """

    operands: tuple[Labels, ...]
    result: Labels
    outer: frozenset[str] = frozenset()
    blocks: tuple[tuple[str, int], ...] = ()
    unwalked: frozenset[str] = frozenset()

    def shared_by(self, label: str, ranks: int) -> bool:
        """Whether this many ranks can share the dims of a label."""
        return dict(self.blocks).get(label, ranks) == ranks

    def operand_dim(self, operand: int, result_dim: int) -> int | None:
        """The dim of an operand that a loop over a dim of the result walks in step, or None where it is used whole."""
        label = self.result[result_dim]
        if label is None or label in self.outer or self.unwalked or label not in self.operands[operand]:
            return None
        return self.operands[operand].index(label)


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
        ratio = have.divided_by(want)  # names count as large
        is_larger = ratio is not None and (bool(ratio.factors) or ratio.coefficient > ratio.divisor)
        if j == len(target) or (i < len(source) and not is_larger):
            have, i = have * source[i], i + 1
            left.append(i - 1)
        else:
            want, j = want * target[j], j + 1
            right.append(j - 1)
    return [n for n in left if source[n] != ONE], [n for n in right if target[n] != ONE], i, j


def numbered(shape: Shape, letter: str = "i") -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(len(shape)))


def aligned(shape: Shape, result: Shape, labels: Labels) -> Labels:
    """Dims aligned from the right; a dim of 1 beside a larger one is broadcast."""
    skipped = len(result) - len(shape)
    return tuple(None if size != result[i] else labels[i] for i, size in enumerate(shape, skipped))
