"""Hostweave compiles multi-device tensor programs into C++ host programs. See README.md."""

from difflib import get_close_matches
from importlib import import_module
from time import time_ns
from typing import TYPE_CHECKING, Any

from hostweave.base import errors
from hostweave.base.errors import Location, UnknownAttribute
from hostweave.fusion_ir.frontend.block import block
from hostweave.fusion_ir.frontend.composites import (
    dropout,
    layer_norm,
    linear,
    log_softmax,
    rms_norm,
    rotary_embedding,
    scaled_dot_product_attention,
    softmax,
    uniform,
    var,
)
from hostweave.fusion_ir.frontend.functions import (
    abs,
    add,
    argmax,
    astype,
    broadcast_to,
    clip,
    collective_permute,
    concat,
    copy,
    cos,
    divide,
    equal,
    erf,
    exp,
    expand_dims,
    gelu,
    greater,
    greater_equal,
    iota,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    matmul,
    max,
    maximum,
    mean,
    min,
    minimum,
    multiply,
    negative,
    not_equal,
    pad,
    permute_dims,
    pow,
    prod,
    reciprocal,
    relu,
    reshape,
    reshard,
    rsqrt,
    sigmoid,
    silu,
    sin,
    sqrt,
    subtract,
    sum,
    tanh,
    where,
)
from hostweave.fusion_ir.frontend.trace import Tensor, fusion
from hostweave.fusion_ir.frontend.user_kernels import kernel
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import bf16, bool_, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u8, u32
from hostweave.types.tensor import bf16 as bfloat16
from hostweave.types.tensor import bool_ as bool
from hostweave.types.tensor import f8e4m3 as float8_e4m3fn
from hostweave.types.tensor import f8e5m2 as float8_e5m2
from hostweave.types.tensor import f16 as float16
from hostweave.types.tensor import f32 as float32
from hostweave.types.tensor import f64 as float64
from hostweave.types.tensor import i8 as int8
from hostweave.types.tensor import i32 as int32
from hostweave.types.tensor import i64 as int64
from hostweave.types.tensor import u8 as uint8
from hostweave.types.tensor import u32 as uint32

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hostweave.api import Program, compile
    from hostweave.host_ir.ir import HostProgram
    from hostweave.runtime.group import Group, init
    from hostweave.runtime.providers import MPI, Communicators, Environment, Threads, TorchStore

imported_at = time_ns()  # a file of the package that was edited later may run here as it was before
_LAZY = {
    "hostweave.api": ("Program", "compile"),
    "hostweave.host_ir.ir": ("HostProgram",),
    "hostweave.runtime.group": ("Group", "init"),
    "hostweave.runtime.providers": ("MPI", "Communicators", "Environment", "Threads", "TorchStore"),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    """What tracing does not need is imported when it is first used: importing hostweave stays quick."""
    if name not in _MODULE_OF:
        raise _unknown(name)
    return getattr(import_module(_MODULE_OF[name]), name)


def _unknown(name: str) -> AttributeError:
    """What to write for a name that is not here."""
    if name.startswith("_"):
        return AttributeError(f"module 'hostweave' has no attribute {name!r}")
    if name.startswith("complex"):
        remedy = "there are no complex numbers: keep real and imaginary part in two tensors of float32"
    else:
        near = get_close_matches(name, __all__, 1)
        remedy = f"did you mean {near[0]}?" if near else "the names are in hostweave.__all__"
    return UnknownAttribute(f"hw.{name}: hostweave has no {name}; {remedy}", Location.of_caller())


__all__ = [
    "MPI",
    "Communicators",
    "Environment",
    "Fusion",
    "Group",
    "HostProgram",
    "Mesh",
    "Options",
    "Program",
    "Tensor",
    "Threads",
    "TorchStore",
    "abs",
    "add",
    "argmax",
    "astype",
    "bf16",
    "bfloat16",
    "block",
    "bool",
    "bool_",
    "broadcast_to",
    "clip",
    "collective_permute",
    "compile",
    "concat",
    "copy",
    "cos",
    "divide",
    "dropout",
    "equal",
    "erf",
    "errors",
    "exp",
    "expand_dims",
    "f8e4m3",
    "f8e5m2",
    "f16",
    "f32",
    "f64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "fusion",
    "gelu",
    "greater",
    "greater_equal",
    "i8",
    "i32",
    "i64",
    "init",
    "int8",
    "int32",
    "int64",
    "iota",
    "kernel",
    "layer_norm",
    "less",
    "less_equal",
    "linear",
    "log",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "multiply",
    "negative",
    "not_equal",
    "pad",
    "permute_dims",
    "pow",
    "prod",
    "reciprocal",
    "relu",
    "reshape",
    "reshard",
    "rms_norm",
    "rotary_embedding",
    "rsqrt",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "sin",
    "softmax",
    "sqrt",
    "subtract",
    "sum",
    "tanh",
    "u8",
    "u32",
    "uint8",
    "uint32",
    "uniform",
    "var",
    "where",
]
