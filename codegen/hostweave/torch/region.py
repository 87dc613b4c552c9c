"""A graph between two graph breaks, as a module on global tensors, and the programs of the graph."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.export import Dim
from torch.fx import GraphModule, Node
from torch.fx.graph_module import _assign_attr

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.base.names import unique_name
from hostweave.runtime.group import current as current_group
from hostweave.torch.compiled import CompiledModule
from hostweave.torch.dynamo import MARK, GlobalRun, bytes_of, expect_global, is_mesh, is_number, value_of
from hostweave.torch.exported import exported
from hostweave.torch.plan import Layouts, dtensor_axes, mesh_of, parameter_axes, tensors_of
from hostweave.torch.programs import compiled
from hostweave.types.mesh import Mesh


@dataclass
class Subgraph:
    """Ops of a model between graph breaks or unsupported ops, for `explain`. `why` is the reason if these ops run eagerly."""

    nodes: list[Node]
    returned: list[tuple[str, int]] = field(default_factory=list)  # (name, bytes) of the values that leave the program
    why: str = ""
    model: CompiledModule | None = None


@dataclass
class RegionPlan:
    """Settings for the regions of a model. `settings` are the target and options of `compile`."""

    name: str
    mesh: Mesh | None
    layouts: Layouts
    settings: Mapping[str, Any]

    def mesh_for(self, values: Sequence[Any]) -> Mesh:
        """Mesh of a graph that reads `values`: the root of their largest device mesh. Without one, the mesh of the plan, or one rank."""
        found = [value.device_mesh for value in values if isinstance(value, DTensor)]
        found += [value for value in values if isinstance(value, DeviceMesh)]
        if not found:
            return self.mesh or hw.Mesh(rank=1)
        device_mesh: Any = max(found, key=lambda one: one.size())
        device_mesh = device_mesh._get_root_mesh() if hasattr(device_mesh, "_get_root_mesh") else device_mesh
        mesh, group = mesh_of(device_mesh), current_group()
        if group is None or group.count != mesh.size:
            joined = "this process has joined no group" if group is None else f"its group has {group.count} ranks"
            raise ArgumentError(f"torch.compile: DTensors are on a mesh of {mesh.size} ranks, but {joined}; call hw.init(hw.TorchStore())")
        return mesh


class Region:
    """A graph of Dynamo, and the programs compiled from it."""

    def __init__(self, plan: RegionPlan, graph: GraphModule, held: Mapping[str, tuple[str, Any]], subgraph: Subgraph):
        self._plan, self._graph, self._subgraph = plan, graph, subgraph
        self._lock, self._programs = threading.Lock(), dict[Any, CompiledModule]()
        self._placeholders: list[Any] = graph.graph.find_nodes(op="placeholder")
        (output,) = graph.graph.find_nodes(op="output")
        self._outputs: list[Any] = list(output.args[0])
        self._held = dict(held)
        locals_ = graph.graph.find_nodes(op="call_function", target=DTensor.from_local)
        self._of_local = {node.args[0]: node for node in locals_}
        expect_global(graph)
        values = [one for node in graph.graph.nodes if (one := value_of(node)) is not None]
        values += [node.meta["grapharg"].example for node in self._placeholders if is_mesh(node)]
        self._mesh = plan.mesh_for(values)
        self._sizes = {
            str(size.node.expr): (number, dim)
            for number, node in reversed([*enumerate(self._placeholders)])
            for dim, size in enumerate(getattr(value_of(node), "shape", ()))
            if isinstance(size, torch.SymInt)
        }

    def prepare(self) -> None:
        """Compiles the graph for the tensors with which Dynamo traced the graph."""
        self._program([self._held[node.name][1] if node.name in self._held else None for node in self._placeholders], _Examples(self))

    def __call__(self, *given: Any) -> Any:
        """Runs the program for the arguments `given`. Results that are DTensors in the graph are DTensors."""
        program = self._program(given, _Examples(self, given))
        taken = {name: given[self._placeholders.index(node)] for name, node in self._taken.items()}
        made = iter(program(**{name: one.to_local() if isinstance(one, DTensor) else one for name, one in taken.items()}))
        return tuple(self._given(node, next(made)) if not is_number(node) else self._number(node, given) for node in self._outputs)

    @cached_property
    def _taken(self) -> dict[str, Any]:
        """Maps names of the program's arguments to placeholders."""
        found = dict[str, Any]()
        for node in self._placeholders:
            if node.name not in self._held and isinstance(value_of(node), torch.Tensor):
                found[unique_name(re.sub(r"\W+", "_", node.name).strip("_").removeprefix("l_"), found)] = node
        return found

    def _given(self, node: Any, value: Any) -> Any:
        made = value_of(node)
        if not isinstance(made, DTensor) or isinstance(value, DTensor):
            return value
        placements = [Replicate() if placement.is_partial() else placement for placement in made.placements]
        shape, stride = (None, None) if any(isinstance(size, torch.SymInt) for size in made.shape) else (made.shape, made.stride())
        return DTensor.from_local(value, made.device_mesh, placements, run_check=False, shape=shape, stride=stride)

    def _number(self, node: Any, given: Sequence[Any]) -> Any:
        """Value of an output that is not a tensor."""
        if not isinstance(node, Node):
            return node
        expression = node.meta["example_value"].node.expr
        return int(expression.subs({symbol: self._size(str(symbol), given) for symbol in expression.free_symbols}))

    def _size(self, symbol: str, given: Sequence[Any]) -> int:
        if symbol in self._sizes:
            number, dim = self._sizes[symbol]
            return int(given[number].shape[dim])
        symbols = (str(getattr(getattr(value_of(node), "node", None), "expr", "")) for node in self._placeholders)
        number = list(symbols).index(symbol)
        return int(given[number])

    def _program(self, given: Sequence[Any], examples: _Examples) -> CompiledModule:
        """Program for the parameters, buffers, numbers, fixed shapes and grad mode of a call. The key has the parameters, because Dynamo
        uses one graph for several modules of a class."""
        key = (*(id(one) for node, one in zip(self._placeholders, given, strict=True) if node.name in self._held), *examples.fixed)
        with self._lock:
            if key not in self._programs:
                self._programs[key] = self._compiled(given, examples)
            return self._programs[key]

    def _compiled(self, given: Sequence[Any], examples: _Examples) -> CompiledModule:
        paths = dict[str, str]()
        module = type(self._plan.name, (_Module,), {})(self, examples.numbers)
        for node, tensor in zip(self._placeholders, given, strict=True):
            if node.name in self._held:
                path = self._held[node.name][0]
                paths[node.name] = path if path not in paths.values() else f"{path}.{node.name}"
                _assign_attr(tensor, module, paths[node.name])
        module.held = paths
        stated = self._plan.layouts
        parameters = {path: stated.parameters[path] for path in paths.values() if path in stated.parameters}
        layouts = replace(stated, parameters=parameters, inputs={})
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            if isinstance(tensor, DTensor):
                layouts.parameters[path] = parameter_axes(tensor, self._mesh, path)
        for name, node in self._taken.items():
            made, own = value_of(self._of_local.get(node, node)), stated.inputs.get(name)
            if isinstance(made, DTensor):
                layouts.inputs[name] = dtensor_axes(made, made.ndim)
            elif own is not None and len(own) == made.ndim:
                layouts.inputs[name] = own
        layouts.data = {axis for axes in layouts.inputs.values() for of in axes[:1] for axis in of if axis != "tp"}
        training = torch.is_grad_enabled() and any(getattr(value_of(node), "requires_grad", False) for node in self._outputs)
        dynamic = {"given": examples.dynamic} if examples.is_dynamic else None
        with torch.set_grad_enabled(training):
            graph_of = exported(module, (), examples.tensors, dynamic, training)
            self._mark(graph_of.program.graph, layouts)
            program = compiled(graph_of, module, layouts, self._mesh, ((), examples.tensors), training=training, **self._plan.settings)
        if self._mesh.size == 1:
            program.alone_on = next((node.meta["example_value"].device for node in self._subgraph.nodes if not is_number(node)), None)
        self._subgraph.model = program
        values = {node.name: value_of(node) for node in self._outputs if isinstance(node, Node)}
        self._subgraph.returned = [(name, bytes_of(value)) for name, value in values.items() if isinstance(value, torch.Tensor)]
        return program

    def _mark(self, graph: torch.fx.Graph, layouts: Layouts) -> None:
        """Copies modules and source lines from Dynamo's graph. Drops the stated sharding of a module that has no node here, or whose last
        node has another number of dims."""
        of_name = {node.name: node for node in self._graph.graph.nodes}
        last: dict[str, Node] = {}
        for node in graph.nodes:
            custom = node.meta.get("custom") or {}
            if (own := of_name.get(custom.get(MARK, ""))) is not None:
                node.meta["nn_module_stack"] = dict(custom["stack"])
                node.meta["stack_trace"] = own.meta.get("stack_trace")
                last.update((path, node) for path, _ in custom["stack"].values())
        dims = {path: getattr(node.meta.get("val"), "ndim", None) for path, node in last.items()}
        layouts.outputs = {path: axes for path, axes in layouts.outputs.items() if dims.get(path) == len(axes)}


class _Module(nn.Module):
    """The module that torch.export runs for a region. The module has the parameters and buffers, and takes global tensors."""

    def __init__(self, region: Region, numbers: Mapping[str, int]):
        super().__init__()
        self.held: dict[str, str] = {}
        vars(self).update(_region=region, _numbers=numbers)

    def forward(self, **given: Any) -> Any:
        region = vars(self)["_region"]
        own = dict(tensors_of(self))
        of_node = {node: given[name] for name, node in region._taken.items()}
        values = [self._value(node, own, of_node) for node in region._placeholders]
        with torch.fx.traceback.preserve_node_meta():
            return GlobalRun(region._graph, garbage_collect_values=False).run(*values)

    def _value(self, node: Any, own: Mapping[str, Any], of_node: Mapping[Any, Any]) -> Any:
        if node.name in self.held:
            return own[self.held[node.name]]
        if node in of_node:
            return of_node[node]
        if node.name in vars(self)["_numbers"]:
            return vars(self)["_numbers"][node.name]
        if isinstance(value_of(node), torch.SymInt):
            region = vars(self)["_region"]
            number, dim = region._sizes[str(value_of(node).node.expr)]
            return of_node[region._placeholders[number]].shape[dim]
        return node.meta.get("example_value")


class _Examples:
    """Arguments for which the program of a region is compiled: those of Dynamo's trace, or of a call."""

    def __init__(self, region: Region, given: Sequence[Any] | None = None):
        self.numbers, self.tensors, self.dynamic = dict[str, int](), dict[str, torch.Tensor](), dict[str, Any]()
        for number, node in enumerate(region._placeholders):
            made = value_of(node)
            if isinstance(made, torch.SymInt) and str(made.node.expr) not in region._sizes:
                self.numbers[node.name] = int(given[number]) if given is not None else int(made.node.hint)
        training = torch.is_grad_enabled()
        for name, node in region._taken.items():
            local = region._of_local.get(node, node)
            made = value_of(local)
            own = given[region._placeholders.index(node)].shape if given is not None and local is node else made.shape
            sizes = [size if isinstance(size, int) else int(size.node.hint) for size in own]
            of = value_of(node)
            self.tensors[name] = torch.empty(sizes, dtype=of.dtype, device=of.device).requires_grad_(of.requires_grad and training)
            self.dynamic[name] = {dim: Dim.DYNAMIC for dim, size in enumerate(made.shape) if not isinstance(size, int)}
        self.is_dynamic = any(self.dynamic.values()) and not training
        shapes = () if self.is_dynamic else tuple(tuple(one.shape) for one in self.tensors.values())
        self.fixed: tuple[Any, ...] = (*self.numbers.values(), shapes, training)
