"""Linears whose products are of 8-bit floats with scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hostweave.base.errors import ProgramError, did_you_mean
from hostweave.torch.graph import modules_of, op_of
from hostweave.torch.ops import ops
from hostweave.torch.plan import Layouts, matching

SCALINGS = ("row", "tensor", "block")


def scaled_linears(fp8: str | Mapping[str, str], module: nn.Module, layouts: Layouts) -> dict[str, str]:
    """The scales of linears by their paths: of those that the plan names, or that patterns name. Raises ProgramError."""
    linears = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    if isinstance(fp8, str):
        found = {name: fp8 for name in linears if f"{name}.weight" in layouts.parameters}
        if not found:
            raise ProgramError(f'fp8={fp8!r}: the plan states the weight of no linear; state one, or write fp8={{"*_proj": "{fp8}"}}')
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
    """After it the linears at these paths are scaled ones."""
    for node in graph.nodes:
        paths = modules_of(node)
        if node.op == "call_function" and op_of(node) == "linear.default" and paths and paths[-1] in linears:
            x, weight, *bias = node.args
            given: tuple[Any, ...] = (x, weight, bias[0] if bias else node.kwargs.get("bias"), linears[paths[-1]])
            node.target, node.args, node.kwargs = ops.scaled_linear.default, given, {}
