"""Compiles the programs of an exported module."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hostweave.api import Program
from hostweave.api import compile as compile_program
from hostweave.options import Options, options_of
from hostweave.torch.bound import BoundProgram
from hostweave.torch.compiled import CompiledModule
from hostweave.torch.exported import Exported
from hostweave.torch.graph import Graph, expect_unchecked, read
from hostweave.torch.joint import joint_of
from hostweave.torch.layers import snake_case
from hostweave.torch.plan import Layouts
from hostweave.torch.ranges import Ranges, vary
from hostweave.torch.step import TrainingStep
from hostweave.torch.trace import state_written, traced
from hostweave.torch.training import TrainingModule
from hostweave.types.mesh import Mesh


def compiled(
    exported: Exported,
    module: nn.Module,
    layouts: Layouts,
    mesh: Mesh,
    given: tuple[Any, Any],
    target: str | None = None,
    options: Options | None = None,
    training: bool = False,
    step: tuple[torch.optim.Optimizer, float | None, int, torch.amp.GradScaler | None] | None = None,
) -> CompiledModule:
    """Compiles a module that was exported for the arguments `given` (args, kwargs). `step` has the optimizer, clip_grad_norm, accumulate
    and scaler of a whole training step."""
    graph = read(exported.program, layouts, mesh, training, of_calls=True)
    name = snake_case(type(module).__name__)
    settings = options_of(options, name)
    state_written(graph, name, settings)
    tensors = [*module.parameters(), *(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))]
    device = target or ("cuda" if tensors and tensors[0].is_cuda else "cpu")

    compiling = threading.Lock()  # programs for several sizes are traced from one graph

    def program_of(graph: Graph, end: str = "", sizes: Mapping[str, int] | None = None) -> Program:
        own = replace(settings, sizes={**(sizes or {}), **settings.sizes})
        with compiling:
            fusion = traced(graph, f"{name}{end}", own)
        return compile_program(fusion, target=device, options=own)

    if not training:
        bound = BoundProgram(graph, module, program_of)
        if mesh.size > 1 and settings.overlap == "auto" and vary(graph, settings.sizes):
            bound.ranges = Ranges(graph, lambda sizes: BoundProgram(graph, module, partial(program_of, sizes=sizes)))
        return CompiledModule(module, exported, graph, bound)
    if step is not None:
        expect_unchecked(graph, "a whole step")
    wanted = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(given)]
    joint = joint_of(graph, wanted, step is not None)
    if step is not None:
        return TrainingStep(module, exported, joint, program_of, *step)
    return TrainingModule(module, exported, joint, program_of)
