"""Values that a forward graph saves for its backward graph, and the names of the values."""

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from hostweave.torch.layers import Path, paths_of_layers
from hostweave.torch.nodes import is_view, name_of, op_of, role_of


def take_views_again(made: GraphModule, sources: Set[str]) -> None:
    """Makes the backward pass recompute views and paddings of the inputs `sources`, because saved views and paddings would be copies."""
    views = {node for node in made.graph.nodes if node.name in sources}
    for node in made.graph.nodes:
        if (_is_view(node) or op_of(node) == "constant_pad_nd.default") and node.all_input_nodes and views.issuperset(node.all_input_nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            views.add(node)


def _is_view(node: Any) -> bool:
    return is_view(node) or (node.target is operator.getitem and node.args[0].op == "placeholder")


def save_sources(whole: GraphModule, saved: Sequence[Node]) -> bool:
    """Saves a tensor in place of its saved views, because saved views are copied. The views must have at least as many elements in total as
    the tensor, or the tensor must be saved anyway. Returns False if nothing changes."""
    made: dict[str, Any] = {node.name: node for node in whole.graph.nodes}
    views: dict[Any, list[list[Any]]] = {}
    for node in (made[node.name] for node in saved):
        chain: list[Any] = []
        while _is_view(node) and _splits(node):
            chain.append(node)
            node = node.all_input_nodes[0]
        views.setdefault(node, []).append(chain)
    found = False
    for source, chains in views.items():
        size = sum(chain[0].meta["val"].numel() for chain in chains if chain)
        if any(chains) and ([] in chains or size >= source.meta["val"].numel()):
            found = True
            source.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
            for node in (node for chain in chains for node in chain):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return found


def save_compared(whole: GraphModule, backward: GraphModule) -> bool:
    """Saves floats that the backward graph tests for equality, such as the operand of `amax`, because a recomputed value may be rounded
    differently. Returns False if nothing changes."""
    names = set[str]()
    for test in (node for node in backward.graph.nodes if op_of(node) in ("eq.Tensor", "ne.Tensor")):
        for operand in test.all_input_nodes:
            while _is_view(operand):
                operand = operand.all_input_nodes[0]
            if operand.meta["val"].is_floating_point() and operand.op != "placeholder" and "nn_module_stack" in operand.meta:
                names.add(operand.name)
    for node in (node for node in whole.graph.nodes if node.name in names):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return bool(names)


def _splits(view: Any) -> bool:
    """True if the backward pass can recompute a view without a copy. False for a reshape of another view that may merge dims. Also
    False for an expansion, because layers may share the expanded tensor, such as the bias of a mask."""
    if op_of(view) != "view.default":
        return op_of(view) != "expand.default"
    shape, given = view.meta["val"].shape, view.args[0].meta["val"].shape
    return shape[: len(given) - 1] == given[:-1] or not _is_view(view.args[0])


def read_rows(made: GraphModule) -> None:
    """Makes the backward pass read the result of an attention as rows, as the next linear does, so that only the rows are saved."""
    found: list[Any] = made.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int)
    for turned in found:
        heads, *dims = turned.args
        is_result = heads.target is operator.getitem and op_of(heads.args[0]) == "hostweave.attention.default"
        rows = next((user for user in turned.users if op_of(user).removeprefix("_unsafe_") == "view.default"), None)
        shape = turned.meta["val"].shape
        if not is_result or rows is None or rows.meta["val"].shape[:-1] != shape[:-2]:
            continue
        with made.graph.inserting_after(rows):
            split = made.graph.call_function(torch.ops.aten.view.default, (rows, [*rows.args[1][:-1], *shape[-2:]]))
        with made.graph.inserting_after(split):
            again = made.graph.call_function(torch.ops.aten.transpose.int, (split, *dims))
        split.meta, again.meta = dict(turned.meta), dict(heads.meta)
        heads.replace_all_uses_with(again, delete_user_cb=lambda user, own=turned: user is not own)


def save_alike(whole: GraphModule, saved: Sequence[Node]) -> bool:
    """Makes equal layers save the values that most of the layers save, because torch's minimum cut may choose different values for each.
    Returns False if nothing changes."""
    layers: dict[Path, list[Node]] = {}
    of_forward = [node for node in whole.graph.nodes if node.op == "call_function" and node.meta.get("nn_module_stack")]
    for node, path in paths_of_layers(of_forward).items():
        layers.setdefault(path, []).append(node)
    alike: dict[tuple[str, ...], list[list[Node]]] = {}
    for nodes in reversed(layers.values()):
        alike.setdefault(tuple(map(op_of, nodes)), []).append(nodes)
    names, others = {node.name for node in saved}, list[Node]()
    for group in alike.values():
        positions = [tuple(number for number, node in enumerate(nodes) if node.name in names) for nodes in group]
        ((usual, _),) = Counter(positions).most_common(1)
        others += [nodes[number] for nodes, own in zip(group, positions, strict=True) if own != usual for number in usual]
    for node in others:
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return bool(others)


def saved_names(saved: list[Node]) -> dict[Node, str]:
    """Names of saved values, in the order of `_in_rows`. In repeated layers, names end with the layer's number, so that the arguments of a
    layer form a struct."""
    counts: Counter[str] = Counter()
    names = {}
    for node in saved:
        base = name_of(f"saved.{role_of(node)}")
        counts[base] += 1
        words = base.split("_")
        at = next((i for i in range(len(words), 0, -1) if not words[i - 1].isdigit()), len(words))
        names[node] = "_".join([*words[:at], *([f"v{counts[base]}"] if counts[base] > 1 else []), *words[at:]])
    return _in_rows(names)


def _in_rows(names: Mapping[Node, str]) -> dict[Node, str]:
    """Sorts saved values. A kind is a name without the layer's number. Kinds with the most values come first, sorted by layer. All other
    kinds follow, sorted by kind."""
    found = {node: re.search(r"_(\d+)((?:_\d+)*)$", name) for node, name in names.items()}
    kinds = {node: names[node][: match.start()] + match[2] if match else names[node] for node, match in found.items()}
    counts = Counter(kinds.values())
    most = max(counts.values(), default=0)

    def position(node: Node) -> tuple[str, int]:
        match = found[node]
        return kinds[node] if counts[kinds[node]] < most else "", int(match[1]) if match else 0

    return {node: names[node] for node in sorted(names, key=position)}
