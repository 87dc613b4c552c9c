"""Compiles PyTorch modules with a sharding plan to programs for several GPUs.

import hostweave as hw, hostweave.torch

model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"q_proj.weight": "tp, -", "o_proj.weight": "-, tp"}, (input_ids,))
logits = model(input_ids)
"""

# ruff: noqa: E402
from hostweave.base.errors import optional

optional("torch", "hostweave.torch")

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import Pipe
from torch.utils import _pytree as pytree

from hostweave.base.errors import ProgramError
from hostweave.base.garbage import without_garbage_collection
from hostweave.options import Options
from hostweave.torch.caches import register
from hostweave.torch.compiled import CompiledModule as CompiledModule
from hostweave.torch.custom_op import as_torch_op as as_torch_op
from hostweave.torch.distributed import data_axes, of_all_ranks
from hostweave.torch.exported import exported
from hostweave.torch.generation import Generation
from hostweave.torch.pipeline import Pipeline as Pipeline
from hostweave.torch.pipeline import compiled_pipeline
from hostweave.torch.plan import Layouts, layouts, mesh_of, states_inputs, without_inputs
from hostweave.torch.programs import compiled
from hostweave.torch.regions import ModelInRegions as ModelInRegions
from hostweave.torch.scaled import scale_linears, scaled_linears
from hostweave.torch.step import TrainingStep as TrainingStep
from hostweave.torch.training import TrainingModule as TrainingModule


@without_garbage_collection()
def compile(
    module: nn.Module | Pipe | Sequence[nn.Module],
    mesh: Any,
    plan: Mapping[str, Any] | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    target: str | None = None,
    options: Options | None = None,
    dynamic_shapes: Any = None,
    training: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    fp8: str | Mapping[str, str] | None = None,
    fullgraph: bool = True,
    schedule: str | None = None,
    microbatches: int = 1,
    loss: Callable[..., torch.Tensor] | None = None,
) -> Any:
    """Compiles a module for the ranks of a mesh.

    Compiles the forward pass, with `training` also the backward pass, and with `optimizer` a whole training step.

    `mesh` is an hw.Mesh, or a DeviceMesh with named dims. `plan` maps names to shardings. A name may have wildcards, and may omit the first
    components of a path. An entry is one of:

    - a parameter, a buffer or an input, with a mesh axis (`dp+tp` for two axes) or `-` for each dim: `"q_proj.weight": "tp, -"`;
    - the result of a module: `"layers.*": "-, tp, -"`;
    - a module, with a style of torch.distributed.tensor.parallel: `"q_proj": ColwiseParallel()`, RowwiseParallel, SequenceParallel or
      PrepareModuleInput.

    Shardings that the plan does not state are inferred. A DTensor parameter keeps its sharding. Outputs are replicated, unless the plan
    names the module that returns them. An axis other than tp may shard both a parameter and the first dim of an input. The parameter is
    then gathered along this axis before use.

    A module that `fully_shard` prepared needs no plan. If no plan states the inputs of such a module, `example_inputs` are the inputs of
    one rank. Inputs with as many rows as the first tensor are then sharded by rows. Results with one row per input row have the rows of the
    rank, and a loss is over the rows of all ranks.

    `example_inputs` are the arguments of a call, as a tuple or as a dict of keyword arguments. torch.export records the graph for these
    arguments. Sizes are fixed, except those in `dynamic_shapes`, which is written as for torch.export. Equal modules of a list, such as
    layers, become one function of the generated program. `target` is by default "cuda" if the parameters, or without parameters the inputs,
    are on a GPU, otherwise "cpu".

    With `training` the result is a TrainingModule, whose results support `backward()`. With `optimizer` the result is a TrainingStep, whose
    calls also update the parameters in place. Exactly one result of the module must then be a scalar of floats, the loss. The code of the
    optimizer's step must consist of ATen ops on a parameter, its gradient and its state.

    `clip_grad_norm` is the maximum norm of all gradients together, as in torch.nn.utils.clip_grad_norm_. With `accumulate=N` the gradients
    of N calls are added, and every N-th call updates the parameters. Divide the loss by N to get the mean. `scaler` is a
    torch.amp.GradScaler for 16-bit gradients. Each call scales the gradients, but not the returned loss. A call that updates parameters
    also does the work of `unscale_`, `step` and `update`.

    With `fp8="row"`, linears whose weights are in the plan, or are DTensors, are computed in 8-bit floats, with one scale per row. "tensor"
    uses one scale per tensor. "block" uses one scale per 128 elements of activations, and per 128 x 128 elements of weights.
    `fp8={"q_proj": "row"}` selects linears by patterns, as in the plan. The program quantises activations and weights to f8e4m3 in each
    call. Gradients are f8e4m3, or f8e5m2 with "tensor".

    With `fullgraph=False`, unsupported ops, branches on values and side effects break the graph. The result is a ModelInRegions, which runs
    the parts between the breaks as programs, and the rest eagerly. `explain` of the result lists the breaks.

    If the module is a Pipe of torch.distributed.pipelining or a list of stages, the result is a Pipeline for training. The first axis of
    the mesh is for the stages. If the mesh has several axes, this axis must be named pp. With P coordinates along this axis, stage s is at
    coordinate `s % P`. A stage reads results of earlier stages. `example_inputs` is a whole batch. Each call splits its batch along the
    first dim into `microbatches`. `loss(output, target)` computes the loss, where `target` is the last argument of a call. Without `loss`,
    the last stage returns the loss. `schedule` is "gpipe", "1f1b", "interleaved", "zero_bubble" or "auto", the default. "auto" starts from
    1F1B, interleaved if there are more than P stages, and changes the order if the cost model predicts a gain. `optimizer` has the
    parameters of all stages; each rank stores only the state of its stages.

    Raises ProgramError for invalid arguments, for a plan that does not fit the module, and for a module that cannot be compiled. The error
    lists all unsupported ops, each with the first line that uses the op. `example_inputs` that do not fit `forward` may also raise
    ArgumentError or TypeError.

    Example: `model = hostweave.torch.compile(module.eval(), hw.Mesh(tp=2), plan, (input_ids,))`, then `logits = model(input_ids)`.
    """
    if optimizer is None and (clip_grad_norm is not None or accumulate != 1 or scaler is not None):
        raise ProgramError("hostweave.torch.compile: clip_grad_norm=, accumulate= and scaler= need optimizer=; pass optimizer= too")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ProgramError(f"hostweave.torch.compile: accumulate={accumulate!r} is not a number of calls; pass an int of at least 1")
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ProgramError(f"hostweave.torch.compile: clip_grad_norm={clip_grad_norm!r} is not a norm; pass a number above 0")
    if isinstance(module, Pipe | list | tuple):
        single = {"fp8": fp8, "dynamic_shapes": dynamic_shapes, "scaler": scaler}
        if unfit := [name for name, value in single.items() if value is not None]:
            raise ProgramError(f"hostweave.torch.compile: {unfit[0]}= is not supported for a pipeline; omit it")
        if accumulate != 1:
            why = "accumulate= is not supported for a pipeline, whose call adds the gradients of its micro-batches"
            raise ProgramError(f"hostweave.torch.compile: {why}; pass more microbatches=")
        settings = schedule or "auto", target, options, optimizer, clip_grad_norm
        return compiled_pipeline(module, mesh, plan or {}, example_inputs, loss, microbatches, *settings)
    if schedule is not None or microbatches != 1 or loss is not None:
        why = "schedule=, microbatches= and loss= are for pipelines"
        raise ProgramError(f"hostweave.torch.compile: {why}; pass a Pipe of torch.distributed.pipelining, or a list of stages")
    if not isinstance(module, nn.Module):
        raise ProgramError(
            f"hostweave.torch.compile: {module!r} is not a torch.nn.Module; pass the module itself, not its class or forward"
        )
    if isinstance(module, CompiledModule):
        raise ProgramError("hostweave.torch.compile: the module is already compiled; pass the original module")
    if not isinstance(plan, Mapping | None) or not all(isinstance(pattern, str) for pattern in plan or ()):
        raise ProgramError(f'hostweave.torch.compile: plan={plan!r} is not a dict of names; write {{"q_proj.weight": "tp, -"}}')
    if isinstance(example_inputs, torch.Tensor):
        raise ProgramError("hostweave.torch.compile: example_inputs is a tensor; pass the arguments of one call, as a tuple: (x,)")
    if not example_inputs:
        raise ProgramError("hostweave.torch.compile: example_inputs is empty; pass the arguments of one call, as a tuple or a dict")
    named = isinstance(example_inputs, Mapping)
    args, kwargs = ((), dict(example_inputs)) if named else (tuple(example_inputs), {})
    placed = mesh_of(mesh)
    axes, rows = data_axes(module, placed), 0
    if axes and not states_inputs(plan or {}, module, kwargs):
        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves, rows = of_all_ranks(leaves, prod(dict(placed.axes)[axis] for axis in axes))
        args, kwargs = pytree.tree_unflatten(leaves, structure)
    training = training or optimizer is not None
    step = None if optimizer is None else (optimizer, clip_grad_norm, accumulate, scaler)
    if training and dynamic_shapes:
        raise ProgramError("hostweave.torch.compile: dynamic_shapes is for inference; with training=True compile once for each size")
    register((args, kwargs))
    if not fullgraph:
        if optimizer is not None or fp8 is not None or dynamic_shapes is not None:
            raise ProgramError("hostweave.torch.compile: optimizer=, fp8= and dynamic_shapes= need one graph; remove fullgraph=False")
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        dims = {name: value.ndim for name, value in given.items() if isinstance(value, torch.Tensor)}
        return ModelInRegions(module, placed, layouts(plan or {}, module, dims, placed), target=target, options=options)
    graph_of = exported(module, args, kwargs, dynamic_shapes, training)
    given = dict(zip(graph_of.arguments, pytree.tree_leaves((args, kwargs)), strict=True)) if not named else kwargs
    tensors = {name: leaf for name, leaf in given.items() if isinstance(leaf, torch.Tensor)}
    dims = {name: tensor.ndim for name, tensor in tensors.items()}
    by_rows = Layouts(rows=rows, axes_of_rows=axes if rows else ())
    by_rows.inputs = {name: of_rows for name, tensor in tensors.items() if (of_rows := by_rows.of_rows(tensor))}
    stated = layouts(plan or {}, module, dims, placed, by_rows)
    if fp8 is not None:
        scale_linears(graph_of.program.graph, scaled_linears(fp8, module, stated))
    model = compiled(graph_of, module, stated, placed, (args, kwargs), target, options, training, step)
    if not training and hasattr(module, "generate"):
        of_module = without_inputs(plan or {}, module, dims)
        model.generation = Generation(
            module, lambda given, sizes: compile(module, mesh, of_module, given, target=target, options=options, dynamic_shapes=sizes)
        )
    return model
