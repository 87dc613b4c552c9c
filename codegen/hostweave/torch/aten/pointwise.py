"""ATen ops that compute each element from one element of each operand."""

import math
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch

import hostweave as hw
from hostweave.torch.aten.table import TABLE, Number, Result, aten, cast, common_dtype, full, refuse

_SAME_NAME = """
exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc lgamma
sigmoid relu silu floor ceil trunc round
"""


def _unary(function: Callable[[hw.Tensor], hw.Tensor], result: Result, x: hw.Tensor) -> hw.Tensor:
    return cast(function(cast(x, result.dtype)), result.dtype)


def _abs(x: hw.Tensor) -> hw.Tensor:
    return x if x.dtype.kind == "uint" else hw.abs(x)


def _sign(x: hw.Tensor) -> hw.Tensor:
    if x.dtype == hw.bool_:
        return x
    return hw.where(x != x, 0, hw.sign(x)) if x.dtype.kind == "float" else hw.sign(x)


for _name, _function in {
    **{name: getattr(hw, name) for name in _SAME_NAME.split()},
    **{"abs": _abs, "neg": hw.negative, "sign": _sign, "bitwise_not": operator.invert},
}.items():
    TABLE[f"{_name}.default"] = partial(_unary, _function)


TABLE |= {
    "logical_not.default": lambda result, x: hw.logical_not(x if x.dtype == hw.bool_ else x != 0),
    "isnan.default": lambda result, x: x != x,
    "isinf.default": lambda result, x: hw.abs(x) == math.inf if x.dtype.kind == "float" else x != x,
    "signbit.default": lambda result, x: hw.copysign(1.0, x) < 0 if x.dtype.kind == "float" else x & ~x if x.dtype == hw.bool_ else x < 0,
    **dict.fromkeys(
        ("_to_copy.default", "to.dtype", "_assert_tensor_metadata.default", "prims.convert_element_type.default"),
        lambda result, x, *_, **__: cast(x, result.dtype) if result.dtypes else None,
    ),
    **dict.fromkeys(
        ("clone.default", "alias.default", "detach.default", "hostweave.detach.default", "contiguous.default", "lift_fresh_copy.default"),
        lambda result, x, **_: x,
    ),
}
TABLE["gelu.default"] = lambda result, x, approximate="none": hw.gelu(x, approximate)


_OF_BOOLS: dict[Any, Any] = {operator.add: operator.or_, operator.mul: operator.and_}


def _operand(x: Any, dtype: torch.dtype) -> Any:
    """Casts an operand. A Python int wraps around in an integer dtype, as in torch."""
    made = cast(x, dtype)
    if type(made) is not int:
        return made
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return (made - low) % (high - low + 1) + low


def _binary(function: Callable[[Any, Any], hw.Tensor], result: Result, a: Any, b: Any, alpha: Number = 1) -> Any:
    a, b = _operand(a, result.dtype), _operand(b, result.dtype)
    function = _OF_BOOLS.get(function, function) if result.dtype == torch.bool else function
    return cast(function(a, b if alpha == 1 else b * alpha), result.dtype)


for _name, _function in {
    "add": operator.add,
    "mul": operator.mul,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "remainder": operator.mod,
    "fmod": hw.fmod,
    "ldexp": lambda a, b: a * hw.exp2(b),
    "copysign": hw.copysign,
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), operator.lshift),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), operator.rshift),
    "bitwise_xor": operator.xor,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
}.items():
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(partial(_binary, _function))
TABLE["lcm.default"] = partial(_binary, lambda a, b: _abs(a // hw.gcd(a, b) * b))
for _name in ("atan2", "hypot", "gcd"):
    TABLE[f"{_name}.default"] = partial(_binary, getattr(hw, _name))


def _of_two(of_numbers: Callable[[Any, Any], Any], of_bools: Callable[[Any, Any], Any], skips_nan: bool, a: Any, b: Any) -> Any:
    """Maximum or minimum of two elements. With `skips_nan`, the result is NaN only if both elements are NaN."""
    a, b = (a, b) if isinstance(a, hw.Tensor) else (b, a)
    if a.dtype == hw.bool_:
        return of_bools(a, b)
    made = of_numbers(a, b)
    if skips_nan and a.dtype.kind == "float":
        made = hw.where(a != a, b, made if not isinstance(b, hw.Tensor) else hw.where(b != b, a, made))
    return made


for _skips, _names in ((False, ("maximum", "minimum")), (True, ("fmax", "fmin"))):
    TABLE[f"{_names[0]}.default"] = partial(_binary, partial(_of_two, hw.maximum, operator.or_, _skips))
    TABLE[f"{_names[1]}.default"] = partial(_binary, partial(_of_two, hw.minimum, operator.and_, _skips))


@aten("clamp.default", "clamp.Tensor")
def _clamped(result: Result, x: hw.Tensor, min: Any = None, max: Any = None) -> hw.Tensor:
    x, low, high = (cast(one, result.dtype) for one in (x, min, max))
    if x.dtype != hw.bool_:
        return hw.clip(x, low, high)
    x = x if low is None else x | low
    return x if high is None else x & high


@aten("hardtanh.default")
def _hardtanh(result: Result, x: hw.Tensor, min: Number = -1, max: Number = 1) -> hw.Tensor:
    return _clamped(result, x, min, max) if result.dtype.is_floating_point else _clamped(result, x, int(min), int(max))


def _scaled(function: Callable[[Any, Any], Any], result: Result, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    x, a, b, value = (cast(one, result.dtype) for one in (x, a, b, value))
    return x + (function(a, b) if isinstance(value, Number) and value == 1 else value * function(a, b))


TABLE |= {
    "addcmul.default": partial(_scaled, operator.mul),
    "addcdiv.default": partial(_scaled, operator.truediv),
    **dict.fromkeys(
        ("lerp.Scalar", "lerp.Tensor"),
        lambda result, a, b, weight: cast(a, result.dtype) + cast(weight, result.dtype) * (cast(b, result.dtype) - cast(a, result.dtype)),
    ),
}


def _int_pow(a: Any, exponent: hw.Tensor) -> hw.Tensor:
    """Power by repeated squaring, as in torch: products wrap around, and a negative exponent gives 0, unless the base is 1 or -1."""
    base = a if isinstance(a, hw.Tensor) else exponent * 0 + int(a)
    made, rest, square = base * 0 + exponent * 0 + 1, exponent, base
    is_signed = exponent.dtype.kind == "int"
    for _ in range(exponent.dtype.itemsize * 8 - is_signed):
        made = hw.where((rest & 1) == 1, made * square, made)
        rest, square = rest >> 1, square * square
    if not is_signed:
        return made
    odd = (exponent & 1) == 1
    inverse = hw.where(base == 1, 1, hw.where(base == -1, hw.where(odd, base, 1), base * 0))
    return hw.where(exponent < 0, inverse, made)


def _pow(a: Any, b: Any) -> Any:
    """Uses sqrt, rsqrt and reciprocal for the same exponents as torch, because (-inf)^0.5 is inf, but sqrt(-inf) is NaN."""
    exponent = b if not isinstance(b, float) else int(b) if b.is_integer() else b
    if isinstance(exponent, int) and exponent >= 0 and isinstance(a, hw.Tensor) and a.dtype.kind != "float":
        factors = [a] * exponent or [a * 0 + 1]
        return reduce(operator.mul, factors)
    if isinstance(exponent, hw.Tensor) and exponent.dtype.kind != "float":
        return _int_pow(a, exponent)
    if isinstance(exponent, hw.Tensor) or exponent not in (0.5, -0.5, -1):
        return a**exponent
    return {0.5: hw.sqrt, -0.5: hw.rsqrt, -1: hw.reciprocal}[exponent](a)


aten("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")(partial(_binary, _pow))


@aten("round.decimals")
def _round(result: Result, x: hw.Tensor, decimals: int = 0) -> hw.Tensor:
    scale = float(10 ** abs(decimals))
    return hw.round(x * scale) / scale if decimals >= 0 else hw.round(x / scale) * scale


@aten("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "floor_divide.default")
def _div(result: Result, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    a, b = _operand(a, result.dtype), _operand(b, result.dtype)
    if not result.dtype.is_floating_point or rounding_mode == "floor":
        return (a - hw.fmod(a, b)) // b if rounding_mode == "trunc" else a // b
    return hw.trunc(a / b) if rounding_mode == "trunc" else a / b


def _comparison(function: Callable[[Any, Any], hw.Tensor], result: Result, a: Any, b: Any) -> hw.Tensor:
    dtype = common_dtype(a, b)
    return function(_operand(a, dtype), _operand(b, dtype))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(partial(_comparison, getattr(operator, _name)))


def _logical(function: Callable[..., hw.Tensor], result: Result, *given: Any) -> hw.Tensor:
    return function(*(bool(x) if isinstance(x, Number) else x if x.dtype == hw.bool_ else x != 0 for x in given))


for _name in ("logical_and", "logical_or", "logical_xor"):
    TABLE[f"{_name}.default"] = partial(_logical, getattr(hw, _name))


@aten("where.self", "where.Scalar")
def _where(result: Result, condition: hw.Tensor, a: Any, b: Any) -> hw.Tensor:
    a, b = _operand(a, result.dtype), _operand(b, result.dtype)
    if not isinstance(condition, hw.Tensor):  # a constant with one element
        return full(result, a if condition else b)
    if not isinstance(a, hw.Tensor) and not isinstance(b, hw.Tensor):
        b = full(Result((result.dtype,), ((1,) * condition.ndim,), condition), b)
    return hw.where(condition, a, b)


@aten("dropout.default")
def _no_dropout(result: Result, x: hw.Tensor, p: float, train: bool | None = True) -> hw.Tensor:
    """Returns x, or raises ProgramError in training if p is not 0. In modules, `hostweave.dropout` replaces this op."""
    if train and p:
        raise refuse(f"dropout with p={p} of a tensor of a fusion has no seed; use hw.dropout(x, {p}, seed)")
    return x


TABLE["native_dropout.default"] = lambda result, x, p, train=True: (_no_dropout(result, x, p, train),)
