"""Models compiled in regions: `torch.compile(model, backend="hostweave")`, and `hostweave.torch.compile(..., fullgraph=False)`.

Dynamo runs the Python of a model, and gives each graph between two graph breaks to `Backend`. A graph is on DTensors or on plain tensors.
Here it becomes a module on global tensors, which is compiled like other modules. The placements of DTensors are the plan. Unsupported ops
split a graph further. They run eagerly, on the DTensors that the previous programs return.
"""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.export import Dim
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

import hostweave as hw
from hostweave.api import Program
from hostweave.base.errors import ArgumentError, Location, ProgramError
from hostweave.base.names import unique_name
from hostweave.options import Options
from hostweave.runtime.group import current as current_group
from hostweave.torch.compiled import CompiledModule, Delegating
from hostweave.torch.exported import exported
from hostweave.torch.graph import location, refused
from hostweave.torch.ops import ops
from hostweave.torch.plan import AxesOfDims, Layouts, mesh_of, placed_axes, text_of
from hostweave.torch.programs import compiled
from hostweave.torch.training import TrainingModule
from hostweave.types.mesh import Mesh

_HELD = re.compile(r"(.*?)((?:\._modules\['[^']+'\])*)\._(parameters|buffers)\['([^']+)'\]")
_MARK = "hostweave"  # key in a node's "custom", which export keeps, for its node in Dynamo's graph


@dataclass
class ModelPart:
    """A part of a model between two breaks, for `explain`. `why` is the reason if it runs eagerly."""

    nodes: list[Node]
    returned: list[tuple[str, int]] = field(default_factory=list)  # name and bytes of the values that leave a program
    why: str = ""
    model: CompiledModule | None = None


class Backend:
    """The backend of torch.compile. It compiles graphs for a mesh, by default the mesh of their DTensors."""

    def __init__(self, module: nn.Module | None = None, mesh: Mesh | None = None, layouts: Layouts | None = None, **settings: Any):
        """`layouts` states shardings by the names of `module`. `settings` are target and options of `compile`."""
        self._module, self._mesh, self._layouts, self._settings = module, mesh, layouts or Layouts(), settings
        names = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
        self._names = {id(tensor): name for name, tensor in names}
        self._paths = {} if module is None else {str(id(part)): path for path, part in module.named_modules()}
        self.parts, self.breaks = list[ModelPart](), list[tuple[str, str]]()

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns a callable that computes a graph of Dynamo's. Raises ProgramError under fullgraph=True for ops that are missing."""
        reason: Any = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            self.breaks.append((_place(reason.user_stack), reason.reason.partition("\n")[0]))
        held = self._held(graph, example_inputs)
        with torch._guards.tracing(None):  # torch.export has a separate fake mode
            return self._computes(graph, held, is_whole=_is_whole())

    def _held(self, graph: GraphModule, given: Sequence[Any]) -> dict[str, tuple[str, Any]]:
        """Path and tensor of the parameters and buffers among the placeholders, by the placeholders' names. Marks all nodes."""
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
            paths = {key: (self._paths.get(key.partition("@")[0], _relative(name)), kind) for key, (name, kind) in stack.items()}
            node.meta["custom"] = {_MARK: node.name, "stack": paths}
        return found

    def _computes(self, graph: GraphModule, held: Mapping[str, tuple[str, Any]], is_whole: bool) -> Callable[..., Any]:
        """A callable for a graph: its program, or the programs of its parts and the ops between them."""
        calls = [node for node in graph.graph.nodes if node.op.startswith("call_") and node.target is not operator.getitem]
        part = ModelPart([node for node in calls if isinstance(_value(node), torch.Tensor | list | tuple)])
        if not part.nodes:
            return graph.forward  # the graph computes only sizes
        try:
            region = Region(self, graph, held, part)
            region.prepare()
        except ProgramError as error:
            if is_whole:
                raise
            fallen = _nodes_of(graph, error)
            if not fallen or len(fallen) == len(calls):
                part.why = str(error)
                self.parts.append(part)
                return graph.forward
            return self._split(graph, held, fallen)
        self.parts.append(part)
        return region

    def _split(self, graph: GraphModule, held: Mapping[str, tuple[str, Any]], fallen: Mapping[Node, str]) -> Callable[..., Any]:
        """A callable that runs refused nodes eagerly, and the nodes before, between and after them as programs."""
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
                self.parts.append(ModelPart([node for node in own if node.target is not operator.getitem], why=why))
                continue
            passed = {
                place.name: held[given.name]
                for place, given in zip(inner.graph.find_nodes(op="placeholder"), outer.args, strict=True)
                if given.name in held
            }
            whole.set_submodule(outer.target, _CalledModule(self._computes(inner, passed, is_whole=False)))
        return whole.forward

    def mesh_for(self, values: Sequence[Any]) -> tuple[Mesh, DeviceMesh | None]:
        """The mesh of a graph with these values, and the DeviceMesh of its DTensors. Raises ProgramError if they have several meshes."""
        found = [value.device_mesh for value in values if isinstance(value, DTensor)]
        found += [value for value in values if isinstance(value, DeviceMesh)]
        if not found:
            return self._mesh or hw.Mesh(rank=1), None
        device_mesh: Any = max(found, key=lambda one: one.size())
        device_mesh = device_mesh._get_root_mesh() if hasattr(device_mesh, "_get_root_mesh") else device_mesh
        mesh, group = mesh_of(device_mesh), current_group()
        if group is None or group.count != mesh.size:
            joined = "this process has joined no group" if group is None else f"its group has {group.count} ranks"
            raise ArgumentError(f"torch.compile: DTensors are on a mesh of {mesh.size} ranks, and {joined}; call hw.init(hw.TorchStore())")
        return mesh, device_mesh

    def layouts_of(self, paths: Sequence[str]) -> Layouts:
        """The stated shardings of these parameters and buffers, and of the results of modules."""
        stated = self._layouts.parameters
        return replace(self._layouts, parameters={path: stated[path] for path in paths if path in stated}, inputs={})

    @property
    def settings(self) -> dict[str, Any]:
        return self._settings

    @property
    def name(self) -> str:
        """The class name of the model, which its programs get."""
        return type(self._module).__name__ if self._module is not None else "Region"

    @property
    def inputs(self) -> dict[str, AxesOfDims]:
        return self._layouts.inputs

    def explain(self) -> str:
        """Tells which parts run compiled, which ops run eagerly and why, and how many bytes each break costs."""
        lines = []
        for number, part in enumerate(self.parts):
            first = next((place for node in part.nodes if (place := location(node))), None)
            at = f" from {first}" if first else ""
            if part.why:
                names = ", ".join(dict.fromkeys(_name(node) for node in part.nodes))
                lines.append(f"{number}: eager{at}: {names}: {part.why}")
            else:
                total = sum(size for _, size in part.returned)
                costs = f"; {len(part.returned)} values of {total} bytes leave the program" if len(self.parts) > 1 else ""
                passes = "forward and backward pass of " if isinstance(part.model, TrainingModule) else ""
                lines.append(f"{number}: compiled{at}: {passes}{len(part.nodes)} ops{costs}")
        lines += [f"graph break at {place}: {reason}" for place, reason in dict.fromkeys(self.breaks)]
        return "\n".join(lines)


class _CalledModule(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.forward = function


class _Global(Interpreter):
    """Runs a graph of DTensors on global tensors."""

    def __init__(self, graph: GraphModule):
        super().__init__(graph, garbage_collect_values=False)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is DTensor.from_local:
            return args[0]
        if str(target) == "tag_activation_checkpoint":  # saved values are chosen for the whole graph
            function, *given = args
            return Interpreter(function).run(*given)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in ("redistribute", "to_local", "full_tensor"):
            return super().call_method(target, args, kwargs)
        node: Any = self.current
        of = node.args[0] if target == "to_local" else node
        return ops.reshard(args[0], text_of(axes_of(of.meta["example_value"], args[0].ndim)))

    def run_node(self, n: Node) -> Any:
        self.current = n
        value = super().run_node(n)
        if n.op == "output":
            nodes: Any = n.args[0]
            pairs = zip(nodes, value, strict=True)
            return tuple(_as_stated(node, one) for node, one in pairs if not isinstance(node, Node) or not _is_number(node))
        return value


def _as_stated(node: Any, value: Any) -> Any:
    made = node.meta.get("example_value") if isinstance(node, Node) else None
    return ops.reshard(value, text_of(axes_of(made, value.ndim))) if isinstance(made, DTensor) else value


class Region:
    """A graph of Dynamo's as a module on global tensors, and its program. It is called with the arguments of the graph."""

    def __init__(self, backend: Backend, graph: GraphModule, held: Mapping[str, tuple[str, Any]], part: ModelPart):
        self._backend, self._graph, self._part = backend, graph, part
        self._lock, self._programs = threading.Lock(), dict[Any, CompiledModule]()
        self._places: list[Any] = graph.graph.find_nodes(op="placeholder")
        (output,) = graph.graph.find_nodes(op="output")
        self._outputs: list[Any] = list(output.args[0])
        self._held = dict(held)
        self._of_local = {
            node.args[0]: node for node in graph.graph.nodes if node.op == "call_function" and node.target is DTensor.from_local
        }
        self._expect_global()
        values = [one for node in graph.graph.nodes if (one := _value(node)) is not None]
        values += [node.meta["grapharg"].example for node in self._places if _is_mesh(node)]
        found = backend.mesh_for(values)
        self._mesh, self._device_mesh = found
        self._sizes = {
            str(size.node.expr): (number, dim)
            for number, node in reversed([*enumerate(self._places)])
            for dim, size in enumerate(getattr(_value(node), "shape", ()))
            if isinstance(size, torch.SymInt)
        }

    def _expect_global(self) -> None:
        """Raises ProgramError for ops on local parts of DTensors, because they differ between ranks."""
        for node in self._graph.graph.nodes:
            if node.op == "call_method" and node.target == "to_local":
                made = node.args[0].meta["example_value"]
                others = [user for user in node.users if user.op != "output" and user.target is not DTensor.from_local]
                is_sharded = any(not placement.is_replicate() for placement in made.placements)
                is_partial = any(placement.is_partial() for placement in made.placements)
                if is_partial or (is_sharded and others):
                    why = "computes with a rank's part of a DTensor" if not is_partial else "takes a rank's term of a sum"
                    raise _of_nodes(f"{why}; redistribute it before, or write use_local_output=False", others or [node])
            if node.op == "call_function" and node.target is DTensor.from_local:
                local = node.args[0]
                placements = node.meta["example_value"].placements
                if any(placement.is_partial() for placement in placements):
                    raise _of_nodes("from_local of a partial sum; reduce it before", [node])
                is_local = local.op == "placeholder" or local.target == "to_local"
                if any(placement.is_shard() for placement in placements) and not (is_local and len(local.users) == 1):
                    raise _of_nodes("from_local of a tensor that is also used as a local tensor; use the DTensor alone", [node])

    def prepare(self) -> None:
        """Compiles the graph for the tensors that it was traced for."""
        self._program([self._held[node.name][1] if node.name in self._held else None for node in self._places], _Examples(self))

    def __call__(self, *given: Any) -> Any:
        """Returns the values of the graph, as DTensors if the graph has DTensors."""
        program = self._program(given, None)
        taken = {name: given[self._places.index(node)] for name, node in self._taken.items()}
        made = iter(program(**{name: one.to_local() if isinstance(one, DTensor) else one for name, one in taken.items()}))
        return tuple(self._given(node, next(made)) if not _is_number(node) else self._number(node, given) for node in self._outputs)

    @cached_property
    def _taken(self) -> dict[str, Any]:
        """The placeholders of the values that a call passes to the program, by the names of its arguments."""
        found = dict[str, Any]()
        for node in self._places:
            if node.name not in self._held and isinstance(_value(node), torch.Tensor):
                found[unique_name(re.sub(r"\W+", "_", node.name).strip("_").removeprefix("l_"), found)] = node
        return found

    def _given(self, node: Any, value: Any) -> Any:
        made = _value(node)
        if not isinstance(made, DTensor) or isinstance(value, DTensor):
            return value
        placements = [Replicate() if placement.is_partial() else placement for placement in made.placements]
        shape, stride = (None, None) if any(isinstance(size, torch.SymInt) for size in made.shape) else (made.shape, made.stride())
        return DTensor.from_local(value, made.device_mesh, placements, run_check=False, shape=shape, stride=stride)

    def _number(self, node: Any, given: Sequence[Any]) -> Any:
        """The value of an output that is not a tensor."""
        if not isinstance(node, Node):
            return node
        expression = node.meta["example_value"].node.expr
        return int(expression.subs({symbol: self._size(str(symbol), given) for symbol in expression.free_symbols}))

    def _size(self, symbol: str, given: Sequence[Any]) -> int:
        if symbol in self._sizes:
            number, dim = self._sizes[symbol]
            return int(given[number].shape[dim])
        number = next(i for i, node in enumerate(self._places) if str(getattr(getattr(_value(node), "node", None), "expr", "")) == symbol)
        return int(given[number])

    def _program(self, given: Sequence[Any], examples: _Examples | None) -> CompiledModule:
        """The program for these parameters, buffers and numbers. Dynamo calls a graph for several modules of a class."""
        examples = examples or _Examples(self, given)
        key = (*(id(one) for node, one in zip(self._places, given, strict=True) if node.name in self._held), *examples.fixed)
        with self._lock:
            if key not in self._programs:
                self._programs[key] = self._compiled(given, examples)
            return self._programs[key]

    def _compiled(self, given: Sequence[Any], examples: _Examples) -> CompiledModule:
        paths = dict[str, str]()
        module = type(self._backend.name, (_Module,), {})(self, examples.numbers)
        for node, tensor in zip(self._places, given, strict=True):
            if node.name in self._held:
                path = self._held[node.name][0]
                paths[node.name] = path if path not in paths.values() else f"{path}.{node.name}"
                _hold(module, paths[node.name], tensor)
        module.held = paths
        layouts = self._backend.layouts_of([*paths.values()])
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            if isinstance(tensor, DTensor):
                layouts.parameters[path] = placed_axes(tensor, self._mesh, path)
        for name, node in self._taken.items():
            made, stated = _value(self._of_local.get(node, node)), self._backend.inputs.get(name)
            if isinstance(made, DTensor):
                layouts.inputs[name] = axes_of(made, made.ndim)
            elif stated is not None and len(stated) == made.ndim:
                layouts.inputs[name] = stated
        layouts.data = {axis for axes in layouts.inputs.values() for of in axes[:1] for axis in of if axis != "tp"}
        training = torch.is_grad_enabled() and any(getattr(_value(node), "requires_grad", False) for node in self._outputs)
        dynamic = {"given": examples.dynamic} if examples.is_dynamic else None
        with torch.set_grad_enabled(training):
            graph_of, how, reads = exported(module, (), examples.tensors, dynamic, training)
            self._mark(graph_of.graph, layouts)
            program = compiled(
                (graph_of, how, reads), module, layouts, self._mesh, ((), examples.tensors), training=training, **self._backend.settings
            )
        if self._mesh.size == 1:
            program.alone_on = next((node.meta["example_value"].device for node in self._part.nodes if not _is_number(node)), None)
        self._part.model = program
        self._part.returned = [
            (node.name, _bytes(_value(node))) for node in self._outputs if isinstance(node, Node) and isinstance(_value(node), torch.Tensor)
        ]
        return program

    def _mark(self, graph: torch.fx.Graph, layouts: Layouts) -> None:
        """Copies modules and lines from the nodes of Dynamo's graph. Skips the results of modules that a break cuts."""
        of_name = {node.name: node for node in self._graph.graph.nodes}
        last: dict[str, Node] = {}
        for node in graph.nodes:
            custom = node.meta.get("custom") or {}
            if (own := of_name.get(custom.get(_MARK, ""))) is not None:
                node.meta["nn_module_stack"] = dict(custom["stack"])
                node.meta["stack_trace"] = own.meta.get("stack_trace")
                last.update((path, node) for path, _ in custom["stack"].values())
        for path, axes in list(layouts.outputs.items()):
            made = last[path].meta.get("val") if path in last else None
            if getattr(made, "ndim", None) != len(axes):
                layouts.outputs = {name: one for name, one in layouts.outputs.items() if name != path}


class _Module(nn.Module):
    """A region's graph as torch.export runs it: it holds the parameters and buffers, and takes global tensors."""

    def __init__(self, region: Region, numbers: Mapping[str, int]):
        super().__init__()
        self.held: dict[str, str] = {}
        vars(self).update(_region=region, _numbers=numbers)

    def forward(self, **given: Any) -> Any:
        region = vars(self)["_region"]
        own = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers(remove_duplicate=False))}
        of_node = {node: given[name] for name, node in region._taken.items()}
        values = [self._value(node, own, of_node) for node in region._places]
        with torch.fx.traceback.preserve_node_meta():
            return _Global(region._graph).run(*values)

    def _value(self, node: Any, own: Mapping[str, Any], of_node: Mapping[Any, Any]) -> Any:
        if node.name in self.held:
            return own[self.held[node.name]]
        if node in of_node:
            return of_node[node]
        if node.name in vars(self)["_numbers"]:
            return vars(self)["_numbers"][node.name]
        if isinstance(_value(node), torch.SymInt):
            region = vars(self)["_region"]
            number, dim = region._sizes[str(_value(node).node.expr)]
            return of_node[region._places[number]].shape[dim]
        return node.meta.get("example_value")


class _Examples:
    """The arguments for which the program of a region is compiled: from Dynamo's trace, or from a call."""

    def __init__(self, region: Region, given: Sequence[Any] | None = None):
        self.numbers, self.tensors, self.dynamic = dict[str, int](), dict[str, torch.Tensor](), dict[str, Any]()
        for number, node in enumerate(region._places):
            made = _value(node)
            if isinstance(made, torch.SymInt) and str(made.node.expr) not in region._sizes:
                self.numbers[node.name] = int(given[number]) if given is not None else int(made.node.hint)
        training = torch.is_grad_enabled()
        for name, node in region._taken.items():
            local = region._of_local.get(node, node)
            made = _value(local)
            own = given[region._places.index(node)].shape if given is not None and local is node else made.shape
            sizes = [size if isinstance(size, int) else int(size.node.hint) for size in own]
            of = _value(node)
            self.tensors[name] = torch.empty(sizes, dtype=of.dtype, device=of.device).requires_grad_(of.requires_grad and training)
            self.dynamic[name] = {dim: Dim.DYNAMIC for dim, size in enumerate(made.shape) if not isinstance(size, int)}
        self.is_dynamic = any(self.dynamic.values()) and not training
        shapes = () if self.is_dynamic else tuple(tuple(one.shape) for one in self.tensors.values())
        self.fixed: tuple[Any, ...] = (*self.numbers.values(), shapes, training)


def axes_of(tensor: Any, dims: int) -> AxesOfDims:
    """The mesh axes that shard each dim of a DTensor. A partial sum counts as its value, which is replicated."""
    names, result = tensor.device_mesh.mesh_dim_names, list[tuple[str, ...]](() for _ in range(dims))
    for name, placement in zip(names, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            result[placement.dim] += (name,)
        elif not isinstance(placement, Replicate | Partial):
            raise ProgramError(f"a DTensor is placed as {placement} along {name}; redistribute it to Shard or Replicate")
    return tuple(result)


def _hold(module: nn.Module, path: str, tensor: Any) -> None:
    *words, name = path.split(".")
    for word in words:
        if word not in module._modules:
            module.add_module(word, nn.Module())
        module = module._modules[word]  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else node


def _is_mesh(node: Any) -> bool:
    argument = node.meta.get("grapharg")
    return argument is not None and isinstance(argument.example, DeviceMesh)


def _is_number(node: Any) -> bool:
    return not isinstance(_value(node), torch.Tensor)


def _bytes(value: Any) -> int:
    sizes = [size if isinstance(size, int) else int(size.node.hint) for size in value.shape]
    return prod(sizes) * int(value.element_size())


def _relative(name: str) -> str:
    """`L['self'].layers.0` as `layers.0`."""
    return re.sub(r"^\w\['[^']*'\]\.?", "", name)


def _name(node: Any) -> str:
    target = node.target
    if isinstance(target, str):
        return f"Tensor.{target}"
    return f"{getattr(target, '__module__', None) or 'torch'}.{target.__name__}" if hasattr(target, "__name__") else str(target)


def _place(stack: Any) -> str:
    frames = [frame for frame in stack or () if "/torch/" not in frame.filename]
    return str(Location(frames[-1].filename.rpartition("/")[2], frames[-1].lineno or 0)) if frames else "an unknown line"


def _of_nodes(why: str, nodes: list[Any]) -> ProgramError:
    return refused(ProgramError(why, location(nodes[0])), nodes)


def _nodes_of(graph: GraphModule, error: ProgramError) -> dict[Node, str]:
    """The unsupported nodes of a graph and other nodes of the same lines, each with the reason."""
    marks = {(node.meta.get("custom") or {}).get(_MARK, node.name) for node in getattr(error, "nodes", ())}
    calls = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    found = [node for node in calls if node.name in marks]
    alike = {(str(node.target), node.meta.get("stack_trace")) for node in found}
    return {node: str(error) for node in calls if (str(node.target), node.meta.get("stack_trace")) in alike}


def _is_whole() -> bool:
    """True if the user asked for one graph, by fullgraph=True."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator: Any = InstructionTranslator.current_tx()
    except AttributeError:
        return False
    return bool(translator.one_graph)


class ModelInRegions(Delegating):
    """A model that was compiled with `fullgraph=False`. It is called like the module. `explain` lists the compiled and the eager parts. It
    has the parameters, state dict and mode of the module.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, layouts: Layouts, **settings: Any):
        super().__init__(module)
        self.backend = Backend(module, mesh, layouts, **settings)
        vars(self).update(_call=torch.compile(module, backend=self.backend))  # no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module: its regions as programs, the rest eagerly."""
        if current_group() is not None and self.backend.inputs:
            for one in pytree.tree_leaves((args, kwargs)):
                if isinstance(one, torch.Tensor) and not isinstance(one, DTensor):
                    why = "the plan shards inputs, but with fullgraph=False eager ops use them too"
                    raise ArgumentError(f"{type(self._module).__name__}: {why}; pass DTensors, and make parameters DTensors")
        return self._call(*args, **kwargs)

    @property
    def programs(self) -> list[Program]:
        """The programs that were compiled so far, in the order in which they were first needed."""
        return [part.model.program for part in self.backend.parts if part.model is not None]

    def explain(self) -> str:
        """Lists the parts of the model and the graph breaks, with the cost of each break."""
        return self.backend.explain()


def hostweave(graph: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The backend "hostweave" of torch.compile: on one rank, or on DTensors, whose placements are the plan.

    Example: `torch.compile(model, backend="hostweave", options={"options": hw.Options(overlap="off")})`.
    """
    return Backend(**_settings(options))(graph, example_inputs)


def _settings(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if unknown := sorted(set(options or {}) - {"options", "target"}):
        raise ProgramError(f"torch.compile: the backend hostweave has no setting {unknown[0]!r}; there are options= and target=")
    if not isinstance((options or {}).get("options"), Options | None):
        raise ProgramError('torch.compile: options= is a dict of settings here; write options={"options": hw.Options(...)}')
    return dict(options or {})
