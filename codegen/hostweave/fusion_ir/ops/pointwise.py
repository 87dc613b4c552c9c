"""Pointwise ops. Adding an entry with `_unary` or `_binary` also generates the public function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hostweave.base.signatures import named
from hostweave.fusion_ir.frontend.recording import BinaryOp, Unary, record
from hostweave.fusion_ir.index_map import IndexMap
from hostweave.fusion_ir.ir import Op, Scalar
from hostweave.fusion_ir.ops.attributes import OFFSET, VALUE
from hostweave.fusion_ir.ops.definition import Infer, Mismatch, OpDef, Types, broadcast, elementwise, require, same_dtype, unsharded
from hostweave.types.tensor import BOOLS, FLOATS, INTS, NUMBERS, SIGNED, TensorType, bool_, f32, u32

if TYPE_CHECKING:
    from hostweave.fusion_ir.frontend.trace import Tensor

OPS: dict[str, OpDef] = {}

_FAST_EXP = ("{std:exp}", "hw::fast_exp")
_WORDS = {FLOATS: "floats", SIGNED: "floats or signed ints", NUMBERS: "floats or ints", BOOLS: "bools", INTS: "ints", (): "any dtype"}
_EXAMPLES = {BOOLS: "bool", INTS: "i32"}


def _arithmetic(kinds: tuple[str, ...], is_comparison: bool = False) -> Infer:
    """Type rule: all operands have one dtype, of one of `kinds` (any if empty). The result has this dtype, or bool for a comparison."""

    def infer(types: Types, op: Op) -> TensorType:
        dtype = same_dtype(types)
        if kinds:
            require(types[0], kinds)
        return TensorType(bool_ if is_comparison else dtype, broadcast(types))

    return infer


def _unary(
    kind: str, doc: str, cpp: str = "", numpy: Callable[..., Any] | str = "", *, kinds: tuple[str, ...] = FLOATS, **facts: Any
) -> Unary:
    """Defines a unary op and its public function. `cpp` is by default the C function `kind`. `numpy` is the name of NumPy's
    function, if different from `kind`, or computes the op."""
    computed = numpy if callable(numpy) else lambda np, x: getattr(np, numpy or kind)(x)
    cpp = cpp or f"{{std:{kind}}}({{0}})"
    OPS[kind] = OpDef(1, _arithmetic(kinds), elementwise, computed, cpp=cpp, is_public=True, **facts)

    def function(x: Tensor) -> Tensor:
        return record(kind, x)

    also, raises = f"Also `{OPS[kind].written}`. " if OPS[kind].written else "", " Raises ProgramError for other dtypes." if kinds else ""
    given = f"{_EXAMPLES.get(kinds, 'f32')}[M, N]"
    doc = (
        f"{doc}\n\n{also}Takes {_WORDS[kinds]}. The result has the shape and dtype of x.{raises}\n\n"
        f"Example: for `x: {given}`, `hw.{kind}(x)` is `{given}`."
    )
    return named(function, kind, doc)


def _rounding(kind: str, doc: str, function: str) -> Unary:
    """Defines a rounding op by a C function. Ints do not change."""

    def rounded(np: Any, x: Any) -> Any:
        return x if x.dtype.kind in "iu" else getattr(np, kind)(x)

    return _unary(kind, doc, f"{{std:{function}}}({{0}})", rounded, kinds=NUMBERS, cpp_of_ints="{0}")


def _binary(
    kind: str, doc: str, cpp: str = "", kinds: tuple[str, ...] = NUMBERS, is_comparison: bool = False, numpy: str = "", **facts: Any
) -> BinaryOp:
    """Defines a binary op and its public function. `cpp` is by default the C function `kind`. `numpy` is the name of NumPy's function, if
    different from `kind`."""
    infer, cpp = _arithmetic(kinds, is_comparison), cpp or f"{{std:{kind}}}({{0}}, {{1}})"

    def computed(np: Any, a: Any, b: Any) -> Any:
        with np.errstate(divide="ignore"):  # no warning if ints are divided by 0, which gives 0
            return getattr(np, numpy or kind)(a, b)

    OPS[kind] = OpDef(2, infer, elementwise, computed, cpp=cpp, is_public=True, **facts)

    def function(a: Tensor | Scalar, b: Tensor | Scalar) -> Tensor:
        return record(kind, a, b)

    also, result = f"Also `{OPS[kind].written}`. " if OPS[kind].written else "", "The result is bool. " if is_comparison else ""
    given, kinds_text = _EXAMPLES.get(kinds, "f32"), f" ({_WORDS[kinds]})" if kinds else ""
    doc = (
        f"{doc}\n\n{also}a and b have the same dtype{kinds_text}. A Python number gets the dtype of the tensor.\n"
        f"Dims broadcast from the right. {result}Raises ProgramError if the dtypes or shapes do not fit.\n\n"
        f"Example: for `a: {given}[M, N]` and `b: {given}[N]`, `hw.{kind}(a, b)` is `{'bool' if is_comparison else given}[M, N]`."
    )
    return named(function, kind, doc)


def _of_float(function: Callable[[float], float]) -> Callable[..., Any]:
    return lambda np, x: np.vectorize(function, otypes=[np.float64])(x)


def _lgamma(x: float) -> float:
    is_pole = math.isinf(x) or (x <= 0 and x == math.trunc(x))
    return math.inf if is_pole or x > 1e300 else math.lgamma(x)


def _gelu(np: Any, x: Any) -> Any:
    return x / 2 * (1 + _of_float(math.erf)(np, x / np.sqrt(2)))


def _gelu_tanh(np: Any, x: Any) -> Any:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


add = _binary("add", "The sum.", "{0} + {1}", cpp_of_ints="hw::plus({0}, {1})", written="a + b", linear="terms")
subtract = _binary("subtract", "The difference.", "{0} - {1}", cpp_of_ints="hw::minus({0}, {1})", written="a - b", linear="terms")
multiply = _binary("multiply", "The product.", "{0} * {1}", cpp_of_ints="hw::times({0}, {1})", written="a * b", linear="factors")
divide = _binary("divide", "The quotient.", "{0} / {1}", kinds=FLOATS, prepared="hw::Divisor", cost=8, written="a / b", linear="first")
maximum = _binary("maximum", "The larger of two elements. NaN if either is NaN.", "({0} > {1} || {0} != {0}) ? {0} : {1}")
minimum = _binary("minimum", "The smaller of two elements. NaN if either is NaN.", "({0} < {1} || {0} != {0}) ? {0} : {1}")
floor_divide = _binary(
    "floor_divide",
    "The quotient rounded down. As in NumPy, an int divided by 0 gives 0, and the smallest int divided by -1 gives itself.",
    "hw::floor_divide({0}, {1})",
    cost=20,
    written="a // b",
)
remainder = _binary(
    "remainder",
    "The remainder of `floor_divide`, with the sign of b. As in NumPy, an int divided by 0 gives remainder 0.",
    "hw::remainder({0}, {1})",
    cost=20,
    written="a % b",
)
fmod = _binary(
    "fmod",
    "The remainder of the quotient rounded towards 0, with the sign of a. An int divided by 0 gives remainder 0.",
    "hw::fmod({0}, {1})",
    cost=20,
)
gcd = _binary("gcd", "The greatest common divisor, at least 0 unless it overflows.", "hw::gcd({0}, {1})", INTS, cost=200)
atan2 = _binary("atan2", "The angle of the point (b, a) in radians, from -pi to pi.", kinds=FLOATS, numpy="arctan2", cost=40)
hypot = _binary("hypot", "The hypotenuse sqrt(a * a + b * b), computed without overflow of the squares.", kinds=FLOATS, cost=30)
copysign = _binary("copysign", "The absolute value of a with the sign of b.", kinds=FLOATS)
OPS["pow"] = OpDef(
    2, _arithmetic(FLOATS), elementwise, lambda np, a, b: np.power(a, b), cpp="{std:pow}({0}, {1})", cost=60, written="a ** b"
)

negative = _unary("negative", "The negation.", "-{0}", cpp_of_ints="hw::minus(0, {0})", kinds=SIGNED, written="-x", linear="first")
abs = _unary(
    "abs",
    "The absolute value.",
    "{std:fabs}({0})",
    cpp_of_ints="{0} > 0 ? {0} : hw::minus(0, {0})",
    kinds=SIGNED,
    written="abs(x)",
)
reciprocal = _unary("reciprocal", "The reciprocal, 1 / x.", "{T:1} / {0}", lambda np, x: 1 / x, cost=8)
exp = _unary("exp", "The exponential function.", fast=_FAST_EXP, cost=16)
expm1 = _unary("expm1", "exp(x) - 1, accurate for x near 0.", cost=30)
exp2 = _unary("exp2", "The power of 2 with exponent x.", cost=16)
log1p = _unary("log1p", "The natural logarithm of 1 + x, accurate for x near 0.", cost=30)
log2 = _unary("log2", "The logarithm to the base 2.", cost=16)
log10 = _unary("log10", "The logarithm to the base 10.", cost=16)
log = _unary("log", "The natural logarithm.", cost=16)
sqrt = _unary("sqrt", "The square root.", cost=12)
rsqrt = _unary("rsqrt", "The reciprocal square root, 1 / sqrt(x).", "{T:1} / {std:sqrt}({0})", lambda np, x: 1 / np.sqrt(x), cost=20)
sin = _unary("sin", "The sine of an angle in radians.", cost=30)
cos = _unary("cos", "The cosine of an angle in radians.", cost=30)
tan = _unary("tan", "The tangent of an angle in radians.", cost=40)
# NumPy 1 has only those names of inverse functions that begin with `arc`.
asin = _unary("asin", "The arc sine, in radians from -pi/2 to pi/2.", numpy="arcsin", cost=30)
acos = _unary("acos", "The arc cosine, in radians from 0 to pi.", numpy="arccos", cost=30)
atan = _unary("atan", "The arc tangent, in radians from -pi/2 to pi/2.", numpy="arctan", cost=30)
sinh = _unary("sinh", "The hyperbolic sine.", cost=30)
cosh = _unary("cosh", "The hyperbolic cosine.", cost=30)
asinh = _unary("asinh", "The inverse of the hyperbolic sine.", numpy="arcsinh", cost=40)
acosh = _unary("acosh", "The inverse of the hyperbolic cosine.", numpy="arccosh", cost=40)
atanh = _unary("atanh", "The inverse of the hyperbolic tangent.", numpy="arctanh", cost=40)
tanh = _unary("tanh", "The hyperbolic tangent.", cost=30)
erf = _unary("erf", "The error function.", numpy=_of_float(math.erf), fast=("{std:erf}", "hw::fast_erf"), cost=30)
erfc = _unary("erfc", "The complementary error function, 1 - erf(x), accurate for results near 0.", numpy=_of_float(math.erfc), cost=30)
lgamma = _unary("lgamma", "The logarithm of the absolute value of the gamma function.", "hw::log_gamma({0})", _of_float(_lgamma), cost=100)
sigmoid = _unary(
    "sigmoid",
    "The sigmoid function, 1 / (1 + exp(-x)).",
    "{T:1} / ({T:1} + {std:exp}(-{0}))",
    lambda np, x: 1 / (1 + np.exp(-x)),
    fast=("{T:1} / ({T:1} + {std:exp}(-{0}))", "hw::fast_sigmoid({0})"),
    cost=25,
)
relu = _unary("relu", "The rectified linear unit, max(x, 0).", "{0} < {T:0} ? {T:0} : {0}", lambda np, x: np.maximum(x, 0), kinds=NUMBERS)
silu = _unary(
    "silu",
    "The sigmoid linear unit (swish), x * sigmoid(x).",
    "{0} / ({T:1} + {std:exp}(-{0}))",
    lambda np, x: x / (1 + np.exp(-x)),
    fast=("/ ({T:1} + {std:exp}(-{0}))", "* hw::fast_sigmoid({0})"),
    cost=25,
)
floor = _rounding("floor", "The largest integer that is at most x.", "floor")
ceil = _rounding("ceil", "The smallest integer that is at least x.", "ceil")
trunc = _rounding("trunc", "The integer part: x rounded towards 0.", "trunc")
round = _rounding("round", "The nearest integer, with ties to even.", "rint")
sign = _unary(
    "sign",
    "The sign: -1, 0 or 1 if x is negative, zero or positive. NaN for NaN.",
    "{0} > {T:0} ? {T:1} : {0} < {T:0} ? {T:-1} : {0} + {T:0}",  # sign(-0.0) is 0.0
    kinds=NUMBERS,
    cpp_of_ints="({0} > 0) - ({0} < 0)",
    cost=3,
)
OPS["gelu"] = OpDef(1, _arithmetic(FLOATS), elementwise, _gelu, cpp="hw::gelu({0})", fast=("hw::gelu", "hw::fast_gelu"), cost=30)
OPS["gelu_tanh"] = OpDef(
    *(1, _arithmetic(FLOATS), elementwise, _gelu_tanh),
    cpp="{0} / ({T:1} + {std:exp}({T:-1.5957691216057308} * ({0} + {T:0.044715} * {0} * {0} * {0})))",
    fast=_FAST_EXP,
    cost=30,
)

# --- comparisons and logic --------------------------------------------------------------------------------------------

equal = _binary("equal", "True if a is equal to b.", "{0} == {1}", kinds=(), is_comparison=True, rounds_operands=True, written="a == b")
not_equal = _binary(
    "not_equal", "True if a differs from b.", "{0} != {1}", kinds=(), is_comparison=True, rounds_operands=True, written="a != b"
)
less = _binary("less", "True if a is less than b.", "{0} < {1}", kinds=(), is_comparison=True, written="a < b")
less_equal = _binary("less_equal", "True if a is at most b.", "{0} <= {1}", kinds=(), is_comparison=True, written="a <= b")
greater = _binary("greater", "True if a is greater than b.", "{0} > {1}", kinds=(), is_comparison=True, written="a > b")
greater_equal = _binary("greater_equal", "True if a is at least b.", "{0} >= {1}", kinds=(), is_comparison=True, written="a >= b")
logical_and = _binary("logical_and", "The logical and.", "{0} && {1}", kinds=BOOLS, written="a & b")
logical_or = _binary("logical_or", "The logical or.", "{0} || {1}", kinds=BOOLS, written="a | b")
logical_xor = _binary("logical_xor", "The logical exclusive or.", "{0} != {1}", kinds=BOOLS, written="a ^ b")
logical_not = _unary("logical_not", "The logical negation.", "!{0}", kinds=BOOLS, written="~x")
bitwise_and = _binary("bitwise_and", "The bitwise and.", "{0} & {1}", kinds=INTS, written="a & b")
bitwise_or = _binary("bitwise_or", "The bitwise or.", "{0} | {1}", kinds=INTS, written="a | b")
bitwise_xor = _binary("bitwise_xor", "The bitwise exclusive or.", "{0} ^ {1}", kinds=INTS, written="a ^ b")
bitwise_invert = _unary("bitwise_invert", "The bitwise complement.", "~{0}", lambda np, x: ~x, kinds=INTS, written="~x")
bitwise_left_shift = _binary(
    "bitwise_left_shift",
    "The bits of a, shifted left by b. The result is 0 if b is negative or not less than the number of bits.",
    "hw::left_shift({0}, {1})",
    kinds=INTS,
    written="a << b",
)
bitwise_right_shift = _binary(
    "bitwise_right_shift",
    "The bits of a, shifted right by b. The new bits equal the sign bit, or 0 for unsigned ints. If b is negative or not less than the\n"
    "number of bits, all bits are new.",
    "hw::right_shift({0}, {1})",
    kinds=INTS,
    written="a >> b",
)


def _where(types: Types, op: Op) -> TensorType:
    if types[0].dtype != bool_:
        raise Mismatch(f"the condition must be bool, not {types[0]}; compare it first")
    return TensorType(same_dtype(types[1:]), broadcast(types))


OPS["where"] = OpDef(3, _where, elementwise, lambda np, c, a, b: np.where(c, a, b), cpp="{0} ? {1} : {2}")

# --- casts, copies, indices and random numbers ------------------------------------------------------------------------


def _astype(types: Types, op: Op) -> TensorType:
    return TensorType(op.result.type.dtype, unsharded(types[0]).dims)


def _made_anywhere(types: Types, op: Op) -> tuple[TensorType, Types]:
    return op.result.type, ()


def _iota(types: Types, op: Op) -> TensorType:
    require(op.result.type, INTS)
    if len(op.result.type.dims) != 1:
        raise Mismatch(f"iota makes a vector, not {op.result.type}; make a vector and add dims with hw.expand_dims")
    return unsharded(op.result.type)


def _philox(types: Types, op: Op) -> TensorType:
    if same_dtype(types) != u32:
        raise Mismatch(f"counters and keys are u32, not {types[0]}; use hw.astype")
    return TensorType(f32, broadcast(types))


def philox(np: Any, i: Any, j: Any, k: Any, m: Any, seed: Any, draw: Any) -> Any:
    """Uniform numbers in [0, 1), multiples of 2^-24, from the first output word of Philox with counter (i, j, k, m) and key (seed, draw).

    Source: Philox 4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    c0, c1, c2, c3, k0, k1 = (np.asarray(word, np.uint64) for word in (i, j, k, m, seed, draw))
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & 0xFFFFFFFF, (left >> 32) ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return (c0 >> 8) * 2.0**-24


OPS["astype"] = OpDef(1, _astype, elementwise, lambda np, x, dtype: x.astype(dtype), target="dtype", cpp="{0}", cost=0, linear="first")
copy = _unary(
    "copy",
    "Copies the values of x to a new buffer. An input cannot be streamed (`.stream(...)`), but a copy of it can.",
    "{0}",
    kinds=(),
    cost=0,
    makes="copied",
    linear="first",
)
OPS["iota"] = OpDef(
    0,
    _iota,
    lambda types, op: IndexMap((), ("i0",)),
    lambda np, shape, dtype, offset=0: np.arange(offset, offset + shape[0], dtype=dtype),
    (OFFSET,),
    target="type",
    cost=0,
    stated=_made_anywhere,
)
OPS["fill"] = OpDef(
    0,
    lambda types, op: unsharded(op.result.type),
    elementwise,
    lambda np, shape, dtype, value=0.0: np.full(shape, value, dtype),
    (VALUE,),
    target="type",
    stated=_made_anywhere,
)
OPS["philox"] = OpDef(6, _philox, elementwise, philox, cpp="hw::philox({0}, {1}, {2}, {3}, {4}, {5})", cost=100)
