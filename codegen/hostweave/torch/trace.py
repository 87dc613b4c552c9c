"""Translates a graph of ATen ops to a fusion. Equal layers become calls of one function."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

import hostweave as hw
from hostweave.base.errors import ProgramError, stated_location
from hostweave.base.names import claim_unique, unique_name
from hostweave.fusion_ir.frontend.tracing import BlockFunction
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.passes.fusion.drop_unit_axes import drop_unit_axes
from hostweave.passes.fusion.insert_reshards import insert_reshards
from hostweave.passes.fusion.merge_contractions import merge_contractions
from hostweave.passes.fusion.propagate_sharding import propagate_sharding
from hostweave.torch.aten import DTYPES, Result, computed, full, resharded
from hostweave.torch.graph import Graph, refused
from hostweave.torch.layers import Layer, alike, repeated_layers
from hostweave.torch.nodes import ATTENTION, location, modules_of, name_of, op_of, role_of, shape_of, size_of
from hostweave.torch.patterns import consecutive, repeated, rotated, word_of_constant_mask
from hostweave.types.tensor import TensorType

NodeValues = dict[Node, Any]


def traced(graph: Graph, name: str, options: Options) -> Fusion:
    return _fusion(graph, name, _starts(graph, name, options))


def traced_function(graph: Graph, name: str, options: Options) -> tuple[BlockFunction, list[TensorType]]:
    """Translates a graph to a function. Also returns the types of the results."""
    starts = _starts(graph, name, options, f"{name}_")
    outputs = [node for node in graph.outputs if node not in graph.constants]
    types = [graph.type_of(node) for node in outputs]
    if graph.mesh.size > 1:
        flat = _with_shardings(_fusion(graph, name, {}, {}), options)
        shardings = [flat.types[output].dims for output in flat.outputs]
        types = [replace(type, dims=dims) for type, dims in zip(types, shardings, strict=True)]
    inputs: dict[str, Any] = {**graph.input_types}
    return hw.block(**inputs)(_program(graph, name, starts)), types


LayerStarts = Mapping[Node, tuple[Layer, BlockFunction | Layer]]  # first node -> (layer, function or an equal layer to take results from)


def _starts(graph: Graph, name: str, options: Options, prefix: str = "") -> LayerStarts:
    """Layers by first node, with the functions of repeated layers. Names of functions begin with `prefix`."""
    layers = repeated_layers(graph)
    types = _types_between(graph, name, layers, options) if layers else {}
    layers = alike([layer for layer in layers if _takes_the_same(graph, layer, types)])
    functions = {id(layer.like): _function(graph, layer.like, types, prefix) for layer in layers}
    return {layer.nodes[0]: (layer, functions[id(layer.like)]) for layer in layers}


def _fusion(graph: Graph, name: str, starts: LayerStarts, names: dict[Node, str] | None = None) -> Fusion:
    """Records the graph as a fusion. If `names` is given, the fusion has no update and no donated inputs."""
    update = None if names is not None else graph.update
    types: dict[str, Any] = {**(update.types if update else graph.input_types)}
    donated = {} if names is not None else graph.donated
    return hw.fusion(mesh=graph.mesh, donate=donated, **types)(_program(graph, name, starts, names))


def _program(graph: Graph, name: str, starts: LayerStarts, names: dict[Node, str] | None = None) -> Callable[..., tuple[hw.Tensor, ...]]:
    """Function that records a graph. With `names`, the function omits the update, and maps each node in `names` to the name of its value.
    The name is "" for an input. Nodes may share a value."""
    update, names = (None if names is not None else graph.update), names or {}

    def program(**inputs: hw.Tensor) -> tuple[hw.Tensor, ...]:
        values: NodeValues = {node: inputs[of] for node, of in graph.names.items()}
        skipped: set[Node] = set()
        for node in graph.nodes:
            if node in starts:
                layer, function = starts[node]
                with stated_location(location(node)):
                    if isinstance(function, Layer):
                        results: Any = tuple(values[result] for result in function.results)
                    else:
                        results = function(*(values[argument] for argument in layer.arguments))
                values.update(zip(layer.results, results if isinstance(results, tuple) else (results,), strict=True))
                skipped.update(layer.nodes)
            elif node not in skipped:
                _run(graph, values, node)
        outputs = [(number, node) for number, node in enumerate(graph.outputs) if node not in graph.constants]
        made = [_placed(graph, values[node], node, number) for number, node in outputs]
        for at, (_, node) in enumerate(() if update else outputs):
            if any(made[at] is other for other in made[:at]):  # for example a result that is also saved; the copy gets the second name
                with stated_location(location(node)):
                    made[at] = hw.copy(made[at])
        for (number, node), value in zip(outputs, made, strict=True):
            own = values[node]  # an update reads the reshard of a gradient, and omits the equal reshard in `made`
            _name(own if update and own._value.pinned else value, graph.labels[number] if graph.labels else graph.keys.get(node, ""))
        for number, node in enumerate(names):
            if values[node]._op is not None:
                names[node] = values[node]._name or f"between_{number}"
                values[node].named(names[node])
        if update:
            made[-update.gradients :] = update.compute(inputs, made[-update.gradients :])
        if not made:
            made.append(full(Result((torch.float32,), ((1,),), next(iter(inputs.values()))), 0))
        return tuple(made)

    program.__name__ = name
    return program


def _name(value: hw.Tensor, path: str) -> None:
    """Names a value after a path such as `gradient.head.weight`, with a number if an argument has the name."""
    if name_of(path).isidentifier() and value._op is not None:
        value.named(unique_name(name_of(path), value._trace.named))


def _placed(graph: Graph, value: hw.Tensor, node: Node, number: int) -> hw.Tensor:
    """Reshards an output to its sharding in `graph.results`. A new value of a written tensor gets the sharding of this tensor later."""
    axes = graph.default_axes(node) if graph.results is None else graph.results[number]
    with stated_location(location(node)):
        return value if axes is None or number < len(graph.written) else resharded(value, axes)


def _value(graph: Graph, values: NodeValues, node: Node, user: Node) -> Any:
    if node in values:
        if node in graph.gathered and tuple(dim.axes for dim in values[node].type.dims) != graph.gathered[node]:
            values[node] = resharded(values[node], graph.gathered[node])
        return values[node]
    value = graph.constants.get(node, node.meta.get("val"))
    of = next(value for value in values.values() if isinstance(value, hw.Tensor))
    if isinstance(value, torch.Tensor) and node in graph.uniform:
        return full(Result((value.dtype,), (shape_of(value),), of), graph.uniform[node])
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        others = [values[other] for other in user.all_input_nodes if isinstance(values.get(other), hw.Tensor)]
        adds_dims = all(other.ndim < value.ndim for other in others)
        is_compared = getattr(user.meta.get("val"), "dtype", None) == torch.bool  # the dtype and the dims of an operand matter
        keeps_dtype = is_compared and any(other.dtype != DTYPES.get(value.dtype) for other in others)
        is_pointwise = not isinstance(user.target, torch._ops.OpOverload) or torch.Tag.pointwise in user.target.tags
        is_number = not adds_dims and is_pointwise and not keeps_dtype  # an op that is not pointwise may require a tensor
        return value.item() if is_number else full(Result((value.dtype,), (shape_of(value),), of), value.item())
    if isinstance(value, torch.SymInt):
        return size_of(value)
    if isinstance(value, torch.Tensor):
        raise ProgramError(f"{op_of(user)}: {node.name} is a constant of {tuple(value.shape)} that is not an input", location(user))
    return value


def _run(graph: Graph, values: NodeValues, node: Any) -> None:
    if op_of(node).startswith("_assert"):
        return
    if node.target is operator.getitem:
        values[node] = values[node.args[0]][node.args[1]]
        return
    op, args, kwargs = op_of(node), list(node.args), dict(node.kwargs)
    if word := word_of_constant_mask(node, graph.constants):
        args[3:] = [None, *args[4:5], *(() if word == "none" else ([0.0] if len(args) < 5 else []) + [True])]
    if op == ATTENTION and (pair := [repeated(argument) for argument in args[1:3]]) and all(pair):
        args[1:3], kwargs["enable_gqa"] = pair, True
    if found := rotated(node, graph.fixed):
        op, args, kwargs = "hostweave.rotary.default", [*found], {}
    if update := consecutive(node):
        op, args = "hostweave.update.default", [*update]
    anything = next(value for value in values.values() if isinstance(value, hw.Tensor))
    with stated_location(location(node)):
        try:
            args, kwargs = pytree.tree_map_only(Node, lambda n: _value(graph, values, n, node), (args, kwargs))
            made = _stated(graph, node, computed(op, node, args, kwargs, shape_of, anything))
        except ProgramError as error:
            raise refused(error, [node]) from error.__cause__
    if isinstance(made, hw.Tensor) and made._op is not None and made._variable is None and (word := _word(node)):
        made._variable = word
    values[node] = made


def _stated(graph: Graph, node: Node, made: Any) -> Any:
    for axes in graph.stated(node, made):
        made = resharded(made, axes)
    return resharded(made, graph.placed[node]) if node in graph.placed else made


def _word(node: Node) -> str | None:
    """Variable name of a module's result: the module's name. None for a value that is no module's result."""
    paths = modules_of(node)
    if not paths or any(path == paths[-1] for user in node.users for path in modules_of(user)):
        return None
    word = paths[-1].rpartition(".")[2]
    return word if word.isidentifier() and word.isascii() else None


# --- inferred shardings -----------------------------------------------------------------------------------------------


def state_written(graph: Graph, name: str, options: Options) -> None:
    """Shards each written argument that is not in the plan, such as a cache, like the value that is written to the argument."""
    sources = {
        graph.names[node]: source
        for node, value in graph.written.items()
        if graph.origins[node].kind == "argument" and graph.names[node] not in graph.layouts.inputs and value not in graph.constants
        if (source := (consecutive(value) or (None, value))[1]) not in graph.constants  # the update of a cache, or the whole new value
    }
    if graph.mesh.size == 1 or not sources:
        return
    types = _inferred(graph, name, {}, {node: "" for node in sources.values() if node not in graph.names}, options)
    for argument, node in sources.items():
        of = types.get(node) or graph.input_types.get(graph.names.get(node, ""))
        if of is not None and any(dim.axes for dim in of.dims):
            graph.layouts.inputs[argument] = tuple(dim.axes for dim in of.dims)
    graph.__dict__.pop("input_types", None)


def _types_between(graph: Graph, name: str, layers: list[Layer], options: Options) -> dict[Node, TensorType]:
    """Infers the types of values between layers from a program without functions, with only the first two of several equal layers. The
    results of the second layer represent those of later layers."""
    if graph.mesh.size == 1:
        return {}
    alike: dict[int, list[Layer]] = {}
    for layer in layers:
        alike.setdefault(id(layer.like), []).append(layer)
    starts = {layer.nodes[0]: (layer, same[1]) for same in alike.values() for layer in same[2:]}
    written = [layer for same in alike.values() for layer in same[:2]]
    names = {node: "" for layer in written for node in (*layer.arguments, *layer.results) if node not in graph.names}
    return _inferred(graph, name, starts, names, options)


def _inferred(graph: Graph, name: str, starts: LayerStarts, names: dict[Node, str], options: Options) -> dict[Node, TensorType]:
    """Infers the types of nodes in `names` from a program without functions."""
    types = _with_shardings(_fusion(graph, name, starts, names), options).types
    return {node: replace(types[name], partial=None, mesh=graph.submesh) for node, name in names.items() if name in types}


def _with_shardings(fusion: Fusion, options: Options) -> Fusion:
    for apply in (drop_unit_axes, merge_contractions, propagate_sharding, insert_reshards):
        fusion = apply(fusion, options)
    return fusion


def _takes_the_same(graph: Graph, layer: Layer, types: Mapping[Node, TensorType]) -> bool:
    """True if each program input that a layer takes has the type of the layer result that later equal layers take instead."""
    taken = [(graph.input_types[graph.names[node]], result) for node, result in layer.taken if node in graph.names]
    return all(types.get(result, own) == own for own, result in taken if result is not None)


def _function(graph: Graph, layer: Layer, types: Mapping[Node, TensorType], prefix: str) -> BlockFunction:
    """Function of equal layers. Values between layers are sharded like the results of the first layer."""
    taken = set[str]()
    names: list[str] = []
    inputs: dict[str, Any] = {}
    stated = graph.input_types
    for node, result in layer.taken:
        names.append(claim_unique(_argument_name(graph, layer, node, result is not None), taken))
        inputs[names[-1]] = stated[graph.names[node]] if node in graph.names else types.get(node, graph.type_of(node))
    inputs |= {name: types[result] for name, (_, result) in zip(names, layer.taken, strict=True) if result is not None and result in types}

    def function(**arguments: hw.Tensor) -> tuple[hw.Tensor, ...]:
        values: NodeValues = dict(zip(layer.arguments, (arguments[name] for name in names), strict=True))
        for node in layer.nodes:
            _run(graph, values, node)
        for node in layer.results if graph.labels else ():
            role = role_of(node) if "nn_module_stack" in node.meta else "gradient.x" * (node in layer.chain)
            _name(values[node], layer.path_inside(gradients.get(node, role)))
        return tuple(values[node] for node in layer.results)

    gradients = {node: label for node, label in zip(graph.outputs, graph.labels, strict=False) if label.startswith("gradient.")}
    function.__name__ = f"{prefix}{layer.name}"
    donated = {names[argument]: result for argument, result in layer.written(graph).items()}
    return hw.block(donate=donated, **inputs)(function)


def _argument_name(graph: Graph, layer: Layer, node: Node, is_carried: bool) -> str:
    """Name of an argument in the function of a layer. A carried argument is a result of the layer before."""
    name = graph.names.get(node, "")
    if name in graph.parameters:
        role = graph.parameters[name]
    elif op_of(node) == "select.int" and node.args[0] is graph.seeds:
        role = f"{modules_of(next(user for user in node.users if user in layer.nodes))[-1]}.seed"
    elif is_carried:
        role = "gradient" if any("fwd_nn_module_stack" in one.meta for one in layer.nodes) else "x"
    else:
        role = node.meta.get("role", "") if name else role_of(node)
    inside = re.sub(rf"^{re.escape(layer.path.rpartition('.')[0])}\.\d+\.", "", role)
    if inside == "output" and role != f"{layer.path}.output":
        inside = "x"
    return name_of(inside) or re.sub(r"(_\d+)+$", "", name)
