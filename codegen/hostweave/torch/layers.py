"""Finds equal modules of a list, such as the layers of a model."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from hostweave.base.names import claim_unique
from hostweave.torch.graph import Graph
from hostweave.torch.nodes import is_size, op_of, size_of


@dataclass(eq=False)
class Layer:
    """A repeated module with consecutive nodes. The nodes read `arguments`, which are nodes outside of the module. Nodes outside read
    `results`, or the graph returns `results`."""

    path: str
    name: str
    nodes: list[Node]
    arguments: list[Node]
    results: list[Node]
    like: Layer = field(init=False)  # the first of the equal layers
    chain: list[Node | None] = field(default_factory=list)  # for each argument: the result that the next layer takes as this argument

    def path_inside(self, path: str) -> str:
        """Removes the path of the layer from a path such as `gradient.layers.0.up.weight`."""
        return f".{path}.".replace(f".{self.path}.", ".").strip(".")

    @property
    def taken(self) -> list[tuple[Node, Node | None]]:
        """Pairs each argument with the first layer's entry in `chain`."""
        return list(zip(self.arguments, self.like.chain, strict=True))

    def written(self, graph: Graph) -> dict[int, int]:
        """Maps the index of each written argument to the index of the result that is the argument's new value."""
        positions = {node: number for number, node in enumerate(self.results)}
        pairs = ((number, graph.written.get(argument)) for number, argument in enumerate(self.arguments))
        return {number: positions[value] for number, value in pairs if value in positions}


def repeated_layers(graph: Graph) -> list[Layer]:
    """Modules of lists, such as `layers.0`, that have consecutive nodes, and share a `_signature` with another of these modules."""
    paths = paths_of_layers(graph.nodes, derived_apart=bool(graph.update))
    graph.nodes = _together(graph.nodes, paths)
    grouped: dict[Path, list[Node]] = {}
    for node in graph.nodes:
        if node in paths:
            grouped.setdefault(paths[node], []).append(node)
    position = {node: number for number, node in enumerate(graph.nodes)}
    layers, firsts = [], dict[object, Layer]()
    for path, nodes in grouped.items():
        if position[nodes[-1]] - position[nodes[0]] != len(nodes) - 1:
            continue  # nodes of other modules are between the nodes
        layer = _layer(graph, path, nodes)
        layer.like = firsts.setdefault(_signature(graph, layer), layer)
        layers.append(layer)
    repeated = alike(layers)
    taken = set[str]()
    made = {result: (layer.like, number) for layer in layers for number, result in enumerate(layer.results)}
    for layer in repeated:
        origins = [made.get(argument, (None, 0)) for argument in layer.arguments]
        chain = [layer.like.results[number] if like is layer.like else None for like, number in origins]
        layer.like.chain = chain if any(chain) else layer.like.chain or chain
        if layer.like is layer:
            layer.name = claim_unique(layer.name, taken)
    return repeated


def alike(layers: list[Layer]) -> list[Layer]:
    """Layers that are equal to another layer."""
    counts = Counter(id(layer.like) for layer in layers)
    return [layer for layer in layers if counts[id(layer.like)] > 1]


class Path(NamedTuple):
    """Path and class of a module of a list. In a whole training step, the derivative of a module has a separate Path."""

    path: str
    kind: str
    is_derived: bool


def paths_of_layers(nodes: list[Node], derived_apart: bool = False) -> dict[Node, Path]:
    """Maps nodes, except the nodes in `_shared`, to the outermost list elements that contain them. A node without a module, such as a sum
    of gradients, belongs to the module of the operand that is computed last."""
    found: dict[Node, Path] = {}
    position = {node: number for number, node in enumerate(nodes)}
    for node in nodes:
        own = node.meta.get("nn_module_stack")
        stack = own or node.meta.get("fwd_nn_module_stack") or {}
        for path, kind in stack.values():
            if path.rpartition(".")[2].isdigit():
                found[node] = Path(path, kind if isinstance(kind, str) else kind.__name__, derived_apart and not own)
                break
        before = [argument for argument in node.all_input_nodes if argument in position]
        if not stack and before and (last := max(before, key=position.__getitem__)) in found:
            found[node] = found[last]
    for node in _shared(nodes, found):
        del found[node]
    return found


def _shared(nodes: list[Node], paths: Mapping[Node, Path]) -> set[Node]:
    """Values, such as the bias of a mask, that one module computes from values outside, and other modules use in the same ops. Values of a
    derivative are not shared."""
    free, shared = set[Node](), set[Node]()
    for node in nodes:
        is_own = node in paths and node.meta.get("nn_module_stack")
        if is_own and all(argument not in paths or argument in free for argument in node.all_input_nodes):
            free.add(node)
    for node in reversed([node for node in nodes if node in free]):
        uses: dict[Path, list[object]] = {}
        for user in node.users:
            if user in paths and paths[user].is_derived == paths[node].is_derived:
                uses.setdefault(paths[user], []).append(user.target)
        used_alike = len(uses) > 1 and all(targets == uses.get(paths[node]) for targets in uses.values())
        if used_alike or not shared.isdisjoint(node.users):
            shared.add(node)
    return shared | {node for node in nodes if node.target is operator.getitem and node.args[0] in shared}


def _together(nodes: list[Node], groups: Mapping[Node, Path]) -> list[Node]:
    """Sorts nodes so that groups are consecutive. Splits a group if the group depends on a node outside, and this node on the group."""
    groups = dict(groups)
    while True:
        members: dict[Any, list[Node]] = {}
        for node in nodes:
            members.setdefault(groups.get(node, node), []).append(node)
        order, first = list(members), {key: number for number, key in enumerate(members)}
        before = {
            key: {of for node in of_key for a in node.all_input_nodes if (of := groups.get(a, a)) in members and of != key}
            for key, of_key in members.items()
        }
        sorter = TopologicalSorter(before)
        with suppress(CycleError):  # the nodes before a cycle are still sorted
            sorter.prepare()
        ready, sorted_ = [first[key] for key in sorter.get_ready()], list[Any]()
        heapify(ready)
        while ready:
            sorted_.append(key := order[heappop(ready)])
            sorter.done(key)
            for other in sorter.get_ready():
                heappush(ready, first[other])
        if len(sorted_) == len(members):
            return [node for key in sorted_ for node in members[key]]
        done = set(sorted_)
        torn = next(key for key in order if key not in done and len(members[key]) > 1)
        groups = {node: key for node, key in groups.items() if key != torn}


def _layer(graph: Graph, of: Path, nodes: list[Node]) -> Layer:
    inside, arguments, computed = set(nodes), dict[Node, None](), set(graph.nodes)
    for node in nodes:
        for argument in node.all_input_nodes:
            if argument not in inside and (argument in graph.names or argument in computed):
                arguments[argument] = None
    outside = {argument for node in graph.nodes if node not in inside for argument in node.all_input_nodes} | set(graph.outputs)
    results = [node for node in nodes if node in outside]
    name = snake_case(of.kind.rpartition(".")[2])
    return Layer(of.path, f"{name}_backward" if of.is_derived else name, nodes, list(arguments), results)


def snake_case(name: str) -> str:
    """Converts LlamaDecoderLayer to llama_decoder_layer."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _signature(graph: Graph, layer: Layer) -> object:
    """Key of a layer: layers with equal keys can share a function."""
    number: dict[Node, str] = {node: f"%{i}" for i, node in enumerate(layer.nodes)}
    number |= {node: f"@{i}" for i, node in enumerate(layer.arguments)}
    stated = {of: axes for of, axes in graph.layouts.outputs.items() if of.startswith(f"{layer.path}.") or of == layer.path}

    def of(node: Node) -> object:
        if node in number:
            return number[node]
        value: Any = graph.constants.get(node, node.meta.get("val"))
        if is_size(node):
            return size_of(value)
        if isinstance(value, torch.Tensor) and (node in graph.uniform or value.numel() == 1):
            return "constant", graph.uniform.get(node, value.flatten()[0].item()), tuple(value.shape)
        return node.name, str(value)[:20]

    types = graph.input_types
    return (
        tuple((op_of(node), str(pytree.tree_map_only(Node, of, (node.args, node.kwargs)))) for node in layer.nodes),
        tuple(str(types[graph.names[node]] if graph.is_held(node) else graph.type_of(node)) for node in layer.arguments),
        tuple((number[node], graph.placed.get(node)) for node in layer.results),
        tuple((name.removeprefix(layer.path), axes) for name, axes in stated.items()),
        tuple(shared for node in layer.arguments if (shared := graph.names.get(node)) in graph.bound),
        tuple(layer.written(graph).items()),
    )
