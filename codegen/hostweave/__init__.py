"""Hostweave compiles multi-device tensor programs into C++ host programs. See README.md."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hostweave.base import errors as errors
from hostweave.base.environment import warn_of_misspelt
from hostweave.base.errors import UnknownAttribute, closest_word
from hostweave.base.forks import importing
from hostweave.base.interrupts import interruptibly
from hostweave.base.signatures import public_names
from hostweave.fusion_ir.frontend import attention as _attention
from hostweave.fusion_ir.frontend import composites as _composites
from hostweave.fusion_ir.frontend import contractions as _contractions
from hostweave.fusion_ir.frontend import experts as _experts
from hostweave.fusion_ir.frontend import functions as _functions
from hostweave.fusion_ir.frontend import indices as _indices
from hostweave.fusion_ir.frontend.remedies import word_for
from hostweave.fusion_ir.frontend.trace import Tensor as Tensor
from hostweave.fusion_ir.frontend.tracing import block as block
from hostweave.fusion_ir.frontend.tracing import fusion as fusion
from hostweave.fusion_ir.frontend.user_kernels import kernel as kernel
from hostweave.fusion_ir.ir import Fusion as Fusion
from hostweave.options import Options as Options
from hostweave.types.machine import Machine as Machine
from hostweave.types.machine import Network as Network
from hostweave.types.mesh import Mesh as Mesh
from hostweave.types.tensor import DType as _DType
from hostweave.types.tensor import bf16 as bf16
from hostweave.types.tensor import bool_ as bool_
from hostweave.types.tensor import f8e4m3 as f8e4m3
from hostweave.types.tensor import f8e5m2 as f8e5m2
from hostweave.types.tensor import f16 as f16
from hostweave.types.tensor import f32 as f32
from hostweave.types.tensor import f64 as f64
from hostweave.types.tensor import i8 as i8
from hostweave.types.tensor import i16 as i16
from hostweave.types.tensor import i32 as i32
from hostweave.types.tensor import i64 as i64
from hostweave.types.tensor import u8 as u8
from hostweave.types.tensor import u16 as u16
from hostweave.types.tensor import u32 as u32
from hostweave.types.tensor import u64 as u64

bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2 = bf16, f16, f32, f64, f8e4m3, f8e5m2
bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64 = bool_, i8, i16, i32, i64, u8, u16, u32, u64

__version__ = "0.1.0"
sys.modules[f"{__name__}.errors"] = errors  # for `from hostweave.errors import ProgramError`

if TYPE_CHECKING:
    from hostweave.api import Program as Program
    from hostweave.api import compile as compile
    from hostweave.fusion_ir.frontend.attention import *  # noqa: F403
    from hostweave.fusion_ir.frontend.composites import *  # noqa: F403
    from hostweave.fusion_ir.frontend.contractions import *  # noqa: F403
    from hostweave.fusion_ir.frontend.experts import *  # noqa: F403
    from hostweave.fusion_ir.frontend.functions import *  # noqa: F403
    from hostweave.fusion_ir.frontend.indices import *  # noqa: F403
    from hostweave.host_ir.ir import HostProgram as HostProgram
    from hostweave.runtime.group import Group as Group
    from hostweave.runtime.group import init as init
    from hostweave.runtime.providers import MPI as MPI
    from hostweave.runtime.providers import Communicators as Communicators
    from hostweave.runtime.providers import Environment as Environment
    from hostweave.runtime.providers import Threads as Threads
    from hostweave.runtime.providers import TorchStore as TorchStore

_LAZY = {
    "hostweave.api": ("Program", "compile"),
    "hostweave.host_ir.ir": ("HostProgram",),
    "hostweave.runtime.group": ("Group", "init"),
    "hostweave.runtime.providers": ("MPI", "Communicators", "Environment", "Threads", "TorchStore"),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a module of `_LAZY` at the first use of one of its names, so that `import hostweave` is fast."""
    if name not in _MODULE_OF:
        raise _unknown(name)
    return getattr(interruptibly(lambda: _imported(_MODULE_OF[name])), name)


def _imported(module: str) -> ModuleType:
    with importing:
        return import_module(module)


def _call_of_torch(_: type[Tensor], function: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Implements a torch function that gets a tensor of a fusion."""
    return _imported("hostweave.torch.functions").call(function, args, kwargs or {})


Tensor.__torch_function__ = classmethod(_call_of_torch)  # type: ignore[attr-defined]


def __dir__() -> list[str]:
    return _PUBLIC


def _unknown(name: str) -> AttributeError:
    if name.startswith("_"):
        return AttributeError(f"module 'hostweave' has no attribute {name!r}")
    if name.startswith("complex"):
        remedy = "there are no complex numbers: keep real and imaginary part in two tensors of float32"
    elif name in dir(errors):
        remedy = f"use hw.errors.{name}"
    else:
        remedy = word_for(name) or closest_word(name, _PUBLIC) or "dir(hw) lists the names"
    return UnknownAttribute.here(f"hw.{name}: hostweave has no {name}; {remedy}")


_OWN = ("Fusion", "Machine", "Mesh", "Network", "Options", "Tensor", "block", "errors", "fusion", "kernel", *_MODULE_OF)
_DTYPES = (name for name, value in list(globals().items()) if isinstance(value, _DType))
_MODULES = (_functions, _attention, _composites, _contractions, _experts, _indices)
_FUNCTIONS = {name: vars(module)[name] for module in _MODULES for name in public_names(vars(module))}
globals().update(_FUNCTIONS)
_PUBLIC = sorted((*_OWN, *_DTYPES, *_FUNCTIONS))
warn_of_misspelt()
if not TYPE_CHECKING:  # a type checker reads the names from the imports
    __all__ = _PUBLIC
