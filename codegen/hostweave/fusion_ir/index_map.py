"""Index maps: the iteration index of each dim of an op, as in einsum. Propagation, loops and lowering know ops only through these."""

from dataclasses import dataclass

from hostweave.types.size import Size

Labels = tuple[str | None, ...]
SymbolicShape = tuple[Size, ...]

ONE = Size()


@dataclass(frozen=True)
class IndexMap:
    """Labels of an op's dims. Dims of operands and result with the same label share an iteration index.

    The map of a matmul is `(b0, m, k), (b0, k, n) -> (b0, m, n)`. A label that the result lacks is reduced. The label None marks a dim of
    one element that is broadcast, new, or kept after a reduction. It also marks a dim that is cut or joined, which a rank needs completely.

    - `outer`: labels that join only the outermost parts of dims that a reshape splits or merges. They allow a sharding, but not a loop.
    - `blocks`: labels of dims whose blocks change places, with the number of blocks. That many ranks can share the dim, one block each.
    - `unwalked`: labels of dims that no loop can iterate over: data decide which elements are accessed, or all elements are needed at once.
      Only kernels can compute such ops, not loops over chunks.
    """

    operands: tuple[Labels, ...]
    result: Labels
    outer: frozenset[str] = frozenset()
    blocks: tuple[tuple[str, int], ...] = ()
    unwalked: frozenset[str] = frozenset()

    def shared_by(self, label: str, ranks: int) -> bool:
        """True if `ranks` ranks can share the dims of a label."""
        return dict(self.blocks).get(label, ranks) == ranks

    def operand_dim(self, operand: int, result_dim: int) -> int | None:
        """Dim of an operand that shares its index with a dim of the result. None if a loop needs the whole operand."""
        label = self.result[result_dim]
        if label is None or label in self.outer or self.unwalked or label not in self.operands[operand]:
            return None
        return self.operands[operand].index(label)


def groups(source: SymbolicShape, target: SymbolicShape) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dims in both shapes that hold the same elements. Dims of 1 pair with each other or are omitted."""
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


def _group(source: SymbolicShape, target: SymbolicShape, i: int, j: int) -> tuple[list[int], list[int], int, int]:
    left: list[int] = []
    right: list[int] = []
    have = want = ONE
    while (i < len(source) or j < len(target)) and (not left or have != want):
        ratio = have.divided_by(want)  # symbols count as large
        is_larger = ratio is not None and (bool(ratio.factors) or ratio.coefficient > ratio.divisor)
        if j == len(target) or (i < len(source) and not is_larger):
            have, i = have * source[i], i + 1
            left.append(i - 1)
        else:
            want, j = want * target[j], j + 1
            right.append(j - 1)
    return [n for n in left if source[n] != ONE], [n for n in right if target[n] != ONE], i, j


def numbered(shape: SymbolicShape, letter: str = "i") -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(len(shape)))


def aligned(shape: SymbolicShape, result: SymbolicShape, labels: Labels) -> Labels:
    """Labels of dims aligned from the right. A dim of 1 next to a larger one is broadcast."""
    skipped = len(result) - len(shape)
    return tuple(None if size != result[i] else labels[i] for i, size in enumerate(shape, skipped))
