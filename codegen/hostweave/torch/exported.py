"""A module as a graph of ATen ops on global tensors, by torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, default_decompositions, export
from torch.fx import Graph

from hostweave.base.errors import ProgramError
from hostweave.torch.ops import ops

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


def exported(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None, training: bool = False
) -> ExportedProgram:
    """The graph of the module for these inputs, functional and in core ATen but for `KEPT`. Raises ProgramError.

    With `training` what has no gradient, by detach() or in torch.no_grad(), is marked by ops.
    """
    try:
        with torch.set_grad_enabled(training), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # which torch.export raises of its own code
            program = export(module, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False)
            if training:
                _mark_detached(program.graph)
            decompositions = default_decompositions()
            for op in list(decompositions):
                if str(op).split(".")[1] in KEPT:
                    del decompositions[op]
            made: ExportedProgram = program.run_decompositions(decompositions)
            return made
    except ProgramError:
        raise
    except Exception as error:  # torch.export raises errors of many kinds, which name the line of the module
        why = str(error).strip()
        raise ProgramError(
            f"{type(module).__name__}: torch.export: {why}; write what depends on data as tensor ops (torch.where), and pass "
            "example_inputs that the module takes"
        ) from error


def _mark_detached(graph: Graph) -> None:
    """Has an op, which decompositions keep, where values lose their gradients."""
    for node in list(graph.nodes):
        name = str(node.target)
        if name in ("aten.detach.default", "aten.detach_.default"):
            node.target = ops.detach.default
        elif name == "wrap_with_set_grad_enabled" and node.args[0] is False:
            for made in list(node.users):
                with graph.inserting_after(made):
                    marked = graph.call_function(ops.detach.default, (made,))
                marked.meta = dict(made.meta)
                made.replace_all_uses_with(marked, delete_user_cb=lambda user, own=marked: user is not own)
