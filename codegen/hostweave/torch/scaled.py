"""Linears in scaled 8-bit floats: those of `fp8=`, and those of transformers with quantised weights."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hostweave.base.errors import ProgramError, did_you_mean
from hostweave.fusion_ir.ops.scaled import SCALINGS
from hostweave.torch.nodes import modules_of, op_of
from hostweave.torch.ops import ops
from hostweave.torch.plan import Layouts, matching
from hostweave.torch.replaced import Replacement


def scaled_linears(fp8: str | Mapping[str, str], module: nn.Module, layouts: Layouts) -> dict[str, str]:
    """Maps the path of each linear that `fp8` selects to the scaling of the linear."""
    linears = {name: submodule for name, submodule in module.named_modules() if isinstance(submodule, nn.Linear)}
    if isinstance(fp8, str):
        found = {name: fp8 for name in linears if f"{name}.weight" in layouts.parameters}
        if not found:
            raise ProgramError(f'fp8={fp8!r}: the plan states no weight of a linear; add one, or write fp8={{"*_proj": "{fp8}"}}')
    elif isinstance(fp8, Mapping) and all(isinstance(pattern, str) for pattern in fp8):
        found = {name: scaling for pattern, scaling in fp8.items() for name in matching(pattern, linears, "linears", "fp8")}
    else:
        raise ProgramError(f'fp8={fp8!r} is neither one of {", ".join(SCALINGS)} nor a dict of names; write fp8={{"q_proj": "row"}}')
    for name, scaling in found.items():
        if scaling not in SCALINGS:
            raise ProgramError(f"fp8: {name}: there is no scaling {scaling!r}; {did_you_mean(str(scaling), SCALINGS)}")
        if linears[name].weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ProgramError(f"fp8: the weight of {name} is of {linears[name].weight.dtype}; use bfloat16, float16 or float32")
    return found


def scale_linears(graph: torch.fx.Graph, linears: Mapping[str, str]) -> None:
    for node in graph.nodes:
        paths = modules_of(node)
        if node.op == "call_function" and op_of(node) == "linear.default" and paths and paths[-1] in linears:
            x, weight, *bias = node.args
            given: tuple[Any, ...] = (x, weight, bias[0] if bias else node.kwargs.get("bias"), linears[paths[-1]])
            node.target, node.args, node.kwargs = ops.scaled_linear.default, given, {}


def quantized_linears(module: nn.Module) -> Iterator[Replacement]:
    """Yields replacements for `forward` of transformers' linears with 8-bit weights. One op replaces calls of Triton kernels."""
    for of in {type(submodule) for submodule in module.modules()}:
        if (forward := _FORWARD.get(f"{of.__module__}.{of.__qualname__}")) is not None:
            yield of, "forward", forward


def _finegrained(linear: Any, x: torch.Tensor) -> Any:
    """FP8Linear of transformers: one scale per 128 elements of activations, and per 128 x 128 elements of weights. A plain linear if the
    weight is not in 8 bits."""
    if linear.weight.element_size() > 1:
        return nn.functional.linear(x, linear.weight, linear.bias)
    scale, block = linear.weight_scale_inv, linear.block_size
    if linear.activation_scale is not None:
        raise _refused(linear, "the checkpoint stores scales of activations", "use a checkpoint whose activation_scheme is dynamic")
    if block is None or tuple(block) != (128, 128):
        raise _refused(linear, f"its scales are for blocks of {block}", "use blocks of 128 x 128")
    if scale.dtype != torch.float32:
        raise _refused(linear, f"its scales are {scale.dtype}", "convert them to torch.float32")
    return ops.quantized_linear(x, linear.weight, scale, linear.bias, None, "block")


def _fbgemm(linear: Any, x: torch.Tensor) -> Any:
    """FbgemmFp8Linear of transformers: one scale per row of x and of the weight. `input_scale_ub` bounds the row maximum of |x|."""
    scale = linear.weight_scale.to(torch.float32)
    return ops.quantized_linear(x, linear.weight, scale, linear.bias, linear.input_scale_ub, "row")


def _refused(linear: nn.Module, why: str, remedy: str) -> ProgramError:
    return ProgramError(f"{linear} with 8-bit weights is not supported: {why}; {remedy}")


_FORWARD: dict[str, Callable[..., torch.Tensor]] = {
    "transformers.integrations.finegrained_fp8.FP8Linear": _finegrained,
    "transformers.integrations.fbgemm_fp8.FbgemmFp8Linear": _fbgemm,
}
