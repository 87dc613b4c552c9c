"""A module as a graph of ATen ops on global tensors, by torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, default_decompositions, export

from hostweave.base.errors import ProgramError

# Ops that stay as they are written: one op here, or a composite that the compiler knows.
KEPT = [
    "linear",
    "scaled_dot_product_attention",
    "layer_norm",
    "rms_norm",
    "gelu",
    "silu",
    "softmax",
    "log_softmax",
    "matmul",
    "embedding",
    "cross_entropy_loss",
    "conv2d",
    "dropout",
    "split",
    "chunk",
    "stack",
    "cumsum",
    "one_hot",
]


def exported(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None) -> ExportedProgram:
    """The graph of the module for these inputs, functional and in core ATen but for `KEPT`. Raises ProgramError."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # which torch.export raises of its own code
            program = export(module, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False)
            decompositions = default_decompositions()
            for op in list(decompositions):
                if str(op).split(".")[1] in KEPT:
                    del decompositions[op]
            return _without_empty_parts(program.run_decompositions(decompositions))
    except ProgramError:
        raise
    except Exception as error:  # torch.export raises errors of many kinds, which name the line of the module
        why = str(error).strip()
        raise ProgramError(
            f"{type(module).__name__}: torch.export: {why}; write what depends on data as tensor ops (torch.where), and pass "
            "example_inputs that the module takes"
        ) from error


def _without_empty_parts(program: ExportedProgram) -> ExportedProgram:
    """The same; what is concatenated has elements: x[..., n:] has none where a rotary embedding covers all n features of a head."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        tensors, *dim = node.args
        node.args = ([t for t in tensors if not any(isinstance(n, int) and n == 0 for n in t.meta["val"].shape)], *dim)
    program.graph.eliminate_dead_code()
    return program
