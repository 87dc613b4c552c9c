"""Index maps label the dims of an op, like the subscripts of einsum."""

from dataclasses import dataclass

from hostweave.types.size import Size

Labels = tuple[str | None, ...]
SymbolicShape = tuple[Size, ...]

ONE = Size()


@dataclass(frozen=True)
class IndexMap:
    """Labels of the dims of an op's operands and result. Dims with the same label share an iteration index.

    The map of a matmul is `(b0, m, k), (b0, k, n) -> (b0, m, n)`. A label that is missing in the result is reduced, unless it is in
    `unwalked`. A dim without a label (None) has one element, or cannot be sharded, such as a dim that the op slices, pads or concatenates.

    - `outer`: labels of dims that ranks can split, but chunk loops cannot. An example is the outermost of dims that a reshape merges.
    - `blocks`: labels of dims that the op processes in blocks, with the number of blocks. Only n ranks can split a dim of n blocks, one
      block per rank.
    - `unwalked`: labels of dims whose elements the op chooses by index, or needs all at once. An op with unwalked labels is never in a
      chunk loop.
    """

    operands: tuple[Labels, ...]
    result: Labels
    outer: frozenset[str] = frozenset()
    blocks: tuple[tuple[str, int], ...] = ()
    unwalked: frozenset[str] = frozenset()

    def operand_dim(self, operand: int, result_dim: int) -> int | None:
        """Dim of an operand with the label of dim `result_dim` of the result. None if a loop over `result_dim` needs the whole operand, or
        is impossible."""
        label = self.result[result_dim]
        if label is None or label in self.outer or self.unwalked or label not in self.operands[operand]:
            return None
        return self.operands[operand].index(label)


def groups(source: SymbolicShape, target: SymbolicShape) -> list[tuple[list[int], list[int]]]:
    """Splits a reshape into independent reshapes of adjacent dims: [M, 8] to [M, 2, 4] gives ([0], [0]) and ([1], [1, 2]). Dims of size 1
    are paired with each other or omitted."""
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
        ratio = have.divided_by(want)  # a symbolic ratio counts as larger than 1
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


def broadcasts(shape: SymbolicShape, to: SymbolicShape) -> bool:
    """True if `shape`, aligned from the right, broadcasts to the shape `to`."""
    tail = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(have in (want, ONE) for have, want in zip(shape, tail, strict=True))


def aligned(shape: SymbolicShape, result: SymbolicShape, labels: Labels) -> Labels:
    """Labels of dims that are aligned with the result from the right. A broadcast dim has no label."""
    if shape == result:
        return labels
    skipped = len(result) - len(shape)
    return tuple(None if size != result[i] else labels[i] for i, size in enumerate(shape, skipped))
