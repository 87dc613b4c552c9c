"""Refuses calls in transforms, tracers and modes of torch, which do not see the ops of a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.parameter import is_lazy

from hostweave.base.errors import ArgumentError

_REMEDY = "apply the transform to the original module, or compile with training=True and call backward()"


def expect_eager(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ArgumentError in a transform of torch.func, in a tracer, and for tensors with a tangent of forward-mode derivatives."""
    if peek_interpreter_stack() is not None or any(map(is_legacy_batchedtensor, tensors)):
        why = "torch.vmap, torch.func.jvp, is_grads_batched=True and similar transforms do not see the ops of a compiled module"
    elif forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        why = "a tensor has a tangent, but forward-mode derivatives are not compiled"
    elif get_proxy_mode() is not None or torch._C._get_tracing_state() is not None:
        why = "torch.export, make_fx and torch.jit.trace do not see the ops of a compiled module"
        raise ArgumentError(f"{name}: {why}; trace the original module, or register its program by hostweave.torch.as_torch_op")
    else:
        return
    raise ArgumentError(f"{name}: {why}; {_REMEDY}")


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def inference_tensor(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Error text for the first tensor that was created in torch.inference_mode(), or that a lazy module has not created yet, or ""."""
    for name, tensor in tensors:
        if is_lazy(tensor):
            return f"{name} has no shape yet; call the lazy module once before compile"
        if tensor.is_inference():
            return f"{name} was created in torch.inference_mode(), so autograd cannot use it; create it outside, or pass its clone()"
    return ""
