"""The field of integers modulo a prime. Elements are stored as uint64. Sums and products are exact, so their order does not matter."""

import threading
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[np.uint64]

PRIME = 2**26 - 5  # The sum of 4096 products of two elements fits in 64 bits.
P = np.uint64(PRIME)
ZERO, ONE = np.uint64(0), np.uint64(1)
_MAX_TERMS = 2**12  # maximum number of products of which a sum is exact: in 64 bits, or in f64 if one factor is half an element
_HALF = np.uint64(13)  # bits of half an element; an element has 26 bits
_LOW = np.uint64(2**13 - 1)
_HALVES = 2.0**13
_FEW_TERMS = 16  # maximum number of terms per sum for which NumPy's loops are faster than BLAS
_FEW_PRODUCTS = 2**14  # maximum number of multiplications for which NumPy's loops are faster, with up to _MAX_TERMS terms per sum
_LONG = 64  # least length of a contiguous dim for which the loops of einsum are faster than the loops of matmul
_MAX_COPIED = 1000  # maximum number of elements for which new arrays are faster than in-place operations
_FEW = 20  # maximum number of elements for which `inverse` is faster with Python's `pow` than with products of arrays
_EXPONENTS = 1200  # exceeds the magnitude of every exponent of f64


@cache
def _powers_of_two() -> Elements:
    return np.array([pow(2, e, PRIME) for e in range(-_EXPONENTS, _EXPONENTS)], np.uint64)


def of_floats(x: NDArray[Any]) -> Elements:
    """Exact elements for f64 numbers, which are integers times powers of two. 0 for a number that is not finite."""
    mantissa, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    whole = np.ldexp(mantissa, 53).astype(np.int64) % PRIME
    elements: Elements = whole.astype(np.uint64) * _powers_of_two()[exponent + (_EXPONENTS - 53)] % P
    return elements


def of_integers(x: NDArray[Any]) -> Elements:
    if x.dtype == np.uint64:
        return x % P
    return (x.astype(np.int64) % PRIME).astype(np.uint64)


# After glibc has freed an array of this size, later arrays up to this size reuse freed memory. New pages would take longer than the
# arithmetic.
np.empty(2**25 - 2**16, np.uint8)

_scratch = threading.local()


def _scratch_like(x: Elements) -> Elements:
    """Memory for an intermediate result, which the next call reuses. An allocation would take longer than the arithmetic."""
    if getattr(_scratch, "size", 0) < x.size:
        _scratch.size, _scratch.memory = x.size, np.empty(x.size, np.uint64)
    memory: Elements = _scratch.memory[: x.size].reshape(x.shape)
    return memory


def reduced(x: Any) -> Elements:
    """Reduces 64-bit numbers modulo the prime. Overwrites `x` if it has more than `_MAX_COPIED` elements. NumPy's remainder takes longer
    than a division and a product."""
    if x.size <= _MAX_COPIED:
        elements: Elements = x % P
        return elements
    multiples = np.floor_divide(x, P, out=_scratch_like(x))
    multiples *= P
    x -= multiples
    return x  # type: ignore[no-any-return]


def sum_of(x: Elements, y: Elements) -> Elements:
    return _below_prime(x + y)


def _below_prime(total: Elements) -> Elements:
    if total.size <= _MAX_COPIED:
        smaller: Elements = np.minimum(total, total - P)  # A number below 0 wraps around.
        return smaller
    np.minimum(total, np.subtract(total, P, out=_scratch_like(total)), out=total)
    return total


def product_of(x: Elements, y: Elements) -> Elements:
    return reduced(x * y)


def negative(x: Elements) -> Elements:
    return _below_prime(P - x)


def inverse(x: Elements) -> Elements:
    """Inverse of x, and 0 for 0: x to the power of PRIME - 2 = 8 (2^23 - 1) + 1."""
    if x.size <= _FEW:
        return np.array([pow(number, PRIME - 2, PRIME) for number in x.ravel().tolist()], np.uint64).reshape(x.shape)
    ones = {1: x}  # n -> x to the power of 2^n - 1
    for more, n in ((1, 1), (2, 2), (1, 4), (5, 5), (1, 10), (11, 11), (1, 22)):
        ones[n + more] = product_of(_squared(ones[n], more), ones[more])
    return product_of(_squared(ones[23], 3), x)


def _squared(x: Elements, times: int) -> Elements:
    for _ in range(times):
        x = product_of(x, x)
    return x


def matmul(x: Elements, y: Elements) -> Elements:
    """Product of matrices with the same number of leading dims."""
    rows, inner, columns = *x.shape[-2:], y.shape[-1]
    if inner <= _FEW_TERMS or (inner <= _MAX_TERMS and rows * inner * columns <= _FEW_PRODUCTS):
        along = -1 if columns >= inner else -2  # the longer dim of y
        is_long = max(columns, inner) >= _LONG and x.strides[-1] == y.strides[along] == y.itemsize
        return reduced(np.einsum("...ik,...kj->...ij", x, y) if is_long else np.matmul(x, y))
    total = np.zeros((), np.uint64)
    right = y.astype(np.float64)
    for start in range(0, inner, _MAX_TERMS):  # Sums of _MAX_TERMS products of a half and an element are exact in f64.
        terms = slice(start, start + _MAX_TERMS)
        high, low = ((half[..., terms]).astype(np.float64) @ right[..., terms, :] for half in (x >> _HALF, x & _LOW))
        _reduce_whole(high)
        high *= _HALVES
        high += low
        _reduce_whole(high)
        total = total + high.astype(np.uint64)
    return total if inner <= _MAX_TERMS else total % P


def _reduce_whole(x: NDArray[np.float64]) -> None:
    """Reduces integers below 2^53 modulo the prime. The rounding error of the quotient is below 1 / P, so its floor is exact."""
    multiples = x / PRIME
    np.floor(multiples, out=multiples)
    multiples *= PRIME
    x -= multiples


def hashed(word: str, *elements: Elements) -> Elements:
    """A random function of the elements; `word` selects the function. Equal elements give equal results."""
    h: Any = _seed(word)
    for each in elements:
        h = _mixed((each + h) * np.uint64(0x9E3779B97F4A7C15))
    return reduced(h)


@cache
def _seed(word: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(word.encode(), digest_size=8).digest()))


def _mixed(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
