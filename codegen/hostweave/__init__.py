"""Hostweave compiles multi-device tensor programs into C++ host programs. See README.md."""

from importlib import import_module
from time import time_ns
from typing import TYPE_CHECKING, Any

from hostweave.fusion.block import block
from hostweave.fusion.composites import (
    dropout,
    layer_norm,
    linear,
    log_softmax,
    rms_norm,
    rotary_embedding,
    scaled_dot_product_attention,
    softmax,
    uniform,
)
from hostweave.fusion.functions import (
    abs,
    add,
    argmax,
    broadcast_to,
    cast,
    clamp,
    concat,
    copy,
    cos,
    div,
    equal,
    erf,
    exchange,
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
    mul,
    neg,
    not_equal,
    pad,
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
    sub,
    sum,
    tanh,
    transpose,
    var,
    where,
)
from hostweave.fusion.ir import Fusion
from hostweave.fusion.trace import Tensor, fusion
from hostweave.fusion.types import Mesh, bf16, bool_, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u8, u32
from hostweave.fusion.user_kernels import kernel
from hostweave.options import Options

if TYPE_CHECKING:
    from hostweave.api import Program, compile
    from hostweave.host.ir import HostProgram
    from hostweave.runtime.group import Group, init
    from hostweave.runtime.providers import MPI, Communicators, Environment, Threads, TorchStore

imported_at = time_ns()  # a file of the package that was edited later may run here as it was before
_LAZY = {
    "hostweave.api": ("Program", "compile"),
    "hostweave.host.ir": ("HostProgram",),
    "hostweave.runtime.group": ("Group", "init"),
    "hostweave.runtime.providers": ("MPI", "Communicators", "Environment", "Threads", "TorchStore"),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    """What tracing does not need is imported when it is first used: importing hostweave stays quick."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hostweave' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


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
    "bf16",
    "block",
    "bool_",
    "broadcast_to",
    "cast",
    "clamp",
    "compile",
    "concat",
    "copy",
    "cos",
    "div",
    "dropout",
    "equal",
    "erf",
    "exchange",
    "exp",
    "expand_dims",
    "f8e4m3",
    "f8e5m2",
    "f16",
    "f32",
    "f64",
    "fusion",
    "gelu",
    "greater",
    "greater_equal",
    "i8",
    "i32",
    "i64",
    "init",
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
    "mul",
    "neg",
    "not_equal",
    "pad",
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
    "sub",
    "sum",
    "tanh",
    "transpose",
    "u8",
    "u32",
    "uniform",
    "var",
    "where",
]
