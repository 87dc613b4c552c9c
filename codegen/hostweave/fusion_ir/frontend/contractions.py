"""einsum and tensordot: sums of products over any dims, computed by matmuls where operands share a summed dim."""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import reduce
from typing import NoReturn

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend import functions as hw
from hostweave.fusion_ir.frontend.recording import Axis, dim_of, record
from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.types.size import product

DimLabels = tuple[Hashable, ...]  # one per dim; dims with equal labels share an index


@checked
def einsum(subscripts: str, *operands: Tensor) -> Tensor:
    """Sum of products, as in numpy.einsum. `subscripts` has one letter per dim of each operand, then the letters of the result.

    Letters that are missing in the result are summed over. Without `->` the result has the letters that occur once, in alphabetical order.
    More than two operands are multiplied from left to right.

    One matmul contracts all summed letters that two operands share. The dtypes of this matmul are as in `hw.matmul`. If a contracted dim is
    sharded, the result is a partial sum.

    Raises ProgramError if `subscripts` is invalid or does not fit the operands. An ellipsis, and a letter that occurs twice in one operand,
    are not supported.

    Example: `x: bf16[S, B@dp, E]` and `dy: bf16[S, B@dp, F]` give `bf16[E, F]` by `hw.einsum("sbe,sbf->ef", x, dy)`.
    """
    terms, result = _parsed(subscripts, operands)
    sizes: dict[str, object] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, operand.type.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                why = f"{letter} has size {sizes[letter]}, but size {size} in {operand.type}"
                raise ProgramError.here(f"einsum: {subscripts!r}: {why}; dims with the same letter must have equal sizes")
    (total, labels), *others = ((operand, tuple(term)) for operand, term in zip(operands, terms, strict=True))
    while others:
        (right, of_right), *others = others
        needed = {*result, *(letter for _, other in others for letter in other)}
        kept = tuple(letter for letter in dict.fromkeys((*labels, *of_right)) if letter in needed)
        total, labels = _product(total, labels, right, of_right, kept if others else tuple(result)), kept if others else tuple(result)
    return _arranged(total, labels, tuple(result))


@checked
def tensordot(a: Tensor, b: Tensor, axes: int | tuple[Axis | Sequence[Axis], Axis | Sequence[Axis]] = 2) -> Tensor:
    """Sum of products over some dims of a and b, as in numpy.tensordot. The result has all dims that are not summed: dims of a, then dims
    of b.

    If `axes` is a number n, the last n dims of a are paired with the first n dims of b. Otherwise `axes` has dims of a, and dims of b in
    the same order, by index or name. One matmul contracts all paired dims, if there are any. The dtypes of this matmul are as in
    `hw.matmul`. If a contracted dim is sharded, the result is a partial sum.

    Raises ProgramError if paired dims differ in size, or if `axes` does not pair dims of a with dims of b.

    Example: `x: f32[S, B@dp, E]` and `dy: f32[S, B@dp, F]` give `f32[E, F]` by `hw.tensordot(x, dy, ((0, 1), (0, 1)))`.
    """
    if isinstance(axes, int):
        if isinstance(axes, bool) or not 0 <= axes <= min(a.ndim, b.ndim):
            why = f"axes={axes} of {a.type} and {b.type}"
            raise ProgramError.here(f"tensordot: {why}: pass a number from 0 to the smaller number of dims, or name the dims of each")
        axes = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    if not isinstance(axes, tuple | list) or len(axes) != 2:
        raise ProgramError.here(f"tensordot: axes={axes!r} is neither a number nor a pair; write ((0, 1), (0, 1))")
    of_a, of_b = (
        [dim_of(x, axis, "tensordot") for axis in (given if isinstance(given, tuple | list) else (given,))]
        for x, given in zip((a, b), axes, strict=True)
    )
    if len(of_a) != len(of_b) or len(set(of_a)) < len(of_a) or len(set(of_b)) < len(of_b):
        why = f"axes={axes!r} do not pair dims of {a.type} with those of {b.type}"
        raise ProgramError.here(f"tensordot: {why}; name the same number of dims in both, each once")
    for i, j in zip(of_a, of_b, strict=True):
        if a.type.shape[i] != b.type.shape[j]:
            why = f"dim {i} of {a.type} and dim {j} of {b.type} differ"
            raise ProgramError.here(f"tensordot: {why}; contracted dims must have equal sizes")
    left: DimLabels = tuple(f"a{i}" for i in range(a.ndim))
    right: DimLabels = tuple(left[of_a[of_b.index(j)]] if j in of_b else f"b{j}" for j in range(b.ndim))
    return _product(a, left, b, right, tuple(label for label in (*left, *right) if (label in left) != (label in right)))


def _parsed(subscripts: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    def fail(why: str) -> NoReturn:
        raise ProgramError.here(f"einsum: {subscripts!r}: {why}")

    if not isinstance(subscripts, str):
        fail("not a string; write the letters of each operand and of the result, such as 'ij,jk->ik'")
    if "." in subscripts:
        fail("an ellipsis is not supported; write a letter for each dim")
    given, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = given.split(",")
    if not all(letter.isalpha() and letter.isascii() for letter in "".join((*terms, result))):
        fail("it may contain only letters, commas and one arrow; write it like 'ij,jk->ik'")
    if len(terms) != len(operands):
        fail(f"{len(terms)} terms for {len(operands)} operands; write one for each")
    for term, operand in zip(terms, operands, strict=True):
        if not isinstance(operand, Tensor):
            fail(f"{operand!r} is not a tensor of this fusion; make it an input")
        if len(term) != operand.ndim:
            fail(f"{term!r} has {len(term)} letters, but {operand.type} has {operand.ndim} dims; write one for each")
        if len(set(term)) < len(term):
            fail(f"{term!r} has a letter twice; a diagonal is not supported")
    counts = Counter("".join(terms))
    result = result if arrow else "".join(sorted(letter for letter, count in counts.items() if count == 1))
    if unknown := sorted(set(result) - set(counts)):
        fail(f"no operand has {unknown[0]}, but the result does; remove the letter")
    if len(set(result)) < len(result):
        fail(f"the result {result!r} has a letter twice; name it once")
    return terms, result


def _product(a: Tensor, of_a: DimLabels, b: Tensor, of_b: DimLabels, result: DimLabels) -> Tensor:
    a, of_a = _summed(a, of_a, {*of_b, *result})
    b, of_b = _summed(b, of_b, {*of_a, *result})
    batch = tuple(label for label in result if label in of_a and label in of_b)
    rows, columns = (tuple(label for label in result if label in labels and label not in batch) for labels in (of_a, of_b))
    inner = tuple(label for label in of_a if label in of_b and label not in batch)
    a, b = _arranged(a, of_a, (*batch, *rows, *inner)), _arranged(b, of_b, (*batch, *inner, *columns))
    if not inner:
        spread = hw.expand_dims(b, tuple(range(len(batch), len(batch) + len(rows)))) if rows else b
        made = (hw.expand_dims(a, tuple(range(a.ndim, a.ndim + len(columns)))) if columns else a) * spread
        return _arranged(made, (*batch, *rows, *columns), result)
    shape = b.type.shape[b.ndim - len(columns) :]
    if len(columns) > 1:
        b = hw.reshape(b, *b.type.shape[: b.ndim - len(columns)], product(shape))
    b = hw.expand_dims(b, b.ndim) if not columns else b
    b = hw.expand_dims(b, tuple(range(len(batch), len(batch) + len(rows) - 1))) if batch and len(rows) > 1 else b
    a = hw.expand_dims(a, len(batch)) if not rows else a
    made = record("matmul", a, b, contracted=len(inner) if len(inner) > 1 else None)
    ones = [*([len(batch)] if not rows else []), *([made.ndim - 1] if not columns else [])]
    made = reduce(lambda x, dim: x[(slice(None),) * dim + (0,)], reversed(ones), made)
    if len(columns) > 1:
        made = hw.reshape(made, *made.type.shape[:-1], *shape)
    return _arranged(made, (*batch, *rows, *columns), result)


def _summed(x: Tensor, labels: DimLabels, kept: set[Hashable]) -> tuple[Tensor, DimLabels]:
    axes = tuple(i for i, label in enumerate(labels) if label not in kept)
    return (hw.sum(x, axis=axes) if axes else x), tuple(label for label in labels if label in kept)


def _arranged(x: Tensor, labels: DimLabels, result: DimLabels) -> Tensor:
    """Permutes the dims to the order of `result`, and sums over all other dims."""
    x, labels = _summed(x, labels, set(result))
    order = tuple(labels.index(label) for label in result)
    return x if order == tuple(range(x.ndim)) else hw.permute_dims(x, order)
