"""Models compiled in regions, by `torch.compile(model, backend="hostweave")` or `hostweave.torch.compile(..., fullgraph=False)`.

Dynamo passes each graph between two graph breaks to `Backend`. The graph becomes a module on global tensors, which is compiled like other
modules. The shardings of the module are the placements of DTensors, and the shardings that a plan states for plain tensors. Unsupported ops
split a graph further, and run eagerly between the programs.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from hostweave.api import Program
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.options import Options
from hostweave.runtime.group import current as current_group
from hostweave.torch.compiled import Delegating
from hostweave.torch.dynamo import MARK, location_of, nodes_of, op_name, value_of, wants_one_graph
from hostweave.torch.nodes import location
from hostweave.torch.plan import Layouts
from hostweave.torch.region import Region, RegionPlan, Subgraph
from hostweave.torch.training import TrainingModule
from hostweave.types.mesh import Mesh

_OF_MODEL = re.compile(r"^\w\['[^']*'\]\.?")  # prefix of Dynamo's names, such as `L['self'].`
_HELD = re.compile(r"(.*?)((?:\._modules\['[^']+'\])*)\._(parameters|buffers)\['([^']+)'\]")


class Backend:
    """Backend of torch.compile. Compiles a graph for the mesh of its DTensors, or for `mesh` if the graph has no DTensors."""

    def __init__(self, module: nn.Module | None = None, mesh: Mesh | None = None, layouts: Layouts | None = None, **settings: Any):
        """`layouts` has stated shardings by the names in `module`. `settings` are the target and options of `compile`."""
        name = "Region" if module is None else type(module).__name__
        self.plan = RegionPlan(name, mesh, layouts or Layouts(), settings)
        names = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
        self._names = {id(tensor): name for name, tensor in names}
        self._paths = {} if module is None else {str(id(submodule)): path for path, submodule in module.named_modules()}
        self.subgraphs, self.breaks = list[Subgraph](), list[tuple[str, str]]()

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph of Dynamo. Under fullgraph=True, raises ProgramError for unsupported ops."""
        reason: Any = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            self.breaks.append((location_of(reason.user_stack), reason.reason.partition("\n")[0]))
        held = self._held(graph, example_inputs)
        with torch._guards.tracing(None):  # torch.export uses a separate fake mode
            return self._computes(graph, held, is_whole=wants_one_graph())

    def _held(self, graph: GraphModule, given: Sequence[Any]) -> dict[str, tuple[str, Any]]:
        """Maps placeholders of parameters and buffers to (path, tensor). Marks each node of the graph with the node's name and modules."""
        found = {}
        placeholders: list[Any] = graph.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, given, strict=True):
            source: Any = getattr(node, "_dynamo_source", None)
            name = getattr(source, "name", "")
            match = _HELD.fullmatch(name() if callable(name) else name)
            if match and isinstance(value, torch.Tensor):
                words = [*re.findall(r"'([^']+)'", match[2]), match[4]]
                found[node.name] = self._names.get(id(value), ".".join(words)), value
        for node in graph.graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            paths = {key: (self._paths.get(key.partition("@")[0], _OF_MODEL.sub("", name)), kind) for key, (name, kind) in stack.items()}
            node.meta["custom"] = {MARK: node.name, "stack": paths}
        return found

    def _computes(self, graph: GraphModule, held: Mapping[str, tuple[str, Any]], is_whole: bool) -> Callable[..., Any]:
        """A callable for a graph: one program, or programs and eager ops."""
        calls = [node for node in graph.graph.nodes if node.op.startswith("call_") and node.target is not operator.getitem]
        subgraph = Subgraph([node for node in calls if isinstance(value_of(node), torch.Tensor | list | tuple)])
        if not subgraph.nodes:
            return graph.forward  # the graph computes only sizes
        try:
            region = Region(self.plan, graph, held, subgraph)
            region.prepare()
        except ProgramError as error:
            if is_whole:
                raise
            fallen = nodes_of(graph, error)
            if not fallen or len(fallen) == len(calls):
                subgraph.why = str(error)
                self.subgraphs.append(subgraph)
                return graph.forward
            return self._split(graph, held, fallen)
        self.subgraphs.append(subgraph)
        return region

    def _split(self, graph: GraphModule, held: Mapping[str, tuple[str, Any]], fallen: Mapping[Node, str]) -> Callable[..., Any]:
        number, before, numbers = 0, False, dict[Node, int]()
        for node in graph.graph.nodes:
            if node.op.startswith("call_"):
                is_item = node.target is operator.getitem and node.args[0] in numbers
                now = before if is_item else node in fallen
                number += now != before
                numbers[node], before = number, now
        whole = split_module(graph, None, numbers.__getitem__, keep_original_order=True, keep_original_node_name=True, tuple_return=True)  # type: ignore[arg-type]
        names = {node.name: why for node, why in fallen.items()}
        for outer in whole.graph.find_nodes(op="call_module"):
            inner: Any = whole.get_submodule(outer.target)
            own = [node for node in inner.graph.nodes if node.op.startswith("call_")]
            if why := next((names[node.name] for node in own if node.name in names), ""):
                self.subgraphs.append(Subgraph([node for node in own if node.target is not operator.getitem], why=why))
                continue
            passed = {
                placeholder.name: held[given.name]
                for placeholder, given in zip(inner.graph.find_nodes(op="placeholder"), outer.args, strict=True)
                if given.name in held
            }
            inner.forward = self._computes(inner, passed, is_whole=False)
        return whole.forward


class ModelInRegions(Delegating):
    """A model that was compiled with `fullgraph=False`. Has the signature, parameters, state dict and mode of the original module."""

    backend: Backend

    def __init__(self, module: nn.Module, mesh: Mesh, layouts: Layouts, **settings: Any):
        super().__init__(module)
        backend = Backend(module, mesh, layouts, **settings)
        vars(self).update(backend=backend, _call=torch.compile(module, backend=backend))  # not a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the regions of the module as programs, and the rest eagerly. In a group, raises ArgumentError for a plain tensor if the plan
        shards inputs."""
        if current_group() is not None and self.backend.plan.layouts.inputs:
            for one in pytree.tree_leaves((args, kwargs)):
                if isinstance(one, torch.Tensor) and not isinstance(one, DTensor):
                    why = "the plan shards inputs, but with fullgraph=False eager ops use them too"
                    raise ArgumentError(f"{type(self._module).__name__}: {why}; pass DTensors, and make parameters DTensors")
        return self._call(*args, **kwargs)

    @property
    def programs(self) -> list[Program]:
        """The latest program of each compiled subgraph, in the order of `explain`."""
        return [subgraph.model.program for subgraph in self.backend.subgraphs if subgraph.model is not None]

    def explain(self) -> str:
        """Lists the compiled subgraphs, the eager ops with the reason, and the graph breaks. If there are several subgraphs, adds the
        bytes that leave each program."""
        lines = []
        for number, subgraph in enumerate(self.backend.subgraphs):
            first = next((found for node in subgraph.nodes if (found := location(node))), None)
            at = f" from {first}" if first else ""
            if subgraph.why:
                names = ", ".join(dict.fromkeys(op_name(node) for node in subgraph.nodes))
                lines.append(f"{number}: eager{at}: {names}: {subgraph.why}")
            else:
                total = sum(size for _, size in subgraph.returned)
                costs = f"; {len(subgraph.returned)} values of {total} bytes leave the program" if len(self.backend.subgraphs) > 1 else ""
                passes = "forward and backward pass of " if isinstance(subgraph.model, TrainingModule) else ""
                lines.append(f"{number}: compiled{at}: {passes}{len(subgraph.nodes)} ops{costs}")
        lines += [f"graph break at {where}: {reason}" for where, reason in dict.fromkeys(self.backend.breaks)]
        return "\n".join(lines)


def hostweave(graph: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The backend "hostweave" of torch.compile. Compiles for one rank, or for the mesh and placements of DTensors. Raises ProgramError for
    unknown options, and under fullgraph=True for unsupported ops.

    Example: `torch.compile(model, backend="hostweave", options={"options": hw.Options(overlap="off")})`.
    """
    settings = dict(options or {})
    if unknown := sorted(settings.keys() - {"options", "target"}):
        raise ProgramError(f"torch.compile: the backend hostweave has no setting {unknown[0]!r}; there are options= and target=")
    if not isinstance(settings.get("options"), Options | None):
        raise ProgramError('torch.compile: options= is a dict of settings here; write options={"options": hw.Options(...)}')
    return Backend(**settings)(graph, example_inputs)
