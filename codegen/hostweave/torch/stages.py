"""Stages of a pipeline."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import Pipe
from torch.fx import Node

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.frontend.tracing import BlockFunction
from hostweave.torch.graph import Graph
from hostweave.torch.joint import Joint
from hostweave.torch.plan import matching, tensors_of
from hostweave.torch.state import State
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import TensorType

AXIS = "pp"  # mesh axis of the stages, if there are several axes
HERE = "hostweave.torch.compile"


@dataclass(frozen=True)
class Source:
    """Source of a stage's argument: result `number` of `stage`, or argument `number` of the pipeline if `stage` is None."""

    stage: int | None
    number: int


@dataclass
class StageFunction:
    graph: Graph
    function: BlockFunction
    types: list[TensorType]
    returned: list[Any] = field(default_factory=list)  # backward pass: per result, index of its source, name of a saved value, or None

    def __call__(self, value: Callable[[Node, str], hw.Tensor]) -> dict[Node, hw.Tensor]:
        """Calls the function, and maps nodes to results. `value(node, name)` returns the argument for an input of the graph."""
        taken = {name: value(node, name) for node, name in self.graph.names.items()}
        made = self.function(*(taken[name] for name in self.graph.input_types))
        nodes = [node for node in self.graph.outputs if node not in self.graph.constants]
        return dict(zip(nodes, made if isinstance(made, tuple) else (made,), strict=True))


@dataclass
class Stage:
    number: int
    module: nn.Module
    mesh: Mesh
    sources: list[Source]
    outer: Graph
    joint: Joint
    forward: StageFunction
    state: State
    backward: dict[str, StageFunction] = field(default_factory=dict)  # by action

    @property
    def trained(self) -> list[tuple[str, TensorType]]:
        """(path, type in the program) of each parameter that gets a gradient."""
        numbers = [what for function in self.backward.values() for what in function.returned if isinstance(what, int)]
        own = [(self.joint.origins[at], self.joint.sources[at]) for at in numbers if self.source_of(at) is None]
        return [(origin.name, self.outer.type_of(node, self.joint.axes_of(origin))) for origin, node in own]

    @property
    def returned(self) -> list[tuple[Node, Node]]:
        """Pairs each result or saved value with the node that the forward graph returns for it."""
        return list(zip((*self.joint.results, *self.joint.saved), self.forward.graph.returned, strict=True))

    def type_of(self, result: Node) -> TensorType:
        computed = [of for of, node in self.returned if node not in self.forward.graph.constants]
        return self.forward.types[computed.index(result)]

    def source_of(self, number: int) -> Source | None:
        """Source of an argument of the joint graph. None for a tensor of the module."""
        if self.joint.origins[number].kind != "argument":
            return None
        return self.sources[self.outer.arguments.index(self.joint.sources[number])]


class WithLoss(nn.Module):
    def __init__(self, stage: nn.Module, loss: Callable[..., torch.Tensor]):
        super().__init__()
        self.stage, self.loss = stage, loss

    def forward(self, *args: Any) -> torch.Tensor:
        *given, target = args
        return self.loss(self.stage(*given), target)


def cut(pipe: Pipe | Sequence[nn.Module]) -> tuple[list[str], list[nn.Module], list[list[Source]]]:
    """Argument names, stages, and sources of each stage's arguments. For a list of modules, only the first stage has sources yet."""
    if not isinstance(pipe, Pipe):
        modules = list(pipe)
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise ProgramError(f"{HERE}: the stages are {[type(one).__name__ for one in modules]}; pass a list of torch.nn.Modules")
        names = list(inspect.signature(modules[0].forward).parameters)
        return names, modules, [[Source(None, number) for number in range(len(names))], *([] for _ in modules[1:])]
    found: dict[Node, Source] = {}
    names, modules, wiring = [], [], []
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            found[node] = Source(None, len(names))
            names.append(node.name)
        elif node.op == "call_module":
            if node.kwargs or not all(isinstance(one, Node) for one in node.args):
                raise ProgramError(f"{HERE}: stage {len(modules)} takes {node.args} and {node.kwargs}; pass only tensors, by position")
            wiring.append([found[one] for one in node.args])
            found[node] = Source(len(modules), 0)
            modules.append(pipe.split_gm.get_submodule(node.target))
        elif node.op == "call_function" and isinstance(node.args[0], Node) and isinstance(node.args[-1], int):
            found[node] = Source(found[node.args[0]].stage, node.args[1])
        elif node.op != "output":
            raise ProgramError(f"{HERE}: {node.format_node()} is not in any stage of the Pipe; cut the module elsewhere")
    return names, modules, wiring


def stage_meshes_of(mesh: Mesh) -> list[Mesh]:
    """Part of the mesh for each coordinate along the axis of the stages."""
    axes = [name for name, _ in mesh.axes]
    axis = axes[0] if len(axes) == 1 else AXIS
    if axis not in axes:
        raise ProgramError(f"{HERE}: {mesh} has no axis {AXIS} for the stages; name one of its axes {AXIS}")
    if axes.index(axis):
        raise ProgramError(f"{HERE}: {AXIS} is not the first axis of {mesh}; write hw.Mesh({AXIS}=..., tp=...)")
    others = tuple((name, size) for name, size in mesh.axes if name != axis)
    ranks = [[rank for rank in mesh.all_ranks if mesh.coordinate(rank, axis) == index] for index in range(mesh.axis_size(axis))]
    return [Mesh(others, tuple(of)) for of in ranks]


def expect_own_parameters(modules: Sequence[nn.Module]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for number, module in enumerate(modules):
        for path, one in module.named_parameters():
            other, name = owners.setdefault(id(one), (number, path))
            if other != number:
                why = f"{path} of stage {number} is {name} of stage {other}"
                raise ProgramError(f"{HERE}: {why}, but each parameter must belong to one stage; untie it, or cut the module elsewhere")


def expect_matches(plan: Mapping[str, str], modules: Sequence[nn.Module], names: Sequence[str]) -> None:
    known = [name for module in modules for name in _names_in(module)]
    for pattern in plan:
        matching(pattern, [*names, *known], "parameters, inputs or modules of a stage")


def _names_in(module: nn.Module) -> list[str]:
    return [*dict(tensors_of(module)), *(name for name, _ in module.named_modules() if name)]


def entries_for(plan: Mapping[str, str], module: nn.Module, labels: Sequence[str]) -> dict[str, str]:
    found = {}
    for pattern, value in plan.items():
        with suppress(ProgramError):
            matching(pattern, [*_names_in(module), *labels], "names")
            found[pattern] = value
    return found
