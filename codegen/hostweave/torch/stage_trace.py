"""Traces a stage of a pipeline as one function of the forward pass, and one or two of the backward pass."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from hostweave.base.errors import ProgramError
from hostweave.options import Options
from hostweave.torch.exported import exported
from hostweave.torch.graph import Graph, Origin, expect_unchecked, read
from hostweave.torch.joint import joint_of
from hostweave.torch.plan import AxesOfDims, layouts
from hostweave.torch.stages import HERE, Source, Stage, StageFunction, entries_for
from hostweave.torch.state import State
from hostweave.torch.trace import traced_function
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import TensorType


def example_of(stages: Sequence[Stage], source: Source, examples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Example of an argument of a stage. `examples` has the arguments of the pipeline, for one micro-batch."""
    if source.stage is None:
        return examples[source.number]
    maker = stages[source.stage]
    if source.number >= len(maker.outer.of_module) or (node := maker.outer.of_module[source.number]) not in maker.joint.results:
        why = f"result {source.number} of stage {source.stage} is not a tensor that the stage computes"
        raise ProgramError(f"{HERE}: {why}; return a computed tensor, and pass each argument to the stage that takes it")
    of = node.meta["val"]
    has = maker.joint.differentiable[maker.joint.results.index(node)]
    return torch.zeros(tuple(of.shape), dtype=of.dtype, device=of.device, requires_grad=has)


def traced_stage(
    number: int,
    module: nn.Module,
    mesh: Mesh,
    sources: list[Source],
    given: list[torch.Tensor],
    arguments: list[str],
    plan: Mapping[str, str],
    rows: tuple[int, AxesOfDims],
    options: Options,
    splits: bool,
    is_last: bool,
) -> tuple[Stage, tuple[int, AxesOfDims]]:
    """Returns the stage, and `rows`: the number of rows of a micro-batch, and the mesh axes of the rows."""
    graph_of = exported(module, tuple(given), {}, None, True)
    names = graph_of.arguments
    labels = [arguments[source.number] if source.stage is None else name for source, name in zip(sources, names, strict=True)]
    dims = {label: one.ndim for label, one in zip(labels, given, strict=True)}
    stated = layouts(entries_for(plan, module, labels), module, dims, mesh)
    stated.inputs = {name: stated.inputs[label] for label, name in zip(labels, names, strict=True) if label in stated.inputs}
    if not rows[1]:
        rows = rows[0], next((axes[:1] for axes in stated.inputs.values() if axes and axes[0]), ())
    for name, one in zip(names, given, strict=True):
        if rows[1] and one.ndim and one.shape[0] == rows[0]:
            stated.inputs.setdefault(name, (*rows[1], *(() for _ in one.shape[1:])))
    stated.data |= {axis for axes in rows[1] for axis in axes if axis != "tp"}
    outer = read(graph_of.program, stated, mesh, True)
    if outer.written:
        path = outer.origins[next(iter(outer.written))].name
        why = f"stage {number} writes to {path} in forward, which is not supported in a pipeline"
        raise ProgramError(f"{HERE}: {why}; use a module without such state, such as LayerNorm for BatchNorm")
    if outer.seeds is not None:
        why = f"stage {number} draws random numbers, as dropout does, which is not supported in a pipeline"
        raise ProgramError(f"{HERE}: {why}; set the dropout probability to 0, or pass the random numbers as an input")
    expect_unchecked(outer, f"a pipeline, in stage {number}")
    joint = joint_of(outer, [one.requires_grad for one in given], is_last)
    name = f"stage_{number}"
    graph = joint.forward_graph()
    forward = StageFunction(graph, *traced_function(graph, f"{name}_forward", options))
    backward = joint.backward_graph(graph, forward.types)
    for node, origin in zip(backward.returned, joint.origins, strict=True):
        if node in backward.constants:
            raise ProgramError(f"{HERE}: stage {number}: the gradient of {origin.name} is a constant; set its requires_grad to False")
    stage = Stage(number, module, mesh, sources, outer, joint, forward, State(module, graph_of.reads, graph_of.grad_mode))
    every = [at for at, node in enumerate(backward.returned) if isinstance(node, Node)]
    of_inputs = [at for at in every if stage.source_of(at) is not None]
    if not splits:
        stage.backward["backward"] = _backward_function(backward, every, f"{name}_backward", options)
    elif not of_inputs or of_inputs == every:  # nothing to split: all gradients belong to inputs, or none does
        stage.backward["input"] = _backward_function(backward, every, f"{name}_backward", options)
    else:
        first, kept = _half(backward, of_inputs, {})
        stage.backward["input"] = _backward_function(first, [*of_inputs, *kept], f"{name}_backward_input", options)
        types = dict(zip(kept, stage.backward["input"].types[len(of_inputs) :], strict=True))
        of_weights = [at for at in every if at not in of_inputs]
        second, _ = _half(backward, of_weights, types)
        stage.backward["weight"] = _backward_function(second, of_weights, f"{name}_backward_weight", options)
    return stage, rows


def _backward_function(graph: Graph, numbers: list[Any], name: str, options: Options) -> StageFunction:
    each = iter(numbers)
    returned = [next(each) if isinstance(node, Node) else None for node in graph.returned]
    return StageFunction(graph, *traced_function(graph, name, options), returned)


def _half(graph: Graph, wanted: list[int], before: Mapping[str, TensorType]) -> tuple[Graph, list[str]]:
    """Half of a backward pass, as a graph of the wanted gradients, and the names of the values that this half saves. The second half takes
    the values of the first half as arguments. `before` has the types of these values, and is empty in the first half."""
    outputs: list[Any] = [graph.returned[at] for at in wanted]
    nodes = list(graph.fx.nodes)
    inner, following = set[Node](), [*outputs]
    while following:
        node = following.pop()
        if node not in inner and node.name not in before:
            inner.add(node)
            following += node.all_input_nodes
    kept: list[Node] = []
    if not before:
        others = {node for node in nodes if node.op == "call_function" and node not in inner and node not in graph.constants}
        picked = {user for node in inner for user in node.users if user in others and user.target is operator.getitem}
        inner |= picked
        needed = {argument for node in others - picked for argument in node.all_input_nodes} | {
            node for at, node in enumerate(graph.returned) if at not in wanted and isinstance(node, Node)
        }
        kept = [node for node in nodes if node in inner and node in needed and node.op == "call_function" and node not in graph.constants]
    made, copies = torch.fx.Graph(), dict[Node, Node]()
    origins: dict[Node, Origin] = {}
    for node in nodes:
        if node.name in before:
            copies[node] = made.placeholder(node.name)
            copies[node].meta = dict(node.meta)
            origins[copies[node]] = Origin("argument", node.name)
        elif node in inner:
            copies[node] = made.node_copy(node, copies.__getitem__)
            if node in graph.origins:
                origins[copies[node]] = graph.origins[node]
    made.output(tuple(copies[node] for node in (*outputs, *kept)))
    inputs = {**graph.layouts.inputs, **{name: tuple(dim.axes for dim in type.dims) for name, type in before.items()}}
    half = Graph(made, origins, replace(graph.layouts, inputs=inputs), graph.mesh)
    half.placed = {copies[node]: axes for node, axes in graph.placed.items() if node in copies and node in inner}
    given = [at for at, node in enumerate(graph.returned) if isinstance(node, Node)]
    assert graph.results is not None
    half.results = [*(graph.results[given.index(at)] for at in wanted), *(None for _ in kept)]
    half.labels = [*(graph.labels[given.index(at)] for at in wanted), *(node.name for node in kept)]
    return half, [node.name for node in kept]
